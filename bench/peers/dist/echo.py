"""Processes that send back what they get: the first worker starts them, and they end with it."""

from __future__ import annotations

import os
from collections.abc import Callable

from bench.peers.worker import die_with_parent


def fork(serve: Callable[[], object]) -> int:
    """Run `serve` in a process of its own, which ends when this one does; return its number."""
    if pid := os.fork():
        return pid
    try:
        die_with_parent()
        serve()
    finally:
        os._exit(1)
