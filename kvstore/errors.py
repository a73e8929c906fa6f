"""All errors of kvstore; each is a subclass of `KVStoreError`.

Most classes also derive from the matching built-in exception, such as `ValueError`.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping


class KVStoreError(Exception):
    """Base class of all errors that kvstore raises."""

    def __str__(self) -> str:
        # KeyError would show the repr of its text; the message is a sentence, so show it as one.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()


class ConfigError(KVStoreError, ValueError):
    """An option, a name or a parameter is unknown or out of range."""


class ArgumentError(KVStoreError, TypeError):
    """An argument has the wrong type."""


class KeyNotFoundError(KVStoreError, KeyError):
    """The key was never initialised in this store."""


class DuplicateKeyError(KVStoreError, ValueError):
    """The key is already initialised."""


class KeyKindError(KVStoreError, TypeError):
    """The key is neither int nor str, or not of the type that this store already uses."""


class ShapeError(KVStoreError, ValueError):
    """Shapes or numbers of arrays do not match."""


class DTypeError(KVStoreError, TypeError):
    """The element type is not supported, or is not that of the key."""


class ArrayError(KVStoreError, TypeError, ValueError):
    """The object is not an array, or cannot be used in this call (read-only, wrong storage, on a device)."""


class RowIndexError(KVStoreError, IndexError):
    """A row id is outside the table of the key."""


class TimeoutError(KVStoreError, builtins.TimeoutError):
    """A wait reached its deadline."""


class PeerLostError(KVStoreError):
    """Another process of the job died or does not respond.

    Attributes
    ----------
    role, rank
        The lost process: ``"worker"``, ``"server"`` or ``"scheduler"``, and its rank.
    last_seen
        Seconds since its last message, or None.
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
        Rank of the worker.
    code
        Exit code of the worker; if a signal ended it, the negative number of the signal.
    """

    def __init__(self, message: str, *, rank: int = -1, code: int = 1) -> None:
        super().__init__(message)
        self.rank = rank
        self.code = code


class FencedError(KVStoreError):
    """The calling process was replaced or declared lost. It can no longer take part in the job."""


class CodecError(KVStoreError):
    """A user-defined codec raised an error or returned a wrong result. ``__cause__`` is its exception."""


class UpdaterError(KVStoreError):
    """The updater raised an error. ``__cause__`` is its exception."""


class ProtocolError(KVStoreError):
    """A peer sent a message that is not valid in the protocol."""


class AuthError(KVStoreError):
    """A peer is not authenticated as a process of the job."""


class ClosedError(KVStoreError):
    """The store is closed."""


class CapabilityError(KVStoreError, NotImplementedError):
    """The operation is not supported by this type of store."""


class StateFileError(KVStoreError, ValueError):
    """A file of values or states is damaged, has another format, does not match, or cannot be written."""


class MissingBackendError(KVStoreError, ImportError):
    """The store is known, but its engine is not installed or not built."""


def nearest(name: str, known: Iterable[str], synonyms: Mapping[str, str] | None = None) -> str:
    """Return a question with the most similar known word, or an empty text.

    `synonyms` are names of other libraries that a comparison of letters does not find.
    """
    words, small = list(known), name.lower()
    meant = (synonyms or {}).get(small)
    close = meant if meant in words else closest(small, words)
    return f", did you mean {close!r}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like `name`, or None."""
    import difflib

    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)
