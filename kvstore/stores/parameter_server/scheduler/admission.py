"""Who is let into a job, and under which rank."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.messages import PROTOCOL, Failure, Hello, Met, Welcome
from .failure_detector import FailureDetector
from .peers import Outgoing, Peer, Process, State
from .rank_assignment import RankAssignment
from .stores import Stores

_OVER = Failure("FencedError", "the job is over")


def unfit(hello: Hello, job: str, count: int) -> Failure | None:
    """Why a process cannot belong to the job."""
    if hello.protocol != PROTOCOL:
        text = f"protocol {hello.protocol}, but the scheduler speaks {PROTOCOL}: run one version of kvstore"
        return Failure("ProtocolError", text)
    if hello.job != job:
        return Failure("FencedError", f"this is the scheduler of job {job!r}, not of {hello.job!r}")
    if hello.role not in ("worker", "server"):
        return Failure("ProtocolError", f"a {hello.role!r} is neither worker nor server")
    if hello.rank >= count:
        text = f"{hello.role} {hello.rank} is out of range: the job has {count} {hello.role}s, from 0"
        return Failure("ConfigError", text)
    return None


def free_rank(taken: Mapping[int, Process], count: int) -> int:
    """Lowest rank that nobody has, or that a lost process had; -1 if there is none."""
    free = (rank for rank in range(count) if rank not in taken or taken[rank].state == State.LOST)
    return next(free, -1)


class Admission:
    """Lets processes in, one by one; those that want a rank that somebody has wait here.

    `patience` is the silence in seconds after which a process is lost.
    """

    def __init__(
        self, job: str, assignment: RankAssignment, stores: Stores, detector: FailureDetector, patience: float
    ) -> None:
        self._job = job
        self._assignment = assignment
        self._stores = stores
        self._detector = detector
        self._patience = patience
        self._contests: list[tuple[Peer, Hello]] = []
        self._closed = False

    @property
    def contested(self) -> bool:
        """Whether somebody waits for a rank."""
        return bool(self._contests)

    def hello(self, peer: Peer, hello: Hello, outgoing: Outgoing) -> None:
        """Let a peer in, refuse it, or have it wait."""
        if peer.hello is not None:
            return
        peer.hello = hello
        error = unfit(hello, self._job, self._assignment.count(hello.role))
        if error is not None:
            outgoing.refuse(peer, error)
        elif self._closed:
            outgoing.refuse(peer, _OVER)
        else:
            outgoing.write(peer, Met())
            if not self._enter(peer, hello, outgoing):
                peer.since = outgoing.now
                self._contests.append((peer, hello))

    def look(self, outgoing: Outgoing) -> None:
        """Look again at those who want a rank that somebody has."""
        waiting, self._contests = self._contests, []
        for peer, hello in waiting:
            if self._enter(peer, hello, outgoing):
                outgoing.changed = True
                continue
            why = self._hopeless(peer, hello, outgoing.now)
            if why is not None:
                outgoing.refuse(peer, why)
            else:
                self._contests.append((peer, hello))

    def forgive(self, seconds: float) -> None:
        """Take a time in which the scheduler was stopped for no part of anybody's wait.

        Otherwise a holder that died before it would seem to have been heard long after the wait began.
        """
        for peer, _ in self._contests:
            peer.since += seconds

    def resume(self, now: float) -> None:
        """Begin all waits anew, after an absence."""
        for peer, _ in self._contests:
            peer.since = now

    def close(self, outgoing: Outgoing) -> None:
        """Let nobody in any more."""
        self._closed = True
        for peer, _ in self._contests:
            outgoing.refuse(peer, _OVER)
        self._contests.clear()

    def _hopeless(self, peer: Peer, hello: Hello, now: float) -> Failure | None:
        """Why a rank will not be free: its holder lives, or there has been none for long."""
        holder = self._assignment.by_rank(hello.role).get(hello.rank)
        if holder is not None and holder.heard > peer.since + self._patience / 2:
            text = f"{holder} is there already; every process needs a rank of its own"
            return Failure("FencedError", text)
        if holder is None and now - peer.since > 2 * self._patience:
            return Failure("ConfigError", f"all {hello.role}s of the job are there")
        return None

    def _enter(self, peer: Peer, hello: Hello, outgoing: Outgoing) -> bool:
        """Give the peer's process its rank; False if a process that may be dead still has it."""
        process = self._assignment.processes.get(hello.process)
        if process is not None and process.state != State.HERE:
            outgoing.fence(peer, f"{process} is no longer part of the job")
            return True
        if process is None:
            rank, holder = self._wanted(hello)
            if rank < 0 or (holder is not None and holder.state == State.HERE and not hello.restarted):
                return False
            if holder is not None and holder.state == State.ENDED:
                outgoing.refuse(
                    peer, Failure("FencedError", f"{holder} has ended; its job goes on without it")
                )
                return True
            process = self._give(rank, holder, hello, outgoing)
        peer.process = process
        if hello.role == "server":
            self._enter_server(peer, process, hello, outgoing)
        else:
            self._assignment.workers[process.rank] = process
            self._stores.enter(peer, process, hello, outgoing)
        return True

    def _wanted(self, hello: Hello) -> tuple[int, Process | None]:
        """Rank that a new process is to have, -1 if none is free, and who has it or had it last."""
        taken = self._assignment.by_rank(hello.role)
        rank = hello.rank if hello.rank >= 0 else free_rank(taken, self._assignment.count(hello.role))
        return rank, taken.get(rank)

    def _give(self, rank: int, holder: Process | None, hello: Hello, outgoing: Outgoing) -> Process:
        """Give a rank to a new process; whoever still has it is lost."""
        if holder is not None and holder.state == State.HERE:
            self._detector.lose(holder, outgoing)
        process = Process(hello.process, hello.role, rank, hello.incarnation, outgoing.now)
        self._assignment.processes[hello.process] = process
        return process

    def _enter_server(self, peer: Peer, process: Process, hello: Hello, outgoing: Outgoing) -> None:
        servers = self._assignment.servers
        filled = any(store.keys.entries for store in self._stores.values())
        if servers.doom is not None or (filled and not hello.restarted):
            process.state = State.ENDED
            text = f"server {process.rank} was lost with its values, and none can take its place"
            outgoing.refuse(peer, Failure("FencedError", text))
            return
        process.peers[-1] = peer
        servers.enter(process, hello.address)
        if servers.welcomed:
            self._welcome(process.rank, outgoing)
            self._stores.bring_up(process.rank, outgoing)
        elif not servers.missing:
            servers.welcomed = True
            for rank in sorted(servers.there):
                self._welcome(rank, outgoing)
            for store in self._stores.values():
                self._stores.try_start(store, outgoing)

    def _welcome(self, rank: int, outgoing: Outgoing) -> None:
        servers = self._assignment.servers
        servers.tell(rank, Welcome(-1, rank, servers.count, 0, (), servers.members), outgoing)
