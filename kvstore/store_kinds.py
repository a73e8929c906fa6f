"""What each store of `create` is, said without importing it: who asks, asks here and not for a name."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeAlias


class StoreKind(NamedTuple):
    """What is known of a store by its name.

    Attributes
    ----------
    module, backend : str
        The module below `kvstore.stores`, and the class in it.
    one_process : bool
        It is of this process alone.
    joins : bool
        Of one process, and yet `shared` where our own launcher has started several.
    on_servers : bool
        Its values are on parameter servers.
    synchronous : bool
        Pushes count in rounds of all workers; else each by itself.
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

#: What `create` knows, for editors and type checkers.
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
    # On engines of others, each imported when asked for.
    "mpi": StoreKind("collectives.mpi.backend", "MpiBackend"),
    "horovod": StoreKind("collectives.horovod", "HorovodBackend"),
    "nccl": StoreKind("collectives.nccl.backend", "NcclBackend"),
    "byteps": StoreKind("collectives.byteps", "BytePSBackend"),
}


def is_synchronous(store: Any) -> bool:
    """Whether workers wait for each other; a registered class says by its name if not, as MXNet's do."""
    name = store.type
    return STORES[name].synchronous if name in STORES else "async" not in name


def is_on_servers(store: Any) -> bool:
    """Whether the values are in other processes; a registered class says so by its name, as MXNet's."""
    name = store.type
    return STORES[name].on_servers if name in STORES else "dist" in name
