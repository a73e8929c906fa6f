"""The access of a process to GPUs: none before its first array on a GPU, then `staging`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..entry import Array
from .native import _shared as shm

if TYPE_CHECKING:
    from .staging import GpuStaging

Handle = shm.Handle
Dense = list[tuple[Handle, list[Array]]]


class NoStaging:
    """The access of a process that has met no array on a GPU: it stages nothing."""

    in_use = packs = False

    def wait_staged(self, handle: Handle) -> None:
        """Return at once: no copy was begun."""

    def discard_staged(self) -> None:
        """Return at once: no copy was begun."""

    def split_gpu(self, dense: Dense) -> tuple[Dense, Dense]:
        """Return no pairs for GPUs, and all for the host."""
        return [], dense

    def is_on_gpu(self, handle: Handle) -> bool:
        """Return False: no value is on a GPU."""
        return False

    def may_be_pushed_on_gpu(self, handle: Handle) -> bool:
        """Return False: no worker pushes from GPU to GPU."""
        return False

    def copy_to_region(self, handle: Handle) -> None:
        """Return at once: every value is in the region."""

    def note_overwritten(self, handle: Handle) -> None:
        """Return at once: no GPU has a value of the key."""

    def close(self) -> None:
        """Return at once: no copy is in progress."""


class GpuAccess:
    """The access to the GPUs of one process."""

    def __init__(self, job: shm.Job, rank: int, ipc: bool) -> None:
        self._job, self._rank, self._ipc = job, rank, ipc
        self.staging: NoStaging | GpuStaging = NoStaging()

    def staging_in_use(self) -> GpuStaging:
        """Return the staging of arrays on GPUs; the first call makes it."""
        if isinstance(self.staging, NoStaging):
            from .staging import GpuStaging

            made = GpuStaging(self._job, self._rank, self._ipc)
            made.packs, self.staging = self.staging.packs, made
        return self.staging

    def close(self) -> None:
        """Wait for the copies in progress, and free the memory of GPUs."""
        staging, self.staging = self.staging, NoStaging()
        staging.close()
