"""What cases of several claims have in common: keys and bytes, and the way to a peer's process as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, TypeVar

Shape = tuple[int, ...]
Own = TypeVar("Own", bound="Case")


class Case:
    """One line of the tables; `name` is unique, and what ``--only`` matches."""

    name: str

    #: Goals that cases of some claims have.
    goals: Any = ()
    most_us: float = 0.0
    tail: float = 0.0
    share: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls: type[Own], fields: dict[str, Any]) -> Own:
        return cls(**{name: _tuples(value) for name, value in fields.items()})


class KeyedCase(Case):
    """A case of float32 arrays, one for each key."""

    shapes: tuple[Shape, ...]

    @property
    def nbytes(self) -> int:
        """Payload of one value over all keys."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)

    @property
    def keys(self) -> list[int]:
        return list(range(len(self.shapes)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
