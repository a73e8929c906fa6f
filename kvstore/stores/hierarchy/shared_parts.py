"""Sums of a host for the servers beside it: they read them where they were summed, and nothing is sent.

A sum has a block of the carrier's own, and no place in the host's region: there whoever takes the round over
from a dead carrier sums again, while a server may still read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..entry import Array
from ..parameter_server.protocol.messages import PayloadLocation, Record
from ..parameter_server.protocol.payload_bytes import SHARED_BYTES
from ..parameter_server.transport.shared_buffers import Block
from ..parameter_server.worker.client import Client
from ..shared.native import _shared as shm

Handle = shm.Handle


class SharedParts:
    """What one worker carries to servers of its host, by the key's handle and the round."""

    def __init__(self, client: Client) -> None:
        self._client, self._pool = client, client.host_pool
        self._blocks: dict[tuple[Handle, int], Block] = {}

    def place(self, handle: Handle, round: int, server: int) -> Array | None:
        """Return memory for a sum, where its server reads it; None: the sum is to be sent.

        One thread at a time comes here; `give_back` may be called by another.
        """
        if self._pool is None or handle.nbytes < SHARED_BYTES or self._client.server_memory(server) is None:
            return None
        block = self._pool.allocate(handle.nbytes)
        if block is None:
            return None
        self._blocks[handle, round] = block
        return block.array.view(handle.dtype).reshape(handle.shape)

    def payload(self, handle: Handle, round: int) -> dict[str, Any] | None:
        """Say, as a record does, where a sum lies; None: in no memory of this worker's."""
        block = self._blocks.get((handle, round))
        if block is None:
            return None
        where = {"frame": block.segment, "offset": block.offset, "nbytes": handle.nbytes}
        return {"place": PayloadLocation.SHARED, **where}

    def copy(self, server: int, record: Record, to: Array) -> bool:
        """Copy what a server answers from its memory; False: it has changed meanwhile."""
        memory = self._client.server_memory(server)
        where = record.frame, record.offset, record.nbytes, record.seqlock
        return memory is not None and memory.copy(*where, to.reshape(-1).view(np.uint8))

    def give_back(self, handle: Handle, round: int) -> None:
        """Use the memory of a sum again: its server reads it no more."""
        block = self._blocks.pop((handle, round), None)
        if block is not None and self._pool is not None:
            self._pool.free(block)

    def close(self) -> None:
        """Let the memory go."""
        if self._pool is not None:
            self._pool.close()
