"""``python docs/conformance_page.py docs/reference/conformance.md``: writes the tables of conformance."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "bodies"))

from conformance import jax_door, torch_door, trainer_door
from conformance.outcomes import Door, Inapplicable, Outcome, Refused, Right, Unnoticed, Warned

_HEAD = """# Conformance

`python docs/conformance_page.py docs/reference/conformance.md` generates this page from the tables of
`tests/bodies/conformance`, which the tests of `tests/conformance` hold: they run each program in each way.

A row is a program of a user, and a column is a way to run it with two workers. The reference is one process
that computes the batches of both workers.

- **right**: the weights are those of the reference within rounding, and the same bits on all workers.
- **refused**: an error on each worker; the note has its words. If only some workers raise it, the note says
  so.
- **warned**: the weights are others than those of the reference, and a warning on each worker says so; the
  note has its words.
- **not noticed**: the workers do something else than one process, and no error says so; the note has the
  reason why this way cannot notice it.
- **-**: the program cannot be written in this way; the note has the reason.
"""
_TORCH = """Columns: `DistributedDataParallel` with gloo; the same with `kvstore.torch.allreduce_hook` on a
`shared` store; `DistributedOptimizer` on `shared`, on `dist_sync`, and on `dist_sync` with
`hierarchy="host"`; and `DistributedOptimizer(update_on_kvstore=True)` on each of these. Where `overlap` makes
a difference, the cell says so; else it is the same for True, False and None.
"""
_JAX = """The exchange is inside of `jax.jit`, with the gradient and the update, or outside. Where that makes
a difference, the cell says so.
"""
_TRAINER = """The first three columns have `update_on_kvstore=False`: the trainer of each worker updates the
weights.
"""
_DOORS = ((torch_door.DOOR, _TORCH), (jax_door.DOOR, _JAX), (trainer_door.DOOR, _TRAINER))


class Notes:
    """The footnotes of the page, in the order of their first use."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def mark(self, text: str) -> str:
        """Return the mark of a note."""
        if text not in self._texts:
            self._texts.append(text)
        return f"[^{self._texts.index(text) + 1}]"

    def definitions(self) -> list[str]:
        """Return the notes themselves."""
        return [f"[^{number}]: {text}" for number, text in enumerate(self._texts, 1)]


def page() -> str:
    """Make the text of the page."""
    notes, lines = Notes(), [_HEAD]
    for door, text in _DOORS:
        lines += [f"## {door.title}\n", text]
        for heading, rows in door.rows.items():
            lines += [f"### {heading}\n"] * (len(door.rows) > 1)
            lines += [*_table(door, rows, notes), ""]
    return "\n".join([*lines, "## Notes\n", *notes.definitions(), ""])


def _table(door: Door, titles: Mapping[str, str], notes: Notes) -> list[str]:
    table = [["program", *door.columns], ["---"] * (1 + len(door.columns))]
    for program, title in titles.items():
        table.append([title, *(_cell(door, program, column, notes) for column in door.columns.values())])
    return ["| " + " | ".join(line) + " |" for line in table]


def _cell(door: Door, program: str, column: str, notes: Notes) -> str:
    ways = {way: door.outcome(program, way) for way in door.ways if fnmatch(way, column)}
    found = list(dict.fromkeys(ways.values()))
    if len(found) == 1:
        return _say(found[0], notes)
    names = {
        one: ", ".join(_name(way, column) for way, other in ways.items() if other == one) for one in found
    }
    return "; ".join(f"{names[one]}: {_say(one, notes)}" for one in found)


def _name(way: str, column: str) -> str:
    """Return the difference of a way to the other ways of its column."""
    store, _, how = way.partition("/")
    return store if column.startswith("*") else how


def _say(outcome: Outcome, notes: Notes) -> str:
    if isinstance(outcome, Right):
        return "right"
    if isinstance(outcome, Refused):
        quoted = ", or ".join(f"“{words}”" for words in outcome.words)
        some = "" if outcome.by_all else ", on some workers"
        return "refused " + notes.mark(quoted + some)
    if isinstance(outcome, Warned):
        return "warned " + notes.mark(f"“{outcome.words}”")
    if isinstance(outcome, Unnoticed):
        return "not noticed " + notes.mark(outcome.why)
    assert isinstance(outcome, Inapplicable)
    return "- " + notes.mark(outcome.why)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
