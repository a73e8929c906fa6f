"""`KVStoreBase`: the interface of stores, with the registry for classes of users; `TestStore`."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, TypeVar

from .arrays.host import readable, same_type, writable
from .errors import ArgumentError, ArrayError, ConfigError, DTypeError, ShapeError

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


__all__ = ["KVStoreBase", "TestStore", "check_capability"]
