"""Jobs of keys whose rule needs whole tensors: those of all slices of a key wait for each other."""

from __future__ import annotations

from .dense import DenseKey
from .payload import SliceUpdate


class WholeKeys:
    """Jobs that wait until all slices of their key have one: then one update takes them together.

    A job without parts is of a round that was lost with a server's memory, and stands for all up to it.
    """

    def __init__(self) -> None:
        self._waiting: dict[DenseKey, dict[int, SliceUpdate]] = {}  # by slice

    def __contains__(self, key: DenseKey) -> bool:
        """Whether jobs of a key wait."""
        return key in self._waiting

    def add(self, key: DenseKey, job: SliceUpdate) -> list[SliceUpdate]:
        """Keep a job; return those of the key that are one update now, with the same round."""
        self._waiting.setdefault(key, {})[job.slice] = job
        return self._take(key)

    def abort(self) -> list[int]:
        """Drop all jobs; return their slices."""
        slices = [slice for jobs in self._waiting.values() for slice in jobs]
        self._waiting.clear()
        return slices

    def forget(self, key: DenseKey) -> None:
        """Drop what is kept of a key."""
        self._waiting.pop(key, None)

    def _take(self, key: DenseKey) -> list[SliceUpdate]:
        """Remove and return the jobs of a key's next update; none while a slice waits for its job."""
        waiting = self._waiting[key]
        if len(waiting) < len(key.slices):
            return []
        first = min(job.round for job in waiting.values())
        taken = [job for job in waiting.values() if job.parts or job.round == first]
        for job in taken:
            del waiting[job.slice]
        if not waiting:
            del self._waiting[key]
        return [job._replace(round=first) for job in taken]
