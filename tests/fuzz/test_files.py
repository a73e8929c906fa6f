"""Files with faults: a file is read as a whole or refused with an error of ours, and what was there stays.

`KVSTORE_FUZZ_SEED` takes up the seed that a failure prints.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fuzz.mutations import changed
from shards import StoreShards

import kvstore as kv
from kvstore.launch.hosts import host_list
from kvstore.stores.parameter_server.server.store_shard import StoreShard

F = np.float32
Read = Callable[[Path], object]


def values(folder: Path) -> tuple[Path, Read]:
    store = kv.create()
    store.init(["a", "b"], [np.ones(3, F), np.ones((2, 5), np.float16)])
    store.init("t", kv.RowSparseArray(np.ones((2, 3), F), [1, 3], (5, 3)))
    store.save(folder / "file")
    other = kv.create()
    other.init("a", np.zeros(3, F))

    def read(path: Path) -> None:
        try:
            other.load(path)
        except kv.KVStoreError:
            assert not other.view("a").any(), "a part of it was loaded"
            raise
        assert other.view("a").tolist() == [1, 1, 1]
        other.push("a", np.zeros(3, F))

    return folder / "file", read


def states(folder: Path) -> tuple[Path, Read]:
    store = kv.create()
    store.init("a", np.ones(3, F))
    store.set_optimizer(kv.optimizer.Adam(lr_scheduler=kv.lr_scheduler.FactorScheduler(5, 0.9)))
    store.push("a", np.ones(3, F))
    store.save_optimizer_states(folder / "file", dump_optimizer=True)
    return folder / "file", store.load_optimizer_states


def hosts(folder: Path) -> tuple[Path, Read]:
    (folder / "file").write_text("# two\nnode1 slots=4\n10.0.0.7 slots=3\nuser@node2 slots=1\n")
    return folder / "file", lambda path: host_list.of_file(str(path))


def snapshot(folder: Path, name: str) -> tuple[Path, Read]:
    shards = StoreShards(1)
    shards.init("w", np.ones(100, F), (50,))
    shards.shards[0].capture(folder, {"round": 1})()
    found = next(path for path in sorted(folder.iterdir()) if path.match(name))
    return found, lambda path: StoreShard.restore(path.parent)


READERS: dict[str, Callable[[Path], tuple[Path, Read]]] = {
    "values": values,
    "states": states,
    "hosts": hosts,
    "manifest": lambda folder: snapshot(folder, "manifest.json"),
    "snapshot": lambda folder: snapshot(folder, "*.safetensors"),
}


def check(folder: Path, name: str, count: int) -> None:
    seed = int(os.environ.get("KVSTORE_FUZZ_SEED", random.SystemRandom().getrandbits(32)))
    chance = random.Random(seed)
    path, read = READERS[name](folder)
    good = path.read_bytes()
    read(path)
    refused = 0
    for _ in range(count):
        content = b"".join(changed([good], chance))
        path.write_bytes(content)
        try:
            read(path)
        except kv.KVStoreError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"KVSTORE_FUZZ_SEED={seed}: {error!r} from {content[:2000]!r}") from error
    assert refused > count // 4, "hardly anything was refused"


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_files_with_faults(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 1_000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_many_files_with_faults(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 20_000)
