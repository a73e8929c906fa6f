"""The limit of a row-sparse push and pull: bare sockets, C, and a server with the same work.

It receives the rows of all workers, adds those of the same id in rank order, updates its table in place,
gathers the rows that each worker requests and sends them. There are no deadlines and no undo log, and push
and pull are one trip: with several parts a part of the table is answered while the next part arrives.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cases import dist as dist_cases
from bench.cases.common import memory
from bench.cases.dist import DistCase
from bench.peers.base import Array
from bench.peers.dist.base import changes
from bench.peers.dist.sockets import Sockets
from bench.peers.group.link import Place

#: One thread for all connections of the server, or one for each.
WAYS = ("one thread", "threads")
PARTS = (1, 4, 16)
_NO_IDS = np.empty(0, np.int64)


class RowUpdate(Sockets):
    """A connection for each way of the server and each number of parts; they share one table."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.groups = itertools.count()
        self.table: Array = np.empty((0, 0), np.float32)

    def prepare(self, case: DistCase) -> list[Array]:
        data = dist_cases.sparse_inputs(case, self.place.rank)
        self.table = data.table
        self._start(case.servers)
        rows = memory(data.rows.size, "huge").reshape(data.rows.shape)
        rows[...] = data.rows
        out = memory(rows.size, "huge").reshape(rows.shape)
        compared = np.empty((len(data.compared), rows.shape[1]), np.float32)
        self.state = [data.ids, rows, out]
        for way, parts in itertools.product(WAYS, PARTS):
            hello = (
                next(self.groups),
                self.place.rank,
                WAYS.index(way),
                max(len(data.ids), len(data.compared)),
            )
            line = self._line(self.addresses[0], struct.pack("4q", *hello))
            self.lines[f"{way} {parts}"] = [line]
            trip = partial(self._push_and_pull, line.fileno(), parts)
            name = f"{way}, {parts} part{'s' if parts > 1 else ''}"
            self.variants[name] = partial(trip, data.ids, rows, data.ids, out)
            if len(self.variants) == 1:
                self.first()
                trip(_NO_IDS, rows, data.compared, compared)
        return changes([compared], [data.table[data.compared]])

    def _answer(self, listener: int) -> None:
        rows = np.ascontiguousarray(self.table)
        n, width = (ctypes.c_int64(size) for size in rows.shape)
        rate = ctypes.c_float(dist_cases.LEARNING_RATE)
        at = ctypes.c_void_p(rows.ctypes.data)
        self.code.row_update_serve(listener, self.place.workers, at, n, width, rate)

    def _push_and_pull(
        self,
        line: int,
        parts: int,
        ids: npt.NDArray[np.int64],
        rows: Array,
        wanted: npt.NDArray[Any],
        out: Array,
    ) -> None:
        n, width = (ctypes.c_int64(size) for size in self.table.shape)
        pushed = ctypes.c_void_p(ids.ctypes.data), ctypes.c_int64(len(ids)), ctypes.c_void_p(rows.ctypes.data)
        pulled = (
            ctypes.c_void_p(wanted.ctypes.data),
            ctypes.c_int64(len(wanted)),
            ctypes.c_void_p(out.ctypes.data),
        )
        if self.code.row_update_trip(line, parts, n, width, *pushed, *pulled):
            raise ConnectionError("the server that updates rows has ended")
