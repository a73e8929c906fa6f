"""Known faults: a letter, the stores that have it, and what is not drawn for them."""

from __future__ import annotations

from collections.abc import Sequence

_ON_SERVERS = ("dist_sync:1", "dist_device_sync:1", "dist_sync:3", "p3", "hosts")

LEFT_OUT: dict[str, tuple[tuple[str, ...], str]] = {
    "L": (
        ("shared", *_ON_SERVERS),
        "set_optimizer by one worker, before another changes or saves what it set",
    ),
    "M": (("shared", *_ON_SERVERS), "a load without a barrier before it"),
    "O": (("shared", *_ON_SERVERS), "a save without a barrier after it"),
    "P": (("hosts",), "a rule that needs whole keys, with compression"),
}


def may(letter: str, stores: Sequence[str]) -> bool:
    """Whether programs for these stores may have what a letter stands for."""
    return letter not in LEFT_OUT or set(LEFT_OUT[letter][0]).isdisjoint(stores)
