"""A `pushpull` of dense keys in few steps, where nothing else is under way to their servers.

The requests are written, and the replies read, by compiled `Exchange` objects, one for each server; the
state machine only counts. Where anything unusual comes meanwhile, the machine adopts what has no answer yet,
and the call goes on as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ....arrays.grouping import Key
from ....kernels import cpu
from ...entry import Array
from ..protocol.events import Action, SliceRequest
from ..protocol.messages import SPAN, Kind
from ..protocol.payloads import SHARED_BYTES
from ..transport.native._streams import Exchange, Stream
from ..transport.shared_buffers import PeerBuffers
from ..transport.sockets import Message, WorkerSockets
from .client import Client
from .key_directory import DistKey, KeyDirectory
from .operations import Finish, OperationTable, PendingOperation
from .pulls import Pulls
from .pushes import Pushes
from .request_builder import PushHeader, RequestBuilder
from .shared_payloads import SharedPayload, SharedPayloads
from .state_machine.machine import WorkerMachine

_LISTS = 16  # of keys, of which a plan is kept


class ServerPlan:
    """The slices of a call that one server has."""

    def __init__(self, server: int, keys: Sequence[DistKey], client: Client) -> None:
        self.server = server
        own = [(at, part) for at, key in enumerate(keys) for part in key.parts if part.server == server]
        self.slices = [part.id for _, part in own]
        parts = []
        for at, part in own:
            size = keys[at].dtype.itemsize
            parts.append((part.id, at, part.start * size, (part.stop - part.start) * size))
        self.sizes = [nbytes for *_, nbytes in parts]
        self.keys = [at for _, at, _, _ in parts]
        self.exchange: Exchange = client.exchange(parts, [key.nbytes for key in keys])
        self._known: tuple[PeerBuffers | None, int] = (None, 0)

    def map(self, memory: PeerBuffers | None) -> None:
        """Know what is known by now of the server's memory."""
        known, count = self._known
        if memory is not known:
            self.exchange.unmap()
            count = 0
        if memory is not None and (memory is not known or len(memory.segments) != count):
            self.exchange.map(memory.segments.items())
            count = len(memory.segments)
        self._known = memory, count


class CallPlan:
    """What calls with the same keys have in common; the keys stand in the order in which they are updated."""

    def __init__(self, keys: Sequence[DistKey], order: list[int], client: Client) -> None:
        self.keys = keys
        #: Where the arrays of the keys stand in the caller's lists; None: as here.
        self.order = None if order == list(range(len(order))) else order
        self.likes = [key.like for key in keys]
        self.integral = any(key.dtype.kind in "iu" for key in keys)
        #: Keys whose values may go through memory that the servers read.
        self.large = [at for at, key in enumerate(keys) if key.nbytes >= SHARED_BYTES]
        servers = sorted({part.server for key in keys for part in key.parts})
        self.servers = [ServerPlan(server, keys, client) for server in servers]


class QuickCalls:
    """Begins the quick calls of one store."""

    def __init__(
        self,
        client: Client,
        keys: KeyDirectory,
        pushes: Pushes,
        pulls: Pulls,
        slices: RequestBuilder,
        memory: SharedPayloads,
    ) -> None:
        self._client, self._directory = client, keys
        self.pushes, self.pulls, self.slices, self.memory = pushes, pulls, slices, memory
        self._single: dict[Key, CallPlan] = {}
        self._lists: dict[tuple[Key, ...], tuple[list[Key], CallPlan | None]] = {}
        self._changes = -1

    def pushpull(self, names: Any, value: Any, out: Any) -> bool | Finish:
        """Send; what is left to do is to receive. False: nothing has happened."""
        plan = self._plan(names)
        if plan is None:
            return False
        client, pushes = self._client, self.pushes
        if client.joined or pushes.feedback is not None:
            return False
        if plan.integral and pushes.optimizer.updater is not None:
            return False
        arrays = _arrays(plan, value, out, type(names) is list)
        if arrays is None:
            return False
        call = QuickCall(self, plan, *arrays)
        return partial(client.end, call) if client.driver.begin(call) else False

    def _plan(self, names: Any) -> CallPlan | None:
        if self._changes != self._directory.changes:
            self._single.clear()
            self._lists.clear()
            self._changes = self._directory.changes
        if type(names) is not list:
            single = self._single.get(names) or self._made([names])
            if single is not None:
                self._single[names] = single
            return single
        if not names or not {int, str}.issuperset(map(type, names)):
            return None
        ends = (len(names), names[0], names[-1])
        known, plan = self._lists.get(ends, (None, None))
        if known != names:
            if len(self._lists) >= _LISTS:
                self._lists.clear()
            plan = self._made(names)
            self._lists[ends] = list(names), plan
        return plan

    def _made(self, names: list[Key]) -> CallPlan | None:
        """Make a plan; None: these keys go the usual way."""
        found = [self._directory.get(name) for name in names]
        keys = [key for key in found if key is not None and key.nbytes and not key.sparse]
        if len(keys) != len(names) or len(set(names)) != len(names):
            return None
        if sum(len(key.parts) for key in keys) > SPAN:
            return None
        ranks = [key.key if isinstance(key.key, int) else key.number for key in keys]
        order = sorted(range(len(keys)), key=ranks.__getitem__)
        return CallPlan([keys[at] for at in order], order, self._client)

    def server_memory(self, server: int) -> PeerBuffers | None:
        """Return the memory of a server's values, if this process can read it."""
        return self._client.server_memory(server)


def _arrays(plan: CallPlan, value: Any, out: Any, many: bool) -> tuple[Any, Any] | None:
    """Return values and outs, each as arrays and their addresses; None: they go the usual way."""
    same = out is None or out is value
    values = _in_order(plan, value if many else [value])
    outs = values if same else _in_order(plan, out if many else [out])
    if values is None or outs is None:
        return None
    found = cpu.plain_arrays(values, plan.likes, same)
    there = found if same or found is None else cpu.plain_arrays(outs, plan.likes, True)
    return None if found is None or there is None else (found, there)


def _in_order(plan: CallPlan, arrays: Any) -> list[Any] | None:
    if type(arrays) is not list or len(arrays) != len(plan.keys):
        return None
    return arrays if plan.order is None else [arrays[at] for at in plan.order]


class _Way:
    """What goes to one server, and has no answer yet."""

    __slots__ = ("first", "plan", "pushed", "stream")

    def __init__(self, plan: ServerPlan, stream: Stream) -> None:
        self.plan, self.stream = plan, stream
        self.first = 0  # sequence of the first slice
        self.pushed: list[int] = []  # rounds of the slices, as the server counts


class QuickCall:
    """One call; the driver has it from its beginning to its end, or until the machine adopts it."""

    __slots__ = (
        "_calls", "_clocks", "_outs", "_plan", "_shared", "_values", "_version", "_ways", "operation", "sent",
    )  # fmt: skip

    def __init__(
        self,
        calls: QuickCalls,
        plan: CallPlan,
        values: tuple[list[Array], bytes],
        outs: tuple[list[Array], bytes],
    ) -> None:
        self._calls, self._plan = calls, plan
        self._values, self._outs = values, outs
        self._ways: list[_Way] = []
        self._clocks: list[int] = []
        self._shared: dict[int, SharedPayload] = {}
        self._version = 0
        #: Whether its requests are on their way, as far as the credit allows.
        self.sent = False
        #: What it is once the machine has adopted it.
        self.operation: PendingOperation | None = None

    @property
    def left(self) -> int:
        """Number of slices whose value has not come."""
        return sum(way.plan.exchange.left for way in self._ways)

    def server(self, number: int) -> int:
        """Return the server of a way, by its number."""
        return self._ways[number].plan.server

    def begin(self, machine: WorkerMachine, sockets: WorkerSockets) -> bool:
        """Count, and send; False: nothing has happened."""
        ways = []
        for plan in self._plan.servers:
            stream = sockets.stream(plan.server)
            if stream is None:
                return False
            ways.append(_Way(plan, stream))
        if not machine.allows_exchange([way.plan.server for way in ways]) or not self._set(ways):
            return False
        for way in ways:
            way.first, way.pushed = machine.begin_exchange(way.plan.server, way.plan.slices)
            self._ways.append(way)
        pushes = self._calls.pushes
        self._clocks, self._version = pushes.counted(self._plan.keys), pushes.optimizer.version
        self._share()
        epoch = machine.member.epoch
        self.sent = True
        for way in ways:
            if not self._send(way, epoch):
                self.sent = False
        return True

    def _send(self, way: _Way, epoch: int) -> bool:
        """Send to one server, as far as the credit allows; False: its stream is at its end."""
        return way.stream.begin(way.plan.exchange, way.pushed, self._clocks, way.first, epoch, self._version)

    def _set(self, ways: list[_Way]) -> bool:
        arrays = self._values[0], self._outs[0]
        if all(way.plan.exchange.set(self._values[1], self._outs[1], arrays) for way in ways):
            return True
        self._clear(ways)
        return False

    def _clear(self, ways: list[_Way]) -> None:
        for way in ways:
            way.plan.exchange.clear()

    def _share(self) -> None:
        """Put values where the servers read them, those that are large enough."""
        memory = self._calls.memory
        copies: list[cpu.ReduceItem] = []
        places: dict[int, tuple[int, int, bool]] = {}
        for at in self._plan.large if memory.shares else ():
            value = self._values[0][at]
            shared = memory.place(self._plan.keys[at], [value], copies)
            if shared is not None:
                self._shared[at] = shared
                places[at] = shared.segment, shared.offset, shared.own and value is self._outs[0][at]
        if copies:
            cpu.reduce(copies)
        for way in self._ways if places else ():
            way.plan.map(self._calls.server_memory(way.plan.server))
            way.plan.exchange.share(places)

    def wait(self, sockets: WorkerSockets, end: float) -> list[tuple[int, Message]]:
        """Receive, until `end` of the monotonic clock or something else comes.

        Returns other messages, each with the number of its way.
        """
        return sockets.await_replies([(way.plan.exchange, way.stream) for way in self._ways], end)

    def complete(self, machine: WorkerMachine) -> bool:
        """End it if all values have come."""
        if self.left:
            return False
        for way in self._ways:
            rounds = [round_ or 0 for round_ in way.plan.exchange.rounds()]
            self._end(machine, way, way.plan.slices, way.pushed, rounds, self._sent_bytes(way.plan, None))
        self._clear(self._ways)
        return True

    def _sent_bytes(self, plan: ServerPlan, parts: Sequence[int] | None) -> int:
        """Bytes of what a server is sent of parts; None: of all."""
        if parts is None and not self._shared:
            return sum(plan.sizes)
        which = range(len(plan.sizes)) if parts is None else parts
        return sum(plan.sizes[at] for at in which if plan.keys[at] not in self._shared)

    def _end(
        self,
        machine: WorkerMachine,
        way: _Way,
        slices: list[int],
        pushed: list[int],
        rounds: list[int],
        nbytes: int,
    ) -> None:
        machine.end_exchange(way.plan.server, slices, pushed, rounds, nbytes, way.plan.exchange.received)

    def adopt(self, machine: WorkerMachine, operations: OperationTable, now: float) -> list[Action]:
        """Have the machine go on with what has no answer yet."""
        if not self._ways:
            return []
        requests = list(self._requests())
        index = {request.record.slice: at for at, request in enumerate(requests)}
        self.operation = operation = PendingOperation(requests)
        parts: list[tuple[int, SliceRequest]] = []
        ends: dict[int, int] = {}
        for way in self._ways:
            plan = way.plan
            came = plan.exchange.rounds()
            done = [at for at, round_ in enumerate(came) if round_ is not None]
            rounds = [round_ for round_ in came if round_ is not None]
            slices = [plan.slices[at] for at in done]
            operation.rounds.update(zip((index[one] for one in slices), rounds, strict=True))
            pushed = [way.pushed[at] for at in done]
            self._end(machine, way, slices, pushed, rounds, self._sent_bytes(plan, done))
            for at, slice_ in enumerate(plan.slices):
                if came[at] is None:
                    server, record, payload = requests[index[slice_]][:3]
                    record = record._replace(sequence=way.first + at)
                    parts.append((index[slice_], SliceRequest(server, record, payload)))
            ends[plan.server] = way.first + plan.exchange.sent
        self._clear(self._ways)
        operation.done = not parts
        return machine.adopt(operations.add(operation), parts, ends, now) if parts else []

    def _requests(self) -> Any:
        """Make all requests as the usual way has them."""
        slices, pulls = self._calls.slices, self._calls.pulls
        clocks = self._clocks or [self._calls.pushes.clock] * len(self._plan.keys)
        for at, key in enumerate(self._plan.keys):
            value, out = self._values[0][at], self._outs[0][at]
            head = PushHeader(Kind.PUSHPULL, self._version, clocks[at])
            yield from slices.placed(key, value, head, pulls.fill(key, [value], [out]), self._shared.get(at))
