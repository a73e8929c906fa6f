"""``python -m kvstore.observe.bench.worker PEER ADDRESS``: a worker of a peer of ``kvstore bench``.

It sends its rank, then it answers the messages of the command until the command disconnects.
"""

from __future__ import annotations

import contextlib
import gc
import json
import platform
import sys
from multiprocessing.connection import Client
from time import perf_counter
from typing import Any

import numpy as np

import kvstore as kv
from kvstore.errors import CapabilityError, KVStoreError
from kvstore.settings import launchers
from kvstore.store_kinds import STORES

from .arrays import KeyArrays
from .key_lists import BenchKey
from .peers import PEERS, Call

_BLOCK = 16  # calls between two times that the gradients are written anew: sums in place grow


class Worker:
    """The arrays of a worker, and the peer that sums them."""

    def __init__(self, name: str, rank: int, options: dict[str, Any]) -> None:
        keys = [BenchKey(key, tuple(shape), dtype) for key, shape, dtype in options["keys"]]
        self._gradients, spare = KeyArrays(keys), KeyArrays(keys)
        self.peer = peer = PEERS[name](options, self._gradients, spare)
        if peer.size != options["workers"]:
            raise CapabilityError(f"{name} does not connect {options['workers']} processes, but {peer.size}")
        codec, summed = (
            (options["compression"], STORES[options["store"]].synchronous) if peer.checked else (None, True)
        )
        wrong: str | None = None
        for way, call in peer.sums.items():
            self._gradients.write_pattern(rank)
            call()
            key = self._gradients.wrong(spare, peer.size, codec, summed)
            wrong = wrong or (key and f"the sum of key {key!r} ({way})")
        self._ways: dict[str, Call] = peer.checked() if peer.checked else peer.sums
        versions = {"kvstore": kv.__version__, "Python": platform.python_version(), "NumPy": np.__version__}
        self.ready = {"wrong": wrong, "ways": list(self._ways), "versions": {**versions, **peer.versions}}

    def times(self, way: str, calls: int) -> list[float]:
        """Return the seconds of each call. A block has one call more, before which the workers wait."""
        call, times = self._ways[way], list[float]()
        gc.collect()
        gc.disable()
        while len(times) < calls:
            self._gradients.refill()
            self.peer.barrier()
            call()
            for _ in range(min(_BLOCK, calls - len(times))):
                began = perf_counter()
                call()
                times.append(perf_counter() - began)
        gc.enable()
        return times


def main(name: str, address: str) -> None:
    """Serve until the command disconnects."""
    with contextlib.suppress(EOFError, ConnectionError), Client("\0" + address, "AF_UNIX") as link:
        rank = launchers.detect().rank
        link.send_bytes(json.dumps({"rank": rank}).encode())
        options = json.loads(link.recv_bytes())
        try:
            worker = Worker(name, rank, options)
            answer: dict[str, Any] = worker.ready
            while (order := _asked(link, answer)) is not None:
                answer = {"seconds": worker.times(order["way"], order["calls"])}
            worker.peer.close()
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            link.send_bytes(json.dumps({"error": text}).encode())
            if isinstance(error, KVStoreError):  # needs no traceback
                raise SystemExit(text) from error
            raise


def _asked(link: Any, answer: dict[str, Any]) -> dict[str, Any] | None:
    """Send an answer and return the next message; None if the command has disconnected."""
    with contextlib.suppress(EOFError, ConnectionError):
        link.send_bytes(json.dumps(answer).encode())
        return json.loads(link.recv_bytes())  # type: ignore[no-any-return]
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
