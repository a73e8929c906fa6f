"""The store of several processes of one machine: values in shared memory, rounds by whoever waits, no server.

How a round works is said in `native/round.h`. Here are the verbs; `pushing` puts sources where the others
reach them, `waiting` brings rounds to their end, `delivery` results to where they were asked for.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import engine
from ...arrays.grouping import Group, Key
from ...arrays.sparse import RowSparseArray
from ...compression import Codec, Feedback
from ...kernels import cpu
from ...observe.native._observe import Counters
from ...optimizer import Optimizer, Updater
from ...settings.options import StoreConfig
from ..entry import Array
from ..outs import Later
from ..protocol import Backend, Kind
from .arguments import CallArguments, Sparse, is_large
from .delivery import Finish, ResultDelivery
from .gpu_access import Dense, GpuAccess
from .native import _shared as shm
from .native.membership import JobMembership, launched_place
from .optimizer import JobUpdater
from .pushing import RoundPusher
from .quick_lists import QuickLists
from .reading import ValueReader
from .rows import SparseKeys
from .undelivered import UndeliveredResults
from .values import StoredValues
from .wait_errors import WaitErrors
from .waiting import RoundWaiter

if TYPE_CHECKING:
    from ...optimizer.states import Content

Handle = shm.Handle


class SharedBackend(Backend):
    """See `kvstore.stores.protocol.Backend`."""

    begins_async = True
    can_resume = True
    bound_by_processors = True
    waits_concurrently = True
    takes_turns = True
    can_compress = True
    quick_lists = starts_quick_sums = True
    logger = "kvstore.shared"
    feedback: Feedback | None = None

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        if config.on_peer_loss == "continue":
            self.no_steps = (
                "with on_peer_loss='continue' a worker that dies within a call counts in the keys that it "
                "had arrived at; use on_peer_loss='raise' and a checkpoint"
            )
        self._membership = self._make_membership()
        self._job = job = self._membership.job
        self._keys = keys = shm.Keys(job)
        self.rank, self.num_workers = self._membership.rank, self._membership.size
        self.local_rank = self._membership.rank
        self._gpus = gpus = GpuAccess(job, self.rank, config.cuda_ipc == 1)
        self._updater = self._make_updater()
        rows = SparseKeys(job, self._updater)
        self._waiter = self._make_waiter(rows)
        self._reader = ValueReader(self._waiter)
        self._arguments = CallArguments(job, keys, self._updater, gpus, self._reader, self.rank)
        self._rows = rows
        self._pusher = self._make_pusher(rows)
        self._delivery = ResultDelivery(job, self._waiter, self._reader, rows, gpus)
        self._values = StoredValues(self._arguments, rows, self._waiter)
        self._undelivered = UndeliveredResults()
        self._quick = QuickLists(job, self._updater, self._waiter, self._pusher, self._undelivered)
        if config.threads:
            cpu.set_threads(config.threads)
        elif self.num_workers > 1:
            cpu.set_threads(max(1, len(os.sched_getaffinity(0)) // self.num_workers))
        _stores.add(self)

    def _make_membership(self) -> JobMembership:
        """Take the place of this process among the others."""
        return JobMembership(self.config, launched_place(self.config))

    def _make_updater(self) -> JobUpdater:
        """Make what says what becomes of a round."""
        return JobUpdater(self._job, self._keys, self._gpus, self.rank)

    def _make_waiter(self, rows: SparseKeys) -> RoundWaiter:
        """Make what brings rounds to their end."""
        errors = WaitErrors(self._job, self._updater, self.rank)
        return RoundWaiter(self._job, self._keys, self._updater, rows, self.config.timeout, self.rank, errors)

    def _make_pusher(self, rows: SparseKeys) -> RoundPusher:
        """Make what brings pushes to where the others reach them."""
        return RoundPusher(self._job, self._gpus, rows, self._waiter)

    @property
    def updater(self) -> Updater | None:
        """The optimizer with its states, if there is one."""
        return self._updater.updater

    def describe(self) -> str:
        """Say how the workers reach each other's arrays."""
        reads = (
            "read each other's memory" if self._job.can_read_peers() else "do not read each other's memory"
        )
        loss = self.config.on_peer_loss
        return f"group {self.config.group!r}, workers {reads}, on_peer_loss={loss!r}"

    def observe(self, counters: Counters) -> None:
        """Count in `counters`, here and in C."""
        self._job.observe(counters)

    def names(self) -> dict[int, str]:
        """Keys of the job by their place in the order of init."""
        return {handle.number: str(handle.key) for handle in self._keys.all(sides=True)}

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Take the value of the lowest rank, and wait until it is there."""
        self._values.init(groups)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        known = [
            (self._arguments.handle(key), values[0])
            for key, values in groups
            if self._keys.find(key) is not None
        ]
        self.init([(key, values) for key, values in groups if self._keys.find(key) is None])
        self._waiter.check_writing()
        for handle, value in known:
            self._values.overwrite(handle, value)
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

    def pushpull(self, groups: list[Group], outs: list[Group] | None, divisor: int = 1) -> None:
        """Push, work, and receive."""
        self.start_pushpull(groups, outs, divisor)()

    def can_divide(self, values: Iterable[Any]) -> bool:
        """Whether sums can take these values divided: plain ones, of the type that kernels divide."""
        return self.feedback is None and all(
            type(value) is np.ndarray and value.dtype == np.float32 for value in values
        )

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Finish:
        """Arrive at once: then workers that wait in different orders do not wait for each other."""
        start: Callable[..., Finish] | None = getattr(self, f"start_{verb}", None)
        if start is None:
            finish = super().begin(verb, arguments, priority)
        elif verb == "pushpull":
            finish = start(*arguments, resumes=priority is not None)
        else:
            finish = start(*arguments)
        if priority is None or verb == "push":  # None: the key's turn lasts to the end of it
            return finish
        return self._undelivered.note([key for key, _ in arguments[0]], finish)

    def is_clear(self, verb: str, keys: list[Key]) -> bool:
        """Whether a push has memory, and no result is still to be delivered."""
        if verb == "pull" or verb == "row_sparse_pull":
            return True
        return not self._undelivered.has_any(keys) and shm.is_clear(self._job, keys)

    def wait_for_free_slot(self, verb: str, keys: list[Key]) -> None:
        """See results delivered, and rounds complete, that the next push of the keys would overwrite."""
        if verb not in ("push", "pushpull"):
            return
        self._undelivered.deliver(keys)
        if self._waiter.rejoining or self._job.forked or self._job.standing() != shm.READY:
            return  # the push says what is wrong
        self._waiter.wait_for_free_slot(
            [handle for key in keys if (handle := self._keys.find(key)) is not None]
        )

    def start_push(self, groups: list[Group]) -> Finish:
        """Arrive; what is left to do is to help."""
        dense, sparse = self._sources(groups)
        pairs = self._arguments.by_order([*dense, *sparse])
        # Dense keys precede tables: two workers may push an array and rows to the same key.
        handles = [handle for handle, _ in sorted(pairs, key=lambda pair: pair[0].sparse)]
        self._waiter.wait_to_push(handles)
        try:
            with self._pusher.one_call(handles):
                self._pusher.push(dense, sparse)
        except InterruptedError:  # taken for dead as it asked for memory
            self._waiter.check_open()
            raise
        return partial(self._waiter.help, [shm.Call(handle, [], False) for handle in handles])

    def start_pull(self, groups: list[Group], ignore_sparse: bool) -> Finish:
        """Note which rounds are meant; what is left to do is to wait and to copy."""
        self._waiter.check_open()
        later, staging = Later(), self._gpus.staging
        calls, rows, on_gpu = [], [], []
        for handle, outs in self._arguments.by_number(groups):
            dense = [out for out in outs if not isinstance(out, RowSparseArray)]
            if dense and staging.is_on_gpu(handle):
                on_gpu += self._arguments.split_outs([(handle, dense)], later)
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
        waiting = [shm.Call(handle, outs, large, receives=True) for handle, outs in calls]
        return partial(self._delivery.finish_pull, waiting, rows, later, on_gpu)

    def start_pushpull(
        self, groups: list[Group], outs: list[Group] | None, divisor: int = 1, resumes: bool = False
    ) -> Finish:
        """Arrive; what is left to do is to work, to wait, and to receive. `resumes`: also after Ctrl-C."""
        dense, sparse = self._sources(groups)
        targets = dict(groups if outs is None else outs)
        if sparse or set(targets) != {key for key, values in groups if values}:
            self._arguments.check_outs(list(targets.items()))
            self.start_push(groups)
            return self.start_pull([(key, arrays) for key, arrays in targets.items() if arrays], True)
        later = Later()
        by_gpu, host = self._gpus.staging.split(dense)
        on_gpu = self._arguments.split_outs([(h, targets[h.key]) for h, _ in by_gpu], later)
        wanted = [
            (h, values, self._arguments.outs(h, targets[h.key], later, values))
            for h, values in self._arguments.by_order(host)
        ]
        later.keep_apart(wanted)
        handles = [one[0] for one in (self._arguments.by_order(dense) if by_gpu else wanted)]
        self._waiter.wait_to_push(handles)
        large = is_large([(handle, values + arrays) for handle, values, arrays in wanted])
        private: set[Key] = set()
        try:
            with self._pusher.one_call(handles):
                self._pusher.push_on_gpu(by_gpu)
                direct = self._pusher.exchange(wanted, private, divisor)
        except BaseException as error:
            self._waiter.give_up([shm.Call(h, [], False) for h, _, _ in wanted if h.key in private])
            if isinstance(error, InterruptedError):
                self._waiter.check_open()
            raise
        calls = [
            shm.Call(h, [] if h.key in direct else arrays, large, receives=True) for h, _, arrays in wanted
        ]
        finish = partial(self._delivery.finish_pushpull, calls, private, later, wanted, resumes)
        return partial(self._delivery.finish_both, finish, on_gpu, later) if on_gpu else finish

    def quick_pushpull(self, key: Any, value: Any, out: Any) -> bool | Finish:
        """One small dense key with plain arrays; or a list of them, with one array each."""
        waiter = self._waiter
        if waiter.joined or waiter.rejoining or self.feedback is not None or self._gpus.staging.in_use:
            return False
        if type(key) is list:
            return self._quick.push(key, value, out, receives=True)
        done = shm.quick_pushpull(self._job, key, value, out)
        if done is None:
            return False
        return partial(waiter.complete, [done]) if isinstance(done, shm.Call) else True

    def start_quick_sum(self, keys: list[Any], values: Any, outs: Any, divisor: int) -> Finish | None:
        """As `start_pushpull`, of small dense keys with one plain array each."""
        waiter = self._waiter
        if waiter.joined or waiter.rejoining or self.feedback is not None or self._gpus.staging.in_use:
            return None
        return self._quick.start_sum(keys, values, outs, divisor)

    def quick_push(self, key: Any, value: Any) -> bool | Finish:
        """As `quick_pushpull`, of lists only."""
        waiter = self._waiter
        if waiter.joined or waiter.rejoining or self.feedback is not None or self._gpus.staging.in_use:
            return False
        return self._quick.push(key, value, None, receives=False)

    def quick_pull(self, key: Any, out: Any) -> bool | Finish:
        """As `quick_push`."""
        return not self._gpus.staging.in_use and self._quick.pull(key, out)

    def give_up_quick(self, error: BaseException) -> None:
        """Let others carry out what this worker has opened."""
        self._waiter.hand_back()

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Gather rows."""
        self._values.gather_rows(wanted)

    def _sources(self, groups: list[Group]) -> tuple[Dense, Sparse]:
        """Check everything that is pushed, before anything changes."""
        self._waiter.check_open()
        dense, sparse = self._arguments.sources(groups)
        if self.feedback is not None:
            for handle, values in dense:
                self.feedback.check(handle.key, values, handle.dtype)
            for handle, rows in sparse:
                self.feedback.check(handle.key, rows, handle.dtype)
        return self._arguments.by_order(dense), self._arguments.by_order(sparse)

    # ---------------------------------------------------------------------------------------- updates

    def set_updater(self, updater: Any) -> None:
        """Use a callable, or go back to plain sums; every worker calls this."""
        self._values.copy_all_to_region()
        self._updater.set_updater(updater)

    def set_compression(self, codec: Codec) -> None:
        """Pack what this worker pushes; each worker says so for itself, and has residuals of its own."""
        self.feedback = self._pusher.pack(codec)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer; the first worker that says so installs it, the others must mean the same."""
        self._values.copy_all_to_region()
        self._updater.set_optimizer(optimizer)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer, from this worker's next push of each key on."""
        self._waiter.settle_all()
        self._updater.configure(changes)

    def set_learning_rate(self, lr: float) -> None:
        """Change the rate; see `configure`."""
        self._waiter.settle_all()
        self._updater.set_learning_rate(lr)

    def gather_states(self) -> Updater:
        """Return the optimizer with the states of all keys; live where rounds wait for this worker."""
        self._waiter.settle_all()
        return self._updater.gathered(self._reader)

    def adopt_states(self, content: Content) -> None:
        """Take over the optimizer's states; what one worker adopts holds for all."""
        self._waiter.settle_all()
        self._waiter.check_writing()
        self._updater.adopt(content)

    def follow_states(self, content: Content) -> None:
        """Take over the settings and the time that another worker has adopted."""
        self._updater.follow_settings()

    # ------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """All keys in the order of their init."""
        return [handle.key for handle in self._keys.all()]

    def view(self, key: Key) -> Array | RowSparseArray:
        """Live memory, read-only; a copy where rounds go on without this worker."""
        return self._values.view(key)

    def fetch(self, key: Key) -> Array | RowSparseArray:
        """As `view`."""
        return self._values.view(key)

    def fetch_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """One by one, once all are complete."""
        return self._values.view_all(keys)

    def kind(self, key: Key) -> Kind:
        """As the key's handle says."""
        handle = self._arguments.handle(key)
        return "row-sparse" if handle.sparse else "dense", handle.dtype.name, handle.shape

    def empty(self, key: Key) -> Array:
        """Return a new array of the key's shape and type that lives in the region."""
        return self._values.empty(key)

    def key_templates(self) -> dict[Key, Array]:
        """For each key an array of its shape and type that takes no memory."""
        return {handle.key: handle.like for handle in self._keys.all()}

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Everything lies in the memory that the workers share."""
        return {handle.key: [("shared memory", self._values.nbytes(handle))] for handle in self._keys.all()}

    def num_dead_nodes(self, timeout: float) -> int:
        """Count the workers that are lost, or were not heard of for so long."""
        self._job.look_around()
        lost = set(self._job.lost())
        return len(lost | {w for w in self._job.members() if self._job.silence(w) > timeout})

    # --------------------------------------------------------------------------------------- the job

    def barrier(self) -> None:
        """Wait until every member has come here."""
        self._waiter.check_writing()
        self._waiter.wait_at_barrier()

    def side(self) -> SharedBackend:
        """Return the same store as it pushes where no codec is set; the region knows side keys."""
        side = copy.copy(self)
        side.feedback, side._pusher = None, self._make_pusher(self._rows)
        return side

    def join(self) -> None:
        """Let rounds and barriers no longer wait for this worker."""
        self._waiter.check_open()
        self._values.copy_all_to_region()
        self._waiter.joined = True
        self._job.stop_taking_part()

    def close(self) -> None:
        """Leave the job."""
        _stores.discard(self)
        try:
            self._gpus.close()
        finally:
            self._membership.leave(lost=False)

    def abandon(self) -> None:
        """Leave the job as one who is lost: for the end of a process that failed."""
        self._membership.leave(lost=True)

    def note_fork(self) -> None:
        """Say that this is the child of a fork, which has no part in the job."""
        self._membership.note_fork()


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
