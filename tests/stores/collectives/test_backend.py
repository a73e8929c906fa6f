"""The store over an engine, with engines that are not real: its calls to the engine, and its errors.

Whether it does the right thing over real ones is for tests/engines.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.observe.counters import PHASES, WAITING
from kvstore.observe.events import NOBODY
from kvstore.settings.options import StoreConfig
from kvstore.stores.collectives.backend import (
    AllReduceBackend,
    check_launched,
    check_process,
    names_text,
    operation_name,
)
from kvstore.stores.collectives.call_matching import call_digest, calls_match
from kvstore.stores.collectives.engine import Finish, Item, ascii_name

ALL = ("float32", "float64", "int8", "uint8", "int32", "int64")


class Mirror:
    """An engine whose other processes make the same calls as this process."""

    name = "mirror"
    rank = 0
    local_rank = 0
    compares = False

    def __init__(self, size: int = 3, dtypes: Sequence[str] = ALL) -> None:
        self.size, self.dtypes = size, frozenset(dtypes)
        self.seen: list[tuple[str, list[tuple[str, str, int]], int]] = []
        self.held: list[Any] = []
        self.failure: Exception | None = None
        self.closed = self.abandoned = 0
        self.meanings: list[str] = []

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        self._look("broadcast", items)
        self.meanings.append(meaning)

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        self._look("allreduce", items, priority)
        assert all(array.dtype.name in self.dtypes for _, array in items)
        assert all(array.dtype.isnative for _, array in items)
        return lambda: self._sum(items)

    def _sum(self, items: Sequence[Item]) -> None:
        for _, array in items:
            array *= array.dtype.type(self.size)
        if self.failure is not None:
            raise self.failure

    def barrier(self) -> None:
        self._look("barrier", [])

    def versions(self) -> dict[str, str]:
        return {"mirror": "1"}

    def abandon(self) -> None:
        self.abandoned += 1

    def close(self) -> None:
        self.closed += 1

    def _look(self, what: str, items: Sequence[Item], priority: int = 0) -> None:
        for _, array in items:
            assert type(array) is np.ndarray
            assert array.flags.c_contiguous
            assert array.flags.writeable
            assert array.flags.aligned
        self.held += [array for _, array in items]
        self.seen.append((what, [(name, array.dtype.name, array.size) for name, array in items], priority))


def make(engine: Mirror, **options: Any) -> kv.KVStore:
    config = StoreConfig(**options)
    return kv.KVStore(engine.name, AllReduceBackend(config, engine), config)


@pytest.fixture
def engine() -> Mirror:
    return Mirror()


@pytest.fixture
def store(engine: Mirror) -> Iterator[kv.KVStore]:
    with make(engine) as made:
        yield made


# ------------------------------------------------------------------------------------------- handed down


def test_an_init_agrees_first_and_sends_bytes(engine: Mirror, store: kv.KVStore) -> None:
    store.init(["b", "a", "e"], [np.ones(3), np.ones((2, 2), np.float16), np.empty(0, np.int8)])
    assert engine.seen == [
        ("broadcast", [("kvstore.init", "uint8", 16)], 0),
        ("allreduce", [("kvstore.init", "int64", 1)], 0),
        ("broadcast", [("a", "uint8", 8), ("b", "uint8", 24)], 0),
    ]
    assert store.keys() == ["b", "a", "e"]


def test_an_engine_that_compares_is_told_what_is_meant(engine: Mirror) -> None:
    engine.compares = True
    texts = []
    for keys, values, group in (
        (["b", "a"], [np.ones(3), np.ones((2, 2), np.float16)], "g"),
        (["a", "b"], [np.ones((2, 2), np.float16), np.ones(3)], "g"),
        (["a", "b"], [np.ones((4, 1), np.float16), np.ones(3)], "g"),
        (["a", "b"], [np.ones((2, 2), np.float32), np.ones(3)], "g"),
        (["a", "c"], [np.ones((2, 2), np.float16), np.ones(3)], "g"),
        (["a", "b"], [np.ones((2, 2), np.float16), np.ones(3)], "h"),
        ([1, 2], [np.ones((2, 2), np.float16), np.ones(3)], "g"),
        (["1", "2"], [np.ones((2, 2), np.float16), np.ones(3)], "g"),
    ):
        engine.seen.clear()
        with make(engine, group=group) as store:
            store.init(keys, values)
        assert [verb for verb, _, _ in engine.seen] == ["broadcast"]
        texts.append(engine.meanings[-1])
    assert texts[0] == texts[1], "the order in a call does not count"
    assert len(set(texts)) == len(texts) - 1


def test_marks_are_of_everything_that_must_be_the_same() -> None:
    item, other = ("a", np.ones(3)), ("b", np.ones(2))
    marks = [
        call_digest("sum", [item, other]),
        call_digest("sum", [other, item]),
        call_digest("init", [item, other]),
        call_digest("sum", [item, other], "meaning"),
        call_digest("sum", [item]),
        call_digest("sum", [("a", np.ones(4)), other]),
        call_digest("sum", [("a", np.ones(3, np.int64)), other]),
        call_digest("sum", [("a\0", np.ones(3)), other]),
        call_digest("sum", [("\ud800", np.ones(3)), other]),
        call_digest("barrier", []),
    ]
    assert len({int(one[0]) for one in marks}) == len(marks)
    for one in marks:
        assert calls_match(np.maximum(one, one))
    for one, another in itertools.pairwise(marks):
        assert not calls_match(np.maximum(one, another))


def test_names_for_engines_are_ascii_and_differ() -> None:
    names = ["a", "\ud800", "\\ud800", "a\0b", "a\\x00b", "\xe9", "\\xe9", "\u043a", ""]
    plain_names = [ascii_name(name) for name in names]
    assert all(name.isascii() and name.isprintable() for name in plain_names)
    assert len(set(plain_names)) == len(names)
    assert ascii_name("layer1.weight") == "layer1.weight"


def test_a_fork_is_told_that_it_cannot_use_the_store(engine: Mirror) -> None:
    engine.name = "mirror of a fork"
    store = make(engine)
    store.init("a", np.ones(3))
    engine.seen.clear()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of the tests' may run on in here
        try:
            for call in (
                lambda: store.push("a", np.ones(3)),
                lambda: store.init("b", np.ones(3)),
                store.barrier,
                lambda: check_process(engine.name),
            ):
                with pytest.raises(kv.KVStoreError, match=f"is a fork of process {os.getppid()}"):
                    call()
            out = np.zeros(3)
            store.pull("a", out=out)
            store._backend.abandon()
            store.close()
            found = [out.tolist() == [1, 1, 1], not engine.seen, engine.closed == engine.abandoned == 0]
            os.write(write, repr(found).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as told_by_child:
        assert told_by_child.read() == repr([True] * 3)
    store.close()
    assert engine.closed == 1


def test_keys_of_a_call_go_together_and_halves_as_float32(engine: Mirror, store: kv.KVStore) -> None:
    values = [np.ones(3), np.ones((2, 2), np.float16), np.ones(2, ml_dtypes.bfloat16)]
    store.init(["a", "b", "c"], values)
    engine.seen.clear()
    store.push(["a", "b", "c"], values)
    assert engine.seen == [("allreduce", [("a", "float64", 3), ("b", "float32", 4), ("c", "float32", 2)], 0)]
    assert [store.view(key).dtype.name for key in "abc"] == ["float64", "float16", "bfloat16"]
    assert (store.view("c") == 3).all()


@pytest.mark.parametrize(("dtypes", "sent"), [(ALL, "int8"), (("float32", "int32"), "int32")])
def test_small_integers_are_widened_where_the_engine_does_not_sum_them(
    dtypes: Sequence[str], sent: str
) -> None:
    engine = Mirror(dtypes=(*dtypes, "int64"))
    with make(engine) as store:
        store.init("a", np.zeros(4, np.int8))
        engine.seen.clear()
        mine = np.array([100, -100, 1, 0], np.int8)
        store.pushpull("a", mine)
    assert engine.seen == [("allreduce", [("a", sent, 4)], 0)]
    assert mine.tolist() == [300 - 256, -300 + 256, 3, 0]


def test_element_types_of_the_engine_are_named(engine: Mirror) -> None:
    engine.dtypes = frozenset(("float32", "int64"))
    with make(engine) as store:
        with pytest.raises(kv.DTypeError, match=r"mirror does not sum float64 \(key 'a'\).*float32, int64"):
            store.init("a", np.zeros(3))
        assert engine.seen == []


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_what_runs_in_the_background_is_handed_down_at_the_call(
    engine: Mirror, store: kv.KVStore, verb: str
) -> None:
    store.init("a", np.zeros(3))
    engine.seen.clear()
    value = np.ones(3)
    work = getattr(store, verb)("a", value, priority=-4, async_op=True)
    assert engine.seen == [("allreduce", [("a", "float64", 3)], -4)]
    work.wait()
    assert (store.view("a") == 3).all()
    assert (value == (3 if verb == "pushpull" else 1)).all()


def test_the_caller_s_memory_is_never_the_engine_s(engine: Mirror, store: kv.KVStore) -> None:
    value = np.ones(300_000)
    store.init("a", value)
    store.push("a", value)
    store.pushpull("a", value, out=value)
    assert not any(np.shares_memory(value, array) for array in engine.held)
    assert (value == 3).all()


def test_mistakes_are_found_before_anything_is_handed_down(engine: Mirror, store: kv.KVStore) -> None:
    store.init(["a", "b"], [np.zeros(3), np.zeros(3)])
    engine.seen.clear()
    out = np.zeros(4)
    for call in (
        lambda: store.push(["a", "b"], [np.zeros(3), np.zeros(2)]),
        lambda: store.push("a", np.zeros(3, np.float32)),
        lambda: store.push("c", np.zeros(3)),
        lambda: store.pushpull("a", np.zeros(3), out=out),
        lambda: store.pushpull("a", np.zeros(3), out=np.broadcast_to(np.zeros(1), 3)),
        lambda: store.init(["c", "a"], [np.zeros(3), np.zeros(3)]),
        lambda: store.init([1], [np.zeros(3)]),
        lambda: store.push("a", kv.RowSparseArray(np.zeros((1, 3)), np.array([0]), (3, 3))),
        lambda: store.broadcast("c", np.zeros(3), out=None),
        lambda: store.pushpull(["a", "c"], [np.zeros(3), np.zeros(3)]),
        lambda: store.pushpull("c", [np.zeros(3), np.zeros(2)]),
        lambda: store.pushpull("c", np.zeros(3), out=out),
        lambda: store.pushpull("c", []),
        lambda: store.pushpull(1, np.zeros(3)),
    ):
        with pytest.raises(kv.KVStoreError):
            call()
    assert engine.seen == []


def test_keys_that_were_never_initialised_are_summed_under_names_of_their_own(
    engine: Mirror, store: kv.KVStore
) -> None:
    """The name says what no init has compared, so that engines see a difference, or never meet."""
    names = set()
    for key, value in (
        ("v", np.ones((2, 3))),
        ("v", np.ones((3, 2))),
        ("v", np.ones((3, 2), np.float16)),
        ("v", np.ones((3, 2), np.float32)),
        ("1", np.ones((3, 2))),
        (1, np.ones((3, 2))),
    ):
        engine.seen.clear()
        out = np.zeros_like(value)
        store.pushpull(key, value, out=out)
        assert (out == 3).all()
        assert (value == 1).all()
        ((verb, ((name, _, size),), _),) = engine.seen
        assert (verb, size) == ("allreduce", 6)
        names.add(name)
    assert len(names) == 6
    assert store.keys() == []
    for name in sorted(names):
        store.init(name, np.ones(6))
        engine.seen.clear()
        store.push(name, np.ones(6))
        ((_, ((mine, _, _),), _),) = engine.seen
        assert mine not in names
        assert store.pushpull("v", np.ones(2)) is None
    engine.failure = kv.PeerLostError("worker 2 is gone", rank=2)
    value, out = np.ones(3), np.zeros(3)
    with pytest.raises(kv.PeerLostError):
        store.pushpull("u", value, out=out)
    assert not out.any()


def test_nothing_is_pushed_where_there_is_nothing(engine: Mirror, store: kv.KVStore) -> None:
    store.init(["a", "b"], [np.zeros(3), np.ones(3)])
    out = np.zeros(3)
    store.pushpull(["a", "b"], [np.ones(3), []], out=[[], out])
    assert (out == 1).all()
    store.init([], [])
    assert store.keys() == ["a", "b"]


SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 0, 2), (2, 3), (50, 41)])
DTYPES = st.sampled_from([*ALL, "float16", "bfloat16"])


@given(
    st.lists(st.tuples(SHAPES, DTYPES, st.integers(1, 3)), min_size=1, max_size=6), st.booleans(), st.data()
)
def test_any_list_of_keys_is_summed_as_numpy_does(
    kinds: list[tuple[tuple[int, ...], str, int]], in_place: bool, data: st.DataObject
) -> None:
    engine = Mirror(dtypes=data.draw(st.sampled_from([ALL, ("float32", "float64", "int32", "int64")])))
    keys = [f"k{i}" for i in range(len(kinds))]
    types = [np.dtype(getattr(ml_dtypes, dtype, dtype)) for _, dtype, _ in kinds]
    ones = [np.full(shape, 2, dtype) for (shape, _, _), dtype in zip(kinds, types, strict=True)]
    pushed = [[one.copy() for _ in range(count)] for one, (_, _, count) in zip(ones, kinds, strict=True)]
    outs = pushed if in_place else [[np.zeros_like(one)] for one in ones]
    with make(engine) as store:
        store.init(keys, ones)
        store.pushpull(keys, pushed, out=None if in_place else outs)
        for key, one, arrays, (_, _, count) in zip(keys, ones, outs, kinds, strict=True):
            for found in (*arrays, store.view(key)):
                assert (found.dtype, found.shape) == (one.dtype, one.shape)
                assert (found == 2 * count * engine.size).all()
    if not in_place:
        assert all((array == 2).all() for arrays in pushed for array in arrays)


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("background", [False, True])
def test_a_sum_that_fails_changes_nothing(engine: Mirror, store: kv.KVStore, background: bool) -> None:
    store.init(["a", "b"], [np.ones(3), np.ones(3, np.float16)])
    view, values, out = store.view("a"), [np.ones(3), np.ones(3, np.float16)], np.zeros(3)
    engine.failure = kv.PeerLostError("worker 2 is gone", rank=2)
    for outs in (None, [out, []]):
        with pytest.raises(kv.PeerLostError, match="worker 2 is gone"):
            if background:
                store.pushpull(["a", "b"], values, out=outs, async_op=True).wait()
            else:
                store.pushpull(["a", "b"], values, out=outs)
    assert (values[0] == 1).all()
    assert (view == 1).all()
    assert (store.view("a") == 1).all()
    assert not out.any()
    engine.failure = None
    store.pushpull("a", values[0])
    assert (values[0] == 3).all()


def test_an_init_that_fails_leaves_no_key(engine: Mirror, store: kv.KVStore) -> None:
    engine.failure = kv.TimeoutError("nobody came")
    with pytest.raises(kv.TimeoutError):
        store.init(["a", "b"], [np.ones(3), np.ones(3)])
    assert store.keys() == []
    engine.failure = None
    store.init("a", np.ones(3))


def test_a_view_is_whole_until_the_next_push_but_one_writes_where_it_was(store: kv.KVStore) -> None:
    store.init("a", np.ones(100_000))
    first = store.view("a")
    store.push("a", np.full(100_000, 2.0))
    assert (first == 1).all()
    second = store.view("a")
    store.push("a", np.full(100_000, 3.0))
    assert (second == 6).all()
    assert (store.view("a") == 9).all()
    assert np.shares_memory(store.view("a"), first), "memory is used in turns"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_of_a_failed_sum_is_not_used_again(engine: Mirror, store: kv.KVStore, dtype: str) -> None:
    store.init("a", np.ones(10_000, dtype))
    engine.failure = kv.TimeoutError("nobody came")
    engine.held.clear()
    with pytest.raises(kv.TimeoutError):
        store.push("a", np.ones(10_000, dtype))
    (lost,) = engine.held
    engine.failure = None
    for _ in range(3):
        store.push("a", np.ones(10_000, dtype))
        assert not np.shares_memory(store.view("a"), lost)
    assert not any(np.shares_memory(array, lost) for array in engine.held[1:])


def test_the_engine_is_closed_once(engine: Mirror) -> None:
    store = make(engine)
    store.close()
    store.close()
    assert engine.closed == 1


def test_going_on_without_a_worker_is_refused(engine: Mirror) -> None:
    with pytest.raises(kv.ConfigError, match=r"mirror.*on_peer_loss at 'raise'.*dist_sync"):
        make(engine, on_peer_loss="continue")


def test_names_for_people() -> None:
    assert names_text(["a"]) == "key a"
    assert names_text(["a", "b"]) == "2 keys (a, b)"
    assert names_text([str(i) for i in range(9)]) == "9 keys (0, 1, 2, ...)"
    assert names_text([]) == "no keys"
    assert operation_name("the sum", [("a", np.ones(1))]) == "the sum of key a"
    assert operation_name("the sum", [("kvstore.init", np.ones(1))]) == "init, broadcast or load"


def test_another_launcher_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check_launched("Engine", 1, "start -n {n}")
    for name, number in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, number)
    monkeypatch.setenv("MASTER_PORT", "1")
    check_launched("Engine", 4, "start -n {n}")
    with pytest.raises(kv.ConfigError, match=r"torchrun has started 4.*Engine knows.*`start -n 4 python"):
        check_launched("Engine", 1, "start -n {n}")


# -------------------------------------------------------------------------------- several, in one process


class Meeting:
    """Where the threads of a job meet; each is a worker."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.parts: dict[int, dict[int, Sequence[Item]]] = {}

    def exchange(self, number: int, rank: int, items: Sequence[Item]) -> dict[int, Sequence[Item]]:
        copies = [(name, array.copy()) for name, array in items]
        with self.condition:
            parts = self.parts.setdefault(number, {})
            parts[rank] = copies
            self.condition.notify_all()
            if not self.condition.wait_for(lambda: len(parts) == self.size, timeout=20):
                raise kv.TimeoutError("others did not call")
            return parts


class Member(Mirror):
    """One thread's end of a job of threads."""

    name = "threads"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(meeting.size)
        self.rank, self.meeting, self.calls = rank, meeting, 0

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        self.calls += 1
        for (_, array), (_, first) in zip(items, self._parts(self.calls, items)[0], strict=True):
            array[...] = first

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        self.calls += 1
        number = self.calls

        def finish() -> None:
            parts = self._parts(number, items)
            for i, (_, array) in enumerate(items):
                array[...] = sum(part[i][1] for _, part in sorted(parts.items()))

        return finish

    def barrier(self) -> None:
        self.broadcast([])

    def _parts(self, number: int, items: Sequence[Item]) -> dict[int, Sequence[Item]]:
        parts = self.meeting.exchange(number, self.rank, items)
        if any([name for name, _ in part] != [name for name, _ in items] for part in parts.values()):
            raise kv.ConfigError("other keys")
        return parts


def together(size: int, body: Callable[[kv.KVStore], Any]) -> list[Any]:
    """Run a worker in each of so many threads."""
    meeting = Meeting(size)

    def worker(rank: int) -> Any:
        with make(Member(meeting, rank)) as store:
            return body(store)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(worker, range(size)))


def test_workers_sum_and_agree() -> None:
    def body(store: kv.KVStore) -> list[float]:
        store.init("a", np.full(5, 10.0 + store.rank))
        found = [float(store.view("a")[0])]
        works = []
        for turn in range(4):
            value = np.full(5, float(store.rank + turn))
            works.append((store.pushpull("a", value, async_op=True), value))
        for work, value in works:
            work.wait()
            found.append(float(value[3]))
        return found

    assert together(3, body) == [[10, 3, 6, 9, 12]] * 3


def test_workers_that_initialise_differently_all_hear_of_it() -> None:
    def body(store: kv.KVStore) -> str:
        with pytest.raises(kv.ConfigError) as caught:
            store.init("a", np.zeros(5 if store.rank == 1 else 4))
        store.init("a", np.full(2, store.rank))
        return f"{caught.value} {store.view('a')[0]}"

    for rank, text in enumerate(together(3, body)):
        assert text.startswith(f"worker {rank} initialises key 'a', and 1 of 3 workers other keys")
        assert text.endswith(" 0")


def test_a_load_takes_rank_0_s_values(tmp_path: Any) -> None:
    def body(store: kv.KVStore) -> list[float]:
        with kv.create("local") as own:
            own.init(["a", "b"], [np.full(3, 5.0 + store.rank), np.full(2, 7.0 + store.rank)])
            own.save(tmp_path / f"{store.rank}")
        store.init("a", np.zeros(3))
        store.load(tmp_path / f"{store.rank}")
        return [float(store.view(key)[0]) for key in "ab"]

    assert together(2, body) == [[5, 7]] * 2


# ------------------------------------------------------------------------------------------------- counted


@pytest.mark.parametrize("timed", [False, True])
def test_sums_are_counted_as_frames_and_waited_for(store: kv.KVStore, timed: bool) -> None:
    store.init(["a", "h"], [np.zeros(10), np.zeros(6, np.float16)])
    if timed:
        store._counters.take_times()
    store.push("a", [np.ones(10), np.ones(10)])
    store.pushpull(["a", "h"], [np.ones(10), np.ones(6, np.float16)])
    store.pushpull("guest", np.ones(4), out=np.zeros(4))
    store.barrier()
    found = store._counters.read()
    nbytes = 80 + 80 + 12 + 32
    assert found["sent"] == [0, 0, 0, nbytes]
    assert found["received"] == [80 + 12 + 32, 0, 0, nbytes]
    assert (found["rounds"], found["keys"], found["nbytes"]) == (4, 2, 92)
    assert [found["spans"][phase] > 0 for phase in range(len(PHASES))] == [
        *(timed, timed, timed),
        *(False, False),
    ]
    assert sum(found["waits"]) == found["spans"][WAITING] == 4 * timed
    assert found["waiting_since"] == 0
    assert store._backend.names() == {0: "a", 1: "h"}


def test_for_whom_an_engine_waits_is_not_known() -> None:
    def body(store: kv.KVStore) -> list[int]:
        store.init("a", np.zeros(3))
        store._counters.take_times()
        store.pushpull("a", np.ones(3))
        found = store._counters.read()
        return [found["spans"][WAITING], found["slice"], found["whom"]]

    assert together(2, body) == [[1, 0, NOBODY]] * 2
