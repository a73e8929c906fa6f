"""``python -m kvstore.observe.bench.workers.main``: a worker of a peer; it does what the command asks for."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from importlib import import_module

import numpy as np

import kvstore as kv
from kvstore.errors import KVStoreError

from ...shared_files import shared_files
from ..key_lists import BenchKey
from ..link import CommandGone, Message, WorkerLink
from .peer import BenchPeer


def main(name: str, address: str, options: str) -> None:
    """Serve until the command hangs up.

    Parameters
    ----------
    name : str
        Peer: ``kvstore``, ``gloo`` or ``mpi``.
    address : str
        Of the command.
    options : str
        Settings of the store, as JSON.
    """
    with contextlib.suppress(CommandGone):
        link = WorkerLink(address)
        try:
            _serve(link, _peer(name, json.loads(options)), name)
        except CommandGone:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            link.send({"peer": name, "error": text})
            if isinstance(error, KVStoreError):  # which says all that there is to say
                raise SystemExit(text) from error
            raise


def _peer(name: str, options: Message) -> BenchPeer:
    peer: BenchPeer
    if name == "gloo":
        peer = import_module("kvstore.observe.bench.workers.gloo").GlooPeer()
    elif name == "mpi":
        peer = import_module("kvstore.observe.bench.workers.mpi").MpiPeer()
    else:
        peer = import_module("kvstore.observe.bench.workers.store").StorePeer(options)
    return peer


def _serve(link: WorkerLink, peer: BenchPeer, name: str) -> None:
    hello = {"peer": name, "rank": peer.rank, "pid": os.getpid(), "address": peer.address}
    link.send({**hello, "versions": {**_versions(), **peer.versions()}, "files": sorted(shared_files())})
    link.send(_answer(peer, link.receive()))
    try:
        while True:
            link.send(_answer(peer, link.receive()))
    except CommandGone:
        peer.close()


def _answer(peer: BenchPeer, message: Message) -> Message:
    match message["do"]:
        case "join":
            peer.join(message["address"])
            return {}
        case "prepare":
            keys = [BenchKey(name, tuple(shape), dtype) for name, shape, dtype in message["keys"]]
            return {"wrong": peer.prepare(keys), "ways": list(peer.ways)}
        case _:
            return {"seconds": peer.run(message["way"], message["calls"])}


def _versions() -> dict[str, str]:
    return {"kvstore": kv.__version__, "Python": platform.python_version(), "NumPy": np.__version__}


if __name__ == "__main__":
    main(*sys.argv[1:])
