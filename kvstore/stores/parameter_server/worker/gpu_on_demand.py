"""Creates the transfer of GPU arrays, and loads its modules, when the first such array is used."""

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

    def get_transfer(self) -> GpuTransfer:
        """Return the transfer, which the first call creates."""
        if self._transfer is None:
            from .gpu import GpuTransfer

            self._transfer = GpuTransfer(self._config)
        return self._transfer

    def close(self) -> None:
        """Release the memory of the GPUs."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.close()
