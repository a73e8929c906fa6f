"""The primitives of `intrinsics` for numba on the processor and, where it is installed, for numba-cuda.

Only this file and `compile` use numba. Importing this file needs numba.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from llvmlite import ir
from numba import extending, types
from numba import njit as _njit
from numba.core import cgutils

from . import intrinsics as i

# LLVM's numbers of address spaces: of the processor, and of a GPU's memory that all its threads see. A
# pointer that is made from an integer must say the latter, or each access is a generic one.
HOST, GLOBAL = 0, 1

_F32, _F64 = ir.FloatType(), ir.DoubleType()
_BITS = {n: ir.IntType(n) for n in (8, 16, 32, 64)}
_LLVM = {
    types.float32: _F32,
    types.float64: _F64,
    types.uint32: _BITS[32],
    types.uint64: _BITS[64],
    types.int64: _BITS[64],
}

Signature = Any
Generate = Callable[..., Any]
Typed = tuple[Signature, Generate]
Primitive = Callable[..., Typed | None]


def import_cuda() -> Any:
    """Import numba's CUDA module; numba-cuda 0.30 fails where NumPy has no `row_stack` (2.5 and later)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's, about numba-cuda's own lines
        from numba import cuda

        if not hasattr(np, "row_stack"):
            np.row_stack = np.vstack  # type: ignore[attr-defined,unused-ignore]
            try:
                import numba.cuda.np.arrayobj  # noqa: F401
            finally:
                del np.row_stack
    return cuda


# --------------------------------------------------------------------------------- how each primitive is made


def _typed_pointer(builder: Any, address: Any, kind: Any, space: int) -> Any:
    return builder.inttoptr(address, kind.as_pointer(space))


def _load_vector(element: Any, count: int, space: int) -> Primitive:
    kind = ir.VectorType(_LLVM[element], count)

    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = builder.load(_typed_pointer(builder, args[0], kind, space), align=16)
        lanes = [builder.extract_element(vector, _BITS[32](lane)) for lane in range(count)]
        return cgutils.pack_array(builder, lanes)

    return lambda address: (types.UniTuple(element, count)(types.int64), generate_code)


def _store_vector(element: Any, count: int, space: int) -> Primitive:
    kind = ir.VectorType(_LLVM[element], count)

    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = ir.Constant(kind, ir.Undefined)
        for lane in range(count):
            vector = builder.insert_element(vector, args[1 + lane], _BITS[32](lane))
        builder.store(vector, _typed_pointer(builder, args[0], kind, space), align=16)
        return context.get_dummy_value()

    return lambda address, *values: (types.void(types.int64, *[element] * count), generate_code)


def _load_number(element: Any, space: int, bits: int = 0, constant: bool = False) -> Primitive:
    """Load of one number; with `bits`, of an unsigned one that is widened to `element`."""
    wide = _LLVM[element]
    kind = _BITS[bits] if bits else wide

    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        size = bits // 8 if bits else element.bitwidth // 8
        value = builder.load(_typed_pointer(builder, args[0], kind, space), align=size)
        if constant:
            value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return builder.zext(value, wide) if bits else value

    return lambda address: (element(types.int64), generate_code)


def _store_number(element: Any, space: int, bits: int = 0) -> Primitive:
    """Store of one number, or of its low bits."""
    kind = _BITS[bits] if bits else _LLVM[element]

    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.trunc(args[1], kind) if bits else args[1]
        size = bits // 8 if bits else element.bitwidth // 8
        builder.store(value, _typed_pointer(builder, args[0], kind, space), align=size)
        return context.get_dummy_value()

    return lambda address, value: (types.void(types.int64, element), generate_code)


def _forget_reads(space: int) -> Primitive:
    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if space == GLOBAL:
            builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], True)
        return context.get_dummy_value()

    return lambda: (types.void(), generate_code)


def _memory_primitives(space: int) -> Iterator[tuple[Callable[..., Any], Primitive]]:
    for load, store, element, count in (
        (i.load_4f, i.store_4f, types.float32, 4),
        (i.load_2d, i.store_2d, types.float64, 2),
        (i.load_4u, i.store_4u, types.uint32, 4),
        (i.load_2q, i.store_2q, types.uint64, 2),
    ):
        yield load, _load_vector(element, count, space)
        yield store, _store_vector(element, count, space)
    for load_one, store_one, element, bits in (
        (i.load_f, i.store_f, types.float32, 0),
        (i.load_d, i.store_d, types.float64, 0),
        (i.load_u8, i.store_u8, types.uint32, 8),
        (i.load_u16, i.store_u16, types.uint32, 16),
        (i.load_u32, i.store_u32, types.uint32, 0),
        (i.load_u64, i.store_u64, types.uint64, 0),
        (i.load_byte, i.store_byte, types.int64, 8),
    ):
        yield load_one, _load_number(element, space, bits)
        yield store_one, _store_number(element, space, bits)
    yield i.image_word, _load_number(types.int64, space)
    yield i.table_word, _load_number(types.int64, space, constant=True)
    yield i.forget_reads, _forget_reads(space)


def _select_value(condition: Any, a: Any, b: Any) -> Typed | None:
    def generate_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(args[0], args[1], args[2])

    if isinstance(a, types.Integer):  # codes: literals among them
        return types.int64(types.boolean, types.int64, types.int64), generate_code
    return a(types.boolean, a, a), generate_code


def _same_kind(build: Generate) -> Primitive:
    """Primitive whose arguments and result are of one float or unsigned type."""

    def typed_code(a: Any, *others: Any) -> Typed | None:
        kinds = (a, *others)
        return a(*kinds), lambda context, builder, signature, args: build(builder, _LLVM[a], *args)

    return typed_code


def _llvm_intrinsic(name: str) -> Generate:
    def build(builder: Any, kind: Any, x: Any) -> Any:
        function = builder.module.declare_intrinsic(name, [kind])
        return builder.call(function, [x])

    return build


def _absolute_value(b: Any, kind: Any, x: Any) -> Any:
    """All bits but the sign; NVVM has no llvm.fabs."""
    bits = _BITS[64 if kind == _F64 else 32]
    return b.bitcast(b.and_(b.bitcast(x, bits), bits(2 ** (bits.width - 1) - 1)), kind)


def _real_of(b: Any, bits: Any) -> Any:
    return b.bitcast(b.trunc(bits, _BITS[32]), _F32)


def _add_bytes(b: Any, kind: Any, x: Any, y: Any) -> Any:
    low, high = kind(0x7F7F7F7F), kind(0x80808080)
    return b.xor(b.add(b.and_(x, low), b.and_(y, low)), b.and_(b.xor(x, y), high))


def _arithmetic_primitives() -> Iterator[tuple[Callable[..., Any], Primitive]]:
    yield i.select, _select_value
    yield i.divide, _same_kind(lambda builder, kind, a, b: builder.fdiv(a, b))
    yield i.square_root, _same_kind(_llvm_intrinsic("llvm.sqrt"))
    yield i.absolute_value, _same_kind(_absolute_value)
    bits_of_real = types.float32(types.int64)
    yield i.real_of, lambda _: (bits_of_real, lambda context, b, signature, args: _real_of(b, *args))
    yield i.zero_like, _same_kind(lambda builder, kind, x: kind(0.0))
    yield i.one_like, _same_kind(lambda builder, kind, x: kind(1.0))
    yield i.wrap_add, _same_kind(lambda builder, kind, a, b: builder.add(a, b))
    yield i.wrap_add_bytes, _same_kind(_add_bytes)


def _from_f16(shift: int) -> Generate:
    def build(b: Any, word: Any) -> Any:
        bits = b.trunc(b.lshr(word, _BITS[32](shift)), _BITS[16])
        return b.fpext(b.bitcast(bits, ir.HalfType()), _F32)

    return build


def _f16_bits(b: Any, x: Any) -> Any:
    return b.zext(b.bitcast(b.fptrunc(x, ir.HalfType()), _BITS[16]), _BITS[32])


def _bf16_bits(b: Any, x: Any) -> Any:
    """As `float_to_bfloat` of kernels/half.h."""
    word = _BITS[32]
    bits = b.bitcast(x, word)
    top = b.lshr(bits, word(16))
    rounded = b.lshr(b.add(b.add(bits, word(0x7FFF)), b.and_(top, word(1))), word(16))
    is_nan = b.icmp_unsigned(">", b.and_(bits, word(0x7FFFFFFF)), word(0x7F800000))
    return b.select(is_nan, b.or_(top, word(0x40)), rounded)


def _pack_pair(bits_of: Generate) -> Generate:
    return lambda b, low, high: b.or_(bits_of(b, low), b.shl(bits_of(b, high), _BITS[32](16)))


def _half_primitives() -> Iterator[tuple[Callable[..., Any], Primitive]]:
    word, real = types.uint32, types.float32

    def fixed(signature: Signature, build: Generate) -> Primitive:
        return lambda *_: (signature, lambda context, builder, _signature, args: build(builder, *args))

    yield i.f16_low, fixed(real(word), _from_f16(0))
    yield i.f16_high, fixed(real(word), _from_f16(16))
    yield i.f16_pack, fixed(word(real, real), _pack_pair(_f16_bits))
    upper = _BITS[32](0xFFFF0000)
    yield i.bf16_low, fixed(real(word), lambda b, x: b.bitcast(b.shl(x, _BITS[32](16)), _F32))
    yield i.bf16_high, fixed(real(word), lambda b, x: b.bitcast(b.and_(x, upper), _F32))
    yield i.bf16_pack, fixed(word(real, real), _pack_pair(_bf16_bits))


def primitives(space: int) -> Iterator[tuple[Callable[..., Any], Primitive]]:
    """Yield each primitive with the function that types it and generates its code, for an address space."""
    yield from _memory_primitives(space)
    yield from _arithmetic_primitives()
    yield from _half_primitives()


# ----------------------------------------------------------------------------------------------- registration

# Numba looks at the number and names of arguments, so there is one wrapper for each number.
_CALLS: dict[int, Callable[[Any], Callable[..., Any]]] = {
    0: lambda make: lambda: make(),
    1: lambda make: lambda a: make(a),
    2: lambda make: lambda a, b: make(a, b),
    3: lambda make: lambda a, b, c: make(a, b, c),
    5: lambda make: lambda a, b, c, d, e: make(a, b, c, d, e),
}
_TYPERS: dict[int, Callable[[Any], Callable[..., Any]]] = {
    0: lambda make: lambda context: make(),
    1: lambda make: lambda context, a: make(a),
    2: lambda make: lambda context, a, b: make(a, b),
    3: lambda make: lambda context, a, b, c: make(a, b, c),
    5: lambda make: lambda context, a, b, c, d, e: make(a, b, c, d, e),
}


def _register_overload(extend: Any, function: Callable[..., Any], made: Callable[..., Any]) -> None:
    """Register the implementation of a function in bodies.

    It has no C wrapper, which would take ten times as long.
    """
    options = {"no_cfunc_wrapper": True} if extend is extending else {}
    extend.overload(function, jit_options=options, strict=False)(made)


def _register_primitive(extend: Any, function: Callable[..., Any], primitive: Primitive) -> None:
    arity = len(inspect.signature(function).parameters)
    typer = _TYPERS[arity](primitive)
    typer.__name__ = function.__name__
    made = extend.intrinsic(typer)
    call = _CALLS[arity](made)
    _register_overload(extend, function, lambda *types_of_arguments: call)


def _extension_modules() -> list[Any]:
    """Numba's interface for extensions, and numba-cuda's where there is one."""
    try:
        import_cuda()
        import numba.cuda.extending as gpu
    except ImportError:
        return [(extending, HOST)]
    return [(extending, HOST), (gpu, GLOBAL)]


def _register_all() -> None:
    extensions = _extension_modules()
    for extend, space in extensions:
        for function, primitive in primitives(space):
            _register_primitive(extend, function, primitive)

    def register(function: Callable[..., Any]) -> None:
        for extend, _ in extensions:
            _register_overload(extend, function, lambda *types_of_arguments: function)

    i.register_duals(register)


_register_all()


def njit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for the processor: no fast mathematics, zero divisors as IEEE 754 has them, no GIL."""
    compiled: Callable[..., Any] = _njit(nogil=True, error_model="numpy")(function)
    return compiled
