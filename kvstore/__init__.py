"""A key-value store that keeps parameters in step in data-parallel training.

>>> import numpy as np
>>> import kvstore as kv
>>> store = kv.create("local")
>>> store.init("w", np.zeros((2, 3), np.float32))
>>> store.push("w", [np.ones((2, 3), np.float32)] * 2)
>>> out = np.empty((2, 3), np.float32)
>>> store.pull("w", out=out)
>>> float(out[0, 0])
2.0
"""

try:
    from .kernels import cpu as _cpu  # noqa: F401
except ImportError as _error:
    raise ImportError(
        "kvstore's compiled kernels are not there. If this is the source tree, build it in place with "
        "`pip install -e .`; otherwise install it with `pip install .` and import it from another directory"
    ) from _error

from . import errors, optimizer
from .base import KVStoreBase, TestStore, create
from .engine import Work
from .errors import (
    ArgumentError,
    ArrayError,
    AuthError,
    CapabilityError,
    ClosedError,
    ConfigError,
    DTypeError,
    DuplicateKeyError,
    FencedError,
    KeyKindError,
    KeyNotFoundError,
    KVStoreError,
    MissingBackendError,
    PeerLostError,
    ProtocolError,
    RowIndexError,
    ShapeError,
    StateFileError,
    TimeoutError,
    UpdaterError,
)
from .optimizer import lr_scheduler
from .sparse import RowSparseArray
from .store import KVStore, Statistics

__version__ = "0.1.0"

#: MXNet's spelling of `KVStoreBase.register`.
register = KVStoreBase.register

__all__ = [
    "ArgumentError",
    "ArrayError",
    "AuthError",
    "CapabilityError",
    "ClosedError",
    "ConfigError",
    "DTypeError",
    "DuplicateKeyError",
    "FencedError",
    "KVStore",
    "KVStoreBase",
    "KVStoreError",
    "KeyKindError",
    "KeyNotFoundError",
    "MissingBackendError",
    "PeerLostError",
    "ProtocolError",
    "RowIndexError",
    "RowSparseArray",
    "ShapeError",
    "StateFileError",
    "Statistics",
    "TestStore",
    "TimeoutError",
    "UpdaterError",
    "Work",
    "create",
    "errors",
    "lr_scheduler",
    "optimizer",
    "register",
]
