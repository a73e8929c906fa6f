"""Settings of one store: each is installed on all servers once, however many workers ask for it."""

from __future__ import annotations

from ..protocol.messages import Answer, Command, Failure, Install, Settings

_OPTIMIZERS = ("optimizer", "none")


class Setting:
    """One setting, or one command, on its way to the servers or installed there."""

    def __init__(self, install: Install, servers: set[int]) -> None:
        self.install = install
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
    """All settings in the order of their versions.

    Workers that run the same program ask for the same settings in the same order, some later than others; or
    only one of them asks. So a request is the next equal one that this worker has not asked for yet, and if
    there is none it is new.
    """

    def __init__(self, store: int) -> None:
        self.store = store
        self.history: list[Setting] = []
        self._commands: list[Setting] = []
        self._versions = 0
        self._optimizers: dict[int, int] = {}  # place in the history, by how many a worker had set
        self._positions: dict[int, int] = {}

    def ask(self, rank: int, asked: Settings, servers: set[int]) -> tuple[Setting | None, bool]:
        """Return the setting that is meant, and whether it is new; None: another optimizer is set already."""
        if asked.kind in _OPTIMIZERS:
            place = self._optimizers.get(asked.ordinal)
            if place is not None and not self._same(place, asked):
                return None, False
        else:
            places = range(self._positions.get(rank, 0), len(self.history))
            place = next((at for at in places if self._same(at, asked)), None)
        new = place is None
        if place is None:
            place = len(self.history)
            self.history.append(self._make(asked.kind, asked.text, 0, servers))
            if asked.kind in _OPTIMIZERS:
                self._optimizers[asked.ordinal] = place
        self._positions[rank] = max(self._positions.get(rank, 0), place + 1)
        setting = self.history[place]
        setting.waiting.append((rank, asked.request))
        return setting, new

    def command(self, rank: int, asked: Command, servers: set[int]) -> Setting:
        """Make a new command."""
        setting = self._make("command", asked.body, asked.head, servers)
        setting.waiting.append((rank, asked.request))
        self._commands.append(setting)
        return setting

    def installed(self, server: int, version: int, error: Failure | None) -> list[tuple[int, Answer]]:
        """Take a server's word; rank and answer of those who have waited for the last one."""
        for setting in (*self.history, *self._commands):
            if setting.install.version == version and server in setting.pending:
                setting.pending.discard(server)
                setting.error = setting.error or error
                self._commands = [one for one in self._commands if one.pending]
                return setting.answers()
        return []

    def forget(self, rank: int) -> None:
        """Let another process take this rank: it asks from the beginning."""
        self._positions.pop(rank, None)
        for setting in (*self.history, *self._commands):
            setting.waiting = [one for one in setting.waiting if one[0] != rank]

    def clear(self) -> list[tuple[int, int]]:
        """Rank and request of all that wait; they are forgotten."""
        gone = []
        for setting in (*self.history, *self._commands):
            gone += setting.waiting
            setting.waiting = []
        return gone

    def again(self, server: int) -> list[Install]:
        """Return what a server that has come back must hear, in order."""
        settings = [*self.history, *(one for one in self._commands if server in one.pending)]
        return sorted((one.install for one in settings), key=lambda install: install.version)

    def _same(self, place: int, asked: Settings) -> bool:
        install = self.history[place].install
        return install.kind == asked.kind and install.text == asked.text

    def _make(self, kind: str, text: str, head: int, servers: set[int]) -> Setting:
        self._versions += 1
        return Setting(Install(self.store, self._versions, kind, text, head), set(servers))
