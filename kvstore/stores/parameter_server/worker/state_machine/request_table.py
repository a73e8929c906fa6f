"""What one worker wants of one server: sent by priority, within a credit, again until it is answered.

Requests get their sequence when they are first sent. A request that has gone out with a payload is not sent
with it again before the server has said that it does not know it: the answer may only be waiting for others.

Requests of one slice go out in the order in which they were added, whatever their priorities: a server that
has no rounds does them as they come.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from ...native._native import count_answers, count_requests
from ...protocol import messages as m
from ...protocol.messages import (
    FLAGS,
    KIND,
    NBYTES,
    PLACE,
    ROUND,
    SEQUENCE,
    SLICE,
    SPAN,
    Batch,
    Record,
    RecordKind,
)
from .options import WorkerOptions

_MANY = 4096  # records of a batch
_PUSHED = 32  # pushes into a slice that are on the way; a server takes some more ahead of the rounds
_FEW = 64  # requests that may be repeated instead of asked for
_SMALL = 4096  # bytes that cost no more than asking whether they have come
_SAMPLE = 512  # overdue requests that are asked for at first, as long as none is known to be lost

_FIRST = -(1 << 62)  # before any priority

_PUSHES = frozenset((RecordKind.PUSH, RecordKind.PUSHPULL))
_READS = frozenset((RecordKind.PULL, RecordKind.PUSHPULL))
_FRAME, _SHARED = m.PayloadLocation.FRAME, m.PayloadLocation.SHARED
_new = tuple.__new__

#: A request that is to be sent: less its priority, its place among equals, and itself.
_Entry = tuple[int, int, "RequestInFlight"]
#: Records of one message, and their payloads.
RecordBatch = tuple[list[Record], list[Any]]


class OperationProgress:
    """A call of the store: requests to one or more servers."""

    __slots__ = ("error", "left", "name")

    def __init__(self, name: Hashable, left: int) -> None:
        self.name = name
        self.left = left
        self.error: Any = None


class RequestInFlight:
    """One record on its way; `operation` is None when nobody waits for it any more."""

    __slots__ = (
        "asked", "back", "index", "operation", "payload", "pushed", "record", "sent", "sequence", "size",
    )  # fmt: skip

    def __init__(
        self, operation: OperationProgress, index: int, record: Record, payload: Any, back: int = 0
    ) -> None:
        self.operation: OperationProgress | None = operation
        self.index = index
        self.record = record
        self.payload = payload
        self.size = record[NBYTES] if record[PLACE] == _FRAME else 0
        self.back = back
        self.sequence = 0
        self.sent = 0.0
        self.asked = False  # its answer was overdue
        #: Of a read of what a push came to: the push, for a server that has lost it.
        self.pushed: tuple[Record, Any] | None = None

    def push(self, record: Record, payload: Any) -> None:
        """Be a push again, of what lies in this worker's memory."""
        self.record, self.payload, self.pushed = record, payload, None

    def disown(self) -> None:
        """Nobody waits for it, and its payload is gone; what is left is harmless, and is still answered."""
        self.operation = None
        self.payload = None
        self.record = Record(RecordKind.PULL, self.record.slice, 0)
        self.size = self.back = 0
        self.pushed = None


class RequestTable:
    """Requests to one server, whose values change `in_rounds`, or with each push of anybody."""

    def __init__(self, options: WorkerOptions, in_rounds: bool = True) -> None:
        self._in_rounds = in_rounds
        self.credit, self.report = options.credit, options.report_bytes
        self.batch_bytes = options.batch_bytes
        self._counts_answers = options.counts_answers
        self.resend = options.resend
        #: By slice, the round before this worker's first; its own rounds are counted from there.
        self.first_rounds: dict[int, int] = {}
        #: How many pushes into each slice there are.
        self.pushes: dict[int, int] = {}
        #: Last push into each slice that was answered, as a round of the server.
        self.accepted: dict[int, int] = {}
        #: Last round of each slice that is known to be complete, as the server counts.
        self.complete: dict[int, int] = {}
        #: Rounds that were seen complete in answers since somebody took this number.
        self.rounds = 0
        #: Without rounds: slices and rounds of values in the server's memory, for `end_reads`.
        self.untaken: list[tuple[int, int]] = []
        self._queue: list[_Entry] = []
        self._last: dict[int, _Entry] = {}  # by slice: of those added and not sent, the last
        self._order = 0
        self._flying: dict[int, int] = {}  # by slice: pushes that are sent and not answered
        self._reads: dict[int, list[int]] = {}  # by slice: rounds of which values are asked for, and not come
        #: By slice, as heaps: pushes that wait for those, and what was added after them.
        self._held: dict[int, list[_Entry]] = {}
        self._open: dict[int, RequestInFlight] = {}  # by sequence: sent and not answered
        self._oldest = 1  # nothing below is open
        self._next = 1
        self._sent = 0  # bytes, since the server began to count
        self._answered = 0
        self._received = 0
        self._back = 0  # bytes of answers that are yet to come
        self._looked = 0.0
        self._lossy = False  # the server has not got something that was sent
        self._sample = _SAMPLE
        self._helped = False  # something that was asked for again has been answered

    def __len__(self) -> int:
        return len(self._queue) + len(self._open) + sum(map(len, self._held.values()))

    @property
    def is_empty(self) -> bool:
        """Whether nothing is under way."""
        is_out = self._sent > self._answered and self._sent > self._received
        return not (is_out or self._queue or self._open or self._held)

    def add(self, request: RequestInFlight, priority: int) -> None:
        """Queue a request, behind all of its slice that have not been sent."""
        self._order += 1
        slice_, key = request.record[SLICE], -priority
        last = self._last.get(slice_)
        if last is not None and last[0] > key:
            key = last[0]
        entry = self._last[slice_] = key, self._order, request
        heapq.heappush(self._queue, entry)

    def add_first(self, request: RequestInFlight) -> None:
        """Queue a request before all that have not been sent."""
        self._order += 1
        heapq.heappush(self._queue, (_FIRST, -self._order, request))

    def pushed(self) -> tuple[tuple[int, int], ...]:
        """Last push into each slice, as a round of the server; where there is none, the round before."""
        own = {slice_: count + self.first_rounds.get(slice_, 0) for slice_, count in self.pushes.items()}
        return tuple((self.first_rounds | own).items())

    def unanswered(self) -> tuple[int, tuple[int, ...]]:
        """Sequence of the next new request, and those of requests before it that have no answer."""
        return self._next, tuple(one.sequence for one in self._all() if one.sequence)

    def outstanding(self) -> int:
        """Bytes that have been sent and may still be on the way."""
        return max(0, self._sent - max(self._received, self._answered))

    def pump(self, now: float) -> list[RecordBatch]:
        """Take from the queue what may be sent now: records and payloads of each batch."""
        batches = []
        records: list[Record] = []
        frames: list[Any] = []
        size = 0
        out = self.outstanding()
        free = self.credit - out
        queue, last, held = self._queue, self._last, self._held
        while queue:
            entry = queue[0]
            request = entry[2]
            slice_, is_push = request.record[SLICE], request.record[KIND] in _PUSHES
            behind = slice_ in held and held[slice_][0] < entry
            if behind or (is_push and self._waits(slice_, request.record[ROUND])):
                heapq.heappush(held.setdefault(slice_, []), heapq.heappop(queue))
                continue
            bytes_ = request.size
            # Fewer than `report` bytes may all have come without a word of the server.
            full = bytes_ > free and (out >= self.report or free < self.credit - out)
            if full or self._is_too_much(request.back) or not self._numbered(request):
                break
            heapq.heappop(queue)
            if last.get(slice_) is entry:
                del last[slice_]
            if records and (size + bytes_ > self.batch_bytes or len(records) == _MANY):
                batches.append((records, frames))
                records, frames, size = [], [], 0
            self._note_sent(request)
            if held:
                self._release(slice_)
            request.sent = now
            free -= bytes_
            self._sent += bytes_
            size += bytes_
            records.append(self._written(request, frames))
        if records:
            batches.append((records, frames))
        return batches

    def _is_too_much(self, back: int) -> bool:
        """Whether an answer is too much beside those that are yet to come: its server would keep it."""
        return self._counts_answers and self._back > 0 and back > self.credit - self._back

    def _waits(self, slice_: int, round_: int) -> bool:
        """Whether a push has to wait: for others that are on the way, or for a value that is older than it.

        A server sends a value from where it lies, and the rounds after it may be written there: but none goes
        on without this worker's push.
        """
        return (
            self._flying.get(slice_, 0) >= _PUSHED
            or min(self._reads.get(slice_, ()), default=round_) < round_
        )

    def _note_sent(self, request: RequestInFlight) -> None:
        """Wait for the answer to a request."""
        self._open[request.sequence] = request
        self._back += request.back
        record = request.record
        if record[KIND] in _PUSHES:
            self._flying[record[SLICE]] = self._flying.get(record[SLICE], 0) + 1
        if record[KIND] in _READS:
            self._reads.setdefault(record[SLICE], []).append(record[ROUND])

    def begin_exchange(self, slices: list[int], pushes: bool = True) -> tuple[int, int, list[int]]:
        """Count one request for each slice, which go out another way, as all do that are under way.

        Returns the first sequence; bytes that were sent before; and rounds, as the server counts. Of these
        requests at most `SPAN` are under way at a time. `end_exchange` takes those that are answered, `adopt`
        the others.
        """
        rounds = count_requests(slices, self.pushes, self.first_rounds, pushes)
        first = self._oldest = self._next
        self._next += len(slices)
        return first, self._sent, rounds

    def end_exchange(
        self,
        slices: list[int],
        rounds: list[int],
        last: list[int],
        nbytes: int,
        received: int,
    ) -> int:
        """Take answers to requests that went another way: `rounds` of pushes, and the last complete ones.

        Returns how many rounds more are complete; less than 0 of a server that was started again.
        """
        self._sent += nbytes
        self._answered += nbytes
        if received > self._received:
            self._received = received
        return count_answers(slices, rounds, last, self.complete, self.accepted, self.first_rounds)

    def adopt(
        self, requests: Iterable[RequestInFlight], end: int, now: float, priority: int | None = None
    ) -> None:
        """Take over requests without answers; those from sequence `end` on are yet to be sent.

        These come first; or, where nothing from `end` on has been sent, by their priority, with new numbers.
        """
        for request in requests:
            if request.sequence < end:
                self._oldest = min(self._oldest, request.sequence)
                request.sent = now
                self._note_sent(request)
                self._sent += request.size
            elif priority is None:
                self._oldest = min(self._oldest, request.sequence)
                heapq.heappush(self._queue, (_FIRST, request.sequence, request))
            else:
                self._next = min(self._next, end)
                request.sequence = 0
                self.add(request, priority)
        self._oldest = min(self._oldest, self._next)

    def answered(
        self, batch: Batch, now: float
    ) -> tuple[list[tuple[RequestInFlight, Record]], list[RequestInFlight]]:
        """Take replies: requests that are answered now, and those that the server never got."""
        if batch.received > self._received:
            self._received = batch.received
        done = []
        unknown = []
        for record in batch.records:
            request = self._open.get(record[SEQUENCE])
            if request is None:
                continue
            if record[KIND] == RecordKind.UNKNOWN:
                unknown.append(request)
                request.sent = now
                self._lossy = True
                continue
            del self._open[record[SEQUENCE]]
            self._helped = self._helped or request.asked
            self._answered += request.size
            self._back -= request.back
            slice_ = record[SLICE]
            before = self.complete.get(slice_, self.first_rounds.get(slice_, 0))
            self.rounds += max(0, record[ROUND] - before)
            self.complete[slice_] = record[ROUND]
            self._note_answered(request.record, record)
            done.append((request, record))
        return done, unknown

    def _note_answered(self, asked: Record, answer: Record) -> None:
        """Let go what has waited for the answer to a request.

        Without rounds others may change a value in the server's memory before it is copied. Then it is asked
        for again, which has to come before this worker's later pushes: a server does requests in their order.
        """
        slice_, kind = asked[SLICE], asked[KIND]
        if kind in _PUSHES:
            self._accept(slice_, asked[ROUND] + self.first_rounds.get(slice_, 0))
            self._flying[slice_] -= 1
        if kind in _READS and answer[PLACE] == _SHARED and not self._in_rounds:
            self.untaken.append((slice_, asked[ROUND]))
        elif kind in _READS:
            self._end_read(slice_, asked[ROUND])
        if self._held:
            self._release(slice_)

    def end_reads(self, reads: Iterable[tuple[int, int]]) -> None:
        """Let go what has waited until values were copied; those to be asked for again are queued by now."""
        for slice_, round_ in reads:
            self._end_read(slice_, round_)
            self._release(slice_)

    def _end_read(self, slice_: int, round_: int) -> None:
        if reads := self._reads.get(slice_):
            if round_ in reads:  # not of one that was given up
                reads.remove(round_)
            if not reads:
                del self._reads[slice_]

    def _accept(self, slice_: int, round_: int) -> None:
        """Note that a push was answered; an answer may come after those to later pushes."""
        self.accepted[slice_] = max(round_, self.accepted.get(slice_, round_))

    def overdue(self, now: float) -> list[RequestInFlight]:
        """Return requests that have waited too long for an answer; they count as sent now.

        Of very many only every so many-th, until one of these turns out to be lost: a server that is only
        slow must not be buried under repetitions, and what is lost is lost in whole batches. Answers may be
        lost, too, which nobody can tell from slow ones: so as long as asking helps, more are asked for.
        """
        if now - self._looked < self.resend / 4:
            return []
        self._looked = now
        overdue = [request for request in self._open.values() if now - request.sent >= self.resend]
        self._sample = 2 * self._sample if overdue and self._helped else _SAMPLE
        self._helped = False
        if self._lossy:
            self._lossy = False
        elif len(overdue) > self._sample:
            overdue = overdue[:: -(-len(overdue) // self._sample)]
        for request in overdue:
            request.sent, request.asked = now, True
        return overdue

    def suspect(self) -> None:
        """Take all requests for overdue, and for lost rather than slow."""
        self._looked, self._lossy = -math.inf, True
        for request in self._open.values():
            request.sent = -math.inf

    def probes(self, requests: Sequence[RequestInFlight]) -> list[RecordBatch]:
        """Ask for the answers again: a few small requests are repeated, of others only the heads are."""
        return self._batches(requests, probe=True)

    def repeats(self, requests: Sequence[RequestInFlight]) -> list[RecordBatch]:
        """Repeat requests with their payloads."""
        return self._batches(requests, probe=False)

    def begin_again(self) -> None:
        """Another process has taken the server's place: nothing has been sent to it."""
        self._push_again()
        for request in self._open.values():
            # Before whatever has no sequence yet: the server's window must not be left behind.
            heapq.heappush(self._queue, (_FIRST, request.sequence, request))
        self._open.clear()
        self._sent = self._answered = self._received = self._back = 0
        self._flying.clear()
        self._reads.clear()
        for slice_ in list(self._held):
            self._release(slice_)

    def _push_again(self) -> None:
        """Push what the server had taken in, where its answer could not be read any more."""
        for request in self._all():
            if request.pushed is None:
                continue
            record, payload = request.pushed
            last = record.round + self.first_rounds.get(record.slice, 0)
            if self.accepted.get(record.slice) == last:
                self.accepted[record.slice] = last - 1
                request.push(record, payload)

    def forget_reads(self) -> None:
        """Let pushes into later rounds go before values that nobody reads any more."""
        self._reads.clear()
        for slice_ in list(self._held):
            self._release(slice_)

    def disown(self) -> list[OperationProgress]:
        """Give up all requests: those sent stay until they are answered, since the server counts on them."""
        operations = {id(one): one for one in map(_operation, self._all()) if one is not None}
        self._held.clear()
        self._flying.clear()
        self._reads.clear()
        self._last.clear()
        self._queue = [one for one in self._queue if one[2].sequence]
        # Their bytes are waited for no more: those of a lost message would hold up everything that follows.
        self._answered += sum(request.size for request in self._open.values())
        self._back = 0
        for request in self._all():
            request.disown()
        heapq.heapify(self._queue)
        return list(operations.values())

    def drop(self) -> list[OperationProgress]:
        """Give up all requests: the server is lost."""
        operations = self.disown()
        self._queue.clear()
        self._open.clear()
        return operations

    def oldest(self) -> tuple[int, int] | None:
        """Slice and round, as the server counts, of the request that has waited longest for its answer."""
        request = next(iter(self._open.values()), None)
        if request is None:
            return None
        slice_ = request.record[SLICE]
        return slice_, request.record[ROUND] + self.first_rounds.get(slice_, 0)

    def waiting(self, operation: Hashable) -> list[Record]:
        """Return the requests of an operation that have no answer yet."""
        return [one.record for one in self._of(operation)]

    def lends(self, operation: Hashable) -> bool:
        """Whether memory of an operation's caller is being sent, or may be."""
        return any(
            one.size > m.COPIED and one.sequence in self._open and one.record[KIND] != RecordKind.PULL_ROWS
            for one in self._of(operation)
        )

    def keep(self, operation: Hashable) -> None:
        """Copy what is to be sent of an operation, so that its caller may do with the memory as he likes."""
        for one in self._of(operation):
            if one.size:
                one.payload = tuple(bytes(part) for part in one.payload)

    def _of(self, operation: Hashable) -> list[RequestInFlight]:
        return [one for one in self._all() if one.operation is not None and one.operation.name == operation]

    def _all(self) -> list[RequestInFlight]:
        held = (one[2] for several in self._held.values() for one in several)
        return [*self._open.values(), *(one[2] for one in self._queue), *held]

    def _release(self, slice_: int) -> None:
        """Queue the first of what waits in a slice, unless it still has to; the next follows that one.

        More of them at a time would be put back by `pump`, after as many steps for each answer as there are.
        """
        held = self._held.get(slice_)
        if not held:
            return
        record = held[0][2].record
        if record[KIND] in _PUSHES and self._waits(slice_, record[ROUND]):
            return
        heapq.heappush(self._queue, heapq.heappop(held))
        if not held:
            del self._held[slice_]

    def _numbered(self, request: RequestInFlight) -> bool:
        """Give the request its sequence, unless the server could not take it yet."""
        sequence = request.sequence or self._next
        while self._oldest < sequence and self._oldest not in self._open:
            self._oldest += 1
        if sequence >= self._oldest + SPAN:
            return False
        if not request.sequence:
            request.sequence = sequence
            self._next += 1
        return True

    def _written(self, request: RequestInFlight, frames: list[Any]) -> Record:
        record = request.record
        round_ = record[ROUND] + self.first_rounds.get(record[SLICE], 0)
        if record[PLACE] != _FRAME:
            return _new(Record, (record[KIND], record[SLICE], request.sequence, round_, *record[4:]))
        frames.append(request.payload)
        where = (_FRAME, len(frames) - 1, 0, record[NBYTES], record[FLAGS])
        return _new(Record, (record[KIND], record[SLICE], request.sequence, round_, *record[4:9], *where))

    def _batches(self, requests: Sequence[RequestInFlight], probe: bool) -> list[RecordBatch]:
        batches = []
        records: list[Record] = []
        frames: list[Any] = []
        size = 0
        for request in requests:
            short = probe and (request.size > _SMALL or len(requests) > _FEW)
            if records and (size + request.size > self.batch_bytes or len(records) == _MANY):
                batches.append((records, frames))
                records, frames, size = [], [], 0
            records.append(self._head(request) if short else self._written(request, frames))
            size += 0 if short else request.size
        if records:
            batches.append((records, frames))
        return batches

    def _head(self, request: RequestInFlight) -> Record:
        record = self._written(request, [])
        return record._replace(rows=-1, place=m.PayloadLocation.NONE, frame=0, nbytes=0, flags=m.PROBE)


def _operation(request: RequestInFlight) -> OperationProgress | None:
    return request.operation
