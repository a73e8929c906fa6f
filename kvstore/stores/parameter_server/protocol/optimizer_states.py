"""Optimizer states of slices, as servers store them, and of whole keys, as files store them.

The state of a slice travels in the format of `kvstore.optimizer.states`: flat arrays for a slice of a dense
key; for a slice of a table the ids of the rows, the state of all other rows, and the rows' states. A rule
that needs whole keys has its state with the first slice of a key.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ....arrays.grouping import Key
from ....errors import KVStoreError, StateFileError
from ....optimizer import Optimizer, Updater, states
from ....optimizer.builtin import arrays_of, map_state
from ....optimizer.optimizer import State as Tree
from ...entry import Array
from ...row_table import spread_tree, works_by_rows
from ...rows import Ids
from .messages import KeyEntry, Slice


class PartState(NamedTuple):
    """The optimizer state of one slice."""

    #: Whether there is a state; before the first update there is none.
    known: bool
    tree: Tree
    #: Of a table: the rows of `tree`, None for all, and the state of each other row.
    ids: Ids | None
    blank: Tree
    updates: int
    num_update: int


NOTHING = PartState(False, None, None, None, 0, 0)


def needs_whole_keys(optimizer: Optimizer | None, sparse: bool = False) -> bool:
    """Return whether a rule needs all of a key on one server: it computes norms, or is defined by a user."""
    if optimizer is None or optimizer.fused:
        return False
    return not (sparse and works_by_rows(optimizer))


# ---------------------------------------------------------------------------------------------- one slice


def pack_part(key: Key, part: PartState, table: bool, optimizer: Optimizer) -> bytes:
    """Return the state of a slice as bytes."""
    content = {key: (part.ids, part.blank, part.tree) if table else part.tree} if part.known else {}
    return states.pack_states(content, _with_counts(optimizer, {key: part.updates}, part.num_update), False)


def unpack_part(key: Key, data: bytes, table: bool, optimizer: Optimizer) -> PartState:
    """Return the state that was packed; StateFileError: damaged, or of another key or optimizer."""
    content = states.unpack_states(data)
    rule = type(optimizer).__name__.lower()
    if content.rule != rule:
        raise StateFileError(f"a state of optimizer {content.rule!r}, and the store's is {rule!r}")
    if content.states.keys() - {key}:
        raise StateFileError(f"a state of key {next(iter(content.states))!r} where that of {key!r} belongs")
    updates = content.counts.get(key, 0)
    if key not in content.states:
        return NOTHING._replace(updates=updates, num_update=content.num_update)
    tree: Any = content.states[key]
    if not table:
        return PartState(True, tree, None, None, updates, content.num_update)
    if not isinstance(tree, tuple) or len(tree) != 3:
        raise StateFileError(f"the state of key {key!r} is not one of a table")
    ids, blank, tree = tree
    return PartState(True, tree, ids, blank, updates, content.num_update)


def _with_counts(optimizer: Optimizer, counts: Mapping[Key, int], num_update: int) -> Optimizer:
    other = copy.copy(optimizer)
    other._index_update_count = {key: n for key, n in counts.items() if n}
    other.num_update = num_update
    return other


# --------------------------------------------------------------------------------------------- whole keys


def join_states(entries: Iterable[KeyEntry], parts: Mapping[int, bytes], optimizer: Optimizer) -> Updater:
    """Join states of slices; the updater's `save` writes the same file as a store of one process.

    `entries` are all keys of the store, `parts` by slice the results of `StoreShard.fetch_state`; `optimizer`
    is not changed. Raises StateFileError if a part is damaged, KVStoreError if some slices of a key have been
    updated and others not yet, or if a table is too large for a file.
    """
    trees: dict[Key, Tree] = {}
    counts: dict[Key, int] = {}
    num_update = optimizer.begin_num_update
    for entry in entries:
        key, sparse = entry.spec.key, entry.spec.sparse
        found = [unpack_part(key, parts[part.id], sparse, optimizer) for part in entry.slices]
        counts[key] = max((part.updates for part in found), default=0)
        num_update = max([num_update, *(part.num_update for part in found)])
        if any(part.known for part in found):
            trees[key] = _joined_state(entry, found, optimizer)
    updater = Updater(_with_counts(optimizer, counts, num_update))
    updater.states = trees
    return updater


def _joined_state(entry: KeyEntry, parts: list[PartState], optimizer: Optimizer) -> Tree:
    spec = entry.spec
    if needs_whole_keys(optimizer, spec.sparse):
        return next(part.tree for part in parts if part.known)
    if not all(part.known for part in parts):
        raise KVStoreError(
            f"some slices of key {spec.key!r} have an optimizer state and others have none yet; save when "
            "all rounds are complete"
        )
    if spec.sparse:
        try:
            whole = [_all_rows(piece, part) for piece, part in zip(entry.slices, parts, strict=True)]
            return _join_arrays(whole, None)
        except (MemoryError, OverflowError) as error:
            raise KVStoreError(
                f"the states of table {spec.key!r} with all its {spec.shape[0]} rows do not fit the memory "
                "of this process"
            ) from error
    return _join_arrays([part.tree for part in parts], tuple(spec.shape))


def _all_rows(piece: Slice, part: PartState) -> Tree:
    """Return the state of every row of a slice."""
    if part.ids is None:
        return part.tree
    order = part.ids, np.arange(len(part.ids), dtype=np.int64)
    return spread_tree(part.tree, part.blank, order, piece.stop - piece.start)


def _join_arrays(trees: list[Tree], shape: tuple[int, ...] | None) -> Tree:
    """Join the states of consecutive slices, with arrays of `shape`; None: rows after rows."""
    columns = zip(*(arrays_of(tree) for tree in trees), strict=True)
    made = (np.concatenate(column) if len(column) > 1 else column[0] for column in columns)
    return _with_arrays(trees[0], (array if shape is None else array.reshape(shape) for array in made))


def _with_arrays(tree: Tree, arrays: Iterator[Array]) -> Tree:
    """Return a state of the same structure as `tree` with other arrays."""
    made: Tree = map_state(tree, lambda _: next(arrays))
    return made


def split_states(entries: Iterable[KeyEntry], updater: Updater) -> dict[int, bytes]:
    """Divide the loaded states of an updater into those of slices, for `StoreShard.put_state`.

    Every slice has a result: a key without a state begins without one.
    """
    return {
        part.id: pack_part(
            entry.spec.key, _part_of(entry, part, updater), entry.spec.sparse, updater.optimizer
        )
        for entry in entries
        for part in entry.slices
    }


def _part_of(entry: KeyEntry, piece: Slice, updater: Updater) -> PartState:
    spec, optimizer = entry.spec, updater.optimizer
    updates = optimizer._index_update_count.get(spec.key, 0)
    if spec.key not in updater.states:
        return NOTHING._replace(updates=updates, num_update=optimizer.num_update)
    tree = updater.states[spec.key]
    if needs_whole_keys(optimizer, spec.sparse):
        if piece.start:
            return NOTHING._replace(updates=updates, num_update=optimizer.num_update)
    else:
        tree = _with_arrays(tree, (_slice_of(array, piece, spec.sparse) for array in arrays_of(tree)))
    return PartState(True, tree, None, None, updates, optimizer.num_update)


def _slice_of(array: Array, piece: Slice, sparse: bool) -> Array:
    return (array if sparse else array.reshape(-1))[piece.start : piece.stop]
