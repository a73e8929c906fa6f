"""Jobs of keys whose rule needs whole tensors: the jobs of all slices of a key wait for each other."""

from __future__ import annotations

from collections import Counter

from .dense import DenseKey
from .payload import SliceUpdate


class WholeKeys:
    """Jobs that wait until all slices of their key have one; then they become one update.

    A job without parts is of a round that was lost with a server's memory; it stands for all rounds up to it.
    """

    def __init__(self) -> None:
        self._waiting: dict[DenseKey, dict[int, SliceUpdate]] = {}  # by slice
        #: By rank, the number of a worker's parts for each slice.
        self._parts: dict[DenseKey, dict[int, Counter[int]]] = {}
        #: By slice, the jobs that it will lack: workers were lost between the parts of a push.
        self._fewer: dict[DenseKey, Counter[int]] = {}

    def __contains__(self, key: DenseKey) -> bool:
        """Whether jobs of a key wait."""
        return key in self._waiting

    def add_job(self, key: DenseKey, job: SliceUpdate) -> list[SliceUpdate]:
        """Store a job; return the jobs of the key that are one update now, with the same round."""
        self._waiting.setdefault(key, {})[job.slice] = job
        parts = self._parts.setdefault(key, {})
        for rank, _ in job.parts:
            parts.setdefault(rank, Counter())[job.slice] += 1
        return self._pop_jobs(key)

    def withdraw_jobs(self, rank: int) -> tuple[list[int], list[SliceUpdate]]:
        """Drop jobs of a lost worker, whose parts for other slices will not arrive.

        Returns the slices of the dropped jobs, and the jobs that had waited for those and are updates now.
        """
        dropped: list[int] = []
        ready: list[SliceUpdate] = []
        for key in [key for key, by_rank in self._parts.items() if rank in by_rank]:
            parts, waiting = self._parts[key].pop(rank), self._waiting.get(key, {})
            its = [slice for slice, job in waiting.items() if [one for one, _ in job.parts] == [rank]]
            for slice in its:
                del waiting[slice]
            if not waiting:
                self._waiting.pop(key, None)
            parts.subtract(its)
            self._note_fewer(key, parts)
            dropped += its
            ready += self._pop_jobs(key)
        return dropped, ready

    def abort_jobs(self) -> list[int]:
        """Drop all jobs; return their slices."""
        slices = [slice for jobs in self._waiting.values() for slice in jobs]
        self._waiting.clear()
        return slices

    def forget_key(self, key: DenseKey) -> None:
        """Drop everything that is stored of a key."""
        for kept in (self._waiting, self._parts, self._fewer):
            kept.pop(key, None)

    def _pop_jobs(self, key: DenseKey) -> list[SliceUpdate]:
        """Remove and return the jobs of a key's next update; none while a slice waits for its job."""
        waiting, fewer = self._waiting.get(key, {}), self._fewer.get(key, Counter())
        absent = [part.id for part in key.slices if part.id not in waiting]
        if not waiting or not all(fewer[slice] for slice in absent):
            return []
        fewer.subtract(absent)
        first = min(job.round for job in waiting.values())
        taken = [job for job in waiting.values() if job.parts or job.round == first]
        for job in taken:
            del waiting[job.slice]
        if not waiting:
            del self._waiting[key]
        return [job._replace(round=first) for job in taken]

    def _note_fewer(self, key: DenseKey, parts: Counter[int]) -> None:
        """Record that slices with fewer of these parts, all of one worker, receive no more."""
        slices, fewer = [part.id for part in key.slices], self._fewer.setdefault(key, Counter())
        most = max(parts[slice] for slice in slices)
        lacks = {slice: fewer[slice] + most - parts[slice] for slice in slices}
        least = min(lacks.values())
        self._fewer[key] = Counter({slice: n - least for slice, n in lacks.items()})
