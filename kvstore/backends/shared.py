"""The store of several processes of one machine: values in shared memory, rounds by whoever waits, no server.

How a round works is said in `kvstore/memory/round.h`. Here arguments are checked, sources put where the others
reach them, and outcomes of waits turned into results or errors.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ..arrays import readable, writable
from ..config import StoreConfig
from ..errors import (
    ArrayError,
    ConfigError,
    DTypeError,
    DuplicateKeyError,
    FencedError,
    KeyKindError,
    KeyNotFoundError,
    KVStoreError,
    PeerLostError,
    ShapeError,
    TimeoutError,
    UpdaterError,
)
from ..grouping import Group, Key
from ..kernels import cpu
from ..memory import _shared as shm
from ..memory.seat import Seat
from ..optimizer import Optimizer, Updater
from ..sparse import RowSparseArray, checked
from .entry import Array, Deliver, check_shape, dense_source, sparse_source
from .shared_rows import Rows, with_all_rows
from .shared_updates import Updates

log = logging.getLogger("kvstore.shared")

_NOTICE_AFTER = 10.0
_CODES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int8": 4, "uint8": 5, "int32": 6, "int64": 7}

Handle = shm.Handle


class SharedBackend:
    """See `kvstore.backends.protocol.Backend`."""

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._seat = Seat(config)
        self._job = self._seat.job
        self._keys = shm.Keys(self._job)
        self.rank, self.num_workers = self._seat.rank, self._seat.size
        self.local_rank = self._seat.rank
        self._mine: set[Key] = set()  # keys that this process has initialised
        self._joined = self._told = False
        self._told_sparse: set[Key] = set()
        self._updates = Updates(self._job, self._keys, self.rank)
        self._rows = Rows(self._job, self._updates)
        if config.threads:
            cpu.set_threads(config.threads)
        elif self.num_workers > 1:
            cpu.set_threads(max(1, len(os.sched_getaffinity(0)) // self.num_workers))
        _stores.add(self)

    @property
    def updater(self) -> Updater | None:
        """The optimizer with its states, if there is one."""
        return self._updates.updater

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Take the value of the lowest rank, and wait until it is there."""
        new = [(key, self._first_value(key, values)) for key, values in groups if values]
        self._check_writing()
        for key, value in new:
            handle = self._keys.find(key)
            if handle is None and self._founds():
                handle = self._add(key, value)
            if handle is None:
                handle = self._await_key(key)
            self._check_same(handle, value)
            self._mine.add(key)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        known = [(self._handle(key), values[0]) for key, values in groups if self._keys.find(key) is not None]
        self.init([(key, values) for key, values in groups if self._keys.find(key) is None])
        self._check_writing()
        for handle, value in known:
            self._settle(handle)
            self._overwrite(handle, value)
            self._mine.add(handle.key)

    def forget(self, keys: list[Key]) -> None:
        """Let the keys be initialised again by this process; the others may have them already."""
        self._mine.difference_update(keys)

    def push(self, groups: list[Group]) -> None:
        """Copy, or name the place of, what is pushed."""
        dense, sparse = self._sources(groups)
        self._check_writing()
        self._copy_to_slots([pair for pair in dense if not self._push_from_region(*pair)])
        for handle, sources in sparse:
            self._push_rows(handle, sources)
        self._help([handle for handle, _ in self._by_order([*dense, *sparse])])

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Wait for the rounds that this worker has pushed into, and copy."""
        later: list[Deliver] = []
        calls, rows = [], []
        for handle, outs in self._by_number(groups):
            dense = [out for out in outs if not isinstance(out, RowSparseArray)]
            if len(dense) < len(outs):
                rows += self._sparse_outs(handle, outs, ignore_sparse)
            if dense and handle.sparse:
                rows += [(handle, out) for out in dense]
                for out in dense:
                    check_shape(handle, writable(out, f"out of key {handle.key!r}")[0], "out")
            elif dense:
                calls.append((handle, self._outs(handle, dense, later)))
        self._read([shm.Call(handle, outs, self._large(calls)) for handle, outs in calls])
        for handle, out in rows:
            self._settle(handle)
            self._rows.copy_to(handle, out)
        for deliver in later:
            deliver()

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Push, work, and receive."""
        dense, sparse = self._sources(groups)
        targets = dict(groups if outs is None else outs)
        if sparse or set(targets) != {key for key, values in groups if values}:
            self._check_outs(list(targets.items()))
            self.push(groups)
            self.pull([(key, arrays) for key, arrays in targets.items() if arrays], ignore_sparse=True)
            return
        later: list[Deliver] = []
        wanted = [(h, values, self._outs(h, targets[h.key], later)) for h, values in self._by_order(dense)]
        self._check_writing()
        large = self._large([(handle, values + arrays) for handle, values, arrays in wanted])
        slots, private, homes = [], [], []
        for handle, values, arrays in wanted:
            home = self._job.offset_of(values[0]) if len(values) == 1 and not handle.small else 0
            alone = len(values) == 1 and not handle.small and len(arrays) == 1 and arrays[0] is values[0]
            if home:
                self._wait(lambda h=handle: shm.make_way(h), handle)
                direct = alone and not self._job.goes_on and not shm.mode(self._job) & 1
                homes.append((handle, home, direct, arrays))
            elif len(values) == 1 and not handle.small and self._may_peek():
                private.append((handle, values[0], arrays))
            else:
                slots.append((handle, values))
        self._copy_to_slots(slots)
        kept = {handle.key: arrays for handle, _, arrays in wanted}
        for handle, home, direct, _ in homes:
            shm.arrive_in_region(handle, home, direct)
            if direct:
                kept[handle.key] = []
        for handle, value, _ in private:
            self._wait(lambda h=handle: shm.make_way(h), handle)
            shm.arrive_privately(handle, value)
        calls = [shm.Call(handle, kept[handle.key], large) for handle, _, _ in wanted]
        self._complete(calls, {handle.key for handle, _, _ in private})
        for deliver in later:
            deliver()

    def quick_pushpull(self, key: Key, value: Any, out: Any) -> bool:
        """One small dense key with plain arrays."""
        if self._joined:
            return False
        done = shm.quick_pushpull(self._job, key, value, out)
        if done is None:
            return False
        if isinstance(done, shm.Call):
            self._complete([done], set())
        return True

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Gather rows."""
        jobs = []
        for key, pairs in wanted:
            handle = self._handle(key)
            if not handle.sparse:
                raise ArrayError(
                    f"key {key!r} holds a dense array; row_sparse_pull reads row-sparse keys only"
                )
            for out, ids in pairs:
                check_shape(handle, out, "out")
                jobs.append((handle, self._rows.wanted(handle, ids), out))
        for handle, ids, out in jobs:
            self._settle(handle)
            self._rows.gather(handle, ids, out)

    # ---------------------------------------------------------------------------------------- updates

    def set_updater(self, updater: Any) -> None:
        """Use a callable, or go back to plain sums; every worker calls this."""
        self._settle_all()
        self._updates.set_updater(updater)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer; the first worker that says so installs it, the others must mean the same."""
        self._settle_all()
        self._updates.set_optimizer(optimizer)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer, from this worker's next push of each key on."""
        self._settle_all()
        self._updates.configure(changes)

    def set_learning_rate(self, lr: float) -> None:
        """Change the rate; see `configure`."""
        self._settle_all()
        self._updates.set_learning_rate(lr)

    def save_states(self, path: str, dump_optimizer: bool) -> None:
        """Write the optimizer's states."""
        self._settle_all()
        self._updates.gather()
        assert self.updater is not None
        self.updater.save(path, dump_optimizer)

    def load_states(self, path: str) -> None:
        """Read the optimizer's states; what one worker reads holds for all."""
        self._settle_all()
        self._check_writing()
        self._updates.gather()
        assert self.updater is not None
        self.updater.load(path, self.stand_ins())
        self._updates.spread()

    # ------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """All keys in the order of their init."""
        return [handle.key for handle in self._keys.all()]

    def view(self, key: Key) -> Array | RowSparseArray:
        """Live memory, read-only."""
        handle = self._handle(key)
        self._settle(handle)
        if handle.sparse:
            return self._rows.view(handle)
        view = handle.value().view()
        view.flags.writeable = False
        return view

    def empty(self, key: Key) -> Array:
        """Return a new array of the key's shape and type that lives in the region."""
        handle = self._handle(key)
        if handle.sparse:
            raise ArrayError(f"key {key!r} is row-sparse; only dense keys have arrays in shared memory")
        return self._job.empty(handle.shape, handle.dtype)

    def stand_ins(self) -> dict[Key, Array]:
        """For each key an array of its shape and type that takes no memory."""
        return {handle.key: handle.like for handle in self._keys.all()}

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Everything lies in the memory that the workers share."""
        return {handle.key: [("shared memory", handle.nbytes)] for handle in self._keys.all()}

    def num_dead_nodes(self, timeout: float) -> int:
        """Count the workers that are lost, or were not heard of for so long."""
        self._job.look_around()
        lost = set(self._job.lost())
        return len(lost | {w for w in self._job.members() if self._job.silence(w) > timeout})

    # --------------------------------------------------------------------------------------- the job

    def barrier(self) -> None:
        """Wait until every member has come here."""
        self._check_writing()
        gate = self._job.arrive_at_gate()
        self._wait(lambda: self._job.wait_at_gate(gate), None, lambda: self._job.late_for_gate(gate))

    def join(self) -> None:
        """Let rounds and barriers no longer wait for this worker."""
        self._check_open()
        self._settle_all()
        self._joined = True
        self._job.stop_taking_part()

    def close(self) -> None:
        """Leave the job."""
        _stores.discard(self)
        self._seat.leave(lost=False)

    def abandon(self) -> None:
        """Leave the job as one who is lost: for the end of a process that failed."""
        self._seat.leave(lost=True)

    def note_fork(self) -> None:
        """Say that this is the child of a fork, which has no part in the job."""
        self._job.note_fork()

    # ----------------------------------------------------------------------------------------- checks

    def _check_open(self) -> None:
        if self._job.forked:
            raise KVStoreError(
                f"this process is a fork of worker {self.rank} and has no part in its job; use the store in the "
                "process that created it, or start workers with `kvstore run` or kv.spawn"
            )

    def _check_writing(self) -> None:
        self._check_open()
        standing = self._job.standing()
        if standing != shm.READY:
            if self._joined and standing == shm.FENCED and self._job.state(self.rank) == 2:
                return
            self._raise(standing, None, [])
        if self._joined:
            raise ConfigError(f"worker {self.rank} has joined: it can read, and push no more")

    def _founds(self) -> bool:
        """Whether this worker's values count: it is the lowest member."""
        return self.rank == min(self._job.members(), default=self.rank)

    def _first_value(self, key: Key, values: list[Any]) -> Array | RowSparseArray:
        if key in self._mine:
            raise DuplicateKeyError(f"key {key!r} is initialised already; init and broadcast take a key once")
        if len(values) > 1:
            raise DuplicateKeyError(f"key {key!r} stands {len(values)} times in one init; give it one value")
        self._check_kind(key)
        value = values[0]
        return (
            checked(value) if isinstance(value, RowSparseArray) else readable(value, f"value of key {key!r}")
        )

    def _check_kind(self, key: Key) -> None:
        kind = self._keys.kind
        if kind and (kind == 2) != isinstance(key, str):
            raise KeyKindError(
                f"key {key!r} is a {type(key).__name__}, this store's keys are {('int', 'str')[kind - 1]}"
            )

    def _check_same(self, handle: Handle, value: Array | RowSparseArray) -> None:
        if handle.sparse != isinstance(value, RowSparseArray):
            there = "row-sparse" if handle.sparse else "dense"
            raise ArrayError(f"key {handle.key!r} is {there} on worker 0 and something else on worker {self.rank}")
        if handle.dtype != value.dtype:
            raise DTypeError(
                f"key {handle.key!r} has element type {handle.dtype} on worker 0 and {value.dtype} on "
                f"worker {self.rank}"
            )
        if handle.shape != value.shape:
            raise ShapeError(
                f"key {handle.key!r} has shape {handle.shape} on worker 0 and {value.shape} on worker {self.rank}"
            )

    def _add(self, key: Key, value: Array | RowSparseArray) -> Handle | None:
        code = _CODES[value.dtype.name]
        if isinstance(value, RowSparseArray):
            return self._rows.add(self._keys, key, value, code)
        return self._keys.add(key, value, code)

    def _await_key(self, key: Key) -> Handle:
        def come() -> int:
            known = len(self._keys)
            return shm.READY if self._keys.find(key) is not None else self._keys.wait_for_more(known)

        while (handle := self._keys.find(key)) is None:
            self._wait(come, None, lambda: [min(self._job.members(), default=0)], f"the init of key {key!r}")
        return handle

    def _handle(self, key: Key) -> Handle:
        handle = self._job.handles.get(key) or self._keys.find(key)
        if handle is not None:
            return handle
        self._check_kind(key)
        raise KeyNotFoundError(f"key {key!r} is not initialised; call init or broadcast with it first")

    def _by_number(self, groups: list[Group]) -> list[tuple[Handle, list[Any]]]:
        return self._by_order([(self._handle(key), arrays) for key, arrays in groups])

    @staticmethod
    def _by_order(pairs: list[tuple[Handle, Any]]) -> list[tuple[Handle, Any]]:
        """In the order of updates: int keys ascend, str keys follow the order of their init."""
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: pair[0].key if isinstance(pair[0].key, int) else pair[0].number)
        return pairs

    def _sources(
        self, groups: list[Group]
    ) -> tuple[list[tuple[Handle, list[Array]]], list[tuple[Handle, list[RowSparseArray]]]]:
        """Check everything that is pushed, before anything changes."""
        dense: list[tuple[Handle, list[Array]]] = []
        sparse: list[tuple[Handle, list[RowSparseArray]]] = []
        for key, values in groups:
            handle = self._handle(key)
            self._updates.check(handle)
            if not values:
                continue
            if not handle.sparse and cpu.first_misfit(values, handle.like) < 0:
                dense.append((handle, values))
            elif handle.sparse or all(isinstance(value, RowSparseArray) for value in values):
                sparse.append((handle, [self._row_source(handle, value) for value in values]))
            else:
                dense.append((handle, [dense_source(handle, value) for value in values]))
        return dense, sparse

    def _row_source(self, handle: Handle, value: Any) -> RowSparseArray:
        if isinstance(value, RowSparseArray):
            return sparse_source(handle, value)
        return with_all_rows(dense_source(handle, value))

    def _outs(self, handle: Handle, outs: list[Any], later: list[Deliver]) -> list[Array]:
        if cpu.first_misfit(outs, handle.like, True) < 0:
            return outs
        direct = []
        for out in outs:
            if isinstance(out, RowSparseArray):
                continue
            array, deliver = writable(out, f"out of key {handle.key!r}")
            check_shape(handle, array, "out")
            if array.dtype == handle.dtype:
                direct.append(array)
            else:
                later.append(lambda array=array: np.copyto(array, handle.value(), casting="unsafe"))
            if deliver is not None:
                later.append(deliver)
        return direct

    def _check_outs(self, rest: list[Group]) -> None:
        for key, outs in rest:
            handle = self._handle(key)
            for out in outs:
                if not isinstance(out, RowSparseArray):
                    check_shape(handle, writable(out, f"out of key {key!r}")[0], "out")

    def _sparse_outs(
        self, handle: Handle, outs: list[Any], ignore_sparse: bool
    ) -> list[tuple[Handle, RowSparseArray]]:
        if ignore_sparse:
            if handle.key not in self._told_sparse:
                self._told_sparse.add(handle.key)
                log.info("pull of key %r leaves row-sparse outs alone; use row_sparse_pull", handle.key)
            return []
        if not handle.sparse:
            raise ArrayError(f"key {handle.key!r} holds a dense array; pull it into a dense out")
        sparse = [out for out in outs if isinstance(out, RowSparseArray)]
        for out in sparse:
            check_shape(handle, out, "out")
        return [(handle, out) for out in sparse]

    # ---------------------------------------------------------------------------------------- arrivals

    def _may_peek(self) -> bool:
        return self._job.peeking() and not self._job.goes_on and not shm.mode(self._job) & 1

    def _push_from_region(self, handle: Handle, values: list[Array]) -> bool:
        home = self._job.offset_of(values[0]) if len(values) == 1 and not handle.small else 0
        if not home:
            return False
        self._wait(lambda: shm.make_way(handle), handle)
        shm.arrive_in_region(handle, home, False)
        return True

    def _copy_to_slots(self, pairs: list[tuple[Handle, list[Array]]]) -> None:
        for handle, _ in pairs:
            self._wait(lambda h=handle: shm.make_way(h), handle)
        cpu.reduce([(values, shm.slot(handle), []) for handle, values in pairs])
        for handle, _ in pairs:
            shm.arrive_with_slot(handle)

    def _push_rows(self, handle: Handle, sources: list[RowSparseArray]) -> None:
        self._wait(lambda: shm.make_way(handle), handle)
        self._rows.arrive(handle, sources)

    @staticmethod
    def _large(pairs: list[tuple[Handle, list[Any]]]) -> bool:
        return sum(h.nbytes * (1 + len(arrays)) for h, arrays in pairs) * 2 > cpu.stream_bytes()

    # ------------------------------------------------------------------------------------------ waits

    def _complete(self, calls: list[shm.Call], private: set[Key]) -> None:
        """See all rounds complete and delivered; then raise the first error of any."""
        errors: list[KVStoreError] = []
        try:
            for call in calls:
                self._finish(call, errors)
        except BaseException:
            for call in calls:
                # Others may be reading this process's memory: what they read from now on is not to count.
                if call.handle.key in private and call.handle.complete < call.round:
                    call.handle.spoil(call.round, f"worker {self.rank} gave up waiting")
            raise
        if errors:
            raise errors[0]

    def _finish(self, call: shm.Call, errors: list[KVStoreError]) -> None:
        handle = call.handle
        outcome = call.advance()
        if outcome != shm.READY:
            self._wait(call.advance, handle, first=outcome)
        if handle.failed >= call.round and handle.failed:
            if handle.failed == call.round:
                errors.append(self._failure(handle))
            return
        if call.deliver() != shm.READY:
            self._wait(call.deliver, handle)

    def _read(self, calls: list[shm.Call]) -> None:
        if self._told:  # the loss was reported: reads give what there is
            for call in calls:
                call.deliver()
            return
        self._complete(calls, set())

    def _help(self, handles: list[Handle]) -> None:
        """Where this worker was the last to arrive, begin the work; never wait."""
        errors: list[KVStoreError] = []
        for handle in handles:
            call = shm.Call(handle, [], False)
            while (outcome := call.help()) in (shm.PLAN, shm.CATCH_UP):
                self._prepare(outcome, handle)
            if outcome not in (shm.READY, shm.TICK):
                self._raise(outcome, handle, [])
            if handle.failed == call.round:
                errors.append(self._failure(handle))
        if errors:
            raise errors[0]

    def _prepare(self, outcome: int, handle: Handle | None) -> None:
        if outcome == shm.CATCH_UP:
            self._updates.catch_up()
        else:
            assert handle is not None
            self._updates.carry_out(handle, self._rows)

    def _settle(self, handle: Handle) -> None:
        """See the rounds complete that this worker has pushed into."""
        if not self._told and (handle.complete < handle.arrived or handle.failed == handle.arrived > 0):
            self._complete([shm.Call(handle, [], False)], set())

    def _settle_all(self) -> None:
        self._check_open()
        for handle in self._keys.all():
            self._settle(handle)

    def _overwrite(self, handle: Handle, value: Array | RowSparseArray) -> None:
        def hold() -> int:
            return shm.READY if handle.borrow() else shm.TICK

        self._wait(hold, handle)
        try:
            if isinstance(value, RowSparseArray):
                self._rows.overwrite(handle, value)
            else:
                np.copyto(handle.value(other=True), value)
                self._updates.follow(handle, handle.value(other=True))
        except BaseException:
            handle.give_back(False)
            raise
        handle.give_back(True)

    def _wait(
        self,
        step: Callable[[], int],
        handle: Handle | None,
        missing: Callable[[], Iterable[int]] | None = None,
        what: str = "",
        first: int = shm.TICK,
    ) -> None:
        """Take steps until one is ready, within the deadline."""
        outcome = step() if first == shm.TICK else first
        start, told = time.monotonic(), False
        while outcome != shm.READY:
            if outcome in (shm.PLAN, shm.CATCH_UP):
                self._prepare(outcome, handle)
            elif outcome != shm.TICK:
                self._raise(outcome, handle, self._absent(handle, missing))
            waited = time.monotonic() - start
            if waited > self.config.timeout:
                raise TimeoutError(self._waiting(handle, missing, what, waited))
            if waited > _NOTICE_AFTER and not told:
                told = True
                log.warning("%s", self._waiting(handle, missing, what, waited))
            outcome = step()

    def _absent(self, handle: Handle | None, missing: Callable[[], Iterable[int]] | None) -> list[int]:
        if missing is not None:
            return list(missing())
        return [] if handle is None else handle.missing(handle.complete + 1)

    def _waiting(
        self, handle: Handle | None, missing: Callable[[], Iterable[int]] | None, what: str, waited: float
    ) -> str:
        absent = [w for w in self._absent(handle, missing) if w != self.rank]
        where = what or ("a barrier" if handle is None else f"round {handle.complete + 1} of key {handle.key!r}")
        seen = ", ".join(f"worker {w} (heard of {self._job.silence(w):.1f} s ago)" for w in absent) or "its peers"
        return f"worker {self.rank} has waited {waited:.0f} s on {where} for {seen}"

    def _raise(self, outcome: int, handle: Handle | None, absent: list[int]) -> None:
        where = "" if handle is None else f" (key {handle.key!r}, round {handle.complete + 1})"
        if outcome == shm.PEER_LOST:
            self._told = True
            lost = self._job.lost()
            rank = lost[0] if lost else -1
            raise PeerLostError(
                f"worker {rank} of {self.num_workers} died or stopped; noticed by worker {self.rank}{where}. The "
                "last complete values can still be read and saved; on_peer_loss='continue' would go on without it",
                role="worker",
                rank=rank,
                last_seen=self._job.silence(rank) if rank >= 0 else None,
            )
        if outcome == shm.FENCED:
            raise FencedError(
                f"worker {self.rank} was taken for dead by the others (stopped for too long, or its rank was "
                f"started again) and has no part in the job any more{where}; end this process"
            )
        if outcome == shm.NO_MEMORY:
            raise MemoryError(f"no memory for more of the job's shared region{where}")
        raise KVStoreError(f"unexpected outcome {outcome} of a wait{where}")

    def _failure(self, handle: Handle) -> KVStoreError:
        why = handle.why() or "the memory of a worker could not be read"
        kind = UpdaterError if shm.mode(self._job) & 1 else KVStoreError
        return kind(f"round {handle.failed} of key {handle.key!r} came to nothing: {why}")


_stores: weakref.WeakSet[SharedBackend] = weakref.WeakSet()


def _forked() -> None:
    for store in list(_stores):
        store.note_fork()


def _leave_at_exit() -> None:
    """A process that ends well leaves its jobs; one that failed is to be noticed."""
    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    for store in list(_stores):
        store.abandon() if failed else store.close()


os.register_at_fork(after_in_child=_forked)
atexit.register(_leave_at_exit)
