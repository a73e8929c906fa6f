"""Sums of 2, 4 and 8 arrays in Triton, which reads the source of its kernels from a file."""
# ruff: noqa: N803 - Triton's constants are written in capitals
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def sum2(o, a, b, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    t = tl.load(a + i, m).to(tl.float32) + tl.load(b + i, m).to(tl.float32)
    tl.store(o + i, t.to(o.dtype.element_ty), m)


@triton.jit
def sum4(o, a, b, c, d, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    t = tl.load(a + i, m).to(tl.float32) + tl.load(b + i, m).to(tl.float32)
    t = t + tl.load(c + i, m).to(tl.float32) + tl.load(d + i, m).to(tl.float32)
    tl.store(o + i, t.to(o.dtype.element_ty), m)


@triton.jit
def sum8(o, a, b, c, d, e, f, g, h, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    t = tl.load(a + i, m).to(tl.float32) + tl.load(b + i, m).to(tl.float32)
    t = t + tl.load(c + i, m).to(tl.float32) + tl.load(d + i, m).to(tl.float32)
    t = t + tl.load(e + i, m).to(tl.float32) + tl.load(f + i, m).to(tl.float32)
    t = t + tl.load(g + i, m).to(tl.float32) + tl.load(h + i, m).to(tl.float32)
    tl.store(o + i, t.to(o.dtype.element_ty), m)
