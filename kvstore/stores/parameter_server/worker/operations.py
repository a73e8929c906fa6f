"""The operations of one store that are under way: what was asked, what came, and what became of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from ....errors import KVStoreError
from ....observe.counters import MOVING
from ....observe.native._observe import Counters
from ..protocol.events import Done, RetrySlice, SliceReceived, SliceRequest
from ..protocol.messages import Answer, Failure, PayloadLocation, Record

#: Takes in the value of one slice: ``take(part, record, frames)``; False asks for it once more, in a frame.
Take = Callable[[Any, Record, Sequence[Any]], bool]
#: Ends an operation that was begun.
Finish = Callable[[], None]


class Request(NamedTuple):
    """What is wanted of one slice."""

    server: int
    record: Record
    payload: tuple[Any, ...]
    take: Take | None
    #: The caller's name for the slice, which `take` gets.
    part: Any
    #: Bytes of value that the answer may have.
    back: int = 0


class PendingOperation:
    """Requests under way."""

    __slots__ = ("answer", "done", "error", "requests", "rounds")

    def __init__(self, requests: Sequence[Request] = ()) -> None:
        self.requests = requests
        #: Of the values that came, by request, as the servers count.
        self.rounds: dict[int, int] = {}
        self.done = False
        self.error: Failure | None = None
        self.answer: Answer | None = None


class OperationTable:
    """Operations by the name under which the machine knows them."""

    def __init__(self) -> None:
        self.open: dict[Hashable, PendingOperation] = {}
        self._names = itertools.count()
        #: For these nobody waits.
        self.released: set[PendingOperation] = set()
        #: What became of one of them, until somebody is told.
        self.failed: Failure | None = None
        self.counters = Counters("", "", 0, 0, shown=False)

    def add(self, operation: PendingOperation) -> int:
        """Give an operation its name."""
        name = next(self._names)
        self.open[name] = operation
        return name

    def names(self, operation: PendingOperation | None) -> list[Hashable]:
        """Return the name of an operation, if it is open."""
        return [name for name, one in self.open.items() if one is operation]

    def release(self, operation: PendingOperation) -> None:
        """Wait no longer for an operation; `failed` has its error some time."""
        if operation.done:
            self.failed = self.failed or operation.error
        else:
            self.released.add(operation)

    def take(self, action: SliceReceived) -> RetrySlice | None:
        """Write a value where it belongs; or ask for it once more."""
        operation = self.open.get(action.op)
        if operation is None:  # given up
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
            good = False  # its memory is gone with it, or there is no room to map it: a frame will do
        except Exception as error:  # raised to who is at the sockets: it may be another operation's thread
            text = f"was not taken in: {type(error).__name__}: {error}"
            operation.error = Failure("KVStoreError", f"a value of server {request.server} {text}")
            raise
        finally:
            self.counters.leave()
        if good:
            return None
        asked = request.record._replace(round=action.asked)
        part = SliceRequest(request.server, asked, request.payload, request.back)
        return RetrySlice(action.op, action.index, part)

    def end(self, action: Done) -> None:
        """Note that an operation is done."""
        operation = self.open.pop(action.op, None)
        if operation is not None:
            operation.error = operation.error or action.error
            operation.answer, operation.done = action.answer, True
            if operation in self.released:
                self.released.remove(operation)
                self.failed = self.failed or operation.error
