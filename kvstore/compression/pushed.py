"""Values that are pushed to a key with compression. They are packed when they are summed, not before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from ..arrays.grouping import Key
from ..errors import CodecError, KVStoreError
from ..kernels import cpu
from .codec import Codec

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"


class Pushed(Protocol):
    """The values of one key in one call."""

    def sources(self) -> cpu.Coded | list[Array]:
        """Return the arguments of the summing kernels; the sum, or `keep`, updates the residuals."""

    def keep(self) -> None:
        """Update the residuals after the sum has been applied."""

    def guarded(self) -> Any:
        """Return a context that restores the residuals if its body raises an error, and else keeps them."""


class KernelSource:
    """Values for a compiled codec. The kernels update the residuals during the sum and do not fail then."""

    def __init__(self, code: tuple[int, float], values: list[Array], residuals: list[Array] | None) -> None:
        self._code, self._values, self._residuals = code, values, residuals

    def sources(self) -> cpu.Coded:
        """See `Pushed`."""
        return cpu.Coded(*self._code, self._values[0].size, self._values, self._residuals)

    def keep(self) -> None:
        """See `Pushed`."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """See `Pushed`."""
        residuals = self._residuals or []
        before = [residual.copy() for residual in residuals]
        try:
            yield
        except BaseException:
            for residual, old in zip(residuals, before, strict=True):
                np.copyto(residual, old)
            raise


class PythonCodecSource:
    """Values for a user-defined codec, which are packed and unpacked here with copies of the residuals."""

    def __init__(self, codec: Codec, key: Key, values: list[Array], residuals: list[Array] | None) -> None:
        self._codec, self._key, self._values, self._residuals = codec, key, values, residuals
        self._left: list[Array] = []

    def sources(self) -> list[Array]:
        """See `Pushed`.

        Raises
        ------
        CodecError
            The codec raised an error, or its `nbytes` is not a valid number.
        """
        self._left = [residual.copy() for residual in self._residuals or ()]
        return [
            self._there_and_back(value, self._left[i] if self._left else None)
            for i, value in enumerate(self._values)
        ]

    def keep(self) -> None:
        """See `Pushed`."""
        for residual, left in zip(self._residuals or (), self._left, strict=True):
            np.copyto(residual, left)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """See `Pushed`."""
        yield
        self.keep()

    def _there_and_back(self, value: Array, residual: Array | None) -> Array:
        """Pack and unpack a value. The codec gets views, so it cannot change attributes of the arrays."""
        gradient = value.view()
        gradient.flags.writeable = False
        restored = np.empty(value.shape, np.float32)
        try:
            packed = np.empty(self._packed_bytes(value.size), np.uint8)
            self._codec.encode(gradient, None if residual is None else residual.view(), packed.view())
            self._codec.decode(packed.view(), restored.view())
        except (KVStoreError, MemoryError):
            raise
        except Exception as error:
            raise CodecError(
                f"codec {self._codec.name!r} raised {type(error).__name__} on key {self._key!r}: {error}"
            ) from error
        return restored

    def _packed_bytes(self, size: int) -> int:
        nbytes: Any = self._codec.nbytes(size)  # a user-defined class can return any object
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or not 0 <= nbytes < 2**47:
            raise CodecError(
                f"codec {self._codec.name!r} needs {nbytes!r} bytes for {size} elements of key "
                f"{self._key!r}: that is not a valid number of bytes"
            )
        return nbytes
