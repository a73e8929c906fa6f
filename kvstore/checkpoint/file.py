"""One safetensors file that ends with a digest of all bytes before it, and that its writer locks.

The last tensor is called ``sha256`` and has 32 bytes: the SHA-256 of all bytes before them (``head -c -32
FILE | sha256sum``). The safetensors library does not write the file, because it first copies each array, and
blocks all other threads during that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..atomic_files import atomic_replacement, open_regular_file, read_error
from ..errors import KeyKindError

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"

DIGEST = "sha256"
_DIGEST_BYTES = 32
_PIECE = 4 << 20  # bytes between two points at which other threads can run
_TYPES = {
    "bool": "BOOL",
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}


# ------------------------------------------------------------------------------------------------ writing


def write_tensors(path: str, head: bytes, tensors: Mapping[str, Array], tell: Callable[[int], None]) -> None:
    """Write a file atomically: the result of `file_header`, and the tensors.

    `tell` is called with the size of each written piece in bytes.

    Raises
    ------
    StateFileError
        A system call failed; an older file is unchanged.
    """
    with contextlib.ExitStack() as held, atomic_replacement(path) as beside:
        descriptor = _open_locked(beside)
        held.callback(os.close, descriptor)  # and unlock, after the file has its name
        digest = hashlib.sha256()
        for piece in _file_pieces(head, tensors):
            digest.update(piece)
            _write_all(descriptor, piece)
            tell(len(piece))
        _write_all(descriptor, memoryview(digest.digest()))


def file_header(metadata: Mapping[str, str], tensors: Mapping[str, Array]) -> bytes:
    """Return the head of the file.

    Raises
    ------
    KeyKindError
        A name has characters that the file cannot represent.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in _in_order(tensors):
        begin, end = end, end + array.nbytes
        entries[name] = {
            "dtype": _TYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [begin, end],
        }
    entries[DIGEST] = {"dtype": "U8", "shape": [_DIGEST_BYTES], "data_offsets": [end, end + _DIGEST_BYTES]}
    try:
        text = json.dumps(entries, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise KeyKindError(f"a key has characters that no file can hold: {error}") from error
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _in_order(tensors: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """Return the tensors in an order that aligns all of them."""
    return sorted(tensors.items(), key=lambda item: -item[1].itemsize)


def _file_pieces(head: bytes, tensors: Mapping[str, Array]) -> Iterator[memoryview]:
    yield memoryview(head)
    for _, array in _in_order(tensors):
        if array.size:
            content = array.reshape(-1).view(np.uint8).data
            yield from (content[at : at + _PIECE] for at in range(0, len(content), _PIECE))


def _write_all(descriptor: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(descriptor, piece) :]


# ----------------------------------------------------------------------------------------------- the lock


def _open_locked(path: str | os.PathLike[str]) -> int:
    """Open and lock a new file; repeat this if another process has removed the file before it was locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        _lock_file(descriptor, fcntl.LOCK_EX)
        if _is_at(path, descriptor):
            return descriptor
        os.close(descriptor)


def remove_if_abandoned(path: str | os.PathLike[str]) -> bool:
    """Remove an unfinished file unless its writer is alive; return whether it is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        if not _lock_file(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        if _is_at(path, descriptor):
            os.unlink(path)
        return True
    finally:
        os.close(descriptor)


def _lock_file(descriptor: int, how: int) -> bool:
    """Lock a file; return False if another process has locked it, or the file system has no locks."""
    try:
        fcntl.flock(descriptor, how)
    except OSError:
        return False
    return True


def _is_at(path: str | os.PathLike[str], descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------ reading


def is_whole(path: str) -> bool:
    """Return whether the file ends with the digest of all bytes before it; reads the whole file.

    Raises
    ------
    StateFileError
        The file cannot be read.
    """
    try:
        with open_regular_file(path) as file:
            left = os.fstat(file.fileno()).st_size - _DIGEST_BYTES
            digest = hashlib.sha256()
            while left > 0 and (piece := file.read(min(left, _PIECE))):
                digest.update(piece)
                left -= len(piece)
            return left == 0 and file.read() == digest.digest()
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.ELOOP):
            return False  # a folder, a pipe, a socket, a link to itself: not a checkpoint
        raise read_error(path, error) from error
