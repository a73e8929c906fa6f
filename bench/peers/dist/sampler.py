"""Samples of the threads of its own process, on request of the bench: see `bench.runner.profile`.

Either a thread records the positions of the other threads a thousand times a second, or cProfile counts and
times the calls of the main thread, which costs more but misses no call.
"""

from __future__ import annotations

import cProfile
import json
import mmap
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER, CALLS = "KVSTORE_BENCH_SAMPLES", "KVSTORE_BENCH_CALLS"
IDLE, SAMPLING, TELLING = range(3)
_TICK = 0.001  # seconds
_SWITCH = 0.0001  # seconds after which a thread passes the GIL to the sampling thread


def start() -> None:
    """Start the samples, if a folder is given; not in the launcher, which only waits."""
    folder = os.environ.get(FOLDER, "")
    if not folder or "run" in sys.orig_argv[1:4]:
        return
    watch: Samples | Calls = Calls() if os.environ.get(CALLS) else Samples()
    threading.Thread(target=_obey, args=(Path(folder), watch), name="sampler", daemon=True).start()


def _obey(folder: Path, watch: Samples | Calls) -> None:
    with open(folder / "control", "rb") as control:
        order = mmap.mmap(control.fileno(), 1, prot=mmap.PROT_READ)
    before = IDLE
    while True:
        time.sleep(_TICK)
        state = order[0]
        if state == SAMPLING:
            watch.look(first=before != SAMPLING)
        elif before == SAMPLING:
            _tell(folder, {"thread": threading.get_native_id(), "tables": watch.tables()})
        before = state


def _tell(folder: Path, found: dict[str, Any]) -> None:
    written = folder / f"{os.getpid()}.writing"
    written.write_text(json.dumps(found))
    written.rename(folder / f"{os.getpid()}.json")


class Samples:
    """The lines and functions of each thread, in shares of the time."""

    def __init__(self) -> None:
        sys.setswitchinterval(_SWITCH)

    def look(self, first: bool) -> None:
        if first:
            self.lines, self.functions, self.ticks = Counter[str](), Counter[str](), 0
        self.ticks += 1
        own = threading.get_ident()
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, top in sys._current_frames().items():
            if ident != own:
                self._count(names.get(ident, "thread"), top)

    def _count(self, thread: str, top: FrameType) -> None:
        self.lines[f"{thread}: {_short(top.f_code.co_filename)}:{top.f_lineno} {top.f_code.co_name}"] += 1
        frame: FrameType | None = top
        within = set()
        while frame is not None:
            within.add(f"{thread}: {_short(frame.f_code.co_filename)} {frame.f_code.co_name}")
            frame = frame.f_back
        self.functions.update(within)

    def tables(self) -> dict[str, list[list[str]]]:
        """Format the most frequent ones, without functions that never end."""
        ended = {name: count for name, count in self.functions.items() if count < 0.999 * self.ticks}
        return {"lines": self._shares(self.lines), "functions": self._shares(ended)}

    def _shares(self, counts: dict[str, int]) -> list[list[str]]:
        shares = sorted(counts.items(), key=lambda item: -item[1])
        return [[name, f"{100 * count / self.ticks:.1f} %"] for name, count in shares]


class Calls:
    """The calls of the main thread: counts, and times without and with callees."""

    def __init__(self) -> None:
        self.profile = cProfile.Profile()
        self.profile.enable()

    def look(self, first: bool) -> None:
        if first:
            self.before = self._now()

    def _now(self) -> dict[Any, tuple[int, float, float]]:
        self.profile.snapshot_stats()
        stats: dict[Any, Any] = vars(self.profile)["stats"]
        return {key: (row[1], row[2], row[3]) for key, row in stats.items()}

    def tables(self) -> dict[str, list[list[str]]]:
        """Format the increase, the longest first."""
        rows = []
        for (file, line, name), now in self._now().items():
            before = self.before.get((file, line, name), (0, 0.0, 0.0))
            calls, own, all_in_all = (a - b for a, b in zip(now, before, strict=True))
            if calls:
                rows.append((own, [f"{_short(file)}:{line} {name}", f"{calls}", _ms(own), _ms(all_in_all)]))
        return {"function": [row for _, row in sorted(rows, key=lambda row: -row[0])]}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-2:])
