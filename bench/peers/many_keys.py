"""``python bench/peers/many_keys.py STORE KEYS FOLDER``: a worker that times calls with many keys.

The keys have four floats each. The worker writes the seconds of each push and pull to the folder. The
program imports kvstore alone, so it also runs with an older one.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import kvstore as kv

#: Pairs of calls that are not timed, the fewest and the most timed pairs, and the sum of their keys.
WARM_UP, LEAST, MOST, TOGETHER = 2, 5, 100, 200_000


def timed(store: kv.KVStore, count: int) -> list[float]:
    """Return the seconds of each push and pull of all keys; the last sums are checked."""
    keys = [f"layer{number}" for number in range(count)]
    gradients, sums = np.ones((count, 4), np.float32), np.zeros((count, 4), np.float32)
    values, outs = list(gradients), list(sums)
    store.init(keys, values)
    seconds = [_call(store, keys, values, outs) for _ in range(WARM_UP + _calls(count))]
    if not (sums == store.num_workers).all():
        raise SystemExit("wrong sums")
    return seconds[WARM_UP:]


def _calls(count: int) -> int:
    return max(LEAST, min(MOST, TOGETHER // count))


def _call(store: kv.KVStore, keys: list[str], values: list[np.ndarray], outs: list[np.ndarray]) -> float:
    store.barrier()
    begin = time.perf_counter()
    store.push(keys, values)
    store.pull(keys, out=outs)
    return time.perf_counter() - begin


def main(name: str, count: int, folder: Path) -> None:
    """Time one store in this process, or with the other workers of its job."""
    with kv.create(name) as store:
        seconds = timed(store, count)
        (folder / f"{store.rank}.json").write_text(json.dumps(seconds))
        store.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
