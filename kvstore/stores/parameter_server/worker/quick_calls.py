"""A push, a pull or both, of dense keys, in few steps, where nothing else is under way to their servers.

The requests are written, and the replies read, by compiled `Exchange` objects, one for each server; the
state machine only counts. Where anything unusual comes meanwhile, the machine adopts what has no answer yet,
and the call goes on as any other.

A push of which nothing is the caller's any more is waited for by nobody. One such push may be without an
answer when the next call begins, which then waits for both: its requests go out behind those of the push.

Asynchronous calls are chained: each goes out behind those before it, as far as credit and window allow, and
ends when its own answers are there. Whoever begins another one wakes the thread that receives.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from threading import get_ident
from typing import Any

from ....arrays.grouping import Group, Key
from ....compression import Feedback
from ....kernels import cpu
from ....observe.counters import CONVERTING
from ...entry import Array
from ..protocol.events import Action, SliceRequest
from ..protocol.messages import RecordKind
from ..protocol.payload_bytes import SHARED_BYTES
from ..transport.native._streams import Exchange, Stream
from ..transport.shared_buffers import PeerBuffers
from ..transport.sockets import Message, WorkerSockets
from .call_plans import Arrays, CallPlan, CallPlans, PackedValues, ServerPlan
from .client import WorkerClient
from .key_directory import KeyDirectory
from .operations import Finish, OperationTable, PartRequest, PendingOperation
from .pulls import PullOperations
from .pushes import PushOperations
from .request_builder import PushHeader, RequestBuilder, read_requests
from .shared_payloads import SharedPayload, SharedPayloads
from .state_machine.machine import WorkerMachine

_COPIED_BYTES = 512 * 1024  # of a push at most, so that nobody has to wait until servers have taken it in
_COPIED_KEYS = 8  # to copy more, one by one, takes longer than to wait
_DENSE = (RecordKind.PUSHPULL, RecordKind.PUSH, RecordKind.PULL)
_WHAT = {
    RecordKind.PUSHPULL: "a pushpull",
    RecordKind.PUSH: "a push",
    RecordKind.PULL: "a pull",
    RecordKind.PULL_ROWS: "a row_sparse_pull",
}


class QuickCalls:
    """Begins the quick calls of one store."""

    def __init__(
        self,
        client: WorkerClient,
        keys: KeyDirectory,
        pushes: PushOperations,
        pulls: PullOperations,
        slices: RequestBuilder,
        memory: SharedPayloads,
    ) -> None:
        self._client = client
        self.pushes, self.pulls, self.slices, self.memory = pushes, pulls, slices, memory
        self.counters = client.counters
        self._plans = {kind: CallPlans(kind, client, keys) for kind in _DENSE}

    def pushpull(self, names: Any, value: Any, out: Any) -> bool | Finish:
        """Send; what is left to do is to receive. False: nothing has happened."""
        plan = self._plan(RecordKind.PUSHPULL, names)
        if plan is None or not self.may_push(plan):
            return False
        many, same = type(names) is list, out is None or out is value
        values = plan.checked_arrays(value if many else [value], same)
        outs = values if same or values is None else plan.checked_arrays(out if many else [out], True)
        if values is None or outs is None:
            return False
        return self.begun(QuickCall(self, plan, values, outs))

    def start(
        self, kind: RecordKind, groups: list[Group], outs: list[Group] | None, priority: int, divisor: int = 1
    ) -> bool | Finish:
        """As `pushpull` and `push`, behind other calls that were started so; values count divided."""
        names = [key for key, _ in groups]
        plan = self._plan(kind, names)
        if plan is None or not self.may_push(plan) or (divisor > 1 and self.pushes.feedback is not None):
            return False
        in_place = kind == RecordKind.PUSHPULL and outs is None
        values = _sole(plan, names, groups, in_place)
        targets = values if in_place else None if outs is None else _sole(plan, names, outs, True)
        if values is None or (targets is None and kind == RecordKind.PUSHPULL):
            return False
        call = QuickCall(self, plan, values, targets)
        call.chained, call.priority, call.divisor = True, priority, divisor
        return self.begun(call)

    def start_sum(self, names: list[Any], value: Any, out: Any, divisor: int) -> Finish | None:
        """Send a sum as `pushpull` does, behind other calls; the result can be called again after Ctrl-C."""
        plan = self._plan(RecordKind.PUSHPULL, names)
        if plan is None or not self.may_push(plan) or (divisor > 1 and self.pushes.feedback is not None):
            return None
        same = out is None or out is value
        values = plan.checked_arrays(value, same)
        outs = values if same or values is None else plan.checked_arrays(out, True)
        if values is None or outs is None:
            return None
        call = QuickCall(self, plan, values, outs)
        call.chained, call.divisor = True, divisor
        return partial(self._client.finish_call, call, resumes=True) if self.begun(call) else None

    def push(self, names: Any, value: Any) -> bool | Finish:
        """As `pushpull`; True: it keeps nothing of the caller's, and is waited for by nobody."""
        plan = self._plan(RecordKind.PUSH, names)
        if plan is None or not self.may_push(plan):
            return False
        values = plan.checked_arrays(value if type(names) is list else [value], False)
        if values is None:
            return False
        kept = self._kept(plan, values)
        call = QuickCall(self, plan, kept or values, None, kept is not None)
        begun = self.begun(call)
        return begun and (call.let_go or begun)

    def _kept(self, plan: CallPlan, values: Arrays) -> Arrays | None:
        """Return values to push of which nothing is the caller's; None: there is too much to copy.

        Those that are packed are so before the push returns, and large ones are put where servers read them.
        """
        packs = self.pushes.feedback is not None
        placed = plan.large if plan.large and self.memory.shares_memory and not packs else []
        if len(placed) == len(plan.keys):
            return values
        if plan.nbytes > (_COPIED_BYTES if len(plan.keys) <= _COPIED_KEYS else SHARED_BYTES):
            return None
        if packs:
            return values
        copies = [one if at in placed else one.copy() for at, one in enumerate(values[0])]
        kept = cpu.plain_arrays(copies, plan.likes)
        assert kept is not None
        return kept

    def pull(self, names: Any, out: Any) -> bool | Finish:
        """As `pushpull`."""
        plan = self._plan(RecordKind.PULL, names)
        outs = None if plan is None else plan.checked_arrays(out if type(names) is list else [out], True)
        if plan is None or outs is None:
            return False
        return self.begun(QuickCall(self, plan, None, outs))

    def _plan(self, kind: RecordKind, names: Any) -> CallPlan | None:
        return None if self._client.joined else self._plans[kind].find(names)

    def may_push(self, plan: CallPlan) -> bool:
        """Whether pushes can be quick, as far as it does not depend on the values."""
        feedback = self.pushes.feedback
        if feedback is not None and (feedback.codec.compiled is None or not plan.is_float32):
            return False
        return not plan.integral or self.pushes.optimizer.updater is None

    def begun(self, call: QuickCall) -> bool | Finish:
        """Begin a call; what is left to do is to wait. False: nothing has happened."""
        client = self._client
        try:
            begun = client.driver.begin(call)
        except BaseException as error:
            if call.is_counting:
                client.give_up_half(call.what, error)
            elif call.sent:
                client.give_up_call(call, error)
            raise
        return partial(client.finish_call, call) if begun else False

    def server_memory(self, server: int) -> PeerBuffers | None:
        """Return the memory of a server's values, if this process can read it."""
        return self._client.server_memory(server)


def _sole(plan: CallPlan, names: list[Key], groups: list[Group], write: bool) -> Arrays | None:
    """Return the only array of each key; None: there are more of them, or others."""
    if [key for key, _ in groups] != names or any(len(arrays) != 1 for _, arrays in groups):
        return None
    return plan.checked_arrays([arrays[0] for _, arrays in groups], write)


class ServerWay:
    """What goes to one server, and has no answer yet."""

    __slots__ = ("base", "first", "plan", "pushed", "stream")

    def __init__(self, plan: ServerPlan, stream: Stream) -> None:
        self.plan, self.stream = plan, stream
        self.first = 0  # sequence of the first slice
        self.base = 0  # bytes of requests before
        self.pushed: list[int] = []  # rounds of the slices, as the server counts


class QuickCall:
    """One call; the driver has it from its beginning to its end, or until the machine adopts it.

    A call without `values` pulls, one without `outs` pushes. For a push whose values are all `kept`, or put
    into memory that servers read, nobody waits, if that can be.
    """

    __slots__ = (
        "_before",
        "_calls",
        "_codec",
        "_outs",
        "_packed",
        "_plan",
        "_pushes",
        "_shared",
        "_shares",
        "_stamps",
        "_values",
        "_version",
        "_ways",
        "awaited",
        "chained",
        "divisor",
        "ended",
        "is_counting",
        "kept",
        "let_go",
        "operation",
        "priority",
        "sent",
        "thread",
    )  # fmt: skip

    def __init__(
        self,
        calls: QuickCalls,
        plan: CallPlan,
        values: Arrays | None,
        outs: Arrays | None,
        kept: bool = False,
    ) -> None:
        self._calls, self._plan = calls, plan
        self._values, self._outs = values, outs
        self._pushes = values is not None
        self._ways: list[ServerWay] = []
        self._stamps: list[int] = []
        self._shared: dict[int, SharedPayload] = {}
        self._version = 0
        self._codec: tuple[int, float] | None = None
        self._packed: PackedValues | None = None
        self._before: QuickCall | None = None
        self._shares = kept and bool(plan.large) and calls.memory.shares_memory
        #: Whether a push has nothing of the caller's, once its values are where servers read them.
        self.kept = kept
        #: Whether it is being counted: an exception now leaves the machine with half of it.
        self.is_counting = False
        #: Whether nobody waits for it.
        self.let_go = False
        #: Whether its requests are on their way, as far as the credit allows.
        self.sent = False
        #: Whether others of the kind may go before and after it; and whether it has all answers.
        self.chained = self.ended = False
        self.priority = 0
        #: What the values that are pushed count divided by.
        self.divisor = 1
        #: The thread that has begun it, and whether that waits for it.
        self.thread = 0
        self.awaited = False
        #: What it is once the machine has adopted it.
        self.operation: PendingOperation | None = None

    @property
    def what(self) -> str:
        """What it is, for who waits too long."""
        return _WHAT[self._plan.kind]

    @property
    def is_abandoned(self) -> bool:
        """Whether its caller is gone, who does something else now: an exception came before it waited."""
        return self.thread == get_ident() and not (self.awaited or self.let_go or self.chained)

    @property
    def left(self) -> int:
        """Number of slices of which no answer has come, of this call and of those before it."""
        return self.own_left + (0 if self._before is None else self._before.left)

    @property
    def own_left(self) -> int:
        """The same of this call alone."""
        left = 0
        for way in self._ways:
            left += way.plan.exchange.left
        return left

    def chain(self) -> Iterator[QuickCall]:
        """Yield this call, and those before it, the last one first."""
        call: QuickCall | None = self
        while call is not None:
            yield call
            call = call._before

    def begin(self, machine: WorkerMachine, sockets: WorkerSockets, before: QuickCall | None) -> bool:
        """Count, and send, behind a push that was let go; False: nothing has happened."""
        self._before = before
        ways = []
        if self.chained and before is not None and not self._may_follow(before):
            return False
        for plan in self._plan.servers:
            stream = sockets.server_stream(plan.server)
            if stream is None or (before is not None and before.exchange_with(plan.server) is plan.exchange):
                return False
            ways.append(ServerWay(plan, stream))
        if not self._may_begin(machine) or not self._set(ways):
            return False
        try:
            self._prepare(ways)
        except BaseException:
            _clear(ways)
            raise
        self.is_counting = True
        for way in ways:
            way.first, way.base, way.pushed = machine.begin_exchange(
                way.plan.server, way.plan.slices, self._pushes
            )
            self._ways.append(way)
        if self._pushes:
            self._count()
        self.is_counting = False
        self._send(machine.member.epoch)
        return True

    def _may_follow(self, before: QuickCall) -> bool:
        """Whether it can go behind a call: with other slices, and not to overtake it."""
        apart = all(call._plan.slices.isdisjoint(self._plan.slices) for call in before.chain())
        return apart and self.priority <= before.priority

    def _may_begin(self, machine: WorkerMachine) -> bool:
        """Whether nothing is in its way; a server that cannot read this memory may have come meanwhile."""
        allowed = machine.allows_exchange(self._plan.server_numbers)
        return allowed and (not self._shares or self._calls.memory.shares_memory)

    def _set(self, ways: list[ServerWay]) -> bool:
        values, outs = self._values, self._outs
        arrays = values and values[0], outs and outs[0]
        found = values and values[1], outs and outs[1]
        for way in ways:
            if not way.plan.exchange.set(*found, arrays):
                _clear(ways)
                return False
        return True

    def _prepare(self, ways: list[ServerWay]) -> None:
        """Do what can fail, before anything is counted."""
        if self._outs is not None and self._plan.large:
            for way in ways:
                way.plan.map(self._calls.server_memory(way.plan.server))
        if self._values is None:
            return
        feedback = self._calls.pushes.feedback
        self._codec = None if feedback is None else feedback.codec.compiled
        if feedback is not None and self._codec is not None:
            self._pack(ways, self._values[0], feedback, self._codec)
            return
        if self._plan.large and self._calls.memory.shares_memory:
            self._share(ways, self._values[0])
        for way in ways if self.divisor > 1 else ():
            way.plan.exchange.divide(self.divisor)

    def _pack(
        self, ways: list[ServerWay], values: list[Array], feedback: Feedback, codec: tuple[int, float]
    ) -> None:
        """Pack what is pushed; the kernels, which change residuals, come last, and do not fail."""
        self._packed = packed = self._plan.packed(codec[0])
        for way in ways:
            way.plan.exchange.pack(*codec, packed.addresses, packed)
        for key in self._plan.keys:
            feedback.prepare(key.key, key.shape)
        with self._calls.counters.during(CONVERTING):
            for key, value, words in zip(self._plan.keys, values, packed.words, strict=True):
                feedback.pack(key.key, [value], words)
        if self._outs is None:
            self._values = None  # the caller's array may be gone before the answer comes

    def _count(self) -> None:
        """Note a push."""
        pushes, keys = self._calls.pushes, self._plan.keys
        self._stamps, self._version = pushes.next_stamps(keys), pushes.optimizer.version
        pushes.count_push(keys)
        self.let_go = self.kept and pushes.are_few_open(keys)

    def _share(self, ways: list[ServerWay], values: list[Array]) -> None:
        """Put values where the servers read them, those that are large enough."""
        memory = self._calls.memory
        copies: list[cpu.ReduceItem] = []
        places: dict[int, tuple[int, int, bool]] = {}
        for at in self._plan.large:
            value = values[at]
            shared = memory.place_sum(self._plan.keys[at], [value], copies)
            self.kept = self.kept and shared is not None and not shared.own
            if shared is not None:
                self._shared[at] = shared
                is_out = self._outs is not None and value is self._outs[0][at]
                places[at] = shared.segment, shared.offset, shared.own and is_out
        memory.carry_out(copies)
        for way in ways if places else ():
            way.plan.exchange.share(places)

    def _send(self, epoch: int) -> None:
        """Send, as far as the credit allows; not `sent`: a stream is at its end."""
        self.sent = True
        stamps = self._stamps or [0] * len(self._plan.keys)
        for way in self._ways:
            exchange = way.plan.exchange
            exchange.follow(None if self._before is None else self._before.exchange_with(way.plan.server))
            numbers = way.first, way.base, epoch, self._version
            if not way.stream.begin(exchange, way.pushed, stamps, *numbers):
                self.sent = False
            self.let_go = self.let_go and exchange.sent == len(way.plan.slices)

    def exchange_with(self, server: int) -> Exchange | None:
        """Return what went last to a server, of this call and of those before it."""
        for call in self.chain():
            for way in call._ways:
                if way.plan.server == server:
                    return way.plan.exchange
        return None

    def wait(
        self, sockets: WorkerSockets, end: float, until: QuickCall | None = None
    ) -> list[tuple[int, Message]]:
        """Receive, until `end` of the monotonic clock, or something else comes, or all of `until` has come.

        Returns other messages, each with its server.
        """
        ways = self._ways if self._before is None else self._last_ways()
        pairs = [(way.plan.exchange, way.stream) for way in ways]
        untils = None
        if until is not None:
            own = {way.plan.server: way.plan.exchange for way in until._ways}
            untils = [own.get(way.plan.server) for way in ways]
        found = sockets.await_replies(pairs, end, untils)
        return [(ways[number].plan.server, message) for number, message in found]

    def _last_ways(self) -> list[ServerWay]:
        """Return what went last to each server, of this call and of those before it."""
        last: dict[int, ServerWay] = {}
        for call in self.chain():
            for way in call._ways:
                last.setdefault(way.plan.server, way)
        return list(last.values())

    def settle(self, machine: WorkerMachine) -> QuickCall | None:
        """End calls of the chain, up to the first that lacks answers; return this one, if it is left."""
        chain = list(self.chain())
        left = [call for call in chain if call.own_left]
        for call in chain:
            call.ended = not call.own_left
        rest = chain[: chain.index(left[-1]) + 1] if left else []
        ended = chain[len(rest) :]
        for call in reversed(ended):
            call._count_answers(machine)
        if rest:
            rest[-1]._before = None
            for call in rest:
                call._lead()
        for call in ended:
            call._forget()
        return self if rest else None

    def _lead(self) -> None:
        """Follow no exchange that has ended."""
        for way in self._ways:
            if self._before is None or self._before.exchange_with(way.plan.server) is None:
                way.plan.exchange.lead()

    def complete(self, machine: WorkerMachine) -> bool:
        """End it if all answers have come."""
        if self.left:
            return False
        self.is_counting = True
        if self._before is not None:
            self._before.complete(machine)
        self._count_answers(machine)
        self._forget()
        self.is_counting = False
        return True

    def _count_answers(self, machine: WorkerMachine) -> None:
        for way in self._ways:
            rounds: Any = way.plan.exchange.rounds()  # none is missing
            self._end(machine, way, way.plan.slices, way.pushed, rounds)

    def _forget(self) -> None:
        _clear(self._ways)
        self._before = None

    def _end(
        self, machine: WorkerMachine, way: ServerWay, slices: list[int], pushed: list[int], rounds: list[int]
    ) -> None:
        exchange = way.plan.exchange
        counts = (exchange.answered_bytes, exchange.received)
        accepted = pushed if self._pushes else []
        seen = machine.end_exchange(way.plan.server, slices, accepted, rounds, *counts)
        if seen > 0:
            self._count_rounds(seen)

    def _count_rounds(self, seen: int) -> None:
        self._calls.counters.end_rounds(seen)

    def adopt(self, machine: WorkerMachine, operations: OperationTable, now: float) -> list[Action]:
        """Have the machine go on with what has no answer yet."""
        before = [] if self._before is None else self._before.adopt(machine, operations, now)
        if not self._ways:
            return before
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
            self._end(machine, way, slices, [way.pushed[at] for at in done], rounds)
            for at, slice_ in enumerate(plan.slices):
                if came[at] is None:
                    server, record, payload = requests[index[slice_]][:3]
                    own = way.pushed[at] - machine.base_round(server, slice_)
                    record = record._replace(sequence=way.first + at, round=own)
                    parts.append((index[slice_], SliceRequest(server, record, payload)))
            ends[plan.server] = way.first + plan.exchange.sent
        self._forget()
        if self._packed is not None:
            self._plan.give_packed()
        operation.done = not parts
        name = operations.add_operation(operation) if parts else None
        if self.let_go:
            operations.release_operation(operation)
        priority = self.priority if self.chained else None
        return before + (machine.adopt(name, parts, ends, now, priority) if parts else [])

    def _requests(self) -> Iterator[PartRequest]:
        """Make all requests as the usual way has them."""
        slices, pulls = self._calls.slices, self._calls.pulls
        stamps = self._stamps or [self._calls.pushes.optimizer.clock.stamp] * len(self._plan.keys)
        for at, key in enumerate(self._plan.keys):
            values = [] if self._values is None else [self._values[0][at]]
            take = None if self._outs is None else pulls.make_writer(key, values, [self._outs[0][at]])
            head = PushHeader(self._plan.kind, self._version, stamps[at])
            if self._packed is not None and self._codec is not None:
                yield from slices.coded_requests(key, self._packed.words[at], head, take, self._codec)
            elif values:
                yield from slices.placed_requests(
                    key, values[0], head, take, self._shared.get(at), self.divisor
                )
            elif take is not None:
                yield from read_requests(key, RecordKind.PULL, take)


def _clear(ways: list[ServerWay]) -> None:
    for way in ways:
        way.plan.exchange.clear()
