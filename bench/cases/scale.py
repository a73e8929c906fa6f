"""Simulated cases: sets of keys, jobs, and losses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.cases.common import KB, MB, Case, Shape, resnet50
from bench.scale.real import RealCase

#: The size of the bytes in all figures.
WORKERS, SERVERS, PER_HOST = 1024, 64, 8
GBITS = 10
TWO_BIT = 1  # of kernels/codecs.h

RESNET, LLAMA = "ResNet-50", "7 billion"


def llama_7b(layers: int = 32) -> tuple[Shape, ...]:
    """Return the shapes of the 291 parameters of a transformer of 7 billion, or of one with fewer layers."""
    hidden, inner, vocabulary = 4096, 11008, 32000
    shapes: list[Shape] = [(vocabulary, hidden)]
    for _ in range(layers):
        shapes += [(hidden, hidden)] * 4 + [(inner, hidden)] * 2 + [(hidden, inner), (hidden,), (hidden,)]
    return (*shapes, (hidden,), (vocabulary, hidden))


@dataclass(frozen=True)
class KeySet:
    """Keys: shapes, and the bytes of an element."""

    name: str
    shapes: tuple[Shape, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return {"float32": 4, "bfloat16": 2}[self.dtype] * sum(map(math.prod, self.shapes))


def key_set(name: str) -> KeySet:
    """Return a set by its name: a model, a model and the layers it has, or ``keys x bytes``."""
    model, _, layers = name.partition("/")
    if model == RESNET:
        return KeySet(name, resnet50())
    if model == LLAMA:
        return KeySet(name, llama_7b(int(layers or 32)), "bfloat16")
    count, nbytes = map(int, name.split("x"))
    return KeySet(name, ((nbytes // 4,),) * count)


@dataclass(frozen=True)
class ScaleCase(Case):
    """One line of the tables; `group` is the table."""

    name: str
    group: str


@dataclass(frozen=True)
class StepCase(ScaleCase):
    """A step of all workers: a pushpull of all keys in one call."""

    keys: str  # a set of keys; see `key_set`
    workers: int = WORKERS
    servers: int = SERVERS
    per_host: int = PER_HOST
    by_host: bool = False  # each host sums first and sends one part
    gbits: float = GBITS
    mode: str = "sync"
    codec: str = ""
    slice_bytes: int = MB
    credit: int = 32 * MB
    slow: float = 1.0  # the factor by which one worker's process and link are slower
    steps: int = 2
    #: Two smaller sets of the same kind: these are simulated, and the time is extrapolated by bytes.
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainingCase(ScaleCase):
    """Steps of a network with a call for each key; gradients arrive in turn, last layer first."""

    keys: str
    workers: int
    servers: int
    gbits: float
    slice_bytes: int
    credit: int
    priority: bool
    forward: float
    backward: float


@dataclass(frozen=True)
class ControlCase(ScaleCase):
    """The scheduler's work: start, init of all keys, a barrier, some idle seconds, the end."""

    workers: int
    servers: int
    keys: str
    mended: bool = True


@dataclass(frozen=True)
class LossCase(ScaleCase):
    """A step in the middle of which a ``worker``, a ``host`` or a ``server`` dies."""

    who: str
    on_peer_loss: str
    workers: int = WORKERS
    servers: int = SERVERS


@dataclass(frozen=True)
class CheckCase(ScaleCase):
    """A real job of this machine, the median of `runs`, compared with a simulated job."""

    real: RealCase
    runs: int = 3


@dataclass(frozen=True)
class ExactCase(ScaleCase):
    """A whole model compared with the extrapolation from two parts of it."""

    keys: str
    parts: tuple[str, ...]
    workers: int
    servers: int


def cases() -> Iterator[Case]:
    """Yield all cases, in the order of the tables."""
    for part in (checks, headline, curves, control, losses):
        yield from part()


def checks() -> Iterator[Case]:
    """Yield real jobs of more workers than costs were fitted to."""
    for workers in (16, 32, 64):
        yield _check(workers, 1, (KB,), "1 key of 4 KB", 40)
        yield _check(workers, 2, (KB,) * 256, "256 keys of 4 KB", 15)
    for workers, servers in ((16, 1), (32, 4)):
        yield _check(workers, servers, (MB,), "1 key of 4 MB", 12)


def _check(workers: int, servers: int, sizes: tuple[int, ...], what: str, calls: int) -> CheckCase:
    real = RealCase(workers, servers, sizes, calls=calls, warm=3, sleep=0.05)
    return CheckCase(f"{workers} workers, {servers} servers: {what}", "check", real)


def headline() -> Iterator[Case]:
    """Yield steps of 1,024 workers and 64 servers, in every way."""
    ways = {
        "flat": {}, "by host": {"by_host": True}, "flat, 2bit": {"codec": "2bit"},
        "by host, 2bit": {"by_host": True, "codec": "2bit"}, "async": {"mode": "async"},
        "by host, p3's slices": {"slice_bytes": 160_000, "by_host": True},
        "by host, one straggler": {"slow": 10.0, "by_host": True},
    }  # fmt: skip
    for way, given in ways.items():
        yield StepCase(f"{RESNET}, {way}", "step", RESNET, **given)  # type: ignore[arg-type]
    parts = (f"{LLAMA}/1", f"{LLAMA}/2")
    for way, given in (("by host", {"by_host": True}), ("flat", {})):
        job = {"steps": 1, "parts": parts, "slice_bytes": 4 * MB, **given}
        yield StepCase(f"{LLAMA}, slices of 4 MB, {way}", "step", LLAMA, **job)  # type: ignore[arg-type]
    yield ExactCase(
        "7 billion from 1 and 2 of its 32 layers, 16 workers, 8 servers", "exact", LLAMA, parts, 16, 8
    )
    yield ExactCase(
        f"{RESNET}-like: 220 keys of 512 KB, from 55 and 110", "exact", *_parts("524288"), 128, 64
    )


def _parts(nbytes: str) -> tuple[str, tuple[str, ...]]:
    return f"220x{nbytes}", (f"55x{nbytes}", f"110x{nbytes}")


def curves() -> Iterator[Case]:
    """Yield step times over workers, servers, keys, bytes and links."""
    for workers in (8, 32, 128, 512, 1024):
        for by_host in (False, True):
            if workers > PER_HOST or not by_host:
                name = f"{workers} workers, {_way(by_host)}"
                yield StepCase(name, "workers", RESNET, workers, by_host=by_host)
    for servers in (4, 16, 64, 256):
        for by_host in (False, True):
            name = f"{servers} servers, {_way(by_host)}"
            yield StepCase(name, "servers", RESNET, servers=servers, by_host=by_host)
    for keys in (64, 640, 2_000, 6_400):
        yield StepCase(f"{keys:,} keys of 4 KB", "keys", f"{keys}x4096", 128, SERVERS, 1)
    yield StepCase(
        "20,000 keys of 4 KB", "keys", "20000x4096", 128, SERVERS, 1, parts=("2000x4096", "6400x4096")
    )
    for size in (1, 8, 64, 512, 4096):
        yield StepCase(f"{size} MB", "bytes", f"{max(1, size // 4)}x{min(size, 4) * MB}", 128, SERVERS, 1)
    for gbits in (1, 10, 100):
        for by_host in (False, True):
            yield StepCase(f"{gbits} Gbit/s, {_way(by_host)}", "links", RESNET, by_host=by_host, gbits=gbits)
    for slice_bytes in (64 * KB, 160_000, 512 * KB, MB, 4 * MB):
        yield StepCase(
            f"slices of {slice_bytes // 1000} KB", "slices", RESNET, by_host=True, slice_bytes=slice_bytes
        )
    kinds = ((MB, False, 32), (MB, True, 32), (160_000, True, 32), (160_000, True, 1))
    for slice_bytes, priority, credit in kinds:
        how = "priority" if priority else "no priority"
        name = f"slices of {slice_bytes // 1000} KB, {how}, credit {credit} MB"
        yield TrainingCase(name, "p3", RESNET, 32, 4, 10, slice_bytes, credit * MB, priority, 0.1, 0.2)


def _way(by_host: bool) -> str:
    return "by host" if by_host else "flat"


def control() -> Iterator[Case]:
    """Yield jobs of few and many keys, for their scheduler."""
    for workers in (64, 256, 1024):
        for keys in ("200x4096", "20000x4096"):
            name = f"{workers} workers, {keys.partition('x')[0]} keys"
            yield ControlCase(name, "scheduler", workers, SERVERS, keys)


def losses() -> Iterator[Case]:
    """Yield deaths in the middle of a step."""
    yield LossCase("one worker, continue", "losses", "worker", "continue")
    yield LossCase("one host of 8, continue", "losses", "host", "continue")
    yield LossCase("one host of 8, raise", "losses", "host", "raise")
    yield LossCase("one server", "losses", "server", "continue")
