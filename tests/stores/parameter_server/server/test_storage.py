"""What a server holds for all stores: whose snapshots it takes up."""

from __future__ import annotations

from pathlib import Path

from kvstore.settings.parameter_server import PsConfig
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.server.storage import ServerStorage

ENTRY = m.KeyEntry(m.KeySpec("w", (8,), "float32"), 0, (m.Slice(0, 0, 0, 8),), ready=False)


def server(folder: Path, rank: int = 0) -> ServerStorage:
    storage = ServerStorage(rank, PsConfig(snapshot=str(folder)))
    storage.check_snapshots()
    return storage


def saved(storage: ServerStorage, store: int = 0) -> None:
    """Have the storage hold a key, and write a snapshot."""
    storage.define(e.Define(store, (ENTRY,)))
    storage.save({"stores": [{"store": store}]})()


def test_a_server_that_comes_back_has_the_snapshots_of_its_job(tmp_path: Path) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("a job")
    saved(storage)
    assert server(tmp_path).restore("a job") == {"stores": [{"store": 0}]}


def test_a_server_that_comes_back_has_no_snapshots_of_another_job(tmp_path: Path) -> None:
    storage = server(tmp_path)
    storage.begin_snapshots("a job")
    saved(storage)
    assert server(tmp_path).restore("another job") == {"stores": []}
    assert server(tmp_path / "elsewhere").restore("a job") == {"stores": []}


def test_a_job_removes_the_snapshots_of_one_before_though_their_names_are_the_same(tmp_path: Path) -> None:
    for store in (1, 0):
        storage = server(tmp_path)
        storage.begin_snapshots("127.0.0.1:9091")
        saved(storage, store)
    assert server(tmp_path).restore("127.0.0.1:9091") == {"stores": [{"store": 0}]}


def test_which_server_it_is_may_be_told_late(tmp_path: Path) -> None:
    storage = server(tmp_path, -1)
    storage.set_rank(3)
    storage.begin_snapshots("a job")
    saved(storage)
    assert server(tmp_path, 3).restore("a job") == {"stores": [{"store": 0}]}
