"""Checkpoints: restored values, skipped and kept files, and a job that is killed and resumed."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pace
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nightly import nightly_unless
from safetensors.numpy import load_file

import kvstore as kv
from kvstore.checkpoint import file


def trained(steps: int = 2, rule: str | None = "adam") -> kv.KVStore:
    store = kv.create()
    store.init(["w", "h"], [np.zeros(50, np.float32), np.zeros(3, ml_dtypes.bfloat16)])
    store.init("t", kv.RowSparseArray.zeros((9, 2)))
    if rule:
        store.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1, multi_precision=True))
    step(store, steps)
    return store


def step(store: kv.KVStore, times: int = 1) -> None:
    rows = kv.RowSparseArray(np.ones((2, 2), np.float32), [1, 4], (9, 2))
    for _ in range(times):
        gradients = [np.arange(50, dtype=np.float32), np.ones(3, ml_dtypes.bfloat16), rows]
        store.push(["w", "h", "t"], gradients)


def bits(store: kv.KVStore) -> list[bytes]:
    views = [store.view(key) for key in store.keys()]  # noqa: SIM118 - a store is no dict
    return [(v.todense() if isinstance(v, kv.RowSparseArray) else v).tobytes() for v in views]


def saved(folder: Path, *steps: int, keep: int | None = None) -> kv.CheckpointManager:
    manager = kv.CheckpointManager(folder, keep)
    with trained() as store:
        for number in steps:
            manager.save(store, number)
    manager.wait()
    return manager


@pytest.mark.parametrize("rule", [None, "adam", "lamb", "sgd"])
@pytest.mark.parametrize("before", ["nothing", "init", "optimizer"])
def test_training_goes_on_bit_for_bit(tmp_path: Path, rule: str | None, before: str) -> None:
    manager = kv.CheckpointManager(tmp_path)
    with trained(3, rule) as one:
        manager.save(one, 3, {"epoch": 1}, {"bn": np.arange(3.0), "half": np.ones(2, ml_dtypes.bfloat16)})
        step(one, 2)
        with (
            trained(1, rule if before == "optimizer" else None) if before != "nothing" else kv.create() as two
        ):
            found = manager.restore(two)
            assert found is not None
            assert (found.step, found.extra) == (3, {"epoch": 1})
            assert found.arrays["bn"].tolist() == [0, 1, 2]
            assert found.arrays["half"].dtype == ml_dtypes.bfloat16
            if not (rule is None and before == "optimizer"):
                step(two, 2)
                assert bits(two) == bits(one)


def test_a_save_is_of_its_moment_and_arrays_are_copies(tmp_path: Path) -> None:
    array = np.zeros(4)
    with trained() as one, kv.CheckpointManager(tmp_path) as manager:
        then = bits(one)
        manager.save(one, 1, arrays={"a": array})
        step(one)
        array += 1
        found = manager.restore(one)
        assert found is not None
        assert not found.arrays["a"].any()
        assert bits(one) == then


def test_nothing_to_restore(tmp_path: Path) -> None:
    manager = kv.CheckpointManager(tmp_path / "new" / "folder")
    with trained() as store:
        before = bits(store)
        assert manager.restore(store) is None
        assert (manager.steps(), manager.latest, bits(store)) == ([], None, before)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(st.text(), plain, max_size=4))
def test_any_extra_comes_back(tmp_path_factory: pytest.TempPathFactory, extra: dict[str, Any]) -> None:
    manager = kv.CheckpointManager(tmp_path_factory.mktemp("extra"))
    with kv.create() as store:
        manager.save(store, 0, extra)
        found = manager.restore(store)
    assert found is not None
    assert found.extra == extra


@pytest.mark.parametrize(
    "extra",
    [[], {"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": np.int64(3)}, {"a": np.ones(2)}, {"a": {3}}],
    ids=str,
)
def test_what_json_cannot_say(tmp_path: Path, extra: Any) -> None:
    manager = kv.CheckpointManager(tmp_path)
    with kv.create() as store, pytest.raises(kv.ArgumentError, match="extra"):
        manager.save(store, 0, extra)
    assert manager.steps() == []


def test_arguments(tmp_path: Path) -> None:
    manager = kv.CheckpointManager(tmp_path)
    for wrong in (0, -1, True):
        with pytest.raises(kv.ConfigError):
            kv.CheckpointManager(tmp_path, keep=wrong)
    with trained() as store:
        with pytest.raises(kv.ConfigError):
            manager.save(store, -1)
        with pytest.raises(kv.ArgumentError):
            manager.save(store, 1.5)  # type: ignore[arg-type]
        with pytest.raises(kv.DTypeError):
            manager.save(store, 1, arrays={"a": np.ones(2, complex)})
    with pytest.raises(kv.ArgumentError):
        manager.save(None, 1)  # type: ignore[arg-type]
    with pytest.raises(kv.StateFileError):
        kv.CheckpointManager(__file__)


# ------------------------------------------------------------------------------------ latest, rotation


def test_rotation_leaves_the_newest_and_what_is_not_ours(tmp_path: Path) -> None:
    others = ["step-1.safetensors", "step-00000001.safetensors.bak", "notes"]
    for name in others:
        (tmp_path / name).write_text("theirs")
    manager = saved(tmp_path, 1, 5, 9, 123456789, keep=2)
    assert manager.steps() == [9, 123456789]
    assert manager.latest == 123456789
    assert {*others, "step-00000009.safetensors", "step-123456789.safetensors"} == set(os.listdir(tmp_path))


def test_a_step_below_one_that_is_there_is_refused(tmp_path: Path) -> None:
    manager = saved(tmp_path, 5)
    with trained() as store, pytest.raises(kv.ConfigError, match="step-00000005"):
        manager.save(store, 4)


REGIONS = [0, 7, 8, 9, 60, 300, -1000, -200, -33, -32, -1]


@pytest.mark.parametrize("at", REGIONS)
def test_a_damaged_newest_file_is_skipped(tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    manager = saved(tmp_path, 1, 2, keep=1)
    manager = saved(tmp_path, 3)
    path = tmp_path / "step-00000003.safetensors"
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING), kv.create() as store:
        found = manager.restore(store)
        assert found is not None
        assert (found.step, manager.latest) == (2, 2)
        assert caplog.text.count(str(path)) == 1
        with pytest.raises(kv.StateFileError, match="damaged"):
            manager.restore(store, step=3)


def test_where_all_files_are_damaged_training_does_not_begin_anew(tmp_path: Path) -> None:
    manager = saved(tmp_path, 1, 2)
    for step in (1, 2):
        os.truncate(manager._folder.file_of(step), 500)
    with kv.create() as store:
        with pytest.raises(kv.StateFileError, match=r"all checkpoints in .* are damaged: restore"):
            manager.restore(store)
        assert store.keys() == []
        for step in (1, 2):
            os.unlink(manager._folder.file_of(step))
        assert manager.restore(store) is None


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 500, -1])
def test_a_file_that_is_cut_short_is_skipped(tmp_path: Path, size: int) -> None:
    manager = saved(tmp_path, 1, 2)
    os.truncate(manager._folder.file_of(2), size % os.path.getsize(manager._folder.file_of(2)))
    assert manager.latest == 1


def make_socket(path: str) -> None:
    folder = os.open(os.path.dirname(path), os.O_PATH)  # its path is too long for the name of a socket
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    os.close(folder)


def make_loop(path: str) -> None:
    os.symlink(path, path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, make_socket, make_loop])
def test_what_is_no_file_is_skipped(tmp_path: Path, make: Callable[[str], None]) -> None:
    manager = saved(tmp_path, 1, 2)
    make(manager._folder.file_of(3))
    with kv.create() as store:
        found = manager.restore(store)
        assert found is not None
        assert found.step == 2
        with pytest.raises(kv.StateFileError, match="not a file"):
            manager.restore(store, step=3)
        with pytest.raises(kv.StateFileError, match="step-00000003"):
            store.load(manager._folder.file_of(3))


def test_the_folder_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(kv.StateFileError, match="file cannot be read: Not a directory"):
        kv.CheckpointManager(tmp_path / "file")
    with pytest.raises(kv.StateFileError, match="''"):
        kv.CheckpointManager("")


def test_the_only_whole_file_is_never_removed(tmp_path: Path) -> None:
    manager = saved(tmp_path, 1, 8, 9)
    for number in (8, 9):
        (tmp_path / f"step-0000000{number}.safetensors").write_bytes(b"damaged")
    manager = kv.CheckpointManager(tmp_path, keep=1)
    with kv.create() as store:
        found = manager.restore(store)
        assert found is not None
        assert found.step == 1
        manager.save(store, 2)
        manager.wait()
    assert (manager.latest, manager.steps()) == (2, [2, 8, 9])


def test_any_reader_of_safetensors_can_read_it(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = tmp_path / "step-00000001.safetensors"
    found = load_file(path)
    assert found["value/w"].shape == (50,)
    assert found["value/w"].flags.aligned
    told = subprocess.run(
        f"head -c -32 {path} | sha256sum", shell=True, capture_output=True, text=True, check=True
    )
    assert told.stdout.split()[0] == found["sha256"].tobytes().hex()


# ----------------------------------------------------------------------------------- what does not fit


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    manager = saved(tmp_path, 1)
    with kv.create() as other_shape, kv.create() as other_rule, kv.create() as other_keys:
        other_shape.init("w", np.zeros(51, np.float32))
        other_rule.init("w", np.zeros(50, np.float32))
        other_rule.set_optimizer(kv.optimizer.SGD(learning_rate=0.1))
        other_keys.init(3, np.zeros(2))
        for store, text in ((other_shape, "'w'"), (other_rule, "'sgd'"), (other_keys, "int or str")):
            before = bits(store)
            with pytest.raises(kv.StateFileError, match=text):
                manager.restore(store)
            assert bits(store) == before


# --------------------------------------------------------------------------------------- errors, death


def test_a_full_disk_is_told_at_the_next_call(tmp_path: Path) -> None:
    manager = saved(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with kv.create() as store:
        store.init("w", np.zeros(1 << 20, np.float32))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            manager.save(store, 2)
            with pytest.raises(kv.StateFileError, match=r"cannot be written.*free space") as caught:
                manager.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert isinstance(caught.value, OSError)
        assert os.listdir(tmp_path) == ["step-00000001.safetensors"]
        manager.wait()  # raised once
        manager.save(store, 2)
        manager.close()
    assert manager.latest == 2


def test_a_thread_that_cannot_be_started_is_told_as_a_write_that_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    manager = kv.CheckpointManager(tmp_path)
    with trained() as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            manager.save(store, 1)
        with pytest.raises(kv.StateFileError, match="has not begun: no thread can be started"):
            manager.wait()
        assert manager.steps() == []
        manager.save(store, 1)
        manager.close()
        assert manager.restore(store) is not None


KILLED = """
import os, sys
import numpy as np
import kvstore as kv
from kvstore.checkpoint import file

def stop_in_the_middle(descriptor, piece, write=file._write_all):
    write(descriptor, piece)
    stop_in_the_middle.pieces += 1
    if stop_in_the_middle.pieces == 3:
        os.write(1, b"in the middle\\n")
        sys.stdin.read()

store = kv.create()
store.init("w", np.zeros(5 << 20, np.float32))
manager = kv.CheckpointManager(sys.argv[1])
manager.save(store, 1)
manager.wait()
stop_in_the_middle.pieces = 0
file._write_all = stop_in_the_middle
manager.save(store, 2)
manager.wait()
"""


def test_a_writer_that_is_killed_leaves_what_the_next_removes_but_not_before(tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert job.stdout is not None
    assert job.stdout.readline() == b"in the middle\n"
    living = kv.CheckpointManager(tmp_path)
    assert len(list(tmp_path.glob(".*.tmp"))) == 1, "its writer lives"
    assert (living.steps(), living.latest) == ([1], 1)
    job.send_signal(signal.SIGKILL)
    job.communicate(timeout=pace.seconds(30))
    assert len(list(tmp_path.glob(".*.tmp"))) == 1
    (tmp_path / ".theirs.tmp").touch()
    manager = kv.CheckpointManager(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".theirs.tmp", "step-00000001.safetensors"]
    assert manager.latest == 1


@pytest.mark.parametrize("at", ["os.fstat", "os.open"])
def test_a_file_that_is_taken_for_abandoned_before_its_lock_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    original = getattr(os, at.removeprefix("os."))
    begun: list[str] = []
    removed: list[bool] = []

    def interrupted(*arguments: Any) -> Any:
        result = original(*arguments)
        if not begun and (unfinished := list(tmp_path.glob(".*.tmp"))):
            begun.append(at)
            removed.append(file.remove_if_abandoned(unfinished[0]))
        return result

    monkeypatch.setattr(at, interrupted)
    manager = saved(tmp_path, 1)
    assert removed == [True]
    assert (os.listdir(tmp_path), manager.latest) == (["step-00000001.safetensors"], 1)


def test_a_check_sees_a_checkpoint_before_anything_changes(tmp_path: Path) -> None:
    manager = kv.CheckpointManager(tmp_path)
    with trained() as store:
        manager.save(store, 7, {"a": [1]}, {"b": np.ones(2)})

    def spoil(checkpoint: kv.Checkpoint) -> None:
        assert checkpoint.step == 7
        checkpoint.extra["a"].append(2)
        del checkpoint.arrays["b"]

    with kv.create("local") as store:
        with pytest.raises(kv.ArgumentError, match="must be a function"):
            manager.restore(store, check=5)  # type: ignore[arg-type]
        with pytest.raises(KeyError):
            manager.restore(store, check=lambda checkpoint: checkpoint.extra["none"])
        assert len(store) == 0
        found = manager.restore(store, check=spoil)
    assert found is not None and found.extra == {"a": [1]} and list(found.arrays) == ["b"]


def test_threads_save_one_after_the_other(tmp_path: Path) -> None:
    """And another manager removes their files at the same time."""
    manager, other, steps = (
        kv.CheckpointManager(tmp_path, keep=1),
        kv.CheckpointManager(tmp_path, keep=1),
        count(),
    )
    with trained() as store, trained() as second:

        def save(mine: kv.CheckpointManager, of: kv.KVStore) -> None:
            for _ in range(20):
                with contextlib.suppress(kv.ConfigError):  # a later step is there already
                    mine.save(of, next(steps))

        jobs = [(manager, store), (manager, store), (other, second)]
        with ThreadPoolExecutor(len(jobs)) as pool:
            for one in [pool.submit(save, *job) for job in jobs]:
                one.result()
        manager.wait()
        other.wait()
    assert manager.latest is not None


def test_two_managers_in_one_folder(tmp_path: Path) -> None:
    one, two = kv.CheckpointManager(tmp_path, 2), kv.CheckpointManager(tmp_path, 2)
    with trained() as store:
        for number in range(20):
            one.save(store, number)
            two.save(store, number)
            kv.CheckpointManager(tmp_path)
        one.close()
        two.close()
    assert sorted(os.listdir(tmp_path)) == ["step-00000018.safetensors", "step-00000019.safetensors"]
    assert one.latest == 19


# ------------------------------------------------------------------------------------------------ whole jobs

JOB = """
import os, sys, time
import numpy as np
import kvstore as kv

folder, kind, whole = sys.argv[1], sys.argv[2], 60
weight = np.zeros(3000, np.float32)
with kv.create(kind) as store, kv.CheckpointManager(folder, keep=2) as manager:
    store.init("w", weight)
    store.set_optimizer(kv.optimizer.Adam(learning_rate=0.01, rescale_grad=0.5))
    start = manager.restore(store)
    first = start.step + 1 if start else 1
    if start:
        assert start.extra == {"batch": start.step}, start
        assert start.arrays["seen"].tolist() == [start.step], start
    store.pull("w", out=weight)
    for step in range(first, whole + 1):
        rng = np.random.default_rng([step, store.rank])
        store.pushpull("w", (weight - rng.normal(size=3000)).astype(np.float32), out=weight)
        manager.save(store, step, {"batch": step}, {"seen": np.array([step])})
    manager.wait()
    store.barrier()
    assert os.write(1, b"%d ended with %s\\n" % (store.rank, weight.tobytes()[:400].hex().encode()))
"""


def run_job(tmp_path: Path, folder: str, kind: str) -> subprocess.Popen[str]:
    (tmp_path / "train.py").write_text(JOB)
    servers = ["-s", "1"] if kind.startswith("dist") else []
    command = [sys.executable, "-m", "kvstore", "run", "-n", "2", *servers, "train.py", folder, kind]
    return subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def weights_of(job: subprocess.Popen[str]) -> set[str]:
    out, err = job.communicate(timeout=pace.seconds(60))
    assert job.returncode == 0, err
    found = {line.split()[-1] for line in out.splitlines() if "ended with" in line}
    assert out.count("ended with") == 2
    return found


@pytest.mark.parametrize(
    ("kind", "kills"),
    nightly_unless(
        lambda *case: case == ("shared", 2),
        [("shared", 2), ("shared", 3), ("dist_sync", 2), ("dist_sync", 3)],
    ),
)
def test_a_job_that_is_killed_again_and_again_ends_with_the_same_bits(
    tmp_path: Path, kind: str, kills: int
) -> None:
    undisturbed = weights_of(run_job(tmp_path, "undisturbed", kind))
    assert len(undisturbed) == 1
    folder = tmp_path / "killed"
    for reached in range(kills):
        job = run_job(tmp_path, "killed", kind)
        deadline = pace.deadline(60)
        while not any(folder.glob(f"step-000000[{reached + 1}-6]?.safetensors")):  # of the next ten steps
            assert job.poll() is None, job.communicate()
            assert time.monotonic() < deadline
        job.kill()
        job.communicate(timeout=pace.seconds(30))
    assert weights_of(run_job(tmp_path, "killed", kind)) == undisturbed


TOGETHER = """
import os, sys
import numpy as np
import kvstore as kv

kind, hierarchy = sys.argv[1:]
def store(size):
    made = kv.create(kind, hierarchy=hierarchy)
    made.init("w", np.zeros(size, np.float32))
    return made
rates = kv.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=1.0)
out = np.zeros(4, np.float32)
def push(store):
    if "async" not in kind or store.rank == 1:  # where each push counts by itself, who has not loaded pushes
        store.push("w", np.full(4, store.rank, np.float32))
    store.barrier()
    store.pull("w", out=out)
    store.barrier()  # the next push of the other is not in it
    return out.tolist()

with store(4) as one, kv.CheckpointManager(f"folder-{os.environ['KVSTORE_RANK']}") as manager:
    assert manager.restore(one) is None
    one.set_optimizer(kv.optimizer.SGD(learning_rate=1.0, lr_scheduler=rates))
    for _ in range(5):
        push(one)
    manager.save(one, 5, {"rank": one.rank}, {"a": np.full((2, 3), one.rank + 7), "none": np.zeros((0, 2))})
    manager.wait()
    one.barrier()
    expected = push(one), push(one), push(one)
    assert manager.steps() == ([5] if one.rank == 0 else [])
with store(4) as two:
    found = manager.restore(two)
    assert (found.step, found.extra) == (5, {"rank": 0})
    assert found.arrays["a"].tolist() == [[7] * 3] * 2 and found.arrays["none"].shape == (0, 2)
    two.barrier()
    assert (push(two), push(two), push(two)) == expected
with store(4) as four:

    def refuse(checkpoint):
        assert checkpoint.step == 5
        raise ValueError("not mine")

    try:
        manager.restore(four, check=refuse)
    except (ValueError, kv.StateFileError) as error:
        assert "not mine" in str(error), error
        assert isinstance(error, ValueError if four.rank == 0 else kv.StateFileError)
        four.barrier()
        os.write(1, b"checked\\n")
with store(5) as three:
    try:
        manager.restore(three)
    except kv.StateFileError as error:
        assert "key 'w'" in str(error)
        three.barrier()
        os.write(1, b"refused\\n")
"""


@pytest.mark.parametrize(
    ("kind", "hierarchy"),
    [("shared", "flat"), ("dist_sync", "flat"), ("dist_sync", "host"), ("dist_async", "flat")],
)
def test_all_workers_get_what_worker_0_finds(tmp_path: Path, kind: str, hierarchy: str) -> None:
    (tmp_path / "train.py").write_text(TOGETHER)
    servers = ["-s", "1"] if kind.startswith("dist") else []
    command = [sys.executable, "-m", "kvstore", "run", "-n", "2", *servers, "train.py", kind, hierarchy]
    done = subprocess.run(
        command, cwd=tmp_path, text=True, capture_output=True, timeout=pace.seconds(60), check=False
    )
    assert done.stdout.count("checked") == done.stdout.count("refused") == 2, done.stderr
    assert done.returncode == 0, done.stderr
