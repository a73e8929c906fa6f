"""The processes of jobs in the tests of sums between GPUs by CUDA IPC.

The driver is a fake one in each process, whose exported memory the other processes really open, unless the
test asks for the real one. Kernels are interpreted: arrays are small.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import paths
import procs_shared_gpu as by_host
import pytest
from jobs import hear, tell
from procs_shared import Digest, Values
from procs_shared_compression import Everyone
from procs_shared_gpu import Gpu, Pair, gpu, move, said
from real_gpu import RealArray
from references import assert_same_bits, draw, total

import kvstore as kv

F = np.float32
SIZES = {"one": 1, "odd": 77, "more": 520}


@contextmanager
def lines_of_log() -> Iterator[list[str]]:
    """Collect the log lines of the shared store, but for those of its start, end and slow waits."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "store 'shared'" not in record.getMessage())
    handler.addFilter(lambda record: " was slow: " not in record.getMessage())
    log = logging.getLogger("kvstore.shared")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lines
    log.removeHandler(handler)


@contextmanager
def small_gpu(seed: int = 0, count: int = 2) -> Iterator[Gpu]:
    with gpu(seed=seed, count=count) as made:
        assert made.fake is not None
        made.fake.interpreted = True
        yield made
        made.fake.interpreted = False


def agree(store: Any, made: Gpu, sizes: dict[str, int], dtype: Any = F, device: int = 0) -> None:
    """Rounds until all workers push from GPU to GPU: they say so on the way."""
    values = [made.array(np.zeros(n, dtype), device) for n in sizes.values()]
    for _ in range(4):
        store.pushpull(list(sizes), values)
        store.barrier()


def sums_on_gpus(made: Gpu, store: Any) -> int:
    """How many launches of this process have summed the parts of all workers."""
    assert made.fake is not None
    return sum(name.endswith(f"k{store.num_workers}") for name, _ in made.fake.launches)


# ------------------------------------------------------------------------------------------------------ bits

# The ways of `procs_shared_gpu` that read and write GPUs; all of them, in other words.
WAYS = by_host.WAYS


def sums(name: str, places: list[str], real: bool = False) -> str:
    """Every verb, after the workers have agreed; each worker's arrays lie where the test says."""
    digest = Digest()
    rank = int(kv.create("shared", group="rank").rank)
    chance = random.Random(rank)
    values = Values(name, len(places), 5)
    device = rank % 2 if not real else 0
    with gpu(real, rank) if real else small_gpu(rank) as made, lines_of_log() as lines:
        pair = Pair(values, list(SIZES.values()), lambda array: made.array(array, device))
        agree(pair.store, made, {key: int(key[1:]) for key in pair.keys}, values.dtype, device)
        if real and "refused" in lines[-1]:
            pair.close()
            return "refused"
        assert "CUDA IPC is tried" in lines[0]
        wanted = [f"worker {rank} sums arrays on GPUs by CUDA IPC if no optimizer is set"]
        assert lines[1:] == wanted, lines

        def put(array: Any) -> Any:
            place = places[rank] if places[rank] != "any" else chance.choice(["host", "gpu"])
            return array if place == "host" else made.array(array, device)

        pair.put = put
        for way in WAYS:
            for n in pair.sizes if way is not by_host.together else [0]:
                with said(f"{way.__name__}, {n} elements"):
                    way(pair, n)
        if made.fake is not None and set(places) == {"gpu"}:
            assert sums_on_gpus(made, pair.store) > 50
        for key in pair.keys:
            digest.add(pair.store.view(key))
        pair.close()
    return digest.hex()


def several_devices() -> None:
    """Values of two GPUs in one list, and outs on another GPU than the key's, are copied through the host."""
    with small_gpu() as made, kv.create("shared") as store:
        store.init("w", np.zeros(77, F))
        agree(store, made, {"w": 77})
        for r in range(1, 4):
            parts = [made.array(np.full(77, r * (i + 1), F), i) for i in range(2)]
            outs = [made.array(np.zeros(77, F), i) for i in range(2)]
            store.pushpull("w", parts, out=outs)
            for out in outs:
                assert (out.get() == 3 * r * store.num_workers).all()
            store.pushpull("w", parts[0], out=outs)
            for out in outs:
                assert (out.get() == r * store.num_workers).all()
        store.barrier()
        store.close()


# --------------------------------------------------------------------------------------- rounds, order, slots


def part(seed: int, key: str, r: int, rank: int) -> Any:
    return draw("float32", SIZES[key], 1000 * seed + 10 * r + rank)


def unsynchronised(seed: int) -> str:
    """Workers that run ahead of each other as far as they may, on streams that take turns."""
    digest, chance = Digest(), random.Random(seed)
    with small_gpu(seed) as made, kv.create("shared") as store:
        rank, workers = store.rank, store.num_workers
        store.init(list(SIZES), [np.zeros(n, F) for n in SIZES.values()])
        agree(store, made, SIZES, device=rank % 2)
        own = random.Random(100 * seed + rank)
        wanted: list[tuple[RealArray, str, int]] = []
        works = []
        for r in range(30):
            for key, n in SIZES.items():
                value, out = (
                    made.array(part(seed, key, r, rank), rank % 2),
                    made.array(np.zeros(n, F), rank % 2),
                )
                how = own.randrange(5)
                if how == 0:
                    store.push(key, value)
                elif how == 1:
                    store.push(key, value)
                    store.pull(key, out=out)
                elif how == 2:
                    store.pushpull(key, value, out=out)
                elif how == 3:
                    works.append(store.pushpull(key, value, out=out, async_op=True))
                else:
                    store.pushpull(key, value)
                    out = value
                if how:
                    wanted.append((out, key, r))
            if own.random() < 0.3:
                time.sleep(own.random() * 0.003)
            if chance.random() < 0.2:
                store.barrier()
        for work in works:
            work.wait()
        for out, key, r in wanted:
            with said(f"key {key}, round {r}"):
                assert_same_bits(out.get(), total([part(seed, key, r, w) for w in range(workers)]))
        for key in SIZES:
            found = np.array(store.view(key))
            assert_same_bits(found, total([part(seed, key, 29, w) for w in range(workers)]))
            digest.add(found)
        assert sums_on_gpus(made, store) > 60
        store.barrier()
        store.close()
    return digest.hex()


def pulls_on_streams() -> None:
    """The first pull sums, on its stream; later pulls on other streams find the sum."""
    with small_gpu(count=1) as made, kv.create("shared") as store:
        store.init("more", np.zeros(520, F))
        agree(store, made, {"more": 520})
        for r in range(5):
            store.push("more", made.array(part(0, "more", r, store.rank)))
            want = total([part(0, "more", r, w) for w in range(store.num_workers)])
            outs = [made.array(np.zeros(520, F), stream=stream) for stream in made.streams[0]]
            for out in outs:
                store.pull("more", out=out)
            for out in reversed(outs):
                assert_same_bits(out.get(), want)
        store.barrier()
        store.close()


def golden(name: str) -> None:
    """The sums that MXNet's `device` gave, of one value from each worker."""
    recorded = np.load(paths.DATA / "aggregate.npz")
    with small_gpu(count=1) as made, kv.create("shared") as store:
        assert made.fake is not None
        parts = recorded[f"{name}_values"][: store.num_workers]
        store.init("w", np.zeros_like(parts[0]))
        agree(store, made, {"w": parts[0].size}, parts.dtype)
        value = made.array(parts[store.rank])
        store.pushpull("w", value)
        assert_same_bits(value.get(), recorded[f"{name}_device_sum{store.num_workers}"])
        name, _ = made.fake.launches[-1]
        assert name.endswith(f"k{store.num_workers}")
        store.barrier()
        store.close()


def ahead() -> int:
    """Two pushes before the other worker's first one, again and again; how many slots that takes."""
    with small_gpu(count=1) as made, kv.create("shared") as store:
        store.init("odd", np.zeros(77, F))
        agree(store, made, {"odd": 77})
        for turn in range(6):
            first = turn % store.num_workers
            outs = []
            for phase in range(2):
                if (store.rank == first) == (phase == 0):
                    for r in range(2):
                        store.push("odd", made.array(part(turn, "odd", r, store.rank)))
                store.barrier()
            out = made.array(np.zeros(77, F))
            store.pull("odd", out=out)
            outs.append(out)
            for out in outs:
                want = total([part(turn, "odd", 1, w) for w in range(store.num_workers)])
                assert_same_bits(out.get(), want)
        gpus = store._backend._gpus.staging
        slots = len(gpus.ipc._keys["odd"]._slots)
        store.barrier()
        store.close()
    return slots


def bounded() -> None:
    """Repeated rounds need no more memory, and nothing of them is copied to the host."""
    with small_gpu(count=1) as made, kv.create("shared") as store:
        assert made.fake is not None
        store.init(list(SIZES), [np.zeros(n, F) for n in SIZES.values()])
        agree(store, made, SIZES)
        grads = [made.array(np.ones(n, F)) for n in SIZES.values()]
        outs = [made.array(np.zeros(n, F)) for n in SIZES.values()]

        def rounds(n: int) -> None:
            for _ in range(n):
                store.pushpull(list(SIZES), grads, out=outs)
                store.push(list(SIZES), grads)
                store.pull(list(SIZES), out=outs)
            for out in outs:
                out.get()

        rounds(8)
        before, copies = made.fake.live(), made.fake.calls("cuMemcpyAsync")
        rounds(20)
        assert made.fake.live() == before
        assert made.fake.calls("cuMemcpyAsync") == copies + len(outs)  # the copies of the test itself
        store.barrier()
        store.close()


# ---------------------------------------------------------------------------------------- with other features


def optimizer_later() -> str:
    """An optimizer that is set when the values lie on GPUs finds them, and works on the host."""
    digest = Digest()
    with small_gpu() as made:
        store, local = kv.create("shared"), kv.create("local", processes=1)
        keys, sizes = list(SIZES), list(SIZES.values())
        for one in (store, local):
            one.init(keys, [np.zeros(n, F) for n in sizes])
        agree(store, made, SIZES)
        for r in range(6):
            parts = {k: [part(0, k, r, w) for w in range(store.num_workers)] for k in keys}
            grads = [made.array(own[store.rank], 0) for own in parts.values()]
            outs = [made.array(np.zeros(n, F), 0) for n in sizes]
            if r == 2:
                for one in (store, local):
                    one.set_optimizer(kv.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
            if r == 4:
                for one in (store, local):
                    one.set_updater(None)
            store.pushpull(keys, grads, out=outs)
            local.push(keys, list(parts.values()))
            for key, out in zip(keys, outs, strict=True):
                with said(f"round {r}, key {key}"):
                    assert_same_bits(out.get(), np.array(local.view(key)))
                digest.add(out.get())
        store.barrier()
        store.close()
    return digest.hex()


def compression_later() -> str:
    """A packed value is packed on the host, also by one worker only."""
    digest = Digest()
    codec = {"type": "2bit", "threshold": 0.5}
    with small_gpu() as made, kv.create("shared") as store:
        store.init("more", np.zeros(520, F))
        agree(store, made, {"more": 520})
        if store.rank == 0:
            store.set_gradient_compression(codec)
        everyone = Everyone([codec if w == 0 else None for w in range(store.num_workers)])
        for r in range(4):
            parts = [np.clip(part(0, "more", r, w), -2, 2).astype(F) for w in range(store.num_workers)]
            out = made.array(np.zeros(520, F), 0)
            store.pushpull("more", made.array(parts[store.rank], 0), out=out)
            assert_same_bits(out.get(), everyone("more", parts))
            digest.add(out.get())
        store.barrier()
        store.close()
    return digest.hex()


def files(folder: str) -> None:
    """A save writes the values on the GPUs; a load gives them to all workers."""
    with small_gpu() as made, kv.create("shared") as store:
        keys, sizes = list(SIZES), list(SIZES.values())
        store.init(keys, [np.zeros(n, F) for n in sizes])
        agree(store, made, SIZES)
        for r in range(3):
            store.pushpull(keys, [made.array(np.full(n, r + 1, F), 0) for n in sizes])
            path = Path(folder) / f"{store.rank}-{r}"
            store.save(str(path))
            store.barrier()
            store.pushpull(keys, [made.array(np.full(n, 7, F), 0) for n in sizes])
            store.barrier()
            if store.rank == 0:
                store.load(str(path))
            store.barrier()
            for key, n in SIZES.items():
                out = made.array(np.zeros(n, F), 0)
                store.pull(key, out=out)
                assert (out.get() == (r + 1) * store.num_workers).all()
                assert (np.array(store.view(key)) == (r + 1) * store.num_workers).all()
            store.barrier()
        store.close()


def joined() -> list[float]:
    """A worker that has no more batches: the others continue, and it can still read."""
    with small_gpu() as made, kv.create("shared") as store:
        store.init("odd", np.zeros(77, F))
        agree(store, made, {"odd": 77})
        seen = []
        for r in range(6):
            if store.rank == 0 and r == 2:
                store.join()
            if store.rank == 0 and r >= 2:
                break
            value = made.array(np.full(77, store.rank + 1, F), 0)
            store.pushpull("odd", value)
            seen.append(float(value.get()[0]))
        tell("through")
        assert hear() == "read"
        out = made.array(np.zeros(77, F), 0)
        store.pull("odd", out=out)
        seen.append(float(out.get()[0]))
        tell("has read")
        assert hear() == "close"
        store.close()
    return seen


# --------------------------------------------------------------------------------------------------- refusals


def refused(rank: int, call: str, error: int) -> list[str]:
    """One worker's driver has no IPC: all workers exchange through the host."""
    with small_gpu(count=1) as made, kv.create("shared") as store, lines_of_log() as lines:
        assert made.fake is not None
        if store.rank == rank:
            if call == "memory":
                made.fake.memory = 1 << 20  # less than a block that can be exported
            elif call:
                made.fake.fail(call, error)
            else:
                made.fake.ipc = False
        store.init(list(SIZES), [np.zeros(n, F) for n in SIZES.values()])
        for r in range(1, 8):
            values = [made.array(np.full(n, r, F)) for n in SIZES.values()]
            store.pushpull(list(SIZES), values)
            for value in values:
                assert (value.get() == r * store.num_workers).all()
            store.barrier()
        assert sums_on_gpus(made, store) == 0
        store.close()
        made.fake.ipc, made.fake.memory = True, 1 << 30
    return lines


def wrong_memory() -> list[str]:
    """A handle that opens other memory than its owner has shown."""
    with small_gpu(count=1) as made, kv.create("shared") as store, lines_of_log() as lines:
        store.init("odd", np.zeros(77, F))
        value = made.array(np.ones(77, F))
        for r in range(5):
            value.set(np.ones(77, F))
            if r == 0 and store.rank == 0:  # before the other's memory is offered: it must not be opened yet
                store.push("odd", value)
                store.barrier()
                store.pull("odd", out=value)
            else:
                if r == 0:
                    store.barrier()
                store.pushpull("odd", value)
            assert (value.get() == store.num_workers).all(), r
            if r == 0 and store.rank == 1:
                gpus = store._backend._gpus.staging
                for gpu_ in gpus.ipc._gpus.values():
                    for block in gpu_.exports._blocks:
                        gpus._driver.fill(block, 0, 16, 1, 0)
                        gpus._driver.synchronize(1, 0)
            store.barrier()
        store.close()
    return lines


def switched_off() -> list[str]:
    with small_gpu(count=1) as made, kv.create("shared", cuda_ipc=0) as store, lines_of_log() as lines:
        assert made.fake is not None
        store.init("odd", made.array(np.zeros(77, F)))
        agree(store, made, {"odd": 77})
        assert made.fake.calls("cuIpcGetMemHandle") == 0
        store.close()
    return lines


def broken_once(call: str) -> None:
    """An error of the driver before a worker has arrived: it is quoted, and the round can continue."""
    with small_gpu(count=1) as made, kv.create("shared") as store:
        assert made.fake is not None
        store.init("odd", np.zeros(77, F))
        agree(store, made, {"odd": 77})
        value = made.array(np.ones(77, F))
        made.fake.fail(call, 700)
        with pytest.raises(Exception, match=r"illegal memory access|ILLEGAL_ADDRESS"):
            store.push("odd", value)
        for _ in range(3):
            value.set(np.ones(77, F))
            store.pushpull("odd", value)
            assert (value.get() == store.num_workers).all()
        store.barrier()
        store.close()


# ----------------------------------------------------------------------------------------------- deaths, ends


def until_lost(seed: int) -> dict[str, Any]:
    """Rounds from GPU to GPU until another worker is gone; then the possible reads, and the resources."""
    keys = list(SIZES)
    with small_gpu(seed, count=1) as made:
        store = kv.create("shared")
        store.init(keys, [np.zeros(n, F) for n in SIZES.values()])
        agree(store, made, SIZES)
        assert sums_on_gpus(made, store) > 0
        tell("ready")
        lost, noticed, t = None, 0.0, 0
        while lost is None:
            t += 1
            grads = [made.array(np.full(n, t * (store.rank + 1), F)) for n in SIZES.values()]
            outs = [made.array(np.zeros(n, F)) for n in SIZES.values()]
            try:
                move(store, t, grads, outs, keys)
            except kv.PeerLostError as error:
                lost, noticed = error.rank, time.monotonic()
            made.release(keep=4 * len(keys))
        tell("lost")
        assert hear() == "read"
        values = []
        for key, n in SIZES.items():
            out = made.array(np.full(n, 77, F))
            store.pull(key, out=out)
            found = out.get()
            assert_same_bits(found, np.array(store.view(key)))
            assert (found == found[0]).all()
            values.append(float(found[0]))
        with pytest.raises(kv.PeerLostError):
            store.push("odd", grads[1])
        store.close()  # no living process holds its memory: all of it is freed
    return {"rank": lost, "noticed": noticed, "values": values}


def ended(store: Any, value: Any) -> str:
    """Run a round; return the error that has ended the job for this worker, if any."""
    try:
        store.pushpull("odd", value)
    except kv.PeerLostError:
        return "lost"
    except kv.FencedError:
        return "fenced"
    return ""


def stopped(seed: int) -> str:
    """A worker that is stopped for too long is lost to the others, and is fenced."""
    with small_gpu(seed, count=1) as made:
        store = kv.create("shared")
        store.init("odd", np.zeros(77, F))
        agree(store, made, {"odd": 77})
        tell("ready")
        value, outcome = made.array(np.ones(77, F)), ""
        while not outcome:
            outcome = ended(store, value)
        tell(outcome)
        assert hear() == "close"
        store.close()
    return outcome


def one_closes_late() -> None:
    """Memory that another worker has open is freed only when that worker has closed it."""
    with small_gpu(count=1) as made:
        assert made.fake is not None
        store = kv.create("shared")
        store.init("odd", np.zeros(77, F))
        agree(store, made, {"odd": 77})
        if store.rank == 0:
            tell("open")
            assert hear() == "go"
            out = made.array(np.zeros(77, F))
            store.pull("odd", out=out)
            assert (out.get() == 0).all()
            store.close()
            tell("closed")
        else:
            store.close()
            assert made.fake.live().exported == 1
            tell("left")
            assert hear() == "go"
            from kvstore.stores.shared.ipc import exchange

            exchange._sweep_freed()
            assert made.fake.live().exported == 0
