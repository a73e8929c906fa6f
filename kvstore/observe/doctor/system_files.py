"""Files of /proc and /sys, below a folder that tests choose."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/")


def text(path: Path) -> str | None:
    """Return the content of a file without the blanks around it; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def number(path: Path) -> int | None:
    """Return the integer in a file; None if it holds anything else."""
    found = text(path)
    return int(found) if found and re.fullmatch(r"-?[0-9]+", found) else None


def chosen(path: Path) -> str | None:
    """Return the word that the kernel writes in brackets: ``always [madvise] never``."""
    match = re.search(r"\[(\w+)\]", text(path) or "")
    return match[1] if match else None


def field(path: Path, name: str) -> str | None:
    """Return the value in a line such as ``CapEff: 0000000000080000``."""
    match = re.search(rf"^{name}:\s+(.*)$", text(path) or "", re.MULTILINE)
    return match[1] if match else None


def kilobytes(path: Path, name: str) -> int | None:
    """Return the bytes of a line such as ``MemTotal:  123 kB``."""
    value = (field(path, name) or "").removesuffix(" kB")
    return int(value) << 10 if value.isdecimal() else None


def size(nbytes: int) -> str:
    """Return a number of bytes with its binary unit."""
    for unit, shift in (("GB", 30), ("MB", 20), ("KB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f}".removesuffix(".0") + f" {unit}"
    return f"{nbytes} bytes"
