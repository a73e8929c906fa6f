"""Images: every chunk of every row once, and rows that do not fit are refused."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.kernels import cpu
from kvstore.kernels.cuda import (
    RULE_STATES,
    KernelRow,
    KernelSpec,
    all_specs,
    choose_spec,
    launch_image,
    row_constants,
    table,
)

SUM2 = KernelSpec("sum", "float32", 2)


def header(words: np.ndarray, at: int) -> dict[str, int]:
    names = ("NUMEL", "ALIGNED", "COUNT", "SOURCES", "RESIDUALS", "CODES", "OUTS", "DST")
    return {name: int(words[at + getattr(table, name)]) for name in names}


@given(
    st.lists(
        st.tuples(st.integers(0, 100_000), st.integers(1, 5), st.integers(0, 3), st.integers(0, 20)),
        max_size=12,
    )
)
def test_each_chunk_of_each_row_has_one_block(keys: list[tuple[int, int, int, int]]) -> None:
    spec = KernelSpec("sum", "float32")
    rows = [
        KernelRow(
            numel=n,
            srcs=tuple(16 * (100 * i + j) for j in range(k)),
            dst=(1 << 40) + 16 * i + 4 * (odd == 7),
            outs=tuple((1 << 41) + 16 * j + (odd == 5) for j in range(m)),
        )
        for i, (n, k, m, odd) in enumerate(keys)
    ]
    words, chunks = launch_image(spec, rows)
    seen: dict[int, list[int]] = {}
    for entry in words[:chunks].tolist():
        seen.setdefault(entry & 0xFFFFFFFF, []).append(entry >> 32)
    filled = [row for row in rows if row.numel]
    assert len(seen) == len(filled)
    for row, (at, its_chunks) in zip(filled, sorted(seen.items()), strict=True):
        assert its_chunks == list(range(-(-row.numel // spec.chunk)))
        found = header(words, at)
        assert (found["NUMEL"], found["DST"]) == (row.numel, row.dst)
        sources = words[at + found["SOURCES"] :][: found["COUNT"]]
        outs = words[at + found["OUTS"] :][: len(row.outs) + 1]
        assert (tuple(sources), tuple(outs)) == (row.srcs, (*row.outs, 0))
        assert found["ALIGNED"] == all(a % 16 == 0 for a in (*row.srcs, row.dst, *row.outs))


def test_states_master_and_residuals_count_for_the_alignment() -> None:
    update = KernelSpec("update", "float16", 1, "adam", master=True)
    good = KernelRow(8, srcs=(16,), dst=32, states=(48, 64), master=80, params=8)
    quantise = KernelSpec("quantise_2bit", k=1)
    plain = KernelRow(8, srcs=(16,), residuals=(32,), words=(4,))
    for spec, row, fields in (
        (update, good, {"states": (48, 68), "master": 84, "srcs": (18,), "dst": 34}),
        (quantise, plain, {"residuals": (36,), "srcs": (20,)}),
    ):
        words, chunks = launch_image(spec, [row])
        assert header(words, chunks)["ALIGNED"] == 1
        for name, value in fields.items():
            words, chunks = launch_image(spec, [row._replace(**{name: value})])
            assert header(words, chunks)["ALIGNED"] == 0, name


def test_no_rows_and_no_elements_are_no_work() -> None:
    assert launch_image(SUM2, [])[1] == 0
    assert launch_image(SUM2, [KernelRow(0, srcs=(16, 32), dst=16)])[1] == 0


@pytest.mark.parametrize(
    ("spec", "row", "what"),
    [
        (SUM2, KernelRow(4, srcs=(16,), dst=16), "arrays to sum"),
        (KernelSpec("sum"), KernelRow(4, dst=16), "arrays to sum"),
        (SUM2, KernelRow(4, srcs=(16, 16)), "dst"),
        (SUM2, KernelRow(4, srcs=(16, 16), dst=16, residuals=(16,)), "residuals"),
        (SUM2, KernelRow(4, srcs=(16, 16), dst=16, master=16), "master"),
        (SUM2, KernelRow(4, srcs=(16, 16), dst=16, states=(16,)), "states"),
        (
            KernelSpec("update", rule="adam"),
            KernelRow(4, srcs=(16,), dst=16, states=(16,), params=16),
            "states",
        ),
        (KernelSpec("update", rule="sgd"), KernelRow(4, srcs=(16,), dst=16), "params"),
        (
            KernelSpec("update", "float16", 1, "sgd", True),
            KernelRow(4, srcs=(16,), dst=16, params=16),
            "master",
        ),
        (KernelSpec("quantise_2bit"), KernelRow(4, srcs=(16,), words=(16,)), "residuals"),
        (KernelSpec("quantise_2bit"), KernelRow(4, srcs=(16,), residuals=(16,)), "words"),
        (KernelSpec("dequantise_1bit"), KernelRow(4, srcs=(16,), words=(16,), dst=16), "srcs"),
        (KernelSpec("dequantise_1bit", k=2), KernelRow(4, words=(16,), dst=16), "arrays to sum"),
        (KernelSpec("reduce_2bit"), KernelRow(4, srcs=(16, 16), residuals=(16,), dst=16), "residuals"),
    ],
)
def test_a_row_that_does_not_fit_is_named(spec: KernelSpec, row: KernelRow, what: str) -> None:
    with pytest.raises(ValueError, match=f"{spec.name}: row 0 does not have the {what}"):
        launch_image(spec, [row])


def test_the_row_that_is_named_is_the_one() -> None:
    good = KernelRow(4, srcs=(16, 16), dst=16)
    with pytest.raises(ValueError, match="row 2 does not have"):
        launch_image(SUM2, [good, good, good._replace(dst=0), good])


def test_an_image_of_many_keys_takes_little_time() -> None:
    rows = [KernelRow(158_000, srcs=(16, 32, 48, 64), dst=80) for _ in range(161)]
    spec = choose_spec("sum", k=4)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        launch_image(spec, rows)
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3  # some tenths of that are usual; this only notices work for each chunk in Python


# ------------------------------------------------------------------------------------------------------ names


def test_names_and_specs_are_one_to_one() -> None:
    specs = all_specs()
    assert len({spec.name for spec in specs}) == len(specs) == len(set(specs))
    for spec in specs:
        assert KernelSpec.from_name(spec.name) == spec
        assert KernelSpec.of_entry(f"_ZN6cudapy{len(spec.entry)}{spec.entry}B3v1B8c8tJTEx") == spec


@pytest.mark.parametrize("name", ["sum_float31_k2", "sum_float32_k9", "update_nosuch_float32_any", "no", ""])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="kernel"):
        KernelSpec.from_name(name)


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "product"},
        {"op": "sum", "k": 9},
        {"op": "sum", "k": -1},
        {"op": "sum", "dtype": "complex64"},
        {"op": "sum", "rule": "sgd"},
        {"op": "sum", "target": "float16"},
        {"op": "update"},
        {"op": "update", "rule": "lamb_apply"},
        {"op": "update", "rule": "sgd", "dtype": "int32"},
        {"op": "update", "rule": "sgd", "master": True},
        {"op": "cast"},
        {"op": "cast", "dtype": "float16", "target": "bfloat16"},
        {"op": "quantise_2bit", "dtype": "float16"},
    ],
)
def test_a_spec_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no such CUDA kernel"):
        KernelSpec(**fields)  # type: ignore[arg-type]


def test_these_rules_have_no_kernel() -> None:
    assert set(cpu.rules()) - set(RULE_STATES) == {"sgld", "lamb_moments", "lamb_apply"}


@pytest.mark.parametrize("op", ["sum", "update", "quantise_2bit", "dequantise_1bit", "reduce_2bit"])
def test_what_is_chosen_is_built_ahead(op: str) -> None:
    for k in (None, *range(1, 21)):
        chosen = choose_spec(op, k=k, rule="adam" if op == "update" else None)
        assert chosen in all_specs()
        assert chosen.k in (0, k)
    assert choose_spec("sum", "uint8", 3) == choose_spec("sum", "int8", 3)
    assert choose_spec("sum", k=3).k == 3
    assert choose_spec("update", "float64", 1, rule="sgd").k == 0


def test_constants_are_rounded_once() -> None:
    spec = KernelSpec("update", rule="adamax")
    (made,) = row_constants(spec, [(0.1, 0.2, 0.3, np.inf, 0.9, 0.999, 1e-8)])
    assert made.dtype == np.float32
    assert made[4] == np.float32(0.9)
    assert made[12] == np.float32(1 - 0.9) != np.float32(1) - np.float32(0.9)
    assert (
        row_constants(KernelSpec("update", "float64", rule="sgd"), [(0.1, 0.0, 1.0, 1.0)]).dtype == np.float64
    )
