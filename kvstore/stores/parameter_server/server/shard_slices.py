"""The slices of one store on one server: which are defined, have a value, and have changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ....arrays.element_types import dtype_named
from ....errors import KeyNotFoundError
from ..protocol.messages import Key, KeyEntry, Slice
from ..transport.shared_buffers import SharedValues
from .dense import DenseKey, DenseSlice
from .sparse import TableSlice


class ShardSlices:
    """Slices by their numbers.

    `memory` is for dense values, so that workers of this machine can read them.
    """

    def __init__(self, store: int, server: int, memory: SharedValues | None) -> None:
        self.store, self.server, self.memory = store, server, memory
        self.entries: dict[int, KeyEntry] = {}  # by the number of the key's first slice
        self._newest: dict[Key, int] = {}  # the first slice of each key in its present placement
        self.held: dict[int, DenseSlice | TableSlice] = {}
        self.ready: set[int] = set()
        #: Slices that differ from the last snapshot.
        self.changed: set[int] = set()

    def add_slices(self, entries: Sequence[KeyEntry]) -> None:
        """Add slices that workers will use; known slices stay."""
        for entry in entries:
            key, first = entry.spec.key, entry.slices[0].id
            self._newest[key] = max(first, self._newest.get(key, first))
            mine = [piece for piece in entry.slices if piece.server == self.server]
            if mine and mine[0].id not in self.held:
                self.entries[mine[0].id] = entry
                make = self._make_tables if entry.spec.sparse else self._make_dense
                make(entry, mine)

    def current_entries(self) -> list[KeyEntry]:
        """Return the keys that have slices here, in their present placement."""
        return [
            entry for entry in self.entries.values() if entry.slices[0].id == self._newest[entry.spec.key]
        ]

    def _make_dense(self, entry: KeyEntry, mine: list[Slice]) -> None:
        spec = entry.spec
        whole = len(mine) == len(entry.slices)
        key = DenseKey(spec.key, tuple(spec.shape), dtype_named(spec.dtype), whole, entry.line)
        key.slices = [DenseSlice(piece.id, key, piece.start, piece.stop) for piece in mine]
        self.held.update({part.id: part for part in key.slices})

    def _make_tables(self, entry: KeyEntry, mine: list[Slice]) -> None:
        spec = entry.spec
        dtype = dtype_named(spec.dtype)
        for piece in mine:
            shape = (piece.stop - piece.start, *spec.shape[1:])
            self.held[piece.id] = TableSlice(spec.key, piece.start, shape, dtype, len(entry.slices) == 1)

    def find_slice(self, slice: int) -> DenseSlice | TableSlice:
        """Return a slice; KeyNotFoundError: this server has none with that number."""
        try:
            return self.held[slice]
        except KeyError:
            raise KeyNotFoundError(
                f"server {self.server} has no slice {slice} of store {self.store}; was its key forgotten?"
            ) from None

    def set_ready(self, slice: int) -> None:
        """Record that a slice has a value, which was assigned."""
        self.ready.add(slice)
        self.changed.add(slice)

    def withdraw_plans(self) -> None:
        """Have the next round of each slice read the settings again."""
        for held in self.held.values():
            held.withdraw_plan()

    def note_changed(self) -> None:
        """Record the slices that rounds in C have changed."""
        self.changed.update(slice for slice, held in self.held.items() if held.take_changed())

    def forget_slices(self, slices: Iterable[int]) -> None:
        """Drop slices; unknown ones are no error."""
        for slice in slices:
            held = self.held.pop(slice, None)
            if isinstance(held, DenseSlice):
                self._give_back(held)
            self.entries.pop(slice, None)
            self.ready.discard(slice)
            self.changed.discard(slice)

    def _give_back(self, part: DenseSlice) -> None:
        part.of.slices.remove(part)
        part.free_memory(self.memory)
