"""Channels between processes: what remains after a death or a fork, and a process of an older job."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import pace
import pytest

from kvstore.errors import ProtocolError
from kvstore.stores.parameter_server.protocol.messages import (
    PROTOCOL,
    HelloRequest,
    RefusalNotice,
    ReliableMessage,
)
from kvstore.stores.parameter_server.transport.channel import NotSentError, RouterChannel
from kvstore.stores.parameter_server.transport.context import ZmqContext
from kvstore.stores.parameter_server.transport.frames import MessageCodec

Contexts = Callable[..., ZmqContext]
Start = Callable[..., subprocess.Popen[str]]
PATIENCE = 20.0


def gone(router: RouterChannel, identity: bytes) -> bool:
    try:
        router.send(identity, [b"x"])
    except NotSentError:
        return True
    return False


def test_a_killed_peer_is_not_there_any_more(context: Contexts, start: Start, address: str) -> None:
    router = RouterChannel(context(), address)
    process = start("dealer", router.address, "worker 0")
    found = router.receive(PATIENCE)
    assert found is not None
    assert len(found[1][1]) == 1 << 20
    process.kill()
    process.wait(PATIENCE)
    end = pace.deadline(PATIENCE)
    while not gone(router, b"worker 0"):
        assert time.monotonic() < end
        time.sleep(0.01)
    start("dealer", router.address, "worker 0")  # the next process may even have its name
    found = router.receive(PATIENCE)
    assert found is not None
    assert found[0] == b"worker 0"
    assert not gone(router, b"worker 0")


@pytest.mark.parametrize(("job", "newer"), [("yesterday's job", ""), ("a job", "newer")])
def test_a_process_of_another_job_or_version_is_told(
    context: Contexts, start: Start, address: str, job: str, newer: str
) -> None:
    router, codec = RouterChannel(context(), address), MessageCodec("a job")
    process = start("speaker", router.address, job, newer)
    found = router.receive(PATIENCE)
    assert found is not None
    with pytest.raises(ProtocolError, match="version" if newer else "another job"):
        codec.decode(found[1])
    found = router.receive(PATIENCE)
    assert found is not None
    letter = codec.decode(found[1])
    assert isinstance(letter, ReliableMessage)
    assert isinstance(letter.body, HelloRequest)
    assert (letter.body.job, letter.body.protocol) == (job, PROTOCOL + bool(newer))
    router.send(found[0], codec.encode(ReliableMessage(1, 1, RefusalNotice("ConfigError", "not you"))))
    out, errors = process.communicate(timeout=pace.seconds(PATIENCE))
    assert "text='not you'" in out, errors


def test_a_fork_cannot_use_its_parents_connections(context: Contexts, start: Start, address: str) -> None:
    router = RouterChannel(context(), address)
    process = start("forked_context", router.address)
    for _ in range(2):
        found = router.receive(PATIENCE)
        assert found is not None
        assert found[1][0].bytes in (b"before", b"after")
        router.send(found[0], [b"answer"])
    out, errors = process.communicate(timeout=pace.seconds(PATIENCE))
    lines = out.splitlines()
    assert len(lines) == 5, (out, errors)
    assert all(line.startswith("KVStoreError this process is a fork of process") for line in lines[:3]), out
    assert lines[3:] == ["child ended with 0", "parent b'answer'"]
    assert not errors, errors


def test_a_process_with_unsent_messages_ends(start: Start) -> None:
    process = start("leaves", "tcp://127.0.0.1:9")
    _, errors = process.communicate(timeout=pace.seconds(PATIENCE))
    assert process.returncode == 0
    assert not errors, errors
