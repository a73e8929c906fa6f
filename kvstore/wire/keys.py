"""The CURVE keys that one process of a job holds: 40 characters (Z85) each, as ZeroMQ takes them."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field

from kvstore.errors import ConfigError

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
        """Write them as JSON, the secret one too."""
        return json.dumps(asdict(self), default=bytes.decode).encode()

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
        except (ValueError, RecursionError):
            found = None
        single, several = ("public", "secret", "scheduler"), ("servers", "allowed")
        if not isinstance(found, dict) or set(found) != {*single, *several}:
            raise ConfigError(f"keys must be a JSON object with {', '.join((*single, *several))}")
        public, secret, scheduler = (_key(name, found[name]) for name in single)
        servers, allowed = (_keys(name, found[name]) for name in several)
        return cls(public, secret, scheduler, servers, allowed)


def _keys(name: str, value: object) -> tuple[bytes, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"keys: {name!r} must be a list of keys")
    return tuple(_key(name, one) for one in value)


def _key(name: str, value: object) -> bytes:
    text = value.encode(errors="replace") if isinstance(value, str) else b""
    if not _Z85.fullmatch(text):
        raise ConfigError(f"keys: {name!r} must hold 40 characters of Z85, as zmq.curve_keypair makes them")
    return text
