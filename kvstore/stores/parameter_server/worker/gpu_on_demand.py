"""What brings arrays of GPUs to the host and back: made, and its modules loaded, when the first one comes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....settings.options import StoreConfig

if TYPE_CHECKING:
    from .gpu import GpuTransfer


class GpuOnDemand:
    """The `GpuTransfer` of one store."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._transfer: GpuTransfer | None = None

    def get(self) -> GpuTransfer:
        """Return it; the first call makes it."""
        if self._transfer is None:
            from .gpu import GpuTransfer

            self._transfer = GpuTransfer(self._config)
        return self._transfer

    def close(self) -> None:
        """Give the GPUs' memory back."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()
