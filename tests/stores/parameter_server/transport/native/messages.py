"""Messages as the codec writes them, to compare with what an exchange has sent."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

from kvstore.stores.parameter_server.protocol.messages import Batch
from kvstore.stores.parameter_server.transport import sockets
from kvstore.stores.parameter_server.transport.frames import MessageCodec

CODEC = MessageCodec("job")


def raw(frames: Sequence[Any]) -> bytes:
    flat = [bytes(memoryview(frame)) for frame in frames]
    sizes = b"".join(struct.pack("<Q", len(frame)) for frame in flat)
    return b"KVST" + struct.pack("<I", len(flat)) + sizes + b"".join(flat)


def written(batch: Batch) -> bytes:
    return raw(CODEC.encode(sockets._with_packed_payloads(batch)))


def read(server: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        found += server.recv(nbytes - len(found))
    return bytes(found)
