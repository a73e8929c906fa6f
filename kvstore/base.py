"""Names and classes of stores: `KVStoreBase`, the registry, `create`, `TestStore`."""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import sys
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, overload

from .arrays.host import readable, same_type, writable
from .errors import ArgumentError, ArrayError, ConfigError, DTypeError, MissingBackendError, ShapeError
from .store_kinds import STORES, StoreKind, StoreName

if TYPE_CHECKING:
    from .settings.launchers import Placement
    from .store import KVStore

log = logging.getLogger("kvstore")

K = TypeVar("K", bound=type)


class KVStoreBase:
    """Interface of a store, for stores of your own.

    Subclass it, decorate the class with `register`, and `create` makes it by its class name in lower case.
    Trainers call `is_capable`, `broadcast` and `pushpull`, and the three optimizer methods where the store is
    capable of them.
    """

    #: Capability: updates can run on the store.
    OPTIMIZER: ClassVar[str] = "optimizer"
    #: Class name in lower case -> class.
    kv_registry: ClassVar[dict[str, type]] = {}

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> Any:
        """Make rank 0's value everyone's: initialise `key` and write the value to `out`."""
        raise NotImplementedError

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Any:
        """Sum `value` over devices and workers and write the result to `out`, or where None to `value`."""
        raise NotImplementedError

    def set_optimizer(self, optimizer: Any) -> None:
        """Update stored weights with `optimizer` from now on."""
        raise NotImplementedError

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do what `capability` names."""
        raise NotImplementedError

    def save_optimizer_states(self, fname: Any, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to a file."""
        raise NotImplementedError

    def load_optimizer_states(self, fname: Any) -> None:
        """Read the optimizer's states from a file."""
        raise NotImplementedError

    @property
    def type(self) -> str:
        """Name of the store."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        raise NotImplementedError

    @staticmethod
    def register(klass: K) -> K:
        """Make `create` know a class by its name in lower case; usable as a decorator.

        Raises
        ------
        ArgumentError
            `klass` is not a class.

        Warns
        -----
        UserWarning
            The name was taken; the new class wins.
        """
        if not isinstance(klass, type):
            raise ArgumentError(f"register takes a class, not {klass!r}")
        name = klass.__name__.lower()
        old = KVStoreBase.kv_registry.get(name)
        if old is not None:
            warnings.warn(f"store {name!r}: {_qualified(klass)} replaces {_qualified(old)}", stacklevel=2)
        KVStoreBase.kv_registry[name] = klass
        return klass


def _qualified(klass: type) -> str:
    return f"{klass.__module__}.{klass.__qualname__}"


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
    from .store import KVStore

    config = store_config(options)
    kind = STORES[literal]
    if kind.joins and config.processes != 1 and has_peers():
        kind = STORES["shared"]
    if kind.on_servers:
        _serve_if_told()
        kind = _by_van(literal, kind)
    if kind.needs_linux and sys.platform != "linux":
        raise MissingBackendError(
            f"store {literal!r} between processes needs Linux: its memory, its waits and its notice of "
            "deaths are memfd, futex and pidfd"
        )
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
    log.warning(
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
    near = difflib.get_close_matches(literal, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown store {literal!r}{hint} Known are: {', '.join(known)}"


@KVStoreBase.register
class TestStore(KVStoreBase):
    """A store that keeps nothing: it copies and sums what it is handed. For tests of trainers."""

    __test__ = False  # not a test case, whatever pytest makes of the name

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy one array to every out; the key is ignored.

        Raises
        ------
        ArrayError, ShapeError, DTypeError
            `value` is a list, or something does not fit; nothing is written then.
        """
        if isinstance(value, (list, tuple)):
            raise ArrayError("broadcast takes one array, not a list")
        self._write(readable(value), out if isinstance(out, (list, tuple)) else [out])

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum the values, left to right, into every out, or without `out` into every value.

        A single array is copied to the outs, and without `out` stays as it is.
        """
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise ShapeError("pushpull needs at least one value")
        outs = (values if len(values) > 1 else []) if out is None else out
        self._write(_summed(values), outs if isinstance(outs, (list, tuple)) else [outs])

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Nothing but summing: False for ``"optimizer"``, ConfigError for any other name."""
        check_capability(capability)
        return False

    @property
    def type(self) -> str:
        """``"teststore"``."""
        return "teststore"

    @property
    def rank(self) -> int:
        """0."""
        return 0

    @property
    def num_workers(self) -> int:
        """1."""
        return 1

    @staticmethod
    def _write(result: Any, outs: Any) -> None:
        targets = [writable(out) for out in outs]
        for array, _ in targets:
            if array.shape != result.shape:
                raise ShapeError(f"out has shape {array.shape}, the value has {result.shape}")
        for array, deliver in targets:
            array[...] = result
            if deliver is not None:
                deliver()


def _summed(values: list[Any]) -> Any:
    arrays = [readable(value) for value in values]
    for array in arrays:
        if not same_type(array.dtype, arrays[0].dtype):
            raise DTypeError(f"values of element types {arrays[0].dtype} and {array.dtype} in one call")
        if array.shape != arrays[0].shape:
            raise ShapeError(f"values of shapes {arrays[0].shape} and {array.shape} in one call")
    total = arrays[0].copy()
    for array in arrays[1:]:
        total += array
    return total


def check_capability(capability: object) -> None:
    """Raise ConfigError unless the capability has a meaning."""
    if not isinstance(capability, str) or capability.lower() != KVStoreBase.OPTIMIZER:
        raise ConfigError(f"unknown capability: {capability!r}; known is {KVStoreBase.OPTIMIZER!r}")


__all__ = ["KVStoreBase", "TestStore", "check_capability", "create"]
