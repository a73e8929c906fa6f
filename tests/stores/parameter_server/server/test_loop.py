"""Snapshots that a server's loop cannot write as it wants to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pace
import pytest

from kvstore.settings.parameter_server import PsConfig
from kvstore.settings.roles import Roles
from kvstore.stores.parameter_server.protocol import events
from kvstore.stores.parameter_server.server.loop import ServerLoop


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerLoop]:
    roles = Roles("server", 0, 1, 1, "job", "tcp://127.0.0.1:1", "127.0.0.1", 0, None, False)
    made = ServerLoop(roles, PsConfig(snapshot=str(tmp_path), snapshot_interval=1e6))
    made._due = True
    yield made
    made._sockets.close()
    made._storage.close()


def ended(loop: ServerLoop, patch: pytest.MonkeyPatch, write: Callable[[], None]) -> Any:
    """Let a snapshot be written by `write`, and return what the machine is told of its end."""
    told: list[Any] = []
    patch.setattr(loop._storage, "save", lambda _: write)
    patch.setattr(loop, "_step", told.append)
    end = pace.deadline(20)
    while not told:
        assert time.monotonic() < end
        loop._look_after_snapshots(time.monotonic())
    assert loop._writing is None
    (event,) = told
    assert isinstance(event, events.Saved)
    return event.error


def refuse(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_the_server_writes_its_snapshot_itself(
    loop: ServerLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert ended(loop, monkeypatch, lambda: writers.append(threading.current_thread())) is None
    assert writers == [threading.current_thread()]


@pytest.mark.parametrize("threads", [True, False])
@pytest.mark.parametrize("error", [ValueError, OSError, MemoryError])
def test_any_error_of_a_write_is_told(
    loop: ServerLoop, monkeypatch: pytest.MonkeyPatch, error: type[Exception], threads: bool
) -> None:
    def write() -> None:
        raise error("on demand")

    if not threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    assert "has no snapshot: on demand" in ended(loop, monkeypatch, write).text
