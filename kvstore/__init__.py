"""A key-value store that synchronizes parameters in data-parallel training.

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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint.manager import CheckpointManager
    from .checkpoint.restoring import Checkpoint

# If this process can be the `kvstore` command, a signal ends it without a traceback, also during the imports.
if "".join(getattr(sys, "argv", [])[:1]).rpartition("/")[2] in ("-m", "kvstore", "__main__.py"):
    importlib.import_module(".launch.signals", __name__).for_command()

__version__ = "1.0.0rc1"

try:
    from .kernels import cpu as _cpu
except ImportError as _error:
    if sys.platform != "linux":
        raise ImportError(
            f"kvstore runs on Linux only, and this is {sys.platform}: on Windows use it inside WSL 2, on "
            "macOS in a container or a virtual machine with Linux"
        ) from _error
    if not isinstance(_error, ModuleNotFoundError) and "cannot import name" not in str(_error):
        raise  # the modules exist and cannot be loaded, for instance because memory is missing
    from .source_tree import installed_package

    if not (_package := installed_package(__version__, __path__[0])):
        raise ImportError(
            "kvstore's compiled kernels are missing. If this is the source tree, build it in place with "
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

sys.modules[f"{__name__}.sparse"] = sys.modules[RowSparseArray.__module__]  # the name in old pickles

#: MXNet's name of `KVStoreBase.register`.
register = KVStoreBase.register

__all__ = [
    "ArgumentError",
    "ArrayError",
    "AuthError",
    "CapabilityError",
    "Checkpoint",
    "CheckpointManager",
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
#: Modules that `dir` also lists once they are imported.
_DOORS = ("averaging", "compression", "jax", "mxnet", "ray", "torch", "trainer")


#: Names that are imported when they are first used, and where they are.
_LATER = {"Checkpoint": "checkpoint.restoring", "CheckpointManager": "checkpoint.manager"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)


def __dir__() -> list[str]:
    doors = [name for name in _DOORS if name in globals()]
    return sorted([*__all__, *doors, *(name for name in globals() if name.startswith("__"))])


def spawn(fn: Callable[..., object], n: int, args: Sequence[Any] = (), timeout: float | None = None) -> None:
    """Run ``fn(*args)`` in `n` new processes on this machine, which form one job, and wait for all of them.

    The stores that the processes create belong together; `KVStore.rank` is the number of the process. If one
    process fails, the others are ended within two seconds. They are also ended when the caller is interrupted
    or dies.

    Parameters
    ----------
    fn : callable
        Function at module level, so that the new processes can import it. The processes also import the
        script that calls `spawn`, so the script must call it under ``if __name__ == "__main__":``.
    n : int
        Number of processes.
    args : sequence
        Arguments of `fn`, the same in all processes; they are copied to the processes.
    timeout : float, optional
        Time limit for all processes together, in seconds. None means no limit.

    Raises
    ------
    WorkerError
        A process failed. The message has its rank, how it ended, and its traceback.
    TimeoutError
        The processes did not finish in time. They are ended.
    ArgumentError
        `fn` or `args` cannot be sent to another process.
    ConfigError
        `n` is not positive, or the script calls `spawn` without the ``if``.
    """
    importlib.import_module("kvstore.launch.spawn").spawn(fn, n, args, timeout)
