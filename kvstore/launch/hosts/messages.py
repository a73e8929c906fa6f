"""Messages between `kvstore run` and its agent on another host: lines of JSON over the two pipes of ssh.

Command lines, variables and output are bytes, since they need not be text; JSON has them in base64.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvstore.errors import ProtocolError

#: Seconds between two keep-alive messages.
PING = 5.0
#: Bytes of a message at most: more than those of the longest line of output.
LONGEST = 1 << 25


class _Message(msgspec.Struct, array_like=True, tag=True):
    pass


class KeepAlive(_Message):
    """A sign of life, in both directions; from `kvstore run` with the bytes of output that it has written."""

    written: int = 0


class JobStart(_Message):
    """To the agent, first: the folder of the processes, and the value of KVSTORE_PORTS.

    The agent ends all processes after `patience` seconds without a message. `prefix`: lines of output begin
    with the name of their process.
    """

    folder: bytes
    patience: float
    ports: str = ""
    prefix: bool = False


class StartProcess(_Message):
    """To the agent: start a process, with these variables over those of the host."""

    number: int
    role: str
    rank: int
    command: list[bytes]
    variables: list[tuple[bytes, bytes]]
    keys: bytes
    reports: bool  # whether it reports its address


class SignalProcess(_Message):
    """To the agent: send a signal to the group of a process, and SIGKILL `grace` seconds later.

    With `grace` None the signal asks the process for its stacks or its timeline.
    """

    number: int
    signal: int
    grace: float | None


class AgentReady(_Message):
    """The agent is in the folder of the job, and has reserved a port for worker 0 of a job."""

    port: int


class AgentRefused(_Message):
    """The agent cannot do what a message asks for."""

    text: str


class OutputLine(_Message):
    """A line, with its prefix, that a process has written to its stdout (1) or stderr (2)."""

    stream: int
    line: bytes


class ReportedAddress(_Message):
    """The address that a process has reported; empty if it will report none."""

    number: int
    text: str


class ProcessEnded(_Message):
    """A process has ended; `tail` has the last lines of its stderr."""

    number: int
    code: int
    seconds: float
    tail: list[bytes]


class GroupGone(_Message):
    """Nothing is left of the group of a process, and all of its output is sent."""

    number: int


ToAgent = JobStart | StartProcess | SignalProcess | KeepAlive
FromAgent = AgentReady | AgentRefused | OutputLine | ReportedAddress | ProcessEnded | GroupGone | KeepAlive
TO_AGENT: msgspec.json.Decoder[ToAgent] = msgspec.json.Decoder(ToAgent)
FROM_AGENT: msgspec.json.Decoder[FromAgent] = msgspec.json.Decoder(FromAgent)

_encoder = msgspec.json.Encoder()
_T = TypeVar("_T")


def agent_greeting(version: str) -> bytes:
    """Return the first bytes of the agent; what a login shell prints before them is no message."""
    return f"\nkvstore agent {version}\n".encode()


def encode_message(message: ToAgent | FromAgent) -> bytes:
    """Return a message as a line."""
    return _encoder.encode(message) + b"\n"


def decode_message(decoder: msgspec.json.Decoder[_T], line: bytes) -> _T:
    """Return the message of a line; raise ProtocolError if it is none in this direction."""
    try:
        return decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a wrong message between kvstore run and its agent: {error}") from error
