"""The keys of one store: where their slices are, whether they have values, and who waits for them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from ....kernels import cpu
from ....settings.definitions import is_side
from ..protocol.messages import DIMENSIONS, KEY_BYTES, Answer, Failure, Key, KeyEntry, KeySpec, Slice

#: A store has at most so many.
_MOST_SLICES = 1 << 24
_TYPES = cpu.dtypes()

#: Cuts of a key fall on multiples of this many elements.
GRAIN = 1024

#: Bytes of a row-sparse key from which on its rows are spread over all servers.
_MANY_ROWS = 1 << 20


class KeyWaiter(NamedTuple):
    """A worker that waits for keys."""

    rank: int
    request: int
    specs: tuple[KeySpec, ...]  # of a worker that would create the keys; else none


class AwaitedKeys:
    """Keys, and the workers that wait for just these: usually all of them for the same."""

    __slots__ = ("keys", "missing", "waiting", "whole")

    def __init__(self, keys: tuple[Key, ...], missing: set[Key], whole: bool) -> None:
        self.keys = keys
        self.whole = whole  # each of them is to be on one server
        self.missing = missing  # not ready; perhaps others, too, if they have been dropped
        self.waiting: list[KeyWaiter] = []

    def take(self, rank: int) -> list[KeyWaiter]:
        """Remove and return what a worker waits for."""
        mine = [one for one in self.waiting if one.rank == rank]
        if mine:
            self.waiting = [one for one in self.waiting if one.rank != rank]
        return mine


class KeyTable:
    """Keys in the order of their init."""

    def __init__(self, slice_bytes: int, loads: list[int], whole: bool) -> None:
        self.slice_bytes = slice_bytes
        self.loads = loads  # bytes on each server, of all stores of the job
        self.whole = whole
        self.entries: dict[Key, KeyEntry] = {}
        self._awaited: dict[tuple[tuple[Key, ...], bool], AwaitedKeys] = {}
        #: Keys whose first values could not be stored: why, and the workers that have been told.
        self._failed: dict[Key, tuple[Failure, set[int]]] = {}
        #: Keys that move to one server: where they will be. Until all is there, `entries` has the old place.
        self._moving: dict[Key, KeyEntry] = {}
        #: Where keys were that have moved; it is read by members that are not among these ranks.
        self._left: list[tuple[KeyEntry, set[int]]] = []
        self._numbers = 0
        self._slices = 0

    def create(
        self, rank: int, request: int, specs: tuple[KeySpec, ...], initializer: int
    ) -> tuple[Answer | None, tuple[KeyEntry, ...]]:
        """Handle a worker's init: the answer, if it can have one now, and entries that are new.

        The initializer is told at once where its keys belong, and fills what is not ready. Others wait.
        """
        error = self._check(specs)
        if error is not None:
            return Answer(request, error=error), ()
        keys = tuple(spec.key for spec in specs)
        if rank != initializer and (error := self._untold(keys, rank)):
            return Answer(request, error=error), ()
        if rank != initializer and self._waits_for(keys, KeyWaiter(rank, request, specs)):
            return None, ()
        new = tuple(self._placed(spec) for spec in specs if self._needs_place(spec))
        return Answer(request, tuple(self._moving.get(key, self.entries[key]) for key in keys)), new

    def lookup(self, rank: int, request: int, keys: tuple[Key, ...], wait: bool) -> Answer | None:
        """Answer with the entries of keys once all are ready, or with those that are; no keys: with all."""
        wanted = keys or tuple(self.entries)
        if wait and (error := self._untold(keys, rank)):
            return Answer(request, error=error)
        if wait and self._waits_for(keys, KeyWaiter(rank, request, ())):
            return None
        known = (self.entries.get(key) for key in wanted)
        return Answer(request, tuple(entry for entry in known if entry is not None and entry.ready))

    def ready(self, keys: Sequence[Key]) -> list[tuple[int, Answer]]:
        """Note that keys have values: rank and answer of those that have waited for them."""
        for key in keys:
            entry = self.entries.get(key)
            if entry is not None and key in self._moving:
                self._left.append((entry, set()))
                entry = self._moving.pop(key)
            if entry is not None:
                self.entries[key] = msgspec.structs.replace(entry, ready=True)
                self._failed.pop(key, None)
        done = []
        for one in list(self._awaited.values()):
            one.missing.difference_update(keys)
            if not one.missing:
                one.missing = self._missing(one.keys, one.whole)
            if not one.missing:
                del self._awaited[one.keys, one.whole]
                done += self._answers(one)
        return done

    def fail(self, keys: Sequence[Key], error: Failure, rank: int) -> list[tuple[int, Answer]]:
        """Note that the first values of keys could not be stored by worker `rank`.

        Returns rank and answer of the workers that wait for them. A worker that asks later is told once.
        """
        told = {rank}
        answers = []
        for one in list(self._awaited.values()):
            if not one.missing.isdisjoint(keys):
                del self._awaited[one.keys, one.whole]
                answers += [(waiter.rank, Answer(waiter.request, error=error)) for waiter in one.waiting]
        told.update(rank for rank, _ in answers)
        self._failed.update((key, (error, set(told))) for key in keys)
        return answers

    def _untold(self, keys: Sequence[Key], rank: int) -> Failure | None:
        """Return why keys have no first values, if a worker has not been told."""
        failures = [failed for key in keys if (failed := self._failed.get(key)) and rank not in failed[1]]
        for _, told in failures:
            told.add(rank)
        return failures[0][0] if failures else None

    def stay(self, keys: Sequence[Key], error: Failure) -> tuple[list[int], list[tuple[int, Answer]]]:
        """Have keys not move after all: the slices that were for them, and what those that wait are told."""
        gone = [self._moving.pop(key) for key in keys if key in self._moving]
        failed = [one for one in self._awaited.values() if one.whole and not set(keys).isdisjoint(one.keys)]
        for one in failed:
            del self._awaited[one.keys, True]
        told = [
            (waiter.rank, Answer(waiter.request, error=error)) for one in failed for waiter in one.waiting
        ]
        return self._released(gone), told

    def leave_old_places(self, rank: int, members: Iterable[int]) -> list[int]:
        """Note that a worker reads no key where it was before it has moved: slices that no member reads."""
        for _, ranks in self._left:
            ranks.add(rank)
        gone = [entry for entry, ranks in self._left if ranks.issuperset(members)]
        self._left = [one for one in self._left if not one[1].issuperset(members)]
        return self._released(gone)

    def promote(self, initializer: int) -> tuple[list[tuple[int, Answer]], tuple[KeyEntry, ...]]:
        """Tell a worker that waits, and is the initializer now, to fill its keys."""
        answers: list[tuple[int, Answer]] = []
        new: list[KeyEntry] = []
        for one in self._take(initializer, creating=True):
            answer, entries = self.create(one.rank, one.request, one.specs, initializer)
            new += entries
            if answer is not None:
                answers.append((one.rank, answer))
        return answers, tuple(new)

    def without_values(self, keys: Sequence[Key]) -> set[Key]:
        """Return those of the keys that have no value."""
        return self._missing(keys, False)

    def drop(self, keys: Sequence[Key]) -> list[int]:
        """Forget keys; their slices."""
        gone = [table.pop(key) for key in keys for table in (self.entries, self._moving) if key in table]
        gone += [entry for entry, _ in self._left if entry.spec.key in keys]
        self._left = [one for one in self._left if one[0].spec.key not in keys]
        return self._released(gone)

    def _released(self, gone: list[KeyEntry]) -> list[int]:
        for entry in gone:
            release(self._bytes(entry), self.loads)
        return [one.id for entry in gone for one in entry.slices]

    def placed(self) -> tuple[KeyEntry, ...]:
        """All places that keys have: where they are, will be, and can still be read."""
        return (*(entry for entry, _ in self._left), *self.entries.values(), *self._moving.values())

    def gone(self) -> list[int]:
        """Slices of keys that were forgotten."""
        there = {one.id for entry in self.placed() for one in entry.slices}
        return [slice_ for slice_ in range(self._slices) if slice_ not in there]

    def leave(self, rank: int) -> None:
        """Forget what a worker waits for."""
        self._take(rank)

    def clear(self) -> list[tuple[int, int]]:
        """Rank and request of all that wait; they are forgotten."""
        gone, self._awaited = self._awaited, {}
        return [(one.rank, one.request) for awaited in gone.values() for one in awaited.waiting]

    def waits(self, rank: int) -> bool:
        """Whether this worker waits for keys."""
        return any(one.rank == rank for awaited in self._awaited.values() for one in awaited.waiting)

    def _waits_for(self, keys: tuple[Key, ...], one: KeyWaiter) -> bool:
        """Have a worker wait for keys; False: all of them are ready."""
        whole = any(spec.whole for spec in one.specs)
        awaited = self._awaited.get((keys, whole))
        if awaited is None:
            missing = self._missing(keys, whole)
            if not missing:
                return False
            awaited = self._awaited[keys, whole] = AwaitedKeys(keys, missing, whole)
        awaited.waiting.append(one)
        return True

    def _take(self, rank: int, creating: bool = False) -> list[KeyWaiter]:
        """Remove and return what a worker waits for, or only what it is `creating`."""
        found = []
        for awaited in list(self._awaited.values()):
            mine = awaited.take(rank)
            kept = [one for one in mine if creating and not one.specs]
            awaited.waiting += kept
            found += [one for one in mine if one not in kept]
            if not awaited.waiting:
                del self._awaited[awaited.keys, awaited.whole]
        return found

    def _missing(self, keys: Sequence[Key], whole: bool) -> set[Key]:
        """Those of the keys that have no value, or not yet where they are to be."""
        entries = self.entries
        return {
            key
            for key in keys
            if (entry := entries.get(key)) is None or not entry.ready or (whole and _is_spread(entry))
        }

    def _needs_place(self, spec: KeySpec) -> bool:
        """Whether a key is new, or is to move to one server and does not move yet."""
        entry = self.entries.get(spec.key)
        if entry is None:
            return True
        return spec.whole and entry.ready and _is_spread(entry) and spec.key not in self._moving

    def _entries(self, keys: Sequence[Key]) -> tuple[KeyEntry, ...]:
        return tuple(self.entries[key] for key in keys)

    def _answers(self, awaited: AwaitedKeys) -> list[tuple[int, Answer]]:
        """Rank and answer of all that wait for these keys, with one tuple of entries: it is encoded once."""
        entries, answers = self._entries(awaited.keys), []
        for one in awaited.waiting:
            error = self._check(one.specs)
            answers.append((one.rank, Answer(one.request, () if error else entries, error=error)))
        return answers

    def _placed(self, spec: KeySpec) -> KeyEntry:
        cuts = self._cuts(spec)
        parts = [size for _, _, size in cuts]
        if self._keeps_whole(spec):
            servers = place([sum(parts)], self.loads, range(len(self.loads))) * len(parts)
        else:
            servers = place(parts, self.loads, range(len(self.loads)))
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

    def _cuts(self, spec: KeySpec) -> list[tuple[int, int, int]]:
        servers = 1 if self._keeps_whole(spec) else len(self.loads)
        return sizes(spec, itemsize(spec.dtype), self.slice_bytes, servers)

    def _keeps_whole(self, spec: KeySpec) -> bool:
        return self.whole or spec.whole

    def _bytes(self, entry: KeyEntry) -> list[tuple[int, int]]:
        cuts = self._cuts(entry.spec)
        return [(one.server, size) for one, (_, _, size) in zip(entry.slices, cuts, strict=True)]

    def _check(self, specs: Sequence[KeySpec]) -> Failure | None:
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
            return _differs(entry.spec, spec)
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
        if not spec.sparse and count(spec, itemsize(spec.dtype), slice_bytes) + self._slices > _MOST_SLICES:
            return Failure("ConfigError", f"key {spec.key!r}: too many slices; raise slice_bytes")
        return None


def _is_spread(entry: KeyEntry) -> bool:
    return len({one.server for one in entry.slices}) > 1


def itemsize(dtype: str) -> int:
    """Bytes of an element; 0 if there is no such type."""
    return _TYPES[dtype][0] if dtype in _TYPES else 0


def _differs(old: KeySpec, new: KeySpec) -> Failure | None:
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


def count(spec: KeySpec, itemsize: int, slice_bytes: int) -> int:
    """At least as many slices as a dense key is cut into; found without cutting it."""
    return math.prod(spec.shape) // _step(itemsize, slice_bytes) + 1


def _step(itemsize: int, slice_bytes: int) -> int:
    return max(GRAIN, slice_bytes // itemsize // GRAIN * GRAIN)


def sizes(spec: KeySpec, itemsize: int, slice_bytes: int, servers: int) -> list[tuple[int, int, int]]:
    """Cut one key: (start, stop, bytes), in elements, or in rows of a row-sparse key."""
    if spec.sparse:
        return _rows(spec, itemsize, servers)
    elements = math.prod(spec.shape)
    step = _step(itemsize, slice_bytes)
    starts = range(0, elements, step) if elements else (0,)
    return [(at, min(at + step, elements), (min(at + step, elements) - at) * itemsize) for at in starts]


def _rows(spec: KeySpec, itemsize: int, servers: int) -> list[tuple[int, int, int]]:
    rows, width = spec.shape[0], math.prod(spec.shape[1:]) * itemsize
    parts = servers if rows * width > _MANY_ROWS and rows >= servers else 1
    edges = [rows * at // parts for at in range(parts + 1)]
    return [(start, stop, (stop - start) * width) for start, stop in itertools.pairwise(edges)]


def place(sizes: Sequence[int], loads: list[int], allowed: Sequence[int]) -> list[int]:
    """Give each part to the server with the fewest bytes, the largest part first; `loads` are added to.

    Deterministic: among equals the earlier part and the lower server come first.
    """
    servers = [-1] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        server = min(allowed, key=lambda one: (loads[one], one))
        servers[part] = server
        loads[server] += sizes[part]
    return servers


def release(parts: Iterable[tuple[int, int]], loads: list[int]) -> None:
    """Take (server, bytes) back from the loads."""
    for server, size in parts:
        loads[server] -= size
