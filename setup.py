"""Extension modules, and the README for a package index; everything else is in pyproject.toml."""

import os
import re
import shutil
import sys
import sysconfig
import time

import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# The same bits on every processor: no fused multiply-add, no reordering; what is relaxed changes no result.
# -g1 has the lines of a backtrace; all of -g would be a third of the time of a build.
FLAGS = [
    "-g1",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-pthread",
]
NATIVE = "kvstore/stores/shared/native"  # the C code of the shared store
SERVERS = "kvstore/stores/parameter_server/native"  # and of the parameter server
STREAMS = "kvstore/stores/parameter_server/transport/native"  # and of its connections
OBSERVE = "kvstore/observe/native"  # and what they count and record
QUIET = ["-Wno-unused-function", "-Wno-unreachable-code"]
# KVSTORE_CHECKED=1 makes a build that looks at the guards of the shared region with each round (guards.h).
CHECKED = [("KV_CHECKED", None)] if os.environ.get("KVSTORE_CHECKED") else []

ESTIMATE = """kvstore: compiling {modules} extension modules, {side} side by side. \
This takes about a minute of processor time, and more on a slow or busy machine."""

ELSEWHERE = """kvstore runs on Linux only, and this is {platform}: its stores use memfd, futex and pidfd.
On Windows use it inside WSL 2, on macOS in a container or a virtual machine with Linux."""

MISSING = """kvstore's kernels are C, and {what}. Install what is missing, then try again:

    Debian, Ubuntu:  apt install build-essential python3-dev
    Fedora:          dnf install gcc python3-devel
    conda:           conda install -c conda-forge c-compiler

Wheels need no compiler: pip install --only-binary kvstore-train kvstore-train"""


LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")  # relative: dead on a package index
# The runner that builds a release sets these variables; the third is the tag.
REPOSITORY = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME")


def readme():
    """Return the README with links to the repository, or with its paths as text if it is not known."""
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    server, repository, tag = map(os.environ.get, REPOSITORY)
    if not (server and repository and tag):
        return LINK.sub(r"\1 (`\2`)", text)
    return LINK.sub(rf"[\1]({server}/{repository}/blob/{tag}/\2)", text)


def parts(folder):
    """List the sources that are included by others."""
    return [f"{folder}/{name}" for name in sorted(os.listdir(folder)) if name.endswith((".h", ".pxi"))]


def native(name, source, *folders, optimize="-O2", macros=()):
    """Describe an extension module that includes what is in `folders`; -O3 is for loops over arrays."""
    return Extension(
        name,
        [source],
        include_dirs=[*folders, numpy.get_include()],
        depends=[path for folder in folders for path in parts(folder)],
        define_macros=[("NPY_NO_DEPRECATED_API", "NPY_1_7_API_VERSION"), *macros],
        extra_compile_args=[optimize, *FLAGS, *QUIET],
        extra_link_args=["-pthread"],
    )


class Build(build_ext):
    """Looks for the compiler first: a compiler's own errors do not say what to install."""

    def build_extensions(self):
        self.require_compiler()
        begin = time.monotonic()
        print(ESTIMATE.format(modules=len(self.extensions), side=self.parallel or 1), flush=True)
        # Here and not for each command: metadata and sdist need no C.
        for extension, made in zip(
            self.extensions, cythonize(self.extensions, include_path=["kernels"]), strict=True
        ):
            extension.sources = made.sources
        super().build_extensions()
        print(f"kvstore: compiled in {time.monotonic() - begin:.0f} s", flush=True)

    def require_compiler(self):
        compiler = self.compiler.compiler_so[0]
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if shutil.which(compiler) is None:
            raise SystemExit(MISSING.format(what=f"there is no C compiler here ({compiler!r} is not found)"))
        if not os.path.exists(header):
            raise SystemExit(MISSING.format(what=f"the headers of Python are not here ({header} is missing)"))


if sys.platform != "linux":
    raise SystemExit(ELSEWHERE.format(platform=sys.platform))

setup(
    long_description=readme(),
    long_description_content_type="text/markdown",
    cmdclass={"build_ext": Build},
    ext_modules=[
        native("kvstore.kernels._cpu", "kernels/_cpu.pyx", "kernels", optimize="-O3"),
        native(
            "kvstore.stores.shared.native._shared",
            f"{NATIVE}/_shared.pyx",
            NATIVE,
            OBSERVE,
            "kernels",
            macros=[("_GNU_SOURCE", None), *CHECKED],
        ),
        native(
            "kvstore.observe.native._observe",
            f"{OBSERVE}/_observe.pyx",
            OBSERVE,
            macros=[("_GNU_SOURCE", None)],
        ),
        native(
            "kvstore.stores.parameter_server.native._native",
            f"{SERVERS}/_native.pyx",
            SERVERS,
            OBSERVE,
            "kernels",
            macros=[("_GNU_SOURCE", None)],
        ),
        native(
            "kvstore.stores.parameter_server.transport.native._streams",
            f"{STREAMS}/_streams.pyx",
            STREAMS,
            SERVERS,
            OBSERVE,
            "kernels",
            macros=[("_GNU_SOURCE", None)],
        ),
    ],
    options={
        "build_ext": {"parallel": len(os.sched_getaffinity(0))}
    },  # side by side, as far as there are cores
)
