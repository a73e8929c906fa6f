"""Calls into the C library, in processes that have the interposer of buggify."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buggify import interposed
from buggify.interposed import Kinds

#: Those that Python passes.
POINTS = (
    "delay_send",
    "delay_recv",
    "delay_wait",
    "delay_clock",
    "delay_file",
    "short_send",
    "short_recv",
    "short_file",
    "intr_send",
    "intr_recv",
    "intr_wait",
    "intr_sleep",
    "again_send",
    "again_recv",
    "space_mmap",
    "space_memfd",
    "space_allocate",
    "disk_write",
    "disk_sync",
    "disk_rename",
    "disk_open",
)


def sends(seed: int, times: int) -> dict[str, Any]:
    """Send 100 bytes so often; return how often it was less."""
    ours, theirs = socket.socketpair()
    sent, read = [], 0
    interposed.begin(seed, "me", Kinds.SHORT)
    for _ in range(times):
        sent.append(ours.send(b"x" * 100))
        while read < sum(sent):
            read += len(theirs.recv(100))
    interposed.end()
    fired = interposed.fired("short_send")
    return {"fired": fired, "short": sum(one < 100 for one in sent), "whole": read == sum(sent)}


def all_points(folder: str) -> dict[str, Any]:
    """Pass all points that Python can reach, with many seeds."""
    found: dict[str, int] = dict.fromkeys(POINTS, 0)
    for seed in range(10):
        interposed.begin(seed, "me", ~Kinds.SPACE & ~Kinds.DISK)
        for _ in range(20):
            _calls(Path(folder))
        interposed.end()
        for point in POINTS:
            found[point] += interposed.fired(point)
    errors = _errors(Path(folder), found)
    return {"fired": [point for point in sorted(found) if found[point]], "errors": errors}


def _calls(folder: Path) -> None:
    for blocking in (True, False):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(blocking)
            theirs.setblocking(blocking)
            with contextlib.suppress(BlockingIOError):
                ours.send(b"x" * 100)
                select.select([theirs], [], [], 1)
                theirs.recv(100)
            poller = select.poll()
            poller.register(ours, select.POLLOUT)
            poller.poll(1000)
    time.sleep(1e-6)
    time.monotonic()
    _write(folder)


def _write(folder: Path) -> None:
    """Write a file as a program does that must not lose it."""
    file = os.open(folder / "file", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    try:
        left = b"y" * 100
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)
    os.rename(folder / "file", folder / "other")
    assert (folder / "other").read_bytes() == b"y" * 100


def _errors(folder: Path, found: dict[str, int]) -> int:
    """Let memory and disks fail; return how often they did with the seed that failed most."""
    most = 0
    for seed in range(40):
        interposed.begin(seed, "me", Kinds.SPACE | Kinds.DISK, 3)
        failed = sum(_fails(call, folder) for _ in range(60) for call in (_write, _allocate))
        interposed.end()
        most = max(most, failed)
        for point in POINTS:
            found[point] += interposed.fired(point)
    return most


def _fails(call: Callable[[Path], None], folder: Path) -> bool:
    try:
        call(folder)
    except OSError:
        return True
    return False


def _allocate(folder: Path) -> None:
    file = os.memfd_create("interposed")
    try:
        os.ftruncate(file, 1 << 16)
        os.posix_fallocate(file, 0, 1 << 16)
        mmap.mmap(file, 1 << 16).close()
    finally:
        os.close(file)
