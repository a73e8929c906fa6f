"""Sums of a host for servers on the same host, which read them in shared memory: nothing is sent.

A sum is in a block of the carrier's own, and not in the host's region: there, a worker that replaces a dead
carrier sums again while a server may still read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..entry import Array
from ..parameter_server.protocol.messages import PayloadLocation, Record
from ..parameter_server.protocol.payload_bytes import SHARED_BYTES
from ..parameter_server.transport.shared_buffers import SharedBlock
from ..parameter_server.worker.client import WorkerClient
from ..shared.native import _shared as shm

Handle = shm.Handle


class SharedParts:
    """The sums that one worker carries to servers of its host, by the key's handle and the round."""

    def __init__(self, client: WorkerClient) -> None:
        self._client, self._pool = client, client.host_pool
        self._blocks: dict[tuple[Handle, int], SharedBlock] = {}

    def place(self, handle: Handle, round: int, server: int) -> Array | None:
        """Return memory for a sum that its server can read; None: the sum is sent.

        One thread at a time calls this; another may call `give_back`.
        """
        if self._pool is None or handle.nbytes < SHARED_BYTES or self._client.server_memory(server) is None:
            return None
        block = self._pool.allocate(handle.nbytes)
        if block is None:
            return None
        self._blocks[handle, round] = block
        return block.array.view(handle.dtype).reshape(handle.shape)

    def payload(self, handle: Handle, round: int) -> dict[str, Any] | None:
        """Return the place of a sum as the fields of a record; None: in no memory of this worker's."""
        block = self._blocks.get((handle, round))
        if block is None:
            return None
        where = {"frame": block.segment, "offset": block.offset, "nbytes": handle.nbytes}
        return {"place": PayloadLocation.SHARED, **where}

    def copy(self, server: int, record: Record, to: Array) -> bool:
        """Copy a server's answer from its memory; False: the memory has changed during the copy."""
        memory = self._client.server_memory(server)
        where = record.frame, record.offset, record.nbytes, record.seqlock
        return memory is not None and memory.copy_block(*where, to.reshape(-1).view(np.uint8))

    def give_back(self, handle: Handle, round: int) -> None:
        """Reuse the memory of a sum, which its server no longer reads."""
        block = self._blocks.pop((handle, round), None)
        if block is not None and self._pool is not None:
            self._pool.free(block)

    def close(self) -> None:
        """Free the memory."""
        if self._pool is not None:
            self._pool.close()
