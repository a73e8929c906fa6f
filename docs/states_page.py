"""``python docs/states_page.py docs/reference/states.md``: writes the tables of states as a page."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from kvstore.stores.parameter_server.protocol.transitions import Transition, transitions
from kvstore.stores.parameter_server.scheduler.machine import TRANSITIONS as SCHEDULER
from kvstore.stores.parameter_server.server.machine import TRANSITIONS as SERVER
from kvstore.stores.parameter_server.worker.state_machine.machine import TRANSITIONS as WORKER

_ROOT = Path(__file__).parents[1]
_SERVERS = "kvstore/stores/parameter_server"
_HEAD = """# States and transitions

This page shows the state machines of kvstore. Each table is at the head of the file that is named above it.
The column *on* has messages, kinds of requests, events of an event loop, and functions. Tests run random jobs
and interleavings, and compare each change of a state with the tables. A change that no table lists is an
error, and so is a row that is never seen.
"""
_SHARED = """A key has one word for its round and its step; `r` is the last complete round."""
_WORKER = """The worker in its store, its link to each server, and each request to a server. A request that
`transport/native/exchange.h` sends is in this table only if the state machine adopts it."""
_ROUNDS = (
    """Names in capital letters are kinds of requests. Without rounds (`dist_async`), each push is a round."""
)
_SERVER = """The server process, and each store on it."""
_SCHEDULER = """The processes, stores and the job, as the scheduler knows them."""
_MADE = """
## How this page is made

`python docs/states_page.py docs/reference/states.md` generates this page.
`tests/stores/parameter_server/scheduler/test_transitions.py`,
`tests/stores/parameter_server/test_transitions.py` and `tests/stores/shared/native/test_interleave.py`
compare the tables with the code.
"""


def rows_of_header(path: Path) -> tuple[Transition, ...]:
    """Return the table in the first comment of a C header."""
    comment = path.read_text().partition("*/")[0]
    cells = [line.lstrip(" *").split(" | ") for line in comment.splitlines() if line.count(" | ") == 4]
    return transitions(*(tuple(cell.strip() for cell in row) for row in cells))  # type: ignore[misc]


def _table(title: str, file: str, text: str, rows: Iterable[Transition]) -> str:
    lines = [
        f"| {row.subject} | {row.before} | {row.after} | {', '.join(row.causes)} | {row.condition} |"
        for row in rows
    ]
    head = "| subject | before | after | on | condition |\n|---|---|---|---|---|"
    return "\n".join([f"\n## {title}\n", f"`{file}`. {text}\n", head, *lines])


def page() -> str:
    """Make the text of the page."""
    shared, rounds = "kvstore/stores/shared/native/round.h", f"{_SERVERS}/native/rounds.h"
    worker, server, scheduler = (
        f"{_SERVERS}/{role}/machine.py" for role in ("worker/state_machine", "server", "scheduler")
    )
    return "\n".join(
        [
            _HEAD,
            _table("A round of `shared`", shared, _SHARED, rows_of_header(_ROOT / shared)),
            _table("A worker of `dist_*`", worker, _WORKER, WORKER),
            _table("A slice and its rounds on a server", rounds, _ROUNDS, rows_of_header(_ROOT / rounds)),
            _table("A server and its stores", server, _SERVER, SERVER),
            _table("The scheduler", scheduler, _SCHEDULER, SCHEDULER),
            _MADE,
        ]
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
