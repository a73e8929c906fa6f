"""Snapshots that a server's loop cannot write as it wants to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pace
import pytest

from kvstore.settings.parameter_server import PsConfig
from kvstore.settings.roles import Roles
from kvstore.stores.parameter_server.protocol import events
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.server import store_shard
from kvstore.stores.parameter_server.server.loop import ServerLoop
from kvstore.stores.parameter_server.server.snapshot import SnapshotFolder, describe_slice
from kvstore.stores.parameter_server.server.storage import ServerStorage

STORES = {"stores": [{"store": 0}, {"store": 1}]}
ENTRY = m.KeyEntry(m.KeySpec("w", (8,), "float32"), 0, (m.Slice(0, 0, 0, 8),), ready=False)


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerLoop]:
    roles = Roles("server", 0, 1, 1, "job", "tcp://127.0.0.1:1", "127.0.0.1", 0, None, False)
    made = ServerLoop(roles, PsConfig(snapshot=str(tmp_path), snapshot_interval=1e6))
    made._due = True
    yield made
    made._sockets.close()
    made._storage.close()


def ended(loop: ServerLoop, patch: pytest.MonkeyPatch, write: Callable[[], None]) -> Any:
    """Let a snapshot be written by `write`, and return the event of its end."""
    patch.setattr(loop._storage, "capture_stores", lambda _: write)
    return told_of_end(loop, patch)


def told_of_end(loop: ServerLoop, patch: pytest.MonkeyPatch) -> Any:
    """Let a snapshot be written, and return the event of its end."""
    told: list[Any] = []
    patch.setattr(loop, "_step_machine", told.append)
    end = pace.deadline(20)
    while not told:
        assert time.monotonic() < end
        loop._look_after_snapshots(time.monotonic())
    assert loop._writing is None
    (event,) = told
    assert isinstance(event, events.SnapshotSaved)
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


def put(storage: ServerStorage, value: float) -> None:
    """Set all elements of a key of two stores."""
    data = np.full(8, value, np.float32).tobytes()
    record = m.Record(m.RecordKind.ASSIGN, 0, 1, place=m.PayloadLocation.FRAME, nbytes=len(data))
    for store in (0, 1):
        storage.define_slices(events.DefineSlices(store, (ENTRY,)))
        applied = storage.write_slices(events.WriteSlices(store, [events.SliceWrite(0, record, (data,))]))
        assert applied.results == [(0, None)]


def there(folder: Path) -> dict[int, float]:
    """Return the contents of each store on a restarted server."""
    storage = ServerStorage(0, PsConfig(snapshot=str(folder)))
    found = {
        one["store"]: float(storage.store_shard(one["store"]).read_value(0)[0])
        for one in storage.restore_stores("job")["stores"]
    }
    storage.close()
    return found


@pytest.mark.parametrize("store", [0, 1])
def test_without_memory_for_its_copies_a_snapshot_has_failed_and_the_next_is_whole(
    loop: ServerLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: int
) -> None:
    loop._storage.begin_snapshots("job")
    monkeypatch.setattr(loop._machine, "snapshot_state", lambda: STORES)
    put(loop._storage, 1)
    assert told_of_end(loop, monkeypatch) is None
    put(loop._storage, 2)
    loop._due, calls = True, iter(range(10))

    def short(held: Any) -> Any:
        if next(calls) == store:
            raise MemoryError
        return describe_slice(held)

    with monkeypatch.context() as patch:
        patch.setattr(store_shard, "describe_slice", short)
        failure = told_of_end(loop, monkeypatch)
    assert failure.error == "StateFileError"
    assert "server 0 has no snapshot: MemoryError" in failure.text
    assert there(tmp_path) == {store: 1, 1 - store: 2}
    loop._due = True
    assert told_of_end(loop, monkeypatch) is None
    assert there(tmp_path) == {0: 2, 1: 2}


def test_a_store_that_is_closed_while_its_snapshot_is_written_leaves_none(
    loop: ServerLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop._storage.begin_snapshots("job")
    monkeypatch.setattr(loop._machine, "snapshot_state", lambda: STORES)
    put(loop._storage, 1)
    written, closed = SnapshotFolder.write_files, threading.Event()

    def write(*content: Any) -> None:
        assert closed.wait(20)
        written(*content)

    monkeypatch.setattr(SnapshotFolder, "write_files", write)
    loop._look_after_snapshots(time.monotonic())
    loop._storage.forget_slices(events.ForgetSlices(0, None))
    closed.set()
    assert told_of_end(loop, monkeypatch) is None
    assert there(tmp_path) == {1: 1}
    loop._storage.forget_slices(events.ForgetSlices(1, None))
    assert not list((tmp_path / "server-0").glob("store-*"))
