"""Stores on servers against what MXNet 1.9.1's gave, and did when misused (tests/data/README.md)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import ServedJob

import kvstore as kv

DATA = Path(__file__).parents[2] / "data"
BODIES = "procs_dist_golden"
LAYOUTS = {"w1s1": (1, 1), "w2s1": (2, 1), "w2s2": (2, 2), "w2s3": (2, 3)}

#: Where we give other numbers on purpose; the bodies compare with the values of the reason.
DIFFERENCES = {
    "compress_t1div3_w2s2": "a threshold travels exactly; MXNet's servers decode with 0.333333",
    "compress_t1em7_w2s2": "a threshold travels exactly; MXNet's servers decode everything to zero",
    "optim_lamb_w2s2__big": "norms are those of the whole tensor; MXNet's servers take those of their halves",
}

Served = Callable[..., ServedJob]
Store = kv.KVStore


def test_every_recorded_array_is_compared(served: Served) -> None:
    made = {layout: served(*counts) for layout, counts in LAYOUTS.items()}
    compared: set[str] = set()
    for layout, job in made.items():
        job.start_all(BODIES, "everything", str(DATA / "dist.npz"), layout)
        for result in job.results():
            compared |= set(result)
    assert compared == set(np.load(DATA / "dist.npz").files)
    for name in DIFFERENCES:
        assert any(array.startswith(name) for array in compared)


# ---------------------------------------------------------------------------------------------------- misuse

RECORDED = json.loads((DATA / "misuse_dist.json").read_text())
MISUSE: dict[str, tuple[Callable[..., Any], str]] = {}


def ones(value: float = 1, shape: tuple[int, ...] = (2, 3), dtype: Any = np.float32) -> Any:
    return np.full(shape, value, dtype)


def table(*rows: int) -> kv.RowSparseArray:
    return kv.RowSparseArray(ones(shape=(len(rows), 3)), list(rows), (4, 3))


def pulled(store: Store, key: Any, like: Any = None) -> float:
    out = ones(-9) if like is None else like
    store.pull(key, out=out)
    assert (out == out.flat[0]).all()
    return float(out.flat[0])


def case(differs: str = "") -> Callable[[Any], Any]:
    """Note how we differ from MXNet's record of this name, and why."""

    def add(body: Any) -> Any:
        MISUSE[f"t_{body.__name__}_w1"] = body, differs
        return body

    return add


@case("what is pushed stays the caller's; MXNet wrote the pulled value into it")
def alias(store: Store) -> bool:
    store.init(3, ones())
    store.set_optimizer(kv.optimizer.Test(learning_rate=-1))
    value = ones(5)
    store.push(3, value)
    return pulled(store, 3) == RECORDED["t_alias_w1"]["rank0"]["pulled"] == 6 and value[0, 0] == 5


@case("a second init is an error for int keys too; MXNet replaced the value")
def dup_init_int(store: Store) -> bool:
    store.init(3, ones())
    with pytest.raises(kv.DuplicateKeyError, match="key 3"):
        store.init(3, ones(2))
    return pulled(store, 3) == 1


@case()
def dup_init_str(store: Store) -> bool:
    store.init("3", ones())
    with pytest.raises(kv.DuplicateKeyError, match="key '3'"):
        store.init("3", ones(2))
    return pulled(store, "3") == 1


@case("a pushpull may be compressed; MXNet refused it")
def gc_pushpull(store: Store) -> bool:
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init(3, ones())
    value = ones(0.7)
    store.pushpull(3, value)
    return bool((value == 0.5).all())


@case("as in all stores a key of any type may be initialised; MXNet's distributed stores refused that, too")
def gc_fp16(store: Store) -> bool:
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init(3, ones(dtype=np.float16))
    with pytest.raises(kv.DTypeError, match="float32"):
        store.push(3, ones(dtype=np.float16))
    return pulled(store, 3, ones(-9, dtype=np.float16)) == 1


@case("as in all stores a table may be initialised; MXNet's distributed stores refused that, too")
def gc_rsp(store: Store) -> bool:
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.init(3, table(0, 1, 2, 3))
    with pytest.raises(kv.ArrayError, match="row-sparse"):
        store.push(3, table(0, 1))
    return store.keys() == [3]


@case("a row-sparse out is filled if that is asked for; MXNet's distributed stores refused it")
def ignore_sparse_false(store: Store) -> bool:
    store.init(3, table(1, 2))
    out = table(0)
    store.pull(3, out=out, ignore_sparse=False)
    return out.indices.tolist() == [1, 2]


@case("an unknown key is an error; MXNet's server died, and the worker waited for ever")
def pull_uninit_int(store: Store) -> bool:
    with pytest.raises(kv.KeyNotFoundError, match="key 9"):
        store.pull(9, out=ones())
    return True


@case()
def pull_uninit_str(store: Store) -> bool:
    with pytest.raises(kv.KeyNotFoundError, match="key '9'"):
        store.pull("9", out=ones())
    return True


@case("an unknown key is an error; MXNet took the push for an init")
def push_uninit_int(store: Store) -> bool:
    with pytest.raises(kv.KeyNotFoundError, match="key 9"):
        store.push(9, ones(4))
    return store.keys() == []


@case()
def push_uninit_str(store: Store) -> bool:
    with pytest.raises(kv.KeyNotFoundError, match="key '9'"):
        store.push("9", ones(4))
    return store.keys() == []


@case("an out may be of another type, as in a pull; MXNet refused it")
def pushpull_dtype(store: Store) -> bool:
    store.init(3, ones())
    out = ones(dtype=np.float16)
    store.pushpull(3, ones(1.5), out=out)
    return bool((out == 1.5).all())


@case("rows may be pushed and pulled in one; MXNet refused it")
def pushpull_rsp(store: Store) -> bool:
    store.init(3, table(0, 1, 2, 3))
    out = ones(-9, (4, 3))
    store.pushpull(3, table(1, 2), out=out)
    return out[:, 0].tolist() == [0, 1, 1, 0]


@case("a table can be pulled into a dense array; MXNet's server died")
def rsp_dense_pull(store: Store) -> bool:
    store.init(3, table(1, 2))
    out = ones(-9, (4, 3))
    store.pull(3, out=out)
    return out[:, 0].tolist() == [0, 1, 1, 0]


@case("several outs are filled, as in one process; MXNet's distributed stores refused it")
def rsp_two_values(store: Store) -> bool:
    store.init(3, table(0, 1, 2, 3))
    one, two = table(0), table(0)
    store.row_sparse_pull(3, out=[one, two], row_ids=[np.array([1]), np.array([2, 3])])
    return one.indices.tolist() == [1] and two.indices.tolist() == [2, 3]


@case("states are with the servers, from where they are fetched; MXNet could not save them")
def save_states(store: Store, folder: Path) -> bool:
    store.init(3, ones())
    store.set_optimizer(kv.optimizer.Adam())
    store.push(3, ones())
    store.save_optimizer_states(folder / "states")
    return (folder / "states").stat().st_size > 0


@case()
def size_change(store: Store) -> bool:
    store.init(3, ones())
    with pytest.raises(kv.ShapeError, match="key 3"):
        store.push(3, ones(shape=(3, 3)))
    return pulled(store, 3) == 1


@case()
def unknown_cmd(store: Store) -> bool:
    return store.send_command_to_servers(77, "x") is None


@case("a function that would never be called is refused; MXNet kept it and called it zero times")
def worker_updater(store: Store) -> bool:
    store.init(3, ones())
    with pytest.raises(kv.CapabilityError, match="register"):
        store._set_updater(lambda key, merged, stored: None)
    store.push(3, ones(5))
    return pulled(store, 3) == RECORDED["t_worker_updater_w1"]["rank0"]["pulled"]


@case("without an optimizer a push replaces; MXNet's server died")
def async_no_opt(store: Store) -> bool:
    store.init(3, ones())
    store.push(3, ones(4))
    return pulled(store, 3) == 4


@pytest.mark.parametrize("name", sorted(MISUSE))
def test_misuse(name: str, on_servers: Callable[[str], str], tmp_path: Path) -> None:
    body, _ = MISUSE[name]
    kind = "dist_async:1" if name.startswith("t_async") else "dist_sync:1"
    with kv.create(on_servers(kind)) as store:
        assert body(store, tmp_path) if body is save_states else body(store)


@pytest.mark.parametrize("name", sorted(MISUSE))
def test_we_differ_from_mxnet_only_where_the_table_says_why(name: str) -> None:
    refused = {"dup_init_str", "pull_uninit_str", "push_uninit_str", "size_change"}
    same = name.removeprefix("t_").removesuffix("_w1") in refused | {"unknown_cmd"}
    assert same == (not MISUSE[name][1])
    if same:
        assert RECORDED[name]["rank0"]["r"]["ok"] == (name == "t_unknown_cmd_w1")


def test_two_workers_that_init_a_key_twice_are_told(served: Served) -> None:
    """MXNet's hung: the second init is a round that never completes there."""
    assert set(RECORDED["t_dup_init_int_w2"]["exit_codes"].values()) == {None}
    made = served(2, 1)
    made.start_all(BODIES, "dup_init_int")
    assert all("key 3" in text for text in made.results())


def test_two_pushes_of_one_worker_are_not_two_workers(served: Served) -> None:
    """MXNet counted requests: its first worker saw 1 + 2 before the second had pushed."""
    assert RECORDED["t_twice_w2"]["rank0"] == {"rank0_alone_after_two_pushes": 3.0}
    made = served(2, 1)
    ahead, behind = made.start_all(BODIES, "twice")
    ahead.expect("waits")
    behind.say("go")
    assert made.results() == [22, 22]


def test_a_pull_before_the_own_push_gives_what_is_there(served: Served) -> None:
    recorded = RECORDED["t_pull_before_push_w2"]
    made = served(2, 1)
    first, second = made.start_all(BODIES, "pull_before_push")
    first.expect("pushed")
    second.say("go")
    assert made.results() == [
        [recorded["rank0"]["final"]],
        [recorded["rank1"]["rank1_pull_while_round_open"], recorded["rank1"]["final"]],
    ]


def test_every_recorded_misuse_is_in_the_table() -> None:
    assert set(RECORDED) == {*MISUSE, "t_dup_init_int_w2", "t_twice_w2", "t_pull_before_push_w2"}
