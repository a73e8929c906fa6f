"""The scheduler's machine with a journal: what it has taken in is on disk before anybody hears of it.

The machine is deterministic, so the journal has its events: those that changed what must outlast the
process, each with the time, and with what had changed quietly since the one before: of whom it had heard, and
when. All events of one turn of the loop are one record. After a restart they go through a machine again, and
what that wants done is forgotten: whatever the others have not acknowledged is sent once more. The time of
the journal goes on where it ended, so that an absence counts for nobody's wait.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ....errors import ConfigError
from ....source_tree import package_version
from ..protocol.events import Action, Event, Heard, Received, Resumed, Tick
from ..protocol.messages import PROTOCOL, ReliableMessage
from .journal import Journal
from .machine import Scheduler, SchedulerOptions
from .machine_state import dumped, loaded

_FORMAT = 2
_LARGE = 4 << 20  # bytes of a journal from which on it is replaced by the state
_GROWTH = 4  # but only once it is so many times what the state was


class JournalEntry(msgspec.Struct, array_like=True):
    """One event: a message, the term of a scheduler that was started again, or neither: time has passed."""

    now: float
    stepped: float | None
    manned: float
    heard: dict[str, float]
    peer: bytes = b""
    message: ReliableMessage | None = None
    term: int = 0

    def event(self) -> Event:
        """Return the event."""
        if self.message is not None:
            return Received(self.peer, self.message)
        return Resumed(self.term) if self.term else Tick()


class JournalHead(msgspec.Struct, array_like=True):
    """First record of a journal: whose it is, and the state after what was before it, if anything was."""

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
    """The machine, and what it has taken in since the last record; `clock` gives its time."""

    def __init__(self, options: SchedulerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.machine = Scheduler(options)
        self._options = dataclasses.asdict(options)
        self._clock = clock
        self._behind = 0.0  # seconds that the machine's time is behind the clock
        self._heard: dict[str, float] = {}
        self._taken: list[JournalEntry] = []

    def now(self) -> float:
        """Return the machine's time."""
        return self._clock() - self._behind

    def step(self, event: Event) -> list[Action]:
        """Take an event; the actions must wait for `taken` to be on disk."""
        now, clocks = self.now(), self.machine.clocks()
        actions = self.machine.step(event, now)
        if self.machine.changed:
            entry = JournalEntry(now, *clocks, self._heard)
            if isinstance(event, Received) and type(event.message) is ReliableMessage:
                entry.peer, entry.message = event.peer, event.message  # type: ignore[assignment]
            elif isinstance(event, Resumed):
                entry.term = event.term
            self._taken.append(entry)
            self._heard = {}
        self._note_heard(event)
        return actions

    def taken(self) -> bytes:
        """Return the record of what was taken in since the last call; empty: nothing that has to outlast."""
        entries, self._taken = self._taken, []
        return msgspec.msgpack.encode(entries) if entries else b""

    def _note_heard(self, event: Event) -> None:
        if isinstance(event, Heard):
            process = self.machine.process(event.process)
        else:
            process = self.machine.process_of(event.peer) if isinstance(event, Received) else None
        if process is not None:
            self._heard[process.name] = process.heard

    # -------------------------------------------------------------------------------------------- the journal

    def whole(self, addresses: tuple[str, str]) -> bytes:
        """Return the record that stands for all before it."""
        head = JournalHead(_FORMAT, PROTOCOL, package_version(), self._options, self.machine.term, addresses)
        head.state = dumped(self.machine.state())
        return msgspec.msgpack.encode(head)

    def read(self, records: list[bytes]) -> tuple[str, str]:
        """Become what the records say; return the addresses of the heartbeats and the echo, if any.

        Raises
        ------
        ConfigError
            They are of another version, or of a job with other options, or nothing of this is in them.
        """
        if not records:
            return "", ""
        try:
            head = _heads.decode(records[0])
            self._check(head)
            if head.state is not None:
                self.machine.restore(loaded(head.state))
            for record in records[1:]:
                for entry in _entries.decode(record):
                    clocks = entry.stepped, entry.manned
                    self.machine.step_again(entry.event(), entry.now, clocks, entry.heard)
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"the scheduler's journal has what no scheduler has written ({error}): start the whole job "
                "again with a new name (KVSTORE_JOB)"
            ) from error
        self._behind = self._clock() - (self.machine.clocks()[0] or self._clock())
        return head.addresses

    def _check(self, head: JournalHead) -> None:
        mine, found = (_FORMAT, PROTOCOL, package_version()), (head.format, head.protocol, head.version)
        if mine != found:
            raise ConfigError(
                f"the scheduler's journal is of kvstore {head.version} (protocol {head.protocol}), this is "
                f"kvstore {package_version()} (protocol {PROTOCOL}): start the scheduler with that version, "
                "or the whole job again with a new name (KVSTORE_JOB)"
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
    """A scheduler that can be started again."""

    def __init__(
        self, options: SchedulerOptions, folder: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(options, clock)
        self.journal = Journal(folder, options.job)
        self._kept = 0  # bytes of the state when it was written last
        try:
            #: Of the heartbeats and the echo of the one before; empty where this is the first.
            self.addresses = self.read(self.journal.records)
        except BaseException:
            self.journal.close()
            raise

    def begin(self, addresses: tuple[str, str]) -> None:
        """Take the job over from the one before, if there was one, and let nobody else have it meanwhile."""
        self.addresses, read = addresses, self.journal.records

        def make(records: list[bytes]) -> bytes:
            if records is not read:
                self.machine.restore(Scheduler(self.machine.options).state())
                self.read(records)
            self.step(Resumed(self.machine.term + 1))
            self.taken()
            return self.whole(addresses)

        self.journal.take_over(make)

    def commit(self) -> None:
        """Write what was taken in."""
        record = self.taken()
        if not record:
            return
        self.journal.append(record)
        if self.journal.size > max(_LARGE, _GROWTH * self._kept):
            self._replace()

    def _replace(self) -> None:
        text = self.whole(self.addresses)
        self._kept = len(text)
        self.journal.replace(text)
