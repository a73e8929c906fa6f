"""The store of several processes of one machine, without a server.

Values are in shared memory, and the workers that wait for a round do its work: see `native/round.h`. This
module has the verbs; `pushing` puts sources where other workers can read them, `waiting` completes rounds,
and `delivery` writes results to the arrays of the caller.
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
from ..outs import OutDeliveries
from ..protocol import Backend, Kind
from .arguments import CallArguments, Sparse, is_large
from .delivery import Finish, ResultDelivery
from .gpu_access import Dense, GpuAccess
from .native import _shared as shm
from .native.registration import JobRegistration, launched_place
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
    from ...optimizer.states import StatesContent

Handle = shm.Handle


class SharedBackend(Backend):
    """See `kvstore.stores.protocol.Backend`."""

    begins_async = True
    can_resume = True
    bound_by_processors = True
    waits_concurrently = True
    locks_keys = True
    can_compress = True
    quick_lists = starts_quick_sums = True
    logger = "kvstore.shared"
    feedback: Feedback | None = None

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        if config.on_peer_loss == "continue":
            self.no_steps = (
                "with on_peer_loss='continue' the push of a worker that dies within a call counts for the "
                "keys that it had reached; use on_peer_loss='raise' and a checkpoint"
            )
        self._registration = self._enter_region()
        self._job = job = self._registration.job
        self._keys = keys = shm.Keys(job)
        self.rank, self.num_workers = self._registration.rank, self._registration.size
        self.local_rank = self._registration.rank
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

    def _enter_region(self) -> JobRegistration:
        """Enter the region as the launcher has placed this process."""
        return JobRegistration(self.config, launched_place(self.config))

    def _make_updater(self) -> JobUpdater:
        """Make the object that decides what a round does to the value."""
        return JobUpdater(self._job, self._keys, self._gpus, self.rank)

    def _make_waiter(self, rows: SparseKeys) -> RoundWaiter:
        """Make the object that completes rounds."""
        errors = WaitErrors(self._job, self._updater, self.rank)
        return RoundWaiter(self._job, self._keys, self._updater, rows, self.config.timeout, self.rank, errors)

    def _make_pusher(self, rows: SparseKeys) -> RoundPusher:
        """Make the object that puts pushed values where other workers can read them."""
        return RoundPusher(self._job, self._gpus, rows, self._waiter)

    @property
    def updater(self) -> Updater | None:
        """The optimizer with its states, if there is one."""
        return self._updater.updater

    def describe(self) -> str:
        """Describe how the workers read each other's arrays."""
        reads = (
            "read each other's memory" if self._job.can_read_peers() else "do not read each other's memory"
        )
        loss = self.config.on_peer_loss
        return f"group {self.config.group!r}, workers {reads}, on_peer_loss={loss!r}"

    def observe(self, counters: Counters) -> None:
        """Count in `counters`, in Python and in C."""
        self._job.observe(counters)

    def names(self) -> dict[int, str]:
        """Return the keys of the job by their position in the order of init."""
        return {handle.number: str(handle.key) for handle in self._keys.all(sides=True)}

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Use the values of the lowest rank, and wait until they are readable."""
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
        """Let this process initialise the keys again; other workers may have them already."""
        self._arguments.initialised.difference_update(keys)
        if self.feedback is not None:
            for key in keys:
                self.feedback.discard(key)

    def push(self, groups: list[Group]) -> None:
        """Push values: copies, or references to arrays in the region."""
        self.start_push(groups)()

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Wait for the rounds that this worker has pushed into, and copy the values."""
        self.start_pull(groups, ignore_sparse)()

    def pushpull(self, groups: list[Group], outs: list[Group] | None, divisor: int = 1) -> None:
        """Push, complete the rounds, and write the results."""
        self.start_pushpull(groups, outs, divisor)()

    def can_divide(self, values: Iterable[Any]) -> bool:
        """Return whether sums can divide these values: plain arrays of a type that kernels divide."""
        return self.feedback is None and all(
            type(value) is np.ndarray and value.dtype == np.float32 for value in values
        )

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Finish:
        """Arrive at once: so workers that wait in different orders do not wait for each other."""
        start: Callable[..., Finish] | None = getattr(self, f"start_{verb}", None)
        if start is None:
            finish = super().begin(verb, arguments, priority)
        elif verb == "pushpull":
            finish = start(*arguments, resumes=priority is not None)
        else:
            finish = start(*arguments)
        if priority is None or verb == "push":  # None: the caller keeps the key's turn until the end
            return finish
        return self._undelivered.note_read([key for key, _ in arguments[0]], finish)

    def is_clear(self, verb: str, keys: list[Key]) -> bool:
        """Return whether a push of the keys has memory, and no result of them is still to be delivered."""
        if verb == "pull" or verb == "row_sparse_pull":
            return True
        return not self._undelivered.has_any(keys) and shm.is_clear(self._job, keys)

    def wait_for_free_slot(self, verb: str, keys: list[Key]) -> None:
        """Deliver results, and wait for rounds, that the next push of the keys would overwrite."""
        if verb not in ("push", "pushpull"):
            return
        self._undelivered.deliver_keys(keys)
        if self._waiter.rejoining or self._job.forked or self._job.check_membership() != shm.READY:
            return  # the push raises the error
        self._waiter.wait_for_free_slot(
            [handle for key in keys if (handle := self._keys.find(key)) is not None]
        )

    def start_push(self, groups: list[Group]) -> Finish:
        """Arrive; the returned function does work for the rounds."""
        dense, sparse = self._check_sources(groups)
        pairs = self._arguments.by_order([*dense, *sparse])
        # Dense keys precede tables: two workers may push an array and rows to the same key.
        handles = [handle for handle, _ in sorted(pairs, key=lambda pair: pair[0].sparse)]
        self._waiter.wait_to_push(handles)
        try:
            with self._pusher.one_call(handles):
                self._pusher.push(dense, sparse)
        except InterruptedError:  # fenced while it allocated memory
            self._waiter.check_open()
            raise
        return partial(self._waiter.begin_work, [shm.Call(handle, [], False) for handle in handles])

    def start_pull(self, groups: list[Group], ignore_sparse: bool) -> Finish:
        """Record the rounds; the returned function waits for them and copies the values."""
        self._waiter.check_open()
        later, staging = OutDeliveries(), self._gpus.staging
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
        later.defer_overlaps((handle, [], outs) for handle, outs in calls)
        large = is_large(calls)
        waiting = [shm.Call(handle, outs, large, receives=True) for handle, outs in calls]
        return partial(self._delivery.finish_pull, waiting, rows, later, on_gpu)

    def start_pushpull(
        self, groups: list[Group], outs: list[Group] | None, divisor: int = 1, resumes: bool = False
    ) -> Finish:
        """Arrive.

        The returned function completes the rounds and writes the results. `resumes`: also after Ctrl-C.
        """
        dense, sparse = self._check_sources(groups)
        targets = dict(groups if outs is None else outs)
        if sparse or set(targets) != {key for key, values in groups if values}:
            self._arguments.check_outs(list(targets.items()))
            self.start_push(groups)
            return self.start_pull([(key, arrays) for key, arrays in targets.items() if arrays], True)
        later = OutDeliveries()
        by_gpu, host = self._gpus.staging.split_gpu(dense)
        on_gpu = self._arguments.split_outs([(h, targets[h.key]) for h, _ in by_gpu], later)
        wanted = [
            (h, values, self._arguments.outs(h, targets[h.key], later, values))
            for h, values in self._arguments.by_order(host)
        ]
        later.defer_overlaps(wanted)
        handles = [one[0] for one in (self._arguments.by_order(dense) if by_gpu else wanted)]
        self._waiter.wait_to_push(handles)
        large = is_large([(handle, values + arrays) for handle, values, arrays in wanted])
        private: set[Key] = set()
        try:
            with self._pusher.one_call(handles):
                self._pusher.push_on_gpu(by_gpu)
                direct = self._pusher.push_pushpull(wanted, private, divisor)
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
        """Push and pull one small dense key with plain arrays; or a list of keys, with one array each."""
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
        """As `start_pushpull`, for small dense keys with one plain array each."""
        waiter = self._waiter
        if waiter.joined or waiter.rejoining or self.feedback is not None or self._gpus.staging.in_use:
            return None
        return self._quick.start_sum(keys, values, outs, divisor)

    def quick_push(self, key: Any, value: Any) -> bool | Finish:
        """As `quick_pushpull`, for lists only."""
        waiter = self._waiter
        if waiter.joined or waiter.rejoining or self.feedback is not None or self._gpus.staging.in_use:
            return False
        return self._quick.push(key, value, None, receives=False)

    def quick_pull(self, key: Any, out: Any) -> bool | Finish:
        """As `quick_push`, for a pull."""
        return not self._gpus.staging.in_use and self._quick.pull(key, out)

    def give_up_quick(self, error: BaseException) -> None:
        """Let other workers carry out the rounds that this worker has opened."""
        self._waiter.release_opened()

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Copy rows of row-sparse keys."""
        self._values.gather_rows(wanted)

    def _check_sources(self, groups: list[Group]) -> tuple[Dense, Sparse]:
        """Check all pushed values before any change."""
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
        """Use a callable, or plain sums; every worker calls this."""
        self._values.copy_all_to_region()
        self._updater.set_updater(updater)

    def set_compression(self, codec: Codec) -> None:
        """Pack what this worker pushes; each worker sets its own codec, and has its own residuals."""
        self.feedback = self._pusher.pack(codec)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer; the first worker installs it, and the others must pass an equal one."""
        self._values.copy_all_to_region()
        self._updater.set_optimizer(optimizer)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer, from this worker's next push of each key on."""
        self._waiter.complete_all_pushed()
        self._updater.configure(changes)

    def gather_states(self) -> Updater:
        """Return the optimizer with the states of all keys; live where rounds wait for this worker."""
        self._waiter.complete_all_pushed()
        return self._updater.gather_updater(self._reader)

    def adopt_states(self, content: StatesContent) -> None:
        """Replace the optimizer's states, for all workers."""
        self._waiter.complete_all_pushed()
        self._waiter.check_writing()
        self._updater.replace_states(content)

    def follow_states(self, content: StatesContent) -> None:
        """Use the settings and the update counts that another worker has loaded."""
        self._updater.load_settings()

    # ------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """Return all keys in the order of their init."""
        return [handle.key for handle in self._keys.all()]

    def view(self, key: Key) -> Array | RowSparseArray:
        """Return live memory, read-only; a copy if rounds do not wait for this worker."""
        return self._values.view(key)

    def fetch(self, key: Key) -> Array | RowSparseArray:
        """As `view`."""
        return self._values.view(key)

    def fetch_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """Return the values of all keys, once their rounds are complete."""
        return self._values.view_all(keys)

    def kind(self, key: Key) -> Kind:
        """Return kind, type and shape of a key."""
        handle = self._arguments.handle(key)
        return "row-sparse" if handle.sparse else "dense", handle.dtype.name, handle.shape

    def empty(self, key: Key) -> Array:
        """Return a new array of the key's shape and type in the region."""
        return self._values.empty(key)

    def key_templates(self) -> dict[Key, Array]:
        """Return for each key an array of its shape and type that needs no memory."""
        return {handle.key: handle.like for handle in self._keys.all()}

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Return the placement of the keys: the memory that the workers share."""
        return {handle.key: [("shared memory", self._values.nbytes(handle))] for handle in self._keys.all()}

    def num_dead_nodes(self, timeout: float) -> int:
        """Count the workers that are lost, or sent no heartbeat for `timeout` seconds."""
        self._job.detect_losses()
        lost = set(self._job.lost())
        return len(lost | {w for w in self._job.members() if self._job.silence(w) > timeout})

    # --------------------------------------------------------------------------------------- the job

    def barrier(self) -> None:
        """Wait until every member has reached the barrier."""
        self._waiter.check_writing()
        self._waiter.wait_at_barrier()

    def side(self) -> SharedBackend:
        """Return this store without a codec, for side keys; they are in the same region."""
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
            self._registration.leave(lost=False)

    def abandon(self) -> None:
        """Leave the job as a lost worker: for the end of a process that failed."""
        self._registration.leave(lost=True)

    def note_fork(self) -> None:
        """Record that this process is a fork, which does not take part in the job."""
        self._registration.note_fork()


_stores: weakref.WeakSet[SharedBackend] = weakref.WeakSet()


def _mark_forked() -> None:
    for store in list(_stores):
        store.note_fork()


def _leave_at_exit() -> None:
    """Leave all jobs; as a lost worker if this process failed, so that the other workers notice."""
    engine.wait_for_all_stores()
    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    for store in list(_stores):
        store.abandon() if failed else store.close()


os.register_at_fork(after_in_child=_mark_forked)
atexit.register(_leave_at_exit)
