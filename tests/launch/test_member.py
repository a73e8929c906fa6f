"""One process of a launcher."""

from __future__ import annotations

import os

from kvstore.launch.child_process import Member, ProcessRole


class Deaf:
    """Takes what a process says, and forgets it."""

    def write(self, data: bytes) -> None:
        pass


def test_a_process_is_there_until_it_was_seen_to_have_ended() -> None:
    """It may end between two looks: then its exit code must not be lost with it."""
    member = Member(ProcessRole("worker", 0), ["sh", "-c", "exit 5"], os.environ, (Deaf(), Deaf()))
    os.waitid(os.P_PID, member.group, os.WEXITED | os.WNOWAIT)
    assert not member.gone()
    assert member.code is None
    assert member.ended()
    assert member.gone()
    assert member.code == 5
    for lines in (member.out, member.err):
        lines.stream.close()
