"""The helper threads of the kernels under ThreadSanitizer: see helpers.c."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pace
import paths
import pytest
from nightly import nightly_unless

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"

# One line of helper_threads.h, and what to put in its place; each is a race, and must be noticed.
MUTANTS = {
    "the caller leaves before its helpers": (
        "    for (int spin = 0; atomic_load(&kv_pool.gate) & KV_GATE_INSIDE; spin++)",
        "    for (int spin = 0; 0; spin++)",
    ),
    "two callers have one job": ("pthread_mutex_trylock(&kv_pool.owner) != 0", "0"),
}


def helpers(folder: Path, headers: Path, calls: int) -> subprocess.CompletedProcess[str]:
    program = folder / "helpers"
    flags = ("-std=gnu11", "-D_GNU_SOURCE", "-DKV_ONE_LEVEL", "-O1", "-g", "-w", "-fsanitize=thread")
    command = [
        *paths.c_compiler(),
        *flags,
        f"-I{headers}",
        str(HERE / "helpers.c"),
        "-o",
        str(program),
        "-pthread",
        "-lm",
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode and "sanitize" in built.stderr + built.stdout:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert built.returncode == 0, built.stderr
    options = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0 exitcode=66 halt_on_error=1"}
    options.pop("LD_PRELOAD", None)  # another sanitizer, of which there can be one in a process
    ended = subprocess.run(
        [str(program), str(calls)],
        env=options,
        capture_output=True,
        text=True,
        timeout=pace.seconds(300),
        check=False,
    )
    if "unexpected memory mapping" in ended.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return ended


@pytest.mark.parametrize("rounds", nightly_unless(lambda rounds: rounds == 20, [20, 100]))
def test_helpers_have_no_races(tmp_path: Path, rounds: int) -> None:
    ended = helpers(tmp_path, KERNELS, rounds)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_a_race_is_noticed(tmp_path: Path, name: str) -> None:
    headers = tmp_path / "kernels"
    shutil.copytree(KERNELS, headers, ignore=shutil.ignore_patterns("_cpu*", "cuda", "__pycache__"))
    text, instead = MUTANTS[name]
    pool = headers / "helper_threads.h"
    assert pool.read_text().count(text) == 1, f"helper_threads.h reads otherwise by now: {text!r}"
    pool.write_text(pool.read_text().replace(text, instead))
    ended = helpers(tmp_path, headers, 1000)
    assert ended.returncode, "nothing was noticed"
