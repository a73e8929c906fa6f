"""The progress of a DistributedOptimizer: its steps, and the passes since the last one."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import KVStoreError


@dataclass(slots=True)
class OptimizerProgress:
    """The steps of an optimizer, and the backward passes since the last one."""

    #: Number of completed steps.
    steps: int = 0
    #: Number of passes since the last step that were not in `no_sync`.
    passes_ended: int = 0
    #: Whether the current pass has accumulated a gradient.
    has_gradients: bool = False
    #: Whether the gradients are those of all workers.
    is_exchanged: bool = False
    #: Whether the last pass was in `no_sync`.
    has_local_passes: bool = False
    #: Whether the program is in `no_sync`.
    is_paused: bool = False
    #: Whether the workers differ, so that no further step is correct.
    error: KVStoreError | None = None

    def begin_step(self) -> None:
        """Reset the counts of passes."""
        self.passes_ended = 0
        self.has_gradients = self.is_exchanged = self.has_local_passes = False
