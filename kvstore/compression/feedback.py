"""Error feedback: what a codec left out of a gradient is added to the next one of the same key.

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes
SignSGD", ICML 2019.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import pages, tensor_file
from ..errors import ArrayError, ConfigError, DTypeError, StateFileError
from ..grouping import Key, plain_key
from ..kernels import cpu
from ..sparse import RowSparseArray
from .codec import Codec

Array = npt.NDArray[Any]

_FORMAT = "kvstore.residuals"


class Feedback:
    """The codec of a store with one residual for each key and source.

    A source is the place of a value in the list of a push; a store that sums its own values first has one.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._residuals: dict[tuple[Key, int], Array] = {}

    def follow(self, earlier: Feedback | None) -> Feedback:
        """Take over the residuals of an earlier codec of the same name, and return itself."""
        if earlier is not None and earlier.codec.name == self.codec.name:
            self._residuals = earlier._residuals
        return self

    def check(self, key: Key, values: Iterable[Any], dtype: np.dtype[Any]) -> None:
        """Raise unless values of a key can be compressed.

        Raises
        ------
        DTypeError
            The key is not float32.
        ArrayError
            A value is row-sparse.
        """
        if dtype != np.float32:
            raise DTypeError(
                f"key {key!r} holds {dtype}; {self.codec.name!r} compresses float32 gradients only, "
                "keep other keys in a store without compression"
            )
        if any(isinstance(value, RowSparseArray) for value in values):
            raise ArrayError(
                f"a row-sparse value of key {key!r} is not compressed; keep such keys in a store "
                "without compression"
            )

    def coded(self, key: Key, values: list[Array]) -> cpu.Coded | list[Array]:
        """Return what the kernels take for values that count as packed and unpacked, with their residuals.

        For a codec without kernels: new arrays, packed and unpacked here.
        """
        compiled = self.codec.compiled
        residuals = self._of(key, values) if self.codec.feedback else None
        if compiled is not None:
            return cpu.Coded(*compiled, values[0].size, values, residuals)
        return [
            self._there_and_back(value, None if residuals is None else residuals[i])
            for i, value in enumerate(values)
        ]

    def pack(self, key: Key, values: list[Array], packed: Array) -> None:
        """Pack the sum of values, for a codec that is compiled; `packed` is uint8."""
        assert self.codec.compiled is not None
        residual = self._of(key, values[:1])[0] if self.codec.feedback else None
        cpu.encode(*self.codec.compiled, values, residual, packed)

    def restored(self, key: Key, values: list[Array]) -> Array:
        """Return the sum of values, packed and unpacked; for a codec that is not compiled."""
        total = np.empty(values[0].shape, np.float32)
        cpu.reduce([(values, total, [])])
        return self._there_and_back(total, self._of(key, [total])[0] if self.codec.feedback else None)

    def forget(self, key: Key) -> None:
        """Drop the residuals of a key."""
        for name in [name for name in self._residuals if name[0] == key]:
            del self._residuals[name]

    def residual(self, key: Key, source: int = 0) -> Array | None:
        """Return the live residual of a key's source; None where nothing was pushed."""
        return self._residuals.get((key, source))

    @property
    def nbytes(self) -> int:
        """Memory of the residuals, in bytes."""
        return sum(array.nbytes for array in self._residuals.values())

    def save(self, path: str) -> None:
        """Write all residuals, atomically."""
        tensors = {f"residual/{source}/{key}": array for (key, source), array in self._residuals.items()}
        content = {
            "codec": self.codec.name,
            "config": self.codec.config(),
            "residuals": [[key, source] for key, source in self._residuals],
        }
        tensor_file.write(path, _FORMAT, json.dumps(content), tensors)

    def load(self, path: str, keys: Mapping[Key, Array]) -> None:
        """Read residuals that `save` wrote; those in place stay if the file is not usable.

        Parameters
        ----------
        path : str
        keys : mapping
            The store's keys, each with an array of its shape and type.

        Raises
        ------
        StateFileError
            The file is damaged or foreign, of another codec, or of keys that the store does not have.
        """
        self._residuals = tensor_file.read(
            path, _FORMAT, lambda text, tensors: self._parsed(text, tensors, keys)
        )

    def _parsed(
        self, text: str, tensors: dict[str, Array], keys: Mapping[Key, Array]
    ) -> dict[tuple[Key, int], Array]:
        content = json.loads(text)
        if content["codec"] != self.codec.name:
            raise StateFileError(
                f"residuals of codec {content['codec']!r}, the store has {self.codec.name!r}"
            )
        found = {}
        for key, source in content["residuals"]:
            plain_key(key)
            array, like = tensors[f"residual/{source:d}/{key}"], keys.get(key)
            if like is None:
                raise StateFileError(f"a residual of key {key!r}, which is not initialised here")
            if array.shape != like.shape or array.dtype != np.float32:
                raise StateFileError(
                    f"the residual of key {key!r} is {array.dtype} {array.shape}, the key is {like.shape}"
                )
            found[key, source] = pages.copy(array)
        return found

    def _of(self, key: Key, values: list[Array]) -> list[Array]:
        for source, value in enumerate(values):
            if (key, source) not in self._residuals:
                self._residuals[key, source] = pages.zeros(value.shape, np.float32)
        return [self._residuals[key, source] for source in range(len(values))]

    def _there_and_back(self, value: Array, residual: Array | None) -> Array:
        packed = np.empty(self.codec.nbytes(value.size), np.uint8)
        restored = np.empty(value.shape, np.float32)
        self.codec.encode(value, residual, packed)
        self.codec.decode(packed, restored)
        return restored


def required(feedback: Feedback | None, what: str) -> Feedback:
    """Return the compression that is set.

    Raises
    ------
    ConfigError
        None is set.
    """
    if feedback is None:
        raise ConfigError(f"{what} needs gradient compression; call set_gradient_compression first")
    return feedback
