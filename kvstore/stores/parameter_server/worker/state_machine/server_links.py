"""One store's requests to its servers: to whom it is attached, what is on its way, and what was answered."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence, ValuesView

import msgspec

from ...protocol import messages as m
from ...protocol.events import (
    Action,
    ConnectServer,
    OperationDone,
    ReadsCopied,
    RetrySlice,
    RoundsSeen,
    SendMessage,
    SliceReceived,
    SliceRequest,
    SubmitRequests,
)
from ...protocol.losses import loss_failure
from ...protocol.messages import (
    BY_FRAME,
    KIND,
    ROUND,
    SLICE,
    Batch,
    Failure,
    PayloadLocation,
    Record,
    RecordKind,
)
from .member import StoreMember
from .options import WorkerOptions
from .request_table import OperationProgress, RecordBatch, RequestInFlight, RequestTable

_PULL, _PUSH, _PUSHPULL, _INIT = RecordKind.PULL, RecordKind.PUSH, RecordKind.PUSHPULL, RecordKind.INIT
_PUSHES = frozenset((_PUSH, _PUSHPULL))
_VALUE, _FAILED = RecordKind.VALUE, RecordKind.FAILED
_new = tuple.__new__


class ServerLink:
    """One server as this worker knows it."""

    __slots__ = ("attached", "attempted", "incarnation", "join_epoch", "lost", "met", "requests")

    def __init__(self, requests: RequestTable) -> None:
        self.requests = requests
        self.incarnation = -1
        self.attached = False
        self.met = False  # attached to it or to one whose place it has taken
        self.attempted = 0.0
        self.join_epoch = 0  # in which this worker began, of which the server has told the rounds
        self.lost: Failure | None = None


class ServerLinks:
    """All servers of one store, and the operations that wait for them.

    `hello` is how this worker has introduced itself, `memory` the handle of what it shares.
    """

    def __init__(
        self, member: StoreMember, hello: m.HelloRequest, options: WorkerOptions, memory: str
    ) -> None:
        self._member, self._hello, self._options, self._memory = member, hello, options, memory
        self._links: dict[int, ServerLink] = {}
        self._operations: dict[Hashable, OperationProgress] = {}
        self._has_rounds = hello.options.get("mode", "sync") == "sync"

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, server: int) -> bool:
        return server in self._links

    def __getitem__(self, server: int) -> ServerLink:
        return self._links[server]

    def all(self) -> ValuesView[ServerLink]:
        """Every server that was ever met."""
        return self._links.values()

    @property
    def busy(self) -> bool:
        """Whether an operation is under way."""
        return bool(self._operations)

    # ------------------------------------------------------------------------------------------- operations

    def refusal(self, parts: Iterable[SliceRequest]) -> Failure | None:
        """Why requests cannot be made, if so."""
        broken = self._member.is_broken
        for part in parts:
            link = self._links[part.server]
            if link.lost is not None:
                return link.lost
            if broken and part.record.kind in (_PUSH, _PUSHPULL, _INIT):
                return self._member.loss_failure()
        return None

    def submit(self, event: SubmitRequests, now: float, actions: list[Action]) -> None:
        """Begin an operation."""
        operation = self._operations[event.op] = OperationProgress(event.op, len(event.parts))
        links = self._links
        touched = set()
        for index, part in enumerate(event.parts):
            link = links[part.server]
            link.requests.add(
                RequestInFlight(operation, index, self._counted(link, part.record), part.payload, part.back),
                event.priority,
            )
            touched.add(part.server)
        for server in touched:
            self._pump(server, now, actions)

    def retry(self, event: RetrySlice, now: float, actions: list[Action]) -> None:
        """Ask for a value once more, in a frame, of the same round: before pushes that waited for it."""
        operation = self._operations.get(event.op)
        if operation is None:
            operation = self._operations[event.op] = OperationProgress(event.op, 0)
            operation.error = event.error
        operation.left += 1
        record = event.part.record
        kind = _PULL if record.kind == _PUSHPULL else record.kind
        payload = None if kind == _PULL else event.part.payload
        place, nbytes = (PayloadLocation.NONE, 0) if kind == _PULL else (record.place, record.nbytes)
        link = self._links[event.part.server]
        record = record._replace(kind=kind, sequence=0, flags=BY_FRAME, place=place, nbytes=nbytes)
        request = RequestInFlight(operation, event.index, record, payload, event.part.back)
        if self._is_in_memory(event.part.record):
            request.pushed = event.part.record._replace(sequence=0, flags=BY_FRAME), event.part.payload
        link.requests.add_first(request)
        self._pump(event.part.server, now, actions)

    def taken(self, event: ReadsCopied, now: float, actions: list[Action]) -> None:
        """Send what has waited until values were copied out of a server's memory, or asked for again."""
        self._links[event.server].requests.end_reads(event.reads)
        self._pump(event.server, now, actions)

    def _is_in_memory(self, record: Record) -> bool:
        """Whether this is a push of a round, of values that no answer has been written over."""
        view = self._member.view
        sync = view is not None and view.mode == "sync"
        return sync and record.kind == _PUSHPULL and record.place == PayloadLocation.SHARED

    def _counted(self, link: ServerLink, record: Record) -> Record:
        """Say how many pushes of this worker there are, with this one."""
        slice_ = record[SLICE]
        pushes = link.requests.pushes
        kind = record[KIND]
        if kind in _PUSHES:  # who pushes for a host says which of its rounds it is
            count = pushes[slice_] = record[ROUND] or pushes.get(slice_, 0) + 1
        elif self._member.is_broken:
            count = record[ROUND]  # no round will be complete: what is there, or the one the caller names
        else:
            count = max(record[ROUND], pushes.get(slice_, 0))
        return _new(Record, (kind, slice_, 0, count, *record[4:]))

    def _pump(self, server: int, now: float, actions: list[Action]) -> None:
        link = self._links[server]
        if link.attached and link.join_epoch >= self._member.join_epoch:
            self._send(server, link.requests.pump(now), actions)

    def _send(self, server: int, batches: list[RecordBatch], actions: list[Action]) -> None:
        welcome = self._member.welcome
        if welcome is None:
            return
        head = (welcome.store, welcome.rank, self._hello.incarnation, self._member.epoch)
        for records, frames in batches:
            actions.append(SendMessage(server, Batch(*head, records, tuple(frames))))

    def replies(self, server: int, batch: Batch, now: float, actions: list[Action]) -> None:
        """Take what a server answers."""
        link = self._links.get(server)
        if link is None or batch.incarnation != self._hello.incarnation or not link.attached:
            return
        done, unknown = link.requests.answered(batch, now)
        if link.requests.rounds and not self._member.seats:  # rounds of hosts are counted in their memory
            actions.append(RoundsSeen(link.requests.rounds))
        link.requests.rounds = 0
        for request, record in done:
            operation = request.operation
            if operation is None:
                continue
            operation.left -= 1
            if record[KIND] == _VALUE:
                asked = request.record[ROUND]
                actions.append(SliceReceived(operation.name, request.index, record, batch.frames, asked))
            elif record[KIND] == _FAILED and operation.error is None:
                operation.error = failure_of(record, batch)
            if not operation.left:
                del self._operations[operation.name]
                actions.append(OperationDone(operation.name, operation.error))
        if unknown:
            self._send(server, link.requests.repeats(unknown), actions)
        self._pump(server, now, actions)
        if link.requests.untaken:
            actions.append(ReadsCopied(server, tuple(link.requests.untaken)))
            link.requests.untaken.clear()

    def is_idle(self, server: int) -> bool:
        """Whether requests to a server may go out now, and none is under way."""
        link = self._links[server]
        attached = link.attached and link.lost is None and link.join_epoch >= self._member.join_epoch
        return attached and link.requests.is_empty

    def adopt(
        self,
        op: Hashable,
        parts: Sequence[tuple[int, SliceRequest]],
        ends: Mapping[int, int],
        now: float,
        priority: int | None,
    ) -> list[Action]:
        """Go on with requests of an exchange, each counted, and with its sequence, as with an operation."""
        operation = self._operations[op] = OperationProgress(op, len(parts))
        requests: dict[int, list[RequestInFlight]] = {server: [] for server in ends}
        for index, part in parts:
            record = part.record
            request = RequestInFlight(operation, index, record._replace(sequence=0), part.payload)
            request.sequence = record.sequence
            requests[part.server].append(request)
        actions: list[Action] = []
        for server, end in ends.items():
            self._links[server].requests.adopt(requests[server], end, now, priority)
            self._pump(server, now, actions)
        return actions

    def oldest(self) -> tuple[int, int, int] | None:
        """Server, slice and round of a request that has waited long; None: nothing is under way."""
        for server, link in self._links.items():
            if (oldest := link.requests.oldest()) is not None:
                return server, *oldest
        return None

    def pending(self, op: Hashable) -> list[tuple[int, Record]]:
        """Server and request of whatever an operation still waits for."""
        return [(server, one) for server, link in self._links.items() for one in link.requests.waiting(op)]

    def keep(self, op: Hashable) -> bool:
        """Read an operation's memory no more, and go on with it all the same; False: that cannot be."""
        if any(link.requests.lends(op) for link in self._links.values()):
            return False
        for link in self._links.values():
            link.requests.keep(op)
        return True

    def forget_reads(self) -> None:
        """Let pushes go before values that were asked for, and that nobody reads any more."""
        for link in self._links.values():
            link.requests.forget_reads()

    def suspect(self, server: int) -> None:
        """Ask at the next tick for whatever has no answer: some of it was lost, perhaps."""
        if (link := self._links.get(server)) is not None:
            link.requests.suspect()

    def suspect_all(self) -> None:
        """As `suspect`, for every server."""
        for link in self._links.values():
            link.requests.suspect()

    def tick(self, now: float, actions: list[Action]) -> None:
        """Ask again who has not let this worker in, and for what is not answered for too long."""
        for server, link in self._links.items():
            if link.lost is not None:
                continue
            joined = link.attached and link.join_epoch >= self._member.join_epoch
            if not joined and now - link.attempted >= self._options.control_resend:
                self._attach(server, now, actions)
            if not link.attached:
                continue
            overdue = link.requests.overdue(now)
            if overdue:
                self._send(server, link.requests.probes(overdue), actions)
            self._pump(server, now, actions)

    # ------------------------------------------------------------------------------------------- attachment

    def meet(self, servers: Iterable[m.Member], now: float, actions: list[Action]) -> None:
        """Connect to servers that are new, or in place of old ones."""
        for member in servers:
            link = self._links.get(member.rank)
            if link is None:
                link = self._links[member.rank] = ServerLink(RequestTable(self._options, self._has_rounds))
            if link.incarnation != member.incarnation:
                link.incarnation = member.incarnation
                link.attached = False
                link.requests.begin_again()
                actions.append(ConnectServer(member.rank, member.address, member.incarnation))
                self._attach(member.rank, now, actions)

    def attach_again(self, now: float, actions: list[Action]) -> None:
        """Ask all servers in which rounds this worker begins."""
        for server, link in self._links.items():
            if link.lost is None:
                self._attach(server, now, actions)

    def _attach(self, server: int, now: float, actions: list[Action]) -> None:
        link, member = self._links[server], self._member
        link.attempted = now
        if member.welcome is not None:
            known = {} if link.attached else dict(member.first_rounds) | link.requests.accepted
            who = (member.welcome.store, member.welcome.rank, self._hello.incarnation, member.epoch)
            met = link.met and link.join_epoch >= member.join_epoch
            host = self._hello.host if member.seats else ""
            how = met, member.rejoining, self._memory, self._options.report_bytes
            sequences = () if link.attached else link.requests.unanswered()
            attach = m.AttachRequest(*who, self._hello.job, tuple(known.items()), *how, host, *sequences)
            actions.append(SendMessage(server, attach))

    def attached(self, server: int, message: m.AttachReply, now: float, actions: list[Action]) -> None:
        """Note that a server takes requests."""
        link = self._links.get(server)
        if link is None or message.incarnation != link.incarnation:
            return
        begins = link.join_epoch < self._member.join_epoch <= message.epoch
        if begins or not link.met:
            link.requests.first_rounds.update(message.bases)
            link.requests.accepted.update(message.bases)
        if begins:
            link.join_epoch = self._member.join_epoch
        link.attached = link.met = True
        self._pump(server, now, actions)

    # ------------------------------------------------------------------------------------------------- ends

    def lose(self, loss: m.Loss, actions: list[Action]) -> None:
        """End what waits for a server that is lost for good."""
        link = self._links.get(loss.rank)
        if link is not None and link.lost is None:
            link.lost = loss_failure((loss,), len(self._links))
            self._end(link.requests.drop(), link.lost, actions)

    def leave(self, failure: Failure, actions: list[Action]) -> None:
        """Ask no server any more."""
        for link in self._links.values():
            link.lost = link.lost or failure
            self._end(link.requests.drop(), failure, actions)

    def give_up(self, failure: Failure, actions: list[Action]) -> None:
        """Nobody will complete what is under way at the servers."""
        for link in self._links.values():
            self._end(link.requests.disown(), failure, actions)

    def drop(self, failure: Failure, actions: list[Action]) -> None:
        """End what waits for any server."""
        for link in self._links.values():
            self._end(link.requests.drop(), failure, actions)

    def end_all(self, failure: Failure, actions: list[Action]) -> None:
        """End all operations that are left."""
        self._end(list(self._operations.values()), failure, actions)

    def _end(self, operations: Iterable[OperationProgress], failure: Failure, actions: list[Action]) -> None:
        known = [one for one in operations if self._operations.pop(one.name, None) is not None]
        actions.extend(OperationDone(one.name, one.error or failure) for one in known)


def failure_of(record: Record, batch: Batch) -> Failure:
    """Read why a request failed."""
    try:
        data = memoryview(batch.frames[record.frame])[record.offset : record.offset + record.nbytes]
        return msgspec.msgpack.decode(data, type=Failure)
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError):
        return Failure("ProtocolError", "a server failed a request, and its reason cannot be read")
