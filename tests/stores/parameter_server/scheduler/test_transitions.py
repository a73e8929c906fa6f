"""The table of states and transitions of the scheduler lists exactly the changes in random jobs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scheduled import SPEC, Job

from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler.machine import TRANSITIONS, SchedulerMachine, SchedulerOptions
from kvstore.stores.parameter_server.scheduler.peers import AdmittedProcess
from kvstore.stores.parameter_server.scheduler.store_membership import StoreMembership

STORE = "over broken started"  # fields that are the state of a store
Change = tuple[str, str, str, str]  # subject, before, after, cause


def process_state(process: AdmittedProcess) -> str:
    state: str = vars(process)["state"].value
    return state


def store_state(store: StoreMembership) -> str:
    if store.over:
        return "over"
    if store.broken:
        return "broken"
    return "running" if store.started else "forming"


def job_state(machine: SchedulerMachine) -> str:
    if machine.ended:
        return "closed"
    if machine._shutdown._over is not None:
        return "over"
    return "running" if machine._assignment.servers.welcomed else "gathering"


class Recorder:
    """The changes of states that it has seen, each with the message or event that was processed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.changes: set[Change] = set()
        self.cause = ""
        connect, tick = SchedulerMachine._set_handlers, SchedulerMachine._tick

        def watched(machine: SchedulerMachine) -> None:
            connect(machine)
            for kind, handler in machine._handlers.items():
                machine._handlers[kind] = self.during(machine, kind.__name__, handler)

        patch.setattr(SchedulerMachine, "_set_handlers", watched)
        patch.setattr(
            SchedulerMachine,
            "_tick",
            lambda machine, to: self.during(machine, "TickEvent", tick)(machine, to),
        )
        patch.setattr(AdmittedProcess, "__setattr__", self.setter("process", "state", process_state))
        patch.setattr(
            StoreMembership, "__setattr__", self.setter("store", "over broken started", store_state)
        )

    def during(self, machine: SchedulerMachine, cause: str, call: Callable[..., None]) -> Callable[..., None]:
        def called(*arguments: Any) -> None:
            self.cause, before = cause, job_state(machine)
            call(*arguments)
            self.note("job", before, job_state(machine))
            self.cause = ""

        return called

    def setter(
        self, subject: str, names: str, state: Callable[[Any], str]
    ) -> Callable[[Any, str, Any], None]:
        def set_attribute(one: Any, name: str, value: Any) -> None:
            before = state_of(one) if name in names.split() else ""
            object.__setattr__(one, name, value)
            if before:
                self.note(subject, before, state_of(one))

        def state_of(one: Any) -> str:
            try:
                return state(one)
            except (AttributeError, KeyError):  # it is being created
                return "new"

        return set_attribute

    def note(self, subject: str, before: str, after: str) -> None:
        if before != after:
            self.changes.add((subject, before, after, self.cause))


def play(draw: random.Random) -> None:
    """Run one job with random messages, losses and restarts."""
    servers, options = draw.choice([1, 2]), {"mode": draw.choice(["sync", "async"])}
    options["on_peer_loss"] = draw.choice(["raise", "continue"])
    job = Job(draw.choice([1, 2, 3]), 0)
    grace, timeout = draw.choice([0.0, 3.0]), draw.choice([4.0, 20.0])
    chosen = SchedulerOptions("job", job.workers, servers, server_grace=grace, timeout=timeout)
    job.machine = SchedulerMachine(chosen)
    alive: dict[str, str] = {}  # role by name
    acts = ["server", "worker", "worker", "keys", "leave", "bye", "silence", "time", "time", "end"]
    for number in range(2, draw.choice([10, 40])):
        name, role = draw.choice([*alive.items()] or [("", "")])
        act = draw.choice(acts)
        if act == "server":
            rank = draw.randrange(servers)
            job.server(rank, number, restarted=draw.random() < 0.5)
            alive[f"s{rank}.{number}"] = "server"
        elif act == "worker":
            restarted = draw.random() < 0.3
            more = {"restarted": restarted, "options": options, "ordinal": int(draw.random() < 0.2)}
            job.worker(draw.randrange(job.workers), f"w{number}", number, **more)
            alive[f"w{number}"] = "worker"
        elif act == "time":
            job.pass_time(draw.choice([0.5, 2.0, 6.0]), *alive)
        elif act == "end" and draw.random() < 0.1:
            job.pass_time(30.0)
        elif act == "keys" and role == "worker":
            job.say(name, m.CreateKeysRequest(number, 0, (SPEC,)))
        elif act == "leave" and role == "worker":
            job.say(name, m.LeaveNotice(0, lost=draw.random() < 0.3))
        elif act in ("bye", "silence") and name:
            if act == "bye":
                job.say(name, m.ProcessEndNotice(name, lost=draw.random() < 0.3))
            del alive[name]
    job.pass_time(60.0)


@pytest.fixture(scope="module")
def changes() -> Iterator[set[Change]]:
    """Return the changes of states in many jobs."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder(patch)
        for seed in range(1000):
            play(random.Random(seed))
        yield recorder.changes


def test_the_table_lists_exactly_the_changes_of_the_machine(changes: set[Change]) -> None:
    listed = {(row.subject, row.before, row.after, cause) for row in TRANSITIONS for cause in row.causes}
    assert changes - listed == set(), "the machine changes a state, and the table has no such row"
    assert listed - changes == set(), "the table has a row, and the machine never changes a state so"
