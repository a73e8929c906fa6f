"""The files in a folder: those of one job, and notes about those that are missing or left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ....errors import StateFileError
from ...processes import ORDER, process_name
from ..process_trace import FORMAT, ProcessTrace, read

_HEAD = 256  # bytes within which a file names its format


class JobFiles(NamedTuple):
    """The files of one job, workers first, each role by rank, and notes for the reader of the report."""

    files: list[ProcessTrace]
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
    files.sort(key=lambda file: (ORDER.get(file.role, 3), file.rank, file.monotonic))
    return JobFiles(files, [*notes, *_missing(files, bool(notes)), *_overwritten(files)])


def _read_all(folder: Path) -> tuple[list[ProcessTrace], list[str]]:
    """Read all files; of each process one, even if there are copies."""
    found: dict[tuple[object, ...], ProcessTrace] = {}
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
            process = one.role, one.rank, one.host, one.pid, one.clock, one.job
            other = found.setdefault(process, one)
            if other is not one:
                notes.append(f"{path.name} and another file are of the same process: the newer one counts")
                found[process] = max(other, one, key=lambda file: file.monotonic)
    return list(found.values()), notes


def _read(path: Path) -> ProcessTrace | str | None:
    """Read a file; return a note if it is damaged, and None if it is no file of a process."""
    try:
        with path.open("rb") as file:
            is_ours = f'"{FORMAT}"'.encode() in file.read(_HEAD)
        return read(path) if is_ours else None
    except (OSError, ValueError) as error:
        return f"{path.name} is left out: {error}"


def _missing(files: Sequence[ProcessTrace], some_left_out: bool) -> list[str]:
    """Name the processes of the job that have no file, or several."""
    notes = []
    reasons = "killed, or not written yet, or left on another host" + ", or left out" * some_left_out
    sizes = {"worker": [file.workers for file in files], "server": [file.servers for file in files]}
    for role, counts in sizes.items():
        ranks = Counter(file.rank for file in files if file.role == role)
        size = max([*counts, *(file.size for file in files if file.role == role)], default=0)
        if without := sorted(set(range(size)) - set(ranks)):
            notes.append(f"no file of {role} {', '.join(map(str, without))}: {reasons}")
        notes += [f"{role} {rank} has {n} files: it was started again" for rank, n in ranks.items() if n > 1]
    if any(sizes["server"]) and all(file.role != "scheduler" for file in files):
        notes.append(f"no file of the scheduler: {reasons}")
    return notes


def _overwritten(files: Sequence[ProcessTrace]) -> list[str]:
    return [
        f"{process_name(file.role, file.rank)} has only its last events: {file.overwritten} older ones were "
        "overwritten"
        for file in files
        if file.overwritten
    ]
