"""A worker of a peer: it answers the requests of the bench, in JSON."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.peers.base import Peer, Unsupported, digest
from bench.peers.group.link import Gate, Link, Place
from bench.runner import machine

#: By claim: the name of the peer in a setting, and the place of its class in the claim's folder.
PEERS = {
    "local": {
        "ours": "ours:Ours",
        "numpy": "plain:Numpy",
        "limit": "limit:Limit",
        "mxnet": "rival_mxnet:MXNet",
        "torch": "rival_torch:Torch",
    },
    "compression": {
        "ours": "ours:Ours",
        "numpy": "plain:Numpy",
        "limit": "limit:Limit",
        "mxnet": "rival_mxnet:MXNet",
    },
    "shared": {
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
    },
    "dist": {
        "ours": "ours:Ours",
        "packing": "packing:PackAndPull",
        "mxnet": "rival_mxnet:MXNet",
        "gloo": "rival_gloo:Gloo",
        "zmq": "bare_zmq:BareZeroMQ",
        "zmq-c": "zmq_sum:ZeroMQSum",
        "sum": "socket_sum:SocketsSum",
        "floor": "sockets:Sockets",
        "rows": "row_update:RowUpdate",
        "memcpy": "memory_sum:Memcpy",
        "memcpy-sum": "memory_sum:MemorySum",
        "memcpy-server": "memory_sum:MemoryServer",
    },
    "hosts": {
        "ours": "ours:Ours",
        "mxnet": "rival_mxnet:MXNet",
        "gloo": "rival_gloo:Gloo",
        "openmpi": "rival_mpi:MPIGroup",
        "mpich": "rival_mpi:MPIGroup",
        "cross": "crossing:Crossing",
        "cross-sum": "crossing:CrossingSum",
        "sum": "socket_sum:SocketsSum",
    },
    "training": {"torch": "worker:Training"},
}
#: Claims whose peers are in the folder of another claim.
FOLDERS = {"hosts": "dist"}
#: In `shared` these peers have no other threads: each worker is pinned to a core if there are enough.
#: Else the kernel could place two that spin, or two that wake each other, on one core.
#: Workers of other claims have threads, and are not pinned.
BOUND = ("ours", "limit", "bare", "cma", "memcpy", "line", "futex", "openmpi", "mpich", "deepspeed")
RANKS = ("KVSTORE_BENCH_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "KVSTORE_RANK")


def make(claim: str, name: str, *place: Any) -> Peer:
    """Import and make a peer; the names of its entries begin with the name of the peer."""
    module, _, kind = PEERS[claim][name.partition(" ")[0]].partition(":")
    peer: Peer = getattr(importlib.import_module(f"bench.peers.{FOLDERS.get(claim, claim)}.{module}"), kind)(
        *place
    )
    return peer


def answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """Handle one request."""
    if request["do"] == "run":
        return {"times": peer.run(request["variant"], request["repeats"]), "cpu": peer.cpu}
    peer.release()
    if request["do"] == "release":
        return {}
    peer.case = peer.case_type.from_json(request["case"])
    try:
        results = peer.prepare(peer.case)
    except Unsupported as reason:
        return {"unsupported": str(reason)}
    return {"digest": digest(results), "variants": list(peer.variants)}


def attempt(peer: Callable[[], Peer], request: dict[str, Any]) -> dict[str, Any]:
    """Handle one request, or return the error."""
    try:
        return answer(peer(), request)
    except Exception:
        return {"error": traceback.format_exc()}


def die_with_parent() -> None:
    """End this process if its parent is killed, even while stopped; Linux only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def fork(serve: Callable[[], object]) -> int:
    """Run `serve` in a child process, which ends with this process; return its id."""
    if pid := os.fork():
        return pid
    try:
        die_with_parent()
        serve()
    finally:
        os._exit(1)


def serve(claim: str, name: str, address: str, rank: int, workers: int) -> None:
    """Answer requests until the bench disconnects."""
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
    """Close the peer, in ten seconds at most."""
    timer = threading.Timer(10, os._exit, (1,))
    timer.daemon = True
    timer.start()
    for peer in found:
        peer.release()
        peer.close()
    sys.stderr.flush()
    os._exit(0)


def main() -> None:
    """Serve the peer named on the command line; the output of libraries is written to standard error."""
    die_with_parent()
    np.seterr(all="ignore")
    os.dup2(2, 1)
    claim, name, address, workers = sys.argv[1:5]
    rank = next(int(os.environ[variable]) for variable in RANKS if variable in os.environ)
    serve(claim, name, address, rank, int(workers))
