"""The common part of the kernels of all codecs: quantise, dequantise and sum, and both without packed words.

A codec has some codes in a byte, the first element's in the highest bits; bytes follow each other in memory,
and missing codes in the last 32-bit word are 0. The part that a code does not send stays in the residual
(error feedback).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..spec import KernelSpec
from ..table import BLOCK, CODES, RESIDUALS, SOURCES
from .chunks import Body, listed_now, make_body, make_counter, make_emitter
from .intrinsics import dual, load_byte, store_byte
from .lanes import ElementLanes
from .sums import make_summer

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

    lanes: ElementLanes
    bits: int
    in_byte: int
    in_word: int
    encode: Callable[[Group, Value], tuple[int, Group]]
    encode_one: Callable[[Value, Value], tuple[int, Value]]
    round_trip: Callable[[Group, Value], tuple[Group, Group]]
    round_trip_one: Callable[[Value, Value], tuple[Value, Value]]
    decode: Callable[[int, Value], Group]
    decode_one: Callable[[int, Value], Value]


def _log2(power: int) -> int:
    return power.bit_length() - 1


def quantise(spec: KernelSpec, codec: CodecOperations) -> Body:
    """Make the body: sum of k gradients and the residual -> words, and the rest -> residual."""
    lanes, bits, in_byte, shift = codec.lanes, codec.bits, codec.in_byte, _log2(codec.in_byte)
    size, load, store, add = lanes.size, lanes.load, lanes.store, lanes.add
    load_one, store_one = lanes.load_one, lanes.store_one
    encode, encode_one = codec.encode, codec.encode_one
    sum_group, sum_one = make_summer(lanes, spec.k, grouped=True), make_summer(lanes, spec.k, grouped=False)

    @dual
    def process_group(row: int, e: int, end: int, threshold: Value) -> None:
        at = listed_now(row, RESIDUALS, 0) + e * size
        byte, left = encode(add(load(at), sum_group(row, e)), threshold)
        store(at, left)
        store_byte(listed_now(row, CODES, 0) + (e >> shift), byte)

    @dual
    def process_remaining(row: int, e: int, end: int, threshold: Value) -> None:
        byte = 0
        for j in range(in_byte):
            byte <<= bits
            if e + j < end:
                at = listed_now(row, RESIDUALS, 0) + (e + j) * size
                code, left = encode_one(load_one(at) + sum_one(row, e + j), threshold)
                store_one(at, left)
                byte |= code
        store_byte(listed_now(row, CODES, 0) + (e >> shift), byte)

    return make_body(
        spec.chunk, lanes.width, process_group, process_remaining, step=in_byte, whole=codec.in_word
    )


def dequantise(spec: KernelSpec, codec: CodecOperations) -> Body:
    """Make the body: words of k senders -> sum of their decoded values, from left to right."""
    lanes, bits, in_byte, shift = codec.lanes, codec.bits, codec.in_byte, _log2(codec.in_byte)
    add, decode, decode_one, count = lanes.add, codec.decode, codec.decode_one, make_counter(spec.k)
    apart = BLOCK * lanes.width >> shift  # bytes between the groups of a pair
    emit, emit_one = make_emitter(lanes.size, lanes.store), make_emitter(lanes.size, lanes.store_one)

    @dual
    def byte_of(row: int, j: int, e: int) -> int:
        return load_byte(listed_now(row, CODES, j) + (e >> shift))

    @dual
    def decoded_pair(row: int, j: int, e: int, threshold: Value) -> tuple[Group, Group]:
        at = listed_now(row, CODES, j) + (e >> shift)
        return decode(load_byte(at), threshold), decode(load_byte(at + apart), threshold)

    @dual
    def sum_in_loop(row: int, e: int, threshold: Value) -> tuple[Group, Group]:
        acc, other = decoded_pair(row, 0, e, threshold)
        for j in range(1, count(row)):
            more, another = decoded_pair(row, j, e, threshold)
            acc, other = add(acc, more), add(other, another)
        return acc, other

    sum_group = _summed_pairs(spec.k, decoded_pair, add) if spec.k else sum_in_loop

    @dual
    def one_of(row: int, j: int, e: int, threshold: Value) -> Value:
        later = in_byte - 1 - (e & (in_byte - 1))
        return decode_one(byte_of(row, j, e) >> (bits * later), threshold)

    @dual
    def process_group(row: int, e: int, end: int, threshold: Value) -> None:
        acc = decode(byte_of(row, 0, e), threshold)
        for j in range(1, count(row)):
            acc = add(acc, decode(byte_of(row, j, e), threshold))
        emit(row, e, acc)

    @dual
    def process_pair(row: int, e: int, f: int, threshold: Value) -> None:
        acc, other = sum_group(row, e, threshold)
        emit(row, e, acc)
        emit(row, f, other)

    @dual
    def process_remaining(row: int, e: int, end: int, threshold: Value) -> None:
        acc = one_of(row, 0, e, threshold)
        for j in range(1, count(row)):
            acc = acc + one_of(row, j, e, threshold)
        emit_one(row, e, acc)

    return make_body(spec.chunk, lanes.width, process_group, process_remaining, process_pair)


def _summed_pairs(k: int, decoded: Callable[..., Any], add: Callable[..., Any]) -> Callable[..., Any]:
    """Make the function that sums the pairs of k senders, without a loop, which a compiler would keep."""
    before = _summed_pairs(k - 1, decoded, add) if k > 1 else None

    @dual
    def first_pair(row: int, e: int, threshold: Value) -> tuple[Group, Group]:
        return decoded(row, 0, e, threshold)  # type: ignore[no-any-return]

    @dual
    def sum_group(row: int, e: int, threshold: Value) -> tuple[Group, Group]:
        acc, other = before(row, e, threshold)  # type: ignore[misc]
        more, another = decoded(row, k - 1, e, threshold)
        return add(acc, more), add(other, another)

    return first_pair if before is None else sum_group


def reduce(spec: KernelSpec, codec: CodecOperations) -> Body:
    """Make the body: k gradients and residuals -> sum of their decoded values, and new residuals."""
    lanes = codec.lanes
    sum_group, sum_one = _sent_sum(spec, codec, grouped=True), _sent_sum(spec, codec, grouped=False)
    emit, emit_one = make_emitter(lanes.size, lanes.store), make_emitter(lanes.size, lanes.store_one)

    @dual
    def process_group(row: int, e: int, end: int, threshold: Value) -> None:
        emit(row, e, sum_group(row, e, threshold))

    @dual
    def process_remaining(row: int, e: int, end: int, threshold: Value) -> None:
        emit_one(row, e, sum_one(row, e, threshold))

    return make_body(spec.chunk, lanes.width, process_group, process_remaining)


def _sent_sum(spec: KernelSpec, codec: CodecOperations, grouped: bool) -> Callable[..., Group]:
    """Make the function that quantises each source, updates its residual, and sums the decoded values."""
    lanes, count, size = codec.lanes, make_counter(spec.k), codec.lanes.size
    load, store = (lanes.load, lanes.store) if grouped else (lanes.load_one, lanes.store_one)
    add, settle = (lanes.add, codec.round_trip) if grouped else (lanes.add_one, codec.round_trip_one)

    @dual
    def sent_value(row: int, j: int, e: int, threshold: Value) -> Group:
        residual = listed_now(row, RESIDUALS, j) + e * size
        gradient = load(listed_now(row, SOURCES, j) + e * size)
        decoded, left = settle(add(load(residual), gradient), threshold)
        store(residual, left)
        return decoded

    @dual
    def sum_group(row: int, e: int, threshold: Value) -> Group:
        acc = sent_value(row, 0, e, threshold)
        for j in range(1, count(row)):
            acc = add(acc, sent_value(row, j, e, threshold))
        return acc

    return sum_group


_VERBS = {"quantise": quantise, "dequantise": dequantise, "reduce": reduce}


def codec_body(spec: KernelSpec, codec: CodecOperations) -> Body:
    """Make the body of a kernel of a codec."""
    return _VERBS[spec.op.partition("_")[0]](spec, codec)
