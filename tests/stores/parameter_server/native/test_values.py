"""Where values and slices are, as C and Python both know it."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest

from kvstore.kernels import cpu
from kvstore.stores.parameter_server.native._native import SliceState, SliceTable, SliceValue, UpdateCounts

F32 = cpu.dtype_number(np.dtype(np.float32))


def furnished(n: int = 4) -> tuple[SliceValue, list[np.ndarray]]:
    value, rooms = SliceValue(), [np.full(n, i, np.float32) for i in range(2)]
    for number, array in enumerate(rooms):
        value.set_memory(number, array, F32)
    return value, rooms


def references(objects: list[Any]) -> list[int]:
    gc.collect()
    return [sys.getrefcount(one) for one in objects]


def test_a_value_has_no_memory_at_first() -> None:
    value = SliceValue()
    assert (value.value, value.block, value.place, value.current, value.before) == (None, None, None, 0, -1)
    assert value.sums and not value.take_changed()
    assert value.buffer(1) == (None, None, None)


def test_a_turn_makes_the_other_room_the_value() -> None:
    value, rooms = furnished()
    assert value.value is rooms[0]
    value.swap_buffers(5)
    assert (value.value is rooms[1], value.current, value.before) == (True, 1, 4)
    value.swap_buffers(6)
    assert (value.value is rooms[0], value.before) == (True, 5)
    value.swap_buffers(7)
    value.use_first_buffer()
    assert (value.value is rooms[0], value.before) == (True, -1)


@pytest.mark.parametrize("n", [0, 1, 9000])
def test_memory_is_let_go_when_it_is_cleared_replaced_or_dropped(n: int) -> None:
    rooms = [np.zeros(n, np.float32) for _ in range(2)]
    bare = references(rooms)
    value = SliceValue()
    for number in range(2):
        value.set_memory(number, rooms[number], F32)
    held = references(rooms)
    assert min(held) > max(bare)
    value.set_memory(1, np.zeros(n, np.float32), F32)
    value.clear()
    assert (value.value, value.current) == (None, 0)
    cleared = references(rooms)
    value.set_memory(0, rooms[0], F32)
    del value
    assert (cleared, references(rooms)) == (bare, bare)


def test_a_room_says_where_others_find_it() -> None:
    value, lock = SliceValue(), np.zeros(1, np.uint64)
    array = np.zeros(4, np.float32)
    value.set_memory(0, array, F32, "a block", 3, 640, lock)
    assert (value.block, value.place) == ("a block", (3, 640))
    assert value.buffer(0).array is array
    value.swap_buffers(1)
    assert (value.value, value.place) == (None, None)


@pytest.mark.parametrize("number", [0, -5, 12, 1 << 62, 1 << 90, -(1 << 90)])
def test_counts_have_room_for_any_number(number: int) -> None:
    counts = UpdateCounts()
    assert (counts.updates, counts.num_update) == (0, 0)
    counts.updates = counts.num_update = number
    assert counts.updates == counts.num_update == max(-(1 << 62), min(number, 1 << 62))


def test_a_plan_keeps_what_it_points_to_until_it_is_withdrawn() -> None:
    value, _ = furnished()
    states, counts = (np.zeros(4, np.float32), np.ones(4, np.float32)), UpdateCounts()
    bare = references([*states, counts])
    value.plan_updates(1, (0.1,), states, counts, 3, 0)
    held = references([*states, counts])
    assert value.has_plan and min(one - other for one, other in zip(held, bare, strict=True)) >= 0
    assert held[2] == bare[2] + 1
    value.plan_updates(1, (0.1,), states, counts, 3, 0)
    assert references([*states, counts]) == held
    value.withdraw_plan()
    assert not value.has_plan
    assert references([*states, counts]) == bare
    value.plan_updates(1, (0.1,), states, counts, 3, 0)
    value.clear()
    assert not value.has_plan and references([*states, counts]) == bare


@pytest.mark.parametrize(("updates", "planned"), [(1 << 61, False), ((1 << 61) - 1, True)])
def test_numbers_without_room_are_not_planned(updates: int, planned: bool) -> None:
    value, _ = furnished()
    counts = UpdateCounts()
    counts.updates = updates
    value.plan_updates(1, (0.1,), (np.zeros(4, np.float32),), counts, 1, 0)
    assert value.has_plan == planned


@pytest.mark.parametrize("epoch", [-1, 1 << 64, 1 << 80])
def test_an_epoch_that_is_none_is_refused(epoch: int) -> None:
    value, _ = furnished()
    with pytest.raises(OverflowError):
        value.plan_updates(1, (0.1,), (np.zeros(4, np.float32),), UpdateCounts(), 1, epoch)
    assert not value.has_plan


@pytest.mark.parametrize(("params", "states"), [((0.1,) * 17, 1), ((0.1,), 5)])
def test_more_than_a_rule_can_have_is_not_planned(params: tuple[float, ...], states: int) -> None:
    value, _ = furnished()
    arrays = tuple(np.zeros(4, np.float32) for _ in range(states))
    value.plan_updates(1, params, arrays, UpdateCounts(), 1, 0)
    assert not value.has_plan


def test_a_slice_keeps_its_value() -> None:
    value, rooms = furnished()
    held = SliceState(0, 1)
    held.hold(value)
    before = references(rooms)
    del value
    kept = references(rooms)
    del held
    left = references(rooms)
    assert kept == before
    assert max(left) < min(before)


@pytest.mark.parametrize("number", [0, 63, 64, 5000, (1 << 20) - 1, 1 << 20, 1 << 31, (1 << 32) - 1])
def test_a_table_has_slices_of_any_number(number: int) -> None:
    table = SliceTable[SliceState]()
    one, other = SliceState(0, number), SliceState(0, number)
    table[number] = one
    assert table.get(number) is one and number in table
    table[number] = other
    assert list(table.values()) == [other]
    assert table.pop(number) is other and table.pop(number, None) is None and not table


def test_a_table_drops_its_slices_with_it() -> None:
    table = SliceTable[SliceState]()
    states = [SliceState(0, i) for i in range(200)]
    for state in states:
        table[state.id] = state
    held = references(states)
    table.pop(150)
    popped = references(states)
    del table, state
    left = references(states)
    assert [one for one in range(200) if popped[one] < held[one]] == [150]
    assert set(left) == {popped[150]}


@pytest.mark.parametrize("number", [-1, 1 << 32, "a"])
def test_a_table_refuses_what_is_no_number(number: object) -> None:
    table = SliceTable[SliceState]()
    with pytest.raises((OverflowError, TypeError)):
        table[number] = SliceState(0, 1)  # type: ignore[index]
    with pytest.raises(TypeError):
        table[1] = None  # type: ignore[assignment]
    assert not table and table.pop(number, None) is None  # type: ignore[call-overload]
