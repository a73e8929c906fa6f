"""The scheduler's loop: what it keeps of what it has taken in."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from kvstore.settings.parameter_server import PsConfig
from kvstore.settings.roles import Roles
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler import loop, recording


def test_without_a_journal_no_entries_of_one_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an entry was made")

    monkeypatch.setattr(recording, "JournalEntry", refuse)
    sockets = Mock()
    sockets.heartbeats.address = sockets.echo = "tcp://127.0.0.1:1"
    roles = Roles("scheduler", 0, 1, 1, "job", "tcp://127.0.0.1:1", "127.0.0.1", 0, None, False)
    made = loop._Loop(roles, PsConfig(), sockets, None)
    hello = m.Hello("worker", 0, 1, "w", "job", m.PROTOCOL, group="default", options={"mode": "sync"})
    made._step(e.Received(b"w", m.ReliableMessage(1, 0, hello)))
    made._step(e.Tick())
    assert type(sockets.send.call_args_list[0].args[1].body) is m.Met
    assert made._actions == []
