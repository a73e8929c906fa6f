"""Cases between hosts with links of a given speed, delay and loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

from bench.cases.dist import RESNET, DistCase, shapes_of

#: All peers, in the order of the tables; payloads within a host are in shared memory.
PEERS = ("ours flat", "ours host", "gloo", "openmpi", "mpich", "mxnet", "cross", "cross reno", "cross-sum")
#: A server in C that sums, on each host of one worker: a lower limit of the time of a parameter server.
SUM = "sum"
PACKED = ("ours host 2bit", "ours by hosts 2bit")

#: Large arrays of many workers leave memory for one rival: kvstore is measured with each rival separately.
CROWD, LARGE = 16, ("64 MB", RESNET)
#: So are small arrays: about 200 waiting processes disturb the processes that work.
SMALL, LIMITS = "4 KB", ("cross", "cross reno", "cross-sum")
RIVALS = {"gloo": "gloo", "openmpi": "Open MPI", "mpich": "MPICH"}

SIZES = ("4 KB", "4 MB", "64 MB", RESNET)
HOSTS, WORKERS, GBIT, DELAYS, LOSSES = (2, 4), (1, 4), (1.0, 10.0), (0.0, 0.05, 1.0, 20.0), (0.0, 0.001)


@dataclass(frozen=True)
class Link:
    """The link between a host and the switch."""

    gbit: float  # bits of Ethernet frames, each way, in 10^9 a second
    #: From host to host, one way, in milliseconds; 0: only the delay of the devices
    delay_ms: float = 0.0
    loss: float = 0.0  # share of the frames that are lost

    @property
    def relayed(self) -> bool:
        """Return whether a process must relay, as the kernel can only limit the speed."""
        return self.delay_ms > 0 or self.loss > 0

    def needs(self, nbytes: float) -> float:
        """Return the seconds of `nbytes` each way, to the place of the sum and back."""
        return 8 * nbytes / (1e9 * self.gbit) + 2 * self.delay_ms / 1000


@dataclass(frozen=True)
class HostsCase(DistCase):
    """A push and a pull of every key, by workers on hosts that have a server each."""

    hosts: int = 2  # number of hosts, each with as many workers
    #: See `Link`
    gbit: float = 1.0
    delay_ms: float = 0.0
    loss: float = 0.0
    beside: str = ""  # the only rival, if there is memory for no more

    def to_json(self) -> dict[str, Any]:
        """Return the fields that a worker needs: no links, and only peers with exact sums."""
        known = {one.name for one in fields(DistCase)}
        return {name: value for name, value in asdict(self).items() if name in known} | {"peers": PEERS}

    @property
    def link(self) -> Link:
        return Link(self.gbit, self.delay_ms, self.loss)

    @property
    def job(self) -> Any:
        return (*super().job, self.hosts, self.link, self.beside)

    @property
    def crossing(self) -> float:
        """Return the bytes that a host must send, and receive, if it sums first: as many as in a ring."""
        return 2 * (self.hosts - 1) / self.hosts * self.nbytes

    @property
    def needed(self) -> float:
        """Return the seconds that the wire needs."""
        return self.link.needs(self.crossing)


def all_cases() -> Iterator[HostsCase]:
    """Make all cases, in the order of the tables."""
    for loss in LOSSES:
        for delay in DELAYS:
            for hosts in HOSTS:
                for workers in WORKERS:
                    for gbit in GBIT:
                        for size in SIZES:
                            yield from _cases(size, hosts, workers, Link(gbit, delay, loss))


def _cases(size: str, hosts: int, workers: int, link: Link) -> Iterator[HostsCase]:
    many = hosts * workers >= CROWD
    crowded = many and size in LARGE
    peers = [name for name in PEERS if name not in RIVALS] if crowded else list(PEERS)
    peers += [*([SUM] if workers == 1 else ()), *(PACKED if link.gbit <= 1 else ())]
    yield _case(size, hosts, workers, link, tuple(peers))
    limits = LIMITS if size == SMALL else ()
    for rival in RIVALS if crowded or (many and size == SMALL) else ():
        yield _case(size, hosts, workers, link, ("ours host", rival, *limits), rival)


def _case(
    size: str, hosts: int, workers: int, link: Link, peers: tuple[str, ...], beside: str = ""
) -> HostsCase:
    at = f"{link.gbit:g} Gbit/s, {link.delay_ms:g} ms" + (f", loss {link.loss:.1%}" if link.loss else "")
    rival = f" beside {RIVALS[beside]}" if beside else ""
    return HostsCase(
        f"{hosts} hosts x {workers}, {at}: {size}{rival}",
        shapes_of(size),
        hosts * workers,
        hosts,
        peers=peers,
        hosts=hosts,
        gbit=link.gbit,
        delay_ms=link.delay_ms,
        loss=link.loss,
        beside=beside,
    )
