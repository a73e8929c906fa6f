"""Messages with faults at a server's links, with the sanitizers of the compiler: see links.c.

`KVSTORE_FUZZ_SEED` takes up the seed that a failure prints.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pace
import paths
import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SERVERS = ROOT / "kvstore" / "stores" / "parameter_server"
OBSERVE = ROOT / "kvstore" / "observe" / "native"
FOLDERS = (SERVERS / "native", SERVERS / "transport" / "native", ROOT / "kernels", OBSERVE)


def build(folder: Path, *more: str) -> Path:
    program = folder / "links"
    checks = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    flags = ("-std=gnu11", "-D_GNU_SOURCE", "-w", *checks, *(f"-I{one}" for one in FOLDERS))
    command = [*paths.c_compiler(), *flags, str(HERE / "links.c"), *more, "-pthread", "-lm"]
    built = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, check=False)
    if built.returncode and "sanitize" in built.stderr + built.stdout:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    return program


def test_the_program_fits_the_product(tmp_path: Path) -> None:
    build(tmp_path, "-fsyntax-only")


@pytest.mark.nightly  # the kernels take the compiler half a minute
@pytest.mark.timeout(3600)
def test_a_million_faults_at_links(tmp_path: Path) -> None:
    program = build(tmp_path)
    seed = int(os.environ.get("KVSTORE_FUZZ_SEED", random.SystemRandom().getrandbits(32)))
    for first in range(seed, seed + 10):
        command = [str(program), str(first), "100000"]
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=pace.seconds(600), check=False
        )
        assert ended.returncode == 0, f"KVSTORE_FUZZ_SEED={first}\n{ended.stdout}{ended.stderr[-4000:]}"
        counts = json.loads(ended.stdout)
        assert counts["sent"] == 100_000
        assert counts.pop("rows_updated") > 5, counts  # all parts of a round must be without faults
        assert counts.pop("packed") > 30, counts
        assert min(counts.values()) > 50, counts
