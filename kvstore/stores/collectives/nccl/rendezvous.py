"""The rendezvous of a job on NCCL: rank 0 sends the name of the communicator to the other processes.

On one machine the processes meet at an abstract unix socket, else at a TCP address that all of them know.
Each process repeats its hello until it has the answer. Rank 0 answers when the hellos of all processes have
arrived, so that the wait in NCCL itself, which has no deadline, begins with all processes alive.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ....errors import ConfigError, TimeoutError
from ....settings import addresses, launchers, roles
from ....settings.definitions import SETTINGS
from ....settings.environment import process_variables
from ....settings.options import StoreConfig
from ....waiting import WaitClock
from ...parameter_server.transport.channel import DealerChannel, NotSentError, RouterChannel
from ...parameter_server.transport.context import ZmqContext

log = logging.getLogger("kvstore.nccl")

M = TypeVar("M")

_VERSION = 1
_THANKS = b"thanks"
_AGAIN = 0.2  # seconds between two hellos
_PATIENCE = 5.0  # seconds that rank 0 waits for acknowledgements of its answer
_LOOK = 0.5  # seconds of a wait for a hello

# Stores of one job are paired by their group and the order in which each process creates them.
_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
# One address serves one rendezvous at a time.
_one_at_a_time = threading.Lock()


class PeerHello(msgspec.Struct, array_like=True):
    """The hello of a process: the process, and the store that it creates."""

    version: int
    store: str
    rank: int
    size: int
    machine: str
    pid: int


class RendezvousAnswer(msgspec.Struct, array_like=True):
    """The answer of rank 0: the name of the communicator and all hellos; or an error."""

    name: bytes
    everybody: list[PeerHello]
    refusal: str = ""


@dataclasses.dataclass(frozen=True)
class JobPlacement:
    """The rank of this process, the size of the job, and the address of the rendezvous.

    Attributes
    ----------
    rank, size, local_rank : int
    job : str
    address : str
        Empty if the job has one process.
    """

    rank: int
    size: int
    local_rank: int
    job: str = ""
    address: str = ""


def find_rendezvous(environment: Mapping[str, str] | None = None) -> JobPlacement:
    """Read rank, size and the address from the launcher's variables, or from a parameter server's.

    Raises
    ------
    ConfigError
        The job is on several machines, and no variable has an address to meet at, or permits an untrusted
        network.
    """
    env = process_variables() if environment is None else environment
    found = launchers.detect_placement(env)
    if found.launcher == "none" and roles.signs(env):
        return _of_workers(env)
    if found.size == 1:
        return JobPlacement(0, 1, 0)
    place = JobPlacement(found.rank, found.size, found.local_rank, found.job)
    if found.local_size == found.size:
        return dataclasses.replace(place, address=_local_address(found.job))
    return dataclasses.replace(place, address=_permitted_address(_network_address(env), env))


def _of_workers(env: Mapping[str, str]) -> JobPlacement:
    """Read DMLC_* and KVSTORE_* of a worker; worker 0 listens at the address of the scheduler."""
    no_servers = SETTINGS["num_servers"].names()
    env = {name: text for name, text in env.items() if name not in no_servers or text != "0"}
    found = roles.find(env)
    if found is None or found.role != "worker" or found.num_workers < 2:
        return JobPlacement(0, 1, 0)
    if found.rank < 0:
        raise ConfigError(
            "the rank of this worker is not set: set DMLC_WORKER_ID, or start the job with "
            "`kvstore run -n 2` or torchrun"
        )
    near = found.ipc or bool(env.get("DMLC_LOCAL"))
    address = (
        _local_address(found.job)
        if near
        else _permitted_address(_configured_address(env) or found.scheduler, env)
    )
    told = next((text for name in SETTINGS["local_rank"].names() if (text := env.get(name))), "")
    local = told or ("" if not near else str(found.rank))
    return JobPlacement(
        found.rank, found.num_workers, int(local) if local.isdecimal() else 0, found.job, address
    )


def _local_address(job: str) -> str:
    """Return the address on one machine; the name of the store is added to it."""
    digest = hashlib.blake2b(f"{os.getuid()}\0{job}".encode(), digest_size=12).hexdigest()
    return f"ipc://@kvstore/nccl/{digest}"


def _configured_address(env: Mapping[str, str]) -> str:
    """Return KVSTORE_MASTER as an address, if it is set."""
    text = env.get("KVSTORE_MASTER", "")
    if not text:
        return ""
    address = text if "://" in text else f"tcp://{text}"
    addresses.check_address("KVSTORE_MASTER", address)
    if not addresses.split_address(address)[1]:
        raise ConfigError(f"KVSTORE_MASTER={text!r} names no port: set it to one such as 10.0.0.5:4711")
    return address


def _network_address(env: Mapping[str, str]) -> str:
    """Return the address between machines.

    PyTorch listens at MASTER_PORT itself; the next port is free for NCCL.
    """
    if said := _configured_address(env):
        return said
    host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if host and port.isdecimal() and 0 < int(port) < 65535:
        return addresses.tcp_address(host, int(port) + 1)
    host, port = env.get("DMLC_PS_ROOT_URI", ""), env.get("DMLC_PS_ROOT_PORT", "")
    if host and port.isdecimal():
        return addresses.tcp_address(host, int(port))
    raise ConfigError(
        "this job is on several machines, and its workers have no address to meet at: set KVSTORE_MASTER to "
        "an address of worker 0 and a free port there, such as 10.0.0.5:4711, on all workers"
    )


def _permitted_address(address: str, env: Mapping[str, str]) -> str:
    """Raise unless plain traffic is permitted: NCCL neither encrypts nor authenticates."""
    number = addresses.resolve_host(addresses.split_address(address)[0].strip("[]"))
    here = number is not None and addresses.is_loopback(number)
    if not address.startswith("tcp://") or here or env.get("KVSTORE_INSECURE") == "1":
        return address
    raise ConfigError(
        f"the workers of this job would meet at {address}, and NCCL's own traffic between machines is "
        "neither encrypted nor authenticated: set KVSTORE_INSECURE=1 if you trust the network"
    )


class NcclRendezvous:
    """The rendezvous of the processes of one store."""

    def __init__(self, place: JobPlacement, config: StoreConfig) -> None:
        self._place, self._timeout = place, config.timeout
        store = f"{place.job}\0{config.group}\0{next(_numbers[config.group])}"
        self._store = hashlib.blake2b(store.encode(errors="surrogatepass"), digest_size=12).hexdigest()
        self._hello = PeerHello(
            _VERSION, self._store, place.rank, place.size, _machine_identity(), os.getpid()
        )
        near = place.address.startswith("ipc://")
        self._address = f"{place.address}/{self._store}" if near else place.address

    def share_name(self, make: Callable[[], bytes]) -> RendezvousAnswer:
        """Return, on every rank, the name that `make` returns on rank 0, and the hellos of all processes.

        Raises
        ------
        TimeoutError
            The hellos of some processes have not arrived.
        ConfigError
            Two processes have one rank, or a process has another size of the job; or rank 0 cannot listen.
        """
        if not _one_at_a_time.acquire(timeout=self._timeout):
            raise TimeoutError(f"another thread has been making a store for {self._timeout:g} s")
        context = ZmqContext(job=self._place.job)
        try:
            return self._serve_name(context, make) if self._place.rank == 0 else self._join_root(context)
        finally:
            context.close(linger=1.0)
            _one_at_a_time.release()

    # ------------------------------------------------------------------------------------------ rank 0

    def _serve_name(self, context: ZmqContext, make: Callable[[], bytes]) -> RendezvousAnswer:
        router = RouterChannel(context, self._address)
        here: dict[int, tuple[bytes, PeerHello]] = {0: (b"", self._hello)}
        clock = WaitClock(self._timeout)
        while self._missing_ranks(here):
            clock.read()
            self._receive_hello(router, here, min(_LOOK, clock.seconds_left))
            if clock.is_over and self._missing_ranks(here):
                raise TimeoutError(
                    f"worker 0 of {self._place.size} waited {self._timeout:g} s for "
                    f"{_rank_names(self._missing_ranks(here))} to create the store: "
                    "all workers must, in the same order"
                )
            if clock.notice_due():
                log.warning("worker 0 waits for %s", _rank_names(self._missing_ranks(here)))
        answer = RendezvousAnswer(make(), [hello for _, (_, hello) in sorted(here.items())])
        self._answer_all(router, here, answer)
        return answer

    def _receive_hello(
        self, router: RouterChannel, here: dict[int, tuple[bytes, PeerHello]], timeout: float
    ) -> None:
        """Receive one hello, if one has arrived."""
        found = router.receive(timeout)
        if found is None:
            return
        peer, frames = found
        hello = _read_message(frames, PeerHello)
        if hello is None or hello.store != self._store:
            return  # of another store, whose rank 0 does not listen yet; its process repeats the hello
        why = self._hello_error(hello, here)
        if why:
            _send_answer(router, peer, RendezvousAnswer(b"", [], why))
            raise ConfigError(why)
        here[hello.rank] = peer, hello

    def _hello_error(self, hello: PeerHello, here: dict[int, tuple[bytes, PeerHello]]) -> str:
        size = self._place.size
        if hello.version != _VERSION:
            return f"worker {hello.rank} has another version of kvstore than worker 0: install one in all"
        if hello.size != size or not 0 < hello.rank < size:
            return f"worker {hello.rank} has a job of {hello.size} workers, and worker 0 one of {size}"
        known = here.get(hello.rank)
        if known is not None and (known[1].machine, known[1].pid) != (hello.machine, hello.pid):
            return f"two processes are worker {hello.rank} of this job: give each its own rank"
        return ""

    def _answer_all(
        self, router: RouterChannel, here: dict[int, tuple[bytes, PeerHello]], answer: RendezvousAnswer
    ) -> None:
        """Send the answer to all, until each has acknowledged it.

        A process that does not has the answer, or has ended.
        """
        waiting = {rank for rank in here if rank}
        for rank in waiting:
            _send_answer(router, here[rank][0], answer)
        end = time.monotonic() + _PATIENCE
        while waiting and time.monotonic() < end:
            found = router.receive(_AGAIN)
            if found is None:
                continue
            peer, frames = found
            if len(frames) == 1 and frames[0].bytes == _THANKS:
                waiting -= {rank for rank in waiting if here[rank][0] == peer}
            elif (hello := _read_message(frames, PeerHello)) is not None and hello.store == self._store:
                _send_answer(router, peer, answer)

    def _missing_ranks(self, here: Mapping[int, object]) -> list[int]:
        return [rank for rank in range(self._place.size) if rank not in here]

    # ------------------------------------------------------------------------------------------ other ranks

    def _join_root(self, context: ZmqContext) -> RendezvousAnswer:
        place = self._place
        identity = f"{self._store}/{place.rank}/{os.getpid()}".encode()
        dealer = DealerChannel(context, self._address, identity, "worker", 0)
        clock = WaitClock(self._timeout)
        while True:
            clock.read()
            dealer.send([msgspec.msgpack.encode(self._hello)])
            frames = dealer.receive(min(_AGAIN, clock.seconds_left))
            answer = None if frames is None else _read_message(frames, RendezvousAnswer)
            if answer is not None:
                break
            if clock.is_over:
                raise TimeoutError(
                    f"worker {place.rank} of {place.size} waited {self._timeout:g} s for all workers at "
                    f"{self._address}: did they start, and create as many stores in the same order?"
                )
            if clock.notice_due():
                log.warning("worker %d waits for all workers to create the store", place.rank)
        if answer.refusal:
            raise ConfigError(answer.refusal)
        dealer.send([_THANKS])
        return answer


def _read_message(frames: list[Any], kind: type[M]) -> M | None:
    """Decode a message of one frame; None for a message of another kind."""
    if len(frames) != 1:
        return None
    try:
        return msgspec.msgpack.decode(frames[0].bytes, type=kind)
    except msgspec.DecodeError:
        return None


def _send_answer(router: RouterChannel, peer: bytes, answer: RendezvousAnswer) -> None:
    try:
        router.send(peer, [msgspec.msgpack.encode(answer)])
    except NotSentError:
        log.debug("a worker has gone before it had its answer; it will ask again")


def _rank_names(ranks: list[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"


def _machine_identity() -> str:
    """Return the identity of this machine and its namespace of processes: process ids are unique there."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return ""
