"""The processes of a job that pushes in whole steps, until one of them is lost in the middle of one."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import jobs

import kvstore as kv

from . import deaths
from .recorder import RecordedStore
from .workers import CELLS, begin, created, in_threads

#: Keys of a step; each is left out of some.
KEYS = [("a", "b", "c"), ("a", "b"), ("b", "c"), ("a", "c"), ("c",)]
STYLES = ["push", "pushpull", "one call", "pull in it", "pull after"]
LOSSES = (kv.PeerLostError, kv.FencedError)


class _Left(Exception):
    """A block is left by it."""


def works(
    name: str, folder: str, slot: int, slots: int, keeps: str, seed: int, rounds: int, last: int, how: str
) -> str:
    """Make steps; die in the `last` one, if there is a way `how`; after a loss, read; say how it ended."""
    store = created(name, folder, slot, slots, keeps)
    try:
        begin(store, keeps)
        store.pull(*CELLS)
        jobs.tell("ready")
        for at in range(rounds):
            shared, own = random.Random(f"{seed} {at}"), random.Random(f"{seed} {slot} {at}")
            if at == last:
                deaths.in_a_step(how, own.random() * 0.004)
            one_step(store, shared, own, dies=how == "in the block" and at == last)
        end = "done"
    except LOSSES as error:
        end = type(error).__name__
        reads_after(store)
    with contextlib.suppress(*LOSSES):
        store.close()
    return end


def one_step(store: RecordedStore, shared: random.Random, own: random.Random, dies: bool = False) -> None:
    """Make a step of the keys that all push into now, each process in its own way; and read."""
    keys, style = shared.choice(KEYS), own.choice(STYLES)
    if own.random() < 0.1:
        leave(store, keys)
    with store.step():
        for some in [keys] if style == "one call" else [(key,) for key in own.sample(keys, len(keys))]:
            (store.pushpull if style in ("pushpull", "one call") else store.push)(*some)
            if dies:
                deaths.now()
            if style == "pull in it":
                store.pull(*some)
    if style == "pull after":
        store.pull(*keys)
    if own.random() < 0.3:
        store.pull(*own.sample(list(CELLS), own.randint(1, 3)))
    if own.random() < 0.05:
        save(store)
    if own.random() < 0.2:
        time.sleep(own.random() * 0.003)


def leave(store: RecordedStore, keys: tuple[str, ...]) -> None:
    """Begin a step, and leave it by an exception."""
    with contextlib.suppress(_Left), store.step():
        store.push(keys[0])
        raise _Left


def save(store: RecordedStore) -> None:
    """Save to a file of this process."""
    store.save(Path(f"{store.path}.safetensors"))


def reads_after(store: RecordedStore) -> None:
    """Read the remaining values, alone, together and by a file, until all other processes know as well."""
    for _ in range(12):
        for keys in (("a",), ("b",), ("c",), ("c", "b")):
            with contextlib.suppress(*LOSSES):
                store.pull(*keys)
        with contextlib.suppress(*LOSSES):
            save(store)
        with contextlib.suppress(*LOSSES), store.step():
            store.push("c")
        time.sleep(0.1)


def threads(folder: str, seed: int, count: int) -> str:
    """Let threads of one process make steps of one `local` store, each in its own way."""

    def work(store: RecordedStore, own: random.Random) -> None:
        for _ in range(40):
            one_step(store, own, own)
            store.pull(*own.sample(list(CELLS), 2))

    return in_threads(folder, "all", seed, count, work)
