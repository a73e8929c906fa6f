"""From a spec to code for a GPU, without a GPU or its driver: numba-cuda makes PTX, cuda.core links it.

Only this file and `targets` use numba. numba-cuda is in maintenance mode, and pinned to versions with the
internals that this file uses.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from .bodies import targets
from .bodies.from_spec import body_of_spec
from .cubin import KernelCubin
from .provenance import source_key, toolchain_versions
from .spec import KernelSpec, most_registers
from .table import BLOCK

cuda = targets.import_cuda()

import numba.cuda.compiler as numba_compiler  # noqa: E402 (only after the shim)
import numba.cuda.dispatcher as numba_dispatcher  # noqa: E402
from numba import types  # noqa: E402

#: Registers of a multiprocessor.
REGISTERS = 65536

_lock = threading.Lock()


def entry_point(spec: KernelSpec) -> Callable[..., None]:
    """Make the kernel around a body."""
    run = body_of_spec(spec)

    def without_scalar(image: int) -> None:
        run(cuda.blockIdx.x, cuda.threadIdx.x, image, 0)

    def with_scalar(image: int, scalar: Any) -> None:
        run(cuda.blockIdx.x, cuda.threadIdx.x, image, scalar)

    entry = with_scalar if spec.scalars else without_scalar
    entry.__name__ = entry.__qualname__ = spec.entry
    return entry


def compile_ptx(spec: KernelSpec, archs: Sequence[str]) -> dict[str, str]:
    """Compile a kernel to PTX for several architectures; types are inferred once."""
    capabilities = {arch: _capability_of(arch) for arch in archs}
    try:
        return _compile_ptx(spec, capabilities)
    except Exception as error:
        raise RuntimeError(f"{spec.name} for {', '.join(archs)}: {type(error).__name__}: {error}") from error


def _compile_ptx(spec: KernelSpec, capabilities: dict[str, tuple[int, int]]) -> dict[str, str]:
    first = next(iter(capabilities.values()))
    with _lock, _pretended_device(first):
        library, _ = numba_compiler._compile_pyfunc_with_fixup(
            entry_point(spec),
            types.void(types.int64, *[types.float32] * len(spec.scalars)),
            device=False,
            cc=first,
            abi="numba",
            launch_bounds=(BLOCK, REGISTERS // (BLOCK * most_registers(spec))),
        )
        # A product and a sum stay two roundings, as on the processor.
        library._nvvm_options["fma"] = False
        return {arch: _nvvm_ptx(library, capability) for arch, capability in capabilities.items()}


def _nvvm_ptx(library: Any, capability: tuple[int, int]) -> str:
    (text,) = library.get_asm_strs(cc=capability)
    return str(text)


def compile_spec(spec: KernelSpec, arch: str) -> KernelCubin:
    """Compile a kernel for one architecture, such as ``"sm_90"``."""
    return assemble_cubin(spec, arch, compile_ptx(spec, [arch])[arch])


def assemble_cubin(spec: KernelSpec, arch: str, ptx: str) -> KernelCubin:
    """Link PTX to code, and read its resource usage."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    entry = re.search(r"\.entry\s+([^\s(]+)", ptx)
    if entry is None:
        raise RuntimeError(f"{spec.name} for {arch}: the compiler made no entry point")
    options = LinkerOptions(arch=arch, ptxas_options=["-v"])
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    code = linker.link("cubin").code
    facts = {
        name: _assembler_fact(pattern, linker.get_info_log(), spec, arch) for name, pattern in _FACTS.items()
    }
    return KernelCubin(
        name=spec.name,
        arch=arch,
        entry=entry[1],
        code=bytes(code),
        source=source_key(),
        toolchain=toolchain_versions(),
        **facts,
    )


_FACTS = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}


def _assembler_fact(pattern: str, assembler_log: str, spec: KernelSpec, arch: str) -> int:
    found = re.search(pattern, assembler_log)
    if found is None:
        said = f"the assembler did not say {pattern!r}, but {assembler_log!r}"
        raise RuntimeError(f"{spec.name} for {arch}: {said}")
    return int(found[1])


def _capability_of(arch: str) -> tuple[int, int]:
    """(9, 0) for sm_90, (10, 0) for sm_100."""
    found = re.fullmatch(r"sm_(\d+)(\d)", arch)
    if found is None:
        raise ValueError(f"an architecture is called sm_80, sm_90, sm_100 and so on, got {arch!r}")
    return int(found[1]), int(found[2])


@contextmanager
def _pretended_device(capability: tuple[int, int]) -> Iterator[None]:
    """Numba asks the current device for its capability where kernels call functions; there may be none."""
    ask = numba_dispatcher.get_current_device
    numba_dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        numba_dispatcher.get_current_device = ask
