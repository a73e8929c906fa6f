"""Redis over a Unix socket: workers set their bytes, the first worker sums and sets the sum."""

from __future__ import annotations

import os

import numpy as np
import redis

from bench.peers.base import Array
from bench.peers.group.link import Place
from bench.peers.shared.forked import Central


class Redis(Central):
    """SET and GET for the bytes, lists for the notifications."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.server = redis.Redis(unix_socket_path=os.environ["KVSTORE_BENCH_REDIS_SOCKET"])

    def put(self, value: Array) -> None:
        self.server.set(f"value {self.place.rank}", memoryview(value).cast("B"))
        self.server.rpush("values", self.place.rank)

    def take(self) -> Array:
        self.server.blpop([f"sum for {self.place.rank}"], timeout=60)
        return self._array("sum")

    def take_all(self) -> list[Array]:
        ranks = [int(self.server.blpop(["values"], timeout=60)[1]) for _ in range(1, self.place.workers)]
        return [self._array(f"value {rank}") for rank in ranks]

    def hand_out(self, value: Array) -> None:
        self.server.set("sum", memoryview(value).cast("B"))
        for rank in range(1, self.place.workers):
            self.server.rpush(f"sum for {rank}", 1)

    def _array(self, key: str) -> Array:
        return np.frombuffer(self.server.get(key), np.float32).reshape(self.value.shape)

    def release(self) -> None:
        super().release()
        if self.place.rank == 0:
            self.server.flushall()
