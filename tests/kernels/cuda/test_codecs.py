"""Codecs: MXNet's words, residuals and decoded values, bit for bit."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from fake_cuda.cases import HostTarget, Place, Target, fresh
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import nightly_unless
from references import Array, assert_same_bits, draw, total

from kvstore.kernels import cpu
from kvstore.kernels.cuda import KernelRow, KernelSpec, all_specs

F32 = np.float32
IN_WORD = {"2bit": 16, "1bit": 32}
SIZES = [0, 1, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 65, 1000, 1023, 4097, 8191, 8192, 8193, 30_001]
CODEC_SPECS = [spec for spec in all_specs() if spec.codec]


class Coded(NamedTuple):
    """The results of quantising: words as bytes, the residual, and the decoded words."""

    words: Array
    left: Array
    decoded: Array


def words_bytes(codec: str, n: int) -> int:
    return 4 * -(-n // IN_WORD[codec])


def quantised(codec: str, r: Array, t: float) -> Coded:
    """Restate contract and packing, in NumPy."""
    t = F32(t)
    with np.errstate(all="ignore"):
        if codec == "2bit":
            up, down = r >= t, r <= -t
            codes = np.where(up, 3, np.where(down, 2, 0)).astype(np.uint8)
            decoded = np.where(up, t, np.where(down, -t, F32(0))).astype(F32)
            left = np.where(up, r - t, np.where(down, r + t, r)).astype(F32)
        else:
            up = r > t
            codes = up.astype(np.uint8)
            decoded = np.where(up, F32(1), F32(-1)).astype(F32)
            left = np.where(up, r - F32(1), r + F32(1)).astype(F32)
    return Coded(packed(codec, codes), left, decoded)


def packed(codec: str, codes: Array) -> Array:
    bits = np.zeros((words_bytes(codec, codes.size) * 8,), np.uint8)
    if codec == "1bit":
        bits[: codes.size] = codes
    else:
        bits[: 2 * codes.size : 2], bits[1 : 2 * codes.size : 2] = codes >> 1, codes & 1
    return np.packbits(bits)


def plus(a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):
        return a + b


class Key(NamedTuple):
    n: int
    k: int
    outs: int


def run_quantise(
    target: Target, spec: KernelSpec, keys: list[Key], t: float, places: Iterator[int], seed: int
) -> None:
    codec, rows, checks, read = str(spec.codec), [], [], []
    for i, (n, k, _) in enumerate(keys):
        gradients = [draw("float32", n, seed + 9 * i + j, special=True) for j in range(k)]
        residual = draw("float32", n, seed + 9 * i + 8, special=i % 2 == 1)
        wanted = quantised(codec, plus(residual, total(gradients)), t)
        sources = [target.put(gradient, next(places)) for gradient in gradients]
        left = target.put(residual, next(places))
        read.append(sources)
        words = fresh(target, words_bytes(codec, n), np.uint8, 4 * next(places))
        rows.append(KernelRow(n, _of(sources), residuals=(left.address,), words=(words.address,)))
        checks.append((wanted, words, left))
    target.run(spec, rows, F32(t))
    for wanted, words, left in checks:
        assert words.read().tobytes() == wanted.words.tobytes()
        assert_same_bits(left.read(), wanted.left)


def run_dequantise(
    target: Target, spec: KernelSpec, keys: list[Key], t: float, places: Iterator[int], seed: int
) -> None:
    codec, rows, checks, read = str(spec.codec), [], [], []
    for i, (n, k, m) in enumerate(keys):
        coded = [quantised(codec, draw("float32", n, seed + 9 * i + j, special=True), t) for j in range(k)]
        words = [target.put(each.words, 4 * next(places)) for each in coded]
        read.append(words)
        results = [fresh(target, n, F32, next(places)) for _ in range(m + 1)]
        rows.append(KernelRow(n, dst=results[0].address, outs=_of(results[1:]), words=_of(words)))
        checks.append((total([each.decoded for each in coded]), results))
    target.run(spec, rows, F32(t))
    for wanted, results in checks:
        for result in results:
            assert_same_bits(result.read(), wanted)


def run_reduce(
    target: Target, spec: KernelSpec, keys: list[Key], t: float, places: Iterator[int], seed: int
) -> None:
    codec, rows, checks, read = str(spec.codec), [], [], []
    for i, (n, k, m) in enumerate(keys):
        gradients = [draw("float32", n, seed + 9 * i + j, special=True) for j in range(k)]
        before = [draw("float32", n, seed + 90 * i + j) for j in range(k)]
        coded = [quantised(codec, plus(r, g), t) for r, g in zip(before, gradients, strict=True)]
        sources = [target.put(gradient, next(places)) for gradient in gradients]
        residuals = [target.put(residual, next(places)) for residual in before]
        read.append(sources)
        results = [fresh(target, n, F32, next(places)) for _ in range(m + 1)]
        rows.append(
            KernelRow(n, _of(sources), results[0].address, _of(results[1:]), residuals=_of(residuals))
        )
        checks.append((coded, residuals, results))
    target.run(spec, rows, F32(t))
    for coded, residuals, results in checks:
        for result in results:
            assert_same_bits(result.read(), total([each.decoded for each in coded]))
        for residual, each in zip(residuals, coded, strict=True):
            assert_same_bits(residual.read(), each.left)


def _of(places: list[Place]) -> tuple[int, ...]:
    return tuple(place.address for place in places)


RUN = {"quantise": run_quantise, "dequantise": run_dequantise, "reduce": run_reduce}


def check(
    target: Target,
    spec: KernelSpec,
    keys: list[Key],
    t: float = 0.5,
    places: tuple[int, ...] = (),
    seed: int = 0,
) -> None:
    at = iter([*places, *[0] * 1000])
    RUN[spec.op.partition("_")[0]](target, spec, keys, t, at, seed)


@pytest.mark.parametrize("spec", CODEC_SPECS, ids=lambda s: s.name)
def test_every_kernel_in_plain_python(interpreted: HostTarget, spec: KernelSpec) -> None:
    k = spec.k or 3
    check(interpreted, spec, [Key(37, k, 1)])
    check(interpreted, spec, [Key(16, k, 0)], 0.1, places=(1, 1))
    check(interpreted, spec, [Key(70, k, 2)], places=(0, 3))


# Scope: tests of one kernel run one after the other, in one process, which compiles it once.
FOR_ANY = [spec for spec in CODEC_SPECS if spec.k == 0]
EACH = pytest.mark.parametrize(
    "spec",
    nightly_unless(lambda spec: spec.op in ("quantise_2bit", "dequantise_1bit", "reduce_2bit"), FOR_ANY),
    ids=[spec.name for spec in FOR_ANY],
    scope="module",
)


@EACH
def test_sizes_around_every_edge(target: Target, spec: KernelSpec) -> None:
    for t in (0.5, 1 / 3, 1e-3):
        check(target, spec, [Key(n, 1 + n % 4, n % 3) for n in SIZES], t)
    for places in ((1,), (0, 1), (0, 0, 3)):
        check(target, spec, [Key(n, 2, 1) for n in (1, 17, 1000, 8197)], places=places)


@pytest.mark.nightly
@pytest.mark.parametrize("spec", CODEC_SPECS, ids=lambda s: s.name)
def test_every_kernel_compiled(target: Target, spec: KernelSpec) -> None:
    check(target, spec, [Key(n, spec.k or 1 + n % 4, n % 3) for n in SIZES])
    check(target, spec, [Key(n, spec.k or 2, 1) for n in (1, 17, 1000, 8197)], places=(1,))


KEYS = st.builds(Key, st.integers(0, 70_000), st.integers(1, 12), st.integers(0, 2))


@EACH
@given(
    keys=st.lists(KEYS, max_size=3),
    t=st.floats(2.0**-20, 4, width=32),
    places=st.lists(st.integers(0, 4), max_size=12),
    seed=st.integers(0, 1000),
)
@settings(max_examples=7)
def test_any_keys(
    compiled: HostTarget, spec: KernelSpec, keys: list[Key], t: float, places: list[int], seed: int
) -> None:
    check(compiled, spec, keys, t, tuple(places), seed)


CODINGS = {"2bit": "two_bit", "1bit": "one_bit"}


@pytest.mark.parametrize("codec", CODINGS)
@pytest.mark.parametrize("n", [1, 31, 1000, 8197])
def test_the_cpu_kernels_give_the_same(target: Target, codec: str, n: int) -> None:
    code, t = cpu.coding(CODINGS[codec]), 0.3
    gradients = [draw("float32", n, j, special=True) for j in range(3)]
    residual = draw("float32", n, 9)
    sources, left = [target.put(gradient) for gradient in gradients], target.put(residual)
    words, decoded = fresh(target, words_bytes(codec, n), np.uint8), fresh(target, n, F32)
    row = KernelRow(n, _of(sources), residuals=(left.address,), words=(words.address,))
    target.run(KernelSpec(f"quantise_{codec}"), [row], F32(t))
    target.run(
        KernelSpec(f"dequantise_{codec}"), [KernelRow(n, dst=decoded.address, words=(words.address,))], F32(t)
    )
    packed_there, decoded_there = np.empty(cpu.encoded_bytes(code, n), np.uint8), np.empty(n, F32)
    cpu.encode(code, t, gradients, residual, packed_there)
    cpu.decode(code, t, [packed_there], decoded_there)
    assert words.read().tobytes() == packed_there.tobytes()
    assert_same_bits(left.read(), residual)
    assert_same_bits(decoded.read(), decoded_there)


# ------------------------------------------------------------------------------------------ golden data


class Feedback:
    """One array through the 2-bit codec, round after round."""

    def __init__(self, target: Target, n: int, t: float) -> None:
        self.target, self.n, self.t = target, n, F32(t)
        self.left = target.put(np.zeros(n, F32))

    def push(self, gradient: Array) -> Coded:
        target, n = self.target, self.n
        source, words = target.put(gradient), fresh(target, words_bytes("2bit", n), np.uint8)
        decoded = fresh(target, n, F32)
        quantise = KernelRow(n, (source.address,), residuals=(self.left.address,), words=(words.address,))
        target.run(KernelSpec("quantise_2bit"), [quantise], self.t)
        target.run(
            KernelSpec("dequantise_2bit"), [KernelRow(n, dst=decoded.address, words=(words.address,))], self.t
        )
        return Coded(words.read().view(np.uint32), self.left.read(), decoded.read())


def lcg(n: int, stream: int, low: float, high: float) -> Array:
    """Input of the recorded rounds (tests/data/README.md)."""
    i = np.arange(n, dtype=np.uint64)
    offset = np.uint64((stream + 1) * 40503 * 65537 + 12345)
    u = ((i * np.uint64(2654435761) + offset) % np.uint64(2**32)).astype(np.float64) / 2.0**32
    return (low + (high - low) * u).astype(F32)


def threshold_of(name: str) -> float:
    return {"0p333333": float(F32(1 / 3))}.get(name) or float(name.replace("p", "."))


def test_every_recorded_round(target: Target, golden: Any) -> None:
    data, facts = golden("compress2bit.npz"), golden("compress2bit.json")
    names = [name[: -len("_words")] for name in data if re.fullmatch(r"n\d+_t\w+_words", name)]
    assert len(names) > 30
    for name in names:
        n, t = int(name[1:].partition("_")[0]), threshold_of(name.partition("_t")[2])
        feedback = Feedback(target, n, t)
        case = facts["cases"][name]
        for number, words in enumerate(data[f"{name}_words"]):
            found = feedback.push(lcg(n, number, -1.3, 1.3))
            assert found.words.tolist() == words.tolist(), name
            for kind, array in (("residual", found.left), ("dequant", found.decoded)):
                digest = hashlib.sha256(array.tobytes()).hexdigest()
                assert digest == case[f"{kind}_sha256"][number], (name, number, kind)


def test_recorded_rounds_of_special_values(target: Target, golden: Any) -> None:
    data = golden("compress2bit.npz")
    names = sorted(name[: -len("_words")] for name in data if re.fullmatch(r"special_t\w+_words", name))
    assert names
    for name in names:
        gradients = data[f"{name}_grad"]
        feedback = Feedback(target, gradients.shape[-1], threshold_of(name.partition("_t")[2]))
        for number, words in enumerate(data[f"{name}_words"]):
            found = feedback.push(gradients if gradients.ndim == 1 else gradients[number])
            assert found.words.tolist() == words.tolist()
            np.testing.assert_array_equal(found.left, data[f"{name}_residual"][number])
            np.testing.assert_array_equal(found.decoded, data[f"{name}_dequant"][number])


def test_the_whole_recorded_table_of_codes(target: Target, golden: Any) -> None:
    data = golden("compress2bit.npz")
    words = target.put(data["decode_all_bytes_words"].view(np.uint8))
    decoded = fresh(target, 1024, F32)
    target.run(
        KernelSpec("dequantise_2bit"),
        [KernelRow(1024, dst=decoded.address, words=(words.address,))],
        F32(0.5),
    )
    assert_same_bits(decoded.read(), data["decode_all_bytes_out_t0p5"])


def test_recorded_pulls_of_a_device_store(target: Target, golden: Any) -> None:
    """Three values of a key, each with its residual: the sums that MXNet's device store gave."""
    pulls = golden("compress2bit.npz")["kv_device_pulls"]
    n = pulls.shape[1]
    residuals = [target.put(np.zeros(n, F32)) for _ in range(3)]
    for number, wanted in enumerate(pulls[1:]):
        sources = [target.put(lcg(n, 10 * number + j, -1.3, 1.3)) for j in range(3)]
        dst = fresh(target, n, F32)
        row = KernelRow(n, _of(sources), dst.address, residuals=_of(residuals))
        target.run(KernelSpec("reduce_2bit"), [row], F32(0.5))
        assert_same_bits(dst.read(), wanted)
