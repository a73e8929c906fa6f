"""The results of workers, compared with those of one process."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from references import Array, assert_same_bits
from safetensors.numpy import load_file

import kvstore as kv
from kvstore.optimizer import states


class Seen(NamedTuple):
    """A result: the number of its line, the key or kind, and the same thing once or several times."""

    line: int
    what: str
    things: list[Any]


class Failure(NamedTuple):
    """An error that a line has raised."""

    kind: str
    text: str


def is_rows(value: Any) -> bool:
    """Return whether a value is row-sparse."""
    return isinstance(value, kv.RowSparseArray)


def content(path: Path) -> dict[str, Any]:
    """Return all that a file of values or of states holds."""
    arrays: dict[str, Any] = dict(load_file(path))
    if not any(name.startswith("value") for name in arrays):
        found = states.read_states(path)
        kept = None if found.optimizer is None else json.dumps(found.optimizer.get_config(), sort_keys=True)
        keys = sorted(map(str, found.states))
        arrays |= {"counts": dict(sorted(found.counts.items())), "num_update": found.num_update}
        arrays |= {"rule": found.rule, "optimizer": kept, "keys": keys}
    return arrays


def difference(lines: Sequence[str], ours: Sequence[Seen], reference: Sequence[Seen]) -> tuple[int, str]:
    """Return the first line whose results differ, and how; -1 if none does."""
    # The other workers do not see the results of a line of some workers.
    ours_by, theirs_by = _by_line(ours), _by_line(reference)
    for line, what in sorted({*ours_by, *theirs_by}):
        found, wanted = ours_by.get((line, what), []), theirs_by.get((line, what), [])
        if not found and lines[line].startswith("if rank"):
            continue
        if len(found) != len(wanted):
            return line, f"{what}: {_shown(found)}, and in one process {_shown(wanted)}"
        for one, other in zip(found, wanted, strict=True):
            for thing in one:
                if text := _different(thing, other[0]):
                    return line, f"{what}: {text}"
    return -1, ""


def _by_line(seen: Sequence[Seen]) -> dict[tuple[int, str], list[list[Any]]]:
    found: dict[tuple[int, str], list[list[Any]]] = defaultdict(list)
    for line, what, things in seen:
        found[line, what].append(things)
    return found


def _shown(things: Sequence[list[Any]]) -> str:
    return " ".join(str(things[0][0]).split())[:900] if things else "nothing"


def _different(one: Any, wanted: Any) -> str:
    if isinstance(one, dict):
        both = sorted({*one, *wanted}, key=str)
        parts = [f"{name}: {text}" for name in both if (text := _different(one.get(name), wanted.get(name)))]
        return "; ".join(parts)
    if isinstance(one, Failure):
        return "" if one.kind == wanted.kind else f"{one.kind}, and in one process {wanted.kind}: {one.text}"
    if isinstance(one, np.ndarray) and isinstance(wanted, np.ndarray):
        return _different_arrays(one, wanted)
    if is_rows(one):
        return _different_arrays(one.indices, wanted.indices) or _different_arrays(one.data, wanted.data)
    return "" if type(one) is type(wanted) and one == wanted else f"{one!r}, and in one process {wanted!r}"


def _different_arrays(one: Array, wanted: Array) -> str:
    try:
        assert_same_bits(np.ascontiguousarray(one), np.ascontiguousarray(wanted))
    except AssertionError:
        if one.shape != wanted.shape or one.dtype != wanted.dtype:
            return f"{one.dtype}{one.shape}, and in one process {wanted.dtype}{wanted.shape}"
        at = np.flatnonzero((one != wanted).reshape(-1) | (np.signbit(one) != np.signbit(wanted)).reshape(-1))
        some = at[:3]
        return (
            f"{len(at)} of {one.size} elements: {one.reshape(-1)[some].tolist()}, and in one process "
            f"{wanted.reshape(-1)[some].tolist()}, at {some.tolist()}"
        )
    return ""
