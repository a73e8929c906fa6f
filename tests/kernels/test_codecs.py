"""Packed gradients: bit-equal to what MXNet packs and to a statement in NumPy, on every level."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from references import Array, assert_same_bits, knobs, lcg, placed

from kvstore.kernels import cpu

TWO, ONE, HALF, BFLOAT = (cpu.coding(name) for name in ("two_bit", "one_bit", "half", "bfloat"))
NEVER, ALWAYS = 2**62, 0
SIZES = [0, 1, 3, 4, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 500, 511, 512, 513, 1025]
CHUNK = 32768  # elements that a thread takes at a time
SPECIAL = np.array(
    [
        np.nan,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1.17e-38,
        3.4e38,
        -3.4e38,
        0.5,
        -0.5,
        0.49999997,
        1.5,
    ],
    np.float32,
)

# ------------------------------------------------------------------------------- the codes, stated in NumPy


def packed_bits(codes: Array, width: int) -> Array:
    """Codes of `width` bits, first one in the top bits of a byte, padded to whole words."""
    shifts = np.arange(width - 1, -1, -1)
    bits = (codes[:, None] >> shifts & 1).astype(np.uint8).reshape(-1)
    return np.packbits(np.pad(bits, (0, -len(bits) % 32)))


def encode(code: int, t: np.float32, g: Array, r: Array) -> tuple[Array, Array, Array]:
    """The packed words, the residual, and the decoded values."""
    with np.errstate(all="ignore"):
        x = r + g
        if code == TWO:
            up, down = x >= t, x <= -t
            codes = np.where(up, 3, np.where(down, 2, 0))
            sent = np.where(up, t, np.where(down, -t, np.float32(0))).astype(np.float32)
            return packed_bits(codes, 2), np.where(up | down, x - sent, x), sent
        if code == ONE:
            sent = np.where(x > t, np.float32(1), np.float32(-1))
            return packed_bits((x > t).astype(int), 1), x - sent, sent
        narrow = g.astype(np.float16 if code == HALF else ml_dtypes.bfloat16)
        return narrow.view(np.uint8), r, narrow.astype(np.float32)


def gradients(n: int, seed: int, special: bool = True) -> Array:
    made = np.random.default_rng(seed).uniform(-1.3, 1.3, n).astype(np.float32)
    if special and n:
        at = np.random.default_rng(seed + 1).integers(0, n, len(SPECIAL))
        made[at] = SPECIAL
    return made


def pack(code: int, t: float, g: Array, r: Array, extra: list[Array] | None = None) -> Array:
    packed = np.full(cpu.encoded_bytes(code, g.size), 0xA5, np.uint8)
    cpu.encode(code, t, [g, *(extra or [])], r, packed)
    return packed


@pytest.fixture(params=cpu.levels())
def level(request: pytest.FixtureRequest, kernel_settings: None) -> str:
    cpu.use_level(request.param)
    return str(request.param)


# ------------------------------------------------------------------------------------------ recorded values


def test_the_words_residuals_and_values_that_mxnet_makes(golden: Callable[[str], Any], level: str) -> None:
    arrays, seen = golden("compress2bit.npz"), 0
    for name, case in golden("compress2bit.json")["cases"].items():
        n, t = case["n"], float(np.float32(case["threshold"]))
        residual = np.zeros(n, np.float32)
        for i in range(case["rounds"]):
            packed = pack(TWO, t, lcg(n, i, -1.3, 1.3), residual)
            np.testing.assert_array_equal(packed.view(np.uint32), arrays[f"{name}_words"][i])
            decoded = np.full(n, 7, np.float32)
            cpu.decode(TWO, t, [packed], decoded)
            assert sha256(residual) == case["residual_sha256"][i]
            assert sha256(decoded) == case["dequant_sha256"][i]
            seen += 1
    assert seen >= 195


def sha256(a: Array) -> str:
    return hashlib.sha256(a.tobytes()).hexdigest()


def test_small_recordings_element_by_element(golden: Callable[[str], Any], level: str) -> None:
    arrays = golden("compress2bit.npz")
    names = [f.removesuffix("_grad") for f in arrays.files if f.endswith("_grad")]
    assert len(names) >= 30
    for name in names:
        t = 1 / 3 if name.endswith("0p333333") else float(name.split("_t")[1].replace("p", "."))
        words = arrays[f"{name}_words"]
        grads = np.broadcast_to(arrays[f"{name}_grad"], (len(words), *arrays[f"{name}_grad"].shape[-1:]))
        residual = np.zeros(grads.shape[1], np.float32)
        for i, g in enumerate(np.ascontiguousarray(grads)):
            packed = pack(TWO, t, g, residual)
            np.testing.assert_array_equal(packed.view(np.uint32), words[i])
            assert_same_bits(residual, arrays[f"{name}_residual"][i])
            decoded = np.full_like(g, 7)
            cpu.decode(TWO, t, [packed], decoded)
            assert_same_bits(decoded, arrays[f"{name}_dequant"][i])


def test_every_byte_decodes_as_recorded(golden: Callable[[str], Any], level: str) -> None:
    arrays = golden("compress2bit.npz")
    decoded = np.empty(1024, np.float32)
    cpu.decode(TWO, 0.5, [arrays["decode_all_bytes_words"].view(np.uint8)], decoded)
    assert_same_bits(decoded, arrays["decode_all_bytes_out_t0p5"])


# -------------------------------------------------------------------------------------- against the statement


@given(
    code=st.sampled_from([TWO, ONE, HALF, BFLOAT]),
    n=st.sampled_from(SIZES),
    t=st.sampled_from([0.5, 0.1, 1 / 3, 1e-45, 2.0, np.inf]),
    k=st.integers(1, 4),
    offset=st.integers(0, 3),
    level=st.sampled_from(cpu.levels()),
    seed=st.integers(0, 1000),
)
@example(code=TWO, n=513, t=0.5, k=3, offset=1, level=cpu.levels()[-1], seed=1)
def test_packing(code: int, n: int, t: float, k: int, offset: int, level: str, seed: int) -> None:
    grads = [placed(gradients(n, seed + i), offset) for i in range(k)]
    residual = placed(gradients(n, seed + 100), offset)
    total = grads[0]
    with np.errstate(all="ignore"):
        for g in grads[1:]:
            total = total + g
    words, left, sent = encode(code, np.float32(t), total, residual.copy())
    with knobs(level=level):
        packed = pack(code, t, grads[0], residual, grads[1:])
        if code in (TWO, ONE):  # those of 16 bits may differ in the bits of a NaN
            np.testing.assert_array_equal(packed, words)
        decoded = placed(np.full(n, 7, np.float32), offset)
        cpu.decode(code, t, [packed], decoded)
    assert_same_bits(decoded, sent)
    assert_same_bits(residual, left)


@given(
    code=st.sampled_from([TWO, ONE, HALF, BFLOAT]),
    n=st.sampled_from([*SIZES, CHUNK - 1, CHUNK, CHUNK + 65, 3 * CHUNK + 7]),
    k=st.integers(1, 10),
    m=st.integers(0, 2),
    packed=st.booleans(),
    offset=st.integers(0, 3),
    level=st.sampled_from(cpu.levels()),
    stream=st.sampled_from([NEVER, ALWAYS]),
    seed=st.integers(0, 1000),
)
@example(
    code=TWO, n=CHUNK + 65, k=2, m=2, packed=False, offset=1, level=cpu.levels()[-1], stream=ALWAYS, seed=0
)
def test_sums_of_what_gradients_decode_to(
    code: int, n: int, k: int, m: int, packed: bool, offset: int, level: str, stream: int, seed: int
) -> None:
    grads = [placed(gradients(n, seed + i), offset) for i in range(k)]
    residuals = [gradients(n, seed + 50 + i) for i in range(k)]
    stated = [encode(code, np.float32(0.5), g, r) for g, r in zip(grads, residuals, strict=True)]
    wanted = stated[0][2].copy()
    for _, _, sent in stated[1:]:
        with np.errstate(all="ignore"):
            wanted += sent
    dst, *outs = (placed(np.full(n, 7, np.float32), offset) for _ in range(m + 1))
    with knobs(level=level, stream=stream):
        if packed:
            words = [pack(code, 0.5, g, r) for g, r in zip(grads, residuals, strict=True)]
            coded = cpu.Coded(code, 0.5, n, words, packed=True)
        else:
            coded = cpu.Coded(code, 0.5, n, grads, residuals)
        cpu.reduce([(coded, dst, outs)])
    for array in (dst, *outs):
        assert_same_bits(array, wanted)
    for residual, (_, left, _) in zip(residuals, stated, strict=True):
        assert_same_bits(residual, left)


@pytest.mark.parametrize("code", [TWO, ONE, HALF, BFLOAT])
@pytest.mark.parametrize("stream", [NEVER, ALWAYS])
@pytest.mark.parametrize("n", [1, 100, 513, CHUNK + 17])
def test_accumulating(code: int, stream: int, n: int) -> None:
    grads = [gradients(n, i) for i in range(3)]
    words = [pack(code, 0.5, g, np.zeros(n, np.float32)) for g in grads]
    start = gradients(n, 9, special=False)
    wanted = start.copy()
    for g in grads:
        with np.errstate(all="ignore"):
            wanted += encode(code, np.float32(0.5), g, np.zeros(n, np.float32))[2]
    with knobs(stream=stream):
        cpu.decode(code, 0.5, words, start, accumulate=True)
    assert_same_bits(start, wanted)


@pytest.mark.parametrize("rule, states", [("sgd", 0), ("sgd_momentum", 1), ("adam", 2)])
@pytest.mark.parametrize("n", [33, 1025, CHUNK + 5])
def test_updates_with_what_gradients_decode_to(rule: str, states: int, n: int) -> None:
    grads = [gradients(n, i, special=False) for i in range(3)]
    params = (0.1, 0.01, 1.0, np.inf, 0.9, 0.999, 1e-8)
    decoded = [encode(TWO, np.float32(0.5), g, np.zeros(n, np.float32))[2] for g in grads]
    results = []
    for srcs in (decoded, cpu.Coded(TWO, 0.5, n, grads, [np.zeros(n, np.float32) for _ in grads])):
        weight, out = gradients(n, 77, special=False), np.empty(n, np.float32)
        state = tuple(np.zeros(n, np.float32) for _ in range(states))
        cpu.update([(cpu.rule_id(rule), params, srcs, weight, None, state, [out])])
        assert_same_bits(weight, out)
        results.append((weight, *state))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


# ------------------------------------------------------------------------------------------------- properties


@given(n=st.sampled_from([1, 64, 100, 700]), t=st.sampled_from([0.5, 0.25, 2.0]), seed=st.integers(0, 10000))
def test_nothing_is_lost(n: int, t: float, seed: int) -> None:
    """decode(encode(g)) + residual' = g + residual: exactly, where float32 holds the numbers that occur."""
    random = np.random.default_rng(seed)
    exact = random.integers(-(2**12), 2**12, (6, n)).astype(np.float32) / 2**10  # multiples of 2^-10 below 8
    residual = np.zeros(n, np.float32)
    for code in (TWO, ONE):
        for g in exact:
            before = residual.astype(np.float64) + g
            packed = pack(code, t, g, residual)
            decoded = np.empty(n, np.float32)
            cpu.decode(code, t, [packed], decoded)
            np.testing.assert_array_equal(decoded.astype(np.float64) + residual, before)


@given(n=st.sampled_from([1, 64, 1000]), t=st.sampled_from([0.5, 0.1, 1e-3]), seed=st.integers(0, 10000))
def test_of_any_gradient_hardly_anything_is_lost(n: int, t: float, seed: int) -> None:
    """The residual is x - sent rounded once: exact near the threshold (Sterbenz), else within half an ulp."""
    random = np.random.default_rng(seed)
    g = (random.standard_normal(n) * 10.0 ** random.integers(-6, 3)).astype(np.float32)
    residual = (random.standard_normal(n) * t).astype(np.float32)
    x = residual + g
    packed = pack(TWO, t, g, residual)
    decoded = np.empty(n, np.float32)
    cpu.decode(TWO, t, [packed], decoded)
    lost = np.abs(decoded.astype(np.float64) + residual - x)
    assert (lost <= np.spacing(np.maximum(np.abs(x), np.float32(t))).astype(np.float64) / 2).all()


def test_the_order_of_work_does_not_show(kernel_settings: None) -> None:
    """One thread or two, kept in the cache or streamed past it: the same words and residuals."""
    n = 5 * CHUNK + 333
    g = gradients(n, 3)
    found = []
    for threads in (1, 2):
        for stream in (NEVER, ALWAYS):
            cpu.set_threads(threads)
            cpu.set_stream_bytes(stream)
            residual = gradients(n, 4)
            found.append((pack(TWO, 0.5, g, residual).tobytes(), residual.tobytes()))
    assert len(set(found)) == 1


def test_a_gradient_may_receive_the_sum() -> None:
    """In place, as `pushpull` without outs: every gradient is read before it is written."""
    n = 2 * CHUNK + 40
    for stream in (NEVER, ALWAYS):
        grads = [gradients(n, i) for i in range(2)]
        stated = [encode(TWO, np.float32(0.5), g, np.zeros(n, np.float32)) for g in grads]
        dst = np.empty(n, np.float32)
        with knobs(stream=stream):
            cpu.reduce(
                [(cpu.Coded(TWO, 0.5, n, grads, [np.zeros(n, np.float32) for _ in grads]), dst, grads)]
            )
        for array in (dst, *grads):
            assert_same_bits(array, stated[0][2] + stated[1][2])


def test_outs_of_one_key_that_are_gradients_of_another() -> None:
    """Items that overlap run in order, and no gradient is packed twice."""
    n = 300
    a, b = gradients(n, 1), gradients(n, 2)
    first = encode(TWO, np.float32(0.5), a, np.zeros(n, np.float32))
    second = encode(TWO, np.float32(0.5), b, np.zeros(n, np.float32))
    dst = [np.empty(n, np.float32) for _ in range(2)]
    left = [np.zeros(n, np.float32) for _ in range(2)]
    cpu.reduce(
        [
            (cpu.Coded(TWO, 0.5, n, [a], [left[0]]), dst[0], [b]),
            (cpu.Coded(TWO, 0.5, n, [b], [left[1]]), dst[1], [a]),
        ]
    )
    assert_same_bits(dst[0], first[2])
    assert_same_bits(dst[1], second[2])
    assert_same_bits(b, first[2])
    assert_same_bits(a, second[2])
    assert_same_bits(left[0], first[1])
    assert_same_bits(left[1], second[1])


# ----------------------------------------------------------------------------------------------------- misuse


def test_what_does_not_fit_raises_before_anything_is_written() -> None:
    g, r = np.ones(20, np.float32), np.zeros(20, np.float32)
    words = np.zeros(8, np.uint8)
    coded = cpu.Coded(TWO, 0.5, 20, [g], [r])
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (ValueError, lambda: cpu.encoded_bytes(0, 4)),
        (ValueError, lambda: cpu.encoded_bytes(TWO, -1)),
        (ValueError, lambda: cpu.encode(99, 0.5, [g], r, words)),
        (ValueError, lambda: cpu.encode(TWO, 0.5, [], r, words)),
        (ValueError, lambda: cpu.encode(TWO, 0.5, [g], r, words[:4])),
        (TypeError, lambda: cpu.encode(TWO, 0.5, [g], None, words)),
        (TypeError, lambda: cpu.encode(TWO, 0.5, [g.astype(np.float64)], r, words)),
        (TypeError, lambda: cpu.encode(TWO, 0.5, [g], r, words.view(np.int8))),
        (ValueError, lambda: cpu.decode(TWO, 0.5, [], g)),
        (ValueError, lambda: cpu.decode(TWO, 0.5, [words[:4]], g)),
        (TypeError, lambda: cpu.decode(TWO, 0.5, [words], g.astype(np.float16))),
        (ValueError, lambda: cpu.Coded(TWO, 0.5, 20, [])),
        (ValueError, lambda: cpu.Coded(TWO, 0.5, 20, [g])),
        (ValueError, lambda: cpu.Coded(TWO, 0.5, 20, [g, g], [r])),
        (ValueError, lambda: cpu.reduce([(coded, None, [g])])),
        (TypeError, lambda: cpu.reduce([(coded, np.zeros(20), [])])),
        (ValueError, lambda: cpu.reduce([(coded, np.zeros(21, np.float32), [])])),
        (TypeError, lambda: cpu.reduce([((g,), g, [])])),
    ]
    for error, call in wrong:
        with pytest.raises(error):
            call()
    assert (g == 1).all()
    assert (r == 0).all()
    assert (words == 0).all()


def test_codes_have_names() -> None:
    assert cpu.codings() == ["two_bit", "one_bit", "half", "bfloat"]
    with pytest.raises(KeyError):
        cpu.coding("three_bit")
    assert [cpu.coding_bits(code) for code in (TWO, ONE, HALF, BFLOAT)] == [2, 1, 16, 16]
    assert [cpu.encoded_bytes(TWO, n) for n in (0, 1, 16, 17)] == [0, 4, 4, 8]
    assert [cpu.encoded_bytes(ONE, n) for n in (0, 1, 32, 33)] == [0, 4, 4, 8]
    assert [cpu.encoded_bytes(HALF, n) for n in (0, 1, 33)] == [0, 2, 66]
