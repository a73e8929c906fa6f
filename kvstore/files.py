"""Files that are replaced in one step: a reader finds the old content or the new one, whatever happens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a new path beside `path` to write to; in the end it takes the place of `path`.

    By then its content has reached the disk. A symbolic link keeps pointing where it did. If the body or
    the disk fails, nothing is left behind.
    """
    target = Path(path).resolve()
    beside = target.with_name(f".{target.name}.{os.urandom(6).hex()}.tmp")
    try:
        yield beside
        _sync(beside, os.O_RDWR)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
    _sync(target.parent, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
