"""The files of a folder of checkpoints: their names, the newest complete one, and the removal of old ones."""

from __future__ import annotations

import errno
import logging
import os
import re

from ..atomic_files import checked_path, read_error
from ..errors import ConfigError, StateFileError
from . import file

log = logging.getLogger("kvstore")

_NAME = re.compile(r"step-(\d{8}|[1-9]\d{8,})\.safetensors")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.safetensors\.[0-9a-f]{12}\.tmp")


class CheckpointFolder:
    """A folder with a file for each step; files with other names are ignored."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = checked_path(path)
        self._damaged: set[int] = set()
        try:
            os.makedirs(self.path, exist_ok=True)
            self._remove_abandoned()
        except FileExistsError as error:
            told = NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), self.path)
            raise read_error(self.path, told) from error
        except OSError as error:
            raise read_error(self.path, error) from error

    def _remove_abandoned(self) -> None:
        """Remove unfinished files of dead writers."""
        for name in os.listdir(self.path):
            if _UNFINISHED.fullmatch(name):
                file.remove_if_abandoned(os.path.join(self.path, name))

    def file_of(self, step: int) -> str:
        """Return the path of a step's file."""
        return os.path.join(self.path, f"step-{step:08d}.safetensors")

    def steps(self) -> list[int]:
        """Return the steps that have files, from the lowest on."""
        try:
            found = [_NAME.fullmatch(name) for name in os.listdir(self.path)]
        except OSError as error:
            raise read_error(self.path, error) from error
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> int | None:
        """Return the newest step whose file is complete; warn about each damaged file, once."""
        for step in reversed(self.steps()):
            if self._is_whole(step):
                return step
        return None

    def newest_whole(self) -> str:
        """Return the path of the newest complete file.

        Raises
        ------
        StateFileError
            No file is complete: training must not start again without an error.
        """
        step = self.newest()
        if step is None:
            raise StateFileError(
                f"all checkpoints in {self.path} are damaged: restore the folder from a copy, or remove the "
                "files to begin anew"
            )
        return self.file_of(step)

    def _is_whole(self, step: int) -> bool:
        path = self.file_of(step)
        try:
            whole = file.is_whole(path)
        except FileNotFoundError:  # another manager has just removed it
            return False
        if not whole and step not in self._damaged:
            self._damaged.add(step)
            log.warning("%s is damaged (its SHA-256 is wrong, or it is not a file) and is skipped", path)
        return whole

    def check_whole(self, step: int) -> str:
        """Return the path of a step's file.

        Raises
        ------
        StateFileError
            The file does not exist, or is damaged.
        """
        path = self.file_of(step)
        if not file.is_whole(path):
            raise StateFileError(
                f"{path} is damaged: its SHA-256 is wrong, or it is not a file. Restore another step"
            )
        return path

    def check_newest(self, step: int) -> None:
        """Raise ConfigError if the folder has files of later steps, which a restore would load instead."""
        later = [other for other in self.steps() if other > step and other not in self._damaged]
        if later:
            raise ConfigError(
                f"step {step} is saved where {self.file_of(later[-1])} exists, which would be restored "
                "instead: restore it first, remove it, or use another folder"
            )

    def rotate(self, written: int, keep: int | None) -> None:
        """Remove files older than the newest `keep` up to the file just written.

        Damaged files do not count.
        """
        self._damaged.discard(written)
        if keep is None:
            return
        good = [step for step in self.steps() if step not in self._damaged and step <= written]
        for step in self.steps():
            if step < min(good[-keep:], default=0):  # 0: another manager has removed the file
                self._remove_step(step)

    def _remove_step(self, step: int) -> None:
        try:
            os.unlink(self.file_of(step))
        except FileNotFoundError:  # another manager has removed it
            return
        except OSError as error:
            log.warning("%s is an old checkpoint, and cannot be removed: %s", self.file_of(step), error)
