"""The processes of a job whose history is checked: random verbs on three keys, by a seed."""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs

import kvstore as kv
from histories import Numbers, RecordedStore

#: Keys of one slice, and one of several; "a" and "b" are always pushed together.
CELLS = {"a": 1, "b": 40, "c": 1}
SLICE_BYTES = 1 << 13


def numbers(slots: int, keeps: str) -> dict[str, Numbers]:
    """Return how the values of the keys are made."""
    return {key: Numbers(slots, keeps, cells, words=5) for key, cells in CELLS.items()}


def works(
    name: str,
    folder: str,
    slot: int,
    slots: int,
    keeps: str,
    on_peer_loss: str,
    seed: int,
    rounds: int,
    ahead: bool = False,
) -> str:
    """Push and pull, `ahead` of the rounds or one after the other; after a loss, read; say how it ended."""
    recorded = created(name, folder, slot, slots, keeps, on_peer_loss)
    try:
        begin(recorded, keeps)
        jobs.tell("ready")
        for at in range(rounds):
            # A rejoined worker can begin only at a pass that is like all others.
            shared = random.Random(f"{seed} {at if on_peer_loss == 'raise' else ''}")
            (rounds_ahead if ahead else one_round)(recorded, shared, random.Random(f"{seed} {slot} {at}"))
        end = "done"
    except (kv.PeerLostError, kv.FencedError) as error:
        end = type(error).__name__
        reads_after(recorded)
    with contextlib.suppress(kv.PeerLostError, kv.FencedError):
        recorded.close()
    return end


def created(
    name: str, folder: str, slot: int, slots: int, keeps: str, on_peer_loss: str = "raise"
) -> RecordedStore:
    """Create a store that is recorded in this folder."""
    options: dict[str, Any] = {"slice_bytes": SLICE_BYTES} if name.startswith("dist") else {}
    store = kv.create(name, on_peer_loss=on_peer_loss, **options)
    return RecordedStore(store, Path(folder) / f"{slot}.history", numbers(slots, keeps), slot)


def begin(store: RecordedStore, keeps: str) -> None:
    """Make the keys."""
    store.init(list(CELLS))
    if keeps == "all":
        store.store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))


def one_round(store: RecordedStore, shared: random.Random, own: random.Random) -> None:
    """Push into the keys that all push into now, each process in its own way, also in the background."""
    errors: list[kv.KVStoreError] = []
    ends = []
    for keys in shared.choice([[("a", "b")], [("c",)], [("a", "b"), ("c",)], [("c",), ("a", "b")]]):
        verb = own.choice(["push", "pushpull", "push pull", "start", "start"])
        if verb == "start":
            verb = own.choice(["pushpull", "push"])
            ends.append(_noting(errors, functools.partial(store.start, verb, *keys)))
            continue
        for word in verb.split():
            _noting(errors, functools.partial(getattr(store, word), *keys))
    for end in filter(None, ends):
        _noting(errors, end)
    if errors:
        raise errors[0]
    if own.random() < 0.3:
        store.pull(*own.sample(list(CELLS), own.randint(1, 3)))
    if own.random() < 0.2:
        time.sleep(own.random() * 0.003)


def rounds_ahead(store: RecordedStore, shared: random.Random, own: random.Random) -> None:
    """Push three times into the same keys in the background, and read some of the rounds."""
    keys = shared.choice([("a", "b"), ("c",)])
    errors: list[kv.KVStoreError] = []
    verbs = [own.choice(["push", "pushpull"]) for _ in range(3)]
    ends = [_noting(errors, functools.partial(store.start, verb, *keys)) for verb in verbs]
    if own.random() < 0.5:
        time.sleep(own.random() * 0.003)
    for end in filter(None, ends):
        _noting(errors, end)
    if errors:
        raise errors[0]


def _noting(errors: list[kv.KVStoreError], call: Callable[[], Any]) -> Any:
    """Call, and continue after a loss: other operations in the background have to end, too."""
    try:
        return call()
    except (kv.PeerLostError, kv.FencedError) as error:
        errors.append(error)
        return None


def reads_after(store: RecordedStore) -> None:
    """Read the remaining values, alone and together, until all other processes know as well."""
    for _ in range(12):
        for keys in (("a",), ("b",), ("c",), ("a", "b")):
            with contextlib.suppress(kv.PeerLostError, kv.FencedError):
                store.pull(*keys)
        with contextlib.suppress(kv.PeerLostError, kv.FencedError):
            store.push("c")
        time.sleep(0.1)


def threads(folder: str, keeps: str, seed: int, count: int) -> str:
    """Let threads of one process use one `local` store."""

    def work(store: RecordedStore, own: random.Random) -> None:
        for _ in range(60):
            verb = own.choice(["push", "pull", "pull", "pushpull"])
            getattr(store, verb)(*own.choice([("a", "b"), ("c",), ("b",)]))

    return in_threads(folder, keeps, seed, count, work)


def in_threads(
    folder: str, keeps: str, seed: int, count: int, work: Callable[[RecordedStore, random.Random], None]
) -> str:
    """Let threads of one process do this with one `local` store."""
    with kv.create("local", processes=1) as store:
        made = numbers(count, keeps)
        store.init(list(CELLS), [one.start() for one in made.values()])
        if keeps == "all":
            store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))

        def run(slot: int) -> None:
            recorded = RecordedStore(store, Path(folder) / f"{slot}.history", made, slot)
            work(recorded, random.Random(f"{seed} {slot}"))

        running = [threading.Thread(target=run, args=(slot,)) for slot in range(count)]
        for one in running:
            one.start()
        for one in running:
            one.join()
    return "done"
