"""Targets for libFuzzer, with AddressSanitizer and UBSan: built by clang, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fuzz.guided.seeds import SEEDS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SERVERS = ROOT / "kvstore" / "stores" / "parameter_server"
FOLDERS = (
    HERE.parent,
    HERE,
    SERVERS / "native",
    SERVERS / "transport" / "native",
    ROOT / "kernels",
    ROOT / "kvstore" / "observe" / "native",
)
CHECKS = "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"
FLAGS = ("-std=gnu11", "-D_GNU_SOURCE", "-w", "-O1", "-g", *CHECKS, *(f"-I{one}" for one in FOLDERS))
#: Freed memory is kept for a while, to detect later uses; as little as that needs.
OPTIONS = {"ASAN_OPTIONS": "quarantine_size_mb=8", "UBSAN_OPTIONS": "print_stacktrace=1"}
MOST_BYTES = 4096  # of an input


@dataclass(frozen=True)
class Figures:
    """The result of a run."""

    cases: int
    a_second: int
    edges: int
    kept: int  # inputs that found something new


class FuzzError(Exception):
    """A target that cannot be built, or has found a fault."""


def clang() -> str | None:
    """Return the path of a clang that has libFuzzer; None: there is none."""
    found = shutil.which("clang")
    if not found:
        return None
    told = subprocess.run([found, "-print-resource-dir"], capture_output=True, text=True, check=False)
    return found if any(Path(told.stdout.strip()).glob("lib/**/libclang_rt.fuzzer*.a")) else None


def build(compiler: str, name: str, folder: Path, source: Path | None = None) -> Path:
    program = folder / name
    # Codecs are compared between all levels of the kernels; the other targets have one, which compiles
    # sooner.
    levels = () if name == "codecs" else ("-DKV_ONE_LEVEL",)
    command = [compiler, *FLAGS, *levels, str(source or HERE / f"{name}.c"), "-o", str(program)]
    command += ["-pthread", "-lm"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise FuzzError(f"{name} cannot be built:\n{built.stderr[-4000:]}")
    return program


def check(compiler: str, name: str) -> str:
    """Return the objections of a compiler to a target."""
    command = [compiler, *FLAGS, "-fsyntax-only", str(HERE / f"{name}.c")]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def write_seeds(name: str, folder: Path) -> Path:
    seeds = folder / f"{name}-seeds"
    seeds.mkdir(exist_ok=True)
    for number, content in enumerate(SEEDS[name]()):
        (seeds / f"{number:03}").write_bytes(content)
    return seeds


def run(program: Path, seconds: int = 0, cases: int = -1, corpus: Path | None = None) -> Figures:
    """Run a target for so many seconds or cases, beginning with its seeds and what a corpus has.

    Raises
    ------
    FuzzError
        It has found a fault: its report, and the input, which the program runs again if it is named to it.
    """
    kept = corpus or program.parent / f"{program.name}-kept"
    kept.mkdir(parents=True, exist_ok=True)
    artifact = program.parent / f"{program.name}-fault"
    command = [str(program), f"-max_total_time={seconds}", f"-runs={cases}", f"-max_len={MOST_BYTES}"]
    command += ["-print_final_stats=1", f"-exact_artifact_path={artifact}", "-timeout=60"]
    command += [str(kept), str(write_seeds(program.name, program.parent))]
    ended = subprocess.run(
        command, capture_output=True, text=True, errors="replace", env=os.environ | OPTIONS, check=False
    )
    if ended.returncode:
        content = artifact.read_bytes().hex() if artifact.exists() else "none"
        raise FuzzError(f"{program.name}: {ended.stderr[-6000:]}\nthe input: {content}")
    return _figures(ended.stderr, sum(1 for _ in kept.iterdir()))


def _figures(told: str, kept: int) -> Figures:
    done = re.search(r"#(\d+)\s+DONE\s+cov: (\d+)", told)
    rate = re.search(r"stat::average_exec_per_sec:\s*(\d+)", told)
    if not done or not rate:
        raise FuzzError(f"no figures in {told[-2000:]}")
    return Figures(int(done[1]), int(rate[1]), int(done[2]), kept)
