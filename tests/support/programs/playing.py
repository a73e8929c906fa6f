"""The names that the lines of a program use: on a worker, and in the single process that defines the result.

Both run the same lines. A worker pushes its own values; the process pushes those of all workers, in the order
of the ranks, and does what any worker does.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from references import Array, total
from tested_store import by_hosts

import kvstore as kv
from kvstore.stores.rows import sum_rows, with_all_rows

from .seen import Failure, Seen, content, is_rows

#: With slices of 16 KB: of one slice, and of several, whose slices do not begin at rows.
_SHAPES = {"a": (3,), "b": (5, 2), "c": (16_385,), "d": (60, 100), "t": (9, 4), "u": (300, 20)}
#: By key; the same for keys that are numbers, from 1.
SHAPES: dict[int | str, tuple[int, ...]] = {**_SHAPES, **dict(enumerate(_SHAPES.values(), 1))}
TABLES = ("t", "u", 5, 6)
#: Errors of a call that leave the store as it was.
HARMLESS = (
    *(kv.ConfigError, kv.KeyNotFoundError, kv.DuplicateKeyError, kv.CapabilityError, kv.StateFileError),
    *(kv.ShapeError, kv.DTypeError, kv.ArrayError, kv.ArgumentError),
    NameError,  # of a smaller program, which has no optimizer `o` any more
)


class _Everyone:
    """A rank that is equal to each, and different from each."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Names:
    """What lines call, on a worker."""

    def __init__(self, store: Any, workers: int, folder: Path, dtype: str) -> None:
        self.store, self.workers, self.folder, self.dtype = store, workers, folder, np.dtype(dtype)
        self.rank: Any = store.rank
        self.line = 0
        self.seen_so_far: list[Seen] = []
        self._works: list[tuple[int, Any]] = []
        self._homes: dict[int | str, list[Any]] = {}

    def table(self) -> dict[str, Any]:
        """Return the names for `exec`."""
        verbs = (self.g, self.first, self.out, self.rows_out, self.ids, self.seen, self.note, self.later)
        own: dict[str, Any] = {verb.__name__: verb for verb in (*verbs, self.path, self.at_home, self.home)}
        return own | {"store": self.store, "rank": self.rank, "kv": kv, "adding": adding, "time": time}

    def values_of(self, rank: int, key: int | str, number: int, values: int = 1, rows: str = "") -> list[Any]:
        """Return the value that a worker pushes into a key: with rows "some", all but worker 0 push rows."""
        made = []
        whole = rank == 0 and rows == "some"
        for at in range(values):
            draw = np.random.default_rng([number, rank, at, list(SHAPES).index(key) % len(_SHAPES)])
            array = (draw.standard_normal(SHAPES[key]) * (9 if self.dtype.kind == "i" else 1)).astype(
                self.dtype
            )
            as_rows = not whole and (key in TABLES or (rows and array.ndim > 1))
            made.append(_some_rows(array, draw) if as_rows else array)
        return made

    def g(
        self,
        keys: Sequence[int | str],
        number: int,
        values: int = 1,
        rows: str = "",
        without: Sequence[int] = (),
    ) -> list[list[Any]]:
        """Make gradients: so many values for each key, and rows for each table."""
        return [
            self.values_of(self.rank, key, number + 100 * at, values, rows) for at, key in enumerate(keys)
        ]

    def first(self, keys: Sequence[int | str]) -> list[Any]:
        """Make first values; those of rank 0 count."""
        values = [self.values_of(0, key, 0)[0] for key in keys]
        return values if self.rank == 0 else [_zeros(value) for value in values]

    def out(self, keys: Sequence[int | str]) -> list[list[Array]]:
        """Make room for values, which are compared at the end."""
        return self.seen([[np.full(SHAPES[key], 7, self.dtype)] for key in keys], keys)

    def rows_out(self, keys: Sequence[int | str]) -> list[list[Any]]:
        """Make room for rows, which are compared at the end."""
        return self.seen([[kv.RowSparseArray.zeros(SHAPES[key], self.dtype)] for key in keys], keys)

    def ids(self, keys: Sequence[int | str], number: int) -> list[Any]:
        """Draw ids of rows, one array for each key."""
        draw = np.random.default_rng(number)
        return [[draw.integers(0, SHAPES[key][0], 6)] for key in keys]

    def seen(self, arrays: list[list[Any]], keys: Sequence[int | str]) -> list[list[Any]]:
        """Have arrays compared at the end."""
        for key, some in zip(keys, arrays, strict=True):
            self.seen_so_far.append(Seen(self.line, str(key), some))
        return arrays

    def at_home(self, keys: Sequence[int | str], values: list[list[Any]]) -> list[list[Any]]:
        """Move values to arrays of the store, which it has read to the end by now."""
        for key, some in zip(keys, values, strict=True):
            if key not in self._homes:
                self._homes[key] = [self.store.empty(key)]
            self.store.pull(key, out=self._homes[key][0])
            self._homes[key][0][...] = some[0]
        return [self._homes[key] for key in keys]

    def home(self, keys: Sequence[int | str]) -> None:
        """Have the arrays of the store compared, as they are now."""
        for key in keys:
            self.seen_so_far.append(Seen(self.line, str(key), [self._homes[key][0].copy()]))

    def note(self, save: Callable[..., None], number: int, **options: Any) -> None:
        """Save to a file, and have it compared."""
        save(self.path(number), **options)
        self.seen_so_far.append(Seen(self.line, save.__name__, [content(Path(self.path(number)))]))

    def path(self, number: int) -> str:
        """Name a file."""
        return str(self.folder / f"{number}.safetensors")

    def later(self, verb: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Begin an operation that runs in the background."""
        self._works.append((self.line, verb(*arguments, async_op=True, **options)))

    def play(self, lines: Sequence[str]) -> list[Seen]:
        """Run the lines; return the results. An error that is not harmless is the last thing seen."""
        names = self.table()
        for self.line, line in enumerate(lines):
            self._run(line, names)
        for at, work in self._works:
            if (found := work.exception()) is not None:
                self._failed(at, found)
        return [one for one in self.seen_so_far if one.things]

    def _run(self, line: str, names: dict[str, Any]) -> None:
        try:
            exec(line, names)
        except Exception as error:
            self._failed(self.line, error)
            if not isinstance(error, HARMLESS):
                raise

    def _failed(self, line: int, error: BaseException) -> None:
        # The outs of the call are unchanged, or half written.
        self.seen_so_far = [one for one in self.seen_so_far if one.line != line]
        self.seen_so_far.append(Seen(line, "error", [Failure(type(error).__name__, str(error))]))


class Reference(Names):
    """What lines call in one process, which stands for all workers of a job, on hosts if these are given.

    With `background` operations run in the background as on a worker, else at once.
    """

    def __init__(
        self,
        store: Any,
        workers: int,
        folder: Path,
        dtype: str,
        hosts: Sequence[int] = (),
        servers: bool = False,
        background: bool = False,
    ) -> None:
        super().__init__(store, workers, folder, dtype)
        self.rank, self._hosts, self._servers, self._background = _Everyone(), hosts, servers, background

    def table(self) -> dict[str, Any]:
        """Return the names for `exec`."""
        names = super().table() | {"time": SimpleNamespace(sleep=lambda seconds: None)}
        return names | ({"store": _WithoutUpdater(self.store)} if self._servers else {})

    def g(
        self,
        keys: Sequence[int | str],
        number: int,
        values: int = 1,
        rows: str = "",
        without: Sequence[int] = (),
    ) -> list[list[Any]]:
        """Make the sums of all workers; values that are passed for a key again are in its first list."""
        some = [rank for rank in range(self.workers) if rank not in without]
        places = [self._hosts[rank] for rank in some] if self._hosts else []
        parts: dict[int | str, list[list[Any]]] = defaultdict(lambda: [[] for _ in some])
        for at, key in enumerate(keys):
            for place, rank in enumerate(some):
                parts[key][place] += self.values_of(rank, key, number + 100 * at, values, rows)
        sums = {key: by_hosts(_alike(key, [_sum(one) for one in own]), places) for key, own in parts.items()}
        return [sums[key] if key not in keys[:at] else [] for at, key in enumerate(keys)]

    def at_home(self, keys: Sequence[int | str], values: list[list[Any]]) -> list[list[Any]]:
        """Remember the values, which stand for arrays of the store."""
        self._homes |= dict(zip(keys, values, strict=True))
        return values

    def later(self, verb: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Run an operation; in the background only where that is asked for."""
        if self._background:
            super().later(verb, *arguments, **options)
        else:
            verb(*arguments, **options)


class _WithoutUpdater:
    """A store that takes no updater, as those on servers."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set_updater(self, updater: Any) -> None:
        if updater is not None:
            raise kv.CapabilityError("servers take optimizers")
        self._store.set_updater(None)


def adding(factor: float) -> Callable[[Any, Any, Array], None]:
    """Make an updater that adds the pushed values."""

    def add(key: Any, summed: Any, stored: Array) -> None:
        dense = summed.todense() if is_rows(summed) else summed
        stored += (factor * dense).astype(stored.dtype)

    return add


def _some_rows(array: Array, draw: np.random.Generator) -> kv.RowSparseArray:
    share = draw.choice([0.0, 0.3, 0.7, 1.0], p=[0.1, 0.5, 0.3, 0.1])
    ids = np.flatnonzero(draw.random(len(array)) < share)
    return kv.RowSparseArray(array[ids], ids, array.shape)


def _sum(values: list[Any]) -> Any:
    return sum_rows(values) if is_rows(values[0]) else total(values)


def _alike(key: int | str, parts: list[Any]) -> list[Any]:
    """Make all parts rows of a table, or arrays, if only some of them are rows."""
    if all(map(is_rows, parts)):
        return parts
    if key in TABLES:
        return [part if is_rows(part) else with_all_rows(part) for part in parts]
    return [part.todense() if is_rows(part) else part for part in parts]


def _zeros(value: Any) -> Any:
    return kv.RowSparseArray.zeros(value.shape, value.dtype) if is_rows(value) else np.zeros_like(value)


def alone(store: str, dtype: str, **options: Any) -> dict[str, Any]:
    """Return the names for a program that is a file of its own; `show()` prints the results."""
    made = kv.create(store, **options)
    names = Names(made, made.num_workers, Path(tempfile.gettempdir()), dtype)

    def show() -> None:
        for one in names.seen_so_far:
            print(made.rank, one.what, one.things)  # noqa: T201 - it is for that

    return {**names.table(), "show": show}
