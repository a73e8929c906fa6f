"""Error feedback: the part of a gradient that a codec does not send is added to the next gradient of the key.

Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes
SignSGD", ICML 2019.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..arrays import pages
from ..arrays.grouping import Key, plain_key
from ..arrays.sparse import RowSparseArray
from ..errors import ArrayError, ConfigError, DTypeError, StateFileError
from ..kernels import cpu
from .codec import Codec
from .pushed import KernelSource, Pushed, PythonCodecSource

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

_FORMAT = "kvstore.residuals"
_MOST_SOURCES = 2**20


class Feedback:
    """The codec of a store, with one residual for each key and source.

    A source is the position of a value in the list of a push. A store that sums its own values first has one
    source.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._residuals: dict[tuple[Key, int], Array] = {}

    def follow(self, earlier: Feedback | None) -> Feedback:
        """Use the residuals of an earlier codec of the same name, and return self."""
        if earlier is not None and earlier.codec.name == self.codec.name:
            self._residuals = earlier._residuals
        return self

    def check(self, key: Key, values: Iterable[Any], dtype: np.dtype[Any]) -> None:
        """Raise an error unless the values of a key can be compressed.

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

    def pushed(self, key: Key, values: list[Array]) -> Pushed:
        """Return the values, which are summed as if they were packed and unpacked, with their residuals."""
        residuals = None
        if self.codec.feedback:
            residuals = [
                self._checked_residual(key, source, value.shape) for source, value in enumerate(values)
            ]
        if self.codec.compiled is not None:
            return KernelSource(self.codec.compiled, values, residuals)
        return PythonCodecSource(self.codec, key, values, residuals)

    def prepare(self, key: Key, shape: tuple[int, ...]) -> None:
        """Create the residual of a key for a store that sums its own values first."""
        if self.codec.feedback:
            self._checked_residual(key, 0, shape)

    def pack(self, key: Key, values: list[Array], packed: Array) -> None:
        """Pack the sum of values with a compiled codec; `packed` is a uint8 array."""
        assert self.codec.compiled is not None
        residual = self._checked_residual(key, 0, values[0].shape) if self.codec.feedback else None
        cpu.encode(*self.codec.compiled, values, residual, packed)

    def total(self, key: Key, values: list[Array]) -> Pushed:
        """Return the sum of values in the form of `pushed`."""
        summed = np.empty(values[0].shape, np.float32)
        cpu.reduce([(values, summed, [])])
        return self.pushed(key, [summed])

    def discard(self, key: Key) -> None:
        """Drop the residuals of a key."""
        for name in [name for name in self._residuals if name[0] == key]:
            del self._residuals[name]

    def residual(self, key: Key, source: int = 0) -> Array | None:
        """Return the live residual of a source of a key, or None if nothing was pushed."""
        return self._residuals.get((key, source))

    @property
    def nbytes(self) -> int:
        """Size of the residuals in bytes."""
        return sum(array.nbytes for array in self._residuals.values())

    def save(self, path: str) -> None:
        """Write all residuals, atomically."""
        import json

        from .. import tensor_file

        tensors = {f"residual/{source}/{key}": array for (key, source), array in self._residuals.items()}
        content = {
            "codec": self.codec.name,
            "config": self.codec.config(),
            "residuals": [[key, source] for key, source in self._residuals],
        }
        try:
            text = json.dumps(content)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the config of codec {self.codec.name!r} has values that JSON cannot represent: {error}"
            ) from error
        tensor_file.write_file(path, _FORMAT, text, tensors)

    def load(self, path: str, keys: Mapping[Key, Array]) -> None:
        """Read residuals that `save` wrote.

        Parameters
        ----------
        path : str
            The file.
        keys : mapping
            The keys of the store, each with an array of its shape and type.

        Raises
        ------
        StateFileError
            The file is damaged, has another format or codec, or has keys that the store does not have. The
            present residuals do not change.
        """
        from .. import tensor_file

        self._residuals = tensor_file.read_file(
            path, _FORMAT, lambda text, tensors: self._parsed_residuals(text, tensors, keys)
        )

    def _parsed_residuals(
        self, text: str, tensors: dict[str, Array], keys: Mapping[Key, Array]
    ) -> dict[tuple[Key, int], Array]:
        import json

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
            if isinstance(source, bool) or not 0 <= source < _MOST_SOURCES:
                raise StateFileError(f"a residual of key {key!r} belongs to value {source!r}")
            if like.dtype != np.float32:
                raise StateFileError(f"a residual of key {key!r}, which holds {like.dtype}")
            if array.shape != like.shape or array.dtype != np.float32:
                raise StateFileError(
                    f"the residual of key {key!r} is {array.dtype} {array.shape}, the key is {like.shape}"
                )
            found[key, source] = pages.copy(array)
        return found

    def _checked_residual(self, key: Key, source: int, shape: tuple[int, ...]) -> Array:
        residual = self._residuals.get((key, source))
        if residual is None:
            residual = self._residuals[key, source] = pages.zeros(shape, np.float32)
        return residual


def required_feedback(feedback: Feedback | None, what: str) -> Feedback:
    """Return the compression that is set.

    Raises
    ------
    ConfigError
        No compression is set.
    """
    if feedback is None:
        raise ConfigError(f"{what} needs gradient compression; call set_gradient_compression first")
    return feedback
