"""The operations of one store that are in progress: their requests, replies and results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ....errors import KVStoreError
from ....observe.counters import MOVING
from ....observe.native._observe import Counters
from ..protocol.events import OperationDone, RetrySlice, SliceReceived, SliceRequest
from ..protocol.messages import Failure, MemberReply, PayloadLocation, Record

#: Writes the value of one slice: ``take(part, record, frames)``; False: request it again, in a frame.
Take = Callable[[Any, Record, Sequence[Any]], bool]
#: Waits for the end of an operation that was begun.
Finish = Callable[[], None]


class PartRequest(NamedTuple):
    """A request about one slice."""

    server: int
    record: Record
    payload: tuple[Any, ...]
    take: Take | None
    #: The caller's name for the slice, which is passed to `take`.
    part: Any
    #: The most bytes of value in the reply.
    back: int = 0


class PendingOperation:
    """Requests in progress."""

    __slots__ = ("answer", "done", "error", "requests", "rounds")

    def __init__(self, requests: Sequence[PartRequest] = ()) -> None:
        self.requests = requests
        #: The rounds of received values, by index of the request, as the servers count.
        self.rounds: dict[int, int] = {}
        self.done = False
        self.error: Failure | None = None
        self.answer: MemberReply | None = None


class OperationTable:
    """Operations by the names that the machine uses."""

    def __init__(self) -> None:
        self.open: dict[Hashable, PendingOperation] = {}
        self._names = itertools.count()
        #: Operations that no caller waits for.
        self.released: set[PendingOperation] = set()
        #: The failure of one of them, until it is reported to the caller.
        self.failed: Failure | None = None
        self.counters = Counters("", "", 0, 0, shown=False)

    def add_operation(self, operation: PendingOperation) -> int:
        """Add an operation; return its name."""
        name = next(self._names)
        self.open[name] = operation
        return name

    def open_names(self, operation: PendingOperation | None) -> list[Hashable]:
        """Return the name of an operation, as a list; empty if it is not open."""
        return [name for name, one in self.open.items() if one is operation]

    def release_operation(self, operation: PendingOperation) -> None:
        """Let no caller wait for an operation; `failed` will have its error."""
        if operation.done:
            self.failed = self.failed or operation.error
        else:
            self.released.add(operation)

    def write_value(self, action: SliceReceived) -> RetrySlice | None:
        """Write a value to its destination; or return a request to send it again."""
        operation = self.open.get(action.op)
        if operation is None:  # cancelled
            return None
        request = operation.requests[action.index]
        operation.rounds[action.index] = action.record.round
        if request.take is None or operation.error is not None:
            return None
        record = action.record
        self.counters.enter(MOVING, record.slice, record.round, record.nbytes, -1 - request.server)
        try:
            good = request.take(request.part, record, action.frames)
        except (KVStoreError, ValueError, IndexError) as error:
            if record.place != PayloadLocation.SHARED:
                operation.error = Failure(
                    "ProtocolError", f"server {request.server} sent an invalid value: {error}"
                )
                return None
            good = False  # the server has ended, or its memory cannot be mapped: request a frame
        except Exception as error:  # raised in the thread at the sockets, which may be another operation's
            text = f"could not be written: {type(error).__name__}: {error}"
            operation.error = Failure("KVStoreError", f"a value of server {request.server} {text}")
            raise
        finally:
            self.counters.leave()
        if good:
            return None
        asked = request.record._replace(round=action.asked)
        part = SliceRequest(request.server, asked, request.payload, request.back)
        return RetrySlice(action.op, action.index, part)

    def end_operation(self, action: OperationDone) -> None:
        """Record that an operation is done."""
        operation = self.open.pop(action.op, None)
        if operation is not None:
            operation.error = operation.error or action.error
            operation.answer, operation.done = action.answer, True
            if operation in self.released:
                self.released.remove(operation)
                self.failed = self.failed or operation.error
