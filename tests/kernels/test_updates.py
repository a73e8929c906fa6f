"""Fused updates: sum, rule and copies in one pass give the same as one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from references import assert_same_bits, bits, draw, dtype_of, knobs, placed, total

from kvstore.kernels import cpu

ADAM = (0.05, 0.03, 0.25, 0.3, 0.8, 0.999, 1e-4)


def run(name: str, n: int, k: int, offset: int, master: bool, moves: bool = False) -> list[np.ndarray]:
    """Three fused updates with Adam; returns weight, states, master and outs.

    With `moves` each writes the weight elsewhere, and the old weight stays unchanged.
    """
    inner = "float32" if master else name
    weight = placed(draw(name, n, 1), offset)
    wide = weight.astype(np.float32) if master else None
    states = (np.zeros(n, dtype_of(inner)), np.zeros(n, dtype_of(inner)))
    outs = [placed(weight, offset + 1), np.empty_like(weight)]
    for step in range(3):
        srcs = [draw(name, n, 10 * step + i) for i in range(k)]
        before, kept = weight, weight.copy()
        weight = placed(np.empty_like(before), offset + step) if moves else before
        place = (weight, before) if moves else weight
        cpu.update([(cpu.rule_id("adam"), ADAM, srcs, place, wide, states, outs)])
        if moves:
            assert_same_bits(before, kept)
    return [weight, *states, *outs, *([] if wide is None else [wide])]


@given(
    name=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    n=st.sampled_from([0, 1, 17, 255, 256, 257, 1000, 40_000, 70_001]),
    k=st.integers(1, 18),
    offset=st.integers(0, 3),
    master=st.booleans(),
    moves=st.booleans(),
    threads=st.integers(1, 4),
    stream=st.sampled_from([0, 2**62]),
    level=st.sampled_from(cpu.levels()),
)
def test_the_bits_do_not_depend_on_how_it_is_run(
    name: str, n: int, k: int, offset: int, master: bool, moves: bool, threads: int, stream: int, level: str
) -> None:
    master = master and name in ("float16", "bfloat16")
    with knobs(level=cpu.levels()[0], threads=1, stream=2**62):
        plain = run(name, n, k, 0, master)
    with knobs(level=level, threads=threads, stream=stream):
        for a, b in zip(plain, run(name, n, k, offset, master, moves), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("k", [1, 2, 9, 17])
def test_fused_is_sum_then_rule_then_copy(name: str, k: int) -> None:
    n = 3000
    srcs = [draw(name, n, i) for i in range(k)]
    fused, apart = draw(name, n, 99), draw(name, n, 99)
    rule, params = cpu.rule_id("sgd"), (0.5, 0.01, 2.0, 4.0)
    outs = [np.empty_like(fused), srcs[0]]
    summed = total(srcs)
    cpu.update([(rule, params, srcs, fused, None, (), outs)])
    cpu.update([(rule, params, [summed], apart, None, (), [])])
    for array in (fused, *outs):
        assert_same_bits(array, apart)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_a_master_is_rounded_once_into_its_weight(name: str) -> None:
    n = 1000
    weight, master = draw(name, n, 1), draw("float32", n, 2)
    before, gradient = master.copy(), draw(name, n, 3)
    cpu.update([(cpu.rule_id("sgd"), (0.5, 0.0, 1.0, np.inf), [gradient], weight, master, (), [])])
    np.testing.assert_array_equal(master, before - np.float32(0.5) * gradient.astype(np.float32))
    np.testing.assert_array_equal(bits(weight), bits(master.astype(weight.dtype)))


@pytest.mark.parametrize(
    ("weight", "master", "states", "error"),
    [
        (np.zeros(4, np.int32), None, (), TypeError),
        (np.zeros(4), np.zeros(4, np.float32), (), TypeError),
        (np.zeros(4, np.float16), np.zeros(4), (), TypeError),
        (np.zeros(4, np.float16), np.zeros(3, np.float32), (), ValueError),
        (np.zeros(4), None, (np.zeros(4),), ValueError),
    ],
)
def test_what_an_update_refuses(weight, master, states, error) -> None:  # type: ignore[no-untyped-def]
    gradient = np.zeros(4, weight.dtype)
    with pytest.raises(error):
        cpu.update([(cpu.rule_id("sgd"), (0.5, 0.0, 1.0, np.inf), [gradient], weight, master, states, [])])


def test_an_unknown_rule_is_refused() -> None:
    for rule in (-1, len(cpu.rules())):
        with pytest.raises(ValueError, match="no rule"):
            cpu.update([(rule, (), [np.zeros(4)], np.zeros(4), None, (), [])])
