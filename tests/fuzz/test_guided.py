"""Targets for libFuzzer, guided by coverage, with the sanitizers of clang: see guided.

`python -m fuzz.guided`, in `tests`, runs them for as long as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz.guided import targets
from fuzz.guided.seeds import SEEDS

#: Edges that the seeds alone reach, about: fewer mean that seeds or targets do not fit the product any more.
EDGES = {"links": 600, "exchange": 450, "rows": 90, "streams": 100, "codecs": 150}


@pytest.fixture(scope="session")
def clang() -> str:
    found = targets.clang()
    if found is None:
        pytest.skip("there is no clang with libFuzzer")
    return found


def test_every_target_has_seeds() -> None:
    written = {path.stem for path in targets.HERE.glob("*.c")}
    assert written == set(SEEDS) == set(EDGES)
    assert all(any(make()) for make in SEEDS.values())


@pytest.mark.parametrize("name", SEEDS)
def test_every_target_can_be_built(clang: str, name: str) -> None:
    assert targets.check(clang, name) == ""


@pytest.mark.parametrize("name", ["rows", "streams"])  # which are built in a second
def test_the_seeds_and_some_thousand_cases(clang: str, tmp_path: Path, name: str) -> None:
    found = targets.run(targets.build(clang, name, tmp_path), cases=10_000)
    assert found.edges > EDGES[name]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SEEDS)
def test_a_minute_of_cases(clang: str, tmp_path: Path, name: str) -> None:
    found = targets.run(targets.build(clang, name, tmp_path), seconds=60)
    assert found.edges > EDGES[name]
    assert found.kept > 20


def test_a_fault_is_found(clang: str, tmp_path: Path) -> None:
    """By a target that reads one byte too many where its input begins with three letters."""
    faulty = tmp_path / "streams.c"
    faulty.write_text(
        "#include <stddef.h>\n#include <stdint.h>\n"
        "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)\n"
        "{\n    const volatile uint8_t *at = data;\n"
        "    return n > 2 && at[0] == 'K' && at[1] == 'V' && at[2] == 'S' ? at[n] * 0 : 0;\n}\n"
    )
    program = targets.build(clang, "streams", tmp_path, source=faulty)
    with pytest.raises(targets.FuzzError, match="heap-buffer-overflow") as found:
        targets.run(program, cases=1_000_000)
    assert f"the input: {b'KVS'.hex()}" in str(found.value)
