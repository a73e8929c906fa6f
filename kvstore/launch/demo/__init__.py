"""``kvstore demo``: data-parallel training of a small network on real data, through a store.

`network` is a multi-layer perceptron in NumPy, `training` the loop around the store. The other two need an
extra, so only `run` imports them: `digits` is the data, from scikit-learn, and `screen` what rich shows.
"""

from __future__ import annotations

import kvstore as kv
from kvstore.errors import CapabilityError, MissingBackendError

from .training import Outcome, Settings, train

__all__ = ["Outcome", "Settings", "run"]


def run(settings: Settings) -> Outcome:
    """Train as `settings` say, show the progress and the result, and return the latter.

    Raises
    ------
    MissingBackendError
        scikit-learn or rich is not installed, or the store is not built.
    CapabilityError
        The store cannot run an optimizer.
    """
    try:
        from . import digits, screen
    except ModuleNotFoundError as missing:
        raise MissingBackendError(
            f"kvstore demo needs the module {missing.name!r}; get it with: pip install 'kvstore-train[demo]'"
        ) from missing
    with _open(settings.store) as store:
        first = store.rank == 0
        with screen.progress(settings, visible=first) as show:
            outcome = train(store, settings, digits.load(), show)
        if first:
            screen.report(settings, outcome, store.num_workers)
    return outcome


def _open(name: str) -> kv.KVStore:
    """Create a store that can train: one with all verbs, and with an optimizer of its own."""
    store = kv.create(name)
    if isinstance(store, kv.KVStore):
        if store.is_capable("optimizer"):
            return store
        store.close()
    raise CapabilityError(
        f"store {name!r} runs no optimizer, and the demo trains with one on the store; try 'local'"
    )
