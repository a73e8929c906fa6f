"""The scheduler: one socket, the heartbeats of all processes, and the machine that knows who takes part."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ....observe.membership import MembershipLog
from ....observe.native._observe import Counters
from ....observe.stacks import watch
from ....observe.timeline import recording
from ....observe.timeline.sources import StoreRecord
from ....settings.parameter_server import PsConfig
from ....settings.roles import Roles
from ....source_tree import package_version
from ....waiting import NOTICE_AFTER
from ..protocol import events
from ..protocol.failures import raised
from ..protocol.messages import PROTOCOL, Hello, Met, Pong, ReliableMessage
from ..protocol.view_log import tell_message
from ..transport.sockets import SchedulerSockets
from .machine import Scheduler, SchedulerOptions
from .recording import JournaledScheduler

log = logging.getLogger("kvstore.ps")

_TICK = 0.1  # seconds between two looks at the clock


def run(
    roles: Roles,
    config: PsConfig,
    report: Callable[[str], None] | None = None,
    watch: Callable[[Callable[[], bool]], None] | None = None,
) -> None:
    """Be the scheduler of a job until it is over; KVStoreError: the job did not end well, or has no address.

    `report` is called with the address as soon as others can connect, and before that `watch` with a function
    that says whether no worker has ever come.
    """
    journaled = JournaledScheduler(_options(roles, config), config.journal) if config.journal else None
    if journaled is not None and roles.restart and not journaled.journal.records:
        journaled.journal.remove()
        log.info("the job is over: the scheduler before this one had ended it")
        return
    sockets = _opened(roles, journaled)
    roles = roles.bound(sockets.port)
    try:
        loop = _Loop(roles, config, sockets, journaled)
        recording.follow(loop, _Loop.record)
        if watch is not None:
            watch(loop.deserted)
        if report is not None:
            report(sockets.address)
        end = loop.run()
    finally:
        sockets.close()
        recording.write()
        if journaled is not None:
            journaled.journal.close()
    if journaled is not None and (end.error is None or end.error.error != "FencedError"):
        journaled.journal.path.unlink(missing_ok=True)
    if end.error is not None:
        raise raised(end.error)


def _options(roles: Roles, config: PsConfig) -> SchedulerOptions:
    return SchedulerOptions(
        roles.job,
        roles.num_workers,
        roles.num_servers,
        resend_after=min(1.0, config.dead_after / 4),
        dead_after=config.dead_after,
        server_grace=config.timeout if config.server_restarts else 0.0,
        timeout=config.timeout,
    )


def _opened(roles: Roles, journaled: JournaledScheduler | None) -> SchedulerSockets:
    """Listen; where the journal says that one listened before."""
    try:
        return SchedulerSockets(roles, journaled.addresses if journaled is not None else ("", ""))
    except BaseException:
        if journaled is not None:
            journaled.journal.close()
        raise


class _Loop:
    """One scheduler, from its start to its end."""

    def __init__(
        self,
        roles: Roles,
        config: PsConfig,
        sockets: SchedulerSockets,
        journaled: JournaledScheduler | None,
    ) -> None:
        self._sockets, self._heartbeat = sockets, config.heartbeat
        self._journaled = journaled
        self._machine = Scheduler(_options(roles, config)) if journaled is None else journaled.machine
        self._absence = config.timeout if journaled is not None else 0.0
        self._actions: list[events.Action] = []
        if journaled is not None:
            journaled.begin((sockets.heartbeats.address, sockets.echo))
            if self._machine.term > 1:
                log.warning(
                    "the scheduler goes on with job %r, from %s (start %d)",
                    roles.job, journaled.journal.path, self._machine.term,
                )  # fmt: skip
        self._ticked = self._pinged = self._started = time.monotonic()
        self._told = False
        self._strange: set[str] = set()  # processes of another version of kvstore, each reported once
        self._ended: events.End | None = None
        self._members = MembershipLog(log)
        self.counters = self._members.counters = Counters("scheduler", roles.job, 0, 1)

    def deserted(self) -> bool:
        """Whether no worker has ever come."""
        return self._machine.deserted

    def run(self) -> events.End:
        """Serve until the job is over."""
        watch(self, _Loop.whereabouts)
        log.info("scheduler started at %s", self._sockets.address)
        while self._ended is None:
            for peer, message in self._sockets.receive(_TICK):
                self._note_version(message)
                self._step(events.Received(peer, message))
            for process in self._sockets.heartbeats.heard():
                self._step(events.Heard(process))
            self._look_at_the_clock(time.monotonic())
            self._carry_out()
        log.info("the job is over after %.1f s", time.monotonic() - self._started)
        return self._ended

    def whereabouts(self) -> str:
        """Say whom the scheduler knows; see `kvstore.observe.stacks`."""
        missing = self._machine.waits_for()
        return f"the scheduler waits for {missing}" if missing else "the scheduler, with all processes there"

    def record(self) -> StoreRecord:
        """Describe the scheduler for a timeline, which takes the times of others by its clock."""
        return StoreRecord(self.counters.number, "scheduler", self.counters.read()["job"], 0, 1, {})

    def _note_version(self, message: Any) -> None:
        """Warn of a process that has another version of kvstore and speaks the same protocol."""
        hello = message.body if type(message) is ReliableMessage else None
        if type(hello) is not Hello or hello.protocol != PROTOCOL or hello.version == package_version():
            return
        if hello.process not in self._strange:
            self._strange.add(hello.process)
            log.warning(
                "%s %s has kvstore %s, and the scheduler %s: install one version in all processes of the job",
                hello.role, hello.rank if hello.rank >= 0 else "without a rank",
                hello.version or "of an earlier version", package_version(),
            )  # fmt: skip

    def _look_at_the_clock(self, now: float) -> None:
        if now - self._pinged >= self._heartbeat:
            self._pinged = now
            self._sockets.heartbeats.ping()
        if now - self._ticked >= _TICK:
            self._ticked = now
            self._step(events.Tick())
        if not self._told and now - self._started > NOTICE_AFTER:
            self._told = True
            if missing := self._machine.waits_for():
                log.warning("the job has waited %.0f s for %s", now - self._started, missing)

    def _step(self, event: events.Event) -> None:
        if self._journaled is not None:
            self._actions += self._journaled.step(event)  # carried out once it is on disk
            return
        self._actions += self._machine.step(event, time.monotonic())
        self._carry_out()

    def _carry_out(self) -> None:
        """Do what follows from all that was taken in, once that is in the journal, if there is one."""
        if self._journaled is not None:
            self._journaled.commit()
        actions, self._actions = self._actions, []
        for action in actions:
            if isinstance(action, events.Send):
                tell_message(self._members, action.message)
                self._sockets.send(action.peer, self._addressed(action.message))
            elif isinstance(action, events.End):
                self._ended = action

    def _addressed(self, message: Any) -> Any:
        """Tell others where signs of life are wanted, and given; and what time it is."""
        if type(message) is not ReliableMessage:
            return message
        body: Met | Pong
        if type(message.body) is Met:
            body = Met(self._sockets.heartbeats.address, self._sockets.echo, self._absence)
        elif type(message.body) is Pong:
            body = Pong(message.body.number, time.monotonic_ns())
        else:
            return message
        return msgspec.structs.replace(message, body=body)
