"""What quick calls with the same keys have in common: the slices of each server, and memory for reuse."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....arrays import pages
from ....arrays.grouping import Key
from ....kernels import cpu
from ...entry import Array
from ...key_lists import KeyColumns, KeyLists
from ..protocol.messages import RecordKind
from ..protocol.payload_bytes import SHARED_BYTES
from ..transport.native._streams import Exchange
from ..transport.shared_buffers import PeerBuffers
from .client import WorkerClient
from .key_directory import DistKey, KeyDirectory

log = logging.getLogger("kvstore.ps")

_ALIGNED = 64  # bytes: where the packed values of a key begin
_F32 = np.dtype(np.float32)

#: Arrays of a call, and their addresses.
Arrays = tuple[list[Array], bytes]


class ServerPlan:
    """The slices of a call that one server has."""

    def __init__(self, kind: RecordKind, server: int, keys: Sequence[DistKey], client: WorkerClient) -> None:
        self.server = server
        own = [(at, part) for at, key in enumerate(keys) for part in key.parts if part.server == server]
        self.slices = [part.id for _, part in own]
        parts = []
        for at, part in own:
            size = keys[at].dtype.itemsize
            parts.append((part.id, at, part.start * size, (part.stop - part.start) * size))
        self.exchange: Exchange = client.make_exchange(server, parts, [key.nbytes for key in keys], kind)
        self._known: tuple[PeerBuffers | None, int] = (None, 0)

    def map(self, memory: PeerBuffers | None) -> None:
        """Know what is known by now of the server's memory."""
        known, count = self._known
        if memory is not known:
            self.exchange.unmap()
            count = 0
        if memory is not None and (memory is not known or len(memory.segments) != count):
            self.exchange.map(memory.segments.items())
            count = len(memory.segments)
        self._known = memory, count


class PackedValues:
    """Memory for what a codec with this code packs of each key."""

    def __init__(self, keys: Sequence[DistKey], code: int) -> None:
        self.code = code
        sizes = [cpu.encoded_bytes(code, key.size) for key in keys]
        starts = list(_starts(sizes))
        memory = pages.empty((starts[-1] + sizes[-1],), np.dtype(np.uint8))
        self.words: list[Array] = [memory[at : at + size] for at, size in zip(starts, sizes, strict=True)]
        self.addresses = (memory.ctypes.data + np.array(starts, np.uint64)).astype(np.uint64).tobytes()


def _starts(sizes: list[int]) -> Iterator[int]:
    start = 0
    for size in sizes:
        yield start
        start += -(-size // _ALIGNED) * _ALIGNED


class CallPlan(KeyColumns[DistKey]):
    """What calls with the same keys have in common; the keys stand in the order in which they are updated."""

    def __init__(self, kind: RecordKind, given: Sequence[DistKey], client: WorkerClient) -> None:
        ranks = [key.key if isinstance(key.key, int) else key.number for key in given]
        super().__init__(given, ranks, [key.like for key in given])
        self.kind, keys = kind, self.keys
        self.is_float32 = all(key.dtype == _F32 for key in keys)
        #: Keys whose values may go through memory that the servers read.
        self.large = [at for at, key in enumerate(keys) if key.nbytes >= SHARED_BYTES and not key.sparse]
        servers = sorted({part.server for key in keys for part in key.parts})
        self.server_numbers = servers
        self.slices = frozenset(part.id for key in keys for part in key.parts)
        self.servers = [ServerPlan(kind, server, keys, client) for server in servers]
        self._packed: PackedValues | None = None

    def packed(self, code: int) -> PackedValues:
        """Return memory for packed values; it is used again, unless it is given away."""
        if self._packed is None or self._packed.code != code:
            self._packed = PackedValues(self.keys, code)
        return self._packed

    def give_packed(self) -> None:
        """Somebody else keeps that memory as it is."""
        self._packed = None


class CallPlans:
    """The plans of one store for calls of one kind, with dense keys or with tables."""

    def __init__(
        self, kind: RecordKind, client: WorkerClient, keys: KeyDirectory, tables: bool = False
    ) -> None:
        self._kind, self._client, self._directory, self._tables = kind, client, keys, tables
        self._single: dict[Key, CallPlan] = {}
        self._lists: KeyLists[CallPlan] = KeyLists()
        self._changes = -1

    def find(self, names: Any) -> CallPlan | None:
        """Return the plan for a key, or a list of them; None: these keys go the usual way."""
        if self._changes != self._directory.changes:
            self._single.clear()
            self._lists.clear()
            self._changes = self._directory.changes
        if type(names) is list:
            return self._lists.find(names, self._made)
        single = self._single.get(names) or self._made([names])
        if single is not None:
            self._single[names] = single
        return single

    def _made(self, names: list[Key]) -> CallPlan | None:
        found = [self._directory.get(name) for name in names]
        keys = [key for key in found if key is not None and key.nbytes and key.sparse == self._tables]
        if len(keys) != len(names) or len(set(names)) != len(names):
            return None
        most = self._client.frame_bytes
        if any(key.nbytes > most and any(key.part_bytes(part) > most for part in key.parts) for key in keys):
            return None  # the usual way knows what cannot be sent
        log.debug(
            "plan made for %s of %d keys, the first %r", self._kind.name.lower(), len(keys), keys[0].key
        )
        return CallPlan(self._kind, keys, self._client)
