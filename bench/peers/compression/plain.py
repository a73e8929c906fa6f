"""NumPy: whole-array operations, on all of an array at once or block by block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bench.cases.compression import CompressionCase
from bench.peers.base import Array
from bench.peers.compression.base import Compressor, Way, copy_to_all

BLOCK = 32 * 1024  # elements whose buffers stay in a cache; a multiple of the codes of a word


class Numpy(Compressor):
    """Whole arrays at once, and by blocks."""

    def ways(self, case: CompressionCase) -> dict[str, Way]:
        return {
            "by blocks": ByBlocks(case.bits, case.threshold, BLOCK),
            "whole arrays": ByBlocks(case.bits, case.threshold, case.size),
        }


class Coding:
    """Codes of one or two bits for up to `room` elements, a multiple of 32; buffers are allocated once."""

    def __init__(self, bits: int, threshold: float, room: int) -> None:
        self.bits, self.threshold = bits, np.float32(threshold)
        self._up, self._sign = np.empty(room, bool), np.empty(room, np.int8)
        self._bits = np.zeros((room, bits), bool)
        self._sent = np.empty(room, np.float32)
        self._table = table(bits, float(self.threshold))

    def send(self, gradient: Array, residual: Array) -> Array:
        """Subtract the sent values from the residual, and return them; valid until the next call."""
        n = gradient.size
        up, sign, sent = self._up[:n], self._sign[:n], self._sent[:n]
        np.add(residual, gradient, out=residual)
        if self.bits == 1:
            np.greater(residual, self.threshold, out=up)
            np.multiply(up, np.float32(2), out=sent)
            np.subtract(sent, np.float32(1), out=sent)
        else:
            np.greater_equal(residual, self.threshold, out=up)
            np.less_equal(residual, -self.threshold, out=sign.view(bool))
            np.subtract(up.view(np.int8), sign, out=sign)
            np.multiply(sign, self.threshold, out=sent)
        np.subtract(residual, sent, out=residual)
        return sent

    def encode(self, gradient: Array, residual: Array, packed: Array) -> None:
        """Send, and pack the sent values, the first element in the highest bits."""
        n = gradient.size
        self.send(gradient, residual)
        if self.bits == 2:  # the higher bit: the element is sent; the lower bit: it is positive
            np.not_equal(self._sign[:n], 0, out=self._bits[:n, 0])
        self._bits[:n, -1] = self._up[:n]
        self._bits[n:] = False
        packed[:] = np.packbits(self._bits.reshape(-1)[: 8 * packed.size])

    def add(self, packed: Array, target: Array) -> None:
        """Add the values of the bytes, which are looked up in a table."""
        sent = self._sent[: packed.size * self._table.shape[1]]
        np.take(self._table, packed, axis=0, out=sent.reshape(packed.size, -1), mode="clip")
        np.add(target, sent[: target.size], out=target)


def table(bits: int, threshold: float) -> Array:
    """Make a row for each byte, with the values of its elements."""
    codes = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).reshape(256, -1, bits)
    sign = np.where(codes[..., -1] == 1, 1, -1)
    return (sign if bits == 1 else codes[..., 0] * sign * threshold).astype(np.float32)


class ByBlocks:
    """Processes arrays in blocks of `block` elements."""

    def __init__(self, bits: int, threshold: float, block: int) -> None:
        self._block = -(-block // 32) * 32
        self._coding = Coding(bits, threshold, self._block)
        self._in_byte = 8 // bits

    def encode(self, gradient: Array, residual: Array, packed: Array) -> None:
        for part, of_packed in self._parts(gradient.size):
            self._coding.encode(gradient[part], residual[part], packed[of_packed])

    def add(self, packed: Array, target: Array) -> None:
        for part, of_packed in self._parts(target.size):
            self._coding.add(packed[of_packed], target[part])

    def push(self, gradients: list[Array], residuals: list[Array], stored: Array) -> None:
        """Sum without packing: the codes are not sent."""
        for part, _ in self._parts(stored.size):
            np.copyto(stored[part], self._coding.send(gradients[0][part], residuals[0][part]))
            for gradient, residual in zip(gradients[1:], residuals[1:], strict=True):
                np.add(stored[part], self._coding.send(gradient[part], residual[part]), out=stored[part])

    def pull(self, stored: Array, outs: list[Array]) -> None:
        copy_to_all(stored, outs)

    def _parts(self, size: int) -> Iterator[tuple[slice, slice]]:
        for at in range(0, size, self._block):
            end = at + self._block
            yield slice(at, end), slice(at // self._in_byte, end // self._in_byte)
