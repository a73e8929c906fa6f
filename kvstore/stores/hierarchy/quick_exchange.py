"""A small sum of a host that is alone on its way: it is sent, and its answer read, in few steps.

As `kvstore.stores.parameter_server.worker.quick_calls` has it of a worker's own calls, but the round is the
host's. Where anything else comes meanwhile, the machine goes on with it as with any other operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from ...kernels import cpu
from ..entry import Array
from ..parameter_server.protocol.messages import RecordKind, Slice
from ..parameter_server.transport.sockets import Message, WorkerSockets
from ..parameter_server.worker.call_plans import Arrays, CallPlan
from ..parameter_server.worker.client import WorkerClient
from ..parameter_server.worker.key_directory import DistKey
from ..parameter_server.worker.operations import PartRequest
from ..parameter_server.worker.quick_calls import QuickCall, QuickCalls, ServerWay
from ..parameter_server.worker.state_machine.machine import WorkerMachine
from ..shared.native import _shared as shm


class PushHead(NamedTuple):
    """What a push says beside its payload: see `carrier.Settings`."""

    round: int
    version: int
    clock: int


class _OnlySlice(NamedTuple):
    """A slice as if it were a key of its own."""

    key: str
    parts: tuple[Slice]
    like: Array
    sparse: bool = False
    number: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.like.dtype

    @property
    def nbytes(self) -> int:
        return self.like.nbytes


class SlicePlan(CallPlan):
    """What the exchanges of one slice have in common: the server, and memory of this process."""

    def __init__(self, client: WorkerClient, handle: shm.Handle, part: Slice) -> None:
        #: What is sent, and what is received.
        self.sent, self.received = np.empty_like(handle.like), np.empty_like(handle.like)
        self.part = part
        whole = msgspec.structs.replace(part, start=0, stop=self.sent.size)
        slice_ = cast("DistKey", _OnlySlice(str(handle.key), (whole,), handle.like))
        super().__init__(RecordKind.PUSHPULL, [slice_], client)
        self.arrays = self._is_plain(self.sent), self._is_plain(self.received)

    def _is_plain(self, array: Array) -> Arrays:
        found = cpu.plain_arrays([array], self.likes, True)
        assert found is not None
        return found


class QuickExchange(QuickCall):
    """One sum on its way; `again` makes the usual requests of it.

    What `QuickCall` does for any number of servers and keys is written out for one slice: each function more
    takes some µs where 16 processes share two cores, whose caches have forgotten it since the last call.
    """

    __slots__ = ("_again", "_exchange", "_head", "_slice", "received")

    def __init__(self, plan: SlicePlan, head: PushHead, again: Callable[[], Iterable[PartRequest]]) -> None:
        super().__init__(cast("QuickCalls", None), plan, *plan.arrays)
        self._slice, self._head, self._again = plan.part.id, head, again
        self._exchange = plan.servers[0].exchange
        self._version, self._stamps = head.version, [head.clock]
        #: What has come.
        self.received = plan.received

    def begin(self, machine: WorkerMachine, sockets: WorkerSockets, before: QuickCall | None) -> bool:
        """Count, and send, if nothing else is under way; False: nothing has happened."""
        plan = self._plan.servers[0]
        stream = sockets.server_stream(plan.server)
        if before is not None or stream is None or not machine.allows_exchange(self._plan.server_numbers):
            return False
        (values, sent), (outs, received) = self._values, self._outs  # type: ignore[misc]
        self._exchange.set(sent, received, (values, outs))
        way, requests = ServerWay(plan, stream), machine.requests_to(plan.server)
        requests.pushes[self._slice] = self._head.round - 1
        self.is_counting = True
        way.first, way.base, way.pushed = requests.begin_exchange(plan.slices)
        self._ways.append(way)
        self.is_counting = False
        numbers = way.first, way.base, machine.member.epoch, self._version
        self.sent = True
        self.sent = stream.begin(self._exchange, way.pushed, self._stamps, *numbers)
        return True

    @property
    def left(self) -> int:
        """1: there is no answer."""
        return self._exchange.left if self._ways else 0

    own_left = left

    def wait(
        self, sockets: WorkerSockets, end: float, until: QuickCall | None = None
    ) -> list[tuple[int, Message]]:
        """Receive, until `end` of the monotonic clock, or something else comes, or the answer has."""
        way = self._ways[0]
        found = sockets.await_replies([(self._exchange, way.stream)], end)
        return [(way.plan.server, message) for _, message in found] if found else []

    def complete(self, machine: WorkerMachine) -> bool:
        """End it if the answer has come."""
        exchange, way = self._exchange, self._ways[0]
        if exchange.left:
            return False
        counts = exchange.answered_bytes, exchange.received
        rounds: Any = exchange.rounds()  # none is missing
        requests = machine.requests_to(way.plan.server)
        self.is_counting = True
        requests.end_exchange(way.plan.slices, way.pushed, rounds, *counts)
        self._ways.clear()
        self.is_counting = False
        exchange.clear()
        return True

    @property
    def is_abandoned(self) -> bool:
        """Its arrays are the carrier's, which sees to its end."""
        return False

    def _count_rounds(self, seen: int) -> None:
        """Count none: each worker of the host counts in its memory."""

    def _requests(self) -> Iterator[PartRequest]:
        return iter(self._again())
