"""A scheduler that can be restarted: it writes its events to a journal before their actions are carried out.

The machine is deterministic, so its state follows from its events. The journal has each event that changed
the persistent state (`StepActions.changed`), with its time, and with the heartbeats since the event before.
All events of one iteration of the event loop are one record. After a restart `restore_records` passes the
events through a machine again and drops the actions: the reliable links repeat each message that is not
acknowledged. The clock of the machine continues at the time of the last event, so an absence of the scheduler
adds to no wait.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ....errors import ConfigError
from ....source_tree import package_version
from ..protocol.events import Action, Event, HeartbeatReceived, MessageReceived, SchedulerRestarted, TickEvent
from ..protocol.messages import PROTOCOL, ReliableMessage
from .journal_file import JournalFile
from .machine import SchedulerMachine, SchedulerOptions
from .machine_state import dump_state, load_state

_FORMAT = 3
_LARGE = 4 << 20  # bytes of a journal; the state replaces the events of a larger one
_GROWTH = 4  # and only if the journal is so many times as large as the last state that was written


class JournalEntry(msgspec.Struct, array_like=True):
    """One event: a message, or the term of a restarted scheduler, or a tick if neither is set.

    `stepped` and `manned` are the machine's clocks, `heard` the heartbeats since the last entry, by process.
    """

    now: float
    stepped: float | None
    manned: float
    heard: dict[str, float]
    peer: bytes = b""
    message: ReliableMessage | None = None
    term: int = 0

    def event(self) -> Event:
        """Return the event for the machine."""
        if self.message is not None:
            return MessageReceived(self.peer, self.message)
        return SchedulerRestarted(self.term) if self.term else TickEvent()


class JournalHead(msgspec.Struct, array_like=True):
    """The first record of a journal: version, job and term, and the state if it replaced earlier records."""

    format: int
    protocol: int
    version: str
    options: dict[str, Any]
    term: int
    addresses: tuple[str, str]
    state: Any = None


_heads = msgspec.msgpack.Decoder(JournalHead)
_entries = msgspec.msgpack.Decoder(list[JournalEntry])


class RecordedScheduler:
    """The machine with the events since the last record; `clock` returns the time in seconds."""

    def __init__(self, options: SchedulerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.machine = SchedulerMachine(options)
        self._options = dataclasses.asdict(options)
        self._clock = clock
        self._behind = 0.0  # seconds that the machine's time is behind the clock
        self._heard: dict[str, float] = {}  # time of the last heartbeat by process, since the last entry
        self._entries: list[JournalEntry] = []

    def now(self) -> float:
        """Return the machine's time."""
        return self._clock() - self._behind

    def step(self, event: Event) -> list[Action]:
        """Pass an event to the machine; the actions must wait until `next_record` is on disk."""
        now, clocks = self.now(), self.machine.clocks()
        actions = self.machine.step(event, now)
        if self.machine.changed:
            entry = JournalEntry(now, *clocks, self._heard)
            if isinstance(event, MessageReceived) and type(event.message) is ReliableMessage:
                entry.peer, entry.message = event.peer, event.message  # type: ignore[assignment]
            elif isinstance(event, SchedulerRestarted):
                entry.term = event.term
            self._entries.append(entry)
            self._heard = {}
        self._note_heard(event)
        return actions

    def next_record(self) -> bytes:
        """Return a record of the events since the last call; empty if they have changed nothing."""
        entries, self._entries = self._entries, []
        return msgspec.msgpack.encode(entries) if entries else b""

    def _note_heard(self, event: Event) -> None:
        if isinstance(event, HeartbeatReceived):
            process = self.machine.process_named(event.process)
        else:
            process = self.machine.process_of(event.peer) if isinstance(event, MessageReceived) else None
        if process is not None:
            self._heard[process.name] = process.heard

    # -------------------------------------------------------------------------------------------- the journal

    def state_record(self, addresses: tuple[str, str]) -> bytes:
        """Return a record of the whole state, which replaces all records before it."""
        head = JournalHead(_FORMAT, PROTOCOL, package_version(), self._options, self.machine.term, addresses)
        head.state = dump_state(self.machine.state())
        return msgspec.msgpack.encode(head)

    def restore_records(self, records: list[bytes]) -> tuple[str, str]:
        """Restore the machine from records; return the addresses of the heartbeats and of the echo.

        Raises
        ------
        ConfigError
            The records are of another version, or of a job with other options, or cannot be decoded.
        """
        if not records:
            return "", ""
        try:
            head = _heads.decode(records[0])
            self._check_head(head)
            if head.state is not None:
                self.machine.restore(load_state(head.state))
            for record in records[1:]:
                for entry in _entries.decode(record):
                    clocks = entry.stepped, entry.manned
                    self.machine.replay(entry.event(), entry.now, clocks, entry.heard)
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the scheduler's journal has a record that no scheduler of this version writes ({error}): "
                "start the whole job again with a new name (KVSTORE_JOB)"
            ) from error
        self._behind = self._clock() - (self.machine.clocks()[0] or self._clock())
        return head.addresses

    def _check_head(self, head: JournalHead) -> None:
        mine, found = (_FORMAT, PROTOCOL, package_version()), (head.format, head.protocol, head.version)
        if mine != found:
            raise ConfigError(
                f"the scheduler's journal is of kvstore {head.version} (protocol {head.protocol}, format "
                f"{head.format}), this is kvstore {package_version()} (protocol {PROTOCOL}, format "
                f"{_FORMAT}): start the scheduler with that version, or the whole job again with a new name "
                "(KVSTORE_JOB)"
            )
        differ = [
            f"{name} {value!r} instead of {head.options.get(name)!r}"
            for name, value in self._options.items()
            if head.options.get(name) != value
        ]
        if differ:
            raise ConfigError(
                f"the scheduler's journal is of a job with other options ({', '.join(differ)}): start the "
                "scheduler with the same, or the whole job again with a new name (KVSTORE_JOB)"
            )


class JournaledScheduler(RecordedScheduler):
    """A scheduler with a journal file, from which it can be restarted."""

    def __init__(
        self, options: SchedulerOptions, folder: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(options, clock)
        self.journal = JournalFile(folder, options.job)
        self._state_bytes = 0  # of the last state that was written
        try:
            #: Addresses of heartbeats and echo of the scheduler before this one; empty for the first.
            self.addresses = self.restore_records(self.journal.records)
        except BaseException:
            self.journal.close()
            raise

    def continue_job(self, addresses: tuple[str, str]) -> None:
        """Continue the job of the scheduler before this one, if any, and exclude any other scheduler."""
        self.addresses, read = addresses, self.journal.records

        def merged(records: list[bytes]) -> bytes:
            if records is not read:
                self.machine.restore(SchedulerMachine(self.machine.options).state())
                self.restore_records(records)
            self.step(SchedulerRestarted(self.machine.term + 1))
            self.next_record()
            return self.state_record(addresses)

        self.journal.replace_by_merged(merged)

    def commit(self) -> None:
        """Write the events since the last call to the journal; blocks until they are on disk."""
        record = self.next_record()
        if not record:
            return
        self.journal.append(record)
        if self.journal.size > max(_LARGE, _GROWTH * self._state_bytes):
            self._replace_by_state()

    def _replace_by_state(self) -> None:
        text = self.state_record(self.addresses)
        self._state_bytes = len(text)
        self.journal.replace_all(text)
