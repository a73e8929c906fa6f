"""Every error is caught by the builtin that a caller would think of, and reads as a sentence."""

from __future__ import annotations

import builtins
import copy

import pytest

import kvstore as kv
from kvstore import errors

ALSO = {
    "ArgumentError": TypeError,
    "ArrayError": (TypeError, ValueError),
    "CapabilityError": NotImplementedError,
    "ConfigError": ValueError,
    "DTypeError": TypeError,
    "DuplicateKeyError": ValueError,
    "KeyKindError": TypeError,
    "KeyNotFoundError": KeyError,
    "MissingBackendError": ImportError,
    "RowIndexError": IndexError,
    "ShapeError": ValueError,
    "StateFileError": ValueError,
    "TimeoutError": builtins.TimeoutError,
}
NAMES = [
    name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_tree(name: str) -> None:
    error = getattr(errors, name)
    assert issubclass(error, kv.KVStoreError)
    assert getattr(kv, name) is error
    bases = ALSO.get(name, ())
    for base in bases if isinstance(bases, tuple) else (bases,):
        assert issubclass(error, base)


@pytest.mark.parametrize("name", NAMES)
def test_a_message_is_a_sentence(name: str) -> None:
    error = getattr(errors, name)("key 'a' is not initialised; call init first")
    assert str(error) == "key 'a' is not initialised; call init first"


@pytest.mark.parametrize("name", NAMES)
def test_errors_travel_between_processes(name: str) -> None:
    error = getattr(errors, name)("what happened")
    again = copy.copy(error)  # by the protocol that multiprocessing uses
    assert type(again) is type(error)
    assert str(again) == "what happened"


def test_a_lost_peer_has_a_name() -> None:
    error = kv.PeerLostError("server 3 is lost", role="server", rank=3, last_seen=5.5)
    assert (error.role, error.rank, error.last_seen) == ("server", 3, 5.5)
    assert str(error) == "server 3 is lost"


def test_other_arguments_are_shown_as_usual() -> None:
    assert str(kv.KVStoreError()) == ""
    assert str(kv.KVStoreError("a", 1)) == "('a', 1)"
