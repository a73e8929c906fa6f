"""The data that a server holds for all stores, and the snapshots that it restores."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as kv
from kvstore.settings.parameter_server import PsConfig
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.server.storage import ServerStorage

ENTRY = m.KeyEntry(m.KeySpec("w", (8,), "float32"), 0, (m.Slice(0, 0, 0, 8),), ready=False)


def server(folder: Path, rank: int = 0) -> ServerStorage:
    storage = ServerStorage(rank, PsConfig(snapshot=str(folder)))
    storage.check_snapshots()
    return storage


def put(storage: ServerStorage, store: int, value: float) -> None:
    """Have the storage hold a key, all elements of which are `value`."""
    storage.define_slices(e.DefineSlices(store, (ENTRY,)))
    data = np.full(8, value, np.float32).tobytes()
    record = m.Record(m.RecordKind.ASSIGN, 0, 1, place=m.PayloadLocation.FRAME, nbytes=len(data))
    applied = storage.write_slices(e.WriteSlices(store, [e.SliceWrite(0, record, (data,))]))
    assert applied.results == [(0, None)]


def saved(storage: ServerStorage, store: int = 0) -> None:
    """Have the storage hold a key, and write a snapshot."""
    put(storage, store, 1)
    save(storage, store)


def save(storage: ServerStorage, *stores: int) -> None:
    """Write a snapshot."""
    try:
        storage.capture_stores({"stores": [{"store": store} for store in stores]})()
    finally:
        storage.end_snapshot()


def in_killed_child(call: Callable[[], None], name: str, after: int = 0) -> None:
    """Run `call` in a fork, which is killed as it calls a function of `os`, `after` so many calls of that."""
    pid = os.fork()
    if pid == 0:
        function, calls = getattr(os, name), iter(range(100))

        def killed(*path: Any, **folder: Any) -> None:
            if next(calls) == after:
                os.kill(os.getpid(), signal.SIGKILL)
            function(*path, **folder)

        try:
            setattr(os, name, killed)
            call()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_server_that_comes_back_has_the_snapshots_of_its_job(tmp_path: Path) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("a job")
    saved(storage)
    assert server(tmp_path).restore_stores("a job") == {"stores": [{"store": 0}]}


def test_a_server_that_comes_back_has_no_snapshots_of_another_job(tmp_path: Path) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("a job")
    saved(storage)
    assert server(tmp_path).restore_stores("another job") == {"stores": []}
    assert server(tmp_path / "elsewhere").restore_stores("a job") == {"stores": []}


def test_a_job_removes_the_snapshots_of_one_before_though_their_names_are_the_same(tmp_path: Path) -> None:
    for store in (1, 0):
        storage = server(tmp_path)
        storage.begin_snapshots("127.0.0.1:9091")
        saved(storage, store)
    assert server(tmp_path).restore_stores("127.0.0.1:9091") == {"stores": [{"store": 0}]}


def test_a_job_that_was_killed_as_it_removed_an_earlier_ones_snapshots(tmp_path: Path) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("127.0.0.1:9091")
    for store in (0, 1):
        saved(storage, store)
    in_killed_child(lambda: server(tmp_path).begin_snapshots("127.0.0.1:9091"), "rmdir")
    assert server(tmp_path).restore_stores("127.0.0.1:9091") == {"stores": []}


def test_which_server_it_is_may_be_told_late(tmp_path: Path) -> None:
    storage = server(tmp_path, -1)
    storage.set_rank(3)
    storage.begin_snapshots("a job")
    save(storage, 0)
    assert server(tmp_path, 3).restore_stores("a job") == {"stores": [{"store": 0}]}


# ------------------------------------------------------------------ snapshots of which a part is there


@pytest.mark.parametrize("step", ["data", "manifest"])
def test_a_server_that_was_killed_in_the_first_snapshot_of_a_store_has_those_of_others(
    tmp_path: Path, step: str
) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("a job")
    saved(storage)
    before = ["data", "manifest"].index(step)  # which is put in place
    in_killed_child(lambda: saved(storage, 1), "replace", before)
    folder = tmp_path / "server-0" / "store-1"
    assert any(path.suffix == ".tmp" for path in folder.iterdir())
    again = server(tmp_path)
    assert again.restore_stores("a job") == {"stores": [{"store": 0}]}
    assert not folder.exists()
    saved(again, 1)
    assert len(server(tmp_path).restore_stores("a job")["stores"]) == 2


@pytest.mark.parametrize("step", ["unlink", "rmdir"])
def test_a_server_that_was_killed_as_it_removed_a_closed_store_has_the_others(
    tmp_path: Path, step: str
) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("a job")
    for store in (0, 1):
        saved(storage, store)
    gone = int(step == "unlink")  # of its files; or all are
    in_killed_child(lambda: storage.forget_slices(e.ForgetSlices(1, None)), step, gone)
    assert server(tmp_path).restore_stores("a job") == {"stores": [{"store": 0}]}


@pytest.mark.parametrize("name", ["manifest.json", "1.safetensors"])
def test_a_damaged_snapshot_of_one_store_stays_an_error(tmp_path: Path, name: str) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("a job")
    for store in (0, 1):
        saved(storage, store)
    folder = tmp_path / "server-0" / "store-1"
    (folder / name).write_bytes(b"{")
    with pytest.raises(kv.StateFileError):
        server(tmp_path).restore_stores("a job")
    assert len(list(folder.iterdir())) == 2


def test_a_store_whose_snapshot_cannot_be_written_keeps_no_other_from_its_own(tmp_path: Path) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("a job")
    for store in (0, 1):
        put(storage, store, 1)
    save(storage, 0, 1)
    for store in (0, 1):
        put(storage, store, 2)
    folder = tmp_path / "server-0" / "store-0"
    folder.rename(tmp_path / "aside")
    folder.touch()  # no folder
    with pytest.raises(FileExistsError):
        save(storage, 0, 1)
    folder.unlink()
    (tmp_path / "aside").rename(folder)
    save(storage, 0, 1)
    again = server(tmp_path)
    again.restore_stores("a job")
    assert [again.store_shard(store).read_value(0).tolist() for store in (0, 1)] == [[2] * 8] * 2
