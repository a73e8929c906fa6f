"""``python docs/settings_page.py docs/reference/settings.md``: writes the settings as a page."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from kvstore.settings import definitions
from kvstore.settings.definitions import LauncherRow, SettingRow, VariableAlias

_HEAD = """# Settings

A setting is an option, which is a keyword of `kvstore.create`, or an environment variable, or both:
`kvstore.create("shared", timeout=60)`, or `KVSTORE_TIMEOUT=60`. The option takes precedence over the
variable, and the variable over the default. `kvstore doctor` lists the variables that are set, and those
that are wrong, missing or without effect.

- kvstore reads no variable at import. An empty variable counts as not set.
- *Also* introduces other variables for the same setting; the first one that is set counts. For the role, the
  numbers of processes and the scheduler, all variables that are set must have the same value.
- *Read by* lists the roles and tools that read the variable: set it in the environment of these processes.
"""
_LAUNCHERS = """
## Launchers

kvstore reads these variables only to find the rank of a process and the size of its job. If the variables of
several launchers are set, the first launcher in the list counts. Without a launcher the process is the only
worker of its job. If `KVSTORE_JOB` is set together with the variables of another launcher, it names the job.
"""
_MADE = """
## How this page is made

`python docs/settings_page.py docs/reference/settings.md` generates this page from
`kvstore/settings/definitions.py`.
"""


def page() -> str:
    """Make the text of the page: lists, as a table with a column for each field is too wide for a phone."""
    ignored = {**definitions.IGNORED, **definitions.IGNORED_ON_SERVERS}
    return "\n".join(
        [
            _HEAD,
            "## Stores\n",
            *map(_setting, definitions.STORES),
            "\n## Parameter servers\n",
            *map(_setting, definitions.SERVERS),
            "\n## Roles and addresses\n",
            *map(_setting, definitions.PLACE),
            _LAUNCHERS,
            *map(_launcher, itertools.count(1), definitions.LAUNCHERS),
            "\n## Without effect\n\nkvstore logs a warning if one of these variables is set.\n",
            *(f"- {_code(variable)}: {why}" for variable, why in ignored.items()),
            "\n## Tests and benchmarks\n",
            *map(_setting, definitions.DEVELOPMENT),
            _MADE,
        ]
    )


def _setting(row: SettingRow) -> str:
    """Lay a setting out as an item of three lines: its names, its meaning, and what else is known of it."""
    names = [f"**{_code(row.variable)}**"] * bool(row.variable) + [
        f"option **{_code(row.name)}**"
    ] * row.keyword
    default = "no default" if row.default is None else f"default {_code(_literal(row.default))}"
    also = ["also " + ", ".join(map(_alias, row.aliases))] if row.aliases else []
    notes = [row.kind.__name__, default, *also, f"read by {', '.join(row.readers)}"]
    return _item("- ", ", ".join(names), row.meaning, "; ".join(notes))


def _launcher(number: int, row: LauncherRow) -> str:
    """Lay a launcher out as an item: its name, and its variables by their meaning."""
    lines = [
        f"rank {_codes(row.rank)}; size {_codes(row.size)}",
        f"on its machine: rank {_codes(row.local_rank)}; size {_codes(row.local_size)}",
        f"name of the job from {_codes(row.job)}: {row.naming}",
    ]
    lines += [f"also read: {_codes(row.more)}"] * bool(row.more)
    return _item(f"{number}. ", f"**{row.title}**", *lines)


def _item(mark: str, *lines: str) -> str:
    """Join lines with the line breaks of Markdown, so that they stay lines of one item."""
    return mark + ("\\\n" + " " * len(mark)).join(lines)


def _alias(alias: VariableAlias) -> str:
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
