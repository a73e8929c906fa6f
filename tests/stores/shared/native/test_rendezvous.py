"""How the processes of a job find their region."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore as kv
from kvstore.stores.shared.native.rendezvous import RegionRendezvous


@pytest.fixture
def rendezvous() -> Iterator[Any]:
    made: list[RegionRendezvous] = []

    def make(job: str = "j", group: str = "g", number: int = 0, rank: int = 0) -> RegionRendezvous:
        made.append(RegionRendezvous(f"{job} {os.getpid()}", group, number, rank, 3))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_region_is_found_by_way_of_any_worker(rendezvous: Any) -> None:
    founder, second, third = (rendezvous(rank=rank) for rank in range(3))
    region = founder.create()
    assert second.find_region(range(3)) is None  # no worker listens yet
    founder.listen()
    found = second.find_region(range(3))
    assert os.fstat(found).st_ino == os.fstat(region).st_ino
    second.listen()
    founder.close()
    again = third.wait(1)
    assert os.fstat(again).st_ino == os.fstat(region).st_ino
    second.close()
    assert third.find_region(range(3)) is None
    for descriptor in (region, found, again):
        os.close(descriptor)


@pytest.mark.parametrize("other", [{"job": "k"}, {"group": "h"}, {"number": 1}])
def test_other_stores_are_not_found(rendezvous: Any, other: dict[str, Any]) -> None:
    founder = rendezvous()
    region = founder.create()
    founder.listen()
    assert rendezvous(rank=1, **other).find_region(range(3)) is None
    os.close(region)


def test_a_rank_is_taken_once(rendezvous: Any) -> None:
    one, two = rendezvous(rank=1), rendezvous(rank=1)
    one.listen()
    assert not two.listen()
    one.close()
    assert two.listen()


def test_a_rank_is_taken_once_a_child_lets_go(rendezvous: Any) -> None:
    """The child that a killed process has just made holds its name until it runs."""
    one, two = rendezvous(rank=1), rendezvous(rank=1)
    one.listen()
    asks, goes = os.pipe()
    if (child := os.fork()) == 0:
        os.close(goes)
        os.read(asks, 1)
        os._exit(0)
    os.close(asks)
    one.close()
    let_go = threading.Timer(0.3, os.close, [goes])
    let_go.start()
    assert two.listen()
    let_go.join()
    assert os.waitpid(child, 0) == (child, 0)


def test_a_wait_for_a_founder_that_never_comes_ends(rendezvous: Any) -> None:
    with pytest.raises(kv.errors.TimeoutError, match="worker 0"):
        rendezvous(rank=2).wait(0.05)


def test_no_process_can_shrink_the_memory(rendezvous: Any) -> None:
    region = rendezvous().create()
    os.ftruncate(region, 8192)
    with pytest.raises(PermissionError):
        os.ftruncate(region, 4096)
    with pytest.raises(PermissionError):
        fcntl.fcntl(region, 1033, 4)  # F_ADD_SEALS: no seal can be added that would stop growth
    os.close(region)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_memory(rendezvous: Any) -> None:
    """By no name in /proc: not the descriptor, not the list of descriptors, not the process's memory."""
    one = rendezvous()
    region, owner = one.create(), os.getpid()
    one.listen()
    assert os.readlink(f"/proc/{owner}/fd/{region}").startswith(f"/memfd:kvstore-{one.name}")
    child = os.fork()
    if child == 0:
        reached = 0
        os.setuid(65534)
        for name in (f"fd/{region}", "mem", "environ", "fd"):
            with contextlib.suppress(PermissionError):
                os.listdir(f"/proc/{owner}/fd") if name == "fd" else os.open(
                    f"/proc/{owner}/{name}", os.O_RDONLY
                )
                reached += 1
        os._exit(reached)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(region)


def test_names_lie_in_no_file_system_and_tell_nothing(rendezvous: Any) -> None:
    one = rendezvous(job="a secret job")
    one.listen()
    lines = [line for line in Path("/proc/net/unix").read_text().splitlines() if one.name in line]
    assert len(lines) == 1
    assert f"@kvstore/{one.name}/0" in lines[0]
    assert "secret" not in one.name
    one.close()
    assert one.name not in Path("/proc/net/unix").read_text()


def test_any_text_names_a_group() -> None:
    names = {
        RegionRendezvous("job", group, 0, 0, 1).name for group in ("\ud800", "\\ud800", "\udc80", "a\0b", "")
    }
    assert len(names) == 5
