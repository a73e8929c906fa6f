"""Exchange of objects: the object of one worker, or of each worker, is sent to all workers of a store."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError, ConfigError
from .meeting import ALL_GATHER, BROADCAST, MeetingMessage, MeetingMessages, WorkerMeetings, check_same
from .objects import ArrayKind, pack_object, unpack_object

_WORD = 4  # bytes: long objects are sent as int32


class ObjectExchange:
    """The exchange of objects, for one worker."""

    def __init__(self, meetings: WorkerMeetings) -> None:
        self._meetings = meetings

    def broadcast(self, value: Any, root: int, kind: ArrayKind) -> Any:
        """Return the object of one worker."""
        what = f"the object of worker {root}"
        found = self._exchange_objects(BROADCAST, what, [root], value, kind)
        if root not in found:
            raise ConfigError(
                f"worker {root} does not take part any more: it has joined, or is lost; pass another root"
            )
        return unpack_object(found[root], kind)

    def all_gather(self, value: Any, kind: ArrayKind) -> list[Any]:
        """Return the objects of all present workers, by rank."""
        senders = list(range(self._meetings.size))
        found = self._exchange_objects(ALL_GATHER, "the objects of all", senders, value, kind)
        return [unpack_object(found[rank], kind) for rank in sorted(found)]

    def _exchange_objects(
        self, operation: int, what: str, senders: list[int], value: Any, kind: ArrayKind
    ) -> dict[int, memoryview]:
        """Send the objects of some workers to all.

        An object that cannot be sent is an error on all of them.
        """
        data, error = b"", None
        try:
            data = pack_object(value, kind) if self._meetings.rank in senders else b""
        except ArgumentError as cause:
            error = cause
        self._meetings.wait()
        with self._meetings.lock:
            content = [np.frombuffer(data, np.uint8)]
            heard = self._meetings.exchange_messages(
                MeetingMessage(operation, what.encode(), len(data)), content
            )
            if error is not None:
                raise error
            check_same(heard, sizes=False)
            found = [rank for rank in senders if heard.said[rank] is not None]
            self._check_sent(heard, found)
            return self._gather_contents(heard, found, data)

    @staticmethod
    def _check_sent(heard: MeetingMessages, senders: list[int]) -> None:
        """Raise if a worker could not encode its object; each encoded object has at least one byte."""
        failed = [rank for rank in senders if not heard.nbytes(rank)]
        if failed:
            raise ArgumentError(f"worker {failed[0]} cannot send its object; its own error says why")

    def _gather_contents(
        self, heard: MeetingMessages, senders: list[int], data: bytes
    ) -> dict[int, memoryview]:
        """Return the contents by rank; long objects are sent in further rounds, side by side in one array."""
        found = {rank: heard.content(rank) for rank in senders if heard.is_here(rank)}
        later = [rank for rank in senders if rank not in found]
        starts = np.cumsum([0, *(-(-heard.nbytes(rank) // _WORD) for rank in later)]).tolist()
        flat = np.zeros(starts[-1], np.int32)
        bytes_ = flat.view(np.uint8)
        places = {rank: start * _WORD for rank, start in zip(later, starts, strict=False)}
        if (at := places.get(self._meetings.rank)) is not None:
            bytes_[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self._meetings.sum_flat(flat)
        for rank, at in places.items():
            found[rank] = bytes_[at : at + heard.nbytes(rank)].data
        return found
