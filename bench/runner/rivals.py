"""Rivals that need an environment of their own: the variables that name their interpreters."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from bench.peers.setting import Setting
from bench.runner import compiled


class Rival(NamedTuple):
    """The variable with the interpreter's path, and the claims of the rival."""

    variable: str
    claims: tuple[str, ...]


RIVALS = {
    "mxnet": Rival("KVSTORE_BENCH_MXNET", ("local", "compression", "shared", "dist", "hosts")),
    "torch": Rival("KVSTORE_BENCH_TORCH", ("local", "shared", "dist", "hosts", "training")),
    "openmpi": Rival("KVSTORE_BENCH_OPENMPI", ("shared", "hosts")),
    "mpich": Rival("KVSTORE_BENCH_MPICH", ("shared", "hosts")),
    "deepspeed": Rival("KVSTORE_BENCH_DEEPSPEED", ("shared",)),
    "redis": Rival("KVSTORE_BENCH_REDIS", ("shared",)),
    "ray": Rival("KVSTORE_BENCH_RAY", ("shared",)),
}
#: Peers that run in the environment of a rival of another name.
WITHIN = {"gloo": "torch"}


def rival(peer: str) -> Rival | None:
    """Return the rival of a peer by the beginning of its name; None if it needs no other environment."""
    name = peer.partition(" ")[0]
    return RIVALS.get(WITHIN.get(name, name))


def interpreter(peer: str) -> str:
    """Return the interpreter of the peer's variable; empty if the variable is not set."""
    found = rival(peer)
    python = os.environ.get(found.variable, "") if found else ""
    return str(Path(python).absolute()) if python else ""


def settings(
    claim: str,
    peers: Iterable[str],
    variants: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None,
    processes: int = 1,
    servers: int = 1,
) -> list[Setting]:
    """Return the settings of the peers that can run here, with the variants of some."""
    found = []
    for peer in peers:
        python = interpreter(peer) if rival(peer) else sys.executable
        if not python or (peer == "limit" and compiled.compiler() is None):
            continue
        for label, env in (variants or {}).get(peer, {"": {}}).items():
            found.append(Setting(peer, claim, python, label, tuple(env.items()), processes, servers))
    return found
