"""``kvstore demo``: data-parallel training of a small network on real data, through a store.

`network` is a multi-layer perceptron in NumPy, `training` is the loop that uses the store, `digits` the data
of scikit-learn, and `screen` the output by rich. The last two need an extra, so only `run` imports them.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

import kvstore as kv
from kvstore.errors import CapabilityError, ConfigError, MissingBackendError, WorkerError
from kvstore.settings import launchers, roles
from kvstore.store_kinds import STORES

from .training import Outcome, TrainingSettings, rule, train

__all__ = ["Outcome", "TrainingSettings", "run", "start"]


def start(settings: TrainingSettings, workers: int, servers: int | None = None) -> int:
    """Train in `workers` processes; return an exit code.

    With `servers` None a store on servers gets one, unless the variables of this process name some.

    Raises
    ------
    ConfigError
        The store has no servers, or does not connect several processes.
    MissingBackendError, CapabilityError
        As from `run`.
    KVStoreError
        A worker has failed.
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
    _check_extra()
    rule(settings, updates=1)
    if on_servers and (servers or not roles.signs()):
        return _start_with_servers(settings, workers, servers or 1)
    if workers == 1:
        run(settings)
        return 0
    from ..spawn import spawn

    try:
        spawn(run, workers, (settings,))
    except WorkerError as error:  # without the traceback of kvstore
        first, *_, last = str(error).splitlines()
        raise kv.KVStoreError(first if first == last else f"{first} {last}") from error
    return 0


def _start_with_servers(settings: TrainingSettings, workers: int, servers: int) -> int:
    from ..run import run as launch
    from ..service import Service

    options = [f"--{name}={value}" for name, value in asdict(settings).items() if value is not None]
    command = [sys.executable, "-m", "kvstore.launch", "demo", *options]
    return launch(command, workers, prefix=False, service=Service(servers))


def run(settings: TrainingSettings) -> Outcome:
    """Train, print the progress and the result, and return the result.

    Raises
    ------
    MissingBackendError
        scikit-learn or rich is not installed, or the store is not built.
    CapabilityError
        The store cannot run an optimizer.
    """
    _check_extra()
    from . import digits, screen

    with _open(settings.store) as store:
        first = store.rank == 0
        with screen.progress(settings, visible=first) as show:
            outcome = train(store, settings, digits.load(), show)
        if first:
            place, part = launchers.detect_placement(), roles.find()
            servers = part.num_servers + 1 if part and place.size == place.local_size else 0
            screen.report(settings, outcome, store.num_workers, place.local_size + servers)
    return outcome


def _check_extra() -> None:
    try:
        from . import digits, screen  # noqa: F401
    except ModuleNotFoundError as missing:
        raise MissingBackendError(
            f"kvstore demo needs the module {missing.name!r}; install it: pip install 'kvstore-train[demo]'"
        ) from missing


def _open(name: str) -> kv.KVStore:
    """Create a store that has all methods, connects all workers, and runs an optimizer."""
    store = kv.create(name)
    if isinstance(store, kv.KVStore):
        complete = store.num_workers >= launchers.detect_placement().size
        if complete and store.is_capable("optimizer"):
            return store
        store.close()
        if not complete:
            raise CapabilityError(
                f"store {name!r} does not connect all processes of the demo; try 'shared' or 'dist_sync'"
            )
    raise CapabilityError(f"store {name!r} cannot run an optimizer, which the demo needs; try 'local'")
