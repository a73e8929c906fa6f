"""The processes of jobs in the tests of operations without a key; `jobs.py` runs these."""

from __future__ import annotations

import itertools
import os
import re
import select
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from jobs import hear, tell
from references import Array, assert_same_bits, draw, dtype_of, is_float, total
from tested_store import create

import kvstore as kv
from kvstore.tensor_file import read_raw

F = np.float32


def parts(store: Any, name: str, count: int, seed: int) -> list[Array]:
    """The array that each worker passes."""
    return [draw(name, count, seed + rank) for rank in range(store.num_workers)]


def summed(values: list[Array], average: bool) -> Array:
    """The sum in the order of the ranks; of a mean each value is divided, and rounded, before."""
    if average:
        with np.errstate(all="ignore"):
            values = [(value / len(values)).astype(value.dtype) for value in values]
    return total(values)


def reduce(store: Any, values: list[Array], average: bool = False, **options: Any) -> Array:
    """Reduce this worker's part in place, and return it."""
    mine = values[store.rank].copy()
    work = store.all_reduce(mine, average=average, **options)
    if work is not None:
        work.wait()
    return mine


def raised(call: Callable[[], Any]) -> str:
    try:
        call()
    except kv.KVStoreError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def sums_and_means(name: str) -> None:
    """Short and long arrays of a type, called in both ways, have the bits of a sum in rank order."""
    with create() as store:
        counts = [0, 1, 7, 100, 1023, 1024, 70_001]
        for seed, (count, average, later) in enumerate(
            itertools.product(counts, (False, True), (False, True))
        ):
            if average and not is_float(dtype_of(name)):
                continue
            values = parts(store, name, count, 10 * seed)
            found = reduce(store, values, average, async_op=later)
            if count <= 7 or not os.environ.get("TESTED_HOSTS"):  # long ones are first summed by hosts
                assert_same_bits(found, summed(values, average))
            same_everywhere(store, found)
        if not is_float(dtype_of(name)):
            text = raised(lambda: store.all_reduce(np.zeros(2, dtype_of(name)), average=True))
            assert re.match(r"DTypeError: .* mean of integers", text), text


def same_everywhere(store: Any, array: Array) -> None:
    assert len(set(store.all_gather_object(array.tobytes()))) == 1


def shapes() -> None:
    """Lists of arrays of any shapes and types; strided ones; numbers that would be infinite as a sum."""
    with create() as store:
        rank, n = store.rank, store.num_workers
        ranks = n * (n - 1) // 2
        for _ in range(2):
            arrays = [
                np.array(rank),
                np.full((2, 3), rank, F),
                np.zeros((0, 4)),
                np.full((3, 1), rank, np.uint8),
            ]
            store.all_reduce(arrays)
            assert [array.shape for array in arrays] == [(), (2, 3), (0, 4), (3, 1)]
            assert all((array == ranks).all() for array in arrays)
            long = [np.full(5000, rank, F), np.full((30, 40), rank, np.int64), np.full(3000, rank, F)]
            store.all_reduce(long)
            assert all((array == ranks).all() for array in long)
        every_other = np.full((4, 6), rank, F)
        store.all_reduce(every_other[:, ::2])
        assert every_other.tolist() == [[ranks, rank] * 3] * 4
        half = np.full(3, 60000, np.float16)
        store.all_reduce(half, average=True)
        assert half.tolist() == [float(summed([np.full(1, 60000, np.float16)] * n, True)[0])] * 3
        assert np.isfinite(half).all()


def training(kind: str, together: bool) -> dict[str, Any]:
    """Train with all that may touch a value; with `together` there are calls between and within steps."""
    int_keys, compressed = kind == "int", kind != "exact"
    with create() as store:
        keys: list[Any] = [3, -5] if int_keys else ["w", "x"]
        store.init(keys, [np.ones(50, F), np.full(20_000, 2, F)])
        schedule = kv.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.5)
        store.set_optimizer(kv.optimizer.Adam(lr_scheduler=schedule))
        if compressed and not os.environ.get("TESTED_HOSTS"):
            store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        elif compressed:
            store.set_gradient_compression({"type": "fp16"})
        outs = [np.empty(50, F), np.empty(20_000, F)]
        for step in range(5):
            if together:
                look(store, step)
            values = [draw("float32", len(out), 7 * step + store.rank) for out in outs]
            work = store.all_reduce(np.ones(2, np.int64), async_op=True) if together else None
            if kind == "exact" and not store._backend.no_steps:
                with store.step():
                    store.pushpull(keys, values, out=outs)
                    if together:
                        look(store, step)
            else:
                store.pushpull(keys, values, out=outs)
            if work is not None:
                work.wait()
            if step == 2:
                store.update_optimizer(rescale_grad=0.5)
        store.barrier()
        return written(store, outs)


def look(store: Any, step: int) -> None:
    """Reduce values whose sums must be exact."""
    n = store.num_workers
    for count in (3, 2000 + 1000 * step):
        exact = np.full(count, 1 + 2.0**-20, F)
        store.all_reduce(exact)
        assert (exact == summed([np.full(count, 1 + 2.0**-20, F)] * n, False)).all()
    assert store.broadcast_object({"step": step}, root=n - 1) == {"step": step}


def written(store: Any, outs: list[Array]) -> dict[str, Any]:
    """All that a store says of itself, and all that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        store.save(f"{folder}/values")
        store.save_optimizer_states(f"{folder}/states", dump_optimizer=True)
        files = [content(f"{folder}/{name}") for name in ("values", "states")]
    counts = store.statistics()
    return {
        "keys": store.keys(),
        "length": len(store),
        "placement": {str(key): place for key, place in store.placement().items()},
        "counts": [counts.keys, counts.nbytes, counts.pushes, counts.pulls],
        "outs": [out.tobytes().hex()[:4000] for out in outs],
        "files": files,
    }


def content(path: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the content of a file; safetensors writes its metadata in an order of chance."""
    metadata, tensors = read_raw(path)
    return metadata, {name: array.tobytes().hex() for name, array in tensors.items()}


def kinds_of_keys() -> None:
    """A store takes keys of either kind after an all_reduce, and none that is its own."""
    for key in (5, "five"):
        with create(group=f"of {key}") as store:
            store.all_reduce(np.zeros(3))
            store.init(key, np.zeros(3, F))
            store.all_reduce(np.zeros(3000))
            store.pushpull(key, np.ones(3, F))
            assert store.keys() == [key]
            text = raised(lambda: store.init("__kvstore__/meeting", np.zeros(3)))
            assert text.startswith("KeyKindError"), text
            assert "__kvstore__/meeting" not in store


def differences() -> list[str]:
    """Workers that do not call alike all get an error, with no array changed; the next call is right."""
    with create() as store:
        odd = store.rank == store.num_workers - 1
        calls: list[tuple[Array, Array]] = [
            (np.ones(3, F), np.ones(4, F)),
            (np.ones(3, F), np.ones(3, np.float64)),
            (np.ones(3, F), np.ones(5000, F)),
            (np.ones(5000, F), np.ones(3, F)),
            (np.ones(5000, F), np.ones((50, 100), F)),
            (np.ones(4000, np.int64), np.ones(4000, np.float64)),
        ]
        told = []
        for later, pair in itertools.product((False, True), calls):
            array = pair[odd].copy()
            told.append(raised(lambda: in_way(store, array, later)))  # noqa: B023 - it is called here
            assert (array == 1).all()
        told.append(raised(lambda: store.all_reduce(np.ones(3), average=odd)))
        told.append(
            raised(
                lambda: (
                    store.barrier() or store.all_gather_object(1)
                    if odd
                    else store.barrier() or store.all_reduce(np.ones(1))
                )
            )
        )
        told.append(raised(lambda: store.broadcast_object(1, root=int(odd))))
        check = np.full(3, store.rank)
        store.all_reduce(check)
        assert check.tolist() == [sum(range(store.num_workers))] * 3
        return told


def in_way(store: Any, array: Array, later: bool) -> None:
    work = store.all_reduce(array, async_op=later)
    if work is not None:
        work.wait()


def in_the_background() -> None:
    """Calls in flight at once, short and long, with other calls between them, are paired in call order."""
    with create() as store:
        n, rank = store.num_workers, store.rank
        store.init("w", np.zeros(1000, F))
        arrays = [np.full(count, i + rank) for i, count in enumerate([3, 30_000, 4, 5, 20_000, 2, 1])]
        works = [store.all_reduce(array, async_op=True) for array in arrays]
        store.pushpull("w", np.ones(1000, F))
        now = np.full(2, rank)
        store.all_reduce(now)
        assert now.tolist() == [sum(range(n))] * 2
        for work in reversed(works):
            work.wait()
        for i, array in enumerate(arrays):
            assert (array == n * i + sum(range(n))).all()
        last = store.all_reduce(arrays[0], async_op=True)
        store.wait()
        assert last.done()


def objects() -> None:
    """Objects short and long, from each worker and from all."""
    with create() as store:
        rank, n = store.rank, store.num_workers
        for count in (0, 3, 50_000):
            mine = {
                "rank": rank,
                "list": [1.5, None, True, "é"],
                "array": np.arange(count + rank),
                "raw": b"\0" * count,
            }
            everything = store.all_gather_object(mine if rank % 2 else [mine])
            for other, found in enumerate(everything):
                one = found if other % 2 else found[0]
                assert one["rank"] == other
                assert one["list"] == [1.5, None, True, "é"]
                assert one["array"].tolist() == list(range(count + other))
                assert one["raw"] == b"\0" * count
            for root in range(n):
                found = store.broadcast_object(mine if rank == root else None, root=root)
                assert found["rank"] == root
                assert found["array"].tolist() == list(range(count + root))
        bad = {"a": [1, {"b": object()}]}
        for root in (0, n - 1):
            text = raised(lambda: store.broadcast_object(bad if rank == root else None, root))  # noqa: B023
            assert re.match(
                r"ArgumentError: value\['a'\]\[1\]\['b'\] is of type object"
                if rank == root
                else "ArgumentError: worker",
                text,
            ), text
        text = raised(lambda: store.all_gather_object({1: 2} if rank == 0 else {}))
        assert re.match(
            r"ArgumentError: value has the key 1 of type int" if rank == 0 else "ArgumentError: worker 0 ",
            text,
        ), text
        assert store.all_gather_object(rank) == list(range(n))


def many_shapes() -> int:
    """Many shapes and types; return how many side keys the store has then."""
    with create() as store:
        for count in range(1, 400):
            array = np.full(7 * count, store.rank, [F, np.int64][count % 2])
            store.all_reduce(array)
            assert (array == sum(range(store.num_workers))).all()
        return len(store._collective._reduction._meetings._made)


def after_a_join() -> None:
    """The last worker has no more batches: means are those of the other workers."""
    with create() as store:
        n, rank = store.num_workers, store.rank
        array = np.full(3, rank, F)
        store.all_reduce(array, average=True)
        if rank == n - 1:
            store.join()
            text = raised(lambda: store.all_reduce(np.zeros(3)))
            assert "joined" in text, text
        else:
            for count in (3, 5000):
                found = np.full(count, rank + 1, np.float64)
                store.all_reduce(found, average=True)
                expected = sum(value / (n - 1) for value in range(1, n))
                assert np.allclose(found, expected), found
            assert store.all_gather_object(rank) == list(range(n - 1))
            text = raised(lambda: store.broadcast_object(None, root=n - 1))
            assert re.match(rf"ConfigError: worker {n - 1} does not take part", text), text
        tell("done")
        hear()


def several_threads() -> None:
    """Calls of threads run one after the other; where these keep an order, they are right."""
    with create() as store:
        n, turn, errors = store.num_workers, threading.Semaphore(1), []

        def work(seed: int) -> None:
            try:
                for _ in range(20):
                    with turn:
                        array = np.ones(3 if seed else 3000)
                        store.all_reduce(array)
                        assert (array == n).all()
            except BaseException as error:
                errors.append(error)

        for seed in range(2):
            thread = threading.Thread(target=work, args=(seed,))
            thread.start()
            thread.join()
        assert not errors, errors


def first_calls_of_threads() -> None:
    """Two threads make the same first call at once; all calls are equal, so any order is right."""
    for number in range(8):
        with create(group=f"threads {number}") as store:
            n, begin, errors = store.num_workers, threading.Barrier(2), []

            def work(store: Any, begin: threading.Barrier, errors: list[Any], n: int) -> None:
                try:
                    begin.wait()
                    array = np.ones(1)
                    store.all_reduce(array)
                    assert array[0] == n
                except BaseException as error:
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(store, begin, errors, n)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors, errors


def until_lost(on_peer_loss: str, count: int) -> dict[str, Any]:
    """Reduce until a worker is lost, and then on, where that is no error."""
    with create(on_peer_loss=on_peer_loss) as store:
        n, rank, told = store.num_workers, store.rank, ""
        store.init("w", np.zeros(3, F))
        tell("ready")
        living = n
        for step in range(100_000):
            array = np.full(count, step, np.float64)
            ones = np.ones(count)
            try:
                store.all_reduce(array, average=True)
                store.all_reduce(ones)
            except kv.PeerLostError as error:
                told = f"{error.role} {error.rank}"
                if on_peer_loss == "raise":
                    break
                continue
            assert np.allclose(array, step), (array, step)
            assert ones.min() == ones.max(), ones
            if ones[0] < living:
                living = int(ones[0])
                break
        return {
            "told": told,
            "living": living,
            "present": store.all_gather_object(rank) if living < n else [],
        }


def in_an_updater() -> None:
    """It would wait for workers that wait for the updater."""
    with create() as store:
        told = []

        def update(key: Any, merged: Array, stored: Array) -> None:
            told.append(raised(lambda: store.all_reduce(np.zeros(3))))
            stored += merged

        store.init("w", np.zeros(3, F))
        store.set_updater(update)
        store.pushpull("w", np.ones(3, F))
        sys.stderr.write(f"{told}\n")
        assert all(text.startswith("ConfigError: all_reduce, broadcast_object") for text in told)


def beside_rules_that_need_whole_keys() -> list[float]:
    """Side keys that are spread over servers are no business of such a rule."""
    with create() as store:
        n = store.num_workers
        store.all_reduce(np.ones(200_000, F))
        store.init("w", np.ones(100_000, F))
        store.set_optimizer(kv.optimizer.LAMB(learning_rate=0.01))
        out = np.empty(100_000, F)
        for _ in range(2):
            exact = np.full(200_000, store.rank, np.int64)
            store.all_reduce(exact)
            assert (exact == sum(range(n))).all()
            store.pushpull("w", np.full(100_000, 1 / n, F), out=out)
        return [float(out[0]), float(out[-1])]


def after_many_settings() -> None:
    """However often the settings change, side keys are those of no optimizer."""
    with create() as store:
        store.init("w", np.ones(3, F))
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
        for step in range(1100):
            if store.rank == step % store.num_workers:
                store.set_learning_rate(1 / (step + 1))
        store.barrier()
        for count in (3, 5000):
            array = np.full(count, 1 + 2.0**-20, F)
            store.all_reduce(array)
            assert (array == summed([np.full(1, 1 + 2.0**-20, F)] * store.num_workers, False)[0]).all()


def goes_on_with_who_comes_back(count: int) -> dict[str, Any]:
    """Reduce until the test ends it; a rejoined worker is in the next sums."""
    with create(on_peer_loss="continue") as store:
        store.init("w", np.zeros(3, F))
        seen, stop, told = [], False, False
        tell("ready")
        while not stop:
            told = told or (store.rank == 0 and said("stop"))
            ones = np.array([1.0, float(told)])
            rest = np.ones(count)
            try:
                store.all_reduce([ones, rest])
            except kv.PeerLostError:
                continue
            assert (rest == ones[0]).all(), (np.unique(rest), ones)
            stop = bool(ones[1])
            if not seen or seen[-1] != int(ones[0]):
                seen.append(int(ones[0]))
                tell(f"now {seen}")
        return {"seen": seen}


def said(line: str) -> bool:
    ready, _, _ = select.select([0], [], [], 0)
    return bool(ready) and hear() == line


def on_gpus() -> None:
    """Arrays of GPUs and of the host together, on streams where work runs only when a thread waits for it."""
    from fake_cuda import install
    from real_gpu import RealArray

    install().lazy = True
    with create() as store:
        rank, ranks = store.rank, sum(range(store.num_workers))
        for count, later in itertools.product((0, 3, 3000), (False, True)):
            near, far = np.full(count, rank), RealArray(np.full((count, 2), rank, F))
            work = store.all_reduce([far, near], async_op=later)
            if work is not None:
                work.wait()
            assert (far.get() == ranks).all()
            assert (near == ranks).all()
        half = RealArray(np.full(4, 40000, np.float16))
        store.all_reduce(half, average=True)
        assert half.get().tolist() == [40000] * 4
        text = raised(lambda: store.all_reduce(RealArray(np.ones(3, F), readonly=True)))
        assert re.match("ArrayError: .*read-only", text), text


def while_servers_come_back() -> list[int]:
    """Sums are those of all workers, or an error says that a part was lost; how often which was."""
    with create() as store:
        n, stop, found = store.num_workers, False, [0, 0]
        store.init("w", np.zeros(3, F))
        tell("ready")
        told = False
        while not stop:
            told = told or (store.rank == 0 and said("stop"))
            mine = np.array([1, int(told)])
            text = raised(lambda: store.all_reduce(mine))  # noqa: B023 - it is called here
            if text != "nothing":
                assert "was lost with the memory of a server" in text, text
                found[1] += 1
                continue
            assert mine[0] == n, mine
            found[0] += 1
            stop = mine[1] > 0
        return found


def refused() -> list[str]:
    with create() as store:
        return [
            raised(lambda: store.all_reduce(np.ones(3))),
            raised(lambda: store.broadcast_object(1)),
            raised(lambda: store.all_gather_object(1)),
        ]
