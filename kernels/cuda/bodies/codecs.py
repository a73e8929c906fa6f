"""The common part of the kernels of all codecs: quantise, dequantise and sum, and both without packed words.

A codec has some codes in a byte, the first element's in the highest bits; bytes follow each other in memory,
and missing codes in the last 32-bit word are 0. The part that a code does not send stays in the residual
(error feedback).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..spec import Spec
from ..table import BLOCK, CODES, RESIDUALS, SOURCES
from .chunks import Body, counter, emitter, framed, listed_now
from .intrinsics import dual, load_byte, store_byte
from .lanes import Lanes
from .sums import summer

Group = Any
Value = Any


class CodecOperations(NamedTuple):
    """One codec, for a group of as many elements as have their codes in one byte, and for one element.

    Attributes
    ----------
    lanes : Lanes
        The lanes of such a group of float32.
    bits : int
        Bits of a code.
    in_byte, in_word : int
        Codes in a byte and in a word.
    encode, encode_one : callable
        ``(r, threshold) -> (byte, left)``: the codes, and the residual; for one element its code.
    settle, settle_one : callable
        ``(r, threshold) -> (decoded, left)``: the decoded values, and the residual.
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


def quantise(spec: Spec, codec: CodecOperations) -> Body:
    """Make the body: sum of k gradients and the residual -> words, and the rest -> residual."""
    lanes, bits, in_byte, shift = codec.lanes, codec.bits, codec.in_byte, _log2(codec.in_byte)
    size, load, store, add = lanes.size, lanes.load, lanes.store, lanes.add
    load_one, store_one = lanes.load_one, lanes.store_one
    encode, encode_one = codec.encode, codec.encode_one
    total, total_one = summer(lanes, spec.k, grouped=True), summer(lanes, spec.k, grouped=False)

    @dual
    def group(row: int, e: int, end: int, threshold: Value) -> None:
        at = listed_now(row, RESIDUALS, 0) + e * size
        byte, left = encode(add(load(at), total(row, e)), threshold)
        store(at, left)
        store_byte(listed_now(row, CODES, 0) + (e >> shift), byte)

    @dual
    def rest(row: int, e: int, end: int, threshold: Value) -> None:
        byte = 0
        for j in range(in_byte):
            byte <<= bits
            if e + j < end:
                at = listed_now(row, RESIDUALS, 0) + (e + j) * size
                code, left = encode_one(load_one(at) + total_one(row, e + j), threshold)
                store_one(at, left)
                byte |= code
        store_byte(listed_now(row, CODES, 0) + (e >> shift), byte)

    return framed(spec.chunk, lanes.width, group, rest, step=in_byte, whole=codec.in_word)


def dequantise(spec: Spec, codec: CodecOperations) -> Body:
    """Make the body: words of k senders -> sum of their decoded values, from left to right."""
    lanes, bits, in_byte, shift = codec.lanes, codec.bits, codec.in_byte, _log2(codec.in_byte)
    add, decode, decode_one, count = lanes.add, codec.decode, codec.decode_one, counter(spec.k)
    apart = BLOCK * lanes.width >> shift  # bytes between the groups of a pair
    emit, emit_one = emitter(lanes.size, lanes.store), emitter(lanes.size, lanes.store_one)

    @dual
    def byte_of(row: int, j: int, e: int) -> int:
        return load_byte(listed_now(row, CODES, j) + (e >> shift))

    @dual
    def decoded_pair(row: int, j: int, e: int, threshold: Value) -> tuple[Group, Group]:
        at = listed_now(row, CODES, j) + (e >> shift)
        return decode(load_byte(at), threshold), decode(load_byte(at + apart), threshold)

    @dual
    def looped(row: int, e: int, threshold: Value) -> tuple[Group, Group]:
        acc, other = decoded_pair(row, 0, e, threshold)
        for j in range(1, count(row)):
            more, another = decoded_pair(row, j, e, threshold)
            acc, other = add(acc, more), add(other, another)
        return acc, other

    total = _summed_pairs(spec.k, decoded_pair, add) if spec.k else looped

    @dual
    def one_of(row: int, j: int, e: int, threshold: Value) -> Value:
        later = in_byte - 1 - (e & (in_byte - 1))
        return decode_one(byte_of(row, j, e) >> (bits * later), threshold)

    @dual
    def group(row: int, e: int, end: int, threshold: Value) -> None:
        acc = decode(byte_of(row, 0, e), threshold)
        for j in range(1, count(row)):
            acc = add(acc, decode(byte_of(row, j, e), threshold))
        emit(row, e, acc)

    @dual
    def pair(row: int, e: int, f: int, threshold: Value) -> None:
        acc, other = total(row, e, threshold)
        emit(row, e, acc)
        emit(row, f, other)

    @dual
    def rest(row: int, e: int, end: int, threshold: Value) -> None:
        acc = one_of(row, 0, e, threshold)
        for j in range(1, count(row)):
            acc = acc + one_of(row, j, e, threshold)
        emit_one(row, e, acc)

    return framed(spec.chunk, lanes.width, group, rest, pair)


def _summed_pairs(k: int, decoded: Callable[..., Any], add: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that sums the pairs of k senders, without a loop, which a compiler would keep."""
    before = _summed_pairs(k - 1, decoded, add) if k > 1 else None

    @dual
    def first(row: int, e: int, threshold: Value) -> tuple[Group, Group]:
        return decoded(row, 0, e, threshold)  # type: ignore[no-any-return]

    @dual
    def total(row: int, e: int, threshold: Value) -> tuple[Group, Group]:
        acc, other = before(row, e, threshold)  # type: ignore[misc]
        more, another = decoded(row, k - 1, e, threshold)
        return add(acc, more), add(other, another)

    return first if before is None else total


def reduce(spec: Spec, codec: CodecOperations) -> Body:
    """Make the body: k gradients and residuals -> sum of their decoded values, and new residuals."""
    lanes = codec.lanes
    total, total_one = _settled_sum(spec, codec, grouped=True), _settled_sum(spec, codec, grouped=False)
    emit, emit_one = emitter(lanes.size, lanes.store), emitter(lanes.size, lanes.store_one)

    @dual
    def group(row: int, e: int, end: int, threshold: Value) -> None:
        emit(row, e, total(row, e, threshold))

    @dual
    def rest(row: int, e: int, end: int, threshold: Value) -> None:
        emit_one(row, e, total_one(row, e, threshold))

    return framed(spec.chunk, lanes.width, group, rest)


def _settled_sum(spec: Spec, codec: CodecOperations, grouped: bool) -> Callable[..., Group]:
    """Make the function that quantises each source, updates its residual, and sums the decoded values."""
    lanes, count, size = codec.lanes, counter(spec.k), codec.lanes.size
    load, store = (lanes.load, lanes.store) if grouped else (lanes.load_one, lanes.store_one)
    add, settle = (lanes.add, codec.settle) if grouped else (lanes.add_one, codec.settle_one)

    @dual
    def sent(row: int, j: int, e: int, threshold: Value) -> Group:
        residual = listed_now(row, RESIDUALS, j) + e * size
        gradient = load(listed_now(row, SOURCES, j) + e * size)
        decoded, left = settle(add(load(residual), gradient), threshold)
        store(residual, left)
        return decoded

    @dual
    def total(row: int, e: int, threshold: Value) -> Group:
        acc = sent(row, 0, e, threshold)
        for j in range(1, count(row)):
            acc = add(acc, sent(row, j, e, threshold))
        return acc

    return total


_VERBS = {"quantise": quantise, "dequantise": dequantise, "reduce": reduce}


def body(spec: Spec, codec: CodecOperations) -> Body:
    """Make the body of a kernel of a codec."""
    return _VERBS[spec.op.partition("_")[0]](spec, codec)
