"""Cases of the parameter server: their inputs, their peers, and the goal of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cases.common import (
    KB,
    LINE,
    MB,
    Array,
    KeyedCase,
    Shape,
    beginning,
    memory,
    padded,
    pieces,
    resnet50,
    triangle,
)

#: Large enough that the change by an update is visible in float32 weights.
LEARNING_RATE = 0.1
THRESHOLD = 0.5
DEVIATION = 0.01

#: Ways to call that only the cases about the cost of a key have.
INIT, EACH = "init", "pushpull, a call for each key"

#: Suffix of the name of a column in which push and pull are two calls.
APART = " apart"


@dataclass(frozen=True)
class Entry:
    """One way to run one peer."""

    engine: str  # the peer's code; several entries may share it
    label: str  # its name in the tables
    transport: str = "tcp"  # `tcp` over loopback, or `ipc` (unix sockets)
    shm: bool = False  # payloads between processes of one host are in shared memory
    codec: str = ""  # `2bit`, or none
    secure: bool = False  # CURVE on every link
    hot: bool = False  # only one block of the arrays is used; it stays in a cache
    homes: bool = False  # gradients are written to arrays of `KVStore.empty`, where the sums are written
    unpaced: bool = False  # its connections use reno congestion control, as kvstore's within a host do
    hierarchy: str = "flat"  # `host`: the workers of a host sum there first; `flat`: each sends its own


#: All peers, in the order of the tables.
ENTRIES = {
    "ours": Entry("ours", "kvstore, tcp"),
    "ours shm": Entry("ours", "kvstore, payload in shared memory (default)", shm=True),
    "ours home": Entry("ours", "kvstore, shared memory, arrays of store.empty", shm=True, homes=True),
    "ours ipc": Entry("ours", "kvstore, ipc", "ipc"),
    "ours curve": Entry("ours", "kvstore, tcp with keys", secure=True),
    "ours 2bit": Entry("ours", "kvstore, tcp, 2bit", codec="2bit"),
    "ours shm 2bit": Entry("ours", "kvstore, payload in shared memory, 2bit", shm=True, codec="2bit"),
    "ours flat": Entry("ours", "kvstore, each worker by itself", shm=True),
    "ours host": Entry("ours", "kvstore, by hosts", shm=True, hierarchy="host"),
    "ours host 2bit": Entry("ours", "kvstore, 2bit", shm=True, codec="2bit"),
    "ours by hosts 2bit": Entry("ours", "kvstore, by hosts, 2bit", shm=True, codec="2bit", hierarchy="host"),
    "packing": Entry("ours", "packed, nothing sent; kvstore's pull, tcp", codec="2bit"),
    "mxnet": Entry("mxnet", "MXNet, tcp"),
    "mxnet ipc": Entry("mxnet", "MXNet, ipc", "ipc"),
    "mxnet 2bit": Entry("mxnet", "MXNet, tcp, 2bit", codec="2bit"),
    "gloo": Entry("gloo", "torch gloo all-reduce"),
    "openmpi": Entry("mpi", "Open MPI all-reduce"),
    "mpich": Entry("mpi", "MPICH all-reduce"),
    "zmq": Entry("zmq", "bare ZeroMQ, tcp"),
    "zmq ipc": Entry("zmq", "bare ZeroMQ, ipc", "ipc"),
    "zmq curve": Entry("zmq", "bare ZeroMQ, tcp with CURVE", secure=True),
    "zmq-c": Entry("zmq-c", "bare C over libzmq"),
    "sum": Entry("sockets-c", "bare C over sockets, with the sum", unpaced=True),
    "rows": Entry("rows-c", "bare C over sockets, with the update of rows", unpaced=True),
    "floor": Entry("sockets", "floor: TCP sockets"),
    "floor reno": Entry("sockets", "floor: TCP sockets, reno", unpaced=True),
    "floor update": Entry("sockets", "floor: TCP sockets, then the update"),
    "floor hot": Entry("sockets", "TCP sockets, one block in cache", hot=True),
    "floor ipc": Entry("sockets", "floor: unix sockets", "ipc"),
    "cross": Entry("cross", "limit: bare sockets, what must cross"),
    "cross reno": Entry("cross", "limit: bare sockets, what must cross, reno", unpaced=True),
    "cross-sum": Entry("cross-sum", "the same, and in C what hosts copy and add up"),
    "memcpy": Entry("memcpy", "memcpy in and out"),
    "memcpy-sum": Entry("memcpy-c", "memcpy in, sum, memcpy out"),
    "memcpy-server": Entry("memcpy-c", "bare C in shared memory, a server sums"),
}


@dataclass(frozen=True)
class Goal:
    """The required ratio between the entries `own` and `peer`, in the median of the rounds.

    Where the peer has both, one call is compared with one call, and two calls with two.
    """

    #: Names of `ENTRIES`
    own: str
    peer: str
    least: float = 0.0  # least ratio of the peer's time to ours; 0 for no such goal
    most: float = 0.0  # greatest ratio of our time to the peer's; 0 for no such goal
    of: str = "seconds"  # the compared figure: `seconds`, or `cpu`, the processor seconds


@dataclass(frozen=True)
class DistCase(KeyedCase):
    """One block of the tables: a push and a pull of every key, by every worker."""

    name: str  # unique; `--only` matches it
    shapes: tuple[Shape, ...]  # one for each key
    #: Processes of the job, without its scheduler
    workers: int = 2
    servers: int = 1
    mode: str = "sync"  # `sync` or `async`
    update: str = ""  # `""`, `sgd` or `sgd_momentum` on the servers
    rows: int = 0  # row-sparse if positive: rows that a worker pushes, and then pulls
    peers: tuple[str, ...] = ()  # names of `ENTRIES`
    goals: tuple[Goal, ...] = field(default=())  # ratios to reach
    #: Further ways to call: `INIT`, of as many new keys; `EACH`, a pushpull for each key
    also: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Return the bytes that one worker pushes."""
        if self.rows:
            return 4 * self.rows * math.prod(self.shapes[0][1:])
        return super().nbytes

    @property
    def job(self) -> tuple[int, int, str, str, bool]:
        """Return a key of the job: cases with equal keys can use the same processes."""
        return self.workers, self.servers, self.mode, self.update, bool(self.rows)

    @property
    def compressed(self) -> bool:
        """Return whether the case is about compression; its other peers are only compared with."""
        return any(ENTRIES[peer].codec for peer in self.peers)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> DistCase:
        goals = tuple(Goal(**goal) for goal in fields["goals"])
        return super().from_json({**fields, "goals": goals})


# ------------------------------------------------------------------------------------------------ inputs


class Inputs:
    """One worker's arrays by key: views of flat memory, each aligned to a cache line.

    Weights are equal on all workers. Gradients are N(0, 0.01) and differ in each call, as in training:
    a view of a longer array with another offset each time.
    """

    def __init__(self, case: DistCase, rank: int) -> None:
        self._shapes = case.shapes
        size = padded(case.shapes)
        room = size + max(size // 2, 64 * LINE)
        self._pool = _normal(room, [11, rank])
        self.flat = memory(size, "huge")
        self.values = pieces(self.flat, case.shapes)
        self.flat_outs = memory(size, "huge")
        self.flat_outs.fill(-1)
        self.outs = pieces(self.flat_outs, case.shapes)
        self.write(self.gradients(0))

    def weights(self) -> list[Array]:
        """Make the first values, equal on all workers."""
        flat = _normal(padded(self._shapes), [13])
        return pieces(flat, self._shapes)

    def seeds(self) -> list[Array]:
        """Make gradients below the threshold; after their push residuals are as after a long training."""
        return pieces(triangle(np.random.default_rng(17), self.flat.size, THRESHOLD), self._shapes)

    def gradients(self, call: int) -> list[Array]:
        """Return the gradients of a call, views of the pool."""
        start = beginning(call, self.flat.size, self._pool.size)
        return pieces(self._pool[start : start + self.flat.size], self._shapes)

    def write(self, gradients: list[Array]) -> None:
        """Copy these gradients into the values."""
        for value, gradient in zip(self.values, gradients, strict=True):
            np.copyto(value, gradient)


def _normal(size: int, seed: list[int]) -> Array:
    flat = memory(size, "huge")
    np.random.default_rng(seed).standard_normal(dtype=np.float32, out=flat)
    flat *= np.float32(DEVIATION)
    return flat


@dataclass
class SparseInputs:
    """A table, equal on all workers, and one worker's rows with their ids (sorted, unique).

    The result of the rows `compared`, equal on all workers, is compared between peers.
    """

    table: Array
    ids: npt.NDArray[np.int64]
    rows: Array
    compared: npt.NDArray[np.int64]


def sparse_inputs(case: DistCase, rank: int) -> SparseInputs:
    """Make the arrays of a row-sparse case; the workers' rows overlap as random batches do."""
    (shape,) = case.shapes
    table = np.random.default_rng(7).random(shape, np.float32)
    ids = [_ids(case, np.random.default_rng([7, one])) for one in (rank, 0)]
    rows = np.random.default_rng([19, rank]).random((case.rows, *shape[1:]), np.float32)
    return SparseInputs(table, ids[0], rows, ids[1])


def _ids(case: DistCase, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    drawn = rng.choice(case.shapes[0][0], case.rows, replace=False)
    return np.sort(drawn).astype(np.int64)


# ------------------------------------------------------------------------------------------------- cases

SIZES = {"4 KB": 4 * KB, "256 KB": 256 * KB, "4 MB": 4 * MB, "64 MB": 64 * MB}
RESNET = "ResNet-50"
SCALED = ("4 KB", "4 MB", "64 MB", RESNET)  # with other numbers of workers and servers
KEYS = (1, 16, 256, 1024)
KEY = 16 * KB  # bytes of each of many keys
TABLE, ROWS = (100_000, 128), 10_000

_OURS = ("ours", "ours shm")
_WIRE = ("ours", "mxnet", "gloo", "zmq", "zmq-c", "sum", "floor", "floor reno")
_IPC = ("ours ipc", "mxnet ipc", "zmq ipc", "floor ipc")
_CURVE = ("ours curve", "zmq curve")
_SHM = ("ours shm", "ours home", "memcpy", "memcpy-sum", "memcpy-server")
#: A limit that only moves the bytes, and limits that also sum them.
_SUMMING = {"floor": ("sum",), "memcpy": ("memcpy-sum", "memcpy-server")}

#: Two workers, one server: the limit, the share of it to reach, and the least ratios of MXNet and gloo.
_WIRE_GOALS = {
    "4 KB": ("zmq-c", 0.5, 2.5, 3.0),
    "256 KB": ("floor", 0.5, 1.6, 1.5),
    "4 MB": ("floor", 0.75, 2.0, 0.9),
    "64 MB": ("floor", 0.8, 4.0, 0.7),
    RESNET: ("floor", 0.75, 2.2, 0.65),
}
_SHM_GOALS = {
    "4 MB": ("memcpy", 0.8, 5.0, 2.0),
    "64 MB": ("memcpy", 0.8, 10.0, 2.0),
    RESNET: ("memcpy", 0.8, 6.0, 1.6),
}


def _goals(size: str) -> tuple[Goal, ...]:
    """Yield the goals of plain sums."""
    found = []
    for own, goals in (("ours", _WIRE_GOALS), ("ours shm", _SHM_GOALS)):
        if size in goals:
            limit, share, mxnet, gloo = goals[size]
            found += [Goal(own, one, share) for one in (limit, *_SUMMING.get(limit, ()))]
            found += [Goal(own, "mxnet", mxnet), Goal(own, "gloo", gloo), _no_more_cpu(own)]
    if size == "64 MB":
        found.append(Goal("ours curve", "ours", most=2.5))
    return tuple(found)


def _no_more_cpu(own: str = "ours", peer: str = "mxnet") -> Goal:
    return Goal(own, peer, most=1, of="cpu")


def all_cases() -> list[DistCase]:
    """Yield all cases, in the order of the tables."""
    return [*_sums(), *_updates(), *_sparse(), *_compressed(), *_keys(), *_scaling()]


def shapes_of(size: str) -> tuple[Shape, ...]:
    return resnet50() if size == RESNET else ((SIZES[size] // 4,),)


def _job(workers: int, servers: int) -> str:
    several = [f"{n} {name}{'s' if n > 1 else ''}" for n, name in ((workers, "worker"), (servers, "server"))]
    return ", ".join(several)


def _sums() -> Iterator[DistCase]:
    """Yield sums of two workers and one server, with all peers."""
    for size in (*SIZES, RESNET):
        peers = (*_WIRE, *_IPC, *(_CURVE if size != RESNET else ()), *_SHM)
        if size == "64 MB":
            peers += ("floor hot",)
        yield DistCase(f"{_job(2, 1)}: {size}", shapes_of(size), peers=peers, goals=_goals(size))


def _updates() -> Iterator[DistCase]:
    peers = (*_OURS, "mxnet", "floor update")
    wanted = Goal("ours", "floor update", 0.7), Goal("ours", "mxnet", 2), _no_more_cpu()
    for mode, update, label, sizes in (
        ("sync", "sgd_momentum", "SGD-momentum on the server", ("4 MB", RESNET)),
        ("async", "sgd", "dist_async, SGD on the server", ("4 MB", RESNET)),
    ):
        for size in sizes:
            goals = wanted if size == RESNET else ()
            name = f"{_job(2, 1)}: {size}, {label}"
            yield DistCase(name, shapes_of(size), mode=mode, update=update, peers=peers, goals=goals)


def _sparse() -> Iterator[DistCase]:
    """Yield pushes, each followed by row_sparse_pull of the same rows.

    Without an optimizer MXNet's server keeps only the pushed rows, and reads other rows beyond their end.
    """
    name = f"{_job(2, 1)}: row-sparse {TABLE[0]:,} x {TABLE[1]}, {ROWS:,} rows, SGD on the server"
    goals = (Goal("ours", "mxnet", 3), _no_more_cpu())
    peers = (*_OURS, "mxnet", "rows", "floor update")
    yield DistCase(name, (TABLE,), update="sgd", rows=ROWS, peers=peers, goals=goals)


def _compressed() -> Iterator[DistCase]:
    peers = ("ours", "ours 2bit", "ours shm 2bit", "packing", "mxnet 2bit")
    wanted = (
        Goal("ours 2bit", "ours", 1.5),
        Goal("ours 2bit", "packing", 0.75),
        Goal("ours 2bit", "mxnet 2bit", 3),
        _no_more_cpu("ours 2bit", "mxnet 2bit"),
    )
    for size in ("4 MB", "64 MB", RESNET):
        goals = wanted if size == RESNET else ()
        yield DistCase(f"{_job(2, 1)}: {size}, 2bit on N(0, 0.01)", shapes_of(size), peers=peers, goals=goals)


def _keys() -> Iterator[DistCase]:
    """Yield cases of the cost of a key."""
    for keys in KEYS:
        shapes = ((KEY // 4,),) * keys
        name = f"{_job(2, 1)}: {keys} key{'s' if keys > 1 else ''} of 16 KB"
        yield DistCase(name, shapes, peers=(*_OURS, "mxnet"))


def _scaling() -> Iterator[DistCase]:
    """Yield other numbers of workers and servers."""
    for servers in (1, 2):
        for workers in (1, 2, 4):
            if (workers, servers) == (2, 1):
                continue
            for size in SCALED:
                peers = (*_OURS, "mxnet", *(("gloo",) if workers > 1 else ()), "floor", "memcpy")
                name = f"{_job(workers, servers)}: {size}"
                yield DistCase(name, shapes_of(size), workers, servers, peers=peers)
