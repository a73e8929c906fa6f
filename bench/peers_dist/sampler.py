"""Looks at the threads of its own process, while the bench says so: see `bench.dist_profile`."""

from __future__ import annotations

import json
import mmap
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

VARIABLE = "KVSTORE_BENCH_SAMPLES"
IDLE, SAMPLING, TELLING = range(3)
_TICK = 0.001  # seconds


def start() -> None:
    """Start the thread that looks, if a folder is named; not in the launcher, which does nothing but wait."""
    folder = os.environ.get(VARIABLE, "")
    if folder and "run" not in sys.orig_argv[1:4]:
        threading.Thread(target=_sample, args=(Path(folder),), name="sampler", daemon=True).start()


def _sample(folder: Path) -> None:
    with open(folder / "control", "rb") as control:
        state = mmap.mmap(control.fileno(), 1, prot=mmap.PROT_READ)
    lines, functions, ticks = Counter[str](), Counter[str](), 0
    while True:
        time.sleep(_TICK)
        if state[0] == SAMPLING:
            ticks += 1
            _look(lines, functions)
        elif state[0] == TELLING and ticks:
            _tell(folder, {"ticks": ticks, "lines": lines, "functions": functions})
            lines, functions, ticks = Counter(), Counter(), 0


def _look(lines: Counter[str], functions: Counter[str]) -> None:
    """Count where each other thread is, and all functions that it is in."""
    own = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, top in sys._current_frames().items():
        if ident == own:
            continue
        thread = names.get(ident, "thread")
        lines[f"{thread}: {_where(top)}:{top.f_lineno} {top.f_code.co_name}"] += 1
        frame: FrameType | None = top
        within = set()
        while frame is not None:
            within.add(f"{thread}: {_where(frame)} {frame.f_code.co_name}")
            frame = frame.f_back
        functions.update(within)


def _where(frame: FrameType) -> str:
    return "/".join(Path(frame.f_code.co_filename).parts[-2:])


def _tell(folder: Path, found: dict[str, object]) -> None:
    written = folder / f"{os.getpid()}.writing"
    written.write_text(json.dumps(found))
    written.rename(folder / f"{os.getpid()}.json")
