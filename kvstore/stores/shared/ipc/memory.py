"""GPU memory that other processes open, and memory of other processes that is open here."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from ....devices.driver import CudaDriver
from ....devices.memory import host_copy
from ....devices.streams import DeviceStream
from ....errors import KVStoreError
from .table import PROOF_BYTES

#: The driver exports whole blocks of this many bytes, with everything in them.
_BLOCK = 2 << 20
_LINE = 256  # bytes: the alignment of arrays in a block


class ExportedPiece(NamedTuple):
    """Exported memory for one array."""

    address: int
    offset: int
    name: bytes
    proof: bytes


class MemoryExports:
    """Memory of one GPU that other processes may open; small arrays share blocks."""

    def __init__(self, driver: CudaDriver, device: int, stream: DeviceStream) -> None:
        self._driver, self._device, self._stream = driver, device, stream
        self._blocks: list[int] = []
        self._last: tuple[int, bytes, bytes] = (0, b"", b"")
        self._used = self._size = 0

    def allocate_array(self, nbytes: int) -> ExportedPiece:
        """Return memory for an array; KVStoreError or MemoryError if the driver has none."""
        taken = -(-nbytes // _LINE) * _LINE
        if self._size - self._used < taken:
            self._add_block(-(-(taken + _LINE) // _BLOCK) * _BLOCK)
        offset = self._used
        self._used += taken
        address, name, proof = self._last
        return ExportedPiece(address + offset, offset, name, proof)

    def _add_block(self, size: int) -> None:
        address = self._driver.allocate(self._device, size)
        self._blocks.append(address)
        name, proof = self._driver.export(self._device, address), os.urandom(PROOF_BYTES)
        handle = self._stream.handle
        content = np.frombuffer(proof, np.uint8)
        self._driver.copy(address, content.ctypes.data, content.nbytes, handle, self._device)
        self._driver.synchronize(handle, self._device)
        self._last = address, name, proof
        self._used, self._size = _LINE, size

    def close(self) -> None:
        """Free all of it; no process has it open."""
        while self._blocks:
            self._driver.free(self._device, self._blocks.pop())


class MemoryImports:
    """Memory of other processes' GPUs, opened for work on this process's."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._open: dict[tuple[int, bytes], int] = {}

    def address(self, stream: DeviceStream, name: bytes, proof: bytes) -> int:
        """Open memory, or find it open, and check that it contains its owner's proof."""
        known = self._open.get((stream.device, name))
        if known is None:
            known = self._driver.open(stream.device, name)
            self._open[stream.device, name] = known
            found = np.zeros(PROOF_BYTES, np.uint8)
            host_copy(self._driver, known, found, stream.handle, stream.device)
            if found.tobytes() != proof:
                raise KVStoreError("CUDA IPC has opened other memory than the worker has offered")
        return known

    def close(self) -> None:
        """Close all of it; no work uses it any more."""
        while self._open:
            (device, _), address = self._open.popitem()
            self._driver.close(device, address)
