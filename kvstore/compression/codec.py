"""What a codec is, and codecs by name."""

from __future__ import annotations

import inspect
import math
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

import numpy as np

from ..errors import ArgumentError, ConfigError, KVStoreError, closest
from ..kernels import cpu

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
Klass = TypeVar("Klass", bound="type[Codec]")

_registry: dict[str, type[Codec]] = {}


class Codec:
    """How float32 gradients are packed; for codecs of your own.

    A codec is made from keyword arguments, which `config` gives back: codecs travel as name and config.

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

    #: Literal name, the ``type`` of `KVStore.set_gradient_compression`.
    name: ClassVar[str]
    #: Whether what the packed form leaves out is kept, and added to the next gradient of the same key.
    feedback: ClassVar[bool] = False

    def nbytes(self, size: int) -> int:
        """Bytes that `size` elements take when packed."""
        raise NotImplementedError

    def encode(self, gradient: Array, residual: Array | None, packed: Array) -> None:
        """Pack a gradient.

        Parameters
        ----------
        gradient : numpy.ndarray
            float32, C-contiguous, of any shape. Only read.
        residual : numpy.ndarray or None
            float32, as many elements, changed in place: what earlier gradients have left out is sent too, and
            what this one leaves out stays. None for a codec without `feedback`.
        packed : numpy.ndarray
            uint8, of `nbytes` elements. Written.
        """
        raise NotImplementedError

    def decode(self, packed: Array, gradient: Array) -> None:
        """Write what `packed` stands for to `gradient`, float32, C-contiguous."""
        raise NotImplementedError

    def config(self) -> dict[str, Any]:
        """Keyword arguments that make an equal codec; names and plain values only."""
        return {}

    @property
    def compiled(self) -> tuple[int, float] | None:
        """Code and threshold of the compiled kernels that do the same; None: there are none."""
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Codec) and self.name == other.name and self.config() == other.config()

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value!r}" for key, value in self.config().items())
        return f"{type(self).__name__}({settings})"


#: What says how a gradient is packed.
_FORMAT = ("nbytes", "encode", "decode")


class CompiledCodec(Codec):
    """A codec of the compiled kernels."""

    _code: ClassVar[str]
    _threshold = 0.0

    def nbytes(self, size: int) -> int:
        """Bytes that `size` elements take when packed."""
        return cpu.encoded_bytes(cpu.coding(self._code), size)

    def encode(self, gradient: Array, residual: Array | None, packed: Array) -> None:
        """Pack a gradient; see `Codec.encode`."""
        cpu.encode(cpu.coding(self._code), self._threshold, [gradient], residual, packed)

    def decode(self, packed: Array, gradient: Array) -> None:
        """Unpack; see `Codec.decode`."""
        cpu.decode(cpu.coding(self._code), self._threshold, [packed], gradient)

    @property
    def compiled(self) -> tuple[int, float] | None:
        """Code and threshold for the kernels; None for a subclass that packs in its own way."""
        own = type(self)
        if any(getattr(own, name) is not getattr(CompiledCodec, name) for name in _FORMAT):
            return None
        return cpu.coding(self._code), self._threshold


def register(klass: Klass) -> Klass:
    """Make a codec known under its `name`; usable as a decorator.

    Raises
    ------
    ArgumentError
        Not a subclass of `Codec` with a name.

    Warns
    -----
    UserWarning
        The name was taken; the new class wins.
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
    """Names of all codecs."""
    return sorted(_registry)


def create(params: Any) -> Codec:
    """Make a codec from the parameters of `KVStore.set_gradient_compression`.

    Parameters
    ----------
    params : dict
        ``{"type": "2bit", "threshold": 0.5}``: the codec's name, which is literal, and its keyword arguments.

    Raises
    ------
    ArgumentError
        Not a dict.
    ConfigError
        No type, an unknown type, an unknown parameter, or a value that the codec does not take.
    """
    if not isinstance(params, dict):
        raise ArgumentError(f"compression parameters are a dict like {{'type': '2bit'}}, not {params!r}")
    name = params.get("type")
    klass = _registry.get(name) if isinstance(name, str) else None
    if klass is None:
        near = closest(str(name).lower(), _registry)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise ConfigError(f"compression type is {name!r}{hint}; known are {', '.join(sorted(_registry))}")
    settings = {key: value for key, value in params.items() if key != "type"}
    parameters = inspect.signature(klass).parameters
    unknown = sorted(map(str, set(settings) - set(parameters)))
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ConfigError(f"codec {name!r} has no parameter {', '.join(unknown)}")
    try:
        return klass(**settings)
    except KVStoreError:
        raise
    except Exception as error:
        raise ConfigError(f"codec {name!r} does not take {settings!r}: {error}") from error


def as_float32(name: str, threshold: Any) -> float:
    """Round a codec's threshold to float32, in which gradients are compared with it.

    Raises
    ------
    ConfigError
        Not a number, or NaN.
    """
    try:
        value = float(threshold)
    except Exception:  # whatever a `__float__` raises
        raise ConfigError(f"threshold of {name!r} must be a number, got {threshold!r}") from None
    if math.isnan(value):
        raise ConfigError(f"threshold of {name!r} must be a number, got {value}")
    with np.errstate(over="ignore"):
        return float(np.float32(value))
