"""Dense keys on a server: the values of slices, and their updates by complete rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy as np

from ....arrays import pages
from ....arrays.grouping import Key
from ....arrays.sparse import RowSparseArray, trusted_rows
from ....errors import DTypeError, KeyNotFoundError, ShapeError
from ....kernels import cpu
from ....optimizer import SGLD
from ....optimizer.builtin import ElementwiseOptimizer, arrays_of, map_state
from ...entry import Array
from ...row_table import undo_on_error
from ...rows import merge_rows, sum_rows
from ..native._native import SliceValue
from ..protocol.optimizer_states import NOTHING, PartState, needs_whole_keys
from ..protocol.payload_bytes import SHARED_BYTES
from ..transport.shared_buffers import SharedBlock, SharedValues
from .optimizer import OptimizerState, OptimizerVersion, check_form, refuse_parts
from .payload import (
    SlicePayload,
    SliceUpdate,
    kernel_sources,
    not_kept,
    plain_elements,
    some_rows,
    usual_summands,
)


class DenseKey:
    """A dense key with some or all of its slices on this server."""

    def __init__(
        self, key: Key, shape: tuple[int, ...], dtype: np.dtype[Any], whole: bool, line: int
    ) -> None:
        self.key, self.shape, self.dtype, self.whole = key, shape, dtype, whole
        self.size = math.prod(shape)
        #: Elements of a line, the unit of pushed rows: see `KeyEntry.line`.
        self.line = line
        #: The slices on this server, in their order.
        self.slices: list[DenseSlice] = []
        #: State of a rule that needs the whole key.
        self.state = OptimizerState()
        self._memory: tuple[Array, SharedBlock | None] | None = None
        self._values: SharedValues | None = None

    def memory_for(
        self, part: DenseSlice, memory: SharedValues | None
    ) -> tuple[Array, SharedBlock | None, int]:
        """Return memory for a slice: a flat array, its shared block if any, and its offset in the block."""
        if not self.whole:
            array, block = allocate_value(part.size, self.dtype, memory)
            return array, block, 0
        if self._memory is None:
            self._memory, self._values = allocate_value(self.size, self.dtype, memory), memory
        array, block = self._memory
        return array[part.start : part.stop], block, part.start * self.dtype.itemsize

    def whole_value(self) -> Array:
        """Return the live value in the key's shape; only of a whole key."""
        assert self._memory is not None
        for part in self.slices:
            part.move_back(self._values)
        return self._memory[0].reshape(self.shape)


class DenseSlice(SliceValue):
    """Elements `start` to `stop` of a key: a value, the state of its updates, and their copies."""

    __slots__ = ("_copied", "_copy", "_had_state", "_kept", "id", "of", "start", "state", "stop")

    def __init__(self, id: int, of: DenseKey, start: int, stop: int) -> None:
        self.id, self.of, self.start, self.stop = id, of, start, stop
        self.state = OptimizerState()
        #: Copy of the value before the last round, for reads after another server has lost that round.
        self._copy: Array | None = None
        self._copied = -1
        #: Copies of the state's arrays before that round, and whether there was a state.
        self._kept: tuple[Array, ...] | None = None
        self._had_state = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def key(self) -> Key:
        """The key of this slice."""
        return self.of.key

    def state_for(self, settings: OptimizerVersion) -> OptimizerState:
        """Return the state for updates: the slice's, or that of the whole key."""
        return self.of.state if needs_whole_keys(settings.optimizer) else self.state

    def live_value(self) -> Array:
        """Return the value; KeyNotFoundError: there is none yet."""
        value: Array | None = self.value
        if value is None:
            raise KeyNotFoundError(f"slice {self.id} of key {self.of.key!r} has no value yet")
        return value

    def ensure_memory(self, memory: SharedValues | None) -> Array:
        """Return memory for the value, which is allocated if there is none."""
        if self.value is None:
            self._set_memory(0, memory, *self.of.memory_for(self, memory))
        return self.live_value()

    def _set_memory(
        self, number: int, memory: SharedValues | None, array: Array, block: SharedBlock | None, start: int
    ) -> None:
        """Give a value buffer its memory, which begins `start` bytes after its block."""
        dtype = cpu.dtype_number(array.dtype)
        if block is None or memory is None:
            self.set_memory(number, array, dtype)
            return
        place = block.segment, block.offset + start
        lock = memory.seqlock_word(*place) if array.nbytes >= SHARED_BYTES else None
        self.set_memory(number, array, dtype, block, *place, lock)

    def keep_copy(self, round: int) -> None:
        """Copy the value before this round; without memory for it there is no copy."""
        value = self.live_value()
        try:
            self._copy = pages.empty((self.size,), value.dtype) if self._copy is None else self._copy
        except MemoryError:
            return
        np.copyto(self._copy, value)
        self._copied = round - 1

    def memory_for_sum(self, memory: SharedValues | None) -> tuple[Array, tuple[int, int] | None] | None:
        """Return memory for a sum that leaves the value unchanged, and its place; None: there is none."""
        number = 1 - self.current
        if self.buffer(number).array is None:
            try:
                self._set_memory(number, memory, *allocate_value(self.size, self.of.dtype, memory), 0)
            except MemoryError:
                return None
        buffer = self.buffer(number)
        return buffer.array, buffer.place

    def move_back(self, memory: SharedValues | None) -> None:
        """Move the value back to the memory that it shares with the other slices of its key."""
        home = self.buffer(0)  # this access computes a value that is packed
        if self.current == 0:
            return
        with mark_writing(memory, [home.place]):
            np.copyto(home.array, self.live_value())
        self.use_first_buffer()

    def free_memory(self, memory: SharedValues | None) -> None:
        """Release all memory, except memory that the key's other slices use."""
        home, away = self.blocks
        self.clear()
        if memory is None:
            return
        if away is not None:
            memory.free(away)
        if home is not None and not (self.of.whole and self.of.slices):
            memory.free(home)

    def past_value(self, round: int) -> Array:
        """Return the value after a round; KVStoreError: it is not stored."""
        if self.before == round:
            before: Array = self.buffer(1 - self.current).array
            return before
        if self._copy is None or self._copied != round:
            raise not_kept(self.of.key, round)
        return self._copy

    def plan_update(self, settings: OptimizerVersion, clock: int) -> tuple[Any, ...]:
        """Prepare one update: rule, parameters, master, states as `Updater.plan`, and the counts after it."""
        key, weight = self.of.key, self.live_value()
        kind, params, master, states = self.state.begin_update(settings, key, clock).plan(key, weight)
        if isinstance(settings.optimizer, SGLD):  # its noise depends on the position in the whole tensor
            params = (*params, self.start)
        return kind, params, master, states, self.state.current_counts(key)

    def count_update(
        self, settings: OptimizerVersion, version: int, plan: tuple[Any, ...], kept_after: int = -1
    ) -> None:
        """Count a prepared update; if the next updates have equal parameters, plan them for C.

        `kept_after`: the round before it, if its states were copied.
        """
        rule, params, master, states, counts = plan
        optimizer = settings.optimizer
        self.note_kept(kept_after, self.state)
        self.state.set_counts(counts)
        repeated = isinstance(optimizer, ElementwiseOptimizer) and optimizer.is_repeated()
        if repeated and master is None and counts[0] > 0:
            kept = self.memory_for_states(states) if settings.keeps_states else None
            self.plan_updates(rule, params, states, self.state, version, settings.epoch, kept)

    def has_state(self, settings: OptimizerVersion) -> bool:
        """Return whether there is a state of this generation."""
        updater = self.state_for(settings).current_updater(settings)
        return updater is not None and self.key in updater.states

    def memory_for_states(self, states: tuple[Array, ...]) -> tuple[Array, ...] | None:
        """Return memory for copies of a state's arrays; None: there is none."""
        kept = self._kept
        if kept is None or [(a.size, a.dtype) for a in kept] != [(a.size, a.dtype) for a in states]:
            try:
                kept = tuple(pages.empty((array.size,), array.dtype) for array in states)
            except MemoryError:
                kept = None
        self._kept = kept
        return kept

    def note_state(self, known: bool) -> None:
        """Record whether there was a state before the round that `memory_for_states` is for."""
        self._had_state = known

    def keep_states(self, settings: OptimizerVersion, round: int) -> None:
        """Copy the state before this round; without memory for it there is no copy."""
        state, known = self.state_for(settings), self.has_state(settings)
        updater = state.use_settings(settings)
        arrays = arrays_of(updater.states[self.key]) if known and self._stores_state(state) else ()
        kept = self.memory_for_states(arrays)
        for array, memory in zip(arrays, kept or (), strict=kept is not None):
            np.copyto(memory, array.reshape(-1))
        self._had_state = known
        self.note_kept(-1 if kept is None else round - 1, state)

    def _stores_state(self, state: OptimizerState) -> bool:
        """Return whether this slice stores a state: the first slice of a key stores that of a whole key."""
        return state is self.state or self.start == 0

    def past_state(self, settings: OptimizerVersion, round: int) -> PartState:
        """Return the state after a round; KVStoreError: it is not stored."""
        state = self.state_for(settings)
        updater = state.current_updater(settings)
        if updater is None:
            return NOTHING
        if self.kept_after != round or self._kept is None:
            raise not_kept(self.key, round)
        updates, num_update = self.kept_counts
        known = (self._had_state or updates > 0) and self._stores_state(state) and self.key in updater.states
        if not known:
            return NOTHING._replace(updates=updates, num_update=num_update)
        arrays = iter(self._kept)
        tree = map_state(updater.states[self.key], lambda now: next(arrays).reshape(now.shape))
        return PartState(True, tree, None, None, updates, num_update)

    def copy_to_master(self, settings: OptimizerVersion) -> None:
        """Set the float32 copy of a 16-bit value to a value that was assigned."""
        state = self.state_for(settings)
        if state.updater is not None:
            state.updater.follow(self.key, self._state_weight(state))

    def _state_weight(self, state: OptimizerState) -> Array:
        """Return the weight that a state belongs to."""
        value = self.live_value()
        return value if state is self.state else self.of.whole_value()

    def part_state(self, settings: OptimizerVersion) -> PartState:
        """Return the state of this generation; the first slice of a key returns that of a whole key."""
        state = self.state_for(settings)
        updater = state.current_updater(settings)
        if updater is None:
            return NOTHING
        known = self.key in updater.states and self._stores_state(state)
        tree = updater.states[self.key] if known else None
        return PartState(known, tree, None, None, state.updates, state.num_update)

    def put_state(self, given: PartState, settings: OptimizerVersion) -> None:
        """Replace the state by a given one of these settings' generation."""
        self.withdraw_plan()
        self.note_kept(-1, self.state)
        state, optimizer = self.state_for(settings), settings.optimizer
        assert optimizer is not None
        if state is not self.state and self.start:
            return  # the first slice of the key has set it
        if given.known:
            fresh = optimizer.create_state_multi_precision(self.key, self._state_weight(state))
            check_form(self.key, given.tree, fresh)
        updater = state.restart_counts(settings, given.updates, given.num_update)
        if given.known:
            updater.states[self.key] = given.tree

    def as_lines(self) -> tuple[Array, int]:
        """Return the value as lines, and the number of the first; ShapeError: its rows have no elements."""
        line = self.of.line
        if not line:
            raise ShapeError(f"rows were pushed to dense key {self.of.key!r}, which has no elements")
        return self.live_value().reshape(self.size // line, line), self.start // line


def allocate_value(
    size: int, dtype: np.dtype[Any], memory: SharedValues | None
) -> tuple[Array, SharedBlock | None]:
    """Return memory for `size` elements, which other processes can read if possible."""
    block = memory.allocate(size * dtype.itemsize) if memory is not None and size else None
    if block is None:
        return pages.empty((size,), dtype), None
    return block.array.view(dtype), block


class DenseUpdates:
    """Jobs of dense slices for one call of the kernels, each slice once."""

    def __init__(self, memory: SharedValues | None) -> None:
        self._memory = memory
        self._sums: list[cpu.ReduceItem] = []
        self._updates: list[cpu.UpdateItem] = []
        self._places: list[tuple[int, int]] = []
        self._swapped: list[tuple[DenseSlice, int]] = []
        self._planned: list[tuple[DenseSlice, OptimizerVersion, int, tuple[Any, ...], int]] = []

    def add_job(
        self, part: DenseSlice, job: SliceUpdate, settings: OptimizerVersion, keeps: bool = False
    ) -> bool:
        """Add a job; an exception leaves everything unchanged. False: the job's outs will not be written.

        With `keeps` the value before the round is stored.
        """
        weight, place = part.live_value(), part.place
        sources = self._sources_of(part, job, settings, keeps)
        if sources is None:
            return False
        outs = [np.frombuffer(out, np.uint8).view(weight.dtype) for out in job.outs]
        known = settings.keeps_states and part.has_state(settings)
        plan = None if settings.optimizer is None else part.plan_update(settings, job.clock)
        before, other = weight, part.memory_for_sum(self._memory) if keeps else None
        if other is not None:
            weight, place = other
            self._swapped.append((part, job.round))
        if plan is None:
            self._sums.append((sources, weight, outs))
        else:
            rule, params, master, states, _ = plan
            new = weight if other is None else (weight, before)
            kept = None
            if keeps and settings.keeps_states:
                kept = part.memory_for_states(states if master is None else (master, *states))
                part.note_state(known)
            self._updates.append((rule, params, sources, new, master, states, outs, kept or ()))
            after = -1 if kept is None else job.round - 1
            self._planned.append((part, settings, job.version, plan, after))
        if place is not None:
            self._places.append(place)
        return True

    def _sources_of(
        self, part: DenseSlice, job: SliceUpdate, settings: OptimizerVersion, keeps: bool
    ) -> list[Array] | cpu.Coded | None:
        """Return the sources of a sum; None where rows were pushed, and this method has updated them."""
        if (usual := usual_summands(job.parts, part.of.dtype, part.size)) is not None:
            return usual
        if all(payload.rows < 0 for _, payload in job.parts):
            return kernel_sources(job.parts, part.of.dtype, part.size)
        table, first = part.as_lines()
        dtype, shape = table.dtype, table.shape
        if any(payload.rows < 0 for _, payload in job.parts):
            return [_whole_part(payload, dtype, first, shape) for _, payload in job.parts]
        sources = [some_rows(payload, dtype, first, shape) for _, payload in job.parts]
        by_rows = settings.optimizer is not None and settings.optimizer.sparse_mode(False) == "rows"
        if not by_rows:
            return [sum_rows(sources).todense().reshape(-1)]
        part.note_kept(-1, part.state)
        if keeps and settings.keeps_states:
            part.keep_states(settings, job.round)
        kind, params, master, states, counts = part.plan_update(settings, job.clock)
        rows, maps, datas = merge_rows(sources)
        if keeps:
            part.keep_copy(job.round)
        with mark_writing(self._memory, [part.place]):
            shaped = tuple(_reshape_array(state, shape) for state in states)
            cpu.update_rows(kind, params, datas, maps, rows, table, _reshape_array(master, shape), shaped)
        part.state.set_counts(counts)
        return None

    def run_kernels(self) -> None:
        """Run the kernels for all jobs."""
        with mark_writing(self._memory, self._places):
            if self._sums:
                cpu.reduce(self._sums)
            if self._updates:
                cpu.update(self._updates)
        for part, round in self._swapped:
            part.swap_buffers(round)
        for part, settings, version, plan, after in self._planned:
            part.count_update(settings, version, plan, after)


def update_whole(
    parts: list[tuple[DenseSlice, SliceUpdate]], settings: OptimizerVersion, memory: SharedValues | None
) -> None:
    """Have a rule in Python update a whole key with the rounds of its slices; a missing round is zeros."""
    key = parts[0][0].of
    if not key.whole:
        refuse_parts(settings.optimizer, key.key)
    gradient = _key_gradient(key, parts)
    weight, clock = key.whole_value(), max(job.clock for _, job in parts)
    updater = key.state.use_settings(settings)
    changes = [weight, *arrays_of(updater.states.get(key.key))]
    shared = mark_writing(memory, [part.place for part in key.slices])
    with shared, key.state.count_update(settings, key.key, clock), undo_on_error(changes):
        updater(key.key, gradient, weight)


def _key_gradient(key: DenseKey, parts: list[tuple[DenseSlice, SliceUpdate]]) -> Array | RowSparseArray:
    """Sum the parts of all slices; row-sparse where all workers pushed rows."""
    if (rows := _pushed_rows(key, parts)) is not None:
        return sum_rows(rows)
    total = pages.empty((key.size,), key.dtype)
    items: list[cpu.ReduceItem] = []
    if len(parts) < len(key.slices):
        total.fill(0)
    for part, job in parts:
        there = total[part.start : part.stop]
        if any(payload.rows >= 0 for _, payload in job.parts):
            table, first = part.as_lines()
            items.append(([_whole_part(p, key.dtype, first, table.shape) for _, p in job.parts], there, []))
        else:
            items.append((kernel_sources(job.parts, key.dtype, part.size), there, []))
    cpu.reduce(items)
    return total.reshape(key.shape)


def _pushed_rows(key: DenseKey, parts: list[tuple[DenseSlice, SliceUpdate]]) -> list[RowSparseArray] | None:
    """Return each worker's rows, if all pushed rows, with lines in all slices; else None."""
    by_rank: dict[int, list[RowSparseArray]] = {}
    for part, job in sorted(parts, key=lambda one: one[0].start):
        for rank, payload in job.parts:
            if payload.rows < 0:
                return None
            table, first = part.as_lines()
            lines = some_rows(payload, key.dtype, first, table.shape)
            there = by_rank.setdefault(rank, [])
            there.append(trusted_rows(lines.data, lines.indices + first, (key.size // key.line, key.line)))
    if any(len(there) < len(key.slices) for there in by_rank.values()):
        return None
    return [_rows_of(key, there) for there in by_rank.values()]


def _rows_of(key: DenseKey, lines: list[RowSparseArray]) -> RowSparseArray:
    """Join the lines of rows from all slices."""
    ids = np.concatenate([part.indices for part in lines])
    data = np.concatenate([part.data for part in lines])
    count = math.prod(key.shape[1:]) // key.line
    return trusted_rows(data.reshape(-1, *key.shape[1:]), ids[::count] // count, key.shape)


def _whole_part(payload: SlicePayload, dtype: np.dtype[Any], first: int, shape: tuple[int, ...]) -> Array:
    if payload.rows >= 0:
        return some_rows(payload, dtype, first, shape).todense().reshape(-1)
    return plain_elements(payload, dtype, math.prod(shape))


def _reshape_array(array: Any, shape: tuple[int, ...]) -> Any:
    return None if array is None else array.reshape(shape)


class ValueCopies:
    """Values that are assigned, by one call of the kernels, in memory that other processes read."""

    def __init__(self, memory: SharedValues | None) -> None:
        self._memory = memory
        self._copies: list[cpu.ReduceItem] = []
        self._places: list[tuple[int, int] | None] = []
        #: Numbers of the slices.
        self.slices: set[int] = set()

    def add_value(self, part: DenseSlice, payload: SlicePayload) -> None:
        """Add a value; DTypeError or ShapeError: it does not fit the slice."""
        if payload.rows >= 0:
            raise DTypeError(f"key {part.of.key!r} is dense; its value cannot be set by rows")
        value = plain_elements(payload, part.of.dtype, part.size)
        self._copies.append(([value], part.ensure_memory(self._memory), []))
        self._places.append(part.place)
        self.slices.add(part.id)

    def carry_out(self) -> None:
        """Copy all values."""
        with mark_writing(self._memory, self._places):
            cpu.reduce(self._copies)


def mark_writing(memory: SharedValues | None, places: Iterable[tuple[int, int] | None]) -> Any:
    """Return a context in which readers of shared memory see that these values change."""
    shared = [place for place in places if place is not None]
    return nullcontext() if memory is None or not shared else memory.mark_writing(shared)
