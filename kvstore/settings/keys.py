"""The CURVE keys of one process of a job: 40 characters (Z85) each, the format of ZeroMQ."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvstore.atomic_files import with_checksum, without_checksum
from kvstore.errors import ConfigError, StateFileError

_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MOST = 1 << 22  # bytes of a text of keys; the keys of 50,000 processes are smaller


@dataclass(frozen=True)
class JobKeys:
    """The keys with which a process authenticates itself and the other processes of its job.

    Attributes
    ----------
    public, secret : bytes
        The key pair of this process.
    scheduler : bytes
        Public key of the scheduler.
    servers : tuple of bytes
        Public keys of the servers, by their rank.
    allowed : tuple of bytes
        Public keys of all processes of the job; connections with other keys are refused.
    """

    public: bytes
    secret: bytes = field(repr=False)
    scheduler: bytes
    servers: tuple[bytes, ...]
    allowed: tuple[bytes, ...]

    def to_json(self) -> bytes:
        """Return the keys, also the secret key, as JSON with a checksum."""
        return with_checksum(json.dumps(asdict(self), default=bytes.decode).encode())

    @classmethod
    def from_json(cls, data: bytes) -> JobKeys:
        """Return the keys of a text that `to_json` has written.

        Raises
        ------
        ConfigError
            The text is not valid. The message does not repeat the text, which can contain a secret.
        """
        try:
            found = json.loads(data) if len(data) <= _MOST else None
            if isinstance(found, dict) and "content" in found:  # earlier versions wrote no checksum
                found = json.loads(without_checksum(data))
        except StateFileError as error:
            raise ConfigError(f"{error}; make new keys for all processes of the job") from None
        except (ValueError, RecursionError):
            found = None
        single, several = ("public", "secret", "scheduler"), ("servers", "allowed")
        if not isinstance(found, dict) or set(found) != {*single, *several}:
            raise ConfigError(f"keys must be a JSON object with {', '.join((*single, *several))}")
        public, secret, scheduler = (_parse_key(name, found[name]) for name in single)
        servers, allowed = (_parse_keys(name, found[name]) for name in several)
        return cls(public, secret, scheduler, servers, allowed)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> JobKeys:
        """Read the keys from an inherited file descriptor, which can be read several times.

        Raises
        ------
        ConfigError
            The descriptor is not open, or the file has no valid keys.
        """
        try:
            data = os.pread(descriptor, min(os.fstat(descriptor).st_size, _MOST + 1), 0)
        except OSError as error:
            raise ConfigError(
                f"KVSTORE_KEYS_FD={descriptor} cannot be read ({error.strerror}): only processes of the job "
                "itself have keys; a process that a worker starts inherits the descriptor only with pass_fds"
            ) from error
        return cls._from_data(f"KVSTORE_KEYS_FD={descriptor}", data)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> JobKeys:
        """Read the keys from a file that only this user can read.

        Raises
        ------
        ConfigError
            The file does not exist, other users can read it, or it has no valid keys.
        """
        try:
            mode = Path(path).stat().st_mode
            with open(path, "rb") as file:
                data = file.read(_MOST + 1)
        except OSError as error:
            raise ConfigError(f"the keys in {path} cannot be read: {error.strerror}") from error
        if mode & 0o077:
            raise ConfigError(
                f"other users can read the keys in {path}: chmod 600 it, and make new keys (kvstore keys)"
            )
        return cls._from_data(str(path), data)

    @classmethod
    def _from_data(cls, source: str, data: bytes) -> JobKeys:
        try:
            return cls.from_json(data)
        except ConfigError as error:
            raise ConfigError(f"{source} holds no keys of a job: {error}") from error


def _parse_keys(name: str, value: object) -> tuple[bytes, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"keys: {name!r} must be a list of keys")
    return tuple(_parse_key(name, one) for one in value)


def _parse_key(name: str, value: object) -> bytes:
    text = value.encode(errors="replace") if isinstance(value, str) else b""
    if not _Z85.fullmatch(text):
        raise ConfigError(f"keys: {name!r} must hold 40 characters of Z85, as zmq.curve_keypair makes them")
    return text
