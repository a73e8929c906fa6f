"""Complete rounds of a store's slices: parts are summed, and the sums update or replace the values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ....arrays.sparse import RowSparseArray
from ....settings.definitions import is_side
from ...entry import Array
from ...update import check_floating
from ..protocol.optimizer_states import needs_whole_keys
from .dense import DenseKey, DenseSlice, DenseUpdates, update_whole
from .optimizer import OptimizerVersion, OptimizerVersions, update_error
from .payload import SliceUpdate, plain_elements, some_rows
from .shard_slices import ShardSlices
from .sparse import TableSlice
from .whole_keys import WholeKeys


class RoundUpdates:
    """Applies the rounds of one store's slices, each with the settings that its workers agreed on."""

    def __init__(self, slices: ShardSlices, optimizers: OptimizerVersions) -> None:
        self._slices = slices
        self._optimizers = optimizers
        #: By slice, the newest version of the settings that a round has used.
        self.versions: dict[int, int] = {}
        #: Slices with outs that the last `apply_jobs` has written.
        self.written: set[int] = set()
        #: The jobs that `applicable_jobs` has stored.
        self.whole_keys = WholeKeys()

    def applicable_jobs(self, jobs: Sequence[SliceUpdate]) -> list[SliceUpdate]:
        """Return the jobs that can be applied now.

        Most are returned at once. A rule that needs whole tensors updates all slices of a key together: jobs
        of such keys are stored until all of their round are there. Their payloads must stay valid until then.
        """
        now: list[SliceUpdate] = []
        for job in jobs:
            held = self._slices.held.get(job.slice)
            if isinstance(held, DenseSlice) and self._waits_for_others(held, job):
                now += self.whole_keys.add_job(held.of, job)
            else:
                now.append(job)
        return now

    def forget_slices(self, slices: Iterable[int]) -> None:
        """Drop the stored jobs of slices, while the slices still exist."""
        for slice in slices:
            held = self._slices.held.get(slice)
            if isinstance(held, DenseSlice):
                self.whole_keys.forget_key(held.of)
            self.versions.pop(slice, None)

    def _waits_for_others(self, part: DenseSlice, job: SliceUpdate) -> bool:
        if not part.of.whole or len(part.of.slices) == 1 or is_side(part.key):
            return False
        # A job without parts does not show the version of the other slices' jobs.
        settings = [self._job_settings(job)] if job.parts else self._optimizers.all_versions()
        return part.of in self.whole_keys or any(needs_whole_keys(one.optimizer) for one in settings)

    def apply_jobs(self, jobs: Sequence[SliceUpdate]) -> list[Exception | None]:
        """Sum the parts of each job, and update or replace the slice's value.

        Many small slices use one call of the kernels. Results are those of the `local` store, bit by bit, for
        one push with the parts as the list of values, however the key is divided. Returns for each job None,
        or its error (UpdaterError, ShapeError, DTypeError ...): its slice is unchanged then, and the other
        jobs are done.
        """
        results: list[Exception | None] = [None] * len(jobs)
        self.written.clear()
        memory = self._slices.memory
        batch = DenseUpdates(memory)
        together: dict[int, tuple[int, OptimizerVersion, Any]] = {}
        whole: dict[tuple[DenseKey, int], list[int]] = {}
        for number, job in enumerate(jobs):
            try:
                settings, held = self._job_settings(job), self._slices.find_slice(job.slice)
                if not job.parts:
                    continue
                if isinstance(held, TableSlice):
                    _apply_table(held, job._replace(version=self.versions[job.slice]), settings)
                elif needs_whole_keys(settings.optimizer):
                    whole.setdefault((held.of, job.round), []).append(number)
                else:
                    if job.slice in together:  # its next round
                        self._run_batch(batch, together, results)
                        batch, together = DenseUpdates(memory), {}
                    check_floating(held.of, settings.optimizer)
                    job = job._replace(version=self.versions[job.slice])
                    if batch.add_job(held, job, settings, _may_be_undone(job)) and job.outs:
                        self.written.add(job.slice)
                    together[job.slice] = (number, settings, held.of.key)
            except Exception as error:
                results[number] = self._job_error(error, job)
        self._run_batch(batch, together, results)
        for numbers in whole.values():
            self._apply_whole([jobs[number] for number in numbers], numbers, results)
        self._slices.changed.update(job.slice for job in jobs)
        return results

    def _run_batch(
        self, batch: DenseUpdates, together: dict[int, Any], results: list[Exception | None]
    ) -> None:
        try:
            batch.run_kernels()
        except Exception as error:  # no memory for the call itself; nothing is written
            for number, settings, key in together.values():
                results[number] = update_error(error, settings, key, self._slices.server)

    def _apply_whole(
        self, jobs: list[SliceUpdate], numbers: list[int], results: list[Exception | None]
    ) -> None:
        parts = [(self._slices.held[job.slice], job) for job in jobs]
        settings = max((self._job_settings(job) for job in jobs), key=lambda one: one.version)
        try:
            dense = [(part, job) for part, job in parts if isinstance(part, DenseSlice)]
            key = dense[0][0].of
            check_floating(key, settings.optimizer)
            undone = any(map(_may_be_undone, jobs))
            for part in key.slices:  # also slices without a job
                self._slices.changed.add(part.id)
                if undone:
                    part.keep_copy(jobs[0].round)
                if undone and settings.keeps_states:
                    part.keep_states(settings, jobs[0].round)
            update_whole(dense, settings, self._slices.memory)
        except Exception as error:
            for number, job in zip(numbers, jobs, strict=True):
                results[number] = self._job_error(error, job)

    def _job_settings(self, job: SliceUpdate) -> OptimizerVersion:
        """Return the settings for a job; the version of a slice never decreases."""
        held = self._slices.held.get(job.slice)
        version = max(job.version, self.versions.get(job.slice, 0))
        if held is not None and is_side(held.key):
            version = 0  # also where a worker that has joined knew an optimizer
        self.versions[job.slice] = version
        if held is not None:
            held.withdraw_plan()
        if isinstance(held, DenseSlice):
            held.sums = not version  # `native/sums.h` has no settings except those of a plan
        return self._optimizers.settings_at(version)

    def _job_error(self, error: Exception, job: SliceUpdate) -> Exception:
        held = self._slices.held.get(job.slice)
        if held is None:
            return error
        return update_error(error, self._job_settings(job), held.key, self._slices.server)


def _apply_table(table: TableSlice, job: SliceUpdate, settings: OptimizerVersion) -> None:
    check_floating(table, settings.optimizer)
    sources: list[RowSparseArray | Array] = [
        some_rows(payload, table.dtype, table.start, table.shape)
        if payload.rows >= 0
        else plain_elements(payload, table.dtype, math.prod(table.shape)).reshape(table.shape)
        for _, payload in job.parts
    ]
    before = job.round - 1 if _may_be_undone(job) else -1
    table.apply_sources(sources, settings, job.clock, before, job.version)


def _may_be_undone(job: SliceUpdate) -> bool:
    """Return whether the round may be undone: a worker may be lost between its parts of two slices."""
    return len(job.parts) > 1
