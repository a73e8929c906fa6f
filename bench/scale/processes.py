"""A process: it handles messages one after the other, and each occupies a core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from bench.scale.costs import Costs
from bench.scale.network import Clock, Host, send
from bench.scale.wire import ControlCodec
from kvstore.stores.parameter_server.protocol import messages as m


class Process:
    """One process of a job; its subclasses have the state machines.

    `slow` is a factor of all its times; `sharers` processes of its host share its work.
    """

    def __init__(self, clock: Clock, host: Host, name: str, costs: Costs) -> None:
        self.clock, self.host, self.name, self.costs = clock, host, name, costs
        self.codec = ControlCodec()
        self.alive = True
        self.slow, self.sharers = 1.0, 1
        self.seconds = 0.0  # of a core
        self.sent = self.received = 0  # messages
        self._free = 0.0  # from when on it can take a step
        self._inbox: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._due = False

    def post(self, call: Callable[..., None], *arguments: Any) -> None:
        """Queue some work, after the work that was queued before."""
        if not self.alive or not self.host.alive:
            return
        self._inbox.append((call, arguments))
        if not self._due:
            self._due = True
            self.clock.at(self._free, self._begin)

    def spend(self, seconds: float) -> None:
        """Spend time of the core, within a step."""
        took = seconds * self.slow
        self.seconds += took
        self.host.busy += took
        self._free += took / self.sharers

    def send(self, target: Process, nbytes: int, call: Callable[..., None], *arguments: Any) -> None:
        """Send a message after the work of this step so far; `call` handles it at the target."""
        self.sent += 1
        self.clock.at(self._free, self._send, target, nbytes, call, arguments)

    def send_control(self, target: Process, message: Any, *arguments: Any) -> None:
        """Send a control message, which the target's `hear` handles."""
        nbytes, is_new = self.codec.measure(message)
        costs = self.costs
        encode = costs.names_encode if _is_names(message) else costs.control_encode
        self.spend(costs.control_message + nbytes * (encode if is_new else costs.control_copy))
        self.send(target, nbytes, target.heard, nbytes, message, *arguments)

    def heard(self, nbytes: int, message: Any, *arguments: Any) -> None:
        """Read a control message."""
        self.received += 1
        decode = self.costs.names_decode if _is_names(message) else self.costs.control_decode
        self.spend(self.costs.control_message + nbytes * decode)
        self.hear(message, *arguments)

    def hear(self, message: Any, peer: Any = "scheduler") -> None:
        """Handle a control message."""
        raise NotImplementedError

    def _send(
        self, target: Process, nbytes: int, call: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if self.alive:
            send(self.host, target.host, nbytes, target.post, call, *arguments)

    @property
    def time(self) -> float:
        """Return the time at which the work of this step so far is done."""
        return self._free

    def die(self) -> None:
        """End without a message."""
        self.alive = False
        self._inbox.clear()

    def _begin(self) -> None:
        if self.alive:
            self.host.when_free(self._step)

    def _step(self) -> None:
        self._free = self.clock.now
        if self._inbox:
            call, arguments = self._inbox.popleft()
            call(*arguments)
        self.host.release(self._free)
        self._due = bool(self._inbox)
        if self._due:
            self.clock.at(self._free, self._begin)


def _is_names(message: Any) -> bool:
    return type(getattr(message, "body", None)) in (m.LookupRequest, m.KeysReadyRequest, m.DropKeysRequest)
