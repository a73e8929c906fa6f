"""A peer in a process of its own: answers requests that come as lines of JSON on standard input."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any, TextIO

import numpy as np

from bench.peers.base import Peer, Unsupported, digest

#: What a setting calls the peer, and where its class is below `bench`.
PEERS = {
    "ours": "peers.local.ours:Ours",
    "numpy": "peers.local.plain:Numpy",
    "limit": "peers.local.limit:Limit",
    "mxnet": "peers.local.rival_mxnet:MXNet",
    "torch": "peers.local.rival_torch:Torch",
    "compression/ours": "peers.compression.ours:Ours",
    "compression/numpy": "peers.compression.plain:Numpy",
    "compression/limit": "peers.compression.limit:Limit",
    "compression/mxnet": "peers.compression.rival_mxnet:MXNet",
}


def make(name: str) -> Peer:
    """Import and make a peer by its name."""
    module, _, kind = PEERS[name].partition(":")
    peer: Peer = getattr(importlib.import_module(f"bench.{module}"), kind)()
    return peer


def answer(peer: Peer, request: dict[str, Any]) -> dict[str, Any]:
    """Do one request."""
    if request["do"] == "run":
        return {"times": peer.run(request["variant"], request["repeats"])}
    peer.release()
    try:
        results = peer.prepare(peer.case_type.from_json(request["case"]))
    except Unsupported as reason:
        return {"unsupported": str(reason)}
    return {"digest": digest(results), "variants": list(peer.variants)}


def serve(peer: Peer, requests: TextIO, answers: TextIO) -> None:
    """Answer until the requests end."""
    for line in requests:
        try:
            reply = answer(peer, json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


def die_with_parent() -> None:
    """Leave no stopped process behind if the parent is killed; Linux only."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG


def main() -> None:
    """Serve the peer named on the command line; what libraries print goes to standard error."""
    die_with_parent()
    np.seterr(all="ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(make(sys.argv[1]), sys.stdin, answers)


if __name__ == "__main__":
    main()
