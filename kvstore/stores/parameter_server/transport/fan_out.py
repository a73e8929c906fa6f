"""Control messages as bytes: a body that is sent to many processes is encoded once."""

from __future__ import annotations

from typing import Any

import msgspec

from ..protocol.messages import MemberReply, ReliableMessage, SlicesNotice, ViewNotice


class FanOut:
    """Encodes the messages of one process, and stores the last body that may be sent to other processes."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._shared: Any = None
        self._written: msgspec.Raw | None = None

    def encode(self, message: Any) -> tuple[bytes, bool]:
        """Return a message as bytes, and whether it has content to check that the stored body has not."""
        shared = _shared_body(message)
        if shared is None or shared is not self._shared:
            return self._encoder.encode(message), True
        if self._written is None:
            self._written = msgspec.Raw(self._encoder.encode(shared))
        return self._encoder.encode(_with_encoded(message, self._written)), False

    def remember_body(self, message: Any) -> None:
        """Store the body of a message that was accepted; messages with the same body may follow."""
        self._shared, self._written = _shared_body(message), None


def _shared_body(message: Any) -> Any:
    """Return the part of a message that may be sent to several processes; None: there is none."""
    body = message.body if type(message) is ReliableMessage else None
    if type(body) is MemberReply:
        return body.entries or None
    return body if type(body) in (ViewNotice, SlicesNotice) else None


def _with_encoded(message: ReliableMessage, written: Any) -> ReliableMessage:
    body = message.body
    answer = msgspec.structs.replace(body, entries=written) if type(body) is MemberReply else written
    return ReliableMessage(message.number, message.seen, answer, message.term)
