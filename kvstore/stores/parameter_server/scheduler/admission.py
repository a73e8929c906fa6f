"""Which processes are admitted to a job, and with which rank."""

from __future__ import annotations

from collections.abc import Mapping

from ..protocol.messages import PROTOCOL, Failure, HelloReply, HelloRequest, WelcomeNotice
from .failure_detector import FailureDetector
from .peers import AdmittedProcess, PeerConnection, ProcessState, StepActions
from .rank_assignment import RankAssignment
from .stores import JobStores

_OVER = Failure("FencedError", "the job is over")


def hello_failure(hello: HelloRequest, job: str, count: int) -> Failure | None:
    """Return why a process with this hello cannot belong to the job; None if it can."""
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


def free_rank(assigned: Mapping[int, AdmittedProcess], count: int) -> int:
    """Return the lowest rank that no process has, or that a lost process had; -1 if there is none."""
    free = (
        rank for rank in range(count) if rank not in assigned or assigned[rank].state == ProcessState.LOST
    )
    return next(free, -1)


class ProcessAdmission:
    """Admits processes, or refuses them, or lets them wait for a rank that another process has.

    `dead_after` is the silence in seconds after which a process is lost.
    """

    def __init__(
        self,
        job: str,
        assignment: RankAssignment,
        stores: JobStores,
        detector: FailureDetector,
        dead_after: float,
    ) -> None:
        self._job = job
        self._assignment = assignment
        self._stores = stores
        self._detector = detector
        self._dead_after = dead_after
        self._waiting: list[tuple[PeerConnection, HelloRequest]] = []  # for a rank
        self._closed = False

    @property
    def has_waiting(self) -> bool:
        """Return whether a process waits for a rank."""
        return bool(self._waiting)

    def receive_hello(self, peer: PeerConnection, hello: HelloRequest, outgoing: StepActions) -> None:
        """Admit a peer, refuse it, or let it wait."""
        if peer.hello is not None:
            return
        peer.hello = hello
        error = hello_failure(hello, self._job, self._assignment.process_count(hello.role))
        if error is not None:
            outgoing.refuse(peer, error)
        elif self._closed:
            outgoing.refuse(peer, _OVER)
        else:
            outgoing.write(peer, HelloReply())
            if not self._try_admit(peer, hello, outgoing):
                peer.since = outgoing.now
                self._waiting.append((peer, hello))

    def admit_waiting(self, outgoing: StepActions) -> None:
        """Admit or refuse the waiting processes for which this can be decided now."""
        waiting, self._waiting = self._waiting, []
        for peer, hello in waiting:
            if self._try_admit(peer, hello, outgoing):
                outgoing.changed = True
                continue
            failure = self._wait_failure(peer, hello, outgoing.now)
            if failure is not None:
                outgoing.refuse(peer, failure)
            else:
                self._waiting.append((peer, hello))

    def discount_pause(self, seconds: float) -> None:
        """Subtract a time in which the scheduler itself was stopped from all waits.

        Otherwise the last heartbeat of a holder that has died would seem to be long after the wait began.
        """
        for peer, _ in self._waiting:
            peer.since += seconds

    def restart_waits(self, now: float) -> None:
        """Count all waits from now on, after an absence of the scheduler."""
        for peer, _ in self._waiting:
            peer.since = now

    def refuse_all(self, outgoing: StepActions) -> None:
        """Refuse all further processes, and those that wait."""
        self._closed = True
        for peer, _ in self._waiting:
            outgoing.refuse(peer, _OVER)
        self._waiting.clear()

    def _wait_failure(self, peer: PeerConnection, hello: HelloRequest, now: float) -> Failure | None:
        """Return why a wait for a rank ends: its holder is alive, or no rank became free for too long."""
        holder = self._assignment.by_rank(hello.role).get(hello.rank)
        if holder is not None and holder.heard > peer.since + self._dead_after / 2:
            text = f"another process is {holder} already; every process needs a rank of its own"
            return Failure("FencedError", text)
        if holder is None and now - peer.since > 2 * self._dead_after:
            return Failure("ConfigError", f"the job has all of its {hello.role}s already")
        return None

    def _try_admit(self, peer: PeerConnection, hello: HelloRequest, outgoing: StepActions) -> bool:
        """Admit or refuse a process; False if it must wait for a rank whose holder can be dead."""
        process = self._assignment.processes.get(hello.process)
        if process is not None and process.state != ProcessState.HERE:
            outgoing.fence(peer, f"{process} is no longer part of the job")
            return True
        if process is None:
            rank, holder = self._requested_rank(hello)
            if rank < 0 or (holder is not None and holder.state == ProcessState.HERE and not hello.restarted):
                return False
            if holder is not None and holder.state == ProcessState.ENDED:
                outgoing.refuse(
                    peer, Failure("FencedError", f"{holder} has ended; the job continues without it")
                )
                return True
            process = self._assign_rank(rank, holder, hello, outgoing)
        peer.process = process
        if hello.role == "server":
            self._add_server(peer, process, hello, outgoing)
        else:
            self._assignment.workers[process.rank] = process
            self._stores.add_worker(peer, process, hello, outgoing)
        return True

    def _requested_rank(self, hello: HelloRequest) -> tuple[int, AdmittedProcess | None]:
        """Return the rank for a new process, -1 if none is free, and the last process with that rank."""
        assigned = self._assignment.by_rank(hello.role)
        rank = (
            hello.rank if hello.rank >= 0 else free_rank(assigned, self._assignment.process_count(hello.role))
        )
        return rank, assigned.get(rank)

    def _assign_rank(
        self, rank: int, holder: AdmittedProcess | None, hello: HelloRequest, outgoing: StepActions
    ) -> AdmittedProcess:
        """Assign a rank to a new process; a process that still has it is declared lost."""
        if holder is not None and holder.state == ProcessState.HERE:
            self._detector.declare_lost(holder, outgoing)
        process = AdmittedProcess(hello.process, hello.role, rank, hello.incarnation, outgoing.now)
        self._assignment.processes[hello.process] = process
        return process

    def _add_server(
        self, peer: PeerConnection, process: AdmittedProcess, hello: HelloRequest, outgoing: StepActions
    ) -> None:
        servers = self._assignment.servers
        filled = any(store.keys.entries for store in self._stores.values())
        if servers.final_loss is not None or (filled and not hello.restarted):
            process.state = ProcessState.ENDED
            text = f"server {process.rank} was lost with its values, and no server can replace it"
            outgoing.refuse(peer, Failure("FencedError", text))
            return
        process.peers[-1] = peer
        servers.add_server(process, hello.address)
        if servers.welcomed:
            self._welcome_server(process.rank, outgoing)
            self._stores.send_state(process.rank, outgoing)
        elif not servers.missing_ranks:
            servers.welcomed = True
            for rank in sorted(servers.present):
                self._welcome_server(rank, outgoing)
            for store in self._stores.values():
                self._stores.try_start(store, outgoing)

    def _welcome_server(self, rank: int, outgoing: StepActions) -> None:
        servers = self._assignment.servers
        servers.send(rank, WelcomeNotice(-1, rank, servers.count, 0, (), servers.members), outgoing)
