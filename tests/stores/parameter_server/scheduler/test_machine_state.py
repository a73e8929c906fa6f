"""The names of classes and messages in journals do not change when a class is renamed."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler import key_table, machine_state, peers, rank_assignment
from kvstore.stores.parameter_server.scheduler.machine_state import dump_state, load_state, message_name


def test_the_names_of_classes() -> None:
    names = """
        ReliableLink Process Peer Servers RankAssignment Stores FailureDetector Admission JobShutdown
        StoreMembership RejoinCoordinator HostSeats KeyTable AwaitedKeys SettingsTable Installation
        SettingsLog Change
    """
    assert list(machine_state._CLASSES) == names.split()
    assert list(machine_state._TUPLES) == ["KeyWaiter", "JoinPoint", "SettingsAt"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (m.HelloRequest, "Hello"),
        (m.CreateKeysRequest, "CreateKeys"),
        (m.JoinPointNotice, "JoinPointReached"),
        (m.ReliableMessage, "ReliableMessage"),
        (m.KeyEntry, "KeyEntry"),
    ],
)
def test_the_names_of_messages(kind: Any, name: str) -> None:
    assert message_name(kind) == name


def test_an_object_is_written_with_its_name_and_read_again() -> None:
    process = peers.AdmittedProcess("w0", "worker", 0, 7, 1.5)
    data = dump_state(
        [process, rank_assignment.ServerTable(1), key_table.KeyWaiter(0, 1, ()), m.PingRequest(2)]
    )
    kinds = [entry[0] if entry[0] != "object" else entry[2] for entry in data[2]]
    assert kinds == ["Process", "Servers", "named", "message"]
    assert data[2][2][1] == "KeyWaiter"
    assert data[2][3][1:] == ["Ping", {"type": "Ping", "number": 2}]
    again, *_ = load_state(data)
    assert vars(again) == vars(process)
