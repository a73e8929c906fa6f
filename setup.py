"""Extension modules only; everything else about the package is in pyproject.toml."""

import os
import sys

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

# The same bits on every processor: no fused multiply-add, no reordering; what is relaxed changes no result.
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-pthread",
]
NATIVE = "kvstore/stores/shared/native"  # what the shared store has in C
QUIET = ["-Wno-unused-function", "-Wno-unreachable-code"]


def parts(folder):
    """List the sources that are included by others."""
    return [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if name.endswith((".h", ".pxi"))]


if sys.platform == "win32":
    raise SystemExit("kvstore needs a POSIX system (Linux, macOS); on Windows use it inside WSL 2")

cpu = Extension(
    "kvstore.kernels._cpu",
    ["kernels/_cpu.pyx"],
    include_dirs=["kernels", numpy.get_include()],
    depends=parts("kernels"),
    define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION")],
    extra_compile_args=FLAGS + QUIET,
    extra_link_args=["-pthread"],
)

extensions = [cpu]
if sys.platform == "linux":  # futexes, memfd and pidfd are its own
    extensions.append(
        Extension(
            "kvstore.stores.shared.native._shared",
            [f"{NATIVE}/_shared.pyx"],
            include_dirs=[NATIVE, "kernels", numpy.get_include()],
            depends=parts(NATIVE) + parts("kernels"),
            define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"), ("_GNU_SOURCE", None)],
            extra_compile_args=FLAGS + QUIET,
            extra_link_args=["-pthread"],
        )
    )

cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
setup(
    ext_modules=cythonize(extensions, include_path=["kernels"]),
    options={"build_ext": {"parallel": cores}},  # side by side, as far as there are cores
)
