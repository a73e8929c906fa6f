"""Bodies of processes that share memory: one fills it, the others read."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from jobs import hear, tell

from kvstore.stores.parameter_server.transport.shared_buffers import (
    PeerBuffers,
    SharedBufferPool,
    SharedValues,
)

MIB = 1024 * 1024


def fills(sizes: list[int]) -> None:
    """Fill blocks, announce their places, and stay."""
    outbox = SharedBufferPool()
    blocks = [outbox.allocate(size) for size in sizes]
    places = []
    for number, block in enumerate(blocks):
        assert block is not None
        block.array[:] = number + 1
        places.append([block.segment, block.offset, block.array.nbytes])
    tell(outbox.handle())
    tell(json.dumps(places))
    hear()


def grows_on() -> None:
    """Take a block of 3 MiB for each line that is heard, and say where it is."""
    outbox = SharedBufferPool()
    tell(outbox.handle())
    for number in range(1, 100):
        if hear() == "end":
            return
        block = outbox.allocate(3 * MIB)
        assert block is not None
        block.array[:] = number
        tell(f"{number} {block.segment} {block.offset}")


def reads(handle: str, places: list[list[int]]) -> list[int]:
    """Read the first byte of blocks, after the test has spoken."""
    inbox = PeerBuffers.open(handle)
    assert inbox is not None
    views = [inbox.view_block(*place) for place in places]
    tell("reading")
    hear()
    return [int(view[0]) if (view == view[0]).all() else -1 for view in views]


def truncates() -> list[str]:
    """Try all operations that could remove memory while a reader maps it."""
    outbox = SharedBufferPool()
    block = outbox.allocate(MIB)
    assert block is not None
    block.array[:] = 7
    tell(outbox.handle())
    fd = json.loads(outbox.handle())["fd"]
    attempts = {
        "truncate": lambda: os.ftruncate(fd, 4096),
        "open and truncate": lambda: os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC)),
        "unseal": lambda: fcntl.fcntl(fd, 1033, 4),
    }
    refused = [name for name, attempt in attempts.items() if fails(attempt)]
    tell("tried")
    hear()
    return refused


def writes_on(nbytes: int, rounds: int) -> int:
    """Overwrite a value again and again, with as much haste as can be; every byte of it is the same."""
    values = SharedValues()
    block = values.allocate(nbytes)
    assert block is not None
    place = block.segment, block.offset
    block.array[:] = 0
    tell(values.handle())
    tell(json.dumps([*place, nbytes]))
    for number in range(rounds):
        with values.mark_writing([place]):
            block.array[:] = number % 251
        time.sleep(0 if number % 3 else 0.0002)
    tell("done")
    hear()
    return values.read_seqlock(*place)


def copies_on(handle: str, place: list[int], seconds: float, most: float) -> dict[str, int]:
    """Copy a value while it is overwritten; every copy that counts must be of one piece.

    For so many seconds, and on to `most` of them until some copies were and some were not.
    """
    inbox = PeerBuffers.open(handle)
    assert inbox is not None
    out = np.empty(place[2], np.uint8)
    good = torn = 0
    start = time.monotonic()
    tell("copying")
    while time.monotonic() < start + (seconds if good and torn else most):
        seqlock = seqlock_of(inbox, place)
        if inbox.copy_block(*place, seqlock, out):
            assert (out == out[0]).all()
            good += 1
        else:
            torn += 1
    return {"good": good, "torn": torn}


def seqlock_of(inbox: PeerBuffers, place: list[int]) -> int:
    """The seqlock as a reply would contain it."""
    segment = inbox.view_block(place[0], 0, 8 * (place[1] // 4096 + 1))
    return int(segment.view(np.uint64)[place[1] // 4096])


def fails(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


LIMITS = {
    "file": resource.RLIMIT_FSIZE,
    "addresses": resource.RLIMIT_AS,
    "descriptors": resource.RLIMIT_NOFILE,
}


def runs_out(limit: str, most: int) -> dict[str, Any]:
    """Take memory under a limit until there is none: an answer, and never a signal or an exception."""
    outbox = SharedBufferPool()
    assert outbox.allocate(100) is not None
    if limit == "descriptors":
        most = len(os.listdir("/proc/self/fd")) + 1
    elif limit == "addresses":
        most += int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(LIMITS[limit], (most, resource.getrlimit(LIMITS[limit])[1]))
    taken = []
    while (block := outbox.allocate(8 * MIB)) is not None:
        block.array[:] = len(taken) + 1
        taken.append(block)
        assert len(taken) < 1000
    small = outbox.allocate(1000)
    for number, block in enumerate(taken):
        assert {int(block.array.min()), int(block.array.max())} == {number + 1}
        outbox.free(block)
    again = outbox.allocate(8 * MIB) if taken else None
    return {"blocks": len(taken), "small": small is not None, "again": bool(taken) == (again is not None)}
