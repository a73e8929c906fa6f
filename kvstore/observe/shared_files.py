"""Files of shared memory that an MPI leaves if its processes are killed."""

from __future__ import annotations

import re
from pathlib import Path

_NAMES = re.compile(r" (/dev/shm/(?:mpich_shm_|sm_segment|vader_segment)\S+)$", re.MULTILINE)


def shared_files(process: int | str = "self") -> set[str]:
    """Return those that a process has mapped; none if it has ended."""
    try:
        return set(_NAMES.findall(Path(f"/proc/{process}/maps").read_text(errors="replace")))
    except OSError:
        return set()
