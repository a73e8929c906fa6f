"""``python -m kvstore.settings.page docs/reference/settings.md``: writes the table of settings as a page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import definitions
from .definitions import Alias, LauncherRow, SettingRow

_HEAD = """# Settings

Made from `kvstore/settings/definitions.py` by `python -m kvstore.settings.page docs/reference/settings.md`.

An argument beats the variable, and the variable beats the default. Of a variable and those that are *also*
understood the first that is set counts; about role, numbers and scheduler all that are set must say the same.
One that is empty is not set. Nothing is read at import. `kvstore env` shows what is found in a process, and
which variable is missing.
"""
_LAUNCHERS = """
## Launchers

Read to learn the place of a process in its job, and for nothing else. The first launcher that has set its own
wins; without any the process is rank 0 of 1, on its own. `KVSTORE_JOB` beside another launcher's variables
names the job in their place.
"""
_COLUMNS = ("variable", "option", "also", "type", "default", "read by", "meaning")


def page() -> str:
    """Make the text of the page."""
    ignored = {**definitions.IGNORED, **definitions.IGNORED_ON_SERVERS}
    return "\n".join(
        [
            _HEAD,
            "## Stores\n\nAn option is a keyword of `kvstore.create`.\n",
            *_settings(definitions.STORES),
            "\n## Parameter servers\n",
            *_settings(definitions.SERVERS),
            "\n## Who takes part, and where\n",
            *_settings(definitions.PLACE),
            _LAUNCHERS,
            *_launchers(definitions.LAUNCHERS),
            "\n## Without effect\n\nA warning says so where one of these is set.\n",
            *_table(("variable", "why"), [(_code(variable), why) for variable, why in ignored.items()]),
            "\n## Tests and benches\n",
            *_settings(definitions.DEVELOPMENT),
            "",
        ]
    )


def _settings(rows: Iterable[SettingRow]) -> list[str]:
    return _table(
        _COLUMNS,
        [
            (
                _code(row.variable),
                _code(row.name if row.keyword else ""),
                ", ".join(map(_alias, row.aliases)),
                row.kind.__name__,
                "" if row.default is None else _code(_literal(row.default)),
                ", ".join(row.readers),
                row.meaning,
            )
            for row in rows
        ],
    )


def _launchers(rows: Iterable[LauncherRow]) -> list[str]:
    return _table(
        ("launcher", "rank, size", "on its machine", "the job is named by", "how", "also read"),
        [
            (
                row.title,
                f"{_codes(row.rank)}; {_codes(row.size)}",
                f"{_codes(row.local_rank)}; {_codes(row.local_size)}",
                _codes(row.job),
                row.naming,
                _codes(row.more),
            )
            for row in rows
        ],
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lay a table out, without the columns in which nothing stands."""
    kept = [n for n in range(len(heads)) if any(row[n] for row in rows)]
    lines = [[heads[n] for n in kept], ["---"] * len(kept), *([row[n] or "-" for n in kept] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _alias(alias: Alias) -> str:
    notes = [f"in {alias.unit}"] * bool(alias.unit) + [f"{alias.only} only"] * bool(alias.only)
    return f"{_code(alias.variable)} ({', '.join(notes)})" if notes else _code(alias.variable)


def _literal(value: object) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(map(_code, texts))


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
