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
from ..parameter_server.protocol.messages import Kind, Slice
from ..parameter_server.worker.call_plans import Arrays, CallPlan, ServerPlan
from ..parameter_server.worker.client import Client
from ..parameter_server.worker.key_directory import DistKey
from ..parameter_server.worker.operations import Request
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

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.like.dtype

    @property
    def nbytes(self) -> int:
        return self.like.nbytes


class SlicePlan(CallPlan):
    """What the exchanges of one slice have in common: the server, and memory of this process."""

    def __init__(self, client: Client, handle: shm.Handle, part: Slice) -> None:
        #: What is sent, and what is received.
        self.sent, self.received = np.empty_like(handle.like), np.empty_like(handle.like)
        self.part = part
        whole = msgspec.structs.replace(part, start=0, stop=self.sent.size)
        slice_ = cast("DistKey", _OnlySlice(str(handle.key), (whole,), handle.like))
        super().__init__(Kind.PUSHPULL, [slice_], [0], client)
        self.arrays = self._plain(self.sent), self._plain(self.received)

    def _plain(self, array: Array) -> Arrays:
        found = cpu.plain_arrays([array], self.likes, True)
        assert found is not None
        return found


class QuickExchange(QuickCall):
    """One sum on its way; `again` makes the usual requests of it."""

    __slots__ = ("_again", "_head", "_slice", "received")

    def __init__(self, plan: SlicePlan, head: PushHead, again: Callable[[], Iterable[Request]]) -> None:
        super().__init__(cast("QuickCalls", None), plan, *plan.arrays)
        self._slice, self._head, self._again = plan.part.id, head, again
        #: What has come.
        self.received = plan.received

    @property
    def is_abandoned(self) -> bool:
        """Its arrays are the carrier's, which sees to its end."""
        return False

    def _begin_exchange(self, machine: WorkerMachine, plan: ServerPlan) -> tuple[int, int, list[int]]:
        machine.follow_host(plan.server, self._slice, self._head.round)
        return super()._begin_exchange(machine, plan)

    def _prepare(self, ways: list[ServerWay]) -> None:
        """Send it as it is, in a frame."""

    def _count(self) -> None:
        self._version, self._clocks = self._head.version, [self._head.clock]

    def _count_rounds(self, seen: int) -> None:
        """Count none: each worker of the host counts in its memory."""

    def _requests(self) -> Iterator[Request]:
        return iter(self._again())
