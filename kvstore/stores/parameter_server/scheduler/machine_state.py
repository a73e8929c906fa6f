"""Converts the scheduler's state to plain data and back: only objects of a fixed list of classes.

Each object, list, dict and set has a number, so that several references to one object stay references to one
object. Reading creates instances of the classes below and sets their fields; no data is called or imported.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Any

import msgspec

from ....optimizer.settings_log import SettingsAt, SettingsChange, SettingsLog
from ..protocol import messages
from ..protocol.reliable_link import ReliableLink
from . import (
    admission,
    failure_detector,
    hosts,
    key_table,
    peers,
    rank_assignment,
    rejoins,
    shutdown,
    store_membership,
    stores,
)
from . import settings as store_settings

_STATE_CLASSES = (
    ReliableLink, peers.Process, peers.Peer, rank_assignment.Servers, rank_assignment.RankAssignment,
    stores.Stores, failure_detector.FailureDetector, admission.Admission, shutdown.JobShutdown,
    store_membership.StoreMembership, rejoins.RejoinCoordinator, hosts.HostSeats, key_table.KeyTable,
    key_table.AwaitedKeys, store_settings.SettingsTable, store_settings.Installation, SettingsLog,
    SettingsChange,
)  # fmt: skip
_CLASSES: dict[str, Any] = {cls.__name__: cls for cls in _STATE_CLASSES}
_TUPLES: dict[str, Any] = {cls.__name__: cls for cls in (key_table.KeyWaiter, rejoins.JoinPoint, SettingsAt)}
_MESSAGES: dict[str, Any] = {
    name: value
    for name, value in vars(messages).items()
    if isinstance(value, type) and issubclass(value, msgspec.Struct)
}
_PLAIN = (type(None), bool, int, float, str, bytes)
_SEQUENCES = {"list": list, "set": set, "deque": deque}


def dumped(value: Any) -> Any:
    """Convert a value to data that msgpack can encode.

    Raises
    ------
    TypeError
        The value contains an object of a class that is not on the list.
    """
    return _Writer().write(value)


def loaded(data: Any) -> Any:
    """Return the value of which `dumped` has made the data.

    Raises
    ------
    KeyError, TypeError, ValueError
        `dumped` cannot have made the data.
    """
    return _Reader().read(data)


class _Writer:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps the ids of written objects from being used again

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            return ["enum", value.value]
        if kind.__name__ in _MESSAGES and kind is _MESSAGES[kind.__name__]:
            return ["message", kind.__name__, msgspec.to_builtins(value, builtin_types=(bytes,))]
        if kind is tuple or kind is frozenset:
            return [kind.__name__, [self.write(one) for one in value]]
        if kind.__name__ in _TUPLES:
            return ["named", kind.__name__, [self.write(one) for one in value]]
        number = self._numbers.get(id(value))
        if number is not None:
            return ["again", number]
        number = self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if kind is dict:
            return ["dict", number, [[self.write(key), self.write(one)] for key, one in value.items()]]
        if kind.__name__ in _SEQUENCES:
            return [kind.__name__, number, [self.write(one) for one in value]]
        if _CLASSES.get(kind.__name__) is not kind:
            raise TypeError(f"the journal cannot store an object of class {kind.__qualname__}")
        return ["object", number, kind.__name__, {name: self.write(one) for name, one in _attributes(value)}]


class _Reader:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def read(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind == "enum":
            return peers.State(rest[0])
        if kind == "message":
            return msgspec.convert(rest[1], _MESSAGES[rest[0]])
        if kind in ("tuple", "frozenset"):
            return {"tuple": tuple, "frozenset": frozenset}[kind](map(self.read, rest[0]))
        if kind == "named":
            return _TUPLES[rest[0]](*map(self.read, rest[1]))
        if kind == "again":
            return self._made[rest[0]]
        return self._mutable(kind, *rest)

    def _mutable(self, kind: str, number: int, *rest: Any) -> Any:
        made: Any
        if kind == "dict":
            made = self._made[number] = {}
            made.update((self.read(key), self.read(one)) for key, one in rest[0])
        elif kind == "object":
            made = self._made[number] = object.__new__(_CLASSES[rest[0]])
            for name, one in rest[1].items():
                setattr(made, name, self.read(one))
        else:
            made = self._made[number] = _SEQUENCES[kind]()
            add = made.add if kind == "set" else made.append
            for one in rest[0]:
                add(self.read(one))
        return made


def _attributes(value: Any) -> list[tuple[str, Any]]:
    names = getattr(type(value), "__slots__", None) or vars(value)
    return [(name, getattr(value, name)) for name in names]
