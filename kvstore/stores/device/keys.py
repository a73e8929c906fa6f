"""The stored data of a key on a GPU: value, optimizer state, residuals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays.grouping import Key
from ...arrays.host import shape_template
from ...devices.arrays import DeviceArray
from ...devices.gpu_context import GpuContext
from ...devices.memory import DeviceMemory, host_copy
from ...devices.streams import DeviceStream, StreamCursor
from ...observe.native._observe import Slice
from ...optimizer import Updater

Array = npt.NDArray[Any]
#: None, an array in the GPU's memory, or a tuple of these, as optimizers nest them.
State = Any


class DeviceKey:
    """A dense key on a GPU.

    Attributes
    ----------
    key, number, slice, shape, dtype
        As those of `kvstore.stores.entry.StoredKey`.
    numel : int
        Number of elements.
    memory : Memory
        The value.
    tail : StreamCursor
        The place of the last work on it.
    state : State
        The optimizer's state, nested as the optimizer does.
    owner : Updater or None
        The updater of that state; None if there is none yet.
    residuals : dict
        The residual of each position in the list of values, for compressed pushes.
    """

    __slots__ = (
        "_spare", "dtype", "form", "key", "like", "memory", "number", "numel", "owner", "place", "residuals",
        "shape", "slice", "state", "tail", "type_name",
    )  # fmt: skip

    def __init__(
        self,
        place: GpuContext,
        key: Key,
        number: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        tail: StreamCursor,
    ) -> None:
        self.place, self.key, self.number = place, key, number
        self.shape, self.dtype, self.numel = shape, dtype, math.prod(shape)
        self.slice = Slice(number, self.numel * dtype.itemsize)
        #: Name of the element type.
        self.type_name = dtype.name
        #: Element type and shape in PyTorch, once a tensor of the key was pushed.
        self.form: tuple[Any, Any] | None = None
        #: An array of the key's shape and type that needs no memory.
        self.like = shape_template(shape, dtype)
        self.memory = self.new_memory(dtype)
        self.tail = tail
        self.state: State = None
        self.owner: Updater | None = None
        self.residuals: dict[int, DeviceMemory] = {}
        self._spare: dict[Any, DeviceMemory] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.numel * self.dtype.itemsize

    @property
    def device(self) -> int:
        """Number of the GPU."""
        return self.place.device

    def new_memory(self, dtype: np.dtype[Any]) -> DeviceMemory:
        """Return new memory for an array of the key's shape."""
        return DeviceMemory(self.place.driver, self.place.device, self.numel * dtype.itemsize)

    def spare_memory(self, name: Any, dtype: np.dtype[Any]) -> DeviceMemory:
        """Return memory that the key keeps for a purpose, with undefined contents."""
        known = self._spare.get(name)
        if known is None:
            known = self._spare[name] = self.new_memory(dtype)
        return known

    def value_array(self, readonly: bool = False) -> DeviceArray:
        """Return the value as an array."""
        return self.memory_array(self.memory, self.dtype, readonly)

    def memory_array(self, memory: DeviceMemory, dtype: np.dtype[Any], readonly: bool = False) -> DeviceArray:
        """Return memory of the key's shape as an array."""
        return DeviceArray(memory, dtype, self.shape, self.tail.stream, readonly)

    def to_host(self) -> Array:
        """Copy the value to the host."""
        return self.download_array(self.memory, self.dtype)

    def download_array(self, memory: DeviceMemory, dtype: np.dtype[Any]) -> Array:
        """Copy memory of the key's shape to the host; blocks."""
        array = np.empty(self.shape, dtype)
        stream = self.tail.stream
        self.tail.hold_stream(stream)
        host_copy(self.place.driver, memory.address, array, stream.handle, self.device)
        return array

    def upload_array(self, memory: DeviceMemory, array: Array, stream: DeviceStream) -> None:
        """Fill memory of the key's shape from the host."""
        self.place.upload(memory.address, np.ascontiguousarray(array), stream)


@dataclass(eq=False, slots=True)
class StateArray:
    """An array of an optimizer's state on a GPU."""

    memory: DeviceMemory
    dtype: np.dtype[Any]
