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

#: By the names that journals contain: a class may be renamed, its name here stays. So do all names of fields.
_CLASSES: dict[str, Any] = {
    "ReliableLink": ReliableLink,
    "Process": peers.AdmittedProcess,
    "Peer": peers.PeerConnection,
    "Servers": rank_assignment.ServerTable,
    "RankAssignment": rank_assignment.RankAssignment,
    "Stores": stores.JobStores,
    "FailureDetector": failure_detector.FailureDetector,
    "Admission": admission.ProcessAdmission,
    "JobShutdown": shutdown.JobShutdown,
    "StoreMembership": store_membership.StoreMembership,
    "RejoinCoordinator": rejoins.RejoinCoordinator,
    "HostSeats": hosts.HostSeats,
    "KeyTable": key_table.KeyTable,
    "AwaitedKeys": key_table.AwaitedKeys,
    "SettingsTable": store_settings.SettingsTable,
    "Installation": store_settings.PendingInstall,
    "SettingsLog": SettingsLog,
    "Change": SettingsChange,
}
_TUPLES: dict[str, Any] = {cls.__name__: cls for cls in (key_table.KeyWaiter, rejoins.JoinPoint, SettingsAt)}
#: Tags of messages that have other names in journals.
_NAME_OF_TAG = {"Found": "CreateKeys", "Reached": "JoinPointReached", "Letter": "ReliableMessage"}


def message_name(kind: type[msgspec.Struct]) -> str:
    """Return the name of a kind of message in journals: its tag, or the name of a class without a tag."""
    tag = str(kind.__struct_config__.tag or kind.__name__)
    return _NAME_OF_TAG.get(tag, tag)


_MESSAGES: dict[str, Any] = {
    message_name(value): value
    for value in vars(messages).values()
    if isinstance(value, type) and issubclass(value, msgspec.Struct)
}
#: The names of all classes above but the collections.
_NAMES: dict[type, str] = {
    cls: name for table in (_CLASSES, _TUPLES, _MESSAGES) for name, cls in table.items()
}
_PLAIN = (type(None), bool, int, float, str, bytes)
_SEQUENCES = {"list": list, "set": set, "deque": deque}


def dump_state(value: Any) -> Any:
    """Convert a value to data that msgpack can encode.

    Raises
    ------
    TypeError
        The value contains an object of a class that is not on the list.
    """
    return _StateWriter().write(value)


def load_state(data: Any) -> Any:
    """Return the value of which `dump_state` has made the data.

    Raises
    ------
    KeyError, TypeError, ValueError
        `dump_state` cannot have made the data.
    """
    return _StateReader().read(data)


class _StateWriter:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps the ids of written objects from being used again

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            return ["enum", value.value]
        name = _NAMES.get(kind, "")
        if name in _MESSAGES:
            return ["message", name, msgspec.to_builtins(value, builtin_types=(bytes,))]
        if kind is tuple or kind is frozenset:
            return [kind.__name__, [self.write(one) for one in value]]
        if name in _TUPLES:
            return ["named", name, [self.write(one) for one in value]]
        number = self._numbers.get(id(value))
        if number is not None:
            return ["again", number]
        number = self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if kind is dict:
            return ["dict", number, [[self.write(key), self.write(one)] for key, one in value.items()]]
        if kind.__name__ in _SEQUENCES:
            return [kind.__name__, number, [self.write(one) for one in value]]
        if name not in _CLASSES:
            raise TypeError(f"the journal cannot store an object of class {kind.__qualname__}")
        return ["object", number, name, {field: self.write(one) for field, one in _attribute_items(value)}]


class _StateReader:
    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def read(self, data: Any) -> Any:
        if not isinstance(data, list):
            return data
        kind, *rest = data
        if kind == "enum":
            return peers.ProcessState(rest[0])
        if kind == "message":
            return msgspec.convert(rest[1], _MESSAGES[rest[0]])
        if kind in ("tuple", "frozenset"):
            return {"tuple": tuple, "frozenset": frozenset}[kind](map(self.read, rest[0]))
        if kind == "named":
            return _TUPLES[rest[0]](*map(self.read, rest[1]))
        if kind == "again":
            return self._made[rest[0]]
        return self._read_mutable(kind, *rest)

    def _read_mutable(self, kind: str, number: int, *rest: Any) -> Any:
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


def _attribute_items(value: Any) -> list[tuple[str, Any]]:
    names = getattr(type(value), "__slots__", None) or vars(value)
    return [(name, getattr(value, name)) for name in names]
