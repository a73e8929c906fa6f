"""A peer's process: answers requests of the bench, in JSON."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import numpy as np

from bench.peers.base import Peer, Unsupported, digest

#: By claim: what a setting calls the peer, and where its class is in the claim's folder.
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
        "memcpy": "memcpy:Memcpy",
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
        "cross-sum": "crossing_sum:CrossingSum",
        "sum": "socket_sum:SocketsSum",
    },
    "training": {"torch": "worker:Training"},
}
#: Claims whose peers lie in the folder of another one.
FOLDERS = {"hosts": "dist"}


def make(claim: str, name: str, *place: Any) -> Peer:
    """Import and make a peer; of several entries that one peer has, the name begins with that of the peer."""
    module, _, kind = PEERS[claim][name.partition(" ")[0]].partition(":")
    peer: Peer = getattr(importlib.import_module(f"bench.peers.{FOLDERS.get(claim, claim)}.{module}"), kind)(
        *place
    )
    return peer


def answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """Do one request."""
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
    """Do one request, or say what went wrong."""
    try:
        return answer(peer(), request)
    except Exception:
        return {"error": traceback.format_exc()}


def die_with_parent() -> None:
    """Leave no stopped process behind if the parent is killed; Linux only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def main() -> None:
    """Serve the peer named on the command line; what libraries print goes to standard error."""
    die_with_parent()
    np.seterr(all="ignore")
    claim, name, address = sys.argv[1:4]
    with contextlib.suppress(EOFError, ConnectionError), Client(f"\0{address}", "AF_UNIX") as link:
        link.send_bytes(json.dumps({"rank": 0}).encode())
        peer = make(claim, name)
        while True:
            request = json.loads(link.recv_bytes())
            link.send_bytes(json.dumps(attempt(lambda: peer, request)).encode())
