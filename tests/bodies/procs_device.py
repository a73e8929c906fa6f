"""Processes of a job of the shared store with arrays on fake GPUs; `jobs.py` runs these."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from lazy_driver import GpuArray, LazyDriver, new_stream
from procs_shared import Digest
from references import assert_same_bits, draw, total

import kvstore as kv
from kvstore.devices import driver


def rounds(rank_of_host: int) -> str:
    """Push, pull and pushpull, one worker on the host perhaps; every worker knows the expected result."""
    fake, digest, heard = LazyDriver(count=2), Digest(), list[str]()
    driver.replace_driver(fake)
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kvstore.shared").addHandler(handler)
    logging.getLogger("kvstore.shared").setLevel(logging.INFO)
    sizes = {"a": 5, "b": 3000}
    with kv.create("shared", timeout=60) as store:
        fake._random.seed(store.rank)

        def there(array: Any, device: int = 0) -> Any:
            if store.rank == rank_of_host:
                return array.copy()
            return GpuArray(fake, array, device, stream=new_stream())

        def home(array: Any) -> Any:
            return array if isinstance(array, np.ndarray) else array.get()

        store.init(list(sizes), [there(np.zeros(n, np.float32)) for n in sizes.values()])
        for step in range(12):
            drawn = {key: _drawn(store.num_workers, n, step) for key, n in sizes.items()}
            mine = [[there(v, i % 2) for i, v in enumerate(own[store.rank])] for own in drawn.values()]
            outs = [there(np.full(n, -1, np.float32)) for n in sizes.values()]
            if step % 4 == 0:
                store.pushpull(list(sizes), mine, out=outs)
            elif step % 4 == 1:
                store.push(list(sizes), mine)
                store.pull(list(sizes), out=outs)
            elif step % 4 == 2:
                store.pushpull(list(sizes), mine)
                outs = [own[-1] for own in mine]
            else:
                works = [
                    store.push(list(sizes), mine, async_op=True),
                    store.pull(list(sizes), outs, async_op=True),
                ]
                for work in works:
                    work.wait()
            for (key, own), out in zip(drawn.items(), outs, strict=True):
                right = total([total(values) for values in own])
                assert_same_bits(home(out), right)
                assert_same_bits(store.view(key), right)
                digest.add(home(out))
    fake.assert_sound()
    assert sum("CUDA IPC" in line for line in heard) == (store.rank != rank_of_host), heard
    return digest.hex()


def _drawn(workers: int, n: int, step: int) -> list[list[Any]]:
    """Two values of each worker."""
    return [[draw("float32", n, 1000 * step + 10 * rank + i) for i in range(2)] for rank in range(workers)]
