"""The keys of one store: how they are cut and placed, and which workers wait for their values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from ....kernels import cpu
from ....settings.definitions import is_side
from ..protocol.messages import DIMENSIONS, KEY_BYTES, Failure, Key, KeyEntry, KeySpec, MemberReply, Slice

_MOST_SLICES = 1 << 24  # of a store
_TYPES = cpu.dtypes()

#: The length of each slice of a dense key, except the last, is a multiple of this number of elements.
GRAIN = 1024

#: The rows of a row-sparse key with more bytes are distributed over all servers.
_MANY_ROWS = 1 << 20


class KeyWaiter(NamedTuple):
    """A worker that waits for keys."""

    rank: int
    request: int
    specs: tuple[KeySpec, ...]  # empty unless the request is an init


class AwaitedKeys:
    """A tuple of keys, and the workers that wait for exactly these keys."""

    __slots__ = ("keys", "missing", "waiting", "whole")

    def __init__(self, keys: tuple[Key, ...], missing: set[Key], whole: bool) -> None:
        self.keys = keys
        self.whole = whole  # each key must be on one server
        self.missing = missing  # keys that are not ready; keys that were dropped since can be missing here
        self.waiting: list[KeyWaiter] = []

    def remove_waiter(self, rank: int) -> list[KeyWaiter]:
        """Remove and return the requests of a worker."""
        removed = [waiter for waiter in self.waiting if waiter.rank == rank]
        if removed:
            self.waiting = [waiter for waiter in self.waiting if waiter.rank != rank]
        return removed


class KeyTable:
    """The keys of a store, in the order of their init."""

    def __init__(self, slice_bytes: int, loads: list[int], whole: bool) -> None:
        self.slice_bytes = slice_bytes
        self.loads = loads  # bytes on each server, of all stores of the job
        self.whole = whole
        self.entries: dict[Key, KeyEntry] = {}
        self._awaited: dict[tuple[tuple[Key, ...], bool], AwaitedKeys] = {}
        #: Keys whose first values could not be stored: the error, and the workers that have got it.
        self._failed: dict[Key, tuple[Failure, set[int]]] = {}
        #: New entries of keys that move to one server; until a move is complete, `entries` has the old one.
        self._moving: dict[Key, KeyEntry] = {}
        #: Old entries of keys that have moved, and the ranks that no longer read the old slices.
        self._old_places: list[tuple[KeyEntry, set[int]]] = []
        self._numbers = 0
        self._slices = 0

    def create_keys(
        self, rank: int, request: int, specs: tuple[KeySpec, ...], initializer: int
    ) -> tuple[MemberReply | None, tuple[KeyEntry, ...]]:
        """Handle the init of a worker; return its answer, None if it must wait, and the new entries.

        The initializer gets the entries at once, and sets the values of keys that are not ready. Other
        workers wait until the keys have values.
        """
        error = self._check_specs(specs)
        if error is not None:
            return MemberReply(request, error=error), ()
        keys = tuple(spec.key for spec in specs)
        if rank != initializer and (error := self._unreported_failure(keys, rank)):
            return MemberReply(request, error=error), ()
        if rank != initializer and self._add_waiter(keys, KeyWaiter(rank, request, specs)):
            return None, ()
        new = tuple(self._place_key(spec) for spec in specs if self._needs_place(spec))
        return MemberReply(request, tuple(self._moving.get(key, self.entries[key]) for key in keys)), new

    def lookup(self, rank: int, request: int, keys: tuple[Key, ...], wait: bool) -> MemberReply | None:
        """Return the answer with the entries of the ready keys among `keys`, or among all keys if empty.

        With `wait`, None until all of the keys are ready.
        """
        wanted = keys or tuple(self.entries)
        if wait and (error := self._unreported_failure(keys, rank)):
            return MemberReply(request, error=error)
        if wait and self._add_waiter(keys, KeyWaiter(rank, request, ())):
            return None
        known = (self.entries.get(key) for key in wanted)
        return MemberReply(request, tuple(entry for entry in known if entry is not None and entry.ready))

    def mark_ready(self, keys: Sequence[Key]) -> list[tuple[int, MemberReply]]:
        """Record that keys have values; return rank and answer of the requests that waited for them."""
        for key in keys:
            entry = self.entries.get(key)
            if entry is not None and key in self._moving:
                self._old_places.append((entry, set()))
                entry = self._moving.pop(key)
            if entry is not None:
                self.entries[key] = msgspec.structs.replace(entry, ready=True)
                self._failed.pop(key, None)
        answers = []
        for awaited in list(self._awaited.values()):
            awaited.missing.difference_update(keys)
            if not awaited.missing:
                awaited.missing = self._missing_keys(awaited.keys, awaited.whole)
            if not awaited.missing:
                del self._awaited[awaited.keys, awaited.whole]
                answers += self._waiter_replies(awaited)
        return answers

    def fail_init(self, keys: Sequence[Key], error: Failure, rank: int) -> list[tuple[int, MemberReply]]:
        """Record that worker `rank` could not store the first values of keys.

        Return rank and answer of the requests that wait for them. The next request of each other worker gets
        the error once.
        """
        reported = {rank}
        answers = []
        for awaited in list(self._awaited.values()):
            if not awaited.missing.isdisjoint(keys):
                del self._awaited[awaited.keys, awaited.whole]
                answers += _failed_answers(awaited, error)
        reported.update(rank for rank, _ in answers)
        self._failed.update((key, (error, set(reported))) for key in keys)
        return answers

    def _unreported_failure(self, keys: Sequence[Key], rank: int) -> Failure | None:
        """Return why keys have no first values, if the worker has not got this error yet."""
        failures = [failed for key in keys if (failed := self._failed.get(key)) and rank not in failed[1]]
        for _, reported in failures:
            reported.add(rank)
        return failures[0][0] if failures else None

    def cancel_move(
        self, keys: Sequence[Key], error: Failure
    ) -> tuple[list[int], list[tuple[int, MemberReply]]]:
        """Cancel the move of keys; return its slices, and rank and answer of the waiting requests."""
        cancelled = [self._moving.pop(key) for key in keys if key in self._moving]
        failed = [
            awaited
            for awaited in self._awaited.values()
            if awaited.whole and not set(keys).isdisjoint(awaited.keys)
        ]
        for awaited in failed:
            del self._awaited[awaited.keys, True]
        answers = [answer for awaited in failed for answer in _failed_answers(awaited, error)]
        return self._release_slices(cancelled), answers

    def leave_old_places(self, rank: int, members: Iterable[int]) -> list[int]:
        """Record that a worker reads no old slices of moved keys; return those that no member reads."""
        for _, ranks in self._old_places:
            ranks.add(rank)
        unread = [entry for entry, ranks in self._old_places if ranks.issuperset(members)]
        self._old_places = [old for old in self._old_places if not old[1].issuperset(members)]
        return self._release_slices(unread)

    def answer_initializer(
        self, initializer: int
    ) -> tuple[list[tuple[int, MemberReply]], tuple[KeyEntry, ...]]:
        """Return answers and new entries for the waiting inits of a worker that is the initializer now."""
        answers: list[tuple[int, MemberReply]] = []
        new: list[KeyEntry] = []
        for waiter in self._remove_waiters(initializer, creating=True):
            answer, entries = self.create_keys(waiter.rank, waiter.request, waiter.specs, initializer)
            new += entries
            if answer is not None:
                answers.append((waiter.rank, answer))
        return answers, tuple(new)

    def without_values(self, keys: Sequence[Key]) -> set[Key]:
        """Return those of the keys that have no value."""
        return self._missing_keys(keys, False)

    def drop_keys(self, keys: Sequence[Key]) -> list[int]:
        """Forget keys; return their slices."""
        dropped = [table.pop(key) for key in keys for table in (self.entries, self._moving) if key in table]
        dropped += [entry for entry, _ in self._old_places if entry.spec.key in keys]
        self._old_places = [old for old in self._old_places if old[0].spec.key not in keys]
        return self._release_slices(dropped)

    def _release_slices(self, entries: list[KeyEntry]) -> list[int]:
        """Subtract the bytes of entries from the loads of the servers; return their slices."""
        for entry in entries:
            release_parts(self._bytes_by_server(entry), self.loads)
        return [slice_.id for entry in entries for slice_ in entry.slices]

    def placed_entries(self) -> tuple[KeyEntry, ...]:
        """Return all entries of the keys: old ones that are still read, current ones, and those of moves."""
        return (*(entry for entry, _ in self._old_places), *self.entries.values(), *self._moving.values())

    def dropped_slices(self) -> list[int]:
        """Return the slices that no entry has any more."""
        present = {slice_.id for entry in self.placed_entries() for slice_ in entry.slices}
        return [slice_ for slice_ in range(self._slices) if slice_ not in present]

    def forget_waiter(self, rank: int) -> None:
        """Forget the waiting requests of a worker."""
        self._remove_waiters(rank)

    def clear_waiters(self) -> list[tuple[int, int]]:
        """Return and forget rank and request of all workers that wait."""
        cleared, self._awaited = self._awaited, {}
        return [(waiter.rank, waiter.request) for awaited in cleared.values() for waiter in awaited.waiting]

    def is_waiting(self, rank: int) -> bool:
        """Return whether this worker waits for keys."""
        return any(waiter.rank == rank for awaited in self._awaited.values() for waiter in awaited.waiting)

    def _add_waiter(self, keys: tuple[Key, ...], waiter: KeyWaiter) -> bool:
        """Let a worker wait for keys; False if all of them are ready."""
        whole = any(spec.whole for spec in waiter.specs)
        awaited = self._awaited.get((keys, whole))
        if awaited is None:
            missing = self._missing_keys(keys, whole)
            if not missing:
                return False
            awaited = self._awaited[keys, whole] = AwaitedKeys(keys, missing, whole)
        awaited.waiting.append(waiter)
        return True

    def _remove_waiters(self, rank: int, creating: bool = False) -> list[KeyWaiter]:
        """Remove and return the waiting requests of a worker, or with `creating` only those of its inits."""
        removed = []
        for awaited in list(self._awaited.values()):
            mine = awaited.remove_waiter(rank)
            kept = [waiter for waiter in mine if creating and not waiter.specs]
            awaited.waiting += kept
            removed += [waiter for waiter in mine if waiter not in kept]
            if not awaited.waiting:
                del self._awaited[awaited.keys, awaited.whole]
        return removed

    def _missing_keys(self, keys: Sequence[Key], whole: bool) -> set[Key]:
        """Return the keys that have no value, or with `whole` that are not on one server yet."""
        entries = self.entries
        return {
            key
            for key in keys
            if (entry := entries.get(key)) is None or not entry.ready or (whole and _is_spread(entry))
        }

    def _needs_place(self, spec: KeySpec) -> bool:
        """Return whether a key needs a new place: it is new, or must move to one server and does not yet."""
        entry = self.entries.get(spec.key)
        if entry is None:
            return True
        return spec.whole and entry.ready and _is_spread(entry) and spec.key not in self._moving

    def _entries_of(self, keys: Sequence[Key]) -> tuple[KeyEntry, ...]:
        return tuple(self.entries[key] for key in keys)

    def _waiter_replies(self, awaited: AwaitedKeys) -> list[tuple[int, MemberReply]]:
        """Return rank and answer of the waiting requests; all share one tuple of entries, encoded once."""
        entries, answers = self._entries_of(awaited.keys), []
        for waiter in awaited.waiting:
            error = self._check_specs(waiter.specs)
            answers.append((waiter.rank, MemberReply(waiter.request, () if error else entries, error=error)))
        return answers

    def _place_key(self, spec: KeySpec) -> KeyEntry:
        cuts = self._cut_key(spec)
        parts = [size for _, _, size in cuts]
        if self._keeps_whole(spec):
            servers = place_parts([sum(parts)], self.loads, range(len(self.loads))) * len(parts)
        else:
            servers = place_parts(parts, self.loads, range(len(self.loads)))
        slices = tuple(
            Slice(self._slices + at, server, start, stop)
            for at, (server, (start, stop, _)) in enumerate(zip(servers, cuts, strict=True))
        )
        self._slices += len(slices)
        known = self.entries.get(spec.key)
        entry = KeyEntry(spec, self._numbers if known is None else known.number, slices, ready=False)
        self._numbers += known is None
        table = self.entries if known is None else self._moving
        table[spec.key] = entry
        return entry

    def _cut_key(self, spec: KeySpec) -> list[tuple[int, int, int]]:
        servers = 1 if self._keeps_whole(spec) else len(self.loads)
        return cut_key(spec, itemsize(spec.dtype), self.slice_bytes, servers)

    def _keeps_whole(self, spec: KeySpec) -> bool:
        return self.whole or spec.whole

    def _bytes_by_server(self, entry: KeyEntry) -> list[tuple[int, int]]:
        cuts = self._cut_key(entry.spec)
        return [(one.server, size) for one, (_, _, size) in zip(entry.slices, cuts, strict=True)]

    def _check_specs(self, specs: Sequence[KeySpec]) -> Failure | None:
        first = next((key for key in self.entries if not is_side(key)), None)
        kinds = {type(spec.key) for spec in specs if not is_side(spec.key)} | {type(first)} - {type(None)}
        if len(kinds) > 1:
            return Failure("KeyKindError", "a store's keys are all int or all str, on all workers")
        for spec in specs:
            error = self._check_one(spec)
            if error is not None:
                return error
        return None

    def _check_one(self, spec: KeySpec) -> Failure | None:
        entry = self.entries.get(spec.key)
        if entry is not None:
            return _spec_conflict(entry.spec, spec)
        if (
            len(str(spec.key).encode()) > KEY_BYTES
            or len(spec.shape) > DIMENSIONS
            or min(spec.shape, default=0) < 0
        ):
            return Failure(
                "ShapeError", f"key {str(spec.key)[:80]!r}: its name or its shape is out of bounds"
            )
        if spec.sparse and not spec.shape:
            return Failure("ShapeError", f"key {spec.key!r}: a row-sparse key has rows")
        if not itemsize(spec.dtype):
            return Failure("DTypeError", f"key {spec.key!r}: unknown element type {spec.dtype!r}")
        slice_bytes = (1 << 62) if self.whole else self.slice_bytes
        if (
            not spec.sparse
            and most_slices(spec, itemsize(spec.dtype), slice_bytes) + self._slices > _MOST_SLICES
        ):
            return Failure("ConfigError", f"key {spec.key!r}: too many slices; raise slice_bytes")
        return None


def _failed_answers(awaited: AwaitedKeys, error: Failure) -> list[tuple[int, MemberReply]]:
    return [(waiter.rank, MemberReply(waiter.request, error=error)) for waiter in awaited.waiting]


def _is_spread(entry: KeyEntry) -> bool:
    return len({one.server for one in entry.slices}) > 1


def itemsize(dtype: str) -> int:
    """Return the bytes of an element; 0 for an unknown type."""
    return _TYPES[dtype][0] if dtype in _TYPES else 0


def _spec_conflict(old: KeySpec, new: KeySpec) -> Failure | None:
    if old.shape != new.shape:
        text = f"key {new.key!r}: this worker has shape {new.shape}, the store has {old.shape}"
        return Failure("ShapeError", text)
    if old.dtype != new.dtype:
        text = f"key {new.key!r}: this worker has {new.dtype}, the store has {old.dtype}"
        return Failure("DTypeError", text)
    if old.sparse != new.sparse:
        words = {True: "row-sparse", False: "dense"}
        text = f"key {new.key!r}: on this worker it is {words[new.sparse]}, in the store {words[old.sparse]}"
        return Failure("ArrayError", text)
    return None


# --------------------------------------------------------------------------------------------- placement


def most_slices(spec: KeySpec, itemsize: int, slice_bytes: int) -> int:
    """Return an upper bound of the number of slices of a dense key, without cutting it."""
    return math.prod(spec.shape) // _slice_step(itemsize, slice_bytes) + 1


def _slice_step(itemsize: int, slice_bytes: int) -> int:
    return max(GRAIN, slice_bytes // itemsize // GRAIN * GRAIN)


def cut_key(spec: KeySpec, itemsize: int, slice_bytes: int, servers: int) -> list[tuple[int, int, int]]:
    """Cut one key; return (start, stop, bytes) of each slice, in elements, or in rows of a row-sparse key."""
    if spec.sparse:
        return _cut_table(spec, itemsize, servers)
    elements = math.prod(spec.shape)
    step = _slice_step(itemsize, slice_bytes)
    starts = range(0, elements, step) if elements else (0,)
    return [(at, min(at + step, elements), (min(at + step, elements) - at) * itemsize) for at in starts]


def _cut_table(spec: KeySpec, itemsize: int, servers: int) -> list[tuple[int, int, int]]:
    rows, width = spec.shape[0], math.prod(spec.shape[1:]) * itemsize
    parts = servers if rows * width > _MANY_ROWS and rows >= servers else 1
    edges = [rows * at // parts for at in range(parts + 1)]
    return [(start, stop, (stop - start) * width) for start, stop in itertools.pairwise(edges)]


def place_parts(sizes: Sequence[int], loads: list[int], allowed: Sequence[int]) -> list[int]:
    """Assign each part to the server with the fewest bytes, the largest part first; add the bytes to `loads`.

    Deterministic: of equal parts the earlier one is placed first, of equal servers the lower rank is chosen.
    """
    servers = [-1] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        server = min(allowed, key=lambda rank: (loads[rank], rank))
        servers[part] = server
        loads[server] += sizes[part]
    return servers


def release_parts(parts: Iterable[tuple[int, int]], loads: list[int]) -> None:
    """Subtract the bytes of parts, as (server, bytes), from the loads."""
    for server, size in parts:
        loads[server] -= size
