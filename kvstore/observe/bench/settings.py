"""The options of the command: complete, in agreement, and within the memory of the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvstore import compression as codecs
from kvstore import optimizer as optimizers
from kvstore.errors import ConfigError, nearest
from kvstore.observe.doctor.system_files import ROOT, cgroup_memory, kilobytes, size
from kvstore.store_kinds import STORES, StoreKind

from .key_lists import BenchKey

_PROCESS, _PEER = 64 << 20, 160 << 20  # bytes of a Python with NumPy, and with PyTorch or MPI


class BenchSettings(NamedTuple):
    """The options by their names; `compression` is that of `KVStore.set_gradient_compression`."""

    store: str
    workers: int
    servers: int
    method: str
    compression: dict[str, Any] | None
    optimizer: str | None
    rounds: int

    @property
    def kind(self) -> StoreKind:
        """The kind of the store."""
        return STORES[self.store]


def chosen_settings(store: str, workers: int | None, servers: int | None, **options: Any) -> BenchSettings:
    """Fill in what the user has not chosen; a ConfigError says which options contradict each other."""
    kind = STORES.get(store.lower())
    if kind is None:
        known = f"{nearest(store, STORES)}; known stores: {', '.join(STORES)}"
        raise ConfigError(f"unknown store {store!r}{known}")
    if kind.module.startswith("collectives."):
        why = "runs on an engine with a launcher of its own; the bench measures engines as peers"
        raise ConfigError(f"store {store!r} {why}, such as --peers mpi")
    n = workers or (1 if kind.one_process else 2)
    if kind.one_process and not kind.joins and n > 1:
        raise ConfigError(f"store {store!r} is for one process: use -n 1, or --store shared")
    if servers and not kind.on_servers:
        raise ConfigError(f"--servers is for stores on servers, such as dist_sync; {store!r} has none")
    if options["optimizer"] is not None:
        optimizers.create(options["optimizer"])
    if (text := options["compression"]) is not None:
        name, equals, value = text.partition("=")
        options["compression"] = params = {"type": name, **({"threshold": value} if equals else {})}
        with contextlib.suppress(ValueError, KeyError):  # the codec refuses a text
            params["threshold"] = float(params["threshold"])
        codecs.create(params)
    return BenchSettings(store.lower(), n, servers or 1 if kind.on_servers else 0, **options)


def check_memory(
    settings: BenchSettings, keys: Sequence[BenchKey], peers: Sequence[str], root: Path = ROOT
) -> None:
    """Raise ConfigError if the processes need more memory than is available."""
    needed, left = needed_memory(settings, keys, peers), available_memory(root)
    if left is not None and needed > left:
        without = f"; --peers none needs {size(needed_memory(settings, keys, ()))}" if peers else ""
        gradients = size(sum(key.nbytes for key in keys))
        raise ConfigError(
            f"the bench needs about {size(needed)} of memory for {gradients} of gradients in "
            f"{settings.workers} workers, and {size(left)} are available: use fewer workers, smaller keys, "
            f"or --dtype bfloat16{without}"
        )


def needed_memory(settings: BenchSettings, keys: Sequence[BenchKey], peers: Sequence[str]) -> int:
    """Estimate the bytes of all processes, in sizes of the gradients of a worker, as they were measured."""
    workers, nbytes = settings.workers, sum(key.nbytes for key in keys)
    values = 2.0 * workers + 1  # gradients, their copy for memcpy and weights, and the values of the store
    if settings.kind.on_servers:
        values += 0.5 + workers
    elif workers > 1:
        values += 2 * workers if settings.method == "push-pull" else 1
    values += (4 if settings.optimizer else 0) + (1.75 * workers if settings.compression else 0)
    processes = workers + (settings.servers + 1 if settings.servers else 0)
    return int(values * nbytes + processes * _PROCESS + len(peers) * workers * (nbytes + _PEER))


def available_memory(root: Path = ROOT) -> int | None:
    """Return the bytes that new processes can have; None if the system does not say."""
    left, limit = kilobytes(root / "proc/meminfo", "MemAvailable"), cgroup_memory(root)
    return min((each for each in (left, limit and limit.left) if each is not None), default=None)
