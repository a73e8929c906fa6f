"""Recorders of the changes of states of workers and servers, for comparison with their tables."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import pytest

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol.transitions import Transition
from kvstore.stores.parameter_server.server import store_machine
from kvstore.stores.parameter_server.server.machine import ServerMachine
from kvstore.stores.parameter_server.server.slice_requests import SliceRequests
from kvstore.stores.parameter_server.server.slice_rounds import SliceActivity
from kvstore.stores.parameter_server.worker.state_machine.machine import WorkerMachine
from kvstore.stores.parameter_server.worker.state_machine.server_links import ServerLinks

Change = tuple[str, str, str, str]  # subject, before, after, cause
#: By subject and its name, the state; or the last complete round of a slice, with the subject "last".
States = dict[tuple[Any, ...], Any]


def listed(rows: Iterable[Transition]) -> set[Change]:
    """All changes that a table has."""
    return {(row.subject, row.before, row.after, cause) for row in rows for cause in row.causes}


def cause_of(event: Any) -> str:
    """Name of the message that arrived, or of the event."""
    return type(event.message if type(event) in (e.MessageReceived, e.SchedulerRequest) else event).__name__


class Recorder:
    """The changes of states in machines of one class, each with its cause: a message, event or method."""

    def __init__(self, states: Callable[[Any], States]) -> None:
        self.states = states
        self.changes: set[Change] = set()
        self.known: dict[Any, States] = {}  # by machine
        self.calls: list[tuple[Any, str]] = []  # machines and causes of the calls in progress

    def look(self, machine: Any, cause: str) -> None:
        """Note what has changed since the last look at a machine."""
        now = self.states(machine)
        before = self.known.get(machine)
        self.known[machine] = now
        for key in before.keys() | now.keys() if before is not None else ():
            if key[0] == "last":
                self.note_rounds(key, before, now, cause)
            elif key[0] != "round":
                self.note(key[0], before.get(key, "new"), now.get(key, "gone"), cause)

    def note(self, subject: str, before: str, after: str, cause: str) -> None:
        if before != after:
            self.changes.add((subject, before, after, cause))

    def note_rounds(self, key: tuple[Any, ...], before: States, now: States, cause: str) -> None:
        """Note the changes of the rounds of a slice, if it exists before and after."""
        if key not in before or key not in now:
            return
        at = key[1:]
        numbers = {one[3] for one in (*before, *now) if one[0] == "round" and one[1:3] == at}
        for number in numbers | set(range(before[key] + 1, now[key] + 1)):
            self.note("round", *(round_state(one, at, number) for one in (before, now)), cause)

    def during(self, machine: Any, cause: str, call: Callable[[], Any]) -> Any:
        """Call, and note the changes with their causes, also those of a call in between."""
        if self.calls:
            self.look(*self.calls[-1])
        self.calls.append((machine, cause))
        try:
            return call()
        finally:
            self.look(machine, cause)
            self.calls.pop()

    def watch(self, patch: pytest.MonkeyPatch, cls: type, *methods: str) -> None:
        """Look at each machine of a class after each message, each step, and each of these methods."""
        create = vars(cls)["__init__"]

        def created(machine: Any, *arguments: Any, **more: Any) -> None:
            create(machine, *arguments, **more)
            for kind, handler in machine._handlers.items():
                machine._handlers[kind] = self.watched(machine, kind.__name__, handler)
            self.look(machine, "")

        patch.setattr(cls, "__init__", created)
        self.watch_method(patch, cls, "step", lambda event, now: cause_of(event))
        for name in methods:
            self.watch_method(patch, cls, name, lambda *_, name=name: name)

    def watched(self, machine: Any, cause: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: self.during(machine, cause, lambda: call(*arguments))

    def watch_method(
        self, patch: pytest.MonkeyPatch, cls: type, name: str, cause: Callable[..., str]
    ) -> None:
        """Look after a method of a machine, or of its part, where a machine is in a step."""
        method = vars(cls)[name]

        def called(owner: Any, *arguments: Any) -> Any:
            machine = owner if owner in self.known else self.calls[-1][0] if self.calls else None
            if machine is None:
                return method(owner, *arguments)
            return self.during(machine, cause(*arguments), lambda: method(owner, *arguments))

        patch.setattr(cls, name, called)


def watched_workers(patch: pytest.MonkeyPatch) -> Recorder:
    """Return a recorder of all workers from now on."""
    recorder = Recorder(worker_states)
    recorder.watch(patch, WorkerMachine, "adopt", "forget_reads")
    recorder.watch_method(patch, ServerLinks, "_pump", lambda *_: "pump")
    return recorder


def watched_servers(patch: pytest.MonkeyPatch) -> Recorder:
    """Return a recorder of all servers from now on; a request is a cause of its own."""
    recorder, take = Recorder(server_states), store_machine.take_usual

    def taken(effects: Any, members: Any, session: Any, slices: Any, batch: Any) -> list[Any]:
        for at, record in enumerate(batch.records):
            one, machine = batch._replace(records=[record]), recorder.calls[-1][0]
            usual = partial(take, effects, members, session, slices, one)
            if recorder.during(machine, kind_of(record), usual):
                return list(batch.records[at:])
        return []

    recorder.watch(patch, ServerMachine)
    recorder.watch_method(patch, SliceRequests, "handle", lambda session, record, frames: kind_of(record))
    patch.setattr(store_machine, "take_usual", taken)
    return recorder


def kind_of(record: Any) -> str:
    return str(record.kind.name)


# ------------------------------------------------------------------------------------------------- a worker


def worker_state(machine: WorkerMachine) -> str:
    member = machine.member
    if machine.failure is not None:
        return "failed"
    if machine._left:
        return "left"
    if member.welcome is None:
        return "outside"
    return "broken" if member.is_broken else "rejoining" if member.rejoining else "member"


def link_state(machine: WorkerMachine, link: Any) -> str:
    if link.lost is not None:
        return "lost"
    if not link.attached:
        return "connecting"
    return "attached" if link.join_epoch >= machine.member.join_epoch else "joining"


def worker_states(machine: WorkerMachine) -> States:
    found: States = {("worker",): worker_state(machine)}
    for rank, link in machine._servers._links.items():
        found["link", rank] = link_state(machine, link)
        table = link.requests
        held = [entry[2] for entries in table._held.values() for entry in entries]
        places = {"sent": table._open.values(), "queued": [entry[2] for entry in table._queue], "held": held}
        for place, requests in places.items():
            for one in requests:
                found["request", one] = place if one.operation is not None else "abandoned"
    return found


# ------------------------------------------------------------------------------------------------- a server


def store_state(store: Any) -> str:
    members = store.members
    if members.broken is not None:
        return "broken"
    if members.returning is not None:
        return "returning"
    return "running" if members.epoch else "announced"


def slice_state(slice_: Any) -> str:
    if slice_.busy == SliceActivity.WRITE:
        return "writing"
    if slice_.sealed:
        return "sealed"
    return "ready" if slice_.ready else "defined" if slice_.defined else "undefined"


def round_state(states: States, at: tuple[Hashable, ...], number: int) -> str:
    """State of a round of a slice."""
    if number <= states[("last", *at)]:
        return "complete"
    return str(states.get(("round", *at, number), "empty"))


def server_states(machine: ServerMachine) -> States:
    found: States = {("server",): "ended" if machine.ended else "working"}
    for number, store in machine._stores.items():
        found["store", number] = store_state(store)
        for id_, one in store.requests.slices.items():
            found["slice", number, id_] = slice_state(one)
            found["last", number, id_] = one.round
            found.update({("round", number, id_, round_): "collecting" for round_ in one.open_rounds()})
            if one.busy == SliceActivity.ROUND:
                found["round", number, id_, one.round + 1] = "summing"
    return found
