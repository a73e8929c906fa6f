"""The store on NCCL: sums over the GPUs of one process, or of processes with one GPU each.

A key is on the host or on GPUs, as its value. A key that was initialised on the host moves to the GPUs when
values on GPUs are pushed to it. In a job of several processes, keys on the host are summed through the GPU of
each process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ....arrays.grouping import Group, Key
from ....devices import arrays
from ....observe.counters import FRAME, MEMORY, MOVING, SUMMING, WAITING
from ....settings.options import StoreConfig
from ...device.arguments import CallerStreams, KeyItem
from ...device.host_and_gpu import HostAndGpuBackend, Sent
from ...device.keys import DeviceKey
from ...entry import StoredKey
from ..backend import AllReduceBackend, names_text
from ..engine import Finish, do_nothing
from .engine import NcclEngine
from .keys import NcclGpus, NcclKey


class NcclBackend(HostAndGpuBackend, AllReduceBackend):
    """See `kvstore.stores.protocol.Backend`."""

    engine: NcclEngine
    _beginning = WAITING

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config, NcclEngine(config))
        self._gpus = NcclGpus(self.engine)
        self._on_gpu: dict[Key, NcclKey] = self._gpus.entries
        self._order: dict[Key, None] = {}  # all keys, in the order of their init

    # -------------------------------------------------------------------------------------------- verbs

    def init(self, groups: list[Group]) -> None:
        """Store rank 0's values; all workers must pass the same keys, on the same kind of device."""
        new = [(key, values) for key, values in groups if values]
        there = [(key, values) for key, values in new if arrays.any_on_device(values)]
        for key, values in new:
            self._check_new(key, values)
        names = {key for key, _ in there}
        host = [(key, values) for key, values in new if key not in names]
        first = len(self._order)
        numbers = {key: first + i for i, (key, _) in enumerate(new)}
        if host:
            super().init(host)
            for key, _ in host:
                self._entries[key].renumber(numbers[key])
        try:
            if there:
                self._init_on_gpus(there, numbers)
        except BaseException:
            super().discard([key for key, _ in host])
            raise
        self._order.update(dict.fromkeys(key for key, _ in new))

    def _init_on_gpus(self, new: list[Group], numbers: dict[Key, int]) -> None:
        self._check_process()
        streams = CallerStreams(values[0] for _, values in new)
        seen = [(key, numbers[key], self._gpus.checked_value(key, values[0], streams)) for key, values in new]
        if self.num_workers > 1:
            meaning = self._calls_text([(f"{key!r} on a GPU", value) for key, _, value in seen])
            self.engine.compare_calls(
                "init", f"init, broadcast or load of {names_text([str(k) for k, _ in new])}", meaning
            )
        self._gpus.add(seen, streams)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite and initialise keys with rank 0's values; all workers must load the same keys."""
        mine = [(key, values[0]) for key, values in groups if key in self._on_gpu]
        super().assign([(key, values) for key, values in groups if key not in self._on_gpu])
        for key, value in self._values_of_rank_0(mine):
            self._gpus.assign(self._on_gpu[key], value)

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Copy the values to the outs."""
        streams = CallerStreams(out for _, outs in groups for out in outs)
        host, sent = self._from_host(groups, streams)
        items = self._gpu_items([], {k: self._dense_outs(k, o, ignore_sparse) for k, o in groups}, streams)
        super().pull(host, ignore_sparse)
        self._send_values(sent, streams)
        begin = self._counters.begin()
        self._gpus.pull(items, streams)
        self._counters.end_works(MOVING, begin, MEMORY, items, 0)

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Callable[[], None]:
        """Enqueue the work of GPUs on the caller's streams now.

        Return a callable that does the host's part.
        """
        if verb == "pull" and self._touches_gpus(arguments[0]):
            self.pull(*arguments)
            return do_nothing
        return super().begin(verb, arguments, priority)

    def start_push(self, groups: list[Group], priority: int = 0) -> Finish:
        """Start the sums; return a callable that waits for those of the host."""
        if not self._touches_gpus(groups):
            return super().start_push(groups, priority)
        return self._start_push(groups, {}, priority)

    def _start_pushpull(self, groups: list[Group], outs: list[Group] | None, priority: int = 0) -> Finish:
        targets = groups if outs is None else outs
        if not self._touches_gpus(groups) and not self._touches_gpus(targets):
            return super()._start_pushpull(groups, outs, priority)
        return self._start_push(groups, dict(targets), priority)

    def _start_push(self, groups: list[Group], targets: dict[Key, list[Any]], priority: int) -> Finish:
        """Check all arguments, then start on the host and on the GPUs."""
        self._check_process()
        streams = CallerStreams([a for _, own in (*groups, *targets.items()) for a in own])
        mine = [(key, values) for key, values in groups if self._goes_to_gpu(key, values)]
        names = {key for key, _ in mine}
        host = [(key, values) for key, values in groups if key not in names]
        self._check_sources(host)
        rest, sent = self._from_host([(k, outs) for k, outs in targets.items() if k not in names], streams)
        outs = {key: self._dense_outs(key, own, True) for key, own in targets.items()}
        items = self._gpu_items(mine, outs, streams)
        for key, values in mine:
            self._move_to_gpu(key, values, streams)
        if self._is_guest:
            self._compare_new_keys_on_gpus()
        finish = super()._start_pushpull(host, rest, priority) if rest else super().start_push(host, priority)
        begin = self._counters.begin()
        self._gpus.push(items, streams)
        self._counters.end_works(SUMMING, begin, FRAME, items)
        if self._is_guest:
            self._gpus.hold_until_complete()
        return partial(self._finish_sums, finish, sent, streams)

    def _finish_sums(self, finish: Finish, sent: Sent, streams: CallerStreams) -> None:
        finish()
        self._send_values(sent, streams)

    # ---------------------------------------------------------------------------- keys that pass through

    def _has_key(self, key: Key) -> bool:
        """Return whether a key was initialised."""
        return key in self._order

    def _temporary_store(self, groups: list[Group]) -> AllReduceBackend:
        """As in the base class, also for keys on GPUs."""
        there = [(key, values) for key, values in groups if self._comes_from_gpu(key, values)]
        names = {key for key, _ in there}
        guest = super()._temporary_store([(key, values) for key, values in groups if key not in names])
        assert isinstance(guest, NcclBackend)
        guest._gpus = NcclGpus(self.engine)
        guest._on_gpu = guest._gpus.entries
        guest._order = dict.fromkeys(key for key, _ in groups)
        for i, (key, values) in enumerate(there):
            self._check_kind(key)
            guest._gpus.pass_through(key, i, values[0])
        return guest

    def side(self) -> AllReduceBackend:
        """As in the base class; arrays of side keys are on the host."""
        side = super().side()
        assert isinstance(side, NcclBackend)
        side._gpus = NcclGpus(self.engine)
        side._on_gpu, side._order = side._gpus.entries, {}
        return side

    def _compare_new_keys_on_gpus(self) -> None:
        """Compare the keys on GPUs that are summed without init, in all workers."""
        if self._on_gpu and self.num_workers > 1:
            named = [(f"{key!r} on a GPU", own.first.like) for key, own in self._on_gpu.items()]
            self.engine.compare_calls(
                "sum", f"the sum of {names_text([str(key) for key in self._on_gpu])}", self._calls_text(named)
            )

    # ------------------------------------------------------------------------------------ host and GPUs

    def _touches_gpus(self, groups: list[Group]) -> bool:
        """Return whether a key or an array of a call is on a GPU."""
        return any(key in self._on_gpu or arrays.any_on_device(values) for key, values in groups)

    def _goes_to_gpu(self, key: Key, values: list[Any]) -> bool:
        """Return whether a push to a key is done on GPUs: the key is there, or moves there."""
        comes = self._comes_from_gpu(key, values)
        if key not in self._on_gpu:
            self._key_entry(key)
        return comes or key in self._on_gpu

    def _gpu_items(
        self, groups: list[Group], outs: dict[Key, list[Any]], streams: CallerStreams
    ) -> list[KeyItem]:
        """Check the arguments whose key is on GPUs, or only pulled from there."""
        pushed = dict(groups)
        only = [key for key in outs if key in self._on_gpu and key not in pushed]
        items = []
        for key in (*pushed, *only):
            like: Any = self._gpu_copy(key) if key in self._on_gpu else self._key_entry(key)
            items.append(self._gpus.item(like, pushed.get(key, []), outs.get(key, []), streams))
        return sorted(items, key=lambda item: item.entry.number)

    def _move_to_gpu(self, key: Key, values: list[Any], streams: CallerStreams) -> None:
        """Move a key of the host to the GPU of its first value."""
        if key in self._on_gpu:
            return
        entry: StoredKey = self._key_entry(key)
        device = arrays.device_of(values[0])
        assert device is not None
        self._gpus.add_moved(key, entry.number, entry.value, device, streams.stream_of(device))
        del self._entries[key]

    # ----------------------------------------------------------------------------------------- inspection

    def fetch(self, key: Key) -> Any:
        """Return the value on the host, for a file."""
        if key in self._on_gpu:
            self.engine.wait_for_stream(self._gpu_copy(key).tail, f"the value of key {key!r}")
        return super().fetch(key)

    def _gpu_copy(self, key: Key) -> DeviceKey:
        return self._on_gpu[key].first

    def _gpu_places(self, key: Key) -> list[tuple[str, int]]:
        copies = self._on_gpu[key].copies.items()
        return [(f"worker {self.rank} cuda:{device}", copy.nbytes) for device, copy in copies]
