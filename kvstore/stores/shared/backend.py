"""The store of several processes of one machine: values in shared memory, rounds by whoever waits, no server.

How a round works is said in `native/round.h`. Here sources are put where the others reach them, and
results brought home.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from ... import engine
from ...arrays.grouping import Group, Key
from ...arrays.sparse import RowSparseArray
from ...compression import Codec, Feedback, Pushed
from ...errors import ArrayError, FencedError, KVStoreError, PeerLostError, TimeoutError
from ...kernels import cpu
from ...optimizer import Optimizer, Updater
from ...settings.options import StoreConfig
from ..entry import Array, check_shape, copy_into
from ..outs import Later
from ..protocol import Kind
from ..update import summands
from .arguments import Arguments, Away, Dense, Sparse, is_large
from .native import _shared as shm
from .native.membership import JobMembership
from .optimizer import Updates
from .rows import Rows
from .waiting import CallOnce, RoundWaiter

_ONE_KEY = contextlib.nullcontext()

Handle = shm.Handle
Finish = Callable[[], None]
Complete = Callable[[list[shm.Call]], None]


class SharedBackend:
    """See `kvstore.stores.protocol.Backend`."""

    begins_async = True
    waits_concurrently = True
    takes_turns = True
    can_bind = False
    can_compress = True
    runs_optimizer = True
    feedback: Feedback | None = None

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._seat = JobMembership(config)
        self._job = self._seat.job
        self._keys = shm.Keys(self._job)
        self.rank, self.num_workers = self._seat.rank, self._seat.size
        self.local_rank = self._seat.rank
        self._updates = Updates(self._job, self._keys, self.rank)
        self._rows = Rows(self._job, self._updates)
        self._arguments = Arguments(self._job, self._keys, self._updates, self.rank, config.cuda_ipc == 1)
        # Asynchronous operations that have yet to write their results, by key.
        self._undelivered: dict[Key, list[CallOnce]] = {}
        self._waits = RoundWaiter(self._job, self._keys, self._updates, self._rows, config.timeout, self.rank)
        self._late = self._job.returned()  # came back, and has not pushed yet
        # What was pushed from the region last and the time before, by parity of the round.
        self._lent: dict[tuple[Key, int], Array] = {}
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
        self._waits.check_open()
        new = [(key, self._arguments.first_value(key, values)) for key, values in groups if values]
        self._waits.check_writing()
        for key, value in new:
            handle = self._keys.find(key)
            if handle is None and self._founds():
                handle = self._add(key, value)
            if handle is None:
                handle = self._await_key(key)
            self._arguments.check_same(handle, value)
            self._arguments.initialised.add(key)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        known = [
            (self._arguments.handle(key), values[0])
            for key, values in groups
            if self._keys.find(key) is not None
        ]
        self.init([(key, values) for key, values in groups if self._keys.find(key) is None])
        self._waits.check_writing()
        for handle, value in known:
            self._waits.settle(handle)
            self._overwrite(handle, value)
            self._arguments.initialised.add(handle.key)

    def discard(self, keys: list[Key]) -> None:
        """Let the keys be initialised again by this process; the others may have them already."""
        self._arguments.initialised.difference_update(keys)
        if self.feedback is not None:
            for key in keys:
                self.feedback.discard(key)

    def push(self, groups: list[Group]) -> None:
        """Copy, or name the place of, what is pushed."""
        self.start_push(groups)()

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Wait for the rounds that this worker has pushed into, and copy."""
        self.start_pull(groups, ignore_sparse)()

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Push, work, and receive."""
        self.start_pushpull(groups, outs)()

    def capture_streams(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Operations begin at the call, where the caller's streams are current."""
        return arguments

    def bind(self, groups: list[Group], outs: list[Group] | None) -> Finish:
        """Not asked for."""
        raise NotImplementedError

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Finish:
        """Arrive at once: then workers that wait in different orders do not wait for each other."""
        start: Callable[..., Finish] | None = getattr(self, f"start_{verb}", None)
        if start is None:
            return partial(getattr(self, verb), *arguments)
        if priority is None:  # the key's turn lasts to the end of it
            return start(*arguments)
        finish = CallOnce(start(*arguments))
        if verb != "push":
            for key, _ in arguments[0]:
                earlier = self._undelivered.get(key, ())
                self._undelivered[key] = [*(one for one in earlier if not one.done), finish]
        return finish

    def is_clear(self, verb: str, keys: list[Key]) -> bool:
        """Whether a push has memory, and no result is still to be delivered."""
        if verb == "pull" or verb == "row_sparse_pull":
            return True
        if not self._undelivered.keys().isdisjoint(keys):
            return False
        return shm.is_clear(self._job, keys)

    def wait_for_free_slot(self, verb: str, keys: list[Key]) -> None:
        """See results delivered, and rounds complete, that the next push of the keys would overwrite."""
        if verb not in ("push", "pushpull"):
            return
        for key in keys:
            for finish in self._undelivered.pop(key, ()):
                with contextlib.suppress(Exception):  # whoever holds the operation's handle is told
                    finish()
        if self._late or self._job.forked or self._job.standing() != shm.READY:
            return  # the push says what is wrong
        self._waits.wait_for_free_slot(
            [handle for key in keys if (handle := self._keys.find(key)) is not None]
        )

    def start_push(self, groups: list[Group]) -> Finish:
        """Arrive; what is left to do is to help."""
        dense, sparse = self._sources(groups)
        self._waits.check_writing()
        pushed = self._arguments.by_order([*dense, *sparse])
        self._fall_in(pushed)
        handles = [handle for handle, _ in pushed]
        self._waits.wait_for_free_slot(handles)
        with self._one_call(handles):
            host = self._push_away(dense)
            if self.feedback is not None:
                self._pack_to_slots(host, self.feedback)
            else:
                self._copy_to_slots([pair for pair in host if not self._push_from_region(*pair)])
            for handle, sources in sparse:
                self._rows.arrive(handle, sources)
        return partial(self._waits.help, [shm.Call(handle, [], False) for handle, _ in pushed])

    def start_pull(self, groups: list[Group], ignore_sparse: bool) -> Finish:
        """Note which rounds are meant; what is left to do is to wait and to copy."""
        self._waits.check_open()
        later = Later()
        calls, rows, aims = [], [], []
        for handle, outs in self._arguments.by_number(groups):
            dense = [out for out in outs if not isinstance(out, RowSparseArray)]
            if dense and self._arguments.is_away(handle):
                aims += self._arguments.aims([(handle, dense)], later)
                continue
            if len(dense) < len(outs):
                rows += self._arguments.sparse_outs(handle, outs, ignore_sparse)
            if dense and handle.sparse:
                self._arguments.check_outs([(handle.key, dense)])
                rows += [(handle, out) for out in dense]
            elif dense:
                calls.append((handle, self._arguments.outs(handle, dense, later)))
        later.keep_apart((handle, [], outs) for handle, outs in calls)
        large = is_large(calls)
        waiting = [shm.Call(handle, outs, large) for handle, outs in calls]
        return partial(self._finish_pull, waiting, rows, later, aims)

    def _finish_pull(
        self, calls: list[shm.Call], rows: list[tuple[Handle, Any]], later: Later, aims: list[Away]
    ) -> None:
        if len(calls) + len(rows) + len(aims) > 1:
            handles = [*(call.handle for call in calls), *(handle for handle, _ in rows)]
            self._waits.see_whole([*handles, *(aim.handle for aim, _ in aims)])
        self._finish_calls(self._waits.read, calls, later)
        if aims:
            self._finish_away(self._waits.read, aims, later)
        for handle, out in rows:
            self._waits.settle(handle)
            self._rows.copy_to(handle, out)

    def start_pushpull(self, groups: list[Group], outs: list[Group] | None) -> Finish:
        """Arrive; what is left to do is to work, to wait, and to receive."""
        dense, sparse = self._sources(groups)
        targets = dict(groups if outs is None else outs)
        if sparse or set(targets) != {key for key, values in groups if values}:
            self._arguments.check_outs(list(targets.items()))
            self.start_push(groups)
            return self.start_pull([(key, arrays) for key, arrays in targets.items() if arrays], True)
        later = Later()
        away, host = self._arguments.apart(dense)
        aims = self._arguments.aims([(h, targets[h.key]) for h, _ in away], later)
        wanted = [
            (h, values, self._arguments.outs(h, targets[h.key], later, values))
            for h, values in self._arguments.by_order(host)
        ]
        later.keep_apart(wanted)
        pushed = self._arguments.by_order(dense) if away else wanted
        handles = [one[0] for one in pushed]
        self._waits.check_writing()
        self._fall_in(wanted)
        self._waits.wait_for_free_slot(handles)
        large = is_large([(handle, values + arrays) for handle, values, arrays in wanted])
        private: set[Key] = set()
        try:
            with self._one_call(handles):
                self._push_away(away)
                direct = self._arrive(wanted, private)
        except BaseException:
            self._waits.give_up([shm.Call(h, [], False) for h, _, _ in wanted if h.key in private])
            raise
        calls = [shm.Call(h, [] if h.key in direct else arrays, large) for h, _, arrays in wanted]
        finish = partial(self._finish_pushpull, calls, private, later, wanted)
        return partial(self._finish_both, finish, aims, later) if aims else finish

    def _finish_pushpull(self, calls: list[shm.Call], private: set[Key], later: Later, held: object) -> None:
        """Wait and receive; `held` keeps the arrays alive that others read meanwhile."""
        complete = partial(self._waits.complete, private=private)
        if self._arguments.gpus is None:
            self._finish_calls(complete, calls, later)
            return
        try:
            self._finish_calls(complete, calls, later)
        except BaseException:  # of a key before those that others may still be reading
            self._waits.give_up([call for call in calls if call.handle.key in private])
            raise

    def _finish_both(self, finish: Finish, aims: list[Away], later: Later) -> None:
        """Finish what was pushed by the host, then what was by GPUs; then raise the first error."""
        error: KVStoreError | None = None
        try:
            finish()
        except (PeerLostError, FencedError, TimeoutError):
            raise
        except KVStoreError as found:
            error = found
        self._finish_away(partial(self._waits.complete, private=set()), aims, later)
        if error is not None:
            raise error

    def _finish_away(self, finish: Complete, aims: list[Away], later: Later) -> None:
        """See rounds complete that were pushed by GPUs, and let these, or the host, write the results."""
        finish([shm.Call(aim.handle, [], False) for aim, _ in aims])
        self._arguments.deliver(aims, later)
        later.keep_apart((aim.handle, [], others) for aim, others in aims)
        calls = []
        for aim, others in aims:
            if others or aim.handle.key in later:
                self._arguments.come_home(aim.handle)
                calls.append(shm.Call(aim.handle, others, False))
        self._finish_calls(self._waits.read, calls, later)

    def _finish_calls(self, finish: Complete, calls: list[shm.Call], later: Later) -> None:
        """See rounds complete, and bring results to where they do not write them; then raise the first error.

        Where there are GPUs, key by key: they fetch one while the next is worked on.
        """
        apart = later and self._arguments.gpus is not None
        parts = [[call] for call in calls] if apart else [calls]
        errors = [error for part in parts if (error := _finished(finish, part, later)) is not None]
        if errors:
            raise errors[0]

    def _arrive(self, wanted: list[tuple[Handle, list[Array], list[Array]]], private: set[Key]) -> set[Key]:
        """Push values: copies, what lies in the region, and what the others read from this process.

        Returns the keys whose sum the workers leave in the pushed array; adds those that are read from here
        to `private`.
        """
        slots: list[tuple[Handle, list[Array]]] = []
        direct: set[Key] = set()
        if self.feedback is not None:
            self._pack_to_slots([(handle, values) for handle, values, _ in wanted], self.feedback)
            return direct
        for handle, values, outs in wanted:
            if len(values) > 1 or handle.small:
                slots.append((handle, values))
                continue
            if home := self._job.offset_of(values[0]):
                in_place = (
                    len(outs) == 1
                    and outs[0] is values[0]
                    and self._may_peek(region=True)
                    and not self._arguments.may_go_away(handle)
                )
                self._arguments.landed(handle)
                self._arrive_in_region(handle, values[0], home, in_place)
                direct |= {handle.key} if in_place else set()
            elif self._may_peek():
                self._arguments.landed(handle)
                private.add(handle.key)
                shm.arrive_privately(handle, values[0])
            else:
                slots.append((handle, values))
        self._copy_to_slots(slots)
        return direct

    def _arrive_in_region(self, handle: Handle, value: Array, home: int, in_place: bool) -> None:
        """Push an array of the region; it stays there for the others, also if the caller drops it."""
        shm.arrive_in_region(handle, home, in_place)
        self._lent[handle.key, handle.arrived % 2] = value

    def quick_pushpull(self, key: Key, value: Any, out: Any) -> bool | Finish:
        """One small dense key with plain arrays."""
        if self._waits.joined or self._late or self.feedback is not None or self._arguments.gpus is not None:
            return False
        done = shm.quick_pushpull(self._job, key, value, out)
        if done is None:
            return False
        return partial(self._waits.complete, [done], set()) if isinstance(done, shm.Call) else True

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Gather rows."""
        self._waits.check_open()
        jobs = []
        for key, pairs in wanted:
            handle = self._arguments.handle(key)
            if not handle.sparse:
                raise ArrayError(
                    f"key {key!r} holds a dense array; row_sparse_pull reads row-sparse keys only"
                )
            for out, ids in pairs:
                check_shape(handle, out, "out")
                jobs.append((handle, self._rows.wanted(handle, ids), out))
        for handle, _, _ in jobs:
            self._waits.settle(handle)
        self._waits.see_whole([handle for handle, _, _ in jobs])
        for handle, ids, out in jobs:
            self._rows.gather(handle, ids, out)

    # ---------------------------------------------------------------------------------------- updates

    def set_updater(self, updater: Any) -> None:
        """Use a callable, or go back to plain sums; every worker calls this."""
        self._settle_at_home()
        self._updates.set_updater(updater)

    def set_compression(self, codec: Codec) -> None:
        """Pack what this worker pushes; each worker says so for itself, and has residuals of its own."""
        self.feedback = Feedback(codec).follow(self.feedback)
        self._arguments.pack()

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer; the first worker that says so installs it, the others must mean the same."""
        self._settle_at_home()
        self._updates.set_optimizer(optimizer)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer, from this worker's next push of each key on."""
        self._waits.settle_all()
        self._updates.configure(changes)

    def set_learning_rate(self, lr: float) -> None:
        """Change the rate; see `configure`."""
        self._waits.settle_all()
        self._updates.set_learning_rate(lr)

    def save_states(self, path: str, dump_optimizer: bool) -> None:
        """Write the optimizer's states."""
        self._waits.settle_all()
        self._updates.gather()
        assert self.updater is not None
        self.updater.save(path, dump_optimizer)

    def load_states(self, path: str) -> None:
        """Read the optimizer's states; what one worker reads holds for all."""
        self._waits.settle_all()
        self._waits.check_writing()
        self._updates.gather()
        assert self.updater is not None
        self.updater.load(path, self.key_templates())
        self._updates.spread()

    # ------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """All keys in the order of their init."""
        return [handle.key for handle in self._keys.all()]

    def view(self, key: Key) -> Array | RowSparseArray:
        """Live memory, read-only."""
        self._waits.check_open()
        handle = self._arguments.handle(key)
        self._waits.settle(handle)
        if handle.sparse:
            return self._rows.view(handle)
        self._arguments.come_home(handle)
        view = handle.value().view()
        view.flags.writeable = False
        return view

    def fetch(self, key: Key) -> Array | RowSparseArray:
        """As `view`."""
        return self.view(key)

    def fetch_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """One by one, once all are complete."""
        handles = [self._arguments.handle(key) for key in keys]
        for handle in handles:
            self._waits.settle(handle)
        self._waits.see_whole(handles)
        return [self.fetch(key) for key in keys]

    def kind(self, key: Key) -> Kind:
        """As the key's handle says."""
        handle = self._arguments.handle(key)
        return "row-sparse" if handle.sparse else "dense", handle.dtype.name, handle.shape

    def copy_into(self, home: Any, array: Any, key: Key) -> None:
        """Copy."""
        copy_into(home, array, key)

    def empty(self, key: Key) -> Array:
        """Return a new array of the key's shape and type that lives in the region."""
        self._waits.check_open()
        handle = self._arguments.handle(key)
        if handle.sparse:
            raise ArrayError(f"key {key!r} is row-sparse; only dense keys have arrays in shared memory")
        return self._job.empty(handle.shape, handle.dtype)

    def key_templates(self) -> dict[Key, Array]:
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
        self._waits.check_writing()
        gate = self._job.arrive_at_gate()
        self._waits.wait(lambda: self._job.wait_at_gate(gate), None, lambda: self._job.late_for_gate(gate))

    def join(self) -> None:
        """Let rounds and barriers no longer wait for this worker."""
        self._waits.check_open()
        self._settle_at_home()
        self._waits.joined = True
        self._job.stop_taking_part()

    def close(self) -> None:
        """Leave the job."""
        _stores.discard(self)
        try:
            self._arguments.close()
        finally:
            self._seat.leave(lost=False)

    def command(self, head: int, body: str) -> None:
        """There are no servers."""

    def abandon(self) -> None:
        """Leave the job as one who is lost: for the end of a process that failed."""
        self._seat.leave(lost=True)

    def note_fork(self) -> None:
        """Say that this is the child of a fork, which has no part in the job."""
        self._seat.note_fork()

    # ----------------------------------------------------------------------------------------- checks

    def _founds(self) -> bool:
        """Whether this worker's values count: it is the lowest member."""
        return self.rank == min(self._job.members(), default=self.rank)

    def _add(self, key: Key, value: Array | RowSparseArray) -> Handle | None:
        if isinstance(value, RowSparseArray):
            return self._rows.add(self._keys, key, value)
        return self._keys.add(key, value)

    def _await_key(self, key: Key) -> Handle:
        def come() -> int:
            known = len(self._keys)
            self._arguments.check_kind(key)
            return shm.READY if self._keys.find(key) is not None else self._keys.wait_for_more(known)

        while (handle := self._keys.find(key)) is None:
            self._waits.wait(
                come, None, lambda: [min(self._job.members(), default=0)], f"the init of key {key!r}"
            )
        return handle

    def _overwrite(self, handle: Handle, value: Array | RowSparseArray) -> None:
        self._arguments.come_home(handle)
        self._waits.wait(handle.borrow, handle)
        try:
            if isinstance(value, RowSparseArray):
                self._rows.overwrite(handle, value)
            else:
                np.copyto(handle.value(other=True), value)
                self._updates.follow(handle, handle.value(other=True))
        except BaseException:
            handle.give_back(False)
            raise
        self._arguments.overwritten(handle)
        handle.give_back(True)

    # ---------------------------------------------------------------------------------------- arrivals

    def _may_peek(self, region: bool = False) -> bool:
        """Whether the workers may read, or with `region` write, each other's arrays in a round.

        If the loss of one is to be survived, its part must outlive it; and an update that has begun must end.
        """
        sums = not self._job.goes_on and not shm.mode(self._job) & 1
        return sums and (region or self._job.peeking())

    def _fall_in(self, pushed: Sequence[tuple[Any, ...]]) -> None:
        """Before the first push of a rank that came back: come into step with the others."""
        if not self._late or not pushed:
            return
        by_order = self._arguments.by_order([(pair[0], None) for pair in pushed])

        def step() -> int:
            self._waits.check_writing()
            if self._job.fall_in(by_order[0][0]):
                return shm.READY
            time.sleep(0.0005)
            return shm.TICK

        self._waits.wait(step, by_order[0][0])
        self._late = False

    def _push_from_region(self, handle: Handle, values: list[Array]) -> bool:
        home = self._job.offset_of(values[0]) if len(values) == 1 and not handle.small else 0
        if not home:
            return False
        self._arguments.landed(handle)
        self._arrive_in_region(handle, values[0], home, False)
        return True

    def _sources(self, groups: list[Group]) -> tuple[Dense, Sparse]:
        """Check everything that is pushed, before anything changes."""
        self._waits.check_open()
        dense, sparse = self._arguments.sources(groups)
        if self.feedback is not None:
            for handle, values in dense:
                self.feedback.check(handle.key, values, handle.dtype)
            for handle, rows in sparse:
                self.feedback.check(handle.key, rows, handle.dtype)
        return dense, sparse

    def _push_away(self, dense: Dense) -> Dense:
        """Push what GPUs hand to each other; returns the rest."""
        away, host = self._arguments.apart(dense)
        if away:
            self._arguments.push_away(away)
        return host

    def _settle_at_home(self) -> None:
        """See all rounds of this worker complete, and all values in the region."""
        self._waits.settle_all()
        for handle in self._keys.all():
            self._arguments.come_home(handle)

    def _one_call(self, handles: list[Handle]) -> AbstractContextManager[None]:
        """Arrive at all keys, or at none that counts if this process dies; the body waits for nobody else."""
        return self._several(handles) if len(handles) > 1 else _ONE_KEY

    @contextlib.contextmanager
    def _several(self, handles: list[Handle]) -> Iterator[None]:
        try:
            shm.begin_call(self._job)
            yield
            self._waits.note_call(handles)
        finally:
            shm.end_call(self._job)

    def _pack_to_slots(self, pairs: list[tuple[Handle, list[Array]]], feedback: Feedback) -> None:
        """Push the values packed; a codec without kernels packs and unpacks them here."""
        compiled = feedback.codec.compiled
        for handle, _ in pairs:
            self._arguments.landed(handle)
        if compiled is None:
            self._push_restored([(handle, feedback.total(handle.key, values)) for handle, values in pairs])
            return
        for handle, _ in pairs:
            feedback.prepare(handle.key, handle.shape)
        slots = [shm.packing_slot(handle, compiled[0]) for handle, _ in pairs]
        for (handle, values), slot in zip(pairs, slots, strict=True):  # memory is there: all of them arrive
            feedback.pack(handle.key, values, slot)
            shm.arrive_packed(handle, *compiled)

    def _push_restored(self, pairs: list[tuple[Handle, Pushed]]) -> None:
        """Push what a codec without kernels has packed and unpacked here."""
        restored = [(handle, summands(pushed)) for handle, pushed in pairs]
        self._copy_to_slots([(handle, values) for handle, values in restored if isinstance(values, list)])
        for _, pushed in pairs:
            pushed.keep()

    def _copy_to_slots(self, pairs: list[tuple[Handle, list[Array]]]) -> None:
        summed = []
        for handle, values in pairs:
            self._arguments.landed(handle)
            if handle.small and len(values) == 1:
                shm.arrive_with_copy(handle, values[0])
            else:
                summed.append((handle, values))
        cpu.reduce([(values, shm.slot(handle), []) for handle, values in summed])
        for handle, _ in summed:
            shm.arrive_with_slot(handle)


def _finished(finish: Complete, calls: list[shm.Call], later: Later) -> KVStoreError | None:
    """Finish calls; return the error of a round that came to nothing, and raise others."""
    try:
        finish(calls)
        later.deliver([call.handle.key for call in calls])
    except (PeerLostError, FencedError, TimeoutError):
        raise
    except KVStoreError as error:
        return error
    return None


_stores: weakref.WeakSet[SharedBackend] = weakref.WeakSet()


def _forked() -> None:
    for store in list(_stores):
        store.note_fork()


def _leave_at_exit() -> None:
    """Leave all jobs; as one who is lost, if this process failed, so that it is noticed."""
    engine.finish_all()
    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    for store in list(_stores):
        store.abandon() if failed else store.close()


os.register_at_fork(after_in_child=_forked)
atexit.register(_leave_at_exit)
