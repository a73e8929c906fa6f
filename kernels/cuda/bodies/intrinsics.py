"""The primitives of kernel bodies: memory at addresses, and arithmetic with every bit defined.

Each primitive is a plain Python function here, which defines it and runs if a body is
interpreted; `targets` gives the same to numba and numba-cuda. A function that is marked `dual` may be called
from a body under either of them, and stays as it is.

Addresses, counts and indices are int64, because numba makes float64 of an int64 and a uint64. Float
arithmetic is written with plain operators: no target contracts or reorders it. Division, square root and
choices are primitives, since numba would check for zero, call a library, or branch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
Value = Any

_duals: list[Callable[..., Any]] = []
_register: Callable[[Callable[..., Any]], None] | None = None


def dual(function: F) -> F:
    """Let bodies call a plain function on every target."""
    if _register is None:
        _duals.append(function)
    else:
        _register(function)
    return function


def register_duals(register: Callable[[Callable[..., Any]], None]) -> None:
    """Pass all marked functions, and those marked later, to `register`."""
    global _register
    _register = register
    while _duals:
        register(_duals.pop(0))


# ----------------------------------------------------------------------------------------------------- memory


def _array_at(address: int, count: int, kind: Any) -> Any:
    return (kind * count).from_address(address)


def _read_vector(address: int, dtype: str) -> tuple[Value, ...]:
    if address % 16:
        raise ValueError(f"16 bytes are read at address {address:#x}, which is no multiple of 16")
    return tuple(np.frombuffer(bytes(_array_at(address, 16, ctypes.c_uint8)), dtype))


def _write_vector(address: int, values: tuple[Value, ...], dtype: str) -> None:
    if address % 16:
        raise ValueError(f"16 bytes are written at address {address:#x}, which is no multiple of 16")
    _array_at(address, 16, ctypes.c_uint8)[:] = list(np.array(values, dtype).tobytes())


def _read_number(address: int, dtype: str) -> Value:
    return np.frombuffer(bytes(_array_at(address, np.dtype(dtype).itemsize, ctypes.c_uint8)), dtype)[0]


def _write_number(address: int, value: Value, dtype: str) -> None:
    memory = np.array(value, dtype).tobytes()
    _array_at(address, len(memory), ctypes.c_uint8)[:] = list(memory)


def load_4f(address: int) -> tuple[Value, ...]:
    """Four float32 in one access."""
    return _read_vector(address, "f4")


def store_4f(address: int, a: Value, b: Value, c: Value, d: Value) -> None:
    """Store four float32 in one access."""
    _write_vector(address, (a, b, c, d), "f4")


def load_2d(address: int) -> tuple[Value, ...]:
    """Two float64 in one access."""
    return _read_vector(address, "f8")


def store_2d(address: int, a: Value, b: Value) -> None:
    """Store two float64 in one access."""
    _write_vector(address, (a, b), "f8")


def load_4u(address: int) -> tuple[Value, ...]:
    """Four uint32 in one access."""
    return _read_vector(address, "u4")


def store_4u(address: int, a: Value, b: Value, c: Value, d: Value) -> None:
    """Store four uint32 in one access."""
    _write_vector(address, (a, b, c, d), "u4")


def load_2q(address: int) -> tuple[Value, ...]:
    """Two uint64 in one access."""
    return _read_vector(address, "u8")


def store_2q(address: int, a: Value, b: Value) -> None:
    """Store two uint64 in one access."""
    _write_vector(address, (a, b), "u8")


def load_f(address: int) -> Value:
    """One float32."""
    return _read_number(address, "f4")


def store_f(address: int, value: Value) -> None:
    """Store one float32."""
    _write_number(address, value, "f4")


def load_d(address: int) -> Value:
    """One float64."""
    return _read_number(address, "f8")


def store_d(address: int, value: Value) -> None:
    """Store one float64."""
    _write_number(address, value, "f8")


def load_u8(address: int) -> Value:
    """One byte, as uint32."""
    return np.uint32(_read_number(address, "u1"))


def store_u8(address: int, value: Value) -> None:
    """Store the low byte of a uint32."""
    _write_number(address, int(value) & 0xFF, "u1")


def load_u16(address: int) -> Value:
    """Two bytes, as uint32."""
    return np.uint32(_read_number(address, "u2"))


def store_u16(address: int, value: Value) -> None:
    """Store the low two bytes of a uint32."""
    _write_number(address, int(value) & 0xFFFF, "u2")


def load_u32(address: int) -> Value:
    """One uint32."""
    return _read_number(address, "u4")


def store_u32(address: int, value: Value) -> None:
    """Store one uint32."""
    _write_number(address, value, "u4")


def load_u64(address: int) -> Value:
    """One uint64."""
    return _read_number(address, "u8")


def store_u64(address: int, value: Value) -> None:
    """Store one uint64."""
    _write_number(address, value, "u8")


def load_byte(address: int) -> int:
    """One byte, as int64: for codes."""
    return int(_read_number(address, "u1"))


def store_byte(address: int, value: int) -> None:
    """Store the low byte of an int64."""
    _write_number(address, int(value) & 0xFF, "u1")


def image_word(address: int) -> int:
    """Return one word of an image, as int64, read at this point, to save registers."""
    return ctypes.c_int64.from_address(address).value


def forget_reads() -> None:
    """Make the compiler forget its earlier reads, and start none earlier: this frees registers."""


# Memory that no kernel writes while it runs: compilers may read it once, early.


def table_word(address: int) -> int:
    """One word of an image, as int64."""
    return ctypes.c_int64.from_address(address).value


# ------------------------------------------------------------------------------------------------- arithmetic


def select(condition: bool, a: Value, b: Value) -> Value:
    """Return `a` if the condition holds, else `b`; both are computed: no branch."""
    return a if condition else b


def divide(a: Value, b: Value) -> Value:
    """Return the quotient, rounded to nearest even; division by zero as in IEEE 754."""
    return np.divide(a, b)


def square_root(x: Value) -> Value:
    """Square root, rounded to nearest even."""
    return np.sqrt(x)


def absolute_value(x: Value) -> Value:
    """Absolute value; of a NaN, a NaN."""
    return np.abs(x)


def real_of(bits: int) -> Value:
    """Return the float32 with these low 32 bits."""
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


def zero_like(x: Value) -> Value:
    """Zero of the type of `x`."""
    return type(x)(0)


def one_like(x: Value) -> Value:
    """One of the type of `x`."""
    return type(x)(1)


def wrap_add(a: Value, b: Value) -> Value:
    """Sum of two uint32 or uint64, wrapping."""
    return np.add(a, b)


def wrap_add_bytes(a: Value, b: Value) -> Value:
    """Add the four bytes of two uint32, each wrapping."""
    low = np.uint32(0x7F7F7F7F)
    return ((a & low) + (b & low)) ^ ((a ^ b) & ~low)


# ---------------------------------------------------------------------------------------------- 16-bit floats


def _half_value(bits: int) -> Value:
    return np.float32(np.uint16(bits).view(np.float16))


def _half_bits(x: Value) -> int:
    return int(np.float16(x).view(np.uint16))


def f16_low(word: Value) -> Value:
    """Lower half of a uint32, a float16, as float32."""
    return _half_value(int(word) & 0xFFFF)


def f16_high(word: Value) -> Value:
    """Upper half of a uint32, a float16, as float32."""
    return _half_value(int(word) >> 16)


def f16_pack(low: Value, high: Value) -> Value:
    """Two float32 as float16, rounded to nearest even, in one uint32."""
    return np.uint32(_half_bits(low) | _half_bits(high) << 16)


def _bfloat_value(bits: int) -> Value:
    return np.uint32(bits << 16).view(np.float32)


def _bfloat_bits(x: Value) -> int:
    bits = int(np.float32(x).view(np.uint32))
    if bits & 0x7FFFFFFF > 0x7F800000:  # NaN stays NaN, even if its low bits are cut off
        return bits >> 16 | 0x40
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def bf16_low(word: Value) -> Value:
    """Lower half of a uint32, a bfloat16, as float32."""
    return _bfloat_value(int(word) & 0xFFFF)


def bf16_high(word: Value) -> Value:
    """Upper half of a uint32, a bfloat16, as float32."""
    return _bfloat_value(int(word) >> 16)


def bf16_pack(low: Value, high: Value) -> Value:
    """Two float32 as bfloat16, rounded to nearest even, in one uint32."""
    return np.uint32(_bfloat_bits(low) | _bfloat_bits(high) << 16)
