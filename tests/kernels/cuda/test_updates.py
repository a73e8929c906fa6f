"""Updates: the bits of the CPU kernels, for every rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from fake_cuda.cases import HostTarget, Target, fresh
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import nightly_unless
from references import Array, assert_same_bits, draw, dtype_of
from rule_parameters import PARAMS

from kvstore.kernels import cpu
from kvstore.kernels.cuda import RULE_STATES, WIDTH, KernelRow, KernelSpec, all_specs, row_constants

UPDATES = [spec for spec in all_specs() if spec.op == "update"]
# One of each: weights of every kind, rules with no state to three.
SOME = [
    KernelSpec("update", "float32", 0, "adam"),
    KernelSpec("update", "float32", 2, "sgd_momentum"),
    KernelSpec("update", "float64", 0, "ftml"),
    KernelSpec("update", "float16", 0, "adamw", master=True),
    KernelSpec("update", "bfloat16", 0, "sgd", master=True),
    KernelSpec("update", "bfloat16", 0, "rmsprop_centered"),
    KernelSpec("update", "float16", 0, "ftrl"),
]

# Every time a few are compiled, which takes seconds, and all run in plain Python.
# Scope: tests of one kernel run one after the other, in one process, which compiles it once.
EACH = pytest.mark.parametrize(
    "spec",
    nightly_unless(lambda spec: spec.rule in ("adam", "adamw", "sgd_momentum"), SOME),
    ids=[spec.name for spec in SOME],
    scope="module",
)

Key = tuple[int, int, int]  # elements, values, outs


class Case:
    """One key: its values before, and the expected values after."""

    def __init__(self, spec: KernelSpec, key: Key, seed: int, special: bool) -> None:
        n, k, m = key
        inner = "float32" if spec.master else spec.dtype
        self.gradients = [draw(spec.dtype, n, seed + j, special) for j in range(k)]
        wide = draw(inner, n, seed + 50, special)
        with np.errstate(all="ignore"):
            self.weight = wide.astype(dtype_of(spec.dtype))
        self.master = wide if spec.master else None
        self.states = [_state(spec.rule, inner, n, seed + 60 + j, j) for j in range(spec.states)]
        self.outs = m

    def after(self, spec: KernelSpec, params: tuple[float, ...]) -> tuple[Array, Array | None, list[Array]]:
        """Weight, master and states as the CPU kernels leave them."""
        weight, states = self.weight.copy(), [state.copy() for state in self.states]
        master = None if self.master is None else self.master.copy()
        rule = cpu.rule_id(str(spec.rule))
        cpu.update([(rule, params, self.gradients, weight, master, tuple(states), [])])
        return weight, master, states


def _state(rule: str | None, name: str, n: int, seed: int, number: int) -> Array:
    """State with which no rule takes a root of less than nothing."""
    values = draw(name, n, seed)
    if rule in ("sgd_momentum", "nag", "signum", "dcasgd", "dcasgd_momentum"):
        return values
    if rule == "rmsprop_centered" and number != 1:
        return (values / values.dtype.type(600)).astype(values.dtype)
    return np.abs(values)


def check(
    target: Target,
    spec: KernelSpec,
    keys: Sequence[Key],
    places: Sequence[int] = (),
    params: Sequence[tuple[float, ...]] = (),
    special: bool = False,
    seed: int = 0,
) -> None:
    """Update several keys in one launch, at odd places."""
    place = iter([*places, *[0] * 1000])
    params = params or [PARAMS[str(spec.rule)]] * len(keys)
    cases = [Case(spec, key, seed + 100 * i, special) for i, key in enumerate(keys)]
    lines = row_constants(spec, params)
    table = target.put(lines.reshape(-1))
    rows, held = [], []
    for i, case in enumerate(cases):
        gradients = [target.put(gradient, next(place)) for gradient in case.gradients]
        weight = target.put(case.weight, next(place))
        states = [target.put(state, next(place)) for state in case.states]
        master = None if case.master is None else target.put(case.master, next(place))
        outs = [fresh(target, case.weight.size, case.weight.dtype, next(place)) for _ in range(case.outs)]
        held.append((gradients, weight, master, states, outs))
        rows.append(
            KernelRow(
                numel=case.weight.size,
                srcs=tuple(gradient.address for gradient in gradients),
                dst=weight.address,
                outs=tuple(out.address for out in outs),
                states=tuple(state.address for state in states),
                master=master.address if master else 0,
                params=table.address + i * WIDTH * lines.itemsize,
            )
        )
    target.run(spec, rows)
    for case, its_params, (gradients, weight, master, states, outs) in zip(cases, params, held, strict=True):
        wanted, wanted_master, wanted_states = case.after(spec, its_params)
        for result in (weight, *outs):
            assert_same_bits(result.read(), wanted)
        if master and wanted_master is not None:
            assert_same_bits(master.read(), wanted_master)
        for state, wanted_state in zip(states, wanted_states, strict=True):
            assert_same_bits(state.read(), wanted_state)
        for gradient, value in zip(gradients, case.gradients, strict=True):
            assert gradient.read().tobytes() == value.tobytes()


def test_every_rule_has_its_parameters_here() -> None:
    assert set(PARAMS) - set(RULE_STATES) == {"sgld", "lamb_moments", "lamb_apply"}  # norms, logarithms
    assert set(RULE_STATES) < set(PARAMS)


@pytest.mark.parametrize("spec", UPDATES, ids=lambda s: s.name)
def test_every_update_in_plain_python(interpreted: HostTarget, spec: KernelSpec) -> None:
    k = spec.k or 2
    check(interpreted, spec, [(37, k, 1)])
    check(interpreted, spec, [(11, k, 1)], places=[1])
    check(interpreted, spec, [(20, k, 0)], special=True)


@EACH
def test_sizes_around_every_edge(target: Target, spec: KernelSpec) -> None:
    sizes = [0, 1, 3, 4, 5, 8, 15, 255, 257, 1023, 1025, 4095, 4097, 8191, 8192, 8193, 30_000]
    keys = [(n, spec.k or 1 + n % 4, n % 3) for n in sizes]
    check(target, spec, keys)
    check(target, spec, keys, special=True)
    for places in ([1], [0, 1], [0, 0, 0, 1]):
        check(target, spec, [(n, spec.k or 2, 1) for n in (1, 7, 1000, 9000)], places)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", UPDATES, ids=lambda s: s.name)
def test_every_update_compiled(target: Target, spec: KernelSpec) -> None:
    for special in (False, True):
        check(target, spec, [(n, spec.k or 1 + n % 4, 1) for n in (1, 7, 1000, 8193, 9000)], special=special)
    check(target, spec, [(n, spec.k or 2, 1) for n in (1, 7, 1000, 9000)], places=[1])


@EACH
@given(
    keys=st.lists(
        st.tuples(st.integers(0, 20_000), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=3
    ),
    places=st.lists(st.integers(0, 4), max_size=12),
    lr=st.floats(1e-6, 10),
    wd=st.floats(0, 1),
    rescale=st.floats(-4, 4),
    clip=st.one_of(st.just(math.inf), st.floats(0.001, 3)),
    special=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=8)
def test_any_settings(
    compiled: HostTarget,
    spec: KernelSpec,
    keys: list[Key],
    places: list[int],
    lr: float,
    wd: float,
    rescale: float,
    clip: float,
    special: bool,
    seed: int,
) -> None:
    keys = [(n, spec.k or k, m) for n, k, m in keys]
    params = [(lr / (i + 1), wd, rescale, clip, *PARAMS[str(spec.rule)][4:]) for i in range(len(keys))]
    check(compiled, spec, keys, places, params, special, seed)


def test_a_gradient_in_which_anything_occurs(target: Target) -> None:
    """NaN stays at its place, and infinities are clipped."""
    spec = KernelSpec("update", rule="sgd")
    gradient = np.array([np.nan, np.inf, -np.inf, 1, -0.0, 1e-45], np.float32)
    place, weight = target.put(gradient), target.put(np.zeros(6, np.float32))
    table = target.put(row_constants(spec, [(1.0, 0.0, 1.0, 0.5)]).reshape(-1))
    target.run(spec, [KernelRow(6, (place.address,), weight.address, params=table.address)])
    found = weight.read()
    assert np.isnan(found).tolist() == [True, False, False, False, False, False]
    assert found[1:].tolist() == [-0.5, 0.5, -0.5, 0.0, -float(np.float32(1e-45))]


def test_constants_of_each_row_are_its_own(target: Target) -> None:
    params: Any = [(0.1 * i, 0.0, 1.0, math.inf, *PARAMS["adam"][4:]) for i in range(1, 6)]
    check(target, SOME[0], [(500 * i, 2, 1) for i in range(1, 6)], params=params)
