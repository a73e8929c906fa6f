"""The scheduler's process: the real state machine, and the costs of its messages."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import msgspec

from bench.scale.job import Job
from bench.scale.network import Host
from bench.scale.processes import Process
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler.machine import SchedulerMachine, SchedulerOptions


class SchedulerProcess(Process):
    """The scheduler of a job; `took` are the seconds that its machine itself has run here."""

    def __init__(self, job: Job, host: Host, options: SchedulerOptions) -> None:
        super().__init__(job.clock, host, "scheduler", job.costs)
        self._job = job
        self.machine = SchedulerMachine(options)
        self.kinds: Counter[str] = Counter()  # of messages, there and back
        self.took = 0.0

    def hear(self, message: Any, peer: Any = "") -> None:
        """Handle a message of a process's store; -1 is a server's."""
        self.kinds[_kind(message)] += 1
        self._take(e.MessageReceived(peer, message))

    def beat(self, name: str) -> None:
        """Handle a heartbeat."""
        self.kinds["heartbeat"] += 1
        self.spend(self.costs.beat)
        self._take(e.HeartbeatReceived(name))

    def tick(self) -> None:
        """Pass a tick to the state machine."""
        self._take(e.TickEvent())

    def _take(self, event: e.Event) -> None:
        began = time.perf_counter()
        actions = self.machine.step(event, self.clock.now)
        took = time.perf_counter() - began
        self.took += took
        if self._job.plan.timed:
            self.spend(took)
        for action in actions:
            if isinstance(action, e.SendMessage):
                self._send_to(action.peer, action.message)
            elif isinstance(action, e.JobEnded):
                self._job.ended = True

    def _send_to(self, peer: Any, message: Any) -> None:
        if type(message) is m.ReliableMessage and type(message.body) is m.HelloReply:
            message = msgspec.structs.replace(message, body=m.HelloReply(echo=e.ECHO))
        self.kinds[_kind(message)] += 1
        self.send_control(self._job.processes[peer[0]], message)


def _kind(message: Any) -> str:
    body = getattr(message, "body", message)
    return "acknowledgement" if body is None else type(body).__name__
