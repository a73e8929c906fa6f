"""Waits of the shared store end at their deadline, also if each step finds the same state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore as kv
from kvstore.stores.shared.native import _shared as shm


@pytest.fixture
def store() -> Iterator[Any]:
    with kv.create("shared", timeout=0.3) as made:
        made.init("w", np.zeros(4, np.float32))
        yield made


@pytest.mark.parametrize("again", [shm.PLAN, shm.NEW_MODE, shm.TICK])
@pytest.mark.parametrize("first", [[], [shm.TICK], [shm.PLAN]], ids=["at once", "late", "after work"])
def test_a_step_that_is_never_ready(store: Any, first: list[int], again: int) -> None:
    """Before, only a step that found nothing to do was measured."""
    handle, steps = store._backend._keys.find("w"), itertools.chain(first, itertools.repeat(again))
    with pytest.raises(kv.TimeoutError, match=r"worker 0 has waited .* on round 1 of key 'w'"):
        store._backend._waiter.wait(lambda: next(steps), handle)


@pytest.mark.parametrize("again", [shm.PLAN, shm.NEW_MODE])
def test_work_that_is_never_done_is_left_to_others(store: Any, again: int) -> None:
    call: Any = SimpleNamespace(handle=store._backend._keys.find("w"), round=1, help=lambda: again)
    store._backend._waiter.begin_work([call])


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_an_updater_that_closes_its_store_is_called_once(verb: str) -> None:
    """Before, it was called without an end, and the deadline did not matter."""
    calls = []
    store = kv.create("shared", timeout=20)
    store.init("w", np.zeros(4, np.float32))

    def updater(*arguments: Any) -> None:
        calls.append(arguments)
        store.close()

    store.set_updater(updater)
    value = np.ones(4, np.float32)
    with pytest.raises(kv.ClosedError):
        getattr(store, verb)("w", value)
        store.pull("w", out=value)
    assert len(calls) == 1
    store.close()
