"""Carries sums of a host to the servers, and what they answer back into the memory of the host.

Whoever opens a round of the host's region is its carrier: whichever worker comes first, so that the slices
spread over all that wait. It sums at once; a thread of its own sends and receives: then a round goes on
though the worker that opened it has more to do. If a carrier dies, another worker of the host opens the
round again, and sends the same sum as the same part: the part is that of the host's seat in this round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays.grouping import Key
from ...arrays.sparse import RowSparseArray
from ...compression import Codec
from ...errors import FencedError, KVStoreError
from ...settings.definitions import is_side
from ..entry import Array
from ..parameter_server.protocol.failures import as_exception
from ..parameter_server.protocol.messages import Failure, PayloadLocation, Record, RecordKind, Slice
from ..parameter_server.protocol.payload_bytes import SHARED_BYTES, as_bytes
from ..parameter_server.worker.client import WorkerClient
from ..parameter_server.worker.operations import PartRequest, PendingOperation
from ..parameter_server.worker.replies import aligned_elements
from ..shared.native import _shared as shm
from .packing import HostPacking
from .quick_exchange import PushHead, QuickExchange, SlicePlan
from .region import Handle, HostRegion, failure_text
from .shared_parts import SharedParts

log = logging.getLogger("kvstore.ps")

_LOOKS = 0.5  # seconds between two looks for rounds that nobody has opened
_PAUSE = 0.1  # seconds for a caller that sends
_PLANS = 1024  # slices of which there is a plan at most
_PORTION = 8 * 1024 * 1024  # bytes of sums that whoever leaves last has in memory beside the region's

#: Of the push into a round of a key: the version of the optimizer's settings, and the schedule's time.
Settings = Callable[[Handle, int], tuple[int, int]]


class SliceExchange(NamedTuple):
    """A round of one slice that this worker carries."""

    handle: Handle
    round: int

    def work(self) -> shm.OpenedWork:
        """Return work on it, as a context that says whether it is still this worker's."""
        return shm.OpenedWork(*self)

    def fail(self, failure: Failure) -> None:
        """Have all workers of the host told why the round came to nothing."""
        with self.work() as held:
            if held:
                self.handle.fail_round(self.round, failure_text(failure))
                shm.close_if_opener(self.handle, self.round, False)


class HostCarrier:
    """The rounds that one worker carries. `parts` has the slice of each key of the region."""

    def __init__(
        self, client: WorkerClient, region: HostRegion, parts: dict[Key, Slice], settings: Settings
    ) -> None:
        self._client, self._region, self._parts, self._settings = client, region, parts, settings
        self._packing, self._shared = HostPacking(region.job), SharedParts(client)
        self._queue: deque[SliceExchange] = deque()
        #: Of rounds into which rows were pushed, until they have answers.
        self._sums: dict[SliceExchange, RowSparseArray | Array] = {}
        self._open: list[tuple[PendingOperation, list[SliceExchange]]] = []
        self._left: deque[tuple[QuickExchange, SliceExchange]] = deque()  # by callers that were interrupted
        self._plans: dict[Handle, SlicePlan] = {}
        self._stopping = False
        self._looked = 0.0
        #: Why this worker carries nothing any more, if so.
        self.error: BaseException | None = None
        self._handed_in = False  # all that was pushed, as the last of the host
        self._summing = threading.Lock()  # while this worker writes to the host's memory it is in the job
        self._sending = threading.RLock()  # so that a caller and the thread do not send at once
        self._thread = threading.Thread(target=self._send_queued, name="kvstore-carrier", daemon=True)

    def start(self) -> None:
        """Carry from now on."""
        self._region.carry_with(self.carry, self.give_up)
        self._thread.start()

    @property
    def packing(self) -> HostPacking:
        """The codec of the host."""
        return self._packing

    def carry(self, handle: Handle, round: int) -> None:
        """Sum a round that this worker has opened, and have it sent; others open the next ones meanwhile."""
        exchange = SliceExchange(handle, round)
        with self._summing:
            if self.error is None:
                self._sum_exchange(exchange)
            self._queue.append(exchange)
            if self.error is not None:
                self._let_go(self.error)
        self._client.driver.wake()

    def carry_alone(self, call: shm.Call) -> bool:
        """Carry a round that this thread has opened, and waits for; False: that is to be done as usual.

        So it goes with a small sum that is sent as it is, while nothing else of this worker is under way.
        What is interrupted, or has no answer after a while, is left to this worker's thread.
        """
        handle = call.handle
        plan, waits = self._plans.get(handle), self._queue or self._left or self._open
        if plan is None or plan.part is not self._parts[handle.key] or waits or self._stopping or self.error:
            return False
        if self._packing.codec() is not None or shm.opened_with_rows(handle):
            return False
        try:
            if self._sending.acquire(blocking=False) and (exchange := self._sum_small(handle, plan)):
                self._send_exchange(exchange, plan)
        except KVStoreError:  # the thread meets it, too
            pass
        finally:
            try:  # noqa: SIM105 - a context manager is a step of its own
                self._sending.release()
            except RuntimeError:
                pass
            if self._queue or self._left or self._open:
                self._see_to_rest()
        return call.finish()

    def _sum_small(self, handle: Handle, plan: SlicePlan) -> SliceExchange | None:
        """Sum a small round that this thread has opened, and queue it; None: another thread does.

        If this is interrupted, whichever thread of this worker waits next, or looks after it, does it again.
        """
        exchange = None
        try:
            if not handle.begin_plan():
                return None
            exchange = SliceExchange(handle, handle.complete + 1)
            with self._summing:
                if self.error is None:
                    total = handle.value(other=True)
                    shm.sum_opened(handle, total)
                    plan.sent[...] = total
                self._queue.append(exchange)
        finally:
            handle.end_plan(exchange not in self._queue)
        return exchange

    def _see_to_rest(self) -> None:
        """Have the thread go on with what a caller has left."""
        if self.error is not None:
            with self._summing:
                self._let_go(self.error)
        self._client.driver.wake()

    def _sum_exchange(self, exchange: SliceExchange) -> None:
        if (of_rows := self._region.total_of_rows(exchange.handle)) is not None:
            self._sums[exchange] = of_rows
            return
        total = exchange.handle.value(other=True)
        if self._slice_codec(exchange.handle) is None:
            near = self._shared.place(*exchange, self._parts[exchange.handle.key].server)
            total = total if near is None else near
        shm.sum_opened(exchange.handle, total)

    def give_up(self, handle: Handle, error: BaseException) -> None:
        """Leave the job, so that another worker of the host carries the round: the servers wait for it."""
        text = (
            f"worker {self._client.rank} could not carry round {handle.complete + 1} of key {handle.key!r}, "
            f"and has left the job: close the store, and start the job again. The cause: {error!r}"
        )
        self._client.leave_as_lost(Failure("KVStoreError", text))

    @property
    def is_done(self) -> bool:
        """Whether servers have all that this host has pushed, and nobody of it will push more."""
        return self._handed_in and not self._region.job.members()

    def check(self) -> None:
        """Raise if this worker carries nothing any more."""
        if self.error is not None and not self._stopping:
            raise KVStoreError(f"worker {self._client.rank} carries no sums any more: {self.error}")

    def stop(self, patiently: bool) -> None:
        """Carry no more; `patiently`: see that the servers have all sums that were opened here.

        Whoever of the host is left takes over what has no answer yet, and gets the answer.
        """
        self._stopping = True
        if self._thread.is_alive():
            self._client.driver.wake()
            self._thread.join(self._client.driver.timeout)
        try:
            if patiently and self._thread.ident is not None:
                # First: once this worker rests, another may pack the next rounds, from these residuals.
                opened = [one for _, several in self._open for one in several]
                self._hand_in(
                    [request for one in opened for request in self._hold_requests(one, RecordKind.PUSH)]
                )
                self.hand_in_rest()
        finally:
            self._shared.close()

    def hand_in_rest(self) -> None:
        """Be waited for no longer by the host; its last worker pushes what nobody has opened."""
        if not self._region.retire_worker() or not self._can_push:
            return
        self._client.driver.forget_reads()  # else a push would wait for the value of the round before it
        requests, nbytes = [], 0
        for handle, round, total in self._region.sum_unopened():
            if handle.key not in self._parts:
                log.warning("worker %d leaves what others pushed into %r", self._client.rank, handle.key)
                continue
            requests += self._sum_requests(SliceExchange(handle, round), RecordKind.PUSH, total)
            nbytes += total.data.nbytes if isinstance(total, RowSparseArray) else total.nbytes
            if nbytes > _PORTION:
                self._hand_in(requests)
                requests, nbytes = [], 0
        self._hand_in(requests)
        self._handed_in = self._can_push

    def _hand_in(self, requests: list[PartRequest]) -> None:
        if requests and self._can_push:
            self._client.perform(requests, "the last sums of a host to be taken in")

    @property
    def _can_push(self) -> bool:
        """Whether this worker still has a part in the job."""
        return not (self._client.has_failed or self._client.member.is_broken)

    # ------------------------------------------------------------------------------------- in the thread

    def _send_queued(self) -> None:
        try:
            while not self._stopping or self._queue or self._left:
                if self._sending.acquire(timeout=_PAUSE):
                    try:
                        self._send_all()
                    finally:
                        self._sending.release()
                self._end_all()
                self._look_after()
                if self._open:
                    self._client.driver.serve(self._has_work)
                else:
                    self._client.driver.rest(self._has_work)
        except BaseException as error:
            self._give_up(error)

    def _has_work(self) -> bool:
        some = bool(self._queue or self._left) or self._stopping
        return some or any(operation.done for operation, _ in self._open)

    def _send_all(self) -> None:
        """Send what was summed here since the last time."""
        while self._left:
            self._end_call(*self._left[0])
            self._left.popleft()
        if len(self._queue) == 1 and not self._open and self._is_plain(self._queue[0]):
            self._exchange_first()
        exchanges: list[SliceExchange] = []
        requests: list[PartRequest] = []
        self._open.append((PendingOperation(), exchanges))  # known to `_give_up` from here on
        while self._queue:
            exchanges.append(self._queue.popleft())
            held = self._hold_requests(exchanges[-1], RecordKind.PUSHPULL)
            requests += held
            if not held:
                self._sums.pop(exchanges.pop(), None)
        if requests:
            self._open[-1] = (self._client.submit(requests), exchanges)
        else:
            self._open.pop()

    def _is_plain(self, exchange: SliceExchange) -> bool:
        """Whether a sum is small, and sent as it is."""
        small = 0 < exchange.handle.nbytes < SHARED_BYTES
        return small and exchange not in self._sums and self._packing.codec() is None

    def _exchange_first(self) -> None:
        """Send a plain sum, and wait a little for the answer, if nothing else is under way."""
        exchange = self._queue[0]
        plan = self._slice_plan(exchange.handle)
        with exchange.work() as held:
            if not held:
                return
            plan.sent[...] = exchange.handle.value(other=True)
        self._send_exchange(exchange, plan)

    def _send_exchange(self, exchange: SliceExchange, plan: SlicePlan) -> None:
        """Send one of the queue, from this process's memory, and wait a little; or leave it there."""
        handle, round = exchange
        head = PushHead(round, *self._settings(handle, round))
        call = QuickExchange(
            plan, head, partial(self._sum_requests, exchange, RecordKind.PUSHPULL, plan.sent)
        )
        try:
            if not self._client.driver.begin(call):
                return
            if len(self._queue) > 1:  # another thread has looked whom to wake before this call was there
                self._client.driver.wake()
            self._end_call(call, exchange)
        except BaseException as error:
            if call.is_counting:
                self._client.give_up_half(call.what, error)
            elif call.sent:
                self._left.append((call, exchange))
                self._queue.remove(exchange)
            raise
        self._queue.remove(exchange)

    def _end_call(self, call: QuickExchange, exchange: SliceExchange) -> None:
        """Wait a little for an answer; what has none then goes on as a usual operation."""
        handle, round = exchange
        operation = self._client.driver.end(call)
        self._client.counters.leave()  # the wait for the answer
        if operation is None or (operation.done and operation.error is None):
            with exchange.work() as held:
                if held:
                    handle.value(other=True)[...] = call.received
                    shm.close_if_opener(handle, round, True)
        else:
            self._plans.pop(handle, None)  # its memory is the operation's
            self._open.append((operation, [exchange]))

    def _slice_plan(self, handle: Handle) -> SlicePlan:
        plan, part = self._plans.get(handle), self._parts[handle.key]
        if plan is None or plan.part is not part:
            if len(self._plans) >= _PLANS:
                del self._plans[next(iter(self._plans))]  # the oldest
            plan = self._plans[handle] = SlicePlan(self._client, handle, part)
        return plan

    def _hold_requests(self, exchange: SliceExchange, kind: RecordKind) -> list[PartRequest]:
        """Ask a server to take in what this worker carries; nothing, if another has taken it over."""
        with exchange.work() as held:  # packing writes to the host's memory
            return self._sum_requests(exchange, kind, self._sums.get(exchange)) if held else []

    def _sum_requests(
        self, exchange: SliceExchange, kind: RecordKind, total: RowSparseArray | Array | None
    ) -> list[PartRequest]:
        """Ask a server to take a sum in: this one, or what was summed when the round was opened."""
        handle, round = exchange
        part = self._parts[handle.key]
        version, clock = self._settings(handle, round)
        head, take = (kind, part.id, 0, round, version, clock), partial(self._receive_answer, exchange)
        if isinstance(total, RowSparseArray):
            answered = take if kind == RecordKind.PUSHPULL else None
            return self._region.rows.push_requests(handle, round, version, clock, part, total, answered)
        if (there := self._shared.payload(handle, round)) is not None:
            return [PartRequest(part.server, Record(*head, **there), (), take, part)]
        total = handle.value(other=True) if total is None else total
        coding: tuple[int, float] = (0, 0.0)
        if (codec := self._slice_codec(handle)) is not None:
            total, coding = self._packing.pack(handle, round, total, codec), codec.compiled or coding
        data = as_bytes(total)
        record = Record(*head, *coding, place=PayloadLocation.FRAME, nbytes=len(data))
        return [PartRequest(part.server, record, (data,), take, part)]

    def _slice_codec(self, handle: Handle) -> Codec | None:
        """Return what packs the sums of a key; None: nothing does."""
        codec = self._packing.codec()
        packs = codec is not None and codec.compiled is not None and handle.dtype == np.float32
        packs = packs and not is_side(handle.key)
        return codec if packs else None

    def _receive_answer(
        self, exchange: SliceExchange, part: Slice, record: Record, frames: Sequence[Any]
    ) -> bool:
        """Put what a server answers where all workers of the host read it; False: ask for it once more."""
        handle, round = exchange
        with exchange.work() as held:
            if held:  # else another has taken it over, and the memory is that of a later round
                if not self._write_answer(handle, part, record, frames):
                    return False
                shm.close_if_opener(handle, round, True)
        self._sums.pop(exchange, None)
        self._shared.give_back(handle, round)
        return True

    def _write_answer(self, handle: Handle, part: Slice, record: Record, frames: Sequence[Any]) -> bool:
        """Write an answer to the host's memory, where it has a place; False: it is to come in a frame."""
        if self._region.rows.is_table(handle):
            return True
        value = handle.value(other=True)
        if record.place == PayloadLocation.SHARED:
            return self._shared.copy(part.server, record, value)
        count = part.stop - part.start
        np.copyto(value, aligned_elements(frames[record.frame], record.offset, value.dtype, count))
        return True

    def _end_all(self) -> None:
        """Tell of exchanges that came to nothing."""
        done = [one for one in self._open if one[0].done]
        for operation, exchanges in done:
            self._open.remove((operation, exchanges))  # callers add others meanwhile
            if operation.error is not None:
                if operation.error.error == "FencedError":  # this worker's own
                    raise as_exception(operation.error)
                for exchange in exchanges:
                    self._sums.pop(exchange, None)
                    exchange.fail(operation.error)
                    if not (self._client.has_failed or self._client.member.is_broken):
                        self._shared.give_back(*exchange)  # else a server may yet read it

    def _look_after(self) -> None:
        """See now and then that no round waits for somebody to open it."""
        now = time.monotonic()
        if now - self._looked >= _LOOKS:
            self._looked = now
            self._region.open_next()

    def _give_up(self, error: BaseException) -> None:
        """Carry no more."""
        expected = isinstance(error, KVStoreError)
        text = "worker %d carries no sums any more: %r"
        log.log(
            logging.DEBUG if expected else logging.ERROR,
            text,
            self._client.rank,
            error,
            exc_info=not expected,
        )
        with self._summing:
            self.error = error
            self._let_go(error)

    def _let_go(self, error: BaseException) -> None:
        """Let nobody wait for what this worker cannot carry."""
        failure = self._client.driver.failure
        out = failure is not None and failure.role != "scheduler"
        if out or isinstance(error, FencedError):  # it alone: the others can carry on
            self._region.declare_lost()
            return
        failure = failure or Failure(type(error).__name__, str(error))
        left = [one for _, one in self._left]
        for exchange in [*(one for _, several in self._open for one in several), *left, *self._queue]:
            exchange.fail(failure)
