"""The compile gate: the compiler's output for every kernel, on machines without a GPU."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pace
import pytest
from nightly import nightly_unless

from kvstore.kernels.cuda import KernelSpec, all_specs
from kvstore.kernels.cuda.spec import most_registers

pytest.importorskip("numba_cuda", reason="needs kvstore-train[cuda]")

from kvstore.kernels.cuda.report import KernelFacts, all_facts, kernel_facts

TABLE = Path(__file__).parents[3] / "docs" / "reference" / "cuda-kernels.md"
# One of each kind, for the architectures that are not gone through completely every time.
SOME = [
    KernelSpec("sum", "float32", 4),
    KernelSpec("sum", "bfloat16", 8),
    KernelSpec("update", "float32", 0, "adam"),
    KernelSpec("update", "float16", 0, "rmsprop_centered", master=True),
    KernelSpec("quantise_2bit", k=1),
    KernelSpec("reduce_1bit"),
]


def broken_promises(fact: KernelFacts) -> list[str]:
    spec = KernelSpec.from_name(fact.name)
    promises = {
        "spills": fact.spills == 0,
        "stack": fact.stack == 0,
        "local memory": fact.local == 0,
        "too many registers": fact.registers <= most_registers(spec) <= 80,
        "a fused multiply-add": fact.contracted == 0,
        "roundings that are not to nearest": fact.approximate == 0,
        "float64": fact.doubles == 0 or spec.dtype == "float64",
        "no 128-bit loads": fact.loads > 0 or spec.op.startswith("dequantise"),
        "no 128-bit stores": fact.stores > 0,
    }
    return [what for what, kept in promises.items() if not kept]


def check(found: Sequence[KernelFacts]) -> None:
    broken = {f"{fact.name} on {fact.arch}": broken_promises(fact) for fact in found}
    assert not {name: what for name, what in broken.items() if what}


@pytest.mark.timeout(1800)
def test_every_127th_kernel_on_hopper() -> None:
    check(all_facts(all_specs()[::127], ["sm_90"]))


ELSEWHERE = zip(SOME, itertools.cycle(["sm_80", "sm_100"]), strict=False)


@pytest.mark.parametrize(
    ("spec", "arch"),
    nightly_unless(lambda spec, _: spec.rule == "adam" or spec.op == "reduce_1bit", ELSEWHERE),
)
def test_some_kernels_elsewhere(spec: KernelSpec, arch: str) -> None:
    check(kernel_facts(spec, [arch]))


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_kernel_everywhere() -> None:
    check(all_facts(all_specs(), ["sm_80", "sm_90", "sm_100"]))


def test_the_gate_sees_what_it_looks_for() -> None:
    good = KernelFacts("sum_float32_k2", "sm_90", 32, 0, 0, 2, 1, 0, 0, 0, 0)
    assert broken_promises(good) == []
    bad = KernelFacts("sum_float32_k2", "sm_90", 65, 8, 8, 0, 0, 1, 1, 1, 1)
    assert len(broken_promises(bad)) == 9


def test_the_table_in_the_documentation_has_every_kernel() -> None:
    named = re.findall(r"^\| (\w+) \|", TABLE.read_text(), re.MULTILINE)
    assert [name for name in named if name != "kernel"] == [spec.name for spec in all_specs()]


LIKE_A_LATER_NUMPY = """
import numpy
if hasattr(numpy, "row_stack"):
    del numpy.row_stack
    numpy.__all__.remove("row_stack")
from kvstore.kernels.cuda import KernelSpec
from kvstore.kernels.cuda.compile import compile_spec
assert compile_spec(KernelSpec("sum"), "sm_90").code[:4] == b"\\x7fELF"
assert not hasattr(numpy, "row_stack")
"""


def test_a_numpy_without_row_stack_will_do() -> None:
    command = [sys.executable, "-W", "ignore", "-c", LIKE_A_LATER_NUMPY]
    subprocess.run(command, check=True, timeout=pace.seconds(100))


@pytest.mark.parametrize(
    ("dtype", "name"),
    nightly_unless(lambda dtype, _: dtype == "float32", [("float32", "f32"), ("float64", "f64")]),
)
def test_products_and_sums_are_rounded_each(dtype: str, name: str) -> None:
    from kvstore.kernels.cuda.compile import compile_ptx

    spec = KernelSpec("update", dtype, 0, "adam")
    code = compile_ptx(spec, ["sm_90"])["sm_90"]
    for operation in ("mul.rn", "add.rn", "div.rn", "sqrt.rn"):
        assert f"{operation}.{name}" in code
    assert not re.search(rf"\b(mul|add|sub)\.{name}", code), "the assembler may contract these"


def test_kernels_are_built_ahead_of_time(tmp_path: Path) -> None:
    names = ["cast_bfloat16_float32", "cast_float32_bfloat16"]
    command = [
        sys.executable,
        "-m",
        "kvstore.kernels.cuda",
        "build",
        str(tmp_path),
        "--arch",
        "sm_80",
        "--arch",
        "sm_90",
    ]
    command += [argument for name in names for argument in ("--kernel", name)]
    for said in ("4 kernels compiled", "0 kernels compiled"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=pace.seconds(100), check=True)
        assert said in done.stdout
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o644] * 4
