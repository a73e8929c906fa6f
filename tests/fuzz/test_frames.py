"""Frames with faults: for any input the result is a message or a ProtocolError, soon and in little memory.

`KVSTORE_FUZZ_SEED` takes up the seed that a failure prints.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
import tracemalloc
from collections.abc import Iterator

import pytest
import wire_examples
from fuzz.mutations import changed

from kvstore.errors import ProtocolError
from kvstore.stores.parameter_server.protocol.messages import Batch
from kvstore.stores.parameter_server.transport.frames import MessageCodec, MessageLimits

LIMITS = MessageLimits(frame=1 << 16, control=1 << 14, records=256)
JOB = MessageCodec("a job", LIMITS)

_MOST_SECONDS = 0.010
_MOST_BYTES = 2 * LIMITS.frame  # twice what one frame may have


def seeds() -> list[list[bytes]]:
    """Good messages to begin with."""
    messages = [*wire_examples.control(), *wire_examples.batches()]
    return [[bytes(frame) for frame in JOB.encode(message)] for message in messages]


def messages(count: int, chance: random.Random) -> Iterator[list[bytes]]:
    good = seeds()
    for _ in range(count):
        if chance.random() < 0.02:
            yield [chance.randbytes(chance.randrange(300)) for _ in range(chance.randrange(4))]
        else:
            yield changed(chance.choice(good), chance)


def check(count: int) -> None:
    seed = int(os.environ.get("KVSTORE_FUZZ_SEED", random.SystemRandom().getrandbits(32)))
    told = f"KVSTORE_FUZZ_SEED={seed}"
    read = refused = 0
    slow = []
    for frames in messages(count, random.Random(seed)):
        before = time.thread_time()
        try:
            message = JOB.decode(frames)
        except ProtocolError as error:
            refused += 1
            assert len(str(error)) < 1000, told
        except BaseException as error:
            raise AssertionError(f"{told}: {error!r} from {[frame[:200] for frame in frames]}") from error
        else:
            read += 1
            check_within(message, frames, told)
        if time.thread_time() - before > _MOST_SECONDS:
            slow.append(frames)
    assert read > count // 100, f"{told}: hardly anything was read, so the faults are too large to be of use"
    assert refused > count // 4, f"{told}: hardly anything was refused"
    assert all(quick(frames) for frames in slow), told


def check_within(message: object, frames: list[bytes], told: str) -> None:
    """An accepted message must be within its limits: it is not checked again."""
    if isinstance(message, Batch):
        assert len(message.records) <= LIMITS.records, told
        sizes = [len(frame) for frame in message.frames]
        for record in message.records:
            if record.place == 1:
                assert record.offset + record.nbytes <= sum(sizes[record.frame : record.frame + 2]), told
    else:
        assert len(frames) == 1, told
        assert len(frames[0]) <= LIMITS.control + 100, told


def quick(frames: list[bytes]) -> bool:
    """Whether it is quick on a second try: a slow one may have been a garbage collection's."""
    for _ in range(3):
        before = time.thread_time()
        with contextlib.suppress(ProtocolError):
            JOB.decode(frames)
        if time.thread_time() - before <= _MOST_SECONDS:
            return True
    return False


def check_memory(count: int) -> None:
    seed = int(os.environ.get("KVSTORE_FUZZ_SEED", random.SystemRandom().getrandbits(32)))
    tracemalloc.start(1)
    try:
        for frames in messages(count, random.Random(seed)):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with contextlib.suppress(ProtocolError):
                JOB.decode(frames)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before <= _MOST_BYTES, f"KVSTORE_FUZZ_SEED={seed}: {peak - before} bytes"
    finally:
        tracemalloc.stop()


def test_faults_become_protocol_errors() -> None:
    check(50_000)


def test_faults_cost_little_memory() -> None:
    check_memory(5_000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_million_faults() -> None:
    check(1_000_000)
    check_memory(100_000)
