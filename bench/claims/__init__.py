"""Claims: their peers, and their tables."""

from __future__ import annotations

import importlib

from bench.runner.claim import Claim

#: The claims of ``python -m bench``.
NAMES = (
    *("local", "shared", "compression", "convergence"),
    *("many-keys", "dist", "dist-keys", "dist-workers", "dist-hosts", "hosts"),
    *("device", "training", "observe", "scale"),
)


def find(name: str) -> Claim:
    """Import a claim by its name; each claim needs different packages."""
    claim: Claim = importlib.import_module(f"bench.claims.{name.replace('-', '_')}").CLAIM
    return claim
