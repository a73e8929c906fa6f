"""The time of a job: that of the scheduler's clock, or of the clock of most processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..clocks import ClockSample
from ..process_trace import ProcessTrace

_WINDOW = 60_000_000_000  # ns; of the comparisons within this time the best one is used


class ClockAlignment(NamedTuple):
    """The conversion of one clock into the time of the job.

    `samples` are offsets, between which it is interpolated. `uncertainty` is in ns; it is None if only the
    times of day of two hosts were compared, which may differ by any time.
    """

    samples: list[ClockSample]
    uncertainty: int | None

    def apply(self, times: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Convert times of the clock into times of the job."""
        at, offsets = [one.at for one in self.samples], [one.offset for one in self.samples]
        times = times.astype(np.int64)
        base = offsets[0]  # floats hold differences between hosts, not times since they were started
        between = np.interp(times - at[0], np.subtract(at, at[0]), np.subtract(offsets, base))
        aligned: npt.NDArray[np.int64] = times + base + np.rint(between).astype(np.int64)
        return aligned


def align_clocks(files: Sequence[ProcessTrace]) -> list[ClockAlignment]:
    """Return the alignment of the clock of each file."""
    clocks: dict[str, list[ProcessTrace]] = defaultdict(list)
    for file in files:
        clocks[_clock_name(file)].append(file)
    found = {name: _by_scheduler(of_clock) for name, of_clock in clocks.items()}
    if not any(found.values()):  # there is no scheduler: the clock of most processes is the job's
        found[max(clocks, key=lambda name: len(clocks[name]))] = _SAME
    reference, base = next((clocks[name][0], one) for name, one in found.items() if one is not None)
    all_ = {name: one or _by_time_of_day(clocks[name][0], reference, base) for name, one in found.items()}
    return [all_[_clock_name(file)] for file in files]


_SAME = ClockAlignment([ClockSample(0, 0, 0)], 0)


def _clock_name(file: ProcessTrace) -> str:
    return file.clock or f"of {file.host}"


def _by_scheduler(files: list[ProcessTrace]) -> ClockAlignment | None:
    """Align a clock with the scheduler's by the comparisons of the processes that have it."""
    if any(file.role == "scheduler" for file in files):
        return _SAME
    samples = sorted(ClockSample(*sample) for file in files for sample in file.scheduler)
    best: dict[int, ClockSample] = {}
    for sample in samples:
        window = (sample.at - samples[0].at) // _WINDOW
        best[window] = min(best.get(window, sample), sample, key=lambda one: one.uncertainty)
    return ClockAlignment([*best.values()], max(one.uncertainty for one in best.values())) if best else None


def _by_time_of_day(file: ProcessTrace, reference: ProcessTrace, base: ClockAlignment) -> ClockAlignment:
    """Align a clock that was not compared: hosts agree approximately on the time of day."""
    there = int(base.apply(np.array([reference.monotonic]))[0])
    offset = file.realtime - reference.realtime + there - file.monotonic
    return ClockAlignment([ClockSample(0, offset, 0)], None)
