"""Processes of one job with different versions of kvstore: one line in the log, from real processes."""

from __future__ import annotations

import pace
import pytest
from launched import Job

TEXT = """
import os
import numpy as np
import kvstore as kv
if os.environ["KVSTORE_RANK"] == "1":
    kv.__version__ = "9.9"
store = kv.create("{store}")
store.init("w", np.zeros(3, np.float32))
"""


@pytest.mark.parametrize(
    ("store", "options", "words"),
    [
        ("shared", [], b"[1] worker 1 has kvstore 9.9, and the process that made the region "),
        ("dist_sync", ["-s", "1"], b"[scheduler] worker 1 has kvstore 9.9, and the scheduler "),
    ],
)
def test_another_version_is_one_line(job: Job, store: str, options: list[str], words: bytes) -> None:
    (job.folder / "train.py").write_text(TEXT.format(store=store))
    process = job.run("-n", "2", *options, "train.py")
    _, err = process.communicate(timeout=pace.seconds(100))
    (line,) = err.splitlines()
    assert process.returncode == 0
    assert line.startswith(words)
