"""Everything that can go wrong, as one tree under `KVStoreError`.

Each class also derives from the builtin that a caller would catch without knowing this library.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping


class KVStoreError(Exception):
    """Base of every error that this library raises on purpose."""

    def __str__(self) -> str:
        # KeyError would show the repr of its text; the message is a sentence, so show it as one.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class ConfigError(KVStoreError, ValueError):
    """An option, a name or a parameter is unknown or out of range."""


class ArgumentError(KVStoreError, TypeError):
    """An argument is of a type that cannot be meant."""


class KeyNotFoundError(KVStoreError, KeyError):
    """The key was never initialised in this store."""


class DuplicateKeyError(KVStoreError, ValueError):
    """The key is initialised already."""


class KeyKindError(KVStoreError, TypeError):
    """The key is neither int nor str, or not of the kind that this store already uses."""


class ShapeError(KVStoreError, ValueError):
    """Shapes or numbers of arrays do not fit together."""


class DTypeError(KVStoreError, TypeError):
    """The element type is not supported, or not the one of the key."""


class ArrayError(KVStoreError, TypeError, ValueError):
    """The object is no array, or one that cannot be used this way (read-only, wrong storage, on a device)."""


class RowIndexError(KVStoreError, IndexError):
    """A row id lies outside the key's table."""


class TimeoutError(KVStoreError, builtins.TimeoutError):
    """A wait reached its deadline."""


class PeerLostError(KVStoreError):
    """Another process of the job died or stopped answering.

    Attributes
    ----------
    role, rank
        Who is lost: ``"worker"``, ``"server"`` or ``"scheduler"``, and its number.
    last_seen
        Seconds since it was last heard of, or None.
    """

    def __init__(
        self, message: str, *, role: str = "worker", rank: int = -1, last_seen: float | None = None
    ) -> None:
        super().__init__(message)
        self.role = role
        self.rank = rank
        self.last_seen = last_seen


class WorkerError(KVStoreError):
    """A worker that `kvstore.spawn` started failed.

    Attributes
    ----------
    rank
        Its number.
    code
        Its exit code; negative for the signal that ended it.
    """

    def __init__(self, message: str, *, rank: int = -1, code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.code = code


class FencedError(KVStoreError):
    """The calling process was replaced or declared dead; it may no longer take part."""


class CodecError(KVStoreError):
    """A codec of a user raised, or broke its contract; its own exception is the ``__cause__``."""


class UpdaterError(KVStoreError):
    """The updater raised; its own exception is the ``__cause__``."""


class ProtocolError(KVStoreError):
    """A peer sent something that is not in the protocol."""


class AuthError(KVStoreError):
    """A peer could not prove that it belongs to the job."""


class ClosedError(KVStoreError):
    """The store is closed."""


class CapabilityError(KVStoreError, NotImplementedError):
    """The type of store cannot do that."""


class StateFileError(KVStoreError, ValueError):
    """A file of values or states is damaged, foreign, of another store, or cannot be written."""


class MissingBackendError(KVStoreError, ImportError):
    """The store exists by name, but what it runs on is not installed or not built."""


def nearest(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return a question that names the closest known word, or nothing.

    `synonyms` are words of other libraries that no comparison of letters finds.
    """
    words, small = list(known), name.lower()
    meant = (synonyms or {}).get(small)
    close = meant if meant in words else closest(small, words)
    return f", did you mean {close!r}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like `name`, or None."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
