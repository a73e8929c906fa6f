"""Files with faults: a file is read as a whole or refused with an error of ours, and the old state stays.

Each bit of a small file of each kind is flipped; faults of other kinds are drawn.

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
from observation import made
from shards import StoreShards

import kvstore as kv
from kvstore import atomic_files
from kvstore.kernels.cuda.cubin import KernelCubin
from kvstore.launch.certificates import Certificates
from kvstore.launch.hosts import host_list
from kvstore.observe.timeline import process_trace
from kvstore.settings.keys import JobKeys
from kvstore.settings.parameter_server import PsConfig
from kvstore.stores.parameter_server.server.storage import ServerStorage
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


def residuals(folder: Path) -> tuple[Path, Read]:
    store = kv.create("device")
    store.init("a", np.zeros(3, F))
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.push("a", np.full(3, 0.3, F))
    store.save_residuals(folder / "file")
    return folder / "file", store.load_residuals


def checkpoint(folder: Path) -> tuple[Path, Read]:
    store = kv.create()
    store.init("a", np.ones(3, F))
    store.set_optimizer(kv.optimizer.SGD(momentum=0.9))
    store.push("a", np.ones(3, F))
    manager = kv.CheckpointManager(folder)
    manager.save(store, 1, extra={"epoch": 3}, arrays={"seen": np.arange(2)})
    manager.wait()
    return next(folder.glob("step-*")), lambda path: manager.restore(store, 1)


def job_of_snapshots(folder: Path) -> tuple[Path, Read]:
    storage = ServerStorage(0, PsConfig(snapshot=str(folder)))
    storage.begin_snapshots("a job")
    return folder / "server-0" / "job", lambda path: storage.restore_stores("a job")


def keys(folder: Path) -> tuple[Path, Read]:
    path, *_ = Certificates(1, 0).save(folder)
    return path, JobKeys.from_file


def timeline(folder: Path) -> tuple[Path, Read]:
    def read(path: Path) -> None:
        try:
            process_trace.read_trace(path)
        except ValueError as error:
            raise kv.StateFileError(str(error)) from error

    return process_trace.write(made.file([]), folder), read


def cubin(folder: Path) -> tuple[Path, Read]:
    """An incomplete file counts as absent, and is compiled again."""
    (folder / "file").write_bytes(KernelCubin("sum", "sm_90", "entry", b"code", registers=3).to_bytes())

    def read(path: Path) -> None:
        try:
            KernelCubin.from_bytes(path.read_bytes())
        except ValueError as error:
            raise kv.StateFileError(str(error)) from error

    return folder / "file", read


def hosts(folder: Path) -> tuple[Path, Read]:
    (folder / "file").write_text("# two\nnode1 slots=4\n10.0.0.7 slots=3\nuser@node2 slots=1\n")
    return folder / "file", lambda path: host_list.of_file(str(path))


def snapshot(folder: Path, name: str) -> tuple[Path, Read]:
    shards = StoreShards(1)
    shards.init("w", np.ones(100, F), (50,))
    shards.shards[0].capture(folder, {"round": 1})()
    found = next(path for path in sorted(folder.iterdir()) if path.match(name))
    return found, lambda path: StoreShard.restore(path.parent)


def inside_a_manifest(folder: Path) -> tuple[Path, Read]:
    """Faults that a checksum does not show: the program that has written it had them."""
    manifest, read = snapshot(folder, "manifest.json")
    (folder / "text").write_bytes(atomic_files.read_with_checksum(manifest))

    def seal(path: Path) -> object:
        atomic_files.write_with_checksum(manifest, path.read_bytes())
        return read(manifest)

    return folder / "text", seal


READERS: dict[str, Callable[[Path], tuple[Path, Read]]] = {
    "values": values,
    "states": states,
    "residuals": residuals,
    "checkpoint": checkpoint,
    "job": job_of_snapshots,
    "keys": keys,
    "timeline": timeline,
    "cubin": cubin,
    "hosts": hosts,
    "manifest": lambda folder: snapshot(folder, "manifest.json"),
    "snapshot": lambda folder: snapshot(folder, "*.safetensors"),
}


@pytest.mark.parametrize("name", sorted(READERS.keys() - {"hosts"}))
@pytest.mark.filterwarnings("ignore")
def test_each_bit_that_flips_is_refused(tmp_path: Path, name: str) -> None:
    path, read = READERS[name](tmp_path)
    good = path.read_bytes()
    read(path)
    accepted = [bit for bit in range(8 * len(good)) if not refuses(path, good, bit, read)]
    assert not accepted, [good[max(0, bit // 8 - 10) : bit // 8 + 10] for bit in accepted[:5]]
    read(path)


def refuses(path: Path, good: bytes, bit: int, read: Read) -> bool:
    """Whether a file of which one bit is flipped is refused; it is in order again after that."""
    at = bit // 8
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), bytes([good[at] ^ 1 << bit % 8]), at)
        try:
            read(path)
        except kv.KVStoreError:
            return True
        finally:
            os.pwrite(file.fileno(), good[at : at + 1], at)
    return False


def test_a_bit_that_flips_in_a_file_of_hosts_is_another_text_or_refused(tmp_path: Path) -> None:
    """People write these files, without checksums: the result is as the text says."""
    path, _ = hosts(tmp_path)
    good = path.read_bytes()
    for bit in range(8 * len(good)):
        data = bytearray(good)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            found = host_list.of_file(str(path))
        except kv.ConfigError:
            continue
        lines = [line.partition("#")[0].split() for line in data.decode().splitlines()]
        assert [one.name for one in found] == [line[0] for line in lines if line]


WRITERS = {**READERS, "inside a manifest": inside_a_manifest}


def check(folder: Path, name: str, count: int) -> None:
    seed = int(os.environ.get("KVSTORE_FUZZ_SEED", random.SystemRandom().getrandbits(32)))
    chance = random.Random(seed)
    path, read = WRITERS[name](folder)
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


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.filterwarnings("ignore")
def test_files_with_faults(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 1_000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.filterwarnings("ignore")
def test_many_files_with_faults(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, 20_000)
