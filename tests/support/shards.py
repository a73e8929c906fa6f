"""Servers' shards next to a local store: the same pushes, cut into slices and spread over servers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore as kv
from kvstore.errors import ConfigError
from kvstore.optimizer import Optimizer
from kvstore.optimizer.descriptions import changes_of
from kvstore.optimizer.settings_log import COUNTS, NONE, OPTIMIZER, SettingsChange, SettingsLog
from kvstore.optimizer.update_clock import UpdateClock
from kvstore.stores.parameter_server.protocol.messages import KeyEntry, KeySpec, Slice
from kvstore.stores.parameter_server.server.payload import SlicePayload, SliceUpdate, SliceValueWrite
from kvstore.stores.parameter_server.server.store_shard import StoreShard
from kvstore.stores.parameter_server.transport.shared_buffers import SharedValues

Array = npt.NDArray[Any]
Value = Array | kv.RowSparseArray


def entry_of(
    key: int | str, value: Value, cuts: Sequence[int], servers: int, number: int, ids: Any
) -> KeyEntry:
    """Cut a key at elements, or at rows, and give the slices to servers in turn."""
    sparse = isinstance(value, kv.RowSparseArray)
    end = value.shape[0] if sparse else math.prod(value.shape)
    bounds = [0, *(cut for cut in cuts if 0 < cut < end), end]
    pieces = [Slice(next(ids), i % servers, low, high) for i, (low, high) in enumerate(pairwise(bounds))]
    spec = KeySpec(key, tuple(value.shape), value.dtype.name, sparse)
    return KeyEntry(spec, number, tuple(pieces), False)


def payload_of(value: Value, piece: Slice, sparse: bool) -> SlicePayload:
    """What a worker sends of a value for a slice; of every other slice at an odd address."""
    odd = at_odd_address if piece.id % 2 else memoryview
    if isinstance(value, kv.RowSparseArray):
        low, high = np.searchsorted(value.indices, [piece.start, piece.stop])
        if not sparse:  # a slice of elements that begins and ends with a row
            width = math.prod(value.shape[1:])
            low, high = np.searchsorted(value.indices, [piece.start // width, piece.stop // width])
        ids, rows = value.indices[low:high], value.data[low:high]
        return SlicePayload(odd(ids.tobytes() + rows.tobytes()), rows=int(high - low))
    if sparse:
        return SlicePayload(odd(value[piece.start : piece.stop].tobytes()))
    return SlicePayload(odd(np.ascontiguousarray(value).reshape(-1)[piece.start : piece.stop].tobytes()))


def at_odd_address(data: bytes) -> memoryview:
    room = np.empty(len(data) + 65, np.uint8)
    start = -room.ctypes.data % 64 + 1
    room[start : start + len(data)] = np.frombuffer(data, np.uint8)
    return memoryview(room)[start : start + len(data)]


class StoreShards:
    """The servers of one store."""

    def __init__(self, servers: int, memory: SharedValues | None = None) -> None:
        self.shards = [StoreShard(0, server, memory) for server in range(servers)]
        self.entries: dict[int | str, KeyEntry] = {}
        self._ids = iter(range(100, 10_000))
        #: Changes of settings, of one worker; and the keys it has pushed since the optimizer was set.
        self.log, self.clock = SettingsLog(), UpdateClock()
        #: How many calls it has made in which all workers take part.
        self.place = 0
        self._version = self._ordinal = 0
        self.pushes: dict[int | str, int] = {}

    def init(self, key: int | str, value: Value, cuts: Sequence[int] = ()) -> None:
        entry = entry_of(key, value, cuts, len(self.shards), len(self.entries), self._ids)
        self.entries[key] = entry
        for shard in self.shards:
            shard.define_slices([entry])
        self.write(key, value, first=True)

    def write(self, key: int | str, value: Value, first: bool = False) -> None:
        entry = self.entries[key]
        for piece in entry.slices:
            payload = payload_of(value, piece, entry.spec.sparse)
            assert self.shards[piece.server].write_values([SliceValueWrite(piece.id, payload, first)]) == [
                None
            ]

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self.install(OPTIMIZER, json.dumps(optimizer.describe()))
        self.clock = UpdateClock(optimizer.begin_num_update, epoch=self.log.newest.epoch)

    def configure(self, optimizer: Optimizer, *names: str) -> None:
        """Change settings with these names to those of an optimizer."""
        self.install("configure", changes_of(optimizer, names))

    def load_counts(self, optimizer: Optimizer) -> None:
        """Set the update counts to those of an optimizer, as a file does."""
        self.install(COUNTS)
        self.clock = UpdateClock.from_optimizer(optimizer, self.log.newest.epoch)

    def install(self, kind: str, text: str = "") -> None:
        """Change the settings at this place, everywhere or, if a server refuses, nowhere."""
        ordinal = self._ordinal + (kind in (OPTIMIZER, NONE))
        change, told = self.log.add(0, self.place, kind, ordinal, text)
        try:
            self._tell(told)
        except ConfigError:
            self._tell([change, *self.log.withdraw(change)[0]])
            raise
        self._ordinal, self._version = ordinal, self.place + 1
        if kind == NONE:
            self.clock = UpdateClock(epoch=change.epoch)

    def _tell(self, told: Iterable[SettingsChange]) -> None:
        for place in {one.place for one in told}:
            for shard in self.shards:
                shard.install_settings(place + 1, self.log.settings_at(place))

    def stamp(self, time: int) -> int:
        """Return the stamp of a time since the update counts were set."""
        return UpdateClock(time=time, epoch=self.log.newest.epoch).stamp

    def barrier(self) -> None:
        """Later settings are those of another version."""
        self.place += 1

    def push(self, *pushed: tuple[int | str, Sequence[Value]]) -> list[Exception | None]:
        """Complete one round of each key, with one part for each worker; the keys in one call."""
        jobs: list[list[SliceUpdate]] = [[] for _ in self.shards]
        for (key, values), stamp in zip(pushed, self.clock.stamps(key for key, _ in pushed), strict=True):
            self.pushes[key] = self.pushes.get(key, 0) + 1
            self.clock.count_push(key)
            entry = self.entries[key]
            for piece in entry.slices:
                parts = [(rank, payload_of(v, piece, entry.spec.sparse)) for rank, v in enumerate(values)]
                jobs[piece.server].append(
                    SliceUpdate(piece.id, self.pushes[key], parts, self._version, stamp)
                )
        self.place += 1
        return self.apply(jobs)

    def apply(self, jobs: list[list[SliceUpdate]]) -> list[Exception | None]:
        results: list[Exception | None] = []
        for shard, its in zip(self.shards, jobs, strict=True):
            ready = shard.rounds.applicable_jobs(its)
            assert len(ready) == len(its)
            results += shard.rounds.apply_jobs(ready)
        return results

    def pull(self, key: int | str) -> Array:
        """Return a dense key, or a table whose absent rows are filled with their initial values."""
        spec, pieces = self.entries[key].spec, self.entries[key].slices
        if spec.sparse:
            every = (np.arange(piece.start, piece.stop, dtype=np.int64) for piece in pieces)
            found = [
                self.shards[p.server].read_rows(p.id, ids)[1] for p, ids in zip(pieces, every, strict=True)
            ]
        else:
            found = [self.shards[piece.server].read_value(piece.id) for piece in pieces]
        return np.concatenate(found).reshape(spec.shape)

    def states(self) -> dict[int, bytes]:
        return {p.id: self.shards[p.server].fetch_state(p.id) for p in self.pieces()}

    def put_states(self, parts: dict[int, bytes]) -> None:
        for piece in self.pieces():
            self.shards[piece.server].put_state(piece.id, parts[piece.id])

    def pieces(self) -> Iterable[Slice]:
        return [piece for entry in self.entries.values() for piece in entry.slices]


class Beside:
    """A local store and shards, which get the same and must have the same bits."""

    def __init__(self, servers: int, memory: SharedValues | None = None) -> None:
        self.local = kv.create("local")
        self.shards = StoreShards(servers, memory)

    def init(self, key: int | str, value: Value, cuts: Sequence[int] = ()) -> None:
        self.local.init(key, value)
        self.shards.init(key, value, cuts)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self.local.set_optimizer(Optimizer.from_config(**optimizer.describe()))
        self.shards.set_optimizer(optimizer)

    def push(self, *pushed: tuple[int | str, Sequence[Value]]) -> None:
        for key, values in pushed:
            self.local.push(key, list(values))
        assert self.shards.push(*pushed) == [None] * sum(
            len(self.shards.entries[key].slices) for key, _ in pushed
        )

    def check(self, key: int | str) -> None:
        view = self.local.view(key)
        dense = np.empty(view.shape, view.dtype)
        self.local.pull(key, out=dense)
        ours = self.shards.pull(key)
        np.testing.assert_array_equal(ours, dense)
        assert ours.tobytes() == np.ascontiguousarray(dense).tobytes()
