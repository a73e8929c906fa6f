"""The properties of each store of `create`, without an import of the store.

Decisions use these and not a name.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias


class StoreKind(NamedTuple):
    """The properties of a store by its name.

    Attributes
    ----------
    module, backend : str
        The module below `kvstore.stores`, and the class in it.
    one_process : bool
        The store has this process alone.
    joins : bool
        A store of one process, but `shared` if `kvstore run` or `spawn` has started several processes.
    on_servers : bool
        Its values are on parameter servers.
    synchronous : bool
        Pushes count in rounds of all workers; else each push counts separately.
    """

    module: str
    backend: str
    one_process: bool = False
    joins: bool = False
    on_servers: bool = False
    synchronous: bool = True


_LOCAL = StoreKind("local.backend", "LocalBackend", one_process=True, joins=True)
_DEVICE = StoreKind("device.backend", "DeviceBackend", one_process=True)
_DIST = StoreKind("parameter_server.worker.backend", "DistBackend", on_servers=True)
_ASYNC = _DIST._replace(backend="AsyncDistBackend", synchronous=False)

#: The names that `create` accepts, for editors and type checkers.
StoreName: TypeAlias = Literal[
    "local", "local_update_cpu", "local_allreduce_cpu",
    "device", "local_allreduce_device",
    "shared",
    "dist", "dist_sync", "dist_device", "dist_device_sync", "dist_sync_device",
    "dist_async", "dist_device_async", "dist_async_device",
    "p3", "dist_p3",
    "mpi", "horovod", "nccl", "byteps",
]  # fmt: skip

#: By literal name.
STORES: dict[str, StoreKind] = {
    **dict.fromkeys(("local", "local_update_cpu", "local_allreduce_cpu"), _LOCAL),
    **dict.fromkeys(("device", "local_allreduce_device"), _DEVICE),
    "shared": StoreKind("shared.backend", "SharedBackend"),
    **dict.fromkeys(("dist", "dist_sync", "dist_device", "dist_device_sync", "dist_sync_device"), _DIST),
    **dict.fromkeys(("dist_async", "dist_device_async", "dist_async_device"), _ASYNC),
    **dict.fromkeys(("p3", "dist_p3"), _DIST._replace(backend="P3Backend")),
    # On external engines, each imported when it is used.
    "mpi": StoreKind("collectives.mpi.backend", "MpiBackend"),
    "horovod": StoreKind("collectives.horovod", "HorovodBackend"),
    "nccl": StoreKind("collectives.nccl.backend", "NcclBackend"),
    "byteps": StoreKind("collectives.byteps", "BytePSBackend"),
}


def is_synchronous(store: Any) -> bool:
    """Return whether workers wait for each other.

    For a registered class without this property, by its name as in MXNet.
    """
    name = store.type
    return STORES[name].synchronous if name in STORES else "async" not in name


def is_on_servers(store: Any) -> bool:
    """Return whether the values are on servers; for a registered class, by its name as in MXNet."""
    name = store.type
    return STORES[name].on_servers if name in STORES else "dist" in name
