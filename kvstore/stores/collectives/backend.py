"""A store over an engine of collective operations: every worker has all values, and a push is an all-reduce.

The methods mean the same as in other stores, with two differences that come from the engines: a push waits
for all workers, and all workers must pass the same keys in the same order. The store does not update weights;
the trainer does. A sum therefore needs no initial value: as in MXNet, `pushpull` accepts keys that were never
initialised, and stores nothing for them.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...arrays.grouping import Group, Key
from ...arrays.sparse import RowSparseArray
from ...compression import Codec
from ...errors import CapabilityError, ConfigError, DTypeError, KVStoreError
from ...kernels import cpu
from ...observe.counters import FRAME, MOVING, SUMMING
from ...observe.events import NO_SLICE
from ...optimizer import Optimizer
from ...settings.launchers import detect_placement
from ...settings.options import StoreConfig
from ..entry import Array, StoredKey
from ..local.backend import LocalBackend
from .engine import Collective, Finish, Item

_CHECK = "kvstore.init"
_SUM = "sum"
_GUEST = "uninitialised "  # prefix of names of keys that are summed without init

#: Engine -> process that used it first; its connections cannot be used in forks of that process.
_homes: dict[str, int] = {}


class AllReduceBackend(LocalBackend):
    """Backend of a store over an engine; subclasses choose it. See `kvstore.stores.protocol.Backend`."""

    begins_async = True
    can_bind = quick_lists = False
    runs_optimizer = False
    assigns_together = True
    no_steps = (
        "each worker has its own copy of the values, and a worker that dies can leave the others at "
        "different keys of a call; use 'shared' or 'dist_sync'"
    )
    _is_guest = False
    #: Name of the start of a sum in counters: engines that compare calls first wait there.
    _beginning = MOVING

    def __init__(self, config: StoreConfig, engine: Collective) -> None:
        super().__init__(config)
        self._pid = _homes.setdefault(engine.name, os.getpid())
        if config.on_peer_loss != "raise":
            raise ConfigError(
                f"store {engine.name!r} cannot go on without a worker: leave on_peer_loss at 'raise', or use "
                "'shared' or 'dist_sync'"
            )
        self.engine = engine
        self.rank, self.local_rank, self.num_workers = engine.rank, engine.local_rank, engine.size

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Store the values of rank 0. All workers must pass the same keys."""
        new = [(key, self._own_first_value(key, values)) for key, values in groups if values]
        there = self._values_of_rank_0(new)
        super().init([(key, [value]) for key, value in there])

    def assign(self, groups: list[Group]) -> None:
        """Overwrite and initialise keys with the values of rank 0. All workers must load the same keys."""
        known = [(key, values[0]) for key, values in groups if key in self._entries]
        self.init([(key, values) for key, values in groups if key not in self._entries])
        for key, value in self._values_of_rank_0(known):
            self._entries[key].assign(value)

    def push(self, groups: list[Group]) -> None:
        """Sum over all workers, and wait for them."""
        self.start_push(groups)()

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Sum over all workers, and write the sums to the outputs."""
        self.start_pushpull(groups, outs)()

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Callable[[], None]:
        """Start the sums in the engine, in the order of the calls; return a callable that waits for them."""
        if verb == "push":
            return self.start_push(arguments[0], priority or 0)
        if verb == "pushpull":
            return self.start_pushpull(arguments[0], arguments[1], priority or 0)
        return super().begin(verb, arguments, priority)

    def start_push(self, groups: list[Group], priority: int = 0) -> Finish:
        """Start the sums; return a callable that waits for them and stores them."""
        self._check_process()
        sums = self._sum_local(groups)
        if self._is_guest:
            self._compare_new_keys([entry for entry, _ in sums])
        begin = self._counters.begin()
        finish = self.engine.allreduce([(self._engine_name(entry), total) for entry, total in sums], priority)
        self._counters.end(self._beginning, begin)
        return partial(self._finish_push, finish, sums)

    def _finish_push(self, finish: Finish, sums: list[tuple[StoredKey, Array]]) -> None:
        """Store the sums.

        Those of a failed operation are dropped, because the engine may still write to them.
        """
        self._wait_for_engine(finish, sums[0][0].slice.number if len(sums) == 1 else NO_SLICE)
        nbytes = sum(entry.slice.nbytes for entry, _ in sums)
        begin = self._counters.begin() if sums else 0
        for entry, total in sums:
            if total.dtype == entry.dtype:
                entry.return_scratch(_SUM, entry.value)  # views of it are valid until the next push
                entry.value = total
            else:
                np.copyto(entry.value, total, casting="unsafe")
        self._counters.passed(MOVING, begin, FRAME, nbytes, nbytes, len(sums))

    def _wait_for_engine(self, finish: Callable[[], object], slice: int = NO_SLICE) -> None:
        """Wait for the engine, which does not report the missing workers."""
        begin = self._counters.begin()
        self._counters.wait_for(begin, slice)
        try:
            finish()
        finally:
            self._counters.waited(begin, slice)

    def start_pushpull(self, groups: list[Group], outs: list[Group] | None, priority: int = 0) -> Finish:
        """Start the sums; return a callable that waits for them, stores them and writes the outputs."""
        if groups and not any(self._has_key(key) or not values for key, values in groups):
            self._check_process()
            return self._temporary_store(groups)._start_pushpull(groups, outs, priority)
        return self._start_pushpull(groups, outs, priority)

    def _start_pushpull(self, groups: list[Group], outs: list[Group] | None, priority: int = 0) -> Finish:
        targets = groups if outs is None else outs
        self._check_outs([(key, arrays) for key, arrays in targets if arrays])
        finish = self.start_push(groups, priority)

        def deliver() -> None:
            finish()
            self.pull(targets, ignore_sparse=True)

        return deliver

    def quick_pushpull(self, key: Key, value: Any, out: Any) -> bool:
        """Return False: `pushpull` must be called."""
        return False

    # ---------------------------------------------------------------------------- keys that pass through

    def _has_key(self, key: Key) -> bool:
        """Return whether a key was initialised."""
        return key in self._entries

    def _temporary_store(self, groups: list[Group]) -> AllReduceBackend:
        """Return a store over the same engine in which these keys are initialised for one call."""
        guest = copy.copy(self)
        guest._is_guest, guest._entries = True, {}
        first = [(key, [self._own_first_value(key, values[:1])]) for key, values in groups]
        LocalBackend.init(guest, first)
        return guest

    def _compare_new_keys(self, entries: list[StoredKey]) -> None:
        """Compare the keys of all workers before a sum, if no `init` has compared them."""

    def _engine_name(self, entry: StoredKey) -> str:
        """Return an entry's name for the engine.

        The name of a key that is summed without init contains its shape and type, which must be the same in
        all workers.
        """
        if self._is_guest:
            return f"{_GUEST}{entry.key!r} {entry.shape} {entry.dtype.name}"
        return _key_name(entry.key)

    def side(self) -> AllReduceBackend:
        """Return the same store with other keys."""
        side = copy.copy(self)
        side._entries = {}
        return side

    # ----------------------------------------------------------------------------------------- checks

    def _own_first_value(self, key: Key, values: list[Any]) -> Array:
        value = self._first_value(key, values)
        if isinstance(value, RowSparseArray):
            raise self._capability_error(f"row-sparse arrays (key {key!r})")
        self._check_type(key, value.dtype)
        return value

    def _check_type(self, key: Key, dtype: np.dtype[Any]) -> None:
        if self._sum_dtype(dtype).name not in self.engine.dtypes:
            known = ", ".join(sorted(self.engine.dtypes))
            raise DTypeError(f"{self.engine.name} does not sum {dtype} (key {key!r}); it sums {known}")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise _of_another_process(self.engine.name, self._pid)

    def _values_of_rank_0(self, pairs: list[tuple[Key, Array]]) -> list[tuple[Key, Array]]:
        """Return the pairs with copies of the values of rank 0. All workers must pass the same pairs."""
        if not pairs:
            return []
        self._check_process()
        meaning = self._calls_text(pairs)
        if not self.engine.compares:
            self._compare_keys(pairs, meaning)
        copies = [(key, value.copy()) for key, value in pairs]
        items = [(_key_name(key), value.reshape(-1).view(np.uint8)) for key, value in copies if value.size]
        self._wait_for_engine(
            partial(self.engine.broadcast, sorted(items, key=lambda item: item[0]), meaning)
        )
        return copies

    def _calls_text(self, pairs: Sequence[tuple[Key | str, Any]]) -> str:
        """Return a text that is equal in all workers if they initialise or overwrite the same keys."""
        in_order = sorted(pairs, key=lambda pair: str(pair[0]))
        meant = [f"{key!r} {value.shape} {value.dtype.name}" for key, value in in_order]
        return "\0".join([repr(self.config.group), *meant])

    def _compare_keys(self, pairs: list[tuple[Key, Array]], meaning: str, verb: str = "initialises") -> None:
        """Compare the keys of all workers, before one waits for an operation that others do not call."""
        mine = np.array([zlib.crc32(meaning.encode()), len(pairs)], np.int64)
        first = mine.copy()
        self.engine.broadcast([(_CHECK, first.view(np.uint8))])
        differs = np.array([(first != mine).any()], np.int64)
        self.engine.allreduce([(_CHECK, differs)])()
        if differs[0]:
            raise ConfigError(
                f"worker {self.rank} {verb} {names_text([repr(key) for key, _ in pairs])}, and {differs[0]} "
                f"of {self.num_workers} workers other keys, shapes or types than worker 0: with "
                f"{self.engine.name} all call init, broadcast and load alike and in the same order, and the "
                "first pushpull of a key without an init"
            )

    def _sum_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the element type in which sums over workers are computed.

        16-bit floats are rounded once, at the end. Integers wrap around in any wider type as in their own.
        """
        if dtype.itemsize == 2 and dtype.kind not in "iu":
            return np.dtype(np.float32)
        narrow = dtype.itemsize == 1 and dtype.kind in "iu" and dtype.name not in self.engine.dtypes
        return np.dtype(np.int32) if narrow else dtype

    def _sum_local(self, groups: list[Group]) -> list[tuple[StoredKey, Array]]:
        """Sum the values of this worker into memory of the store, in the type of the engine's sum."""
        dense, sparse = self._check_sources(groups)
        if sparse:
            raise self._capability_error(f"row-sparse arrays (key {sparse[0][0].key!r})")
        totals = [(entry, entry.scratch_memory(_SUM)) for entry, _ in dense]
        begin = self._counters.begin() if dense else 0
        cpu.reduce([(srcs, total, []) for (_, srcs), (_, total) in zip(dense, totals, strict=True)])
        widened = [(entry, self._widen_total(entry, total)) for entry, total in totals]
        self._counters.end(SUMMING if any(len(srcs) > 1 for _, srcs in dense) else MOVING, begin)
        return widened

    def _widen_total(self, entry: StoredKey, total: Array) -> Array:
        wide = self._sum_dtype(total.dtype)
        if wide == total.dtype:
            return total
        entry.return_scratch(_SUM, total)
        return total.astype(wide)

    # ------------------------------------------------------------------------------------ unsupported

    def _capability_error(self, what: str) -> CapabilityError:
        return CapabilityError(
            f"store {self.engine.name!r} sums dense arrays and does nothing else: no {what}; use 'shared' or "
            "'dist_sync' for that"
        )

    def set_updater(self, updater: Any) -> None:
        """Raise CapabilityError, unless the updater is None."""
        if updater is not None:
            raise self._capability_error("updaters")

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Raise CapabilityError."""
        raise self._capability_error("optimizers; update the weights after pushpull")

    def _runs_no_optimizer(self, *_: Any, **__: Any) -> None:
        """Raise CapabilityError."""
        raise self._capability_error("optimizers")

    configure = save_states = load_states = _runs_no_optimizer
    gather_states = adopt_states = follow_states = _runs_no_optimizer  # type: ignore[assignment]

    def set_compression(self, codec: Codec) -> None:
        """Raise CapabilityError."""
        raise self._capability_error("gradient compression")

    def join(self) -> None:
        """Raise CapabilityError, because the other workers would wait."""
        raise self._capability_error("rounds without a worker (join)")

    # ------------------------------------------------------------------------------------------- other
    # methods

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Return sizes; every worker has all keys."""
        here = f"worker {self.rank}"
        return {key: [(here, size) for _, size in parts] for key, parts in super().placement().items()}

    def barrier(self) -> None:
        """Wait for all workers."""
        self._check_process()
        self._wait_for_engine(self.engine.barrier)

    def abandon(self) -> None:
        """Notify the other workers that this worker has failed, if the engine can; not in a fork."""
        if os.getpid() == self._pid:
            self.engine.abandon()

    def close(self) -> None:
        """Free the memory. Other users in this process can continue to use the engine."""
        super().close()
        if os.getpid() == self._pid:
            self.engine.close()


def _key_name(key: Key) -> str:
    """Return a key's name for engines; keys that are summed without init have other names."""
    name = str(key)
    return _GUEST + name if name.startswith(_GUEST) else name


def check_launched(engine: str, size: int, command: str, remark: str = "") -> None:
    """Raise ConfigError if the engine has one process, and a launcher has started several.

    `command` is a command line that starts ``{n}`` processes.
    """
    place = detect_placement()
    if size == 1 and place.size > 1:
        raise ConfigError(
            f"{place.launcher} has started {place.size} processes, and {engine} knows of this one only: "
            f"start with `{command.format(n=place.size)} python train.py`{remark}"
        )


def check_process(engine: str) -> None:
    """Raise KVStoreError in a fork of the process that used the engine first."""
    home = _homes.get(engine)
    if home not in (None, os.getpid()):
        raise _of_another_process(engine, home)


def _of_another_process(engine: str, pid: int | None) -> KVStoreError:
    return KVStoreError(
        f"this process is a fork of process {pid}, whose connections of {engine!r} it cannot use: use the "
        "store in that process, or fork before its first store is created"
    )


def operation_name(verb: str, items: Sequence[Item]) -> str:
    """Return a readable name of an operation."""
    names = [name for name, _ in items]
    return "init, broadcast or load" if names == [_CHECK] else f"{verb} of {names_text(names)}"


def names_text(names: list[str]) -> str:
    """Return readable names of some keys."""
    if len(names) < 2:
        return f"key {names[0]}" if names else "no keys"
    return f"{len(names)} keys ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
