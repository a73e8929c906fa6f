"""What the kernels of all codecs have in common: quantise, dequantise and sum, both without words between.

A codec has some codes in a byte, the first element's in the highest bits; bytes follow each other in memory,
and what is missing in the last 32-bit word is 0. What a code does not say stays in the residual (error
feedback).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .chunks import Body, arrays, coded, counter, framed, spreader
from .intrinsics import dual, load_byte, store_byte, table
from .lanes import Lanes
from .spec import Spec
from .sums import summer
from .table import DST, FIRST_SOURCE

Group = Any
Value = Any


class Codec(NamedTuple):
    """One codec, for a group of as many elements as have their codes in one byte, and for one element.

    Attributes
    ----------
    lanes : Lanes
        Of such a group of float32.
    bits : int
        Of a code.
    in_byte, in_word : int
        Codes in a byte and in a word.
    encode, encode_one : callable
        ``(r, threshold) -> (byte, left)``: the codes, and what they leave; for one element its code.
    settle, settle_one : callable
        ``(r, threshold) -> (decoded, left)``: what the codes stand for, and what they leave.
    decode, decode_one : callable
        ``(byte, threshold) -> decoded``; for one element of its code.
    """

    lanes: Lanes
    bits: int
    in_byte: int
    in_word: int
    encode: Callable[[Group, Value], tuple[int, Group]]
    encode_one: Callable[[Value, Value], tuple[int, Value]]
    settle: Callable[[Group, Value], tuple[Group, Group]]
    settle_one: Callable[[Value, Value], tuple[Value, Value]]
    decode: Callable[[int, Value], Group]
    decode_one: Callable[[int, Value], Value]


def _log2(power: int) -> int:
    return power.bit_length() - 1


def quantise(spec: Spec, codec: Codec) -> Body:
    """Sum of k gradients and the residual -> words, and what is left -> residual."""
    lanes, bits, in_byte, shift = codec.lanes, codec.bits, codec.in_byte, _log2(codec.in_byte)
    size, load, store, add = lanes.size, lanes.load, lanes.store, lanes.add
    load_one, store_one = lanes.load_one, lanes.store_one
    encode, encode_one = codec.encode, codec.encode_one
    total, total_one = summer(lanes, spec.k, grouped=True), summer(lanes, spec.k, grouped=False)
    count = counter(spec.k)

    @dual
    def residual(row: int, lists: int) -> int:
        return table(lists + 8 * (FIRST_SOURCE + count(row)))

    @dual
    def group(image: int, row: int, e: int, threshold: Value) -> None:
        lists = arrays(image, row)
        at = residual(row, lists) + e * size
        byte, left = encode(add(load(at), total(row, lists, e)), threshold)
        store(at, left)
        store_byte(table(coded(image, row)) + (e >> shift), byte)

    @dual
    def rest(image: int, row: int, e: int, end: int, threshold: Value) -> None:
        lists = arrays(image, row)
        byte = 0
        for j in range(in_byte):
            byte <<= bits
            if e + j < end:
                at = residual(row, lists) + (e + j) * size
                code, left = encode_one(load_one(at) + total_one(row, lists, e + j), threshold)
                store_one(at, left)
                byte |= code
        store_byte(table(coded(image, row)) + (e >> shift), byte)

    return framed(spec.chunk, lanes.count, group, rest, step=in_byte, whole=codec.in_word)


def dequantise(spec: Spec, codec: Codec) -> Body:
    """Words of k senders -> sum of what they stand for, from left to right."""
    lanes, bits, in_byte, shift = codec.lanes, codec.bits, codec.in_byte, _log2(codec.in_byte)
    size, store, store_one, add = lanes.size, lanes.store, lanes.store_one, lanes.add
    decode, decode_one, count = codec.decode, codec.decode_one, counter(spec.k)
    spread, spread_one = spreader(size, store), spreader(size, store_one)

    @dual
    def byte_of(codes: int, j: int, e: int) -> int:
        return load_byte(table(codes + 8 * j) + (e >> shift))

    @dual
    def one_of(codes: int, j: int, e: int, threshold: Value) -> Value:
        later = in_byte - 1 - (e & (in_byte - 1))
        code = (byte_of(codes, j, e) >> (bits * later)) & ((1 << bits) - 1)
        return decode_one(code, threshold)

    @dual
    def group(image: int, row: int, e: int, threshold: Value) -> None:
        lists, codes = arrays(image, row), coded(image, row)
        acc = decode(byte_of(codes, 0, e), threshold)
        for j in range(1, count(row)):
            acc = add(acc, decode(byte_of(codes, j, e), threshold))
        store(table(lists + 8 * DST) + e * size, acc)
        spread(row, lists, 0, e, acc)

    @dual
    def rest(image: int, row: int, e: int, end: int, threshold: Value) -> None:
        lists, codes = arrays(image, row), coded(image, row)
        acc = one_of(codes, 0, e, threshold)
        for j in range(1, count(row)):
            acc = acc + one_of(codes, j, e, threshold)
        store_one(table(lists + 8 * DST) + e * size, acc)
        spread_one(row, lists, 0, e, acc)

    return framed(spec.chunk, lanes.count, group, rest)


def reduce(spec: Spec, codec: Codec) -> Body:
    """K gradients, each with its residual -> sum of what their codes would stand for, and the residuals."""
    lanes, count = codec.lanes, counter(spec.k)
    total = _settled_sum(spec, codec, grouped=True)
    total_one = _settled_sum(spec, codec, grouped=False)
    size, store, store_one = lanes.size, lanes.store, lanes.store_one
    spread, spread_one = spreader(size, store, residuals=1), spreader(size, store_one, residuals=1)

    @dual
    def group(image: int, row: int, e: int, threshold: Value) -> None:
        lists = arrays(image, row)
        acc = total(row, lists, e, threshold)
        store(table(lists + 8 * DST) + e * size, acc)
        spread(row, lists, count(row), e, acc)

    @dual
    def rest(image: int, row: int, e: int, end: int, threshold: Value) -> None:
        lists = arrays(image, row)
        acc = total_one(row, lists, e, threshold)
        store_one(table(lists + 8 * DST) + e * size, acc)
        spread_one(row, lists, count(row), e, acc)

    return framed(spec.chunk, lanes.count, group, rest)


def _settled_sum(spec: Spec, codec: Codec, grouped: bool) -> Callable[..., Group]:
    """Make the function that quantises each source in place of its residual and sums what was sent."""
    lanes, count, size = codec.lanes, counter(spec.k), codec.lanes.size
    load, store = (lanes.load, lanes.store) if grouped else (lanes.load_one, lanes.store_one)
    add, settle = (lanes.add, codec.settle) if grouped else (lanes.add_one, codec.settle_one)

    @dual
    def sent(row: int, lists: int, j: int, e: int, threshold: Value) -> Group:
        source = table(lists + 8 * (FIRST_SOURCE + j)) + e * size
        residual = table(lists + 8 * (FIRST_SOURCE + count(row) + j)) + e * size
        decoded, left = settle(add(load(residual), load(source)), threshold)
        store(residual, left)
        return decoded

    @dual
    def total(row: int, lists: int, e: int, threshold: Value) -> Group:
        acc = sent(row, lists, 0, e, threshold)
        for j in range(1, count(row)):
            acc = add(acc, sent(row, lists, j, e, threshold))
        return acc

    return total


_VERBS = {"quantise": quantise, "dequantise": dequantise, "reduce": reduce}


def body(spec: Spec, codec: Codec) -> Body:
    """Make the body of a kernel of a codec."""
    return _VERBS[spec.op.partition("_")[0]](spec, codec)
