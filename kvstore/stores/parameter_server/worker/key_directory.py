"""The keys of a store on parameter servers, as one worker knows them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from ....arrays.element_types import dtype_named, name_of
from ....arrays.grouping import Group, Key, key_kind_error
from ....arrays.host import shape_template
from ....arrays.sparse import RowSparseArray
from ....errors import KeyKindError, KeyNotFoundError
from ....settings.definitions import is_side
from ...entry import Array
from ..protocol import messages as m
from ..protocol.messages import KeyEntry, KeySpec, Slice
from .client import WorkerClient


class DistKey:
    """A key: its type and shape, its slices, and the number of this worker's pushes into it."""

    __slots__ = (
        "dtype", "entry", "key", "like", "line", "number", "parts", "pushes", "row_size", "shape", "sparse"
    )  # fmt: skip

    def __init__(self, entry: KeyEntry) -> None:
        spec = entry.spec
        self.entry, self.key = entry, spec.key
        self.number = entry.number
        self.shape, self.dtype, self.sparse = tuple(spec.shape), dtype_named(spec.dtype), spec.sparse
        self.parts = entry.slices
        #: An array of the key's shape and type that uses no memory.
        self.like: Array = shape_template(self.shape, self.dtype)
        #: Elements of a row.
        self.row_size = math.prod(self.shape[1:])
        #: Elements of a line, see `KeyEntry.line`; a row of a table is one line.
        self.line = self.row_size if self.sparse else entry.line
        self.pushes = 0

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the value; of a table, with all its rows."""
        return self.size * self.dtype.itemsize

    @property
    def takes_rows(self) -> bool:
        """Whether rows can be pushed to this dense key."""
        return bool(self.shape) and self.size > 0

    @property
    def order(self) -> int:
        """Position among the keys of a call: int keys ascend, str keys follow the order of their init."""
        return self.key if isinstance(self.key, int) else self.number

    @property
    def is_spread(self) -> bool:
        """Whether its slices are on several servers."""
        return len({part.server for part in self.parts}) > 1

    def part_bytes(self, part: Slice) -> int:
        """Bytes of a slice; of a table, with all its rows."""
        return (part.stop - part.start) * self.dtype.itemsize * (self.row_size if self.sparse else 1)


class KeyDirectory:
    """All keys that this worker knows, or all side keys; it asks the scheduler for others."""

    def __init__(self, client: WorkerClient, sides: bool = False) -> None:
        self._client, self._sides = client, sides
        #: Keys by name.
        self.known: dict[Key, DistKey] = {}
        #: Keys that this worker has initialised.
        self.initialised: set[Key] = set()
        #: Counts the changes: keys that are new, dropped, or moved.
        self.changes = 0

    def get(self, key: Key) -> DistKey | None:
        """Return a key that this worker knows, or None."""
        return self.known.get(key)

    def find(self, key: Key) -> DistKey | None:
        """Return a key, also one that another worker has created; None if there is none."""
        known = self.known.get(key)
        if known is None:
            self.check_kind(key)
            answer = self._client.request_scheduler(
                partial(m.LookupRequest, keys=(key,), wait=False), f"key {key!r}"
            )
            self.add_entries(answer.entries)
            known = self.known.get(key)
        return known

    def find_or_raise(self, key: Key) -> DistKey:
        """Return a key, also one that another worker has created; KeyNotFoundError if there is none."""
        found = self.known.get(key) or self.find(key)
        if found is None:
            raise KeyNotFoundError(f"key {key!r} is not initialised; call init or broadcast with it first")
        return found

    def in_order(self, groups: list[Group]) -> list[tuple[DistKey, list[Any]]]:
        """Return keys in order: int keys ascend, str keys follow the order of their init, as updates do."""
        pairs = [(self.find_or_raise(key), arrays) for key, arrays in groups]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: pair[0].order)
        return pairs

    def all_keys(self) -> list[DistKey]:
        """Return all keys of the store that are ready, in the order of their init."""
        answer = self._client.request_scheduler(
            partial(m.LookupRequest, keys=(), wait=False), "the list of keys"
        )
        self.add_entries(answer.entries)
        return list(self)

    def wait_for(self, keys: tuple[Key, ...]) -> None:
        """Wait until keys are ready, or this worker becomes the initializer."""
        what = f"the init of {keys[0]!r}" if len(keys) == 1 else f"the init of {len(keys)} keys"
        lookup = partial(m.LookupRequest, keys=keys)
        answer = self._client.request_or_none(lookup, what, until=self._client.member.is_initializer)
        if answer is not None:
            self.add_entries(answer.entries)

    def keys_by_slice(self) -> dict[int, DistKey]:
        """Return the key of each slice."""
        return {part.id: key for key in self for part in key.parts}

    def slice_names(self) -> dict[int, str]:
        """Return a name for each slice: its key, with the number of the part if the key is divided."""
        return {id_: name for key in self for id_, name in key.entry.slice_names()}

    def name_of(self, slice_: int) -> str:
        """Return the key of a slice, for an error."""
        key = self.keys_by_slice().get(slice_)
        return "a key" if key is None else f"key {key.key!r}"

    def add_entries(self, entries: Iterable[KeyEntry]) -> None:
        """Add keys from the scheduler; known ones stay."""
        self.add_keys(DistKey(entry) for entry in entries if self._is_new(entry))

    def _is_new(self, entry: KeyEntry) -> bool:
        known = self.known.get(entry.spec.key)
        if is_side(entry.spec.key) != self._sides:
            return False
        return known is None or known.parts != entry.slices

    def add_keys(self, keys: Iterable[DistKey]) -> None:
        """Add keys that are new, or have moved."""
        for key in keys:
            self.changes += 1
            self.known[key.key] = key

    def check_kind(self, key: Key) -> None:
        """Raise KeyKindError if a key cannot be sent, or the store's keys are of the other kind."""
        if isinstance(key, str):
            _check_text(key)
        for other in self.known:
            if isinstance(other, str) != isinstance(key, str):
                raise key_kind_error(key, type(other))
            return

    def __iter__(self) -> Iterator[DistKey]:
        """In the order of their init."""
        return iter(sorted(self.known.values(), key=lambda known: known.number))


def _check_text(key: str) -> None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise KeyKindError(f"key {key!r} cannot be sent: it has a lone surrogate") from None
    if size > m.KEY_BYTES:
        raise KeyKindError(
            f"key {key[:40]!r}... has {size} bytes as UTF-8; stores on servers accept up to {m.KEY_BYTES}"
        )


def spec_of(key: Key, value: Array | RowSparseArray, whole: bool) -> KeySpec:
    """Describe a key by its first value; `whole` if it must not be spread over servers."""
    return KeySpec(key, tuple(value.shape), name_of(value.dtype), isinstance(value, RowSparseArray), whole)
