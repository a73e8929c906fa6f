"""Base classes for user-defined stores: create a `kvstore.KVStore` from a name, a backend and the options.

CONTRIBUTING.md has an example of a store and of an engine.
"""

from .settings.options import StoreConfig, store_config
from .stores.collectives.backend import AllReduceBackend
from .stores.collectives.engine import Collective, Finish, Item
from .stores.local.backend import LocalBackend
from .stores.protocol import Backend

__all__ = [
    "AllReduceBackend",
    "Backend",
    "Collective",
    "Finish",
    "Item",
    "LocalBackend",
    "StoreConfig",
    "store_config",
]
