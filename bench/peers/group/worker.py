"""One worker of a peer's group: does what the bench asks for over its line."""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.peers.base import digest
from bench.peers.group.base import GroupPeer
from bench.peers.group.link import Gate, Link, Place
from bench.peers.worker import die_with_parent
from bench.runner import machine

PEERS = {
    "ours": "ours:Ours",
    "limit": "limit:Kept",
    "bare": "limit:Bare",
    "cma": "limit:Private",
    "memcpy": "limit:Memcpy",
    "line": "limit:Line",
    "futex": "limit:Futex",
    "gloo": "rival_gloo:Gloo",
    "openmpi": "rival_mpi:MPIGroup",
    "mpich": "rival_mpi:MPIGroup",
    "deepspeed": "rival_deepspeed:DeepSpeed",
    "mxnet": "rival_mxnet:DistSync",
    "queue": "forked:Queues",
    "manager": "forked:Manager",
    "redis": "rival_redis:Redis",
    "ray": "rival_ray:Ray",
}
#: Have no threads beside the worker itself: each worker stays on a core of its own where there are enough.
#: Without that the scheduler may put two that spin, or two that wake each other, on one core.
BOUND = ("ours", "limit", "bare", "cma", "memcpy", "line", "futex", "openmpi", "mpich", "deepspeed")
RANKS = ("KVSTORE_BENCH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "KVSTORE_RANK")


def make(name: str, place: Place) -> GroupPeer:
    """Import and make a peer by its name."""
    module, _, kind = PEERS[name].partition(":")
    peer: GroupPeer = getattr(importlib.import_module(f"bench.peers.shared.{module}"), kind)(place)
    return peer


def answer(peer: GroupPeer, request: dict[str, Any]) -> dict[str, Any]:
    """Do one request."""
    if request["do"] == "run":
        times = peer.run(request["variant"], request["repeats"], request["links"])
        return {"times": times, "cpu": peer.cpu}
    peer.release()
    if request["do"] == "release":
        return {}
    results = peer.prepare(peer.case_type.from_json(request["case"]))
    return {"digest": digest(results), "variants": list(peer.variants)}


def serve(
    name: str, address: str, rank: int, workers: int, make: Callable[[str, Place], GroupPeer] = make
) -> None:
    """Answer until the bench hangs up."""
    if name in BOUND:
        _bind(rank, workers)
    link = Link(address, rank)
    welcome = link.receive()
    gate = Gate(welcome["gate"], link.descriptor, workers)
    place = Place(rank, workers, welcome["processes"], link, gate, welcome["limits"])
    peer: GroupPeer | None = None
    while (request := link.receive()) is not None:
        try:
            peer = peer or make(name, place)
            reply = answer(peer, request)
        except Exception:
            reply = {"error": traceback.format_exc()}
        link.send(reply)
    _leave(peer)


def _bind(rank: int, workers: int) -> None:
    cpus = machine.cpus()
    if workers <= len(cpus) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpus[rank]})


def _leave(peer: GroupPeer | None) -> None:
    """Close in good order, but in ten seconds at most."""
    timer = threading.Timer(10, os._exit, (1,))
    timer.daemon = True
    timer.start()
    if peer is not None:
        peer.release()
        peer.close()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Serve the peer named on the command line."""
    serve(*start())


def start() -> tuple[str, str, int, int]:
    """Read peer, address, rank and workers; what libraries print goes to standard error from now on."""
    die_with_parent()
    np.seterr(all="ignore")
    os.dup2(2, 1)
    name, address, workers = sys.argv[1:4]
    rank = next(int(os.environ[variable]) for variable in RANKS if variable in os.environ)
    return name, address, rank, int(workers)


if __name__ == "__main__":
    main()
