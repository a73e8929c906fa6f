"""Horovod's core is built from its published sources, and passes the cases; minutes, and a package index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pace
import pytest
from engines import launchers

BUILDER = Path(__file__).parent / "build_horovod.py"


def test_the_builder_says_what_it_wants() -> None:
    for arguments in ([], ["shark", "folder"]):
        ended = subprocess.run(
            [sys.executable, BUILDER, *arguments], capture_output=True, text=True, timeout=pace.seconds(60)
        )
        assert ended.returncode == 1
        assert "build_horovod.py core FOLDER" in ended.stderr


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not (shutil.which("cmake") and shutil.which("c++")), reason="there is no cmake or compiler"
)
def test_the_core_is_built_and_works(tmp_path: Path) -> None:
    folder = Path(os.environ.get("KVSTORE_TEST_CACHE", tmp_path)) / "horovod-core"
    folder.mkdir(exist_ok=True)
    subprocess.run([sys.executable, BUILDER, "core", folder], check=True, timeout=pace.seconds(800))
    ended = launchers.run(launchers.horovod_core(str(folder)), 2, tmp_path, "conformance.py")
    assert [told["outcomes"] for told in ended.told.values()] == 2 * [
        dict.fromkeys(ended.told[0]["outcomes"], "")
    ]
