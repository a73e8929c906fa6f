"""``python docs/settings_page.py docs/reference/settings.md``: writes the table of settings as a page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvstore.settings import definitions
from kvstore.settings.definitions import Alias, LauncherRow, SettingRow

_HEAD = """# Settings

`python docs/settings_page.py docs/reference/settings.md` generates this page from
`kvstore/settings/definitions.py`.

An argument takes precedence over the variable, and the variable over the default. The column *also* lists
other variables for the same setting; the first one that is set counts. For the role, the numbers of processes
and the scheduler, all variables that are set must have the same value. An empty variable counts as not set.
kvstore reads no variable at import. `kvstore env` prints what kvstore finds in a process, and which variable
is missing.
"""
_LAUNCHERS = """
## Launchers

kvstore reads these variables only to find the rank of a process and the size of its job. If the variables of
several launchers are set, the first launcher in the table counts. Without a launcher the process is the only
worker of its job. If `KVSTORE_JOB` is set together with the variables of another launcher, it names the job.
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
            "\n## Without effect\n\nkvstore logs a warning if one of these variables is set.\n",
            *_table(("variable", "why"), [(_code(variable), why) for variable, why in ignored.items()]),
            "\n## Tests and benchmarks\n",
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
        ("launcher", "rank, size", "on its machine", "variables that name the job", "how", "also read"),
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
