"""The memory that a worker shares with servers on its machine: pushed payloads, and values to read."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from ....arrays import pages
from ....kernels import cpu
from ....observe.counters import MOVING, SHARED, SUMMING
from ....observe.native._observe import Counters
from ...entry import Array
from ..protocol.messages import Record
from ..protocol.payload_bytes import SHARED_BYTES
from ..transport.shared_buffers import SharedBlock, SharedBufferPool
from .client import WorkerClient
from .key_directory import DistKey


class BlockLease:
    """A block that is returned with the last reference to this, or to an array that NumPy makes of it."""

    __slots__ = ("__weakref__", "_pool", "block")

    def __init__(self, pool: SharedBufferPool, block: SharedBlock) -> None:
        self._pool, self.block = pool, block

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.block.array.__array_interface__

    def __del__(self) -> None:
        self._pool.free(self.block)


class SharedPayload(NamedTuple):
    """The place of a whole value in shared memory."""

    segment: int
    offset: int
    #: Whether it is an array of the caller, from `empty_array`.
    own: bool = False
    #: A reference that must live until the push is answered.
    lease: BlockLease | None = None


class SharedPayloads:
    """The shared memory of one worker's store.

    A pushed sum must not change until its round is complete, because servers read it only then. So each key
    has a block for every push whose round is not known to be complete, and uses these blocks again. Without
    rounds, a push is answered after it was read, as other requests with values are.
    """

    def __init__(self, client: WorkerClient, synchronous: bool) -> None:
        self._client, self._synchronous = client, synchronous
        self._pool: SharedBufferPool | None = client.pool
        self._lent: dict[int | str, deque[tuple[int, SharedBlock]]] = {}
        #: Memory of the arrays that `empty_array` has made and that still exist, by address.
        self._handed_out: WeakValueDictionary[int, BlockLease] = WeakValueDictionary()
        #: Such arrays that were pushed in rounds not known to be complete: kept alive even if dropped.
        self._pushed: dict[int | str, deque[tuple[int, BlockLease]]] = {}

    def put_sum(self, key: DistKey, values: list[Array], pushed: bool = True) -> SharedPayload | None:
        """Put the sum of values where all servers can read it; None: send it in frames.

        If it is `pushed`, it is the key's next push, which is counted later.
        """
        if key.nbytes < SHARED_BYTES or not self.shares_memory:
            return None
        copies: list[cpu.ReduceItem] = []
        shared = self.place_sum(key, values, copies, pushed)
        self.carry_out(copies)
        return shared

    def carry_out(self, copies: list[cpu.ReduceItem]) -> None:
        """Do the copies, or sums, that `place_sum` has prepared."""
        if copies:
            sums = any(isinstance(values, list) and len(values) > 1 for values, _, _ in copies)
            with self.counters.during(SUMMING if sums else MOVING):
                cpu.reduce(copies)

    @property
    def counters(self) -> Counters:
        """The counters that record times."""
        return self._client.counters

    @property
    def shares_memory(self) -> bool:
        """Whether large values are put where servers read them, if there is memory."""
        return self._pool is not None and self._client.all_read_here

    def place_sum(
        self, key: DistKey, values: list[Array], copies: list[cpu.ReduceItem], pushed: bool = True
    ) -> SharedPayload | None:
        """As `put_sum`, of a large key where memory is shared; adds copies or sums to do to `copies`."""
        assert self._pool is not None
        in_round = pushed and self._synchronous
        there = self._handed_out.get(values[0].ctypes.data) if self._handed_out and len(values) == 1 else None
        if there is not None:
            if in_round:
                self._keep_block(key, there)
            return SharedPayload(there.block.segment, there.block.offset, own=True, lease=there)
        block = self._push_block(key) if in_round else self._pool.allocate(key.nbytes)
        if block is None:
            return None
        target = block.array[: key.nbytes].view(key.dtype).reshape(key.shape)
        copies.append((values, target, []))
        lease = None if in_round else BlockLease(self._pool, block)
        return SharedPayload(block.segment, block.offset, lease=lease)

    def _keep_block(self, key: DistKey, lease: BlockLease) -> None:
        pushed = self._pushed.setdefault(key.key, deque())
        complete = self._client.complete_pushes(key.parts)
        while pushed and pushed[0][0] <= complete:
            pushed.popleft()
        pushed.append((key.pushes + 1, lease))

    def _push_block(self, key: DistKey) -> SharedBlock | None:
        """Return memory for the key's next push: of a push that was not sent, of a complete round, or new."""
        assert self._pool is not None
        lent = self._lent.setdefault(key.key, deque())
        if lent and lent[-1][0] > key.pushes:
            _, block = lent.pop()
        elif lent and lent[0][0] <= self._client.complete_pushes(key.parts):
            _, block = lent.popleft()
        else:
            taken = self._pool.allocate(key.nbytes)
            if taken is None:
                return None
            block = taken
        lent.append((key.pushes + 1, block))
        return block

    def note_in_place(self, nbytes: int) -> None:
        """Count a value that a server has written over a pushed array."""
        self.counters.move(SHARED, 0, nbytes)

    def copy_value(self, server: int, record: Record, targets: list[Array]) -> bool:
        """Copy a value from a server's memory; False: it changed during the copy."""
        buffers = self._client.server_memory(server)
        first = targets[0]
        if buffers is None or not buffers.copy_block(
            record.frame, record.offset, record.nbytes, record.seqlock, first.view(np.uint8)
        ):
            return False
        if len(targets) > 1:
            cpu.reduce([([first], None, targets[1:])])
        return True

    def empty_array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return an array that can be pushed without a copy, where servers map this process's memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        block = self._pool.allocate(nbytes) if self._pool is not None and nbytes else None
        if block is None:
            return pages.empty(shape, dtype)
        assert self._pool is not None
        lease = BlockLease(self._pool, block)
        array = np.asarray(lease)[:nbytes].view(dtype).reshape(shape)
        self._handed_out[array.ctypes.data] = lease
        return array

    def close(self) -> None:
        """Release the memory, with the last array that uses it."""
        self._lent.clear()
        self._pushed.clear()
        if self._pool is not None:
            self._pool.close()
