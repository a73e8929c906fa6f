"""The transfer of a checkpoint from worker 0 to the other workers, over a small store for this purpose.

So only worker 0 must read the folder, and all workers restore the same checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..arrays.element_types import dtype_named
from ..factory import create_companion
from ..store import KVStore

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"


class CheckpointTransfer:
    """Sends messages from worker 0 to the other workers; all workers call its methods in the same order."""

    def __init__(self, store: KVStore) -> None:
        self._companion = create_companion(store, "checkpoint")
        self._count = 0

    def send(self, message: dict[str, Any], arrays: Mapping[str, Array]) -> None:
        """On worker 0: send a JSON message and arrays to all workers; wait until they have received them."""
        kinds = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
        text = json.dumps([message, kinds]).encode()
        self._broadcast_array(np.array([len(text)], np.int64))
        self._broadcast_array(np.frombuffer(text, np.uint8).copy())
        for array in arrays.values():
            self._broadcast_array(array)
        self._companion.barrier()

    def receive(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """On the other workers: return the message and arrays of worker 0."""
        size = self._broadcast_array(np.zeros(1, np.int64))
        text = self._broadcast_array(np.zeros(int(size[0]), np.uint8))
        message, kinds = json.loads(text.tobytes())
        arrays = {
            name: self._broadcast_array(np.zeros(shape, dtype_named(dtype)))
            for name, (dtype, shape) in kinds.items()
        }
        self._companion.barrier()
        return message, arrays

    def _broadcast_array(self, array: Array) -> Array:
        """Overwrite an array with that of worker 0."""
        self._count += 1
        self._companion.broadcast(self._count, array, out=array)
        return array

    def __enter__(self) -> CheckpointTransfer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._companion.__exit__(kind, error, trace)
