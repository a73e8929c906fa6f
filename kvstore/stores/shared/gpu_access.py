"""What a process does for arrays on GPUs: nothing before it meets one, then what `staging` says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..entry import Array
from .native import _shared as shm

if TYPE_CHECKING:
    from .staging import GpuStaging

Handle = shm.Handle
Dense = list[tuple[Handle, list[Array]]]


class NoStaging:
    """Of a process that has met no array of a GPU: it stages nothing, and no value lies there."""

    in_use = packs = False

    def wait_staged(self, handle: Handle) -> None:
        """Nothing was begun."""

    def discard_staged(self) -> None:
        """Nothing was begun."""

    def split(self, dense: Dense) -> tuple[Dense, Dense]:
        """Everything is the host's."""
        return [], dense

    def is_on_gpu(self, handle: Handle) -> bool:
        """No value is."""
        return False

    def may_be_pushed_on_gpu(self, handle: Handle) -> bool:
        """No key may."""
        return False

    def copy_to_region(self, handle: Handle) -> None:
        """Every value is there."""

    def overwritten(self, handle: Handle) -> None:
        """Nobody has another value of it."""

    def close(self) -> None:
        """Nothing is under way."""


class GpuAccess:
    """The way to the GPUs of one process."""

    def __init__(self, job: shm.Job, rank: int, ipc: bool) -> None:
        self._job, self._rank, self._ipc = job, rank, ipc
        self.staging: NoStaging | GpuStaging = NoStaging()

    def use(self) -> GpuStaging:
        """Return what serves arrays on GPUs; it is made when the first is met."""
        if isinstance(self.staging, NoStaging):
            from .staging import GpuStaging

            made = GpuStaging(self._job, self._rank, self._ipc)
            made.packs, self.staging = self.staging.packs, made
        return self.staging

    def close(self) -> None:
        """Wait for the copies that are under way, and give the GPUs' side back."""
        staging, self.staging = self.staging, NoStaging()
        staging.close()
