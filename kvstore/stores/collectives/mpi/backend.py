"""The store on MPI, by mpi4py: nonblocking collectives of the installed MPI, on communicators of the store.

MPI matches collectives by their order alone. So before each operation, all processes compare their calls in a
small collective on a communicator for this purpose; data is sent if all calls are the same. Waits end at the
deadline of the store. Waits in MPI itself have no deadline, and if a process dies, MPI ends the whole job. In
long waits the processes send each other the number of their calls, so that the missing processes are known.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ....errors import ConfigError, KVStoreError, MissingBackendError, PeerLostError, TimeoutError
from ....settings.options import StoreConfig
from ....waiting import WaitClock
from ..backend import AllReduceBackend, check_launched, check_process, operation_name
from ..call_matching import call_digest, calls_match, mismatch_error
from ..engine import Finish, Item
from .call_counts import CallCounts, missing_text
from .local_peers import LocalPeers, process_identity

log = logging.getLogger("kvstore.mpi")

Array = npt.NDArray[Any]

#: Without 8-bit integers: Open MPI's vector code saturates them (op/avx of 5.0), other stores wrap.
_DTYPES = frozenset(("float32", "float64", "int32", "int64"))
_SMALL = 64 * 1024  # bytes up to which arrays are sent as one: a copy costs less than a message
_MOST = 1 << 30  # bytes of one message: counts of MPI 3 have 31 bits
_PATIENCE = 1e-3  # seconds of a wait after which the thread yields the processor
_NAP = 200e-6
_LONG = 0.1  # seconds after which messages are received even while data is in transfer
_BEFORE_ABORT = 1.0  # seconds in which launchers forward the output: they drop the rest at an abort
_MANY = 64  # operations after which a process that never waits receives the messages


class MpiBackend(AllReduceBackend):
    """See `kvstore.stores.protocol.Backend`."""

    engine: MpiEngine

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config, MpiEngine(config.timeout, config.group))


@dataclass(eq=False, slots=True)
class _MpiOperation:
    """An operation in transfer: first the comparison, then the data."""

    what: str
    checks: Array  # the numbers of this process, and then the maxima of all processes
    items: Sequence[Item]
    start: Callable[[_MpiOperation], list[Any]]
    number: int = 0  # of the store's operations, from 1
    request: Any = None  # of the comparison
    data: list[Any] | None = None  # requests that `start` has made
    back: Sequence[tuple[Array, list[Array]]] = ()  # packed arrays, and the arrays to which they are copied
    done: bool = False
    error: KVStoreError | None = None


class MpiEngine:
    """See `kvstore.stores.collectives.engine.Collective`.

    Parameters
    ----------
    timeout : float
        Seconds after which a wait ends.
    group : str
        Must be the same in all processes: stores are paired by the order of their creation.

    Raises
    ------
    MissingBackendError
        mpi4py is not installed, or it finds no MPI.
    ConfigError
        MPI does not run; or it has one process, and a launcher has started more; or other processes create a
        store of another group.
    KVStoreError
        MPI has no communicators left; or this process is a fork of a process that uses MPI.
    """

    name = "mpi"
    dtypes = _DTYPES
    compares = True
    #: Lock of all stores of this process: some MPIs must not be called from two threads at once.
    _lock = threading.Lock()

    def __init__(self, timeout: float, group: str) -> None:
        check_process(self.name)
        self._mpi: Any = _check_running(_import_mpi())
        self._timeout = timeout
        self._held: list[Any] = []  # running requests, and with them their memory
        self._queue: deque[_MpiOperation] = deque()
        self._count = 0  # number of compared operations
        self._call_counts: CallCounts | None = None
        self._peers = LocalPeers([])
        self._broken: str | None = None
        self._pid = os.getpid()
        world = self._mpi.COMM_WORLD
        self.rank, self.size = world.Get_rank(), world.Get_size()
        check_launched("MPI", self.size, "mpiexec -n {n}", ", from the MPI that mpi4py was installed with")
        if self._mpi.Query_thread() < self._mpi.THREAD_SERIALIZED:
            raise ConfigError(
                "MPI was initialised for one thread only: let mpi4py do it, or ask for MPI_THREAD_SERIALIZED"
            )
        self._own: list[Any] = []  # communicators
        self._made = False
        try:
            self.local_rank = self._join_group(world, group)
        except self._mpi.Exception as error:
            self._free_communicators()
            raise KVStoreError(
                f"worker {self.rank}: MPI makes no more communicators ({_last_line(error)}): close stores "
                "that are not needed any more"
            ) from error
        except ConfigError as error:
            self._free_communicators()
            raise ConfigError(
                f"worker {self.rank} creates a store of group {group!r}, and other workers one of another "
                "group: with mpi all create their stores in the same order"
            ) from error
        self._made = True

    def _join_group(self, world: Any, group: str) -> int:
        """Make communicators with all processes; return the number of this process on its machine."""
        self._order = self._duplicate_world(world)
        self._call_counts = CallCounts(self._mpi, self._order)
        self._data = self._duplicate_world(world)
        self._finish_operation(self._announce_call("create", f"a store of group {group!r}", meaning=group))
        # A split has no deadline, but all processes are present now.
        near = self._order.Split_type(self._mpi.COMM_TYPE_SHARED)
        local_rank = int(near.Get_rank())
        self._peers = LocalPeers(
            [one for one in near.allgather(process_identity(self.rank)) if one[0] != self.rank]
        )
        near.Free()
        return local_rank

    # --------------------------------------------------------------------------------------- operations

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        """Overwrite the items with those of rank 0."""
        what = operation_name("init, broadcast or load", items)
        self._finish_operation(self._announce_call("init", what, items, meaning, self._start_broadcast))

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        """Start a sum; operations are in call order, so `priority` has no effect."""
        operation = self._announce_call("sum", operation_name("the sum", items), items, start=self._start_sum)
        return partial(self._finish_operation, operation)

    def barrier(self) -> None:
        """Wait until all processes have called `barrier`: they have when their calls are compared."""
        self._finish_operation(self._announce_call("barrier", "a barrier"))

    def _announce_call(
        self,
        kind: str,
        what: str,
        items: Sequence[Item] = (),
        meaning: str = "",
        start: Callable[[_MpiOperation], list[Any]] = lambda operation: [],
    ) -> _MpiOperation:
        """Start the comparison of a call; `start` begins the operation when all processes have called it."""
        self._check_broken()
        operation = _MpiOperation(what, call_digest(kind, items, meaning), items, start)
        with self._lock:
            operation.request = self._order.Iallreduce(self._mpi.IN_PLACE, operation.checks, op=self._mpi.MAX)
            self._queue.append(operation)
            self._count = operation.number = self._count + 1
            if self._call_counts is not None and self._count % _MANY == 0:
                self._call_counts.receive_and_answer(self._count)
        return operation

    def _start_broadcast(self, operation: _MpiOperation) -> list[Any]:
        return [
            self._data.Ibcast(piece, root=0) for _, array in operation.items for piece in _array_pieces(array)
        ]

    def _start_sum(self, operation: _MpiOperation) -> list[Any]:
        buffers, operation.back = _pack_arrays(operation.items)
        return [
            self._data.Iallreduce(self._mpi.IN_PLACE, piece, op=self._mpi.SUM)
            for buffer in buffers
            for piece in _array_pieces(buffer)
        ]

    def versions(self) -> dict[str, str]:
        """Return the versions of mpi4py and of its MPI."""
        import mpi4py

        library = " ".join(self._mpi.Get_library_version().split("\n")[0].split(",")[0].strip("\0").split())
        standard = ".".join(str(part) for part in self._mpi.Get_version())
        return {"mpi4py": mpi4py.__version__, "library": library, "MPI": standard}

    def close(self) -> None:
        """Complete the running operations, and free the communicators."""
        if self._broken is None and not self._mpi.Is_finalized():
            self._drive_until(lambda: not self._queue, "the last sums", self._count)
            self._free_communicators()
            self._broken = "the store is closed"

    def _free_communicators(self) -> None:
        """Free communicators without running operations."""
        if self._call_counts is not None:
            with self._lock:
                self._call_counts.receive()
        self._peers.close()
        while self._own:
            self._own.pop().Free()

    def abandon(self) -> None:
        """Abort the MPI job, so that no process waits for this process."""
        if self.size > 1:
            self._mark_broken(f"worker {self.rank} was left by an error")

    # ------------------------------------------------------------------------------------------ waiting

    def _finish_operation(self, operation: _MpiOperation) -> None:
        self._drive_until(lambda: operation.done, operation.what, operation.number)
        if operation.error is not None:
            raise operation.error

    def _drive_until(self, ready: Callable[[], bool], what: str, number: int = 0) -> None:
        """Progress the operations until `ready`, which depends on the operation `number`."""
        clock = WaitClock(self._timeout)
        while True:
            waited = clock.read()
            with self._lock:
                if self._mpi.Is_finalized():
                    raise KVStoreError(f"worker {self.rank}: MPI was finalized in {what}")
                try:
                    active = self._start_agreed()
                    if ready():
                        return
                    if waited > (_LONG if active else _PATIENCE):
                        self._exchange_call_counts(clock)
                except self._mpi.Exception as error:
                    if not self._made:
                        raise
                    self._mark_broken(f"MPI failed in {what}: {error}")
                    raise PeerLostError(f"worker {self.rank}: {self._broken}") from error
            if clock.is_over:
                self._give_up(what, waited, number)
            if clock.notice_due():
                log.warning(
                    "worker %d has waited %.0f s for %s; %s",
                    self.rank,
                    waited,
                    what,
                    self._missing_text(number),
                )
            if active or waited < _PATIENCE:
                os.sched_yield()
            else:
                time.sleep(_NAP)

    def _exchange_call_counts(self, clock: WaitClock) -> None:
        """Receive the counts of other processes, answer, and after a while send the count of this process."""
        if self._call_counts is not None:
            self._call_counts.receive_and_answer(self._count)
            if clock.is_long:
                self._call_counts.send(self._count)

    def _missing_text(self, number: int) -> str:
        """Name the processes that have not called an operation; without a number, they are not known."""
        text = "all workers must call it"
        return (
            text
            if self._call_counts is None or not number
            else f"{text}, {missing_text(self._call_counts.missing(number))}"
        )

    def _start_agreed(self) -> bool:
        """Start the operations that all processes have called, in order.

        Return whether data is in transfer.
        """
        for operation in self._queue:
            if operation.data is None:
                if not operation.request.Test():
                    break
                self._begin_operation(operation)
        active = False
        for operation in self._queue:
            if operation.data is None:
                break
            if not operation.done and self._mpi.Request.Testall(operation.data):
                self._check_peers(operation)
                for packed, places in operation.back:
                    _unpack_arrays(packed, places)
                operation.done = True
            active = active or not operation.done
        while self._queue and self._queue[0].done:
            self._queue.popleft()
        return active

    def _begin_operation(self, operation: _MpiOperation) -> None:
        """Start the data of an operation that all processes have called, if their calls are the same."""
        if calls_match(operation.checks):
            operation.data = operation.start(operation)
        else:
            self._check_peers(operation)
            operation.data, operation.done = [], True
            operation.error = mismatch_error(self.name, self.rank, operation.what)

    def _check_peers(self, operation: _MpiOperation) -> None:
        """Raise if a process of this machine has ended: a complete result can be wrong then."""
        if (rank := self._peers.lost_rank()) is None:
            return
        self._mark_broken(f"worker {rank} died in {operation.what}")
        raise PeerLostError(f"worker {self.rank}: {self._broken}", role="worker", rank=rank)

    def _wait_requests(self, requests: list[Any], what: str) -> None:
        """Wait for requests; if the wait ends early, their memory stays MPI's."""
        self._held.append(requests)
        self._drive_until(lambda: self._mpi.Request.Testall(requests), what)
        self._held.remove(requests)

    def _duplicate_world(self, world: Any) -> Any:
        with self._lock:
            made, request = world.Idup()
        self._wait_requests([request], "all workers to create the store")
        self._own.append(made)
        return made

    # ------------------------------------------------------------------------------------------ trouble

    def _check_broken(self) -> None:
        if self._broken is None and self._mpi.Is_finalized():
            self._broken = "MPI was finalized before the store was closed"
        if self._broken is not None:
            raise KVStoreError(f"worker {self.rank}: {self._broken}; start the job again")

    def _give_up(self, what: str, waited: float, number: int) -> None:
        text = f"worker {self.rank} has waited {waited:.0f} s for {what}: {self._missing_text(number)}"
        self._mark_broken(text)
        raise TimeoutError(f"{text}; MPI cannot cancel it, so start the job again")

    def _mark_broken(self, text: str) -> None:
        """Mark the store as broken.

        MPI still owns the memory of running operations and must not be finalized.
        """
        if self._broken is None:
            self._broken = text
            atexit.register(self._abort_job, text)

    def _abort_job(self, text: str) -> None:
        if os.getpid() == self._pid and not self._mpi.Is_finalized():
            log.error("ending the MPI job: %s", text)
            try:
                time.sleep(_BEFORE_ABORT)
            finally:  # also after Ctrl-C
                self._mpi.COMM_WORLD.Abort(1)


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MissingBackendError(
            "store 'mpi' needs mpi4py and an MPI: `pip install 'kvstore-train[mpi]' mpich` (or openmpi, or "
            f"the site's own MPI), and start with `mpiexec -n 2 python train.py`; {error}"
        ) from error
    return MPI


def _check_running(mpi: Any) -> Any:
    """Raise unless MPI can be called: a call before its start or after its end would abort the job."""
    if mpi.Is_finalized():
        raise ConfigError(
            "MPI was finalized in this process, and does not start twice: use stores of 'mpi' before that"
        )
    if not mpi.Is_initialized():
        raise ConfigError(
            "MPI is not initialised, because mpi4py.rc.initialize was set to False: call "
            "MPI.Init_thread(MPI.THREAD_MULTIPLE) before, or leave it to mpi4py"
        )
    return mpi


def _last_line(error: Exception) -> str:
    """Return the last line of an error: MPICH's first line has no information."""
    return str(error).strip().split("\n")[-1].strip()


def _pack_arrays(items: Sequence[Item]) -> tuple[list[Array], list[tuple[Array, list[Array]]]]:
    """Pack small arrays of one type into one: return the arrays to sum, and the copies to make afterwards."""
    buffers: list[Array] = []
    small: dict[np.dtype[Any], list[Array]] = {}
    for _, array in items:
        if array.nbytes > _SMALL:
            buffers.append(array)
        elif array.size:
            small.setdefault(array.dtype, []).append(array)
    back = []
    for arrays in small.values():
        if len(arrays) == 1:
            buffers.append(arrays[0])
            continue
        back.append((np.concatenate([array.reshape(-1) for array in arrays]), arrays))
        buffers.append(back[-1][0])
    return buffers, back


def _unpack_arrays(packed: Array, places: list[Array]) -> None:
    start = 0
    for array in places:
        array.reshape(-1)[:] = packed[start : start + array.size]
        start += array.size


def _array_pieces(array: Array) -> Iterator[Array]:
    flat = array.reshape(-1)
    step = _MOST // flat.itemsize
    for start in range(0, len(flat), step):
        yield flat[start : start + step]
