"""Jobs on a local Ray, which `test_ray.py` runs in a Python that has one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as kv

F = np.float32


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not come"
        time.sleep(0.02)


def _say(path: Path, text: str = "") -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def _rounds(store: Any, count: int) -> Any:
    """Push the rank plus one `count` times, with SGD at rate 1: each round takes the sum away."""
    out = np.empty(100_000, F)
    for _ in range(count):
        store.pushpull("w", np.full(out.shape, store.rank + 1, F), out=out)
    return out


def _open(**options: Any) -> Any:
    store = kv.create("dist_sync", timeout=60, **options)
    store.init("w", np.zeros(100_000, F))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    return store


def _values(array: Any) -> list[float]:
    return sorted(set(array.tolist()))


# ---------------------------------------------------------------------------------------------- the functions


def _sums(text: str) -> Any:
    with _open() as store:
        names = ("KVSTORE_LOCAL_RANK", "KVSTORE_LOCAL_SIZE", "KVSTORE_RESTART", "CHOSEN")
        found = [os.environ[name] for name in names]
        return text, store.rank, store.num_workers, _values(_rounds(store, 3)), found, os.getpid()


def _loses_its_server(folder: str) -> Any:
    here = Path(folder)
    with _open() as store:
        _rounds(store, 5)
        store.barrier()
        if store.rank == 0:
            _say(here / "trained")
        _wait_for(here / "killed")
        return _values(_rounds(store, 5))


def _dies_once(folder: str) -> Any:
    """Worker 1 dies after three rounds and rejoins; worker 0 waits for it, so that the sums are exact."""
    here, restart = Path(folder), os.environ["KVSTORE_RESTART"]
    with _open(on_peer_loss="continue") as store:
        if restart == "0":
            _rounds(store, 3)
            store.barrier()
            if store.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            _wait_for(here / "back")
        else:
            held = np.empty(100_000, F)
            store.pull("w", out=held)
            _say(here / "back", json.dumps(_values(held)))
        return restart, _values(_rounds(store, 3))


def _fails(folder: str) -> None:
    with _open() as store:
        _rounds(store, 1)
        _say(Path(folder) / f"pid-{store.rank}", str(os.getpid()))
        if store.rank == 1:
            _wait_for(Path(folder) / "pid-0")
            raise ZeroDivisionError("on purpose")
        time.sleep(60)


def _fails_last(folder: str) -> None:
    """Worker 1 fails, and says so long after worker 0 has lost it."""
    try:
        with _open() as store:
            _rounds(store, 1)
            if store.rank == 1:
                raise ZeroDivisionError("on purpose")
            _rounds(store, 1)
    except ZeroDivisionError:
        _wait_for(Path(folder) / "lost-0")
        time.sleep(1)
        raise
    except kv.PeerLostError:
        _say(Path(folder) / "lost-0")
        raise


def _loses_nobody(rank: int) -> None:
    raise kv.PeerLostError(f"worker {rank} is lost", rank=rank)


def _goes_on(folder: str) -> Any:
    with _open() as store:
        _rounds(store, 1)
        _wait_for(Path(folder) / "go")
        return _values(_rounds(store, 1))


def _pid() -> int:
    return os.getpid()


# ------------------------------------------------------------------------------------------------ the drivers


def sums(folder: str) -> Any:
    from kvstore.ray import Job

    job = Job(num_workers=2, num_servers=2, variables={"CHOSEN": "1"}, resources_per_server={"CPU": 0.5})
    return [job.run(_sums, "hello", timeout=100) for _ in range(2)]


def server_comes_back(folder: str) -> Any:
    import ray

    from kvstore.ray import Job

    here = Path(folder)
    options = {"snapshot": str(here / "shots"), "snapshot_interval": 0.2, "server_restarts": 1}
    with Job(num_workers=2, num_servers=1, **options).start(_loses_its_server, folder) as run:
        _wait_for(here / "trained")
        time.sleep(2)  # for a snapshot after the last round, and another
        ray.kill(run.servers[0], no_restart=False)
        time.sleep(0.2)
        _say(here / "killed")
        return run.wait(100)


def worker_comes_back(folder: str) -> Any:
    from kvstore.ray import Job

    found = Job(num_workers=2, num_servers=1, worker_restarts=1).run(_dies_once, folder, timeout=100)
    return found, json.loads((Path(folder) / "back").read_text())


def failures(folder: str) -> Any:
    from kvstore.ray import Job

    found: list[Any] = []
    for function in (_fails, _dies_once):
        with pytest.raises(kv.WorkerError) as failed:
            Job(num_workers=2).run(function, folder, timeout=60)
        found.append([failed.value.rank, str(failed.value)])
    with open(Path(folder) / "pid-0") as file:
        pid = int(file.read())
    until = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)
    found.append(Path(f"/proc/{pid}").exists())
    for options, wait in (({"resources_per_worker": {"CPU": 999}, "timeout": 2}, 60), ({}, 3)):
        with pytest.raises(kv.errors.TimeoutError) as late:
            Job(num_workers=2, **options).run(time.sleep, 60, timeout=wait)
        found.append(str(late.value))
    assert len(Job(num_workers=1).run(_pid, timeout=60)) == 1  # the earlier jobs have left nothing behind
    return found


def hidden(folder: str) -> Any:
    """The error of a worker that the other workers lose, though their errors arrive first."""
    from kvstore.ray import Job

    found: list[Any] = []
    for function, argument in ((_fails_last, folder), (_loses_nobody, 7)):
        began = time.monotonic()
        with pytest.raises(kv.WorkerError) as failed, Job(num_workers=2).start(function, argument) as run:
            run.wait(60)
        found.append([failed.value.rank, str(failed.value), time.monotonic() - began])
        with pytest.raises(kv.WorkerError) as again:
            run.wait(60)
        found[-1].append(str(again.value) == str(failed.value))
    return found


def waits(folder: str) -> Any:
    from kvstore.ray import Job

    found: list[Any] = []
    with Job(num_workers=2).start(_goes_on, folder) as run:
        for seconds in (0, 3):
            with pytest.raises(kv.errors.TimeoutError) as late:
                run.wait(seconds)
            found.append(str(late.value))
        _say(Path(folder) / "go")
        found.append(run.wait(60))
    found.append(run.wait())
    with Job(num_workers=1).start(time.sleep, 60) as run:
        pass
    with pytest.raises(kv.ClosedError) as closed:
        run.wait(10)
    return [*found, str(closed.value)]


def refused(folder: str) -> Any:
    """The errors of a job about arguments that it cannot have."""
    from kvstore.ray import Job

    wrong: list[dict[str, Any]] = [
        {"resources_per_worker": "x"},
        {"resources_per_worker": {"CPU": -1, "GPU": 1}},
        {"resources_per_server": {"CPU": "1"}},
        {"resources_per_server": {1: 1}},
        {"resources_per_server": {"CPU": float("nan")}},
        {"strategy": "NOPE"},
        {"strategy": None},
        {"timeout": -1},
        {"timeout": 0},
        {"timeout": "300"},
        {"timeout": float("nan")},
        {"snapshot": 5},
        {"snapshot_interval": 0},
        {"snapshot_interval": True},
        {"variables": {"A": 1}},
        {"variables": {"A=B": "1"}},
        {"variables": "A=1"},
        {"imports": "rules"},
        {"imports": [1]},
        {"insecure": "False"},
    ]
    said = []
    for options in wrong:
        with pytest.raises(kv.ConfigError) as error:
            Job(num_workers=2, **options)
        said.append([next(iter(options)), str(error.value)])
    job = Job(num_workers=2, variables={"A": "1"}, imports=["rules"], snapshot=Path(folder), timeout=1)
    for timeout in (-1, "1", float("nan")):
        with pytest.raises(kv.ConfigError) as error:
            job.run(_pid, timeout=timeout)  # type: ignore[arg-type]
        said.append(["timeout", str(error.value)])
    return said


def encrypted(folder: str) -> Any:
    """As between nodes: addresses that other nodes reach, and keys."""
    import ray

    from kvstore import ray as front

    nodes = ray.nodes
    front._ray.nodes = lambda: [*nodes(), {"Alive": True}]
    return front.Job(num_workers=1, num_servers=1).run(_secret, timeout=100)


def _secret() -> Any:
    from kvstore.settings import roles

    with _open() as store:
        part = roles.find()
        assert part is not None
        return part.scheduler, part.keys is not None, _values(_rounds(store, 2))


if __name__ == "__main__":
    import ray

    if sys.argv[1] != "refused":  # before there is a Ray
        ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        result = globals()[sys.argv[1]](sys.argv[2])
    finally:
        ray.shutdown()
    Path(sys.argv[2], "result").write_text(json.dumps(result))
