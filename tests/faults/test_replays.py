"""The data that the processes of a job have sent, replayed by an attacker that has recorded it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import jobs
import pytest
from faults import strangers
from faults.faulty_jobs import (
    BODIES,
    Behind,
    Faults,
    finish,
    keys_of_a_job,
    kill,
    ready,
    say,
    silence,
)
from faults.proxy import Proxy
from launched import until

HANDSHAKE = 5  # pieces of a connection that wait for a reply, as their senders did
FAR = {"KVSTORE_SAME_HOST_SHM": "0", "KVSTORE_TIMEOUT": "100"}
ROLES = {"server": "behind", "scheduler": "scheduler_behind"}


class Recorder(Proxy):
    """Forwards all data, and keeps the data of each connection, in pieces."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.said: list[list[bytes]] = []
        super().__init__(target, 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said: list[bytes] = []
        read = reader.read
        self.said.append(said)

        async def recorded(most: int) -> bytes:
            piece = await read(most)
            said.append(piece)
            return piece

        reader.read = recorded  # type: ignore[method-assign]
        await super()._accept(reader, writer)


def say_again(pieces: Sequence[bytes], target: str) -> None:
    """Say it over a new connection, to the address of a scheduler, its echo, a server or its streams."""
    host, _, port = target.rpartition("//")[2].rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20) as one, contextlib.suppress(OSError):
        for number, piece in enumerate(pieces):
            one.settimeout(20)
            one.sendall(piece)
            one.settimeout(0.2 if number < HANDSHAKE else 0.001)
            with contextlib.suppress(TimeoutError):
                one.recv(1 << 20)


class Recorded:
    """A job of two workers, which train until the test stops them, each sum checked; a context."""

    def __init__(self, made: Faults, keys: dict[str, str], **variables: str) -> None:
        self.job = made.job(2, 1, keys=keys, **ROLES, **FAR, **variables)
        self.behind = Behind(self.job, Recorder)
        self._own = [{"KVSTORE_KEYS_FILE": keys[f"worker-{rank}"]} if keys else {} for rank in (0, 1)]
        self.workers = [self._start(rank) for rank in (0, 1)]
        ready(*self.workers, line="working")
        until(self._is_complete)
        self.connections = self._connections()
        self.said = self.recorded()
        self._roles = [self.job.scheduler, *self.job.servers]
        self._files = [strangers.descriptors(one.pid) for one in self._roles]
        self._size = [strangers.memory(one.pid) for one in self._roles]

    def _start(self, rank: int) -> jobs.Worker:
        return self.job.start(BODIES, "going_on", "pushpull", rank=rank, **self._own[rank])

    def _is_complete(self) -> bool:
        """Whether all connections are there, and were answered: a worker may work before that."""
        return all(
            len(said) >= n and all(len(pieces) > 1 for pieces in said)
            for said, n in zip(self.recorded(), (2, 3, 2, 2), strict=True)  # the server, too, has an echo
        )

    def _connections(self) -> list[int]:
        return [len(proxy.said) for proxy in self.behind.proxies]

    @property
    def is_untouched(self) -> bool:
        """Whether no process had to connect again."""
        return self._connections() == self.connections

    def recorded(self) -> list[list[list[bytes]]]:
        """Return the data sent so far to the scheduler, its echo, the server, its streams; by connection."""
        return [[list(pieces) for pieces in proxy.said] for proxy in self.behind.proxies]

    def replace_worker(self) -> None:
        kill(self.workers[1])
        self.workers[1] = self._start(1)
        self.workers[1].expect("working", 30)

    def hear(self, said: list[list[list[bytes]]]) -> None:
        """Replay the recorded data of a job's processes, at the same addresses."""
        told = [
            (pieces, proxy.target)
            for proxy, texts in zip(self.behind.proxies, said, strict=True)
            for pieces in texts
        ]
        with ThreadPoolExecutor(len(told)) as pool:
            list(pool.map(say_again, *zip(*told, strict=True)))

    def end(self) -> None:
        """Let it end well, with no effect of the replayed data."""
        until(lambda: strangers.have_closed([one.pid for one in self._roles], self._files))
        for one, before in zip(self._roles, self._size, strict=True):
            assert strangers.memory(one.pid) - before < 32
        say(self.workers[0], "stop")
        assert [one["last"] for one in finish(*self.workers, timeout=60)] == [[11], [11]]
        assert self.job.ended(10) == [0, 0]

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *error: object) -> None:
        self.behind.__exit__()
        self.job.__exit__(*error)  # type: ignore[arg-type]


@pytest.mark.parametrize("secured", [False, True])
def test_what_is_said_again_counts_once(faults: Faults, secured: bool) -> None:
    """To another job, and with keys to the job itself while it trains: no process even has to connect again.

    Without keys connections of that job are lost, and perhaps the job.
    """
    keys = [keys_of_a_job(faults.folder / name, workers=2) if secured else {} for name in ("one", "other")]
    patient = {"KVSTORE_DEAD_AFTER": silence(5)}  # as it is by default
    with Recorded(faults, keys[0], **patient) as one, Recorded(faults, keys[1], **patient) as other:
        for job in (one, other) if secured else (other,):
            job.hear(one.said)
        assert one.is_untouched
        assert other.is_untouched
        for job in (one, other):
            job.end()


def test_what_a_worker_has_said_that_was_replaced_counts_no_more(faults: Faults) -> None:
    with Recorded(faults, {}) as job:

        def of_first() -> list[list[list[bytes]]]:
            return [[one for one in said if b"/worker1/" in b"".join(one)] for said in job.recorded()[:-1]]

        until(lambda: all(of_first()))  # the last word of its handshake with the echo
        said = [*of_first(), job.said[-1]]
        job.replace_worker()
        job.hear(said)
        job.end()
