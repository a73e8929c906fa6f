"""Facts about the compiled code of each kernel: for the compile gate, and a table for the documentation."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from .spec import KernelSpec, all_specs


@dataclass(frozen=True)
class KernelFacts:
    """One kernel on one architecture.

    Attributes
    ----------
    name, arch : str
    registers, stack, spills : int
        Per thread; stack and spills in bytes.
    loads, stores : int
        128-bit accesses to global memory in the code.
    local : int
        Accesses to local memory.
    contracted : int
        Fused multiply-adds of floats.
    doubles : int
        Instructions on float64.
    approximate : int
        Divisions and square roots that are not rounded to nearest, and instructions that flush denormals.
    """

    name: str
    arch: str
    registers: int
    stack: int
    spills: int
    loads: int
    stores: int
    local: int
    contracted: int
    doubles: int
    approximate: int


_COUNTS = {
    "loads": r"\bld\.global(\.\w+)*\.v[24]\.",
    "stores": r"\bst\.global(\.\w+)*\.v[24]\.",
    "local": r"\b(ld|st)\.local\b|\.local \.align",
    "contracted": r"\bfma\.\w+\.f",
    "doubles": r"\.f64\b(?!\s*%fd\d+;)",
    "approximate": r"\.approx\b|\.ftz\b|\bdiv\.full\b",
}


def kernel_facts(spec: KernelSpec, archs: Sequence[str]) -> list[KernelFacts]:
    """Compile a kernel and count."""
    from .compile import assemble_cubin, compile_ptx

    made = []
    for arch, ptx in compile_ptx(spec, archs).items():
        cubin = assemble_cubin(spec, arch, ptx)
        code = ptx[ptx.index("{") :]
        counts = {what: len(re.findall(pattern, code)) for what, pattern in _COUNTS.items()}
        spills = cubin.spill_stores + cubin.spill_loads
        made.append(KernelFacts(spec.name, arch, cubin.registers, cubin.stack, spills, **counts))
    return made


def _facts_of_all(specs: Sequence[KernelSpec], archs: Sequence[str]) -> list[KernelFacts]:
    return [fact for spec in specs for fact in kernel_facts(spec, archs)]


def all_facts(specs: Sequence[KernelSpec], archs: Sequence[str], processes: int = 0) -> list[KernelFacts]:
    """Compile many kernels in several processes; 0: one for each processor, eight at most."""
    wanted = processes or min(os.cpu_count() or 1, 8)
    shares = [specs[i::wanted] for i in range(wanted)]
    with ProcessPoolExecutor(wanted, mp_context=get_context("spawn")) as pool:
        parts = pool.map(_facts_of_all, shares, [archs] * wanted)
        found = {(fact.name, fact.arch): fact for part in parts for fact in part}
    return [found[spec.name, arch] for spec in specs for arch in archs]


_HEAD = """# CUDA kernels

Every kernel that is built ahead of time, as `python -m kvstore.kernels.cuda report {path}` finds it:
registers of a thread, 128-bit loads and stores in its code (in PTX; some stand in loops, so these are not
counts of what a thread does), and bytes spilled. Any number of values that is not in the table has the kernel
`any`. All kernels were compiled without a GPU; on an NVIDIA H200 (sm_90) all tests of theirs pass.

Compiled with {toolchain}.

| kernel | {archs} | loads | stores | spills |
|---|{lines}---:|---:|---:|
"""


def _table_row(name: str, of_archs: Sequence[KernelFacts]) -> str:
    registers = " | ".join(str(fact.registers) for fact in of_archs)
    first = of_archs[0]
    spills = max(fact.spills + fact.stack for fact in of_archs)
    return f"| {name} | {registers} | {first.loads} | {first.stores} | {spills} |"


def report_page(archs: Sequence[str]) -> str:
    """Return the page docs/reference/cuda-kernels.md."""
    from .provenance import toolchain_versions

    specs = all_specs()
    found = iter(all_facts(specs, archs))
    head = _HEAD.format(
        path="docs/reference/cuda-kernels.md",
        toolchain=toolchain_versions(),
        archs=" | ".join(f"registers {arch}" for arch in archs),
        lines="---:|" * len(archs),
    )
    rows: Iterable[str] = (_table_row(spec.name, [next(found) for _ in archs]) for spec in specs)
    return head + "\n".join(rows) + "\n"
