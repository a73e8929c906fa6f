"""`create` makes a store by its name, and warns if it has fewer workers than the launcher started."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, overload

from .base import KVStoreBase
from .errors import ArgumentError, ConfigError, KVStoreError, closest
from .store import KVStore, describe_state, options_of
from .store_kinds import STORES, StoreKind, StoreName

if TYPE_CHECKING:
    from .settings.launchers import WorkerPlacement
    from .stores.protocol import Backend


_USUAL = 1024  # numbers of files that a process can have open


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
    hierarchy: str = "flat",
    cuda_ipc: int = 1,
) -> KVStore: ...


@overload
def create(name: str, **options: Any) -> KVStore: ...


def create(name: str = "local", **options: Any) -> KVStore:
    """Create a store.

    Parameters
    ----------
    name : str
        Name of the store, in upper or lower case. Classes registered with `KVStoreBase.register` take
        precedence over these names:

        - ``"local"`` (``"local_update_cpu"``, ``"local_allreduce_cpu"``): a store in this process. In a
          process that ``kvstore run`` or `kvstore.spawn` has started with others, the same as ``"shared"``
        - ``"device"`` (``"local_allreduce_device"``): a store in this process; values on GPUs stay there
        - ``"shared"``: a store of the processes on this machine, through shared memory
        - ``"dist_sync"`` (``"dist"``, ``"dist_device_sync"``, ``"dist_sync_device"``, ``"dist_device"``):
          parameter servers, in rounds of all workers
        - ``"dist_async"`` (``"dist_device_async"``, ``"dist_async_device"``): parameter servers; each push is
          applied at once
        - ``"p3"`` (``"dist_p3"``): as ``"dist_sync"``; small slices are sent in order of priority
        - ``"mpi"``, ``"horovod"``, ``"nccl"``, ``"byteps"``: sums on these engines
        - ``"teststore"``: stores nothing, for tests
    **options
        Options of the store; for a registered class, arguments of its constructor.

        timeout : float, default 300
            Seconds after which any wait ends with an error. Variable: KVSTORE_TIMEOUT.
        threads : int, default 0
            Number of threads for large arrays; 0 uses all available cores. Variable: KVSTORE_NUM_THREADS.
        group : str, default ``"default"``
            Name that pairs the stores of a job, together with the order of their creation.
        processes : int, default 0
            1 keeps a ``"local"`` store in this process, also under a launcher.
        on_peer_loss : str, default ``"raise"``
            After a worker is lost, the other workers get an error (``"raise"``) or continue (``"continue"``).
        spin : float, default 50e-6
            Seconds that a wait for other processes spins before it sleeps. Variable: KVSTORE_SPIN.
        slice_bytes : int, default 0
            Stores on servers: bytes of the slices of large keys; 0 means 1 MB. Variable: KVSTORE_SLICE_BYTES.
        credit_bytes : int, default 32 MB
            Stores on servers: bytes in flight to one server. Variable: KVSTORE_CREDIT_BYTES.
        same_host_shm : bool, default True
            Stores on servers: data for servers on this machine is passed in shared memory. Variable:
            KVSTORE_SAME_HOST_SHM.
        hierarchy : str, default ``"flat"``
            Stores on servers with rounds. ``"flat"``: each worker sends its pushed arrays. ``"host"``: the
            workers of one host sum in shared memory, and one sum for each host travels. ``"auto"``: as
            ``"host"`` if more than one host has more than one worker. Variable: KVSTORE_HIERARCHY.
        cuda_ipc : int, default 1
            0: ``"shared"`` transfers GPU arrays through host memory only. Variable: KVSTORE_CUDA_IPC.

    Returns
    -------
    KVStore
        For a registered class and for ``"teststore"``, an instance of that class.

    Raises
    ------
    TypeError
        `name` is not a str.
    ConfigError
        The name is unknown (the message lists the known names and the most similar one), or an option is.
    MissingBackendError
        The engine of the store is not installed, or not available on this system. The message says how to
        install it.
    """
    if not isinstance(name, str):
        raise ArgumentError(f"name must be a str, not {type(name).__name__}")
    with _descriptor_errors(f"create store {name!r}"):
        from .observe.startup import begin

        begin()
        return _create_store(name, options)


@contextlib.contextmanager
def _descriptor_errors(what: str) -> Iterator[None]:
    """Raise ConfigError if the body, which does `what`, finds no free file descriptor.

    No module can be imported then.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, KVStoreError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigError(f"process {os.getpid()} cannot {what}: {_none_left(error.errno)}") from error


def _none_left(number: int) -> str:
    if number == errno.ENFILE:
        return "the system has no file descriptors left; close files, or raise fs.file-max"
    limit = os.sysconf("SC_OPEN_MAX")
    return (
        f"all of the {limit} files that it may have open are open. Close some, or raise the limit where the "
        f"job is started: ulimit -n {max(_USUAL, 2 * limit)}"
    )


def _create_store(name: str, options: dict[str, Any]) -> KVStore:
    literal = name.lower()
    custom = KVStoreBase.kv_registry.get(literal)
    if custom is not None:
        made: KVStore = custom(**options)  # for type checkers: most names are ours
        return made
    if literal in STORES:
        return _create_native(literal, options)
    raise ConfigError(_unknown_name(literal))


def _create_native(literal: str, options: dict[str, Any]) -> KVStore:
    from .settings.options import store_config

    config = store_config(options)
    kind = STORES[literal]
    if kind.joins and config.processes != 1 and has_peers():
        kind = STORES["shared"]
    if kind.on_servers:
        _serve_if_role()
        kind = _by_van(literal, kind)
    module = importlib.import_module(f".stores.{kind.module}", __package__)
    backend = getattr(module, kind.backend)(config)
    if kind.on_servers and config.hierarchy != "flat":
        from .stores.hierarchy.backend import by_hosts

        backend = by_hosts(config, backend)
    if config.processes != 1 and not kind.on_servers:  # with the rank and the number of workers of the job
        warn_if_apart(literal, backend.num_workers)
    store = _store_class()(literal, backend, config)
    _log_created(store, backend)
    return store


def create_companion(store: KVStore, purpose: str) -> KVStore:
    """Create another store of the same type and workers, for a purpose that does not concern the first one.

    All workers must call this function, as `create`.
    """
    options = vars(options_of(store))
    group = f"{options['group']} {purpose}"
    with _descriptor_errors(f"create a store for {purpose}"):
        return _create_native(store.type, {**options, "group": group, "hierarchy": "flat"})


def _store_class() -> type[KVStore]:
    """Return the class of stores; in a process that records a timeline, the class that records calls."""
    from .observe.native._observe import recording

    if not recording():
        return KVStore
    from .recorded_store import RecordedKVStore

    return RecordedKVStore


def _log_created(store: KVStore, backend: Backend) -> None:
    """Log a new store, and register it for reports of the state of this process."""
    import logging

    from .kernels import cpu
    from .observe import stacks
    from .observe.log import introduce
    from .settings.launchers import detect_placement

    introduce(f"worker {backend.rank}")
    stacks.watch(store, describe_state)
    log = logging.getLogger(backend.logger)
    if not log.isEnabledFor(logging.INFO):
        return
    with contextlib.suppress(ConfigError):
        log.info(
            "store %r created: worker %d of %d, launcher %s, %s, kernels %s, %d threads",
            store.type, store.rank, store.num_workers, detect_placement().launcher, backend.describe(),
            cpu.level(), cpu.threads(),
        )  # fmt: skip


def _by_van(literal: str, kind: StoreKind) -> StoreKind:
    """Return the type of store that MXNet's variable DMLC_PS_VAN_TYPE selects."""
    from .settings.environment import text_of

    van = text_of("van")
    if van not in ("zmq", "p3"):
        raise ConfigError(f"DMLC_PS_VAN_TYPE={van!r} is unknown; known are zmq and p3. Unset it")
    if van == "p3" and not kind.synchronous:
        raise ConfigError(
            f"DMLC_PS_VAN_TYPE=p3 needs rounds, and {literal!r} has none: create 'dist_sync', or unset it"
        )
    return STORES["p3"] if van == "p3" and kind.on_servers else kind


def _serve_if_role() -> None:
    """Run the server or scheduler if the environment of this process has that role, then end the process."""
    from .settings.roles import find

    roles = find()
    if roles is not None and roles.role != "worker":
        from .stores.parameter_server.role_process import serve_role

        serve_role(roles)
        raise SystemExit(0)


def has_peers() -> bool:
    """Return whether `kvstore run` or `spawn` has started this process together with others."""
    from .settings.launchers import detect_placement

    place = detect_placement()
    return place.launcher == "kvstore" and place.size > 1


def warn_if_apart(name: str, workers: int = 1) -> None:
    """Warn once in a process about a store that has fewer workers than the launcher has started."""
    from .settings.launchers import detect_placement

    try:
        place = detect_placement()
    except ConfigError:  # code that needs the job reports missing variables
        return
    if place.size > workers:
        _warn_apart(name, workers, place)


@functools.cache
def _warn_apart(name: str, workers: int, place: WorkerPlacement) -> None:
    together = "'shared' or 'dist_sync'" if place.size == place.local_size else "'dist_sync'"
    import logging

    logging.getLogger("kvstore").warning(
        "rank %d of %d trains separately: %s has started %d processes, but store %r has %d of them; create "
        "%s to train together, or pass processes=1 if this is intended",
        place.rank,
        place.size,
        place.launcher,
        place.size,
        name,
        workers,
        together,
    )


def _unknown_name(literal: str) -> str:
    known = sorted({*STORES, *KVStoreBase.kv_registry})
    near = closest(literal, known)
    hint = f"; did you mean {near!r}?" if near else "."
    return f"unknown store {literal!r}{hint} Known stores: {', '.join(known)}"


__all__ = ["StoreName", "create"]
