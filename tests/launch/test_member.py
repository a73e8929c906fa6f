"""One process of a launcher."""

from __future__ import annotations

import os

from kvstore.launch.child_process import ChildProcess, ProcessRole


def ignore(data: bytes) -> None:
    """Take a line, and forget it."""


def test_a_process_is_there_until_it_was_seen_to_have_ended() -> None:
    """It may end between two looks: then its exit code must not be lost with it."""
    child = ChildProcess(ProcessRole("worker", 0), ["sh", "-c", "exit 5"], os.environ, (ignore, ignore))
    os.waitid(os.P_PID, child.group, os.WEXITED | os.WNOWAIT)
    assert not child.is_gone()
    assert child.code is None
    assert child.has_ended()
    assert child.is_gone()
    assert child.code == 5
    for lines in (child.out, child.err):
        lines.stream.close()
