"""The processes of jobs in the tests of compression between workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from procs_shared import assert_same_bits
from references import Array, lcg
from tested_store import create

import kvstore as kv

SIZES = {"one": 1, "small": 700, "edge": 16384, "large": 100_003}


class Feedback:
    """One worker's gradients as the others see them, stated in NumPy."""

    def __init__(self, codec: dict[str, Any] | None) -> None:
        self.codec = codec or {"type": "none"}
        self.left: dict[str, Array] = {}

    def __call__(self, key: str, gradient: Array) -> Array:
        t = np.float32(self.codec.get("threshold", 0.5))
        x = self.left.get(key, np.zeros_like(gradient)) + gradient
        match self.codec["type"]:
            case "2bit":
                sent = np.where(x >= t, t, np.where(x <= -t, -t, np.float32(0)))
            case "1bit":
                sent = np.where(x > t, np.float32(1), np.float32(-1))
            case "fp16":
                return gradient.astype(np.float16).astype(np.float32)
            case _:
                return gradient
        self.left[key] = x - sent
        return sent


class Everyone:
    """The sum over all workers, in the order of the ranks."""

    def __init__(self, codecs: list[dict[str, Any] | None]) -> None:
        self.parts = [Feedback(codec) for codec in codecs]

    def __call__(self, key: str, gradients: list[Array]) -> Array:
        first, *others = (part(key, grad) for part, grad in zip(self.parts, gradients, strict=True))
        for other in others:
            first = first + other
        return first


def gradients(key: str, r: int, workers: int) -> list[Array]:
    return [lcg(SIZES[key], 100 * r + 10 * len(key) + w, -1.3, 1.3) for w in range(workers)]


def opened(codec: dict[str, Any] | None, **options: Any) -> Any:
    store = create(**options)
    store.init(list(SIZES), [lcg(n, 5) for n in SIZES.values()])
    if codec is not None:
        store.set_gradient_compression(codec)
    store.barrier()
    return store


def rounds(codecs: list[dict[str, Any] | None], rule: str | None, verb: str) -> list[str]:
    """Train a few rounds, each worker with its own codec; compare with `local` on the decoded values."""
    rank = int(create(group="rank").rank)
    store, alone = opened(codecs[rank]), kv.create("local", processes=1)
    alone.init(list(SIZES), [lcg(n, 5) for n in SIZES.values()])
    if rule is not None:
        for made in (store, alone):
            made.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1))
    everyone, seen = Everyone(codecs), []
    for r in range(4):
        own, wanted = {}, {}
        for key in SIZES:
            grads = gradients(key, r, store.num_workers)
            own[key], wanted[key] = grads[rank], everyone(key, grads)
        alone.push(list(SIZES), list(wanted.values()))
        for key, out in zip(SIZES, exchanged(store, own, verb), strict=True):
            assert_same_bits(out, np.array(alone.view(key)))
            seen.append(out.tobytes().hex()[:64])
    store.barrier()
    return seen


def exchanged(store: Any, own: dict[str, Array], verb: str) -> list[Array]:
    keys, values = list(own), list(own.values())
    outs = [np.empty_like(value) for value in values]
    if verb == "push, then pull":
        store.push(keys, values)
        store.pull(keys, out=outs)
    elif verb == "pushpull":
        store.pushpull(keys, values, out=outs)
    elif verb == "in place":
        store.pushpull(keys, values)
        outs = values
    elif verb == "from the store":
        homes = [store.attach(key, value) for key, value in own.items()]
        store.pushpull(keys, homes)
        outs = [home.copy() for home in homes]
    else:  # one key at a time, in two values
        for key, value, out in zip(keys, values, outs, strict=True):
            half = value / np.float32(2)
            store.pushpull(key, [half, half], out=out)
    return outs


def packed_sums(threshold: float, sizes: list[int], verb: str) -> list[str]:
    """Push with 2bit, and read the sums in all ways; return the values that are saved."""
    codec, store = {"type": "2bit", "threshold": threshold}, create()
    keys = [str(at) for at in range(len(sizes))]
    store.init(keys, [np.ones(size, np.float32) for size in sizes])
    store.set_gradient_compression(codec)
    everyone, t = Everyone([codec] * store.num_workers), np.float32(threshold)
    for r in range(4):
        own, wanted = {}, []
        for at, key in enumerate(keys):
            grads = [lcg(sizes[at], 100 * r + 10 * at + w, -2.5, 2.5) * t for w in range(store.num_workers)]
            own[key] = grads[store.rank]
            wanted.append(everyone(key, grads))
        for outs in (packed_exchange(store, own, verb), read_otherwise(store, keys, sizes)):
            for out, want in zip(outs, wanted, strict=True):
                assert_same_bits(out, want)
        store.barrier()
    return [value.tobytes().hex()[:64] for value in wanted]


def packed_exchange(store: Any, own: dict[str, Array], verb: str) -> list[Array]:
    if verb != "async":
        return exchanged(store, own, verb)
    outs = [np.empty_like(value) for value in own.values()]
    work = store.pushpull(list(own), list(own.values()), out=outs, async_op=True)
    work.wait()
    return outs


def read_otherwise(store: Any, keys: list[str], sizes: list[int]) -> list[Array]:
    """Read the values once more, by a pull of doubles, which has float32 arrays of its own."""
    outs = [np.empty(size, np.float64) for size in sizes]
    store.pull(keys, out=outs)
    return [out.astype(np.float32) for out in outs]


def recorded(path: str) -> None:
    """What MXNet's dist_sync gives with two workers and one server."""
    arrays = np.load(path)
    store = create()
    names = [1, 15, 16, 17, 100, 1000]
    store.init([str(n) for n in names], [lcg(n, 77) for n in names])
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    for n in names:
        start = np.empty(n, np.float32)
        store.pull(str(n), out=start)
        np.testing.assert_array_equal(start, arrays[f"compress_t0p5_w2s1__n{n}_init"])
        for t, wanted in enumerate(arrays[f"compress_t0p5_w2s1__n{n}_pulls"]):
            out = np.empty(n, np.float32)
            store.push(str(n), lcg(n, 10 * t + store.rank, -1.3, 1.3))
            store.pull(str(n), out=out)
            assert_same_bits(out, wanted)
    store.barrier()


def with_a_callable() -> None:
    """The updater of one worker gets the decoded values."""
    store = opened({"type": "2bit"})
    seen: list[tuple[str, Array]] = []
    store.set_updater(lambda key, merged, stored: seen.append((key, np.array(merged))))
    everyone = Everyone([{"type": "2bit"}] * store.num_workers)
    for r in range(3):
        for key in SIZES:
            grads = gradients(key, r, store.num_workers)
            wanted, before = everyone(key, grads), len(seen)
            store.push(key, grads[store.rank])
            store.pull(key, out=np.empty(SIZES[key], np.float32))
            for name, merged in seen[before:]:
                assert name == key
                assert_same_bits(merged, wanted)
            store.barrier()


def beside_rows() -> None:
    """One worker pushes rows of a dense key, the other a packed gradient."""
    store = create()
    store.init("w", np.zeros((50, 4), np.float32))
    store.barrier()
    dense = lcg(200, 3, -1.3, 1.3).reshape(50, 4)
    rows = kv.RowSparseArray(np.full((2, 4), 3, np.float32), [1, 40], (50, 4))
    if store.rank == 0:
        store.set_gradient_compression({"type": "2bit"})
    store.push("w", dense if store.rank == 0 else rows)
    out = np.empty((50, 4), np.float32)
    store.pull("w", out=out)
    wanted = Feedback({"type": "2bit"})("w", dense)
    assert_same_bits(out, wanted + rows.todense())
    store.barrier()


def saved(folder: str) -> None:
    """Each worker's residuals in a file of its own; a job that reads them continues like this job."""
    codec = {"type": "2bit", "threshold": 0.75}
    first, second = opened(codec), opened(codec, group="second")
    for r in range(2):
        for key in SIZES:
            first.push(key, gradients(key, r, first.num_workers)[first.rank])
    path = Path(folder) / f"residuals-{first.rank}"
    first.save_residuals(path)
    second.load_residuals(path)
    for key in SIZES:
        outs = []
        for store in (first, second):
            out = np.empty(SIZES[key], np.float32)
            store.pushpull(key, gradients(key, 9, store.num_workers)[store.rank], out=out)
            outs.append(out)
        assert_same_bits(*outs)
    first.barrier()
