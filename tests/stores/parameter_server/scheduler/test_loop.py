"""The scheduler's loop: the data that it keeps of received messages."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from kvstore.settings.parameter_server import PsConfig
from kvstore.settings.roles import Roles
from kvstore.source_tree import package_version
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler import journaled_scheduler, loop


def test_without_a_journal_no_entries_of_one_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an entry was made")

    monkeypatch.setattr(journaled_scheduler, "JournalEntry", refuse)
    sockets = Mock()
    sockets.heartbeats.address = sockets.echo = "tcp://127.0.0.1:1"
    roles = Roles("scheduler", 0, 1, 1, "job", "tcp://127.0.0.1:1", "127.0.0.1", 0, None, False)
    made = loop._SchedulerLoop(roles, PsConfig(), sockets, None)
    hello = m.HelloRequest("worker", 0, 1, "w", "job", m.PROTOCOL, group="default", options={"mode": "sync"})
    made._step_machine(e.MessageReceived(b"w", m.ReliableMessage(1, 0, hello)))
    made._step_machine(e.TickEvent())
    assert type(sockets.send.call_args_list[0].args[1].body) is m.HelloReply
    assert made._actions == []


def test_a_process_of_another_version_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sockets = Mock()
    sockets.heartbeats.address = sockets.echo = "tcp://127.0.0.1:1"
    sockets.heartbeats.read_echoes.return_value = []
    roles = Roles("scheduler", 0, 2, 1, "job", "tcp://127.0.0.1:1", "127.0.0.1", 0, None, False)
    made = loop._SchedulerLoop(roles, PsConfig(), sockets, None)

    def hello(rank: int, protocol: int, version: str) -> m.ReliableMessage:
        options = {"mode": "sync"}
        name = f"worker/{rank}/{version}"
        body = m.HelloRequest("worker", rank, 1, name, "job", protocol, options=options, version=version)
        return m.ReliableMessage(1, 0, body)

    messages = [
        hello(0, m.PROTOCOL, package_version()),
        hello(1, m.PROTOCOL, "9.9"),
        hello(1, m.PROTOCOL, "9.9"),
    ]
    messages += [hello(1, m.PROTOCOL, ""), hello(1, m.PROTOCOL + 1, "9.8")]  # the second is refused
    for message in messages:
        made._note_version(message)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert f"worker 1 has kvstore 9.9, and the scheduler {package_version()}" in told[0]
    assert "an earlier version" in told[1]
