"""`create`: a store by its name, and a warning where it is alone against the launcher."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, overload

from .base import KVStoreBase
from .errors import ArgumentError, ConfigError, closest
from .store import KVStore
from .store_kinds import STORES, StoreKind, StoreName

if TYPE_CHECKING:
    from .settings.launchers import Placement


@overload
def create(
    name: StoreName = "local",
    *,
    timeout: float = 300.0,
    threads: int = 0,
    group: str = "default",
    processes: int = 0,
    on_peer_loss: str = "raise",
    spin: float = 50e-6,
    slice_bytes: int = 0,
    credit_bytes: int = 32 << 20,
    same_host_shm: bool = True,
    cuda_ipc: int = 1,
) -> KVStore: ...


@overload
def create(name: str, **options: Any) -> KVStore: ...


def create(name: str = "local", **options: Any) -> KVStore:
    """Create a store.

    Parameters
    ----------
    name : str
        One of these, in any case; or a class registered with `KVStoreBase.register`, which goes first.

        - ``"local"`` (``"local_update_cpu"``, ``"local_allreduce_cpu"``): this process; after ``kvstore run``
          or `kvstore.spawn`, as ``"shared"``
        - ``"device"`` (``"local_allreduce_device"``): this process, values on GPUs stay there
        - ``"shared"``: the processes of this machine, through shared memory
        - ``"dist_sync"`` (``"dist"``, ``"dist_device_sync"``, ``"dist_sync_device"``, ``"dist_device"``):
          parameter servers, in rounds of all workers
        - ``"dist_async"`` (``"dist_device_async"``, ``"dist_async_device"``): parameter servers, each push at
          once
        - ``"p3"`` (``"dist_p3"``): ``"dist_sync"``, in small slices sent by priority
        - ``"mpi"``, ``"horovod"``, ``"nccl"``, ``"byteps"``: sums on these engines
        - ``"teststore"``: keeps nothing, for tests
    **options
        Settings of the store; for a registered class, arguments of its constructor.

        timeout : float, default 300
            Seconds after which any wait ends with an error; KVSTORE_TIMEOUT.
        threads : int, default 0
            Threads for large work; 0 takes the usable cores. KVSTORE_NUM_THREADS.
        group : str, default ``"default"``
            Stores of one job are paired by this name and the order of their creation.
        processes : int, default 0
            1 keeps ``"local"`` in this process, also under a launcher.
        on_peer_loss : str, default ``"raise"``
            ``"continue"``: the survivors of a lost worker go on.
        spin : float, default 50e-6
            Seconds that a wait for other processes spins before it sleeps; KVSTORE_SPIN.
        slice_bytes : int, default 0
            On servers: bytes of the slices of large keys; 0 takes 1 MB. KVSTORE_SLICE_BYTES.
        credit_bytes : int, default 32 MB
            On servers: bytes on their way to one of them; KVSTORE_CREDIT_BYTES.
        same_host_shm : bool, default True
            On servers: payloads go in shared memory on one machine; KVSTORE_SAME_HOST_SHM.
        cuda_ipc : int, default 1
            0: ``"shared"`` takes arrays on GPUs through host memory only; KVSTORE_CUDA_IPC.

    Returns
    -------
    KVStore
        For a registered class, and for ``"teststore"``, an instance of that.

    Raises
    ------
    TypeError
        `name` is not a str.
    ConfigError
        Unknown name (the message lists the known ones and the nearest) or unknown option.
    MissingBackendError
        What the store runs on is not installed, or not there on this system; the message says how to get it.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"name must be a str, not {type(name).__name__}")
    literal = name.lower()
    custom = KVStoreBase.kv_registry.get(literal)
    if custom is not None:
        made: KVStore = custom(**options)  # for type checkers: most names are ours
        return made
    if literal in STORES:
        return _create_native(literal, options)
    raise ConfigError(_unknown(literal))


def _create_native(literal: str, options: dict[str, Any]) -> KVStore:
    from .settings.options import store_config

    config = store_config(options)
    kind = STORES[literal]
    if kind.joins and config.processes != 1 and has_peers():
        kind = STORES["shared"]
    if kind.on_servers:
        _serve_if_told()
        kind = _by_van(literal, kind)
    module = importlib.import_module(f".stores.{kind.module}", __package__)
    backend = getattr(module, kind.backend)(config)
    if config.processes != 1 and not kind.on_servers:  # whose numbers are those of the job
        warn_if_apart(literal, backend.num_workers)
    return KVStore(literal, backend, config)


def _by_van(literal: str, kind: StoreKind) -> StoreKind:
    """MXNet makes its stores on servers P3 by a variable."""
    from .settings.variables import text_of

    van = text_of("van")
    if van not in ("zmq", "p3"):
        raise ConfigError(f"DMLC_PS_VAN_TYPE={van!r}: there are zmq and p3; unset it")
    if van == "p3" and not kind.synchronous:
        raise ConfigError(
            f"DMLC_PS_VAN_TYPE=p3 has rounds, and {literal!r} has none: create 'dist_sync', or unset it"
        )
    return STORES["p3"] if van == "p3" and kind.on_servers else kind


def _serve_if_told() -> None:
    """In a process that was started as a server or scheduler: be one, and then end the process."""
    from .settings.roles import find

    roles = find()
    if roles is not None and roles.role != "worker":
        from .stores.parameter_server.role_process import serve

        serve(roles)
        raise SystemExit(0)


def has_peers() -> bool:
    """Whether this process was started by `kvstore run` or `spawn` together with others."""
    from .settings.launchers import detect

    place = detect()
    return place.launcher == "kvstore" and place.size > 1


def warn_if_apart(name: str, workers: int = 1) -> None:
    """Warn, once in a process, of a store that has fewer workers than the launcher has started."""
    from .settings.launchers import detect

    try:
        place = detect()
    except ConfigError:  # whoever needs to know the job will say what is missing
        return
    if place.size > workers:
        _warn_apart(name, workers, place)


@functools.cache
def _warn_apart(name: str, workers: int, place: Placement) -> None:
    together = "'shared' or 'dist_sync'" if place.size == place.local_size else "'dist_sync'"
    import logging

    logging.getLogger("kvstore").warning(
        "rank %d of %d trains on its own: %s has started %d processes, and store %r has %d of them; create "
        "%s to train together, or give processes=1 if that is meant",
        place.rank,
        place.size,
        place.launcher,
        place.size,
        name,
        workers,
        together,
    )


def _unknown(literal: str) -> str:
    known = sorted({*STORES, *KVStoreBase.kv_registry})
    near = closest(literal, known)
    hint = f"; did you mean {near!r}?" if near else "."
    return f"unknown store {literal!r}{hint} Known are: {', '.join(known)}"


__all__ = ["StoreName", "create"]
