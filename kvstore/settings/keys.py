"""The CURVE keys that one process of a job holds: 40 characters (Z85) each, as ZeroMQ takes them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvstore.atomic_files import with_checksum, without_checksum
from kvstore.errors import ConfigError, StateFileError

_Z85 = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_MOST = 1 << 22  # bytes of a text of keys: more than 50,000 processes have


@dataclass(frozen=True)
class Keys:
    """What a process needs to prove who it is, and to know the others.

    Attributes
    ----------
    public, secret : bytes
        The key pair of this process.
    scheduler : bytes
        Public key of the scheduler.
    servers : tuple of bytes
        Public keys of the servers, by their rank.
    allowed : tuple of bytes
        Public keys of all processes of the job: no others are let in.
    """

    public: bytes
    secret: bytes = field(repr=False)
    scheduler: bytes
    servers: tuple[bytes, ...]
    allowed: tuple[bytes, ...]

    def to_json(self) -> bytes:
        """Write them as JSON with a checksum, the secret one too."""
        return with_checksum(json.dumps(asdict(self), default=bytes.decode).encode())

    @classmethod
    def from_json(cls, data: bytes) -> Keys:
        """Read what `to_json` wrote.

        Raises
        ------
        ConfigError
            The text is something else. The message does not repeat it: there may be a secret in it.
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
        public, secret, scheduler = (_key(name, found[name]) for name in single)
        servers, allowed = (_keys(name, found[name]) for name in several)
        return cls(public, secret, scheduler, servers, allowed)

    @classmethod
    def from_descriptor(cls, descriptor: int) -> Keys:
        """Read them from an open file that a launcher left to us; it can be read again.

        Raises
        ------
        ConfigError
            There is no such descriptor, or it holds something else.
        """
        try:
            data = os.pread(descriptor, min(os.fstat(descriptor).st_size, _MOST + 1), 0)
        except OSError as error:
            raise ConfigError(
                f"KVSTORE_KEYS_FD={descriptor} cannot be read ({error.strerror}): what a worker starts does "
                "not inherit it unless told to (pass_fds); only processes of the job itself have keys"
            ) from error
        return cls._of(f"KVSTORE_KEYS_FD={descriptor}", data)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Keys:
        """Read them from a file that nobody else can read.

        Raises
        ------
        ConfigError
            It is not there, others may read it, or it holds something else.
        """
        try:
            mode = Path(path).stat().st_mode
            with open(path, "rb") as file:
                data = file.read(_MOST + 1)
        except OSError as error:
            raise ConfigError(f"the keys in {path} cannot be read: {error.strerror}") from error
        if mode & 0o077:
            raise ConfigError(f"the keys in {path} can be read by others: chmod 600 it, and make new ones")
        return cls._of(str(path), data)

    @classmethod
    def _of(cls, source: str, data: bytes) -> Keys:
        try:
            return cls.from_json(data)
        except ConfigError as error:
            raise ConfigError(f"{source} holds no keys of a job: {error}") from error


def _keys(name: str, value: object) -> tuple[bytes, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"keys: {name!r} must be a list of keys")
    return tuple(_key(name, one) for one in value)


def _key(name: str, value: object) -> bytes:
    text = value.encode(errors="replace") if isinstance(value, str) else b""
    if not _Z85.fullmatch(text):
        raise ConfigError(f"keys: {name!r} must hold 40 characters of Z85, as zmq.curve_keypair makes them")
    return text
