"""Bodies of the processes that tests of the transport start: arguments are text, stdout the progress."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.settings.keys import JobKeys
from kvstore.stores.parameter_server.protocol.messages import (
    PROTOCOL,
    BarrierRequest,
    HelloRequest,
    ReliableMessage,
)
from kvstore.stores.parameter_server.transport import frames
from kvstore.stores.parameter_server.transport.channel import DealerChannel
from kvstore.stores.parameter_server.transport.context import ZmqContext
from kvstore.stores.parameter_server.transport.frames import MessageCodec
from kvstore.stores.parameter_server.transport.heartbeat_echoes import HeartbeatResponder


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def dealer(address: str, identity: str) -> None:
    """Send one message, and wait to be killed."""
    connected = DealerChannel(ZmqContext(), address, identity.encode())
    connected.send([b"hello", bytes(1 << 20)])
    say("sent")
    time.sleep(60)


def speaker(address: str, job: str, newer: str) -> None:
    """Say hello, and then something that needs to be of the same job and version."""
    if newer == "newer":
        frames.PROTOCOL = PROTOCOL + 1
    codec = MessageCodec(job)
    with_keys = ZmqContext()
    connected = DealerChannel(with_keys, address, b"speaker")
    hello = HelloRequest("worker", 0, 1, "process", job, frames.PROTOCOL)
    connected.send(codec.encode(ReliableMessage(2, 0, BarrierRequest(1, 0, 1))))
    connected.send(codec.encode(ReliableMessage(1, 0, hello)))
    answer = connected.receive(20)
    say(codec.decode(answer) if answer else "no answer")


def client(address: str, keys: str, identity: str) -> None:
    """Say how a handshake with these keys ended."""
    own = JobKeys.from_json(Path(keys).read_bytes()) if keys else None
    context = ZmqContext(own)
    start = time.monotonic()
    try:
        connected = DealerChannel(context, address, identity.encode())
        connected.send([b"hello"])
        connected.receive(20)
        say("answered")
    except KVStoreError as error:
        say(type(error).__name__, round(time.monotonic() - start, 1), error)


def hold() -> None:
    """Keep the interpreter's lock until the test writes a byte."""
    say("holds")
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
    say("held")


def pulse(address: str, name: str, holds: str = "") -> None:
    """Perhaps hold the interpreter's lock, and end without closing anything."""
    kept = HeartbeatResponder(address, name)
    say("beats")
    if holds:
        time.sleep(0.5)  # be connected
        hold()
    sys.stdin.readline()
    assert kept is not None


def held_at_once(address: str, name: str) -> None:
    """Hold the lock as soon as there is a responder, whose thread begins late."""
    mask = signal.pthread_sigmask

    def late(*arguments: Any) -> Any:
        time.sleep(0.3)
        return mask(*arguments)

    signal.pthread_sigmask = late
    kept = HeartbeatResponder(address, name)
    hold()
    kept.close()


def forked_pulse(address: str, name: str) -> None:
    """Fork, and end first: the child must not be mistaken for its parent."""
    kept = HeartbeatResponder(address, name)
    time.sleep(0.5)
    child = os.fork()
    if child == 0:
        kept.close()  # does nothing
        say("child", os.getpid())
        sys.stdin.readline()
        sys.exit(0)
    os._exit(0)


def attempt(what: Callable[[], object]) -> None:
    try:
        say("no error from", what())
    except KVStoreError as error:
        say(type(error).__name__, error)


def forked_context(address: str) -> None:
    """Use the parent's connections in a fork."""
    context = ZmqContext()
    connected = DealerChannel(context, address, b"parent")
    connected.send([b"before"])
    connected.receive(20)
    child = os.fork()
    if child == 0:
        attempt(lambda: connected.send([b"child"]))
        attempt(connected.receive)
        attempt(lambda: DealerChannel(context, address, b"x"))
        connected.close()
        context.close()
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    say("child ended with", os.waitstatus_to_exitcode(status))
    connected.send([b"after"])
    answer = connected.receive(20)
    say("parent", bytes(answer[0]) if answer else None)


def leaves(address: str) -> None:
    """End without closing anything, with messages that no process will receive."""
    context = ZmqContext()
    connected = DealerChannel(context, address, b"leaves")
    for _ in range(100):
        connected.send([bytes(1 << 20)])
    say("leaves")
