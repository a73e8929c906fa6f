"""The interface of codecs, and the registry of codecs by name."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from ..errors import ArgumentError, ConfigError, KVStoreError, nearest
from ..kernels import cpu

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
Klass = TypeVar("Klass", bound="type[Codec]")

_registry: dict[str, type[Codec]] = {}


class Codec:
    """Base class of codecs, also of user-defined ones. A codec packs float32 gradients.

    A codec is created from keyword arguments, and `config` returns them. Processes send a codec to each other
    as its name and its config.

    Examples
    --------
    >>> @register
    ... class Int8(Codec):
    ...     name = "int8"
    ...     def nbytes(self, size):
    ...         return 4 + size
    ...     def encode(self, gradient, residual, packed): ...
    ...     def decode(self, packed, gradient): ...
    """

    #: Name of the codec, the ``type`` of `KVStore.set_gradient_compression`.
    name: ClassVar[str]
    #: Whether the store keeps a residual: the part that is not sent is added to the next gradient of the key.
    feedback: ClassVar[bool] = False

    def nbytes(self, size: int) -> int:
        """Return the number of bytes of `size` packed elements."""
        raise NotImplementedError

    def encode(self, gradient: Array, residual: Array | None, packed: Array) -> None:
        """Pack a gradient.

        Parameters
        ----------
        gradient : numpy.ndarray
            float32, C-contiguous, of any shape. Do not change it.
        residual : numpy.ndarray or None
            float32, with the same number of elements. It contains the parts of earlier gradients that were
            not sent; add it to the gradient. Write the part that this call does not send into it. None for a
            codec without `feedback`.
        packed : numpy.ndarray
            uint8, with `nbytes` elements. Write the packed gradient into it.
        """
        raise NotImplementedError

    def decode(self, packed: Array, gradient: Array) -> None:
        """Unpack `packed` and write the result to `gradient`, a C-contiguous float32 array."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Return keyword arguments that create an equal codec, with plain values that JSON can represent."""
        return {}

    @property
    def compiled(self) -> tuple[int, float] | None:
        """Code and threshold for compiled kernels with the same result, or None without such kernels."""
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and self.name == other.name and self.config() == other.config()

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({settings})"


#: The methods that define how a gradient is packed.
_FORMAT = ("nbytes", "encode", "decode")


class CompiledCodec(Codec):
    """A codec of the compiled kernels."""

    _code: ClassVar[str]
    _threshold = 0.0

    def nbytes(self, size: int) -> int:
        """Return the number of bytes of `size` packed elements."""
        return cpu.encoded_bytes(cpu.coding(self._code), size)

    def encode(self, gradient: Array, residual: Array | None, packed: Array) -> None:
        """Pack a gradient; see `Codec.encode`."""
        cpu.encode(cpu.coding(self._code), self._threshold, [gradient], residual, packed)

    def decode(self, packed: Array, gradient: Array) -> None:
        """Unpack a gradient; see `Codec.decode`."""
        cpu.decode(cpu.coding(self._code), self._threshold, [packed], gradient)

    def config(self) -> dict[str, Any]:
        """Return the threshold, if there is one."""
        return {"threshold": self._threshold} if "_threshold" in vars(self) else {}

    @property
    def compiled(self) -> tuple[int, float] | None:
        """Code and threshold for the kernels; None for a subclass with its own format."""
        own = type(self)
        if any(getattr(own, name) is not getattr(CompiledCodec, name) for name in _FORMAT):
            return None
        return cpu.coding(self._code), self._threshold


def register(klass: Klass) -> Klass:
    """Register a codec by its `name`. Usable as a decorator.

    Raises
    ------
    ArgumentError
        The argument is not a subclass of `Codec`, or the class has no name.

    Warns
    -----
    UserWarning
        The name is already registered. The new class replaces the old one.
    """
    if not _is_codec(klass):
        raise ArgumentError(f"register takes a subclass of Codec, not {klass!r}")
    name = getattr(klass, "name", None)
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"{klass.__qualname__} has no name; give the class a `name`")
    if name in _registry:
        warnings.warn(
            f"codec {name!r}: {klass.__qualname__} replaces {_registry[name].__qualname__}", stacklevel=2
        )
    _registry[name] = klass
    return klass


def _is_codec(klass: Any) -> bool:
    return inspect.isclass(klass) and issubclass(klass, Codec)


def names() -> list[str]:
    """Return the names of all codecs."""
    return sorted(_registry)


def create(params: Any) -> Codec:
    """Create a codec from the parameters of `KVStore.set_gradient_compression`.

    Parameters
    ----------
    params : dict
        The exact name of the codec and its keyword arguments: ``{"type": "2bit", "threshold": 0.5}``.

    Raises
    ------
    ArgumentError
        `params` is not a dict.
    ConfigError
        The type is missing or unknown, a parameter is unknown, or the codec does not accept a value.
    """
    if not isinstance(params, dict):
        raise ArgumentError(f"compression parameters are a dict like {{'type': '2bit'}}, not {params!r}")
    name = params.get("type")
    klass = _registry.get(name) if isinstance(name, str) else None
    if klass is None:
        hint = nearest(str(name), _registry)
        raise ConfigError(
            f"unknown compression type {name!r}{hint}; known types: {', '.join(sorted(_registry))}"
        )
    settings = {key: value for key, value in params.items() if key != "type"}
    parameters = inspect.signature(klass).parameters
    unknown = sorted(map(str, set(settings) - set(parameters)))
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        named = ", ".join(f"{one!r}{nearest(one, parameters)}" for one in unknown)
        known = f"its parameters are {', '.join(parameters)}" if parameters else "it has none"
        raise ConfigError(f"codec {name!r} has no parameter {named}; {known}")
    try:
        return klass(**settings)
    except KVStoreError:
        raise
    except Exception as error:
        raise ConfigError(f"codec {name!r} does not accept {settings!r}: {error}") from error


def as_float32(name: str, threshold: Any) -> float:
    """Round the threshold of a codec to float32, the type of the gradients that are compared with it.

    Raises
    ------
    ConfigError
        The threshold is not a number, or is NaN.
    """
    try:
        value = float(threshold)
    except Exception:  # any exception of a `__float__`
        raise ConfigError(f"threshold of {name!r} must be a number, got {threshold!r}") from None
    if math.isnan(value):
        raise ConfigError(f"threshold of {name!r} must be a number, got {value}")
    with np.errstate(over="ignore"):
        return float(np.float32(value))
