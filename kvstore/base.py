"""Names and classes of stores: `KVStoreBase`, the registry, `create`, `TestStore`."""

from __future__ import annotations

import difflib
import importlib
import logging
import os
import sys
import warnings
from typing import Any, ClassVar, TypeVar

from .arrays import readable, same_type, writable
from .errors import ArgumentError, ArrayError, ConfigError, DTypeError, MissingBackendError, ShapeError

log = logging.getLogger("kvstore")

K = TypeVar("K", bound=type)

_LOCAL = ("local", "LocalBackend")
#: Stores of one process, which become `shared` where our own launcher has started several.
_ALONE = ("local", "local_update_cpu", "local_allreduce_cpu")
#: Stores on parameter servers.
_DIST = {
    "DistBackend": "dist dist_sync dist_device dist_device_sync dist_sync_device",
    "AsyncDistBackend": "dist_async dist_device_async dist_async_device",
    "P3Backend": "p3 dist_p3",
}

#: Literal name -> (module in kvstore.backends, class).
BACKENDS: dict[str, tuple[str, str]] = dict.fromkeys(_ALONE, _LOCAL)
BACKENDS.update(dict.fromkeys(("device", "local_allreduce_device"), ("device", "DeviceBackend")))
BACKENDS["shared"] = ("shared", "SharedBackend")
BACKENDS.update({name: ("dist", cls) for cls, names in _DIST.items() for name in names.split()})
#: Stores on engines of others, each imported when asked for.
_ENGINES = {
    "mpi": "MpiBackend",
    "horovod": "HorovodBackend",
    "nccl": "NcclBackend",
    "byteps": "BytePSBackend",
}
BACKENDS.update({name: (name, cls) for name, cls in _ENGINES.items()})


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


def create(name: str = "local", **options: Any) -> Any:
    """Create a store.

    Parameters
    ----------
    name : str
        A literal name; case does not matter. A class registered with `KVStoreBase.register` goes first.
    **options
        Fields of `kvstore.config.StoreConfig`; for a registered class, arguments of its constructor.

    Returns
    -------
    KVStore or KVStoreBase

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
        return custom(**options)
    if literal in BACKENDS:
        return _create_native(literal, options)
    raise ConfigError(_unknown(literal))


def _create_native(literal: str, options: dict[str, Any]) -> Any:
    from .config import store_config
    from .store import KVStore

    config = store_config(options)
    shared = literal in _ALONE and config.processes != 1 and _has_peers()
    module, cls = BACKENDS["shared" if shared else literal]
    if module == "dist":
        _serve_if_told()
        cls = _van(literal, cls)
    if module == "shared" and sys.platform != "linux":
        raise MissingBackendError(
            f"store {literal!r} between processes needs Linux: its memory, its waits and its notice of "
            "deaths are memfd, futex and pidfd"
        )
    backend = getattr(importlib.import_module(f".backends.{module}", __package__), cls)
    return KVStore(literal, backend(config), config)


def _van(literal: str, cls: str) -> str:
    """Class of a store on servers: MXNet makes its stores P3 by a variable."""
    van = os.environ.get("DMLC_PS_VAN_TYPE") or "zmq"
    if van not in ("zmq", "p3"):
        raise ConfigError(f"DMLC_PS_VAN_TYPE={van!r}: there are zmq and p3; unset it")
    if van == "p3" and cls == "AsyncDistBackend":
        raise ConfigError(
            f"DMLC_PS_VAN_TYPE=p3 has rounds, and {literal!r} has none: create 'dist_sync', or unset it"
        )
    return "P3Backend" if van == "p3" else cls


def _serve_if_told() -> None:
    """In a process that was started as a server or scheduler: be one, and then end the process."""
    from .roles import find

    roles = find()
    if roles is not None and roles.role != "worker":
        from .backends.dist_roles import serve

        serve(roles)
        raise SystemExit(0)


def _has_peers() -> bool:
    """Whether this process was started by `kvstore run` or `spawn` together with others."""
    from .cluster import detect

    place = detect()
    return place.launcher == "kvstore" and place.size > 1


def _unknown(literal: str) -> str:
    known = sorted({*BACKENDS, *KVStoreBase.kv_registry})
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


__all__ = ["BACKENDS", "KVStoreBase", "TestStore", "check_capability", "create"]
