"""What `kvstore run` and its agent on another host say to each other, over the pipes of ssh.

A message is its length in four bytes and a msgpack array. Text of environment and command line goes as bytes,
as the system has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvstore.errors import ProtocolError

#: The agent's first bytes. What comes before them was written by the login shell there.
MAGIC = b"\nkvstore far side 1\n"
#: Seconds between two signs of life.
PING = 5.0

_MOST = 1 << 25  # bytes of a message: four times those of the longest line
_MOST_GREETING = 1 << 16  # bytes that a login shell may say


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class JobStart(_Message, tag="Job"):
    """First message to the agent: folder to run in, seconds of silence after which it ends all.

    `ports` is the value of KVSTORE_PORTS.
    """

    folder: bytes
    patience: float
    ports: str = ""


class StartProcess(_Message, tag="Start"):
    """Start a process, with variables beside those of the agent; `tells`: it will tell its address."""

    number: int
    role: str
    rank: int
    command: list[bytes]
    variables: dict[bytes, bytes]
    keys: bytes
    tells: bool


class EndProcess(_Message, tag="End"):
    """Send a signal to a process, and kill what is there of it `grace` seconds later."""

    number: int
    signal: int
    grace: float


class AskProcess(_Message, tag="Ask"):
    """Have a process write where it is to its stderr, or its timeline to a file: by this signal."""

    number: int
    signal: int


class Credit(_Message):
    """So many bytes of output were passed on."""

    size: int


class KeepAlive(_Message, tag="Ping"):
    """A sign of life, both ways."""


class AgentHello(_Message, tag="Hello"):
    """First message of the agent."""

    version: str


class AgentReady(_Message, tag="Ready"):
    """The agent is in the folder of the job, and holds a port that worker 0 of a job can use."""

    port: int


class Output(_Message):
    """A line that a process has written to its stdout (1) or stderr (2)."""

    number: int
    stream: int
    line: bytes


class Address(_Message):
    """What the process that `tells` has told; empty: it will tell nothing."""

    number: int
    text: str


class Ended(_Message):
    """A process has ended."""

    number: int
    code: int
    seconds: float


class Gone(_Message):
    """Nothing is left of a process and of what it started; its output was all sent."""

    number: int


class AgentRefused(_Message, tag="Refused"):
    """What was asked for cannot be done."""

    text: str


To = JobStart | StartProcess | EndProcess | AskProcess | Credit | KeepAlive
From = AgentHello | AgentReady | Output | Address | Ended | Gone | AgentRefused | KeepAlive

_encoder = msgspec.msgpack.Encoder()


def version() -> str:
    """Version of kvstore here, which must be the same on both sides."""
    from kvstore import __version__

    return __version__


def packed(message: To | From) -> bytes:
    """Make the bytes of a message."""
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "big") + data


class Reader:
    """Finds the messages in a stream of bytes.

    Parameters
    ----------
    kinds : union of messages
        Those that may come.
    greeting : bool
        The stream begins with `MAGIC`, perhaps after something else.
    """

    def __init__(self, kinds: Any, greeting: bool = False) -> None:
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._data = bytearray()
        self._greeting = greeting

    def feed(self, data: bytes) -> Iterator[Any]:
        """Take bytes in, and give the messages that are complete.

        Raises
        ------
        ProtocolError
            These bytes are no messages.
        """
        self._data += data
        if self._greeting and not self._greeted():
            return
        while len(self._data) >= 4:
            size = int.from_bytes(self._data[:4], "big")
            if size > _MOST:
                raise ProtocolError(f"a message of {size} bytes between kvstore run and its far side")
            if len(self._data) < 4 + size:
                return
            message = bytes(self._data[4 : 4 + size])
            del self._data[: 4 + size]
            try:
                yield self._decoder.decode(message)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"between kvstore run and its far side: {error}") from error

    def _greeted(self) -> bool:
        start = self._data.find(MAGIC)
        if start < 0 and len(self._data) > _MOST_GREETING:
            raise ProtocolError("what answers is not kvstore's far side")
        if start >= 0:
            del self._data[: start + len(MAGIC)]
            self._greeting = False
        return start >= 0
