"""Files that are replaced atomically: a reader finds the old content or the new one, also after a failure."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

from .errors import ArgumentError, StateFileError

if TYPE_CHECKING:
    from pathlib import Path


def _system_error_class(kind: type[OSError]) -> type[StateFileError]:
    """Make the error class of a failed system call: a subclass of KVStoreError and of the built-in error."""
    shown = {"__module__": StateFileError.__module__, "__doc__": StateFileError.__doc__}
    return type(StateFileError.__name__, (StateFileError, kind), shown)


def read_error(path: str | os.PathLike[str], error: OSError) -> StateFileError:
    """Make the error for a file that cannot be read; it is also the OSError of the system."""
    reason = error.strerror or str(error)
    return _as_system(path, error, f"{os.fsdecode(path)} cannot be read: {reason}. Nothing has changed")


def _as_system(path: str | os.PathLike[str], error: OSError, text: str) -> StateFileError:
    kind = type(error)
    told: Any = _system_error_class(kind if kind.__module__ == OSError.__module__ else OSError)(text)
    told.errno, told.strerror, told.filename = error.errno, error.strerror, os.fsdecode(path)
    return told  # type: ignore[no-any-return]


def checked_path(path: Any) -> str:
    """Return the path that a caller passed, as a str.

    Raises
    ------
    ArgumentError
        It is no path.
    StateFileError
        No file can have that name.
    """
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise ArgumentError(
            f"the name of a file must be a str, bytes or os.PathLike, not {type(path).__name__}: {path!r}"
        ) from None
    try:
        valid = b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        valid = False
    if not valid or not name:
        raise StateFileError(f"no file can be called {name!r}: give it another name")
    return name


def open_regular_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read, without waiting for the writer of a pipe.

    Raises
    ------
    OSError
        The file cannot be opened, or is a folder, a pipe or a device: then `errno` is EISDIR or EINVAL.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "this is not a regular file", os.fspath(path))


@contextmanager
def atomic_replacement(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a context with a temporary path in the folder of `path`; at its end that file replaces `path`.

    The content is synchronised to the disk first. If `path` is a symbolic link, its target is replaced; the
    permissions of a replaced file are kept. If the body or the disk fails, the temporary file is removed; a
    process that is killed in the body leaves a file ``.NAME.*.tmp``.

    Raises
    ------
    StateFileError
        A system call failed, also one in the body. The error names `path`, and is also the OSError of the
        system. If `has_new_content` is True for it, the file has its new content, and only its folder was not
        synchronised.
    """
    try:
        with _atomic_replacement(path) as beside:
            yield beside
    except OSError as error:
        raise _write_error(os.fsdecode(path), error) from error
    _sync_folder(path)


def has_new_content(error: Exception) -> bool:
    """Return whether the file has its new content although `atomic_replacement` has raised this error."""
    return bool(getattr(error, "has_new_content", False))


def _sync_folder(path: str | os.PathLike[str]) -> None:
    """Synchronise the folder of a new name, on file systems that support this."""
    from pathlib import Path

    try:
        _sync_file(Path(path).resolve().parent, os.O_RDONLY)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return
        why = f"its folder cannot be synchronised: {error.strerror}"
        text = f"{os.fsdecode(path)} is written, but {why}; if the machine fails, the old file may be back"
        told: Any = _as_system(path, error, text)
        told.has_new_content = True
        raise told from error


def _write_error(path: str, error: OSError) -> StateFileError:
    reason, folder = error.strerror or str(error), os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        reason = f"there is no folder {folder!r}; create it first"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        reason += "; free space, or use another path"
    return _as_system(path, error, f"{path} cannot be written: {reason}. An existing file is unchanged")


@contextmanager
def _atomic_replacement(path: str | os.PathLike[str]) -> Iterator[Path]:
    from pathlib import Path

    target = Path(path).resolve()
    name = os.fsencode(target.name)[:200].decode(errors="ignore")  # a name has at most 255 bytes
    beside = target.with_name(f".{name}.{os.urandom(6).hex()}.tmp")
    mode = _mode_of(target)
    try:
        usual = _create_file(beside)
        mode = usual if mode is None else mode
        yield beside
        beside.chmod(stat.S_IMODE(mode))
        _sync_file(beside, os.O_RDWR)
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)


def _create_file(path: Path) -> int:
    """Create a file.

    Return its mode, read from the descriptor because the name may have been removed already.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        return os.fstat(descriptor).st_mode
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------- checked texts

_SEALED = b'{"checksum":"%08x","content":%b}\n'
_BEFORE = len(_SEALED % (0, b"")) - 2  # length of the head in bytes; two more bytes follow the content


def with_checksum(content: bytes) -> bytes:
    """Return a JSON object of a JSON text and its CRC-32."""
    import zlib

    return _SEALED % (zlib.crc32(content), content)


def without_checksum(data: bytes) -> bytes:
    """Return the text that was passed to `with_checksum`.

    Raises
    ------
    StateFileError
        The text does not match its checksum, or has none.
    """
    content = data[_BEFORE:-2]
    if data != with_checksum(content):
        raise StateFileError(
            "its checksum is wrong: it is damaged, or an earlier version of kvstore has written it without "
            "one"
        )
    return content


def read_with_checksum(path: str | os.PathLike[str]) -> bytes:
    """Return the text of a file of `write_with_checksum`; the errors are those of `without_checksum`.

    The error for a file that cannot be read is also the OSError of the system.
    """
    try:
        with open_regular_file(path) as file:
            data = file.read()
    except OSError as error:
        raise read_error(path, error) from error
    try:
        return without_checksum(data)
    except StateFileError as error:
        raise StateFileError(f"{os.fsdecode(path)}: {error}") from None


def write_with_checksum(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a text with its checksum to a file; the errors are those of `atomic_replacement`."""
    with atomic_replacement(path) as beside:
        beside.write_bytes(with_checksum(content))


# ----------------------------------------------------------------------------------------------------- steps


def _mode_of(target: Path) -> int | None:
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "this is not a regular file, so it is not replaced", os.fspath(target))
    return mode


def _sync_file(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
