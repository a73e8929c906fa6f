"""What is pushed to a key of a store that compresses: packed when it is summed, and not before."""

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
        """Return what the kernels sum; residuals are used up by that, or by `keep`."""

    def keep(self) -> None:
        """Say that the sum has been applied."""

    def guarded(self) -> Any:
        """Return a context that has the residuals as before if its body fails, and keeps them if not."""


class KernelSource:
    """For a codec of the kernels, which use residuals up as they sum, and then do not fail."""

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
    """For a codec of a user: packed and unpacked here, with copies of the residuals."""

    def __init__(self, codec: Codec, key: Key, values: list[Array], residuals: list[Array] | None) -> None:
        self._codec, self._key, self._values, self._residuals = codec, key, values, residuals
        self._left: list[Array] = []

    def sources(self) -> list[Array]:
        """See `Pushed`.

        Raises
        ------
        CodecError
            The codec raised, or says that it needs a number of bytes that is none.
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
        """Pack and unpack. The codec gets views: what it does to their attributes is its own affair."""
        gradient = value.view()
        gradient.flags.writeable = False
        restored = np.empty(value.shape, np.float32)
        try:
            packed = np.empty(self._nbytes(value.size), np.uint8)
            self._codec.encode(gradient, None if residual is None else residual.view(), packed.view())
            self._codec.decode(packed.view(), restored.view())
        except (KVStoreError, MemoryError):
            raise
        except Exception as error:
            raise CodecError(
                f"codec {self._codec.name!r} raised {type(error).__name__} on key {self._key!r}: {error}"
            ) from error
        return restored

    def _nbytes(self, size: int) -> int:
        nbytes: Any = self._codec.nbytes(size)  # whatever it is, in a class of a user
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or not 0 <= nbytes < 2**47:
            raise CodecError(
                f"codec {self._codec.name!r} needs {nbytes!r} bytes for {size} elements of key "
                f"{self._key!r}: that is no number of bytes"
            )
        return nbytes
