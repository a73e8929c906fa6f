"""Entry of a process into the region of its job: it finds or creates the region, and waits for the others."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....errors import ConfigError, KVStoreError, PeerLostError, ProtocolError, TimeoutError
from ....settings.definitions import DEFAULTS
from ....settings.launchers import WorkerPlacement, detect_placement
from ....settings.options import StoreConfig
from ....source_tree import package_version
from ....waiting import WaitClock
from . import _shared as shm
from .rendezvous import RegionRendezvous
from .start_failures import StartFailures

log = logging.getLogger("kvstore.shared")

_FIRST_BYTES = 4 * 1024 * 1024
_LEAST_WINDOW = 64 * 1024 * 1024

# Stores of one job are paired by their group and the order in which each process creates them.
_numbers: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)


class RegionPlace(NamedTuple):
    """The place of a process among those that share a region: the `number`-th of a group in a job."""

    job: str
    group: str
    number: int
    rank: int
    size: int


def launched_place(config: StoreConfig) -> RegionPlace:
    """Return the place that the launcher has given to this process, for its next store of the group."""
    placement = detect_placement()
    _check_size(placement)
    job = (
        placement.job if placement.size > 1 else f"{os.getpid()} {secrets.token_hex(16)}"
    )  # no other process takes part
    return RegionPlace(job, config.group, next(_numbers[job, config.group]), placement.rank, placement.size)


class OtherProcesses:
    """Knowledge from other sources about the processes that share a region: here, none."""

    #: Seconds without a heartbeat after which a process is lost.
    dead_after: float = DEFAULTS["dead_after"]

    def check(self) -> None:
        """Raise an error if the wait for the processes must end."""

    def lost(self) -> set[int]:
        """Return the ranks that will not register."""
        return set()

    def check_begun(self, begun: bool) -> None:
        """Raise an error if this process may not enter a region with, or without, earlier meetings."""


class JobRegistration:
    """The rank of a process in a job of one machine."""

    def __init__(self, config: StoreConfig, place: RegionPlace, others: OtherProcesses | None = None) -> None:
        self.rank, self.size, self._others = place.rank, place.size, others or OtherProcesses()
        self._timeout = config.timeout
        log.debug("worker %d of %d: store %d of group %r", self.rank, self.size, place.number, place.group)
        self._rendezvous = RegionRendezvous(*place)
        clock = WaitClock(config.timeout)
        with contextlib.closing(StartFailures(self._rendezvous.name, self.rank, self.size)) as self._failures:
            try:
                if not self._enter_region(config):
                    raise ConfigError(
                        f"rank {self.rank} of this job is taken by another living process; give each process "
                        "its own rank, and each job its own KVSTORE_JOB"
                    )
                self._register_rank(clock)
            except BaseException:
                self.leave(lost=False)
                raise

    def leave(self, lost: bool) -> None:
        """Release the rank. A second call does nothing."""
        self._rendezvous.close()
        if hasattr(self, "job"):
            if not self.job.closed:
                log.debug("worker %d leaves the job%s", self.rank, " and counts as lost" if lost else "")
            self.job.leave(lost)

    def note_fork(self) -> None:
        """Record that this process is a fork, which must not hold the rank's name."""
        self._rendezvous.close()
        self.job.note_fork()

    def _check_wait(self) -> None:
        """Raise an error if the wait for other workers must end."""
        self._others.check()
        self._failures.check()

    def _enter_region(self, config: StoreConfig) -> bool:
        """Enter the region and listen; if that fails, report the cause to the waiting workers.

        False: a living process has this rank, and the workers wait for that.
        """
        try:
            self._rendezvous.check()
            self.job = self._map_and_register(config)
            self._others.check_begun(self.job.workers_have_met())
            return self._rendezvous.listen()
        except TimeoutError:  # the other workers have their own deadline
            raise
        except Exception as error:
            self._failures.send_cause(error)
            raise

    def _map_and_register(self, config: StoreConfig) -> shm.Job:
        fd = self._rendezvous.find_region(range(self.size))
        if fd is None and not self._creates_region():
            fd = self._rendezvous.wait(config.timeout, self._creates_region)
        creates = fd is None
        if fd is None:
            fd = self._rendezvous.create()
            _reserve_space(fd, _FIRST_BYTES)
        log.debug(
            "worker %d %s the region %s", self.rank, "made" if creates else "found", self._rendezvous.name
        )
        try:
            job = self._make_job(fd, creates, config)
            _check_region(job, self.rank, self.size, config)
        except BaseException:
            os.close(fd)
            raise
        return job

    def _make_job(self, fd: int, creates: bool, config: StoreConfig) -> shm.Job:
        here, there = package_version(), self._rendezvous.version
        differ = f"worker {self.rank} has kvstore {here}, and the process that made the region {there}"
        try:
            job = shm.Job(
                fd, self.rank, self.size, _address_window(), _FIRST_BYTES, creates,
                config.on_peer_loss == "continue", config.spin, self._others.dead_after, config.timeout,
            )  # fmt: skip
        except ValueError as error:  # another layout
            raise ProtocolError(
                f"{differ}: {error}; install one version in all processes of the job"
            ) from error
        if here != there:
            log.warning("%s: install one version in all processes of the job", differ)
        return job

    def _register_rank(self, clock: WaitClock) -> None:
        job = self.job
        if job.rank_was_used() and not job.continues_after_loss:
            raise PeerLostError(
                f"worker {self.rank} of {self.size} is lost, or has left, and with on_peer_loss='raise' no "
                "other process may replace it; restart the job",
                rank=self.rank,
            )
        if not job.register():
            raise ConfigError(f"rank {self.rank} of this job is taken by process {job.pid(self.rank)}")
        if job.returned():
            log.info("worker %d replaces a process that was lost", self.rank)
            job.rejoin()
            return
        job.become_member()
        self._wait_for(self._all_there, lambda: [w for w in range(self.size) if job.state(w) == 0], clock)
        job.probe()
        number = job.arrive_at_barrier()
        self._wait_for(lambda: job.wait_at_barrier(number), lambda: job.missing_at_barrier(number), clock)
        log.debug("all workers are here: %s", ", ".join(f"{w} (process {job.pid(w)})" for w in job.members()))

    def _creates_region(self) -> bool:
        """Return whether this process creates the region, as the lowest rank that is not lost."""
        self._check_wait()
        return self.rank == min(set(range(self.size)) - self._others.lost(), default=0)

    def _all_there(self) -> int:
        lost = self._others.lost()
        if lost and all(self.job.state(w) or w in lost for w in range(self.size)):
            return shm.READY
        return self.job.wait_for_all()

    def _wait_for(self, step: Callable[[], int], missing: Callable[[], list[int]], clock: WaitClock) -> None:
        while True:
            clock.read()
            self._check_wait()
            if (outcome := step()) == shm.READY:
                return
            if outcome != shm.TICK and self.job.lost():
                raise KVStoreError(
                    f"worker {self.job.lost()[0]} of {self.size} died while the job was starting; "
                    "look at its error"
                )
            if clock.is_over:
                names = ", ".join(map(str, missing()))
                raise TimeoutError(
                    f"worker {self.rank} of {self.size} waited {self._timeout:g} s for workers {names} to "
                    "create their store"
                )


def _check_size(placement: WorkerPlacement) -> None:
    if placement.size > shm.MAX_WORKERS:
        raise ConfigError(
            f"a shared store has at most {shm.MAX_WORKERS} workers, this job has {placement.size}"
        )
    if placement.local_size != placement.size:
        raise ConfigError(
            f"this job has {placement.size} workers of which {placement.local_size} are on this machine; "
            "'shared' is for one machine, use 'dist_sync'"
        )


def _check_region(job: shm.Job, rank: int, size: int, config: StoreConfig) -> None:
    if job.size != size:
        raise ConfigError(
            "start all processes with the same number of workers: "
            f"worker {rank} has {size}, and the founder of the job {job.size}"
        )
    if job.continues_after_loss != (config.on_peer_loss == "continue"):
        raise ConfigError(
            f"on_peer_loss={config.on_peer_loss!r} on worker {rank} and another on worker 0; all must agree"
        )


def _reserve_space(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise MemoryError(f"no memory for a shared region of {nbytes} bytes: {error}") from error


def _address_window() -> int:
    """Return the bytes of address space to map: the largest possible size of the region."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_LEAST_WINDOW, 1 << (2 * physical - 1).bit_length())
