"""One worker of a peer of the parameter server."""

from __future__ import annotations

import importlib

from bench.cases.dist import ENTRIES
from bench.peers.group.worker import serve, start

from bench.peers.dist.base import DistPeer, Place

ENGINES = {
    "ours": "ours:Ours",
    "mxnet": "rival_mxnet:MXNet",
    "gloo": "rival_gloo:Gloo",
    "zmq": "bare_zmq:BareZeroMQ",
    "sockets": "sockets:Sockets",
    "memcpy": "memcpy:Memcpy",
}


def make(name: str, place: Place) -> DistPeer:
    """Import and make a peer by the name of its entry."""
    entry = ENTRIES[name]
    module, _, kind = ENGINES[entry.engine].partition(":")
    peer: DistPeer = getattr(importlib.import_module(f"bench.peers.dist.{module}"), kind)(place, entry)
    return peer


def main() -> None:
    """Serve the entry named on the command line."""
    serve(*start(), make)


if __name__ == "__main__":
    main()
