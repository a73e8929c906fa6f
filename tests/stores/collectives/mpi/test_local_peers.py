"""The processes of this machine that have ended, as soon as the kernel knows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest

from kvstore.stores.collectives.mpi import local_peers
from kvstore.stores.collectives.mpi.local_peers import LocalPeers, ProcessIdentity, process_identity

SLEEPS = "import sys, time; sys.stdout.write('here\\n'); sys.stdout.flush(); time.sleep(600)"
#: proc(5)'s stat of a process with a name that is hard to read.
STAT = "7 (a) b (c) {state} 1 7 7 0 -1 {flags} 10 0 0 0 1 1 0 0 20 0 1 0 4711 1000 100\n"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE)
    assert made.stdout is not None
    assert made.stdout.readline() == b"here\n"
    yield made
    made.kill()
    made.wait(pace.seconds(20))
    made.stdout.close()


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_the_living_are_there_also_if_they_stand_still(child: subprocess.Popen[bytes]) -> None:
    peers = LocalPeers([ProcessIdentity(3, child.pid, started(child.pid)), process_identity(5)])
    assert peers.lost_rank() is None
    child.send_signal(signal.SIGSTOP)
    assert peers.lost_rank() is None
    peers.close()


def test_a_killed_process_is_lost_before_and_after_it_is_waited_for(child: subprocess.Popen[bytes]) -> None:
    peers = LocalPeers([process_identity(5), ProcessIdentity(3, child.pid, started(child.pid))])
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert peers.lost_rank() == 3
    child.wait()
    assert peers.lost_rank() == 3
    peers.close()


def test_a_process_of_another_namespace_is_not_watched(child: subprocess.Popen[bytes]) -> None:
    """Its number is that of no process here, or of another process."""
    before = len(os.listdir("/proc/self/fd"))
    peers = LocalPeers(
        [ProcessIdentity(3, child.pid, started(child.pid) + 1), ProcessIdentity(4, 2**22 + 1, 1)]
    )
    assert len(os.listdir("/proc/self/fd")) == before
    child.kill()
    child.wait()
    assert peers.lost_rank() is None


@pytest.mark.parametrize(
    ("state", "flags", "ended"),
    [("R", 0x400000, False), ("S", 0, False), ("R", 0x400004, True), ("D", 0x4, True), ("Z", 0, True)],
)
def test_a_process_about_to_end_is_known_by_a_flag(
    tmp_path: Path, state: str, flags: int, ended: bool
) -> None:
    path = tmp_path / "stat"
    path.write_text(STAT.format(state=state, flags=flags))
    with path.open() as file:
        assert local_peers._has_ended(file.fileno()) == ended
