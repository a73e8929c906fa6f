"""The form of the tables of states and transitions at the heads of the state machines.

A test compares each table with random runs of its machine; `docs/states_page.py` makes a page of the tables.
"""

from __future__ import annotations

from typing import NamedTuple


class Transition(NamedTuple):
    """One change of the state of a subject; any of the `causes` can cause it."""

    subject: str
    before: str  # "new" if the subject did not exist
    after: str  # "gone" if it does not exist any more
    causes: tuple[str, ...]  # kinds of messages and events, or methods of the machine
    condition: str


def transitions(*rows: tuple[str, str, str, str, str]) -> tuple[Transition, ...]:
    """Return the rows of a table; causes are separated by spaces."""
    return tuple(
        Transition(subject, before, after, tuple(causes.split()), condition)
        for subject, before, after, causes, condition in rows
    )
