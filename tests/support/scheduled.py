"""A scheduler in a test, and the processes that send to it."""

from __future__ import annotations

from typing import Any

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler.machine import SchedulerMachine, SchedulerOptions

SPEC = m.KeySpec("w", (8,), "float32")


class Job:
    """A scheduler and the messages that it has sent, with their receivers."""

    def __init__(self, workers: int = 2, servers: int = 1, **options: Any) -> None:
        self.machine = SchedulerMachine(SchedulerOptions("job", workers, servers, **options))
        self.now = 0.0
        self.sent: dict[Any, list[Any]] = {}
        self.numbers: dict[Any, int] = {}
        self.actions: list[e.Action] = []
        self.workers = workers
        for rank in range(servers):
            self.server(rank)

    def step(self, event: e.Event) -> None:
        self.actions = self.machine.step(event, self.now)
        for action in self.actions:
            if isinstance(action, e.SendMessage):
                assert isinstance(action.message, m.ReliableMessage)
                if action.message.body is not None:
                    self.sent.setdefault(action.peer, []).append(action.message.body)

    def say(self, peer: Any, body: Any) -> None:
        number = self.numbers[peer] = self.numbers.get(peer, 0) + 1
        self.step(e.MessageReceived(peer, m.ReliableMessage(number, 0, body)))

    def server(self, rank: int, incarnation: int = 1, **more: Any) -> None:
        name = f"s{rank}.{incarnation}"
        self.say(
            name, m.HelloRequest("server", rank, incarnation, name, "job", m.PROTOCOL, "tcp://x", **more)
        )

    def worker(self, rank: int, peer: str | None = None, incarnation: int = 1, **more: Any) -> str:
        peer = peer or f"w{rank}"
        values: dict[str, Any] = {
            "process": peer,
            "job": "job",
            "protocol": m.PROTOCOL,
            "group": "default",
            "options": {"mode": "sync"},
            **more,
        }
        self.say(peer, m.HelloRequest("worker", rank, incarnation, **values))
        return peer

    def start(self, **options: Any) -> list[str]:
        return [self.worker(rank, options={"mode": "sync", **options}) for rank in range(self.workers)]

    def last(self, peer: Any, kind: type) -> Any:
        found = [body for body in self.sent.get(peer, []) if type(body) is kind]
        return found[-1] if found else None

    def pass_time(self, seconds: float, *alive: str) -> None:
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            for name in alive:
                self.step(e.HeartbeatReceived(name))
            self.step(e.TickEvent())
