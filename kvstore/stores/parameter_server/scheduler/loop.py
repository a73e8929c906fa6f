"""The event loop of the scheduler: it receives messages, and carries out the actions of the machine."""

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
from ..protocol.failures import as_exception
from ..protocol.messages import PROTOCOL, HelloReply, HelloRequest, PingReply, ReliableMessage
from ..protocol.view_log import tell_message
from ..transport.sockets import SchedulerSockets
from .journaled_scheduler import JournaledScheduler
from .machine import SchedulerMachine, SchedulerOptions

log = logging.getLogger("kvstore.ps")

_TICK = 0.1  # seconds between two ticks


def run_scheduler(
    roles: Roles,
    config: PsConfig,
    report: Callable[[str], None] | None = None,
    watch: Callable[[Callable[[], bool]], None] | None = None,
) -> None:
    """Run the scheduler of a job; blocks until the job is over.

    Parameters
    ----------
    roles, config
        The job, and the options of its scheduler.
    report : callable, optional
        It is called with the address as soon as other processes can connect.
    watch : callable, optional
        It is called before that, with a function that returns whether no worker was ever admitted.

    Raises
    ------
    KVStoreError
        The job ended with an error, or the scheduler cannot listen at its address.
    """
    journaled = (
        JournaledScheduler(_scheduler_options(roles, config), config.journal) if config.journal else None
    )
    if journaled is not None and roles.restart and not journaled.journal.records:
        journaled.journal.remove()
        log.info("the job is over: it ended before this scheduler was restarted")
        return
    sockets = _open_sockets(roles, journaled)
    roles = roles.bound(sockets.port)
    try:
        loop = _SchedulerLoop(roles, config, sockets, journaled)
        recording.follow(loop, _SchedulerLoop.timeline_record)
        if watch is not None:
            watch(loop.is_deserted)
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
        raise as_exception(end.error)


def _scheduler_options(roles: Roles, config: PsConfig) -> SchedulerOptions:
    return SchedulerOptions(
        roles.job,
        roles.num_workers,
        roles.num_servers,
        resend_after=min(1.0, config.dead_after / 4),
        dead_after=config.dead_after,
        server_grace=config.timeout if config.server_restarts else 0.0,
        timeout=config.timeout,
    )


def _open_sockets(roles: Roles, journaled: JournaledScheduler | None) -> SchedulerSockets:
    """Listen; for heartbeats at the addresses of the scheduler before this one, if the journal has them."""
    try:
        return SchedulerSockets(roles, journaled.addresses if journaled is not None else ("", ""))
    except BaseException:
        if journaled is not None:
            journaled.journal.close()
        raise


class _SchedulerLoop:
    """The event loop of one scheduler."""

    def __init__(
        self,
        roles: Roles,
        config: PsConfig,
        sockets: SchedulerSockets,
        journaled: JournaledScheduler | None,
    ) -> None:
        self._sockets, self._heartbeat = sockets, config.heartbeat
        self._journaled = journaled
        self._machine = (
            SchedulerMachine(_scheduler_options(roles, config)) if journaled is None else journaled.machine
        )
        self._absence = config.timeout if journaled is not None else 0.0
        self._actions: list[events.Action] = []
        if journaled is not None:
            journaled.continue_job((sockets.heartbeats.address, sockets.echo))
            if self._machine.term > 1:
                log.warning(
                    "the scheduler continues job %r from its journal %s (start %d)",
                    roles.job, journaled.journal.path, self._machine.term,
                )  # fmt: skip
        self._ticked = self._pinged = self._started = time.monotonic()
        self._notice_logged = False
        self._other_versions: set[str] = set()  # processes of another version of kvstore, each reported once
        self._ended: events.JobEnded | None = None
        self._members = MembershipLog(log)
        self.counters = self._members.counters = Counters("scheduler", roles.job, 0, 1)

    def is_deserted(self) -> bool:
        """Return whether no worker was ever admitted."""
        return self._machine.is_deserted

    def run(self) -> events.JobEnded:
        """Run the event loop until the job is over."""
        watch(self, _SchedulerLoop.whereabouts)
        log.info("scheduler started at %s", self._sockets.address)
        while self._ended is None:
            for peer, message in self._sockets.receive(_TICK):
                self._note_version(message)
                self._step_machine(events.MessageReceived(peer, message))
            for process in self._sockets.heartbeats.read_echoes():
                self._step_machine(events.HeartbeatReceived(process))
            self._tick(time.monotonic())
            self._carry_out()
        log.info("the job is over after %.1f s", time.monotonic() - self._started)
        return self._ended

    def whereabouts(self) -> str:
        """Return which processes the scheduler waits for; see `kvstore.observe.stacks`."""
        missing = self._machine.waits_for()
        return f"the scheduler waits for {missing}" if missing else "the scheduler, with all processes there"

    def timeline_record(self) -> StoreRecord:
        """Describe the scheduler for a timeline, whose reference clock is that of the scheduler."""
        return StoreRecord(self.counters.number, "scheduler", self.counters.read()["job"], 0, 1, {})

    def _note_version(self, message: Any) -> None:
        """Warn of a process that has another version of kvstore and speaks the same protocol."""
        hello = message.body if type(message) is ReliableMessage else None
        if (
            type(hello) is not HelloRequest
            or hello.protocol != PROTOCOL
            or hello.version == package_version()
        ):
            return
        if hello.process not in self._other_versions:
            self._other_versions.add(hello.process)
            log.warning(
                "%s %s has kvstore %s, and the scheduler %s: install one version in all processes of the job",
                hello.role, hello.rank if hello.rank >= 0 else "without a rank",
                hello.version or "of an earlier version", package_version(),
            )  # fmt: skip

    def _tick(self, now: float) -> None:
        """Send heartbeats, step the machine with a tick, and log a long start, each when it is due."""
        if now - self._pinged >= self._heartbeat:
            self._pinged = now
            self._sockets.heartbeats.ping_all()
        if now - self._ticked >= _TICK:
            self._ticked = now
            self._step_machine(events.TickEvent())
        if not self._notice_logged and now - self._started > NOTICE_AFTER:
            self._notice_logged = True
            if missing := self._machine.waits_for():
                log.warning("the job has waited %.0f s for %s", now - self._started, missing)

    def _step_machine(self, event: events.Event) -> None:
        if self._journaled is not None:
            self._actions += self._journaled.step(event)  # carried out after the event is on disk
            return
        self._actions += self._machine.step(event, time.monotonic())
        self._carry_out()

    def _carry_out(self) -> None:
        """Carry out the actions of all events since the last call, after the journal has these events."""
        if self._journaled is not None:
            self._journaled.commit()
        actions, self._actions = self._actions, []
        for action in actions:
            if isinstance(action, events.SendMessage):
                tell_message(self._members, action.message)
                self._sockets.send(action.peer, self._with_addresses(action.message))
            elif isinstance(action, events.JobEnded):
                self._ended = action

    def _with_addresses(self, message: Any) -> Any:
        """Return the message with the addresses of heartbeats and echo, or the time, if it has them."""
        if type(message) is not ReliableMessage:
            return message
        body: HelloReply | PingReply
        if type(message.body) is HelloReply:
            body = HelloReply(self._sockets.heartbeats.address, self._sockets.echo, self._absence)
        elif type(message.body) is PingReply:
            body = PingReply(message.body.number, time.monotonic_ns())
        else:
            return message
        return msgspec.structs.replace(message, body=body)
