"""A `pushpull` of one dense key in few steps: one server has all of it, and nothing else is under way there.

The requests are written, and the replies read, by the compiled `Exchange` of the key; the state machine only
counts. Where anything unusual comes meanwhile, the machine adopts what has no answer yet, and the call goes
on as any other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ....arrays.grouping import Key
from ....kernels import cpu
from ...entry import Array
from ..protocol.events import Action, SliceRequest
from ..protocol.payloads import SHARED_BYTES
from ..transport.native._streams import Exchange
from ..transport.sockets import Message, WorkerSockets
from .client import Client
from .key_directory import DistKey, KeyDirectory
from .operations import Finish, OperationTable, PendingOperation
from .pulls import Pulls
from .pushes import Pushes
from .request_builder import RequestBuilder
from .state_machine.machine import WorkerMachine


class QuickKey:
    """What the quick calls of one key have in common."""

    __slots__ = ("exchange", "integral", "key", "large", "nbytes", "server", "slices")

    def __init__(self, key: DistKey, client: Client) -> None:
        self.key, self.nbytes = key, key.nbytes
        self.large, self.integral = self.nbytes >= SHARED_BYTES, key.dtype.kind in "iu"
        self.slices = [part.id for part in key.parts]
        self.server = key.parts[0].server if key.parts else -1
        self.exchange: Exchange | None = None
        if self.nbytes and not key.sparse and not key.is_spread:
            size = key.dtype.itemsize
            parts = [(part.id, part.start * size, (part.stop - part.start) * size) for part in key.parts]
            self.exchange = client.exchange(self.server, parts)


class QuickCalls:
    """Begins the quick calls of one store."""

    def __init__(
        self, client: Client, keys: KeyDirectory, pushes: Pushes, pulls: Pulls, slices: RequestBuilder
    ) -> None:
        self._client, self._directory = client, keys
        self.pushes, self.pulls, self.slices = pushes, pulls, slices
        self._keys: dict[Key, QuickKey] = {}

    def pushpull(self, name: Key, value: Any, out: Any) -> bool | Finish:
        """Send; what is left to do is to receive. False: nothing has happened."""
        found = self._directory.get(name)
        if found is None:
            return False
        key = self._keys.get(name)
        if key is None or key.key is not found:
            key = self._keys[name] = QuickKey(found, self._client)
        if key.exchange is None:
            return False
        if type(value) is list and len(value) == 1:
            value = value[0]
        if out is None:
            out = value
        elif type(out) is list and len(out) == 1:
            out = out[0]
        if cpu.first_misfit([out], found.like, True) >= 0:
            return False
        if out is not value and cpu.first_misfit([value], found.like) >= 0:
            return False
        client, pushes = self._client, self.pushes
        if pushes.feedback is not None or (key.integral and pushes.optimizer.updater is not None):
            return False
        if client.joined or (key.large and client.pool is not None and client.all_read_here):
            return False
        call = QuickCall(self, key, key.exchange, value, out)
        return partial(client.end, call) if client.driver.begin(call) else False


class QuickCall:
    """One call; the driver has it from its beginning to its end, or until the machine adopts it."""

    __slots__ = (
        "_calls", "_exchange", "_first", "_header", "_key", "_out", "_pushed", "_stream", "_value",
        "operation", "sent",
    )  # fmt: skip

    def __init__(
        self, calls: QuickCalls, key: QuickKey, exchange: Exchange, value: Array, out: Array
    ) -> None:
        self._calls, self._key, self._exchange = calls, key, exchange
        self._value, self._out = value, out
        self._first = 0
        self._pushed: list[int] = []  # rounds of the slices, as the server counts
        #: Whether its requests are on their way.
        self.sent = False
        #: What it is once the machine has adopted it.
        self.operation: PendingOperation | None = None

    @property
    def server(self) -> int:
        """The one that has the key."""
        return self._key.server

    def begin(self, machine: WorkerMachine, sockets: WorkerSockets) -> bool:
        """Count, and send; False: nothing has happened."""
        key, exchange = self._key, self._exchange
        stream = sockets.stream(key.server)
        if stream is None or not exchange.set(self._value, self._out):
            return False
        begun = machine.begin_exchange(key.server, key.slices, key.nbytes)
        if begun is None:
            exchange.clear()
            return False
        self._first, self._pushed = begun
        self._stream = stream
        self._header = header = self._calls.pushes.counted(key.key)
        epoch = machine.member.epoch
        self.sent = stream.begin(exchange, self._pushed, self._first, epoch, header.version, header.clock)
        return True

    def wait(self, sockets: WorkerSockets, end: float) -> list[Message]:
        """Receive, until `end` of the monotonic clock or something else comes; return other messages."""
        return sockets.wait_for(self._stream, self._exchange, end)

    def complete(self, machine: WorkerMachine) -> bool:
        """End it if all values have come."""
        exchange, key = self._exchange, self._key
        if exchange.left:
            return False
        machine.end_exchange(
            key.server, key.slices, self._pushed, exchange.rounds(), key.nbytes, exchange.received
        )
        exchange.clear()
        return True

    def adopt(self, machine: WorkerMachine, operations: OperationTable, now: float) -> list[Action]:
        """Have the machine go on with what has no answer yet."""
        key, exchange, first, pushed = self._key, self._exchange, self._first, self._pushed
        if not pushed:
            return []
        take = self._calls.pulls.fill(key.key, [self._value], [self._out])
        requests = list(self._calls.slices.in_frames(key.key, self._value, self._header, take))
        self.operation = operation = PendingOperation(requests)
        came = exchange.rounds() if self.sent else [None] * len(requests)
        received = exchange.received if self.sent else 0
        exchange.clear()
        done = [at for at, round_ in enumerate(came) if round_ is not None]
        left = [at for at, round_ in enumerate(came) if round_ is None]
        operation.rounds = {at: round_ for at, round_ in enumerate(came) if round_ is not None}
        machine.end_exchange(
            key.server,
            [key.slices[at] for at in done],
            [pushed[at] for at in done],
            list(operation.rounds.values()),
            sum(requests[at].record.nbytes for at in done),
            received,
        )
        operation.done = not left
        if not left:
            return []
        parts = []
        for at in left:
            server, record, payload = requests[at][:3]
            parts.append((at, SliceRequest(server, record._replace(sequence=first + at), payload)))
        return machine.adopt(operations.add(operation), parts, self.sent, now)
