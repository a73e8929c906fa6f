"""The bytes of a message on the wire, as transport/frames.py and transport/native/exchange.h write it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvstore.stores.parameter_server.protocol.messages import COPIED, Batch, PayloadLocation, Record
from kvstore.stores.parameter_server.transport import frames
from kvstore.stores.parameter_server.transport.fan_out import FanOut

HEAD, RECORD = frames._HEAD.size, frames._RECORD.size
INLINE, ALIGNED = frames._INLINE_BYTES, frames._ALIGNED
#: Before each message of a stream: a word that begins it with the number of frames, and their sizes.
_BEGIN, _SIZE = 8, 8
#: ZeroMQ's own, for a message of one frame.
_FRAMING = 9

_NONE = PayloadLocation.NONE


def data_bytes(sizes: Iterable[int], records: int) -> int:
    """Return the bytes of a message with `records` records and payloads of these sizes."""
    together = large = n_large = 0
    for size in sizes:
        if size > COPIED:
            large += size
            n_large += 1
        else:
            together += -(-size // ALIGNED) * ALIGNED
    n = 1 + n_large + (together > INLINE)
    return _BEGIN + _SIZE * n + HEAD + RECORD * records + together + large


def batch_bytes(batch: Batch) -> int:
    """Return the bytes of a worker's requests."""
    return data_bytes(
        (record.nbytes for record in batch.records if record.place != _NONE), len(batch.records)
    )


def values_of(records: Iterable[Record]) -> int:
    """Return the bytes of the values of records."""
    return sum(record.nbytes for record in records)


class ControlCodec:
    """Control messages of one process as bytes, as its codec writes them.

    `fans_out` False: each is encoded anew, as before there was `transport.fan_out`.
    """

    def __init__(self, fans_out: bool = True) -> None:
        self._fan_out, self._fans_out = FanOut(), fans_out

    def measure(self, message: Any) -> tuple[int, bool]:
        """Return the bytes of a message, and whether it had to be encoded."""
        body, is_new = self._fan_out.encode(message)
        if is_new and self._fans_out:
            self._fan_out.remember_body(message)
        return HEAD + _FRAMING + len(body), is_new
