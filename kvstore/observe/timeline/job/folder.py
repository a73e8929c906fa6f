"""The files in a folder: those of one job, and what has to be said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ....errors import StateFileError
from ..process_file import FORMAT, ProcessFile, read
from ..sources import WORKER

_ORDER = {WORKER: 0, "server": 1, "scheduler": 2}
_HEAD = 256  # bytes in which a file says of what format it is


class JobFiles(NamedTuple):
    """The files of one job, workers first, each role by rank.

    Attributes
    ----------
    files : list of ProcessFile
    notes : list of str
        What is missing, and what was left out.
    """

    files: list[ProcessFile]
    notes: list[str]


def load(folder: Path) -> JobFiles:
    """Read the files of the job in `folder`; if there are several jobs, of the newest.

    Raises
    ------
    StateFileError
        There is no file of a timeline.
    """
    found, notes = _read_all(folder)
    if not found:
        raise StateFileError(
            f"{folder} has no timeline of any process: run the job with KVSTORE_TIMELINE={folder}, and give "
            f"the folder to which its files were written{''.join('; ' + note for note in notes)}"
        )
    newest = max(found, key=lambda file: file.realtime)
    files = [file for file in found if file.job == newest.job]
    if len(files) < len(found):
        notes.append(f"{len(found) - len(files)} files of other jobs are left out: only the newest is shown")
    files.sort(key=lambda file: (_ORDER.get(file.role, 3), file.rank, file.monotonic))
    return JobFiles(files, notes + missing(files, bool(notes)) + overwritten(files))


def _read_all(folder: Path) -> tuple[list[ProcessFile], list[str]]:
    """Read all files; of each process one, whatever copies of it there are."""
    found: dict[tuple[object, ...], ProcessFile] = {}
    notes = []
    try:
        paths = sorted(path for path in folder.glob("*.json") if path.is_file())
    except OSError as error:
        raise StateFileError(f"{folder} cannot be read: {error.strerror}") from error
    for path in paths:
        one = _read(path)
        if isinstance(one, str):
            notes.append(one)
        elif one is not None:
            other = found.setdefault(_process(one), one)
            if other is not one:
                notes.append(f"{path.name} and another file are of the same process: the newer one counts")
                found[_process(one)] = max(other, one, key=lambda file: file.monotonic)
    return list(found.values()), notes


def _process(file: ProcessFile) -> tuple[object, ...]:
    """Return what no two processes have in common."""
    return file.role, file.rank, file.host, file.pid, file.clock, file.job


def _read(path: Path) -> ProcessFile | str | None:
    """Read a file; None if it is of another format, and a note if it is damaged."""
    try:
        return read(path) if _is_ours(path) else None
    except (OSError, ValueError) as error:
        return f"{path.name} is left out: {error}"


def _is_ours(path: Path) -> bool:
    """Whether a file seems to be of a process; traces and reports may lie in the same folder."""
    with path.open("rb") as file:
        return f'"{FORMAT}"'.encode() in file.read(_HEAD)


def missing(files: Sequence[ProcessFile], some_left_out: bool = False) -> list[str]:
    """Name the processes of the job that have no file: they were killed, or have not written it yet."""
    notes = []
    reasons = "killed, or not written yet, or left on another host" + ", or left out" * some_left_out
    for role in (WORKER, "server"):
        of_role = [file for file in files if file.role == role]
        size = max(map(_size_of(role), files), default=0)
        without = sorted(set(range(size)) - {file.rank for file in of_role})
        if without:
            names = ", ".join(map(str, without))
            notes.append(f"no file of {role} {names}: {reasons}")
        counts = Counter(file.rank for file in of_role)
        notes += [f"{role} {rank} has {n} files: it was started again" for rank, n in counts.items() if n > 1]
    if any(file.servers for file in files) and all(file.role != "scheduler" for file in files):
        notes.append(f"no file of the scheduler: {reasons}")
    return notes


def _size_of(role: str) -> Callable[[ProcessFile], int]:
    """Return a function for how many processes of a role there are, as far as a file says."""

    def size(file: ProcessFile) -> int:
        told = file.workers if role == WORKER else file.servers
        return max(told, file.size) if file.role == role else told

    return size


def overwritten(files: Sequence[ProcessFile]) -> list[str]:
    """Say whose oldest events were too many."""
    return [
        f"{file.role} {file.rank} has only its last events: {file.overwritten} older ones were overwritten"
        for file in files
        if file.overwritten
    ]
