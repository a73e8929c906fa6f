"""A worker that plays one program after another, each in a store of its own."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jobs

import kvstore as kv

from .playing import Names
from .seen import Failure, Seen

_LONG = 24 * 3600.0


def play() -> None:
    """Play programs until the test has no more; one store is kept, so that the servers wait for the next."""
    kept = kv.create("dist_sync", group="kept")
    jobs.tell("ready")
    while name := jobs.hear(_LONG):
        request = json.loads(Path(name).read_text())
        Path(f"{name}.{kept.rank}").write_bytes(pickle.dumps(_played(request)))
        jobs.tell("played")
    kept.close()


def _played(request: dict[str, Any]) -> Any:
    """Return the results: if an error has ended the program, up to that error."""
    names = None
    try:
        with kv.create(request["store"], **request["options"]) as store:
            names = Names(store, store.num_workers, Path(request["folder"]), request["dtype"])
            return names.play(request["lines"])
    except Exception as error:
        if names is None:
            return [Seen(-1, "error", [Failure(type(error).__name__, str(error))])]
        return names.seen_so_far
