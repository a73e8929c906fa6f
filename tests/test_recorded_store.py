"""Stores of a process that records a timeline: the recorded events, with begin and end."""

from __future__ import annotations

import subprocess
import sys

import pace
import pytest

import kvstore as kv

PRELUDE = """
import numpy as np
from kvstore.observe.native import _observe as native
native.record_events(1 << 10)
import kvstore as kv
from kvstore.observe import events
from kvstore.observe.counters import CALLS, PHASES
store = kv.create(NAME, processes=1)
def calls():
    return [(CALLS[one.slice], one.nbytes) for one in verbs()]
def verbs():  # waits for asynchronous calls are of no verb
    return [one for one in events.recorded() if one.kind == events.CALL and one.slice < len(CALLS)]
def ones(n=10):
    return np.ones(n, np.float32)
"""


def run(name: str, code: str) -> None:
    text = f"NAME = {name!r}\n{PRELUDE}{code}"
    ended = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=pace.seconds(100), check=False
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ["local", "device", "shared"])
def test_every_call_of_a_verb_is_an_event(name: str) -> None:
    run(
        name,
        """
store.init(["a", "b"], [ones(), ones(5)])
store.broadcast("c", ones(2), out=ones(2))
store.push("a", [ones(), ones()])
store.pull(["a", "b"], out=[[ones(), ones()], ones(5)])
store.pushpull("a", ones())
store.init("t", kv.RowSparseArray(np.ones((2, 4), np.float32), [0, 1], (9, 4)))
store.row_sparse_pull("t", out=kv.RowSparseArray.zeros((9, 4)), row_ids=np.array([1]))
store.barrier()
for call in (lambda: store.push("a", ones(3)), lambda: store.pull("a")):
    try:
        call()
    except kv.KVStoreError:
        pass
assert calls() == [
    ("init", 60), ("init", 8), ("push", 80), ("pull", 100), ("pushpull", 40), ("init", 32),
    ("row_sparse_pull", 0), ("barrier", 0), ("push", 12), ("pull", 0),
], calls()
found = events.recorded()
assert all(one.begin <= one.end <= after.begin for one, after in zip(found, found[1:]))
store.close()
""",
    )


@pytest.mark.parametrize("name", ["local", "shared"])
def test_an_asynchronous_call_lasts_until_it_is_done(name: str) -> None:
    run(
        name,
        """
store.init("a", ones())
store._counters.take_times()
begin = native.now()
works = [
    store.push("a", ones(), async_op=True),
    store.pull("a", out=ones(), async_op=True),
    store.pushpull("a", ones(), async_op=True),
]
for work in works:
    work.wait()
assert calls()[1:] == [("push", 40), ("pull", 40), ("pushpull", 40)], calls()
made = verbs()[1:]
assert all(begin <= one.begin <= one.end <= native.now() for one in made)
for one in events.recorded():
    if one.kind < len(PHASES):
        assert any(call.begin <= one.begin <= one.end <= call.end for call in made), one
wrong = store.push("b", ones(), async_op=True) if NAME == "shared" else None
if wrong is not None:
    try:
        wrong.wait()
    except kv.KeyNotFoundError:
        pass
    assert len(calls()) == 5
store.close()
""",
    )


def test_plans_are_recorded() -> None:
    run(
        "local",
        """
store.init(["a", "b"], [ones(), ones()])
plan = store.bind(["a", "b"], [ones(), ones()])
plan()
plan()
plan.refresh()
assert calls()[1:] == [("pushpull", 80)] * 2
assert repr(plan) == "<Plan: pushpull of 2 keys>"
store.close()
""",
    )


def test_where_nothing_is_recorded_stores_are_what_they_were() -> None:
    with kv.create("local", processes=1) as store:
        assert type(store) is kv.KVStore
