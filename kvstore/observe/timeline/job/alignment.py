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


class Alignment(NamedTuple):
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


def align(files: Sequence[ProcessTrace]) -> list[Alignment]:
    """Return the alignment of the clock of each file."""
    clocks: dict[str, list[ProcessTrace]] = defaultdict(list)
    for file in files:
        clocks[_clock(file)].append(file)
    found = {name: _measured(of_clock) for name, of_clock in clocks.items()}
    if not any(found.values()):  # there is no scheduler: the clock of most processes is the job's
        found[max(clocks, key=lambda name: len(clocks[name]))] = _exact()
    reference, base = next((clocks[name][0], one) for name, one in found.items() if one is not None)
    all_ = {name: one or _by_time_of_day(clocks[name][0], reference, base) for name, one in found.items()}
    return [all_[_clock(file)] for file in files]


def _clock(file: ProcessTrace) -> str:
    return file.clock or f"of {file.host}"


def _exact() -> Alignment:
    return Alignment([ClockSample(0, 0, 0)], 0)


def _measured(files: list[ProcessTrace]) -> Alignment | None:
    """Align a clock with the scheduler's by the comparisons of the processes that have it."""
    if any(file.role == "scheduler" for file in files):
        return _exact()
    samples = sorted(ClockSample(*sample) for file in files for sample in file.scheduler)
    if not samples:
        return None
    windows: dict[int, list[ClockSample]] = defaultdict(list)
    for sample in samples:
        windows[(sample.at - samples[0].at) // _WINDOW].append(sample)
    best = [min(window, key=lambda one: one.uncertainty) for window in windows.values()]
    return Alignment(best, max(one.uncertainty for one in best))


def _by_time_of_day(file: ProcessTrace, reference: ProcessTrace, base: Alignment) -> Alignment:
    """Align a clock that was not compared: hosts agree approximately on the time of day."""
    there = int(base.apply(np.array([reference.monotonic]))[0])
    offset = file.realtime - reference.realtime + there - file.monotonic
    return Alignment([ClockSample(0, offset, 0)], None)
