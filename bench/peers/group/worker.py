"""One worker of a peer's group: does what the bench asks for over its line."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np

from bench.peers.base import Peer
from bench.peers.group.link import Gate, Link, Place
from bench.peers.worker import attempt, die_with_parent, make
from bench.runner import machine

#: In `shared` these have no threads beside the worker: each worker stays on a core where there are enough.
#: Without that the scheduler may put two that spin, or two that wake each other, on one core.
#: Workers of other claims have threads, and may roam.
BOUND = ("ours", "limit", "bare", "cma", "memcpy", "line", "futex", "openmpi", "mpich", "deepspeed")
RANKS = ("KVSTORE_BENCH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "KVSTORE_RANK")


def serve(claim: str, name: str, address: str, rank: int, workers: int) -> None:
    """Answer until the bench hangs up."""
    if claim == "shared" and name in BOUND:
        _bind(rank, workers)
    link = Link(address, rank)
    welcome = link.receive()
    gate = Gate(welcome["gate"], link.descriptor, workers)
    place = Place(rank, workers, welcome["processes"], link, gate, welcome["limits"], name)
    found: list[Peer] = []

    def peer() -> Peer:
        found[:] = found or [make(claim, name, place)]
        return found[0]

    while (request := link.receive()) is not None:
        link.send(attempt(peer, request))
    _leave(found)


def _bind(rank: int, workers: int) -> None:
    cpus = machine.cpus()
    if workers <= len(cpus) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cpus[rank]})


def _leave(found: list[Peer]) -> None:
    """Close in good order, but in ten seconds at most."""
    timer = threading.Timer(10, os._exit, (1,))
    timer.daemon = True
    timer.start()
    for peer in found:
        peer.release()
        peer.close()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Serve the peer named on the command line; what libraries print goes to standard error."""
    die_with_parent()
    np.seterr(all="ignore")
    os.dup2(2, 1)
    claim, name, address, workers = sys.argv[1:5]
    rank = next(int(os.environ[variable]) for variable in RANKS if variable in os.environ)
    serve(claim, name, address, rank, int(workers))
