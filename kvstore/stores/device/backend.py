"""The store of one process with values that may be on GPUs.

A key of the host moves to the GPU of the first value when values on GPUs are pushed to it, and stays there.
`LocalBackend` handles the keys on the host: a process without an array on a GPU never imports CUDA.
Row-sparse keys stay on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...arrays.grouping import Group, Key
from ...arrays.sparse import RowSparseArray
from ...compression import Codec
from ...devices import arrays
from ...devices.arrays import DeviceView
from ...errors import CapabilityError, KVStoreError
from ...optimizer import Updater
from ...settings.options import StoreConfig
from ..entry import Array, StoredKey
from ..local.bound import BoundCall, GeneralCall
from ..update import UserUpdater
from .arguments import CallerStreams, KeyItem
from .host_and_gpu import HostAndGpuBackend
from .keys import DeviceKey

if TYPE_CHECKING:
    from ...optimizer.states import StatesContent

#: A key's part of a call: its number, by which calls of the user's code are ordered, and a function.
Part = tuple[int, Callable[[], None]]


class DeviceBackend(HostAndGpuBackend):
    """See `kvstore.stores.protocol.Backend`."""

    can_compress = True

    def __init__(self, config: StoreConfig) -> None:
        #: The keys on GPUs; None until the first array on a GPU.
        self._gpus: Any = None
        self._order: dict[Key, None] = {}  # all keys, in the order of their init
        self._on_gpu: dict[Key, Any] = {}  # the GPUs' entries
        self._user: UserUpdater | None = None
        super().__init__(config)

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Copy one value for each new key, on its device."""
        new = [(key, values) for key, values in groups if values]
        first = len(self._order)
        on_gpu = {i: None for i, (_, values) in enumerate(new) if arrays.any_on_device(values)}
        for key, values in (new[i] for i in on_gpu):
            self._check_new(key, values)
        host = {
            key: StoredKey(key, first + i, self._first_value(key, values))
            for i, (key, values) in enumerate(new)
            if i not in on_gpu
        }
        if on_gpu:
            self._init_on_gpus([(first + i, *new[i]) for i in on_gpu])
        self._entries.update(host)
        self._lists.clear()
        self._order.update(dict.fromkeys(key for key, _ in new))

    def _init_on_gpus(self, new: list[tuple[int, Key, list[Any]]]) -> None:
        gpus = self._gpu_executor()
        streams = CallerStreams(values[0] for _, _, values in new)
        seen = [(key, number, gpus.checked_value(key, values[0], streams)) for number, key, values in new]
        try:
            for key, number, value in seen:
                gpus.add(key, key if isinstance(key, int) else number, value, streams)
        except BaseException:
            for key, _, _ in seen:
                gpus.entries.pop(key, None)
            raise

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, on their devices, and initialise others."""
        super().assign([(key, values) for key, values in groups if key not in self._on_gpu])
        for key, values in groups:
            if key in self._on_gpu:
                self._gpus.assign(self._on_gpu[key], values[0])

    def discard(self, keys: list[Key]) -> None:
        """Undo the init of keys."""
        if any(key in self._on_gpu for key in keys):
            self._gpus.forget_launches()
        super().discard(keys)

    def push(self, groups: list[Group]) -> None:
        """Sum, then update or replace."""
        if self._on_gpu and self._push_again(groups, {}):
            return
        if self._on_host(groups):
            super().push(groups)
        else:
            self._push_both(groups, {})

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Push, and write the result to the outs in the same launch, or while it is in the cache."""
        if self._on_gpu and self._push_again(groups, dict(groups if outs is None else outs)):
            return
        if self._on_host(groups, outs or ()):
            super().pushpull(groups, outs)
        else:
            self._push_both(groups, dict(groups if outs is None else outs))

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Copy out."""
        if self._on_host(groups):
            super().pull(groups, ignore_sparse)
            return
        gpus = self._gpu_executor()
        streams = CallerStreams(out for _, outs in groups for out in outs)
        host, sent = self._from_host(groups, streams)
        mine = [(key, outs) for key, outs in groups if key in self._on_gpu]
        items = gpus.checked_items(
            [(key, []) for key, _ in mine],
            {key: self._dense_outs(key, outs, ignore_sparse) for key, outs in mine},
            streams,
            self._on_gpu.__getitem__,
        )
        super().pull(host, ignore_sparse)
        self._send_values(sent, streams)
        gpus.pull(items, streams)

    def quick_pushpull(self, key: Any, value: Any, out: Any) -> bool | Callable[[], None]:
        """Push and pull keys of the host with plain arrays, or one key on a GPU with tensors seen before."""
        if type(key) is list or key not in self._on_gpu:
            return super().quick_pushpull(key, value, out)
        values = _value_list(value)
        return self._push_again([(key, values)], {key: values if out is None else _value_list(out)})

    def _push_again(self, groups: list[Group], outs: dict[Key, list[Any]]) -> bool:
        """Push PyTorch tensors to keys on a GPU that had such tensors before; False: nothing has happened."""
        return self._push_tensors(self._gpus, groups, outs)

    def bind(self, groups: list[Group], outs: list[Group] | None) -> BoundCall:
        """Check a call once, and return the shortest way to repeat it."""
        targets: dict[Key, list[Any]] = dict(groups if outs is None else outs)
        if self._on_host(groups, targets.items()):
            return super().bind(groups, outs)
        gpus = self._gpu_executor()
        goes = [self._goes_to_gpu(key, values) for key, values in groups]
        if not all(goes) or set(targets) != {key for key, _ in groups}:
            return GeneralCall(self, groups, outs)
        streams = CallerStreams([a for _, own in (*groups, *targets.items()) for a in own])
        items = self._gpu_items(groups, targets, streams)
        if not all(key in self._on_gpu for key in targets):
            return MovingCall(self, groups, outs)
        values = dict(groups)
        objects = [a for item in items for a in (*values[item.entry.key], *targets[item.entry.key])]
        return gpus.bind(items, streams, objects) or GeneralCall(self, groups, outs)

    def capture_streams(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Record the caller's streams for an operation that runs in the background."""
        groups = [argument for argument in arguments if isinstance(argument, list)]
        found = [a for group in groups for _, values in group for a in values if isinstance(values, list)]
        if not arrays.any_on_device(found):
            return arguments
        streams = CallerStreams(found)
        return tuple(
            [(key, [_captured_view(value, streams) for value in values]) for key, values in argument]
            if isinstance(argument, list)
            else argument
            for argument in arguments
        )

    # --------------------------------------------------------------------------------- between the places

    def _on_host(self, *lists: Iterable[Group]) -> bool:
        """Return whether all keys and arrays of a call are on the host."""
        for groups in lists:
            for key, values in groups:
                if key in self._on_gpu or arrays.any_on_device(values):
                    return False
        return True

    def _push_both(self, groups: list[Group], outs: dict[Key, list[Any]]) -> None:
        """Check everything, then push to the host's keys and to those on GPUs."""
        streams = CallerStreams([a for _, own in (*groups, *outs.items()) for a in own])
        mine = [(key, values) for key, values in groups if self._goes_to_gpu(key, values)]
        names = {key for key, _ in mine}
        host = [(key, values) for key, values in groups if key not in names]
        items = self._gpu_items(mine, outs, streams)
        rest = [(key, own) for key, own in outs.items() if key not in names and key not in self._on_gpu]
        host_outs, sent = self._from_host(rest, streams)
        self._check_sources(host)
        items = [self._move_to_gpu(item, streams) for item in items]
        if self._gpus.apply.by_key:
            self._push_by_key(host, dict(host_outs), items, streams)
        else:
            self._push_host(host, host_outs)
            self._gpus.push(items, streams)
        self._send_values(sent, streams)

    def _gpu_items(
        self, mine: list[Group], outs: dict[Key, list[Any]], streams: CallerStreams
    ) -> list[KeyItem]:
        """Check the keys that are pushed to on GPUs, or only pulled from there."""
        pushed = {key for key, _ in mine}
        only: list[Group] = [(key, []) for key in outs if key in self._on_gpu and key not in pushed]
        dense = {key: self._dense_outs(key, own, True) for key, own in outs.items()}
        items: list[KeyItem] = self._gpu_executor().checked_items(
            [*mine, *only], dense, streams, lambda key: self._on_gpu.get(key) or self._key_entry(key)
        )
        return items

    def _push_by_key(
        self, host: list[Group], outs: dict[Key, list[Any]], items: list[KeyItem], streams: CallerStreams
    ) -> None:
        """Call the user's code for the keys in their order, on both devices."""
        parts: list[Part] = [
            (
                self._key_entry(key).number,
                partial(self._push_host, [(key, values)], [(key, outs.pop(key, []))]),
            )
            for key, values in host
        ]
        parts += [(item.entry.number, partial(self._gpus.push, [item], streams)) for item in items]
        for _, part in sorted(parts, key=lambda part: part[0]):
            part()
        self._push_host([], list(outs.items()))

    def _push_host(self, host: list[Group], outs: list[Group]) -> None:
        if host:
            super().pushpull(host, outs)
        elif outs:
            super().pull(outs, True)

    def _goes_to_gpu(self, key: Key, values: list[Any]) -> bool:
        """Return whether a push to a key is done on a GPU: the key is there, or moves there."""
        comes = self._comes_from_gpu(key, values)
        if key in self._on_gpu:
            return True
        entry = self._key_entry(key)
        if comes and entry.table is not None:
            raise CapabilityError(f"key {key!r} is row-sparse and stays on the host; push host arrays to it")
        return comes

    def _move_to_gpu(self, item: KeyItem, streams: CallerStreams) -> KeyItem:
        """Move a key of the host to the GPU of its first value."""
        entry: Any = item.entry
        if not isinstance(entry, StoredKey):
            return item
        (first,) = (value for value in item.values[:1] if isinstance(value, DeviceView))
        gpus = self._gpus
        adopted = gpus.add_moved(
            entry.key, entry.number, entry.value, first.device, streams.stream_of(first.device)
        )
        del self._entries[entry.key]
        self._lists.clear()
        return item._replace(entry=adopted)

    def _gpu_executor(self) -> Any:
        """Return the executor for GPUs; the first call imports CUDA."""
        if self._gpus is None:
            from .bound import push_tensors
            from .executor import GpuExecutor

            self._push_tensors = push_tensors
            self._gpus = GpuExecutor(self._apply_on_gpus(), self._counters)
            self._gpus.entries = self._on_gpu
        return self._gpus

    def _apply_on_gpus(self) -> Any:
        from .compression import CompressedSum
        from .updates import PlainSum, apply_with

        total: Any = PlainSum() if self.feedback is None else CompressedSum(self.feedback)  # type: ignore[arg-type]
        return apply_with(total, self._user)

    # ---------------------------------------------------------------------------------------- updates

    def set_updater(self, updater: UserUpdater | None) -> None:
        """Use a callable, or plain sums."""
        super().set_updater(updater)
        self._user = self._as_part(updater)
        if self._gpus is not None:
            for entry in self._on_gpu.values():
                entry.state = entry.owner = None
            self._gpus.set_update(self._apply_on_gpus())

    def set_compression(self, codec: Codec) -> None:
        """Compress each value of a push, with a residual for each position in the list."""
        from .compression import DeviceFeedback

        earlier = self.feedback
        self.feedback = DeviceFeedback(codec, self._on_gpu.values).follow(earlier)
        if earlier is not None and earlier.codec.name != codec.name:
            for entry in self._on_gpu.values():
                entry.residuals.clear()
        if self._gpus is not None:
            self._gpus.set_update(self._apply_on_gpus())

    def _states_elsewhere(self, updater: Updater) -> dict[Key, Any]:
        from .states import to_host

        on_gpus = {key: to_host(entry) for key, entry in self._on_gpu.items() if entry.owner is updater}
        return {**super()._states_elsewhere(updater), **on_gpus}

    def adopt_states(self, content: StatesContent) -> None:
        """Replace the optimizer's states; those of keys on GPUs are copied there when the keys are pushed."""
        super().adopt_states(content)
        for entry in self._on_gpu.values():
            entry.state = entry.owner = None
        if self._gpus is not None:
            self._gpus.forget_launches()

    # ------------------------------------------------------------------------------------- inspection

    def _gpu_copy(self, key: Key) -> DeviceKey:
        copy: DeviceKey = self._on_gpu[key]
        return copy

    def _gpu_places(self, key: Key) -> list[tuple[str, int]]:
        copy = self._gpu_copy(key)
        return [(f"cuda:{copy.device}", copy.nbytes)]

    def close(self) -> None:
        """Wait for the work in progress, and free the memory."""
        if self._gpus is not None:
            self._gpus.close()
        super().close()
        self._gpus = None

    # ----------------------------------------------------------------------------------------- checks

    def _first_value(self, key: Key, values: list[Any]) -> Array | RowSparseArray:
        if key in self._order:
            self._check_new(key, values)
        return super()._first_value(key, values)


class MovingCall(GeneralCall):
    """A call with a key that is on the host, and will move."""

    def is_unchanged(self) -> bool:
        """Return whether a key is still on the host."""
        return any(key in self._backend._entries for key, _ in self._groups)


def _value_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _captured_view(value: Any, streams: CallerStreams) -> Any:
    """View an array on a GPU now; its use raises the error if something is wrong with it."""
    try:
        device = arrays.device_of(value)
        if device is None:
            return value
        stream = streams.stream_of(device)
        seen = arrays.view_array(value, "array", stream)
        seen.stream = stream
        return seen
    except KVStoreError:
        return value
