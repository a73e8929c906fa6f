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

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Where this may be the `kvstore` command, it ends on signals as commands do, also while all this is imported.
if "".join(getattr(sys, "argv", [])[:1]).rpartition("/")[2] in ("-m", "kvstore", "__main__.py"):
    importlib.import_module(".launch.signals", __name__).for_command()

__version__ = "0.1.0"

try:
    from .kernels import cpu as _cpu
except ImportError as _error:
    if sys.platform != "linux":
        raise ImportError(
            f"kvstore runs on Linux only, and this is {sys.platform}: on Windows use it inside WSL 2, on "
            "macOS in a container or a virtual machine with Linux"
        ) from _error
    from .source_tree import installed_package

    if not (_package := installed_package(__version__, __path__[0])):
        raise ImportError(
            "kvstore's compiled kernels are not there. If this is the source tree, build it in place with "
            "`pip install -e .`; otherwise install it with `pip install .`"
        ) from _error
    __path__[:] = [_package]
    from .kernels import cpu as _cpu  # noqa: F401

from . import errors, optimizer
from .arrays.sparse import RowSparseArray
from .base import KVStoreBase, TestStore
from .engine import Work
from .errors import (
    ArgumentError,
    ArrayError,
    AuthError,
    CapabilityError,
    ClosedError,
    CodecError,
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
    WorkerError,
)
from .factory import create
from .optimizer import lr_scheduler
from .plan import Plan
from .store import KVStore, Statistics

sys.modules[f"{__name__}.sparse"] = sys.modules[RowSparseArray.__module__]  # old pickles say so

#: MXNet's spelling of `KVStoreBase.register`.
register = KVStoreBase.register

__all__ = [
    "ArgumentError",
    "ArrayError",
    "AuthError",
    "CapabilityError",
    "ClosedError",
    "CodecError",
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
    "Plan",
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
    "WorkerError",
    "create",
    "errors",
    "lr_scheduler",
    "optimizer",
    "register",
    "spawn",
]
#: Shown beside these once they are imported.
_DOORS = ("averaging", "compression", "jax", "mxnet", "ray", "torch", "trainer")


def __dir__() -> list[str]:
    doors = [name for name in _DOORS if name in globals()]
    return sorted([*__all__, *doors, *(name for name in globals() if name.startswith("__"))])


def spawn(fn: Callable[..., object], n: int, args: Sequence[Any] = (), timeout: float | None = None) -> None:
    """Run ``fn(*args)`` in `n` fresh processes of this machine, which form one job, and wait for all.

    The stores that they create find each other; `KVStore.rank` tells which process is which. If one fails,
    the others are ended within two seconds; so they are when the caller is interrupted or dies.

    Parameters
    ----------
    fn : callable
        Defined at module level, so that a fresh process can import it. A script that calls `spawn` does so
        under ``if __name__ == "__main__":``, for the processes import the script too.
    n : int
        Number of processes.
    args : sequence
        Arguments, the same for all; they are copied to the processes.
    timeout : float, optional
        Seconds that the processes may take together; without end where None.

    Raises
    ------
    WorkerError
        A process failed; the message has its rank, how it ended, and its traceback.
    TimeoutError
        The processes did not end in time; they are ended.
    ArgumentError
        `fn` or `args` cannot be sent to another process.
    ConfigError
        `n` is not positive.
    """
    importlib.import_module("kvstore.launch.spawn").spawn(fn, n, args, timeout)
