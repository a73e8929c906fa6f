"""What is to be measured, and what of it contradicts itself."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from kvstore import compression as codecs
from kvstore import optimizer as optimizers
from kvstore.errors import ConfigError, nearest
from kvstore.store_kinds import STORES, StoreKind

METHODS = ("pushpull", "push-pull")


@dataclass(frozen=True)
class BenchSettings:
    """The options of the command, complete and in agreement.

    Attributes
    ----------
    store : str
        As in `kvstore.create`.
    workers, servers : int
        Numbers of processes.
    method : str
        One of `METHODS`: ``pushpull``, or ``push`` and then ``pull``.
    compression : dict or None
        For `KVStore.set_gradient_compression`.
    optimizer : str or None
        For `kvstore.optimizer.create`.
    rounds : int
        Turns of each peer.
    """

    store: str
    workers: int
    servers: int
    method: str
    compression: dict[str, Any] | None
    optimizer: str | None
    rounds: int

    @property
    def kind(self) -> StoreKind:
        """What is known of the store."""
        return STORES[self.store]


def chosen(
    store: str,
    workers: int | None,
    servers: int | None,
    method: str,
    compression: str | None,
    optimizer: str | None,
    rounds: int,
) -> BenchSettings:
    """Fill in what is not given, and check the rest.

    Parameters
    ----------
    store : str
        Name of the store, in upper or lower case.
    workers, servers : int or None
        Numbers of processes. None: two workers, or one where the store is for one process; one server, where
        the store has servers.
    method : str
        One of `METHODS`.
    compression : str or None
        Gradient compression: ``TYPE``, or ``TYPE=threshold``.
    optimizer : str or None
        Name of an optimizer.
    rounds : int
        Turns of each peer.

    Raises
    ------
    ConfigError
        A name is unknown, or the store does not have these processes.
    """
    kind = _kind(store)
    n = workers or (1 if kind.one_process else 2)
    if kind.one_process and not kind.joins and n > 1:
        raise ConfigError(f"store {store!r} is for one process: use -n 1, or --store shared")
    if servers and not kind.on_servers:
        raise ConfigError(f"--servers is for stores on servers, such as dist_sync; {store!r} has none")
    if optimizer is not None:
        optimizers.create(optimizer)
    chosen_servers = servers or 1 if kind.on_servers else 0
    return BenchSettings(store.lower(), n, chosen_servers, method, _codec(compression), optimizer, rounds)


def _kind(store: str) -> StoreKind:
    kind = STORES.get(store.lower())
    if kind is None:
        hint = nearest(store, STORES)
        raise ConfigError(f"unknown store {store!r}{hint}; known stores: {', '.join(STORES)}")
    if kind.module.startswith("collectives."):
        raise ConfigError(
            f"store {store!r} runs on an engine with a launcher of its own; the bench measures engines as "
            "peers, such as --peers mpi"
        )
    return kind


def _codec(text: str | None) -> dict[str, Any] | None:
    """Read ``TYPE`` or ``TYPE=threshold``."""
    if text is None:
        return None
    name, equals, value = text.partition("=")
    params: dict[str, Any] = {"type": name}
    if equals:
        params["threshold"] = value
        with contextlib.suppress(ValueError):  # the codec says what it does not accept
            params["threshold"] = float(value)
    codecs.create(params)
    return params
