"""What servers hold against pulls recorded from MXNet 1.9.1's distributed stores (tests/data/README.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from references import assert_same_bits, lcg
from shards import StoreShards

import kvstore as kv
from kvstore.kernels import cpu
from kvstore.optimizer import create
from kvstore.stores.parameter_server.server.payload import SlicePayload, SliceUpdate

Array = npt.NDArray[Any]
Golden = Callable[[str], Any]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.85, "wd": 0.03},
    "adam": {"learning_rate": 0.05, "wd": 0.03},
    "lamb": {"learning_rate": 0.05, "wd": 0.03},
}
LAYOUTS = {"w1s1": (1, 1), "w2s1": (2, 1), "w2s2": (2, 2), "w2s3": (2, 3)}


# The rules are master's, whose order of operations differs a little.
LIMIT = 4


def distance(ours: Array, golden: Array) -> float:
    """Largest difference in units in the last place of the largest weight."""
    difference = np.abs(ours.astype(np.float64) - golden.astype(np.float64)).max()
    return float(difference / np.spacing(np.abs(golden).max()))


@pytest.fixture
def dist(golden: Golden) -> Any:
    return golden("dist.npz")


# ------------------------------------------------------------------------------------------ compression

# The values set, and those of MXNet's servers: MXNet sends them as text with six decimals.
THRESHOLDS = {"t0p5": (0.5, 0.5), "t1div3": (1 / 3, 0.333333), "t1em7": (1e-7, 0.0)}
COMPRESSED = [
    *(("t0p5", layout) for layout in LAYOUTS),
    ("t1div3", "w2s2"),
    ("t1em7", "w2s2"),
]


def test_every_recorded_compression_is_tested(dist: Any) -> None:
    cases = {name.split("__")[0] for name in dist.files if name.startswith("compress")}
    assert cases == {f"compress_{threshold}_{layout}" for threshold, layout in COMPRESSED}


@pytest.mark.parametrize(("threshold", "layout"), COMPRESSED)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 100, 1000])
def test_two_bits(dist: Any, threshold: str, layout: str, n: int) -> None:
    workers, servers = LAYOUTS[layout]
    exact, sent = THRESHOLDS[threshold]
    coding = cpu.coding("two_bit")
    shards = StoreShards(servers)
    start = lcg(n, 77)
    shards.init("w", start, (16, 32, 512))
    prefix = f"compress_{threshold}_{layout}__n{n}"
    assert_same_bits(shards.pull("w"), dist[f"{prefix}_init"])
    residuals = [np.zeros(n, np.float32) for _ in range(workers)]
    for t, wanted in enumerate(dist[f"{prefix}_pulls"]):
        words = []
        for rank in range(workers):
            words.append(np.empty(cpu.encoded_bytes(coding, n), np.uint8))
            cpu.encode(coding, exact, [lcg(n, 10 * t + rank, -1.3, 1.3)], residuals[rank], words[-1])
        for piece in shards.entries["w"].slices:
            part = slice(piece.start // 4, (piece.stop + 15) // 16 * 4)
            parts = [(rank, SlicePayload(its[part], coding, sent)) for rank, its in enumerate(words)]
            assert shards.shards[piece.server].rounds.apply_jobs([SliceUpdate(piece.id, t + 1, parts)]) == [
                None
            ]
        assert_same_bits(shards.pull("w"), wanted)


# ------------------------------------------------------------------------------------- sums and updates


@pytest.mark.parametrize("layout", ["w1s1", "w2s1", "w2s2"])
def test_sums(dist: Any, layout: str) -> None:
    workers, servers = LAYOUTS[layout]
    shards = StoreShards(servers)
    shards.init("a", np.full((2, 3), 9, np.float32), (4,))
    for t, wanted in enumerate(dist[f"sum_{layout}__pulls"]):
        pushed = [lcg(6, 100 * t + 10 * r) + lcg(6, 100 * t + 10 * r + 1) for r in range(workers)]
        shards.push(("a", [value.reshape(2, 3) for value in pushed]))
        assert_same_bits(shards.pull("a"), wanted)


@pytest.mark.parametrize("layout", ["w2s1", "w2s2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(dist: Any, name: str, layout: str) -> None:
    workers, servers = LAYOUTS[layout]
    shards = StoreShards(servers)
    shards.init("w", lcg(6, 1).reshape(2, 3))
    shards.init("big", lcg(200, 2).reshape(20, 10), () if name == "lamb" else (64, 100))
    shards.set_optimizer(create(name, lr_mult={"big": 0.5}, **OPTIMIZERS[name]))
    for t in range(4):
        small = [lcg(6, 300 + 10 * t + r).reshape(2, 3) for r in range(workers)]
        large = [lcg(200, 400 + 10 * t + r).reshape(20, 10) for r in range(workers)]
        assert shards.push(("w", small), ("big", large)) == [None] * len(list(shards.pieces()))
        for key in ("w", "big"):
            # MXNet's two servers took the norms of their halves; ours give the result of one server.
            recorded = "w2s1" if name == "lamb" else layout
            wanted = dist[f"optim_{name}_{recorded}__{key}"][t]
            assert distance(shards.pull(key), wanted) <= LIMIT


def test_lamb_has_the_same_bits_on_any_number_of_servers(dist: Any) -> None:
    pulls = []
    for servers in (1, 2, 3):
        shards = StoreShards(servers)
        shards.init("w", lcg(6, 1).reshape(2, 3))
        shards.init("big", lcg(200, 2).reshape(20, 10), (64, 100) if servers == 1 else ())
        shards.set_optimizer(create("lamb", **OPTIMIZERS["lamb"]))
        for t in range(4):
            large = [lcg(200, 400 + 10 * t + r).reshape(20, 10) for r in range(2)]
            assert set(shards.push(("big", large))) == {None}
        pulls.append(shards.pull("big"))
    assert_same_bits(pulls[0], pulls[1])
    assert_same_bits(pulls[0], pulls[2])


def test_a_float32_copy_behind_float16(dist: Any) -> None:
    shards = StoreShards(1)
    shards.init("w", lcg(6, 1).astype(np.float16).reshape(2, 3), (4,))
    shards.set_optimizer(create("sgd", multi_precision=True, **OPTIMIZERS["sgd"]))
    for t, wanted in enumerate(dist["fp16mp_w2s1__w"]):
        pushed = [lcg(6, 300 + 10 * t + r).astype(np.float16).reshape(2, 3) for r in range(2)]
        shards.push(("w", pushed))
        assert distance(shards.pull("w"), wanted) <= 1


@pytest.mark.parametrize("layout", ["w2s1", "w2s2"])
def test_rows(dist: Any, layout: str) -> None:
    shards = StoreShards(LAYOUTS[layout][1])
    every = np.arange(8, dtype=np.int64)
    shards.init("w", kv.RowSparseArray(lcg(24, 5).reshape(8, 3), every, (8, 3)), (4,))
    shards.set_optimizer(create("test", learning_rate=-1))  # 1.9.1 added the gradient
    pushed = [kv.RowSparseArray(lcg(6, 50 + r).reshape(2, 3), [r, 5], (8, 3)) for r in range(2)]
    assert set(shards.push(("w", pushed))) == {None}
    ids = dist[f"rsp_{layout}__idx"]
    found = []
    for piece in shards.entries["w"].slices:
        its = ids[(ids >= piece.start) & (ids < piece.stop)]
        found.append(shards.shards[piece.server].read_rows(piece.id, its)[1])
    assert_same_bits(np.concatenate(found), dist[f"rsp_{layout}__data"])


@pytest.mark.parametrize("kind", ["pushpull", "pushpull_p3"])
def test_what_a_pushpull_brings_back(dist: Any, kind: str) -> None:
    shards = StoreShards(2)
    shards.init("w", np.zeros((2, 3), np.float32), (2, 4))
    shards.push(("w", [(lcg(6, 60 + r) + lcg(6, 65 + r)).reshape(2, 3) for r in range(2)]))
    assert_same_bits(shards.pull("w"), dist[f"{kind}_w2s2__inplace"])
    shards.push(("w", [lcg(6, 80 + r).reshape(2, 3) for r in range(2)]))
    assert_same_bits(shards.pull("w"), dist[f"{kind}_w2s2__out"])
