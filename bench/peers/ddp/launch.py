"""How the workers that train are started."""

from __future__ import annotations

from bench.peers.shared.launch import SharedGroup


class DdpGroup(SharedGroup):
    """Two processes with torch, gloo and a `shared` store, which train in the way that they are told."""

    def column(self, variant: str) -> str:
        """Each way is a column."""
        return variant
