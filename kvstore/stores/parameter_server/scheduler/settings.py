"""Settings of one store: servers are told of each change once, however many workers make it."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ....optimizer.settings_log import NONE, OPTIMIZER, Change, SettingsAt, SettingsLog
from ..protocol.messages import Answer, Command, Failure, Install, Settings

_OPTIMIZERS = (OPTIMIZER, NONE)
_KEPT = 1024  # of the newest; servers keep as many, for rounds that are under way


class Installation:
    """Settings or a command on their way to the servers, and the requests that wait for them."""

    def __init__(self, install: Install, servers: Iterable[int], changes: Iterable[Change] = ()) -> None:
        self.install = install
        self.pending = set(servers)
        #: Changes that no server has had before, of which the last is withdrawn if a server refuses them.
        self.changes = list(changes)
        #: Rank, request, and the change that it has made.
        self.waiting: list[tuple[int, int, Change | None]] = []
        self.error: Failure | None = None


class SettingsTable:
    """The settings of a store, and what the servers know of them.

    Workers that run the same program make the same changes at the same places of it, some later than others;
    or only one of them makes a change. So a change that another worker has made at the same place is not made
    again.

    Many are changes of one number in each step, and the newest are kept. A worker that came back may repeat
    its program from the beginning: it makes no change anew that others have made since the last one of its
    own, and none before those that are kept.
    """

    def __init__(self, store: int) -> None:
        self.store = store
        self.log = SettingsLog()
        #: By number, as long as a server has not got it.
        self.pending: dict[int, Installation] = {}
        self._numbers = 0
        self._newest: dict[int, Install] = {}  # by place
        self._optimizers: dict[int, Change] = {}  # by ordinal
        self._returned: dict[int, tuple[int, ...]] = {}  # by rank: key of the last change that it has made
        self._forgotten: set[str] = set()  # kinds
        #: As `Installation.waiting`; the servers have their changes.
        self._done: list[tuple[int, int, Change | None]] = []
        self._most = 2 * _KEPT

    def ask(
        self, rank: int, asked: Settings, servers: set[int], unpaced: Iterable[int] = ()
    ) -> tuple[Change | None, list[Install]]:
        """Return the change that is made, None if another optimizer is set, and what servers are to be told.

        `unpaced` are workers that no rounds keep near the others: changes that they have not come to are
        kept.

        Raises
        ------
        ConfigError
            The change does not fit those of other workers.
        """
        told: list[Change] = []
        change = self._find(rank, asked)
        if change is None and asked.kind in _OPTIMIZERS and asked.ordinal in self._optimizers:
            return None, []
        if change is None:
            place = max(asked.place, self._last_place()) if rank in self._returned else asked.place
            change, told = self.log.add(rank, place, asked.kind, asked.ordinal, asked.text)
            if asked.kind in _OPTIMIZERS:
                self._optimizers[asked.ordinal] = change
        elif change in self.log.changes and rank not in self._returned:
            told = self.log.share(change, rank)
        if rank in self._returned and change.is_like(asked.kind, asked.ordinal, asked.text):
            self._returned[rank] = max(self._returned[rank], change.key())
        installs = self._install(told, servers, change)
        self._wait(rank, asked.request, change)
        self._cut(unpaced)
        return change, installs

    def in_place_of(self, asked: Settings) -> Change:
        """Return the optimizer that was set where a worker asks for another one."""
        return self._optimizers[asked.ordinal]

    def answers(self) -> list[tuple[int, Answer]]:
        """Return rank and answer of requests whose changes the servers had already; they are forgotten."""
        done, self._done = self._done, []
        return self._answers(done, None)

    def command(self, rank: int, asked: Command, servers: set[int]) -> Install:
        """Make a new command."""
        install = self._number("command", asked.body, asked.head)
        installation = self.pending[install.version] = Installation(install, servers)
        installation.waiting.append((rank, asked.request, None))
        return install

    def installed(
        self, server: int, number: int, error: Failure | None, servers: Iterable[int]
    ) -> tuple[list[tuple[int, Answer]], list[Install]]:
        """Note that a server has settings or a command, or why not.

        Returns rank and answer of the requests that have waited for it; and what the servers are to be told,
        where a change had to be withdrawn.
        """
        installation = self.pending.get(number)
        if installation is None or server not in installation.pending:
            return [], []
        installation.pending.discard(server)
        installation.error = installation.error or error
        if installation.pending:
            return [], []
        del self.pending[number]
        if installation.error is None or not installation.changes:
            return self._answers(installation.waiting, installation.error), []
        return self._withdraw(installation, installation.error, servers)

    def forget(self, rank: int) -> None:
        """Let another process take this rank: it makes its changes from the beginning."""
        self.log.forget(rank)
        if self.log.changes:
            self._returned[rank] = ()
        for one in self.pending.values():
            one.waiting = [waiting for waiting in one.waiting if waiting[0] != rank]

    def clear(self) -> list[tuple[int, int]]:
        """Return rank and request of all that wait; they are forgotten."""
        gone: list[tuple[int, int]] = []
        for one in self.pending.values():
            gone += [(rank, request) for rank, request, _ in one.waiting]
            one.waiting = []
        return gone

    def again(self, server: int) -> list[Install]:
        """Return what a server that has come back must be told, in order."""
        commands = [one.install for one in self.pending.values() if server in one.pending]
        told = {install.version: install for install in (*self._newest.values(), *commands)}
        return [told[number] for number in sorted(told)]

    def at_barrier(self, request: int) -> Answer:
        """Return the answer to a worker that has come to a barrier: the newest settings."""
        since = max(self._newest, default=-1) + 1
        newest = self.log.newest
        return Answer(request, version=since, text=newest.text, count=newest.ordinal)

    def known(self, rank: int) -> int:
        """Return from which place on the newest settings hold that a worker has changed; 0: none."""
        return self.log.place_of(rank) + 1

    # ---------------------------------------------------------------------------------------------- changes

    def _find(self, rank: int, asked: Settings) -> Change | None:
        """Return the change that another worker has made, and this one makes now."""
        if asked.kind in _OPTIMIZERS:
            there = self._optimizers.get(asked.ordinal)
            return (
                there if there is not None and there.is_like(asked.kind, asked.ordinal, asked.text) else None
            )
        if rank not in self._returned:
            return self.log.find(rank, asked.place, asked.kind, asked.ordinal, asked.text)
        after = self._returned[rank]
        later = [one for one in self.log.changes if one.key() > after]
        found = next((one for one in later if one.is_like(asked.kind, asked.ordinal, asked.text)), None)
        if found is None and asked.kind in self._forgotten and len(later) == len(self.log.changes):
            return later[0]  # it has not come to those that are kept
        return found

    def _last_place(self) -> int:
        return self.log.changes[-1].place if self.log.changes else 0

    def _withdraw(
        self, refused: Installation, error: Failure, servers: Iterable[int]
    ) -> tuple[list[tuple[int, Answer]], list[Install]]:
        """Withdraw the last change that was refused, and those that are not allowed without it.

        The workers that have made them are told. The others wait until the servers have what is left.
        """
        change = refused.changes.pop()
        gone: dict[Change, Failure] = {change: error}
        told: list[Change] = []
        if change in self.log.changes:
            told, dropped = self.log.withdraw(change)
            gone |= {one: Failure("ConfigError", str(why)) for one, why in dropped.items()}
        self._optimizers = {ordinal: one for ordinal, one in self._optimizers.items() if one not in gone}
        self.pending[refused.install.version] = refused  # for what waits, and for the other changes
        installs = [
            self._tell(place, servers, self._unconfirmed(place, gone))
            for place in dict.fromkeys(one.place for one in (*gone, *told))
        ]
        del self.pending[refused.install.version]
        answers: list[tuple[int, Answer]] = []
        for one in self.pending.values():
            ended = [waiting for waiting in one.waiting if waiting[2] in gone]
            one.waiting = [waiting for waiting in one.waiting if waiting[2] not in gone]
            answers += [(rank, Answer(request, error=gone[made])) for rank, request, made in ended if made]
        return answers, installs

    def _unconfirmed(self, place: int, gone: Container[Change]) -> list[Change]:
        """Take over the changes of a place that are on their way, and that a server can refuse yet."""
        found: list[Change] = []
        for one in self.pending.values():
            if one.install.kind == "settings" and one.install.since == place + 1:
                found += [change for change in one.changes if change not in gone]
                one.changes = []
        return found

    def _install(self, told: Iterable[Change], servers: Iterable[int], change: Change) -> list[Install]:
        """Return what the servers are to be told after a change; of each place the last settings."""
        return [
            self._tell(place, servers, [change] if place == change.place else [])
            for place in dict.fromkeys(one.place for one in told)
        ]

    def _tell(self, place: int, servers: Iterable[int], changes: list[Change]) -> Install:
        """Return what servers are told of a place; requests are answered when they have the newest."""
        settings = self.log.settings_at(place)
        install = self._number("settings", settings.text, since=place + 1, settings=settings)
        before = self._newest.get(place)
        waits = self.pending.get(before.version) if before is not None else None
        self._newest[place] = install
        installation = self.pending[install.version] = Installation(install, servers, changes)
        if waits is not None:
            waits.waiting, installation.waiting = [], waits.waiting
        return install

    def _answers(
        self, done: Iterable[tuple[int, int, Change | None]], error: Failure | None
    ) -> list[tuple[int, Answer]]:
        """Return rank and answer of requests that have waited."""
        return [(rank, self._answer(request, change, error)) for rank, request, change in done]

    def _answer(self, request: int, change: Change | None, error: Failure | None) -> Answer:
        if change is None or error is not None:
            return Answer(request, error=error)
        settings = self.log.settings_for(change)
        return Answer(request, version=change.place + 1, epoch=settings.epoch, text=settings.text)

    def _number(
        self, kind: str, text: str, head: int = 0, since: int = 0, settings: SettingsAt | None = None
    ) -> Install:
        self._numbers += 1
        at = settings or SettingsAt()
        return Install(
            self.store, self._numbers, kind, text, head, since, at.ordinal, at.epoch, at.keeps_states
        )

    def _wait(self, rank: int, request: int, change: Change) -> None:
        newest = self._newest.get(change.place)
        installation = None if newest is None else self.pending.get(newest.version)
        waiting = self._done if installation is None else installation.waiting
        waiting.append((rank, request, change))

    def _cut(self, unpaced: Iterable[int]) -> None:
        """Forget changes that all servers have, no worker makes, and later ones have replaced."""
        if len(self.log.changes) <= self._most:
            return
        passed = min((self.log.place_of(rank) for rank in unpaced), default=self._last_place() + 1)
        dropped = self.log.cut(_KEPT, passed)
        self._forgotten.update(one.kind for one in dropped)
        kept, first = {one.place for one in self.log.changes}, self.log.changes[0].place
        last = max((place for place in self._newest if place < first), default=-1)
        for place in [place for place in self._newest if place not in kept and place != last]:
            del self._newest[place]
        newest = self.log.newest.ordinal
        known = self._optimizers.items()
        self._optimizers = {at: one for at, one in known if one.place >= first or at == newest}
        self._most = 2 * max(_KEPT, len(self.log.changes))
