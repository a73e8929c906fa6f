"""The number of operations that each process has called, sent by processes that wait for long.

The comparison of calls in MPI does not report the missing processes. So a process that has waited for long
sends the number of its calls to all processes. A process that receives such a message in a wait sends its own
number. Without long waits no message is sent, and no process waits for a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

_TAG = 1


class CallCounts:
    """The number of calls of each process of a communicator, which has no other point-to-point messages."""

    #: Messages in transfer, and their requests: MPI reads the memory until they are complete.
    _requests: ClassVar[list[tuple[npt.NDArray[np.int64], list[Any]]]] = []

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank, size = comm.Get_rank(), comm.Get_size()
        self._counts = np.zeros(size, np.int64)
        self._sent_count = 0

    def send(self, count: int) -> None:
        """Send the number of this process's calls to all processes; once for each number."""
        if count <= self._sent_count:
            return
        self._sent_count = count
        word = np.array([count], np.int64)
        others = [rank for rank in range(len(self._counts)) if rank != self._rank]
        self._requests[:] = [pair for pair in self._requests if not self._mpi.Request.Testall(pair[1])]
        self._requests.append((word, [self._comm.Isend(word, rank, _TAG) for rank in others]))

    def receive_and_answer(self, count: int) -> None:
        """Receive the numbers of other processes, and answer."""
        if self.receive():
            self.send(count)

    def receive(self) -> bool:
        """Receive the numbers of other processes; return whether a message has arrived."""
        status, word, asked = self._mpi.Status(), np.empty(1, np.int64), False
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG, status):
            rank = status.Get_source()
            self._comm.Recv(word, rank, _TAG)
            self._counts[rank] = max(self._counts[rank], word[0])
            asked = True
        return asked

    def missing(self, number: int) -> list[int]:
        """Return the ranks that have not reported so many calls."""
        return [rank for rank, n in enumerate(self._counts) if n < number and rank != self._rank]


def missing_text(ranks: Sequence[int]) -> str:
    """Return a text that names the missing processes; without any, that all have called."""
    if not ranks:
        return "and all have: one of them is stopped, or has left"
    if len(ranks) == 1:
        return f"and worker {ranks[0]} has not, or is stopped"
    first = ", ".join(map(str, ranks[:-1][:8]))
    rest = f"{len(ranks) - 8} more" if len(ranks) > 9 else f"{ranks[-1]}"
    return f"and workers {first} and {rest} have not, or are stopped"
