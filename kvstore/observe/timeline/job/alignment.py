"""One time for all processes of a job: that of the scheduler, or of the clock that most of them have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..clocks import ClockSample
from ..process_file import ProcessFile

Times = npt.NDArray[np.int64]

_WINDOW = 60_000_000_000  # ns; of the comparisons within so much time the best one counts


class Alignment(NamedTuple):
    """How one clock becomes the time of the job.

    Attributes
    ----------
    samples : list of ClockSample
        Offsets, between which it is interpolated.
    uncertainty : int or None
        ns; None where only the times of day of two hosts tell, which may differ by any time.
    """

    samples: list[ClockSample]
    uncertainty: int | None

    def apply(self, times: npt.NDArray[Any]) -> Times:
        """Return times of the clock as times of the job."""
        at, offsets = [one.at for one in self.samples], [one.offset for one in self.samples]
        times = times.astype(np.int64)
        base = offsets[0]  # floats hold differences of hosts, not times since their start
        between = np.interp(times - at[0], np.subtract(at, at[0]), np.subtract(offsets, base))
        aligned: Times = times + base + np.rint(between).astype(np.int64)
        return aligned


def align(files: Sequence[ProcessFile]) -> list[Alignment]:
    """Return the alignment of each file's clock."""
    clocks: dict[str, list[ProcessFile]] = defaultdict(list)
    for file in files:
        clocks[_clock(file)].append(file)
    found = {name: _measured(of_clock) for name, of_clock in clocks.items()}
    if not any(found.values()):  # no scheduler: the clock of most processes is the job's
        found[max(clocks, key=lambda name: len(clocks[name]))] = _exact()
    known = next(name for name, one in found.items() if one is not None)
    reference, base = clocks[known][0], found[known]
    assert base is not None
    result = {name: one or _by_time_of_day(clocks[name][0], reference, base) for name, one in found.items()}
    return [result[_clock(file)] for file in files]


def _clock(file: ProcessFile) -> str:
    return file.clock or f"of {file.host}"


def _exact() -> Alignment:
    return Alignment([ClockSample(0, 0, 0)], 0)


def _measured(files: list[ProcessFile]) -> Alignment | None:
    """Align a clock to the scheduler's, by what the processes that have it have measured."""
    if any(file.role == "scheduler" for file in files):
        return _exact()
    samples = sorted(sample for file in files for sample in file.scheduler)
    if not samples:
        return None
    windows: dict[int, list[ClockSample]] = defaultdict(list)
    for sample in samples:
        windows[(sample.at - samples[0].at) // _WINDOW].append(sample)
    best = [min(window, key=lambda one: one.uncertainty) for window in windows.values()]
    return Alignment(best, max(one.uncertainty for one in best))


def _by_time_of_day(file: ProcessFile, reference: ProcessFile, base: Alignment) -> Alignment:
    """Align a clock that was compared with no other: hosts agree on the time of day, more or less."""
    there = int(base.apply(np.array([reference.monotonic]))[0])
    offset = file.realtime - reference.realtime + there - file.monotonic
    return Alignment([ClockSample(0, offset, 0)], None)
