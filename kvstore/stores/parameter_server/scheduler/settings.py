"""The settings of one store: each change is sent to the servers once, also if several workers make it."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ....errors import ConfigError
from ....optimizer.descriptions import describe_conflict
from ....optimizer.settings_log import NEW, SettingsAt, SettingsChange, SettingsLog
from ..protocol.messages import CommandRequest, Failure, InstallRequest, MemberReply, SettingsRequest

_KEPT = 1024  # number of newest changes; servers keep as many, for rounds in progress


class PendingInstall:
    """Settings or a command that not all servers have installed yet, and the requests that wait for this."""

    def __init__(
        self, install: InstallRequest, servers: Iterable[int], changes: Iterable[SettingsChange] = ()
    ) -> None:
        self.install = install
        self.pending = set(servers)
        #: Changes that are new to all servers; if a server refuses them, the last change is withdrawn.
        self.changes = list(changes)
        #: Rank, request, and the change of the request.
        self.waiting: list[tuple[int, int, SettingsChange | None]] = []
        self.error: Failure | None = None


class SettingsTable:
    """The settings of a store, and which of them the servers have.

    Workers that run the same program make the same changes at the same places of the program, some later than
    others; or only one worker makes a change. So a change that another worker has made at the same place is
    not made again.

    The table keeps the newest changes, since many programs change a number in each step. A restarted worker
    can repeat its program from the beginning: of its changes, the table ignores those that other workers have
    made since the last change of this rank, and those before the changes that are kept.
    """

    def __init__(self, store: int) -> None:
        self.store = store
        self.log = SettingsLog()
        #: By number, until all servers have installed them.
        self.pending: dict[int, PendingInstall] = {}
        self._numbers = 0
        self._newest: dict[int, InstallRequest] = {}  # by place
        self._optimizers: dict[int, SettingsChange] = {}  # by ordinal
        self._returned: dict[
            int, tuple[int, ...]
        ] = {}  # by rank of a restarted worker: key of its last change
        self._forgotten: set[str] = set()  # kinds of changes
        #: Requests to answer, as in `PendingInstall.waiting`; all servers have their changes.
        self._done: list[tuple[int, int, SettingsChange | None]] = []
        self._most = 2 * _KEPT

    def request_change(
        self, rank: int, asked: SettingsRequest, servers: set[int], unpaced: Iterable[int] = ()
    ) -> list[InstallRequest]:
        """Handle a change that a worker requests, and return the messages for the servers.

        `unpaced` are workers whose progress no round limits: changes that they have not reached are kept.

        Raises
        ------
        ConfigError
            The change contradicts a change of another worker, or the store has another optimizer.
        """
        affected: list[SettingsChange] = []
        change = self._find_equal(rank, asked)
        if change is None and asked.kind in NEW and asked.ordinal in self._optimizers:
            there = self._optimizers[asked.ordinal]
            raise ConfigError(describe_conflict(there.text, there.rank, asked.text, rank))
        if change is None:
            place = max(asked.place, self._last_place()) if rank in self._returned else asked.place
            change, affected = self.log.add(rank, place, asked.kind, asked.ordinal, asked.text)
            if asked.kind in NEW:
                self._optimizers[asked.ordinal] = change
        elif change in self.log.changes and rank not in self._returned:
            affected = self.log.share(change, rank)
        if rank in self._returned and change.is_like(asked.kind, asked.ordinal, asked.text):
            self._returned[rank] = max(self._returned[rank], change.key())
        installs = [
            self._install_at(place, servers, [change] if place == change.place else [])
            for place in dict.fromkeys(one.place for one in affected)
        ]
        self._add_waiter(rank, asked.request, change)
        self._forget_old(unpaced)
        return installs

    def immediate_answers(self) -> list[tuple[int, MemberReply]]:
        """Return and forget rank and answer of requests whose changes all servers had already."""
        done, self._done = self._done, []
        return self._replies_to(done, None)

    def request_command(self, rank: int, asked: CommandRequest, servers: set[int]) -> InstallRequest:
        """Return the message of a new command for the servers."""
        install = self._numbered_install("command", asked.body, asked.head)
        installation = self.pending[install.version] = PendingInstall(install, servers)
        installation.waiting.append((rank, asked.request, None))
        return install

    def note_installed(
        self, server: int, number: int, error: Failure | None, servers: Iterable[int]
    ) -> tuple[list[tuple[int, MemberReply]], list[InstallRequest]]:
        """Record that a server has installed settings or a command, or has refused them with an error.

        Returns rank and answer of the requests that waited for this, and the messages for the servers if a
        change had to be withdrawn.
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
            return self._replies_to(installation.waiting, installation.error), []
        return self._withdraw_change(installation, installation.error, servers)

    def forget_rank(self, rank: int) -> None:
        """Prepare for another process with this rank, which makes its changes from the beginning."""
        self.log.forget(rank)
        if self.log.changes:
            self._returned[rank] = ()
        for one in self.pending.values():
            one.waiting = [waiting for waiting in one.waiting if waiting[0] != rank]

    def clear_waiters(self) -> list[tuple[int, int]]:
        """Return and forget rank and request of all workers that wait."""
        gone: list[tuple[int, int]] = []
        for one in self.pending.values():
            gone += [(rank, request) for rank, request, _ in one.waiting]
            one.waiting = []
        return gone

    def for_restarted_server(self, server: int) -> list[InstallRequest]:
        """Return the messages for a restarted server, in order."""
        commands = [one.install for one in self.pending.values() if server in one.pending]
        installs = {install.version: install for install in (*self._newest.values(), *commands)}
        return [installs[number] for number in sorted(installs)]

    def barrier_answer(self, request: int) -> MemberReply:
        """Return the answer to a worker at a barrier: the newest settings."""
        since = max(self._newest, default=-1) + 1
        newest = self.log.newest
        return MemberReply(request, version=since, text=newest.text, count=newest.ordinal)

    def newest_place(self, rank: int) -> int:
        """Return the first place with the newest settings that a worker has changed; 0 if there are none."""
        return self.log.place_of(rank) + 1

    # ---------------------------------------------------------------------------------------------- changes

    def _find_equal(self, rank: int, asked: SettingsRequest) -> SettingsChange | None:
        """Return the equal change of another worker that this request repeats; None if there is none."""
        if asked.kind in NEW:
            found = self._optimizers.get(asked.ordinal)
            is_same = found is not None and found.is_like(asked.kind, asked.ordinal, asked.text)
            return found if is_same else None
        if rank not in self._returned:
            return self.log.find(rank, asked.place, asked.kind, asked.ordinal, asked.text)
        after = self._returned[rank]
        later = [one for one in self.log.changes if one.key() > after]
        found = next((one for one in later if one.is_like(asked.kind, asked.ordinal, asked.text)), None)
        if found is None and asked.kind in self._forgotten and len(later) == len(self.log.changes):
            return later[0]  # the worker has not reached the changes that are kept
        return found

    def _last_place(self) -> int:
        return self.log.changes[-1].place if self.log.changes else 0

    def _withdraw_change(
        self, refused: PendingInstall, error: Failure, servers: Iterable[int]
    ) -> tuple[list[tuple[int, MemberReply]], list[InstallRequest]]:
        """Withdraw the last change of a refused installation, and the changes that are not valid without it.

        The requests of these changes are answered with an error. The other requests wait until the servers
        have installed the remaining changes.
        """
        change = refused.changes.pop()
        gone: dict[SettingsChange, Failure] = {change: error}
        affected: list[SettingsChange] = []
        if change in self.log.changes:
            affected, dropped = self.log.withdraw(change)
            gone |= {one: Failure("ConfigError", str(why)) for one, why in dropped.items()}
        self._optimizers = {ordinal: one for ordinal, one in self._optimizers.items() if one not in gone}
        self.pending[refused.install.version] = refused  # for its waiting requests, and its other changes
        installs = [
            self._install_at(place, servers, self._take_unconfirmed(place, gone))
            for place in dict.fromkeys(one.place for one in (*gone, *affected))
        ]
        del self.pending[refused.install.version]
        answers: list[tuple[int, MemberReply]] = []
        for one in self.pending.values():
            ended = [waiting for waiting in one.waiting if waiting[2] in gone]
            one.waiting = [waiting for waiting in one.waiting if waiting[2] not in gone]
            answers += [
                (rank, MemberReply(request, error=gone[made])) for rank, request, made in ended if made
            ]
        return answers, installs

    def _take_unconfirmed(self, place: int, gone: Container[SettingsChange]) -> list[SettingsChange]:
        """Remove and return the changes of a place that a server can still refuse, except those `gone`."""
        found: list[SettingsChange] = []
        for one in self.pending.values():
            if one.install.kind == "settings" and one.install.since == place + 1:
                found += [change for change in one.changes if change not in gone]
                one.changes = []
        return found

    def _install_at(
        self, place: int, servers: Iterable[int], changes: list[SettingsChange]
    ) -> InstallRequest:
        """Return the message with the settings of a place; its requests now wait for this installation."""
        settings = self.log.settings_at(place)
        install = self._numbered_install("settings", settings.text, since=place + 1, settings=settings)
        before = self._newest.get(place)
        replaced = self.pending.get(before.version) if before is not None else None
        self._newest[place] = install
        installation = self.pending[install.version] = PendingInstall(install, servers, changes)
        if replaced is not None:
            replaced.waiting, installation.waiting = [], replaced.waiting
        return install

    def _replies_to(
        self, done: Iterable[tuple[int, int, SettingsChange | None]], error: Failure | None
    ) -> list[tuple[int, MemberReply]]:
        """Return rank and answer of waiting requests."""
        return [(rank, self._reply_to(request, change, error)) for rank, request, change in done]

    def _reply_to(self, request: int, change: SettingsChange | None, error: Failure | None) -> MemberReply:
        if change is None or error is not None:
            return MemberReply(request, error=error)
        settings = self.log.settings_for(change)
        return MemberReply(request, version=change.place + 1, epoch=settings.epoch, text=settings.text)

    def _numbered_install(
        self, kind: str, text: str, head: int = 0, since: int = 0, settings: SettingsAt | None = None
    ) -> InstallRequest:
        self._numbers += 1
        at = settings or SettingsAt()
        return InstallRequest(
            self.store, self._numbers, kind, text, head, since, at.ordinal, at.epoch, at.keeps_states
        )

    def _add_waiter(self, rank: int, request: int, change: SettingsChange) -> None:
        newest = self._newest.get(change.place)
        installation = None if newest is None else self.pending.get(newest.version)
        waiting = self._done if installation is None else installation.waiting
        waiting.append((rank, request, change))

    def _forget_old(self, unpaced: Iterable[int]) -> None:
        """Forget old changes that all servers have, later changes replace, and no worker can still make."""
        if len(self.log.changes) <= self._most:
            return
        passed = min((self.log.place_of(rank) for rank in unpaced), default=self._last_place() + 1)
        dropped = self.log.drop_old(_KEPT, passed)
        self._forgotten.update(one.kind for one in dropped)
        kept, first = {one.place for one in self.log.changes}, self.log.changes[0].place
        last = max((place for place in self._newest if place < first), default=-1)
        for place in [place for place in self._newest if place not in kept and place != last]:
            del self._newest[place]
        newest = self.log.newest.ordinal
        known = self._optimizers.items()
        self._optimizers = {at: one for at, one in known if one.place >= first or at == newest}
        self._most = 2 * max(_KEPT, len(self.log.changes))
