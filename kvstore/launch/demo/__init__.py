"""``kvstore demo``: data-parallel training of a small network on real data, through a store.

`network` is a multi-layer perceptron in NumPy, `training` the loop around the store. The other two need an
extra, so only `run` imports them: `digits` is the data, from scikit-learn, and `screen` what rich shows.
"""

from __future__ import annotations

import sys
from dataclasses import fields

import kvstore as kv
from kvstore.errors import CapabilityError, ConfigError, MissingBackendError, WorkerError
from kvstore.settings import launchers, roles
from kvstore.store_kinds import STORES

from .training import Outcome, TrainingSettings, rule, train

__all__ = ["Outcome", "TrainingSettings", "run", "start"]


def start(settings: TrainingSettings, workers: int, servers: int | None = None) -> int:
    """Train in `workers` processes, with servers where the store has some; return an exit code.

    Parameters
    ----------
    servers : int, optional
        How many are started; None: one for a store on servers, unless this process finds some.

    Raises
    ------
    ConfigError
        The store has no servers, or no part in several processes.
    MissingBackendError, CapabilityError
        As from `run`.
    KVStoreError
        A worker failed.
    """
    kind = STORES.get(settings.store.lower())
    on_servers = kind is not None and kind.on_servers
    if servers and not on_servers:
        raise ConfigError(
            f"--servers is for stores on servers, such as 'dist_sync'; {settings.store!r} has no servers"
        )
    if kind is not None and kind.one_process and not kind.joins and workers > 1:
        raise ConfigError(
            f"store {settings.store!r} is for one process, so {workers} processes would train separately: "
            f"use --store shared or dist_sync, or one process with --replicas {workers}"
        )
    _extras()
    rule(settings, updates=1)
    if on_servers and (servers or not roles.signs()):
        return _with_servers(settings, workers, servers or 1)
    if workers == 1:
        run(settings)
    else:
        _in_processes(settings, workers)
    return 0


def _with_servers(settings: TrainingSettings, workers: int, servers: int) -> int:
    from ..run import run as launch
    from ..service import Service

    given = {field.name: getattr(settings, field.name) for field in fields(settings)}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    command = [sys.executable, "-m", "kvstore.launch", "demo", *options]
    return launch(command, workers, prefix=False, service=Service(servers))


def _in_processes(settings: TrainingSettings, workers: int) -> None:
    from ..spawn import spawn

    try:
        spawn(run, workers, (settings,))
    except WorkerError as error:  # without its traceback, which is ours and not the user's
        first, *_, last = str(error).splitlines()
        raise kv.KVStoreError(first if first == last else f"{first} {last}") from error


def _processes() -> int:
    """Count the processes of the job on this machine."""
    place, part = launchers.detect(), roles.find()
    alone = place.size == place.local_size
    return place.local_size + (part.num_servers + 1 if part and alone else 0)


def run(settings: TrainingSettings) -> Outcome:
    """Train as `settings` say, show the progress and the result, and return the latter.

    Raises
    ------
    MissingBackendError
        scikit-learn or rich is not installed, or the store is not built.
    CapabilityError
        The store cannot run an optimizer.
    """
    _extras()
    from . import digits, screen

    with _open(settings.store) as store:
        first = store.rank == 0
        with screen.progress(settings, visible=first) as show:
            outcome = train(store, settings, digits.load(), show)
        if first:
            screen.report(settings, outcome, store.num_workers, _processes())
    return outcome


def _extras() -> None:
    try:
        from . import digits, screen  # noqa: F401
    except ModuleNotFoundError as missing:
        raise MissingBackendError(
            f"kvstore demo needs the module {missing.name!r}; install it: pip install 'kvstore-train[demo]'"
        ) from missing


def _open(name: str) -> kv.KVStore:
    """Create a store that can train: one with all verbs, all workers, and an optimizer of its own."""
    store = kv.create(name)
    if isinstance(store, kv.KVStore):
        whole = store.num_workers >= launchers.detect().size
        if whole and store.is_capable("optimizer"):
            return store
        store.close()
        if not whole:
            raise CapabilityError(
                f"store {name!r} does not connect all processes of the demo; try 'shared' or 'dist_sync'"
            )
    raise CapabilityError(f"store {name!r} cannot run an optimizer, which the demo needs; try 'local'")
