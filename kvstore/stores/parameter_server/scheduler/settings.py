"""Settings of one store: each is installed on all servers once, however many workers ask for it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from ..protocol.messages import Answer, Command, Failure, Install, Settings

_OPTIMIZERS = ("optimizer", "none")
_KEPT = 1024  # of the newest; servers keep as many, for rounds that are under way


class Setting:
    """One setting, or one command, on its way to the servers or installed there."""

    def __init__(self, install: Install, servers: set[int], rank: int) -> None:
        self.install = install
        self.rank = rank  # of the worker that was the first to ask
        self.pending = servers
        self.error: Failure | None = None
        self.waiting: list[tuple[int, int]] = []  # rank and request

    def answers(self) -> list[tuple[int, Answer]]:
        """Rank and answer of all that wait, if it is installed everywhere; they are forgotten."""
        if self.pending:
            return []
        done, self.waiting = self.waiting, []
        version = self.install.version
        return [(rank, Answer(request, version=version, error=self.error)) for rank, request in done]


class SettingsTable:
    """The settings that count or may be asked for, in the order of their versions.

    Workers that run the same program ask for the same settings in the same order, some later than others; or
    only one of them asks. So a request is the next equal one that this worker has not asked for yet, and if
    there is none it is new.

    Many are changes of one number in each step. Of those the newest are kept, and the last of each kind
    before them: who has been there from the beginning asks for no older one. Who has come back asks from the
    beginning; what it asks for and is not known was forgotten, until it has come to what is known.
    """

    def __init__(self, store: int) -> None:
        self.store = store
        self.history: list[Setting] = []
        self._commands: dict[int, Setting] = {}  # by version
        self._versions = 0
        self._optimizers: dict[int, int] = {}  # version, by how many a worker had set
        self._positions: dict[int, int] = {}  # by rank: it has asked for what is before this version
        self._returned: set[int] = set()
        self._forgotten: dict[str, Setting] = {}  # the last one of each kind
        self._most = 2 * _KEPT

    def ask(
        self, rank: int, asked: Settings, servers: set[int], unpaced: Iterable[int] = ()
    ) -> tuple[Setting | None, bool]:
        """Return the setting that is meant, and whether it is new; None: another optimizer is set already.

        `unpaced` are workers that no rounds keep near the others: what they have not asked for is kept.
        """
        if asked.kind in _OPTIMIZERS:
            setting = self._at(self._optimizers.get(asked.ordinal, 0))
            if setting is not None and not _is_same(setting, asked):
                return None, False
        else:
            setting = self._next_equal(rank, asked)
            if setting is None and (setting := self._passed(rank, asked.kind)) is not None:
                setting.waiting.append((rank, asked.request))
                return setting, False
        new = setting is None
        if setting is None:
            setting = self._make(asked.kind, asked.text, servers, rank, clock=asked.clock)
            self._add(setting, asked, unpaced)
        self._positions[rank] = max(self._positions.get(rank, 0), setting.install.version + 1)
        setting.waiting.append((rank, asked.request))
        return setting, new

    def in_place_of(self, asked: Settings) -> Setting:
        """Return the optimizer that was set where a worker asks for another one."""
        found = self._at(self._optimizers[asked.ordinal])
        assert found is not None
        return found

    def command(self, rank: int, asked: Command, servers: set[int]) -> Setting:
        """Make a new command."""
        setting = self._make("command", asked.body, servers, rank, asked.head)
        setting.waiting.append((rank, asked.request))
        self._commands[setting.install.version] = setting
        return setting

    def installed(self, server: int, version: int, error: Failure | None) -> list[tuple[int, Answer]]:
        """Take a server's word; rank and answer of those who have waited for the last one."""
        setting = self._commands.get(version) or self._at(version)
        if setting is None or server not in setting.pending:
            return []
        setting.pending.discard(server)
        setting.error = setting.error or error
        if not setting.pending:
            self._commands.pop(version, None)
        return setting.answers()

    def forget(self, rank: int) -> None:
        """Let another process take this rank: it asks from the beginning."""
        self._positions.pop(rank, None)
        if self.history:
            self._returned.add(rank)
        for setting in self._all():
            setting.waiting = [one for one in setting.waiting if one[0] != rank]

    def clear(self) -> list[tuple[int, int]]:
        """Rank and request of all that wait; they are forgotten."""
        gone = []
        for setting in self._all():
            gone += setting.waiting
            setting.waiting = []
        return gone

    def again(self, server: int) -> list[Install]:
        """Return what a server that has come back must hear, in order."""
        settings = [*self.history, *(one for one in self._commands.values() if server in one.pending)]
        return sorted((one.install for one in settings), key=_version)

    def _all(self) -> list[Setting]:
        return [*self.history, *self._commands.values()]

    def _place(self, version: int) -> int:
        """Return the place in the history of this version, or of the next one that is there."""
        return bisect.bisect_left(self.history, version, key=lambda setting: setting.install.version)

    def _at(self, version: int) -> Setting | None:
        place = self._place(version)
        found = self.history[place] if place < len(self.history) else None
        return found if found is not None and found.install.version == version else None

    def _next_equal(self, rank: int, asked: Settings) -> Setting | None:
        places = range(self._place(self._positions.get(rank, 0)), len(self.history))
        return next((self.history[at] for at in places if _is_same(self.history[at], asked)), None)

    def _passed(self, rank: int, kind: str) -> Setting | None:
        """Return what stands for all that was forgotten, if a worker that came back is not beyond that."""
        last = self._forgotten.get(kind)
        if last is None or rank not in self._returned:
            return None
        return last if self._positions.get(rank, 0) <= last.install.version else None

    def _add(self, setting: Setting, asked: Settings, unpaced: Iterable[int]) -> None:
        if asked.kind in _OPTIMIZERS:
            self._optimizers[asked.ordinal] = setting.install.version
        self.history.append(setting)
        if len(self.history) > self._most:
            self._forget_old(min([self._positions.get(rank, 0) for rank in unpaced], default=self._versions))

    def _forget_old(self, passed: int) -> None:
        """Forget what every server has, nobody asks for, and had been replaced before what is asked for."""
        old = self._place(min(passed, self.history[-_KEPT].install.version))
        last = {one.install.kind: one for one in self.history[:old]}
        kept = []
        for one in self.history[:old]:
            kind = one.install.kind
            if kind in _OPTIMIZERS or one is last[kind] or one.pending:
                kept.append(one)
            elif one.error is None:
                self._forgotten[kind] = one
        self.history[:old] = kept
        self._most = 2 * len(self.history)

    def _make(
        self, kind: str, text: str, servers: set[int], rank: int, head: int = 0, clock: int = 0
    ) -> Setting:
        self._versions += 1
        return Setting(Install(self.store, self._versions, kind, text, head, clock), set(servers), rank)


def _is_same(setting: Setting, asked: Settings) -> bool:
    install = setting.install
    return install.kind == asked.kind and install.text == asked.text


def _version(install: Install) -> int:
    return install.version
