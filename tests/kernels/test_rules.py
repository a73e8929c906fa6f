"""Every compiled rule against its NumPy statement, at each instruction-set level."""

import math

import numpy as np
import pytest
import rule_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from rule_parameters import PARAMS

from kvstore.kernels import cpu

# The logarithm and the cosine of the C library may differ from NumPy's in the last bit.
USES_LIBM = {"sgld"}
SIZES = (0, 1, 7, 8, 33, 2047, 2049, 4100)


@pytest.fixture(params=cpu.levels())
def level(request):
    before = cpu.level()
    cpu.use_level(request.param)
    yield request.param
    cpu.use_level(before)


def inputs(name, n, dtype, seed=0):
    """Weight, gradient and states; those under a square root are not negative."""
    rng = np.random.default_rng(seed)
    draw = lambda: rng.uniform(-2, 2, n).astype(dtype)  # noqa: E731
    states = tuple(draw() for _ in range(cpu.rule_states(name)))
    if name == "rmsprop_centered":  # the mean square is never below the square of the mean
        states = (states[0], states[0] ** 2 + abs(states[1]), states[2])
    elif name not in ("sgd_momentum", "nag", "signum", "dcasgd", "dcasgd_momentum"):
        states = tuple(abs(s) for s in states)
    return draw(), draw(), states


def run_both(name, params, w, g, states):
    """Return (compiled weight and states, reference weight and states)."""
    mine, theirs = [w.copy(), *map(np.copy, states)], [w.copy(), *map(np.copy, states)]
    item = (cpu.rule_id(name), params, [g], mine[0], None, tuple(mine[1:]), [])
    cpu.update([item])
    reference.RULES[name](theirs[0], g, tuple(theirs[1:]), params)
    return mine, theirs


def assert_same(name, mine, theirs):
    for a, b in zip(mine, theirs, strict=True):
        if name in USES_LIBM:
            np.testing.assert_allclose(a, b, rtol=8 * np.finfo(a.dtype).eps, atol=8 * np.finfo(a.dtype).eps)
        else:
            np.testing.assert_array_equal(a, b)
            number = ~np.isnan(a)
            np.testing.assert_array_equal(np.signbit(a[number]), np.signbit(b[number]))


def test_every_rule_has_a_reference_and_a_case_here():
    assert set(cpu.rules()) == set(reference.RULES) == set(PARAMS)
    assert {name: cpu.rule_parameters(name) for name in PARAMS} == {
        name: len(p) for name, p in PARAMS.items()
    }


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", PARAMS)
def test_bits_of_the_reference(level, name, dtype):
    for n in SIZES:
        assert_same(name, *run_both(name, PARAMS[name], *inputs(name, n, dtype, seed=n)))


@pytest.mark.parametrize("name", PARAMS)
def test_without_clipping(level, name):
    params = (*PARAMS[name][:3], math.inf, *PARAMS[name][4:])
    assert_same(name, *run_both(name, params, *inputs(name, 100, np.float32)))


@given(
    name=st.sampled_from(sorted(PARAMS)),
    dtype=st.sampled_from([np.float32, np.float64]),
    n=st.integers(0, 70),
    seed=st.integers(0, 2**20),
    lr=st.floats(1e-6, 10),
    wd=st.floats(0, 1),
    rescale=st.floats(-4, 4),
    clip=st.one_of(st.just(math.inf), st.floats(0.001, 3)),
)
@settings(max_examples=60, deadline=None)
def test_any_settings(name, dtype, n, seed, lr, wd, rescale, clip):
    params = (lr, wd, rescale, clip, *PARAMS[name][4:])
    assert_same(name, *run_both(name, params, *inputs(name, n, dtype, seed)))


@pytest.mark.parametrize("name", sorted(set(PARAMS) - {"lamb_apply"}))
def test_not_a_number_stays_one(level, name):
    """A NaN gradient shows in the weight (for LAMB's first step in the moments), only at its place."""
    w, g, states = inputs(name, 50, np.float32)
    g[13] = np.nan
    mine, theirs = run_both(name, PARAMS[name], w, g, states)
    assert_same(name, mine, theirs)
    seen = mine[1] if name == "lamb_moments" else mine[0]
    assert np.flatnonzero(np.isnan(seen)).tolist() == [13]


def test_infinite_gradients_are_clipped(level):
    g = np.array([np.inf, -np.inf], np.float32)
    w = np.zeros(2, np.float32)
    cpu.update([(cpu.rule_id("sgd"), (1.0, 0.0, 1.0, 0.5), [g], w, None, (), [])])
    assert w.tolist() == [-0.5, 0.5]


def test_all_levels_give_the_same_bits():
    before, results = cpu.level(), {}
    for name in PARAMS:
        for one in cpu.levels():
            cpu.use_level(one)
            results.setdefault(name, []).append(
                run_both(name, PARAMS[name], *inputs(name, 1001, np.float32))[0]
            )
    cpu.use_level(before)
    for name, runs in results.items():
        for run in runs[1:]:
            assert all(a.tobytes() == b.tobytes() for a, b in zip(runs[0], run, strict=True)), name


# ------------------------------------------------------------------------------------------------- noise


def test_philox_known_answers():
    """The vectors that the authors publish with their Random123 library."""
    ones = 0xFFFFFFFF
    pi = np.array([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint64)
    cases = [
        (np.zeros((1, 4), np.uint64), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (np.full((1, 4), ones, np.uint64), (ones, ones), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (pi, (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ]
    for counter, key, words in cases:
        assert " ".join(f"{int(x):08x}" for x in reference.philox(counter, key)[0]) == words


def noise(n, **changes):
    """Compiled noise alone: a step with no gradient, divided by its spread."""
    names = (("seed", 7), ("key", 9), ("update", 1), ("first", 0))
    w = np.zeros(n, np.float64)
    params = (1.0, 0.0, 1.0, math.inf, *(changes.get(name, usual) for name, usual in names))
    cpu.update([(cpu.rule_id("sgld"), params, [np.zeros(n)], w, None, (), [])])
    return w


def test_noise_is_normal():
    w = noise(100_000)
    assert abs(w.mean()) < 0.01
    assert abs(w.std() - 1) < 0.01
    assert abs((w**3).mean()) < 0.05
    assert abs((w**4).mean() - 3) < 0.1
    assert abs(np.corrcoef(w[:-1], w[1:])[0, 1]) < 0.01


def test_noise_depends_on_seed_key_and_update_only():
    assert noise(5000).tobytes() == noise(5000).tobytes()
    assert noise(5000)[:100].tobytes() == noise(100).tobytes()
    assert noise(5000)[4321:].tobytes() == noise(679, first=4321).tobytes()  # a tensor that is cut
    streams = [
        noise(100),
        noise(100, seed=8),
        noise(100, key=10),
        noise(100, update=2),
        noise(100, update=2**33),
    ]
    for i, a in enumerate(streams):
        for b in streams[i + 1 :]:
            assert not (a == b).any()


# ------------------------------------------------------------------------------------- whole tensors, rows


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 5000])
def test_lamb_norms(level, dtype, n):
    w, _, states = inputs("lamb_apply", n, dtype)
    params = PARAMS["lamb_apply"]
    got, want = cpu.lamb_norms(w, *states, params), reference.lamb_norms(w, states, params)
    np.testing.assert_allclose(got, want, rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5, 33), (200, 64)])
def test_group_adagrad(level, dtype, shape):
    rng = np.random.default_rng(0)
    w, g = (rng.uniform(-2, 2, shape).astype(dtype) for _ in range(2))
    history = rng.uniform(0, 1, (shape[0], 1)).astype(dtype)
    params = (0.05, 0.0, 0.25, 0.3, 1e-6)
    mine, theirs = (w.copy(), history.copy()), (w.copy(), history.copy())
    cpu.group_adagrad(params, g, *mine)
    reference.group_adagrad(theirs[0], g, theirs[1], params)
    np.testing.assert_array_equal(mine[0], theirs[0])
    np.testing.assert_array_equal(mine[1], theirs[1])


@pytest.mark.parametrize("name", sorted(set(PARAMS) - {"sgld"}))
def test_rows_are_updated_as_if_they_were_all(level, name):
    w, g, states = (
        np.reshape(x, (10, 7)) if isinstance(x, np.ndarray) else x for x in inputs(name, 70, np.float32)
    )
    states = tuple(s.reshape(10, 7) for s in states)
    rows = np.array([1, 4, 9])
    whole, _ = run_both(name, PARAMS[name], w, g, states)
    part = [w.copy(), *map(np.copy, states)]
    maps = [np.arange(3)]
    cpu.update_rows(cpu.rule_id(name), PARAMS[name], [g[rows]], maps, rows, part[0], None, tuple(part[1:]))
    for before, now, all_rows in zip((w, *states), part, whole, strict=True):
        np.testing.assert_array_equal(now[rows], all_rows[rows])
        others = np.setdiff1d(np.arange(10), rows)
        np.testing.assert_array_equal(now[others], before[others])
