"""Whether the memory of the machine is enough, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.observe.doctor import cgroups
from kvstore.observe.doctor.system_files import ROOT, kilobytes, size

from .key_lists import KeyList
from .settings import BenchSettings

_PROCESS = 64 << 20  # bytes of a Python with NumPy
_PEER = 160 << 20  # and with PyTorch or MPI


def check(settings: BenchSettings, keys: KeyList, peers: Sequence[str], root: Path = ROOT) -> None:
    """Compare what the processes will need with what is left.

    Raises
    ------
    ConfigError
        It is not enough.
    """
    needed, left = need(settings, keys, peers), available(root)
    if left is None or needed <= left:
        return
    beside = f"; --peers none needs {size(need(settings, keys, ()))}" if peers else ""
    raise ConfigError(
        f"the bench needs about {size(needed)} of memory for {size(keys.nbytes)} of gradients in "
        f"{settings.workers} workers, and {size(left)} are available: use fewer workers, smaller keys, or "
        f"--dtype bfloat16{beside}"
    )


def need(settings: BenchSettings, keys: KeyList, peers: Sequence[str]) -> int:
    """Estimate the bytes of all processes, in sizes of one worker's gradients, as they were measured."""
    workers = settings.workers
    values = 2 * workers + _of_store(settings)  # gradients, and a copy for memcpy and weights
    processes = workers + (settings.servers + 1 if settings.servers else 0)
    needed = values * keys.nbytes + processes * _PROCESS
    return int(needed + len(peers) * workers * (keys.nbytes + _PEER))


def available(root: Path = ROOT) -> int | None:
    """Bytes that new processes can have; None if the system does not say."""
    left = kilobytes(root / "proc/meminfo", "MemAvailable")
    limit = cgroups.memory(root)
    return min((one for one in (left, limit and limit.left) if one is not None), default=None)


def _of_store(settings: BenchSettings) -> float:
    """Estimate the memory of the store: values, what workers hand over, states, residuals."""
    kind, workers = settings.kind, settings.workers
    if kind.on_servers:
        values = 1.5 + workers
    elif workers > 1:
        values = 1 + (2 * workers if settings.method == "push-pull" else 1)
    else:
        values = 1
    return values + (4 if settings.optimizer else 0) + (1.75 * workers if settings.compression else 0)
