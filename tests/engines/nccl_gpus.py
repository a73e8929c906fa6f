"""Stores on NCCL with arrays on GPUs, in processes with one GPU each; NCCL and CUDA are stand-ins.

    LAUNCHER python tests/engines/nccl_gpus.py nccl FOLDER BODY

Work on a stream runs only when a thread waits for it, so that a wrong order shows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conformance
import numpy as np

import kvstore as kv

Told = dict[str, Any]


def on(content: Any, device: int | None = None) -> Any:
    from real_gpu import RealArray

    return RealArray(np.asarray(content), device=int(os.environ["LOCAL_RANK"]) if device is None else device)


def ones(factor: float = 1, n: int = 5, dtype: Any = np.float32) -> Any:
    return factor * np.ones(n, dtype)


def seen(call: Callable[[], Any]) -> Told:
    """Error of a call, and how long it took."""
    start = time.monotonic()
    try:
        call()
    except kv.KVStoreError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
    return {"error": None, "seconds": time.monotonic() - start}


def sums(store: kv.KVStore, folder: Path) -> Told:
    rank, size = store.rank, store.num_workers
    everyone = sum(range(1, size + 1))
    first = on(ones(7 * (rank + 1)))
    store.init(["b", "a"], [first, on(ones(rank, dtype=np.float64))])
    assert store.view("b").numpy().tolist() == [7.0] * 5, "rank 0's"
    grad, out = on(ones(rank + 1)), on(ones(0))
    for turn in range(3):
        store.push("b", grad)
        store.pull("b", out=out)
        assert out.get().tolist() == [everyone] * 5, turn
    wide = on(ones(rank + 1, dtype=np.float64))
    store.pushpull(["a", "b"], [wide, [grad, grad]])
    assert wide.get().tolist() == [everyone] * 5
    assert grad.get().tolist() == [2 * everyone] * 5
    assert store.placement()["a"] == [(f"worker {rank} cuda:{rank}", 40)]
    return {}


def both_places(store: kv.KVStore, folder: Path) -> Told:
    rank, size = store.rank, store.num_workers
    store.init("host", ones(rank + 3))
    store.broadcast("moves", ones(rank + 5), out=(start := on(ones(0))))
    assert start.get().tolist() == [5.0] * 5
    host, grad = ones(), on(ones())
    outs = [on(ones(0)), ones(0)]
    store.pushpull(["moves", "host"], [grad, host], out=outs)
    assert outs[0].get().tolist() == [size] * 5
    assert outs[1].tolist() == [size] * 5
    store.pull(["host", "moves"], out=[on(ones(0)), outs[1]])
    store.pushpull("moves", ones(2), out=outs)
    assert outs[1].tolist() == [2 * size] * 5
    store.save(folder / f"values.{rank}")
    store.push("moves", grad)
    store.load(folder / f"values.{rank}")
    store.pull("moves", out=outs)
    assert outs[0].get().tolist() == [2 * size] * 5
    store.barrier()
    return {}


def mistakes(store: kv.KVStore, folder: Path) -> Told:
    rank, size = store.rank, store.num_workers
    other = seen(lambda: store.init("w", on(ones(n=5 + rank))))
    place = seen(lambda: store.init("w", on(ones()) if rank else ones()))
    store.init("w", on(ones()))
    foreign = seen(lambda: store.push("w", on(ones(), device=3)))
    shape = seen(lambda: store.push("w", on(ones(n=4))))
    grad = on(ones())
    store.pushpull("w", grad)
    assert grad.get().tolist() == [size] * 5
    return {"other": other, "place": place, "foreign": foreign, "shape": shape}


def passing(store: kv.KVStore, folder: Path) -> Told:
    """Keys that were never initialised, on GPUs and together with keys of the host."""
    rank, size = store.rank, store.num_workers
    everyone = sum(range(1, size + 1))
    for n in (5, 7):
        grad, out, far = on(ones(rank + 1, n)), on(ones(0, n)), ones(0, n, np.float64)
        store.pushpull("v", [grad, grad], out=[out, far])
        store.pushpull("v", grad)
        assert out.get().tolist() == far.tolist() == [2 * everyone] * n
        assert grad.get().tolist() == [everyone] * n
    both = [on(ones(rank + 1)), ones(rank + 1)]
    store.pushpull(["gpu", "host"], both)
    assert both[0].get().tolist() == both[1].tolist() == [everyone] * 5
    host, out = ones(rank + 1), on(ones(0))
    store.pushpull("host", host, out=out)
    assert out.get().tolist() == [everyone] * 5
    assert store.keys() == []
    told = {
        "shape": seen(lambda: store.pushpull("v", on(np.ones((2, 3) if rank else (3, 2), np.float32)))),
        "place": seen(lambda: store.pushpull("v", on(ones()) if rank else ones())),
        "pull": seen(lambda: store.pull("v", out=out)),
    }
    if rank:  # a mistake of one is its own
        told["own"] = seen(lambda: store.pushpull("v", [on(ones()), on(ones(n=4))]))
    store.init("v", on(ones()))
    store.pushpull("v", grad := on(ones()))
    assert grad.get().tolist() == [size] * 5
    return told


def killed(store: kv.KVStore, folder: Path) -> Told:
    store.init("w", on(ones()))
    grad = on(ones())
    if store.rank == store.num_workers - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    first = seen(lambda: store.push("w", grad))
    later = seen(lambda: store.push("w", grad))
    return {"first": first, "later": later, "rank": store.num_workers - 1}


def absent(store: kv.KVStore, folder: Path) -> Told:
    store.init("w", on(ones()))
    if store.rank:
        while not (folder / "over").exists():
            time.sleep(0.05)
        return {}
    first = seen(lambda: store.push("w", on(ones())))
    (folder / "over").touch()
    return {"first": first, "later": seen(lambda: store.pull("w", out=ones()))}


def stores_in_turn(store: kv.KVStore, folder: Path) -> Told:
    others = [kv.create("nccl", timeout=20), kv.create("nccl", timeout=20, group="other")]
    for number, one in enumerate((store, *others)):
        one.init("w", on(ones(0)))
        grad = on(ones(number + 1))
        one.pushpull("w", grad)
        assert grad.get().tolist() == [(number + 1) * store.num_workers] * 5
    for one in others:
        one.close()
    return {}


BODIES = {
    body.__name__: body for body in (sums, both_places, mistakes, passing, killed, absent, stores_in_turn)
}


def main() -> None:
    engine, folder, body = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    (folder / f"{os.getpid()}.pid").write_text(str(os.getpid()))
    conformance.prepare(engine)
    import fake_cuda

    driver = fake_cuda.install()
    driver.lazy, driver.interpreted = True, True
    store = kv.create(engine, timeout=2.0 if body == "absent" else 20)
    told = BODIES[body](store, folder)
    store.close()
    (folder / f"{store.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
