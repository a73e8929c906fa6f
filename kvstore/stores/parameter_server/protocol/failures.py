"""Failures in messages, as exceptions."""

from __future__ import annotations

from .... import errors
from ....errors import KVStoreError, PeerLostError
from .messages import Failure


def as_exception(failure: Failure) -> KVStoreError:
    """Return the exception that a failure describes."""
    kind = getattr(errors, failure.error, KVStoreError)
    if not (isinstance(kind, type) and issubclass(kind, KVStoreError)):
        kind = KVStoreError
    if kind is PeerLostError:
        return PeerLostError(failure.text, role=failure.role, rank=failure.rank, last_seen=failure.silent)
    found: KVStoreError = kind(failure.text)
    return found
