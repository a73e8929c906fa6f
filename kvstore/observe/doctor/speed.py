"""Speeds of this machine: copies of memory, a local store beside them, and a small round trip."""

from __future__ import annotations

from . import children
from .findings import Finding
from .workers import COPIED

_DEADLINE = 120.0
_CURE = "see the self-tests; `kvstore doctor` without --speed does not need this"


def copies() -> list[Finding]:
    """Measure one thread that copies 64 MB, and a push and a pull of the same array."""
    subject = "speed of memory"
    ran = children.run([*children.JOB, "copies"], _DEADLINE)
    found = _numbers(ran)
    if len(found) != 3:
        return [Finding(subject, "error", ran.reason, _CURE)]
    copied, moved, threads = found
    one = f"one thread copies 64 MB at {COPIED / copied / 1e9:.1f} GB/s"
    ratio = f"{2 * copied / moved:.2f} times that speed, with {threads:.0f} threads"
    both = f"a push and a pull of 64 MB take {moved * 1e3:.1f} ms: {ratio}"
    return [Finding(subject, "ok", one), Finding("speed of local", "ok", both)]


def round_trip() -> Finding:
    """Measure a pushpull of 4 KB between a worker and a server on this machine."""
    ran = children.run([*children.with_a_server(1), "round-trip"], _DEADLINE)
    found = _numbers(ran)
    if len(found) != 1:
        return Finding("speed of dist_sync", "error", ran.reason, _CURE)
    text = f"a pushpull of 4 KB over one server takes {found[0] * 1e6:.0f} µs (median)"
    return Finding("speed of dist_sync", "ok", text)


def _numbers(ran: children.Ran) -> list[float]:
    """Read what the program has printed; nothing if it failed."""
    lines = [line for line in ran.out.splitlines() if line.startswith("seconds ")]
    return [float(word) for word in lines[0].split()[1:]] if lines and ran.code == 0 else []
