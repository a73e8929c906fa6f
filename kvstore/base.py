"""`KVStoreBase`: the interface of stores, with the registry for user-defined classes; `TestStore`."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, TypeVar

from .arrays.element_types import same_type
from .arrays.host import readable_array, writable_array
from .errors import ArgumentError, ArrayError, ConfigError, DTypeError, ShapeError

K = TypeVar("K", bound=type)


class KVStoreBase:
    """Interface of a store, for store classes of your own.

    Write a subclass and decorate it with `register`. `create` then creates it by its class name in lower
    case. Trainers call `is_capable`, `broadcast` and `pushpull`. They call the three optimizer methods if
    ``is_capable("optimizer")`` is True.
    """

    #: Capability: updates can run on the store.
    OPTIMIZER: ClassVar[str] = "optimizer"
    #: Registered classes, by class name in lower case.
    kv_registry: ClassVar[dict[str, type]] = {}

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> Any:
        """Initialise `key` with the value of rank 0 and write this value to `out` on all workers."""
        raise NotImplementedError

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> Any:
        """Sum `value` over devices and workers and write the result to `out`, or to `value` without `out`."""
        raise NotImplementedError

    def set_optimizer(self, optimizer: Any) -> None:
        """Update the stored weights with `optimizer` on later pushes."""
        raise NotImplementedError

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return whether the store has the capability."""
        raise NotImplementedError

    def save_optimizer_states(self, fname: Any, dump_optimizer: bool = False) -> None:
        """Write the states of the optimizer to a file."""
        raise NotImplementedError

    def load_optimizer_states(self, fname: Any) -> None:
        """Read the states of the optimizer from a file."""
        raise NotImplementedError

    @property
    def type(self) -> str:
        """Name of the store."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """Rank of this worker in its job, from 0."""
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        raise NotImplementedError

    @staticmethod
    def register(klass: K) -> K:
        """Register a store class for `create`, by its class name in lower case. Usable as a decorator.

        Raises
        ------
        ArgumentError
            `klass` is not a class.

        Warns
        -----
        UserWarning
            The name is already registered. The new class replaces the old one.
        """
        if not isinstance(klass, type):
            raise ArgumentError(f"register takes a class, not {klass!r}")
        name = klass.__name__.lower()
        old = KVStoreBase.kv_registry.get(name)
        if old is not None:
            warnings.warn(
                f"store {name!r}: {_qualified_name(klass)} replaces {_qualified_name(old)}", stacklevel=2
            )
        KVStoreBase.kv_registry[name] = klass
        return klass


def _qualified_name(klass: type) -> str:
    return f"{klass.__module__}.{klass.__qualname__}"


@KVStoreBase.register
class TestStore(KVStoreBase):
    """A store for tests of trainers: it copies and sums arrays and stores nothing."""

    __test__ = False  # not a test case, although pytest selects this name

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy one array to every output. The key is ignored.

        Raises
        ------
        ArrayError, ShapeError, DTypeError
            `value` is a list, or shapes or types do not match. Nothing is written.
        """
        if isinstance(value, (list, tuple)):
            raise ArrayError("broadcast takes one array, not a list")
        self._write_outs(readable_array(value), out if isinstance(out, (list, tuple)) else [out])

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum the values from left to right and write the sum to every output.

        Without `out`, the sum is written to every value; a single value does not change.
        """
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise ShapeError("pushpull needs at least one value")
        outs = (values if len(values) > 1 else []) if out is None else out
        self._write_outs(_summed_values(values), outs if isinstance(outs, (list, tuple)) else [outs])

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False for ``"optimizer"``; raise ConfigError for any other name."""
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
    def _write_outs(result: Any, outs: Any) -> None:
        targets = [writable_array(out) for out in outs]
        for array, _ in targets:
            if array.shape != result.shape:
                raise ShapeError(f"out has shape {array.shape}, the value has {result.shape}")
        for array, deliver in targets:
            array[...] = result
            if deliver is not None:
                deliver()


def _summed_values(values: list[Any]) -> Any:
    arrays = [readable_array(value) for value in values]
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
    """Raise ConfigError unless the capability is a known one."""
    if not isinstance(capability, str) or capability.lower() != KVStoreBase.OPTIMIZER:
        raise ConfigError(f"unknown capability: {capability!r}; known is {KVStoreBase.OPTIMIZER!r}")


__all__ = ["KVStoreBase", "TestStore", "check_capability"]
