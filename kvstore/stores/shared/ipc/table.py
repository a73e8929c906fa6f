"""The state of a key's memory on the workers' GPUs: a table in the region, with one line for each worker.

A word is written before the worker arrives in a round, or under the region's lock, and read after that: so
all workers see the words in that order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ....devices.driver import IPC_HANDLE_BYTES
from ..native import _shared as shm

Words = npt.NDArray[np.int64]

#: Rounds with recorded slots: no worker is further behind another.
ROUNDS = 4
#: Slots of a worker: one for each round that a worker may still have to read, and one to write.
MOST_SLOTS = 4
PROOF_BYTES = 16
_WHY_BYTES = 160

# The standing of a worker towards the exchange of a key.
REFUSED, NOTHING, OFFERED, READY = -1, 0, 1, 3

# Words of a worker's line.
_STANDING, _HOLDS, _READ, _SLOTS = range(4)
_USED = 4
_SLOT = _USED + ROUNDS
_SLOT_WORDS = 1 + (IPC_HANDLE_BYTES + PROOF_BYTES) // 8
_WHY = _SLOT + MOST_SLOTS * _SLOT_WORDS
_LINE = _WHY + _WHY_BYTES // 8
_HEAD = 8


class IpcTable:
    """The table of one key, as one of `size` workers sees it; it writes the line of its own rank."""

    def __init__(self, job: shm.Job, handle: shm.Handle, size: int, rank: int) -> None:
        words: Words = handle.gpu_table(8 * (_HEAD + size * _LINE)).view(np.int64)
        self._job, self._lies = job, words[:2]
        self._lines = words[_HEAD:].reshape(size, _LINE)
        self._own = self._lines[rank]
        self._peers = [w for w in range(size) if w != rank]

    # ---------------------------------------------------------------------------------- participation

    def read_standings(self) -> list[int]:
        """Return the standing of each worker."""
        with shm.RegionLock(self._job):
            found: list[int] = self._lines[:, _STANDING].tolist()
        return found

    def set_standing(self, standing: int, why: str = "") -> None:
        """Record the standing of this worker, and why it has refused."""
        text = why.encode(errors="replace")[:_WHY_BYTES].ljust(_WHY_BYTES, b"\0")
        self._own[_WHY:] = np.frombuffer(text, np.int64)
        with shm.RegionLock(self._job):
            self._own[_STANDING] = standing

    def refusal_reason(self, worker: int) -> str:
        """Return why a worker has refused."""
        return self._lines[worker, _WHY:].tobytes().rstrip(b"\0").decode(errors="replace")

    def begin_to_hold(self) -> bool:
        """Record that this worker may have memory of the others open; False: not all offer some."""
        with shm.RegionLock(self._job):
            if (self._lines[:, _STANDING] < OFFERED).any():
                return False
            self._own[_HOLDS] = 1
        return True

    def note_closed(self) -> None:
        """Record that this worker has no memory of the others open any more."""
        self._own[_HOLDS] = 0

    def memory_holders(self) -> list[int]:
        """Return the other workers that may have this worker's memory open."""
        return [w for w in self._peers if self._lines[w, _HOLDS]]

    # ------------------------------------------------------------------------------------------- slots

    def add_slot(self, offset: int, name: bytes, proof: bytes) -> None:
        """Record a slot of this worker: its exported memory, and its offset there."""
        n = int(self._own[_SLOTS])
        at = _SLOT + n * _SLOT_WORDS
        self._own[at] = offset
        self._own[at + 1 : at + _SLOT_WORDS] = np.frombuffer(name + proof, np.int64)
        self._own[_SLOTS] = n + 1

    def slot_count(self, worker: int) -> int:
        """Return the number of slots that a worker offers."""
        return int(self._lines[worker, _SLOTS])

    def slot_offset(self, worker: int, number: int) -> tuple[int, bytes, bytes]:
        """Return the offset of a slot, the name of its memory, and the proof at the beginning of that."""
        at = _SLOT + number * _SLOT_WORDS
        text = self._lines[worker, at + 1 : at + _SLOT_WORDS].tobytes()
        return int(self._lines[worker, at]), text[:IPC_HANDLE_BYTES], text[IPC_HANDLE_BYTES:]

    def note_slot(self, round: int, slot: int) -> None:
        """Record the slot of this worker's part in a round."""
        self._own[_USED + round % ROUNDS] = slot

    def noted_slot(self, worker: int, round: int) -> int:
        """Return the slot of a worker's part in a round."""
        return int(self._lines[worker, _USED + round % ROUNDS])

    def note_read(self, round: int) -> None:
        """Record that this worker has read all slots of the rounds up to a given round."""
        self._own[_READ] = round

    def read_by_all(self) -> int:
        """Return the last round with slots that all workers have read."""
        return int(self._lines[:, _READ].min())

    # ------------------------------------------------------------------------------------------- value

    def lies_on_gpus(self, round: int) -> bool:
        """Return whether the value of this round is on each worker's GPU, and not in the region."""
        return round > 0 and bool(self._lies[round % 2] == round)

    def put_on_gpus(self, round: int, there: bool) -> None:
        """Record where the value of a round is.

        Only its opener, or a worker that holds the key, may do so.
        """
        self._lies[round % 2] = round if there else 0
