"""Processors, memory and pages: of this machine, and of other machines from trees of files and numbers."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pace
import pytest
from observation.checks import finding

import kvstore as kv
from kvstore.observe.doctor import machine
from kvstore.observe.doctor.table import CHECKS

Tree = Callable[[Mapping[str, str]], Path]

MEMINFO = "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n"
QUOTA = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}


@pytest.fixture(autouse=True)
def no_threads_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVSTORE_NUM_THREADS", "MXNET_KVSTORE_REDUCTION_NTHREADS"):
        monkeypatch.delenv(name, raising=False)


def test_a_quota_below_the_cores_is_a_warning(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    found = finding(machine.processors, tree(QUOTA), cores=8, usable=8)
    assert found.level == "warning"
    assert "the time of 2.5" in found.text
    assert "KVSTORE_NUM_THREADS=2" in found.cure
    monkeypatch.setenv("KVSTORE_NUM_THREADS", "2")  # the cure
    assert finding(machine.processors, tree(QUOTA), cores=8, usable=8).level == "ok"


@pytest.mark.parametrize(("cores", "usable", "level"), [(8, 1, "warning"), (1, 1, "ok"), (8, 4, "ok")])
def test_one_core_of_several_is_a_warning(tree: Tree, cores: int, usable: int, level: str) -> None:
    found = finding(machine.processors, tree({}), cores, usable)
    assert found.level == level
    assert f"{usable} of {cores} cores" in found.text


def test_processors_are_those_of_this_process(tree: Tree) -> None:
    usable = len(os.sched_getaffinity(0))
    assert f"{usable} of {os.cpu_count()} cores" in finding(machine.processors, tree({})).text


def limited(version: int, limit: int, used: int) -> dict[str, str]:
    base = "sys/fs/cgroup/memory/memory" if version == 1 else "sys/fs/cgroup/memory"
    most, now = ("limit_in_bytes", "usage_in_bytes") if version == 1 else ("max", "current")
    group = "4:memory:/\n" if version == 1 else "0::/\n"
    files = {f"{base}.{most}": f"{limit}\n", f"{base}.{now}": f"{used}\n"}
    return {"proc/meminfo": MEMINFO, "proc/self/cgroup": group, **files}


@pytest.mark.parametrize("version", [1, 2])
def test_little_memory_in_a_cgroup_is_a_warning(tree: Tree, version: int) -> None:
    found = finding(machine.memory, tree(limited(version, 2 << 30, (2 << 30) - (512 << 20))))
    assert found.level == "warning"
    assert f"(version {version}) has 512 MB of 2 GB left" in found.text
    assert "--memory" in found.cure


@pytest.mark.parametrize(("version", "level"), [(1, "warning"), (2, "ok")])
def test_a_limit_of_version_1_is_a_warning_since_it_is_not_read(tree: Tree, version: int, level: str) -> None:
    assert finding(machine.memory, tree(limited(version, 4 << 30, 1 << 30))).level == level


def test_memory_of_the_machine(tree: Tree) -> None:
    found = finding(machine.memory, tree({"proc/meminfo": MEMINFO}))
    assert (found.level, found.text) == ("ok", "8 GB of 16 GB available")
    little = MEMINFO.replace("8388608", "8192")
    assert finding(machine.memory, tree({"proc/meminfo": little})).level == "warning"


def test_memory_of_this_machine() -> None:
    assert " available" in finding(machine.memory).text


def test_memfd_works_here_and_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    assert finding(machine.memfd).level == "ok"
    assert os.listdir("/proc/self/fd") == before


def test_no_memfd_is_an_error() -> None:
    def forbidden(name: str, flags: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    found = finding(machine.memfd, forbidden)
    assert found.level == "error"
    assert os.strerror(errno.ENOSYS) in found.text
    assert "memfd_create" in found.cure


def test_a_memfd_that_cannot_be_sealed_is_an_error(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    found = finding(machine.memfd, lambda name, flags: os.open(tmp_path / name, os.O_RDWR | os.O_CREAT))
    assert found.level == "error"
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize(
    ("total", "left", "level"),
    [
        (8 << 30, 8 << 30, "ok"),
        (8 << 30, 1 << 20, "warning"),  # full
        (64 << 20, 64 << 20, "warning"),  # a container's
        (0, 0, "warning"),
    ],
)
def test_room_in_the_shared_memory_folder(total: int, left: int, level: str) -> None:
    [row] = [one for one in CHECKS if one.function is machine.shared_memory_folder]
    found = row._replace(function=lambda: machine.shared_memory_room(total, left)).run()
    assert found.level == level
    assert ("--shm-size" in found.cure) is (level == "warning")


def test_no_shared_memory_folder_is_a_warning(tmp_path: Path) -> None:
    found = finding(machine.shared_memory_folder, str(tmp_path / "none"))
    assert found.level == "warning"
    assert os.strerror(errno.ENOENT) in found.text


FULL = """
from kvstore.observe.doctor import machine
found = machine.shared_memory_folder({folder!r})
print(found.level, found.text)
"""


def test_a_full_file_system_is_a_warning(tmp_path: Path) -> None:
    """In a namespace of its own, so that the mount is gone with the process."""
    unshare = shutil.which("unshare")
    namespace = [unshare or "", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces for this user")
    folder = str(tmp_path / "shm")
    os.mkdir(folder)
    python = f'{sys.executable} -c "$CODE"'
    script = f"mount -t tmpfs -o size=1m none {folder} && head -c 1048576 /dev/zero > {folder}/full; {python}"
    done = subprocess.run(
        [*namespace, "sh", "-c", script],
        env={**os.environ, "CODE": FULL.format(folder=folder)},
        capture_output=True,
        text=True,
        timeout=pace.seconds(60),
        check=True,
    )
    assert done.stdout.startswith("warning /dev/shm has 0 bytes of 1 MB left")


HUGE = "sys/kernel/mm/transparent_hugepage"


@pytest.mark.parametrize(
    ("setting", "level"),
    [
        ("[always] madvise never", "ok"),
        ("always [madvise] never", "ok"),
        ("always madvise [never]", "warning"),
    ],
)
def test_huge_pages(tree: Tree, setting: str, level: str) -> None:
    root = tree(
        {f"{HUGE}/enabled": setting, f"{HUGE}/shmem_enabled": "always within_size [advise] never deny"}
    )
    found = finding(machine.huge_pages, root)
    assert found.level == level
    assert "advise for shared memory" in found.text
    assert (f"{HUGE}/enabled" in found.cure) is (level == "warning")


def test_a_kernel_without_huge_pages_is_a_warning(tree: Tree) -> None:
    assert finding(machine.huge_pages, tree({})).level == "warning"


GUARD = (0x7FFC6B5669644721).to_bytes(8, "little")


def _regions_of_this_process() -> set[Path]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            if re.search(machine._REGION, os.readlink(link)):
                found.add(link)
    return found


@pytest.fixture
def region(tmp_path: Path) -> tuple[Path, Path]:
    """Copy the memory of a job of one worker; return a root that has it, and the copy."""
    before = _regions_of_this_process()
    with kv.create("shared") as store:
        store.init(["a", "b"], [np.ones(3, np.float32)] * 2)
        store.set_optimizer(kv.optimizer.create("adam"))
        store.push(["a", "b"], [np.ones(3, np.float32)] * 2)
        store.pull("a", out=np.empty(3, np.float32))
        [link] = _regions_of_this_process() - before
        copy = tmp_path / os.readlink(link).removeprefix("/").removesuffix(" (deleted)")
        shutil.copyfile(link, copy)
    (tmp_path / "root/proc/1/fd").mkdir(parents=True)
    (tmp_path / "root/proc/1/fd/3").symlink_to(copy)
    return tmp_path / "root", copy


def test_every_guard_of_a_region_that_is_overwritten_is_found(region: tuple[Path, Path]) -> None:
    root, copy = region
    assert finding(machine.shared_regions, root).text == "1 of running jobs: nothing is overwritten"
    whole = copy.read_bytes()
    places = [one.start() for one in re.finditer(re.escape(GUARD), whole)]
    assert len(places) == 2 + 2 * 2 + 1 + 2  # of header, entries, settings, and the states of two keys
    for place in places:
        with copy.open("r+b") as file:
            file.seek(place)
            file.write(b"\0")
        assert finding(machine.shared_regions, root).level == "error", place
        copy.write_bytes(whole)


def test_a_plan_without_an_address_would_be_found(region: tuple[Path, Path]) -> None:
    root, copy = region
    with copy.open("r+b") as file:
        file.write(bytes(4000))
    found = finding(machine.shared_regions, root)
    assert (found.level, "its header is overwritten" in found.text) == ("error", True)


def test_regions_of_other_versions_are_left_alone(region: tuple[Path, Path]) -> None:
    root, copy = region
    with copy.open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(8, "little"))
    assert finding(machine.shared_regions, root).level == "ok"
    copy.write_bytes(b"")
    assert finding(machine.shared_regions, root).level == "ok"
