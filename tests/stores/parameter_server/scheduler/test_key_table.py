"""The table of keys: which workers wait for which keys, and the cost of this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler.key_table import KeyTable


def spec(key: Any) -> m.KeySpec:
    return m.KeySpec(key, (8,), "float32")


def table(*ready: Any) -> KeyTable:
    made = KeyTable(1 << 20, [0, 0], False)
    made.create_keys(0, 1, tuple(map(spec, ready)), 0)
    made.mark_ready(ready)
    return made


def test_a_worker_that_asks_for_keys_waits_for_all_of_them() -> None:
    keys = table("a")
    assert keys.lookup(1, 5, ("a", "b", "c"), wait=True) is None
    assert keys.is_waiting(1)
    keys.create_keys(0, 2, (spec("b"), spec("c")), 0)
    assert keys.mark_ready(("b",)) == []
    [(rank, answer)] = keys.mark_ready(("c",))
    assert (rank, answer.request, [one.spec.key for one in answer.entries]) == (1, 5, ["a", "b", "c"])
    assert not keys.is_waiting(1)


def test_a_key_that_is_dropped_is_waited_for_again() -> None:
    keys = table()
    assert keys.lookup(1, 5, ("a", "b"), wait=True) is None
    keys.create_keys(0, 1, (spec("a"), spec("b")), 0)
    assert keys.mark_ready(("a",)) == []
    keys.drop_keys(("a",))
    assert keys.mark_ready(("b",)) == []
    keys.create_keys(0, 2, (spec("a"),), 0)
    [(_, answer)] = keys.mark_ready(("a",))
    assert all(one.ready for one in answer.entries)


def test_all_that_wait_for_the_same_keys_get_the_same_entries() -> None:
    keys = table()
    for rank in range(1, 5):
        assert keys.lookup(rank, 10 + rank, ("a", "b"), wait=True) is None
    assert keys.lookup(5, 15, ("b",), wait=True) is None
    keys.forget_waiter(4)
    keys.create_keys(0, 1, (spec("a"), spec("b")), 0)
    assert [rank for rank, _ in keys.mark_ready(("b",))] == [5]
    answers = dict(keys.mark_ready(("a",)))
    assert {rank: one.request for rank, one in answers.items()} == {1: 11, 2: 12, 3: 13}
    assert len({id(one.entries) for one in answers.values()}) == 1  # so that they are encoded once


WHY = m.Failure("KVStoreError", "no memory")


def test_all_are_told_of_first_values_that_could_not_be_stored() -> None:
    """Each once: those that wait, and those that come later; the next attempt is waited for again."""
    keys = table("there")
    assert keys.lookup(1, 5, ("a", "b"), wait=True) is None
    assert keys.lookup(2, 6, ("there", "c"), wait=True) is None
    keys.create_keys(0, 1, (spec("a"), spec("b")), 0)
    keys.drop_keys(("a", "b"))
    assert keys.fail_init(("a", "b"), WHY, 0) == [(1, m.MemberReply(5, error=WHY))]
    assert keys.is_waiting(2)
    assert keys.lookup(3, 7, ("b", "a"), wait=True) == m.MemberReply(7, error=WHY)
    assert keys.create_keys(4, 8, (spec("b"),), 0) == (m.MemberReply(8, error=WHY), ())
    for rank in (1, 3):
        assert keys.lookup(rank, 9, ("a", "b"), wait=True) is None
    answer, _ = keys.create_keys(0, 2, (spec("a"), m.KeySpec("b", (3,), "int8")), 0)
    assert answer is not None and answer.error is None, "as if nothing had been"
    assert {rank for rank, _ in keys.mark_ready(("a", "b"))} == {1, 3}
    late = keys.lookup(5, 10, ("a", "b"), wait=True)
    assert late is not None and late.error is None


def test_all_keys_are_of_one_kind() -> None:
    for keys, specs in ((table("a"), (spec(1),)), (table(), (spec(1), spec("a")))):
        answer, new = keys.create_keys(0, 1, specs, 0)
        assert answer is not None
        assert answer.error is not None
        assert (answer.error.error, new) == ("KeyKindError", ())
    keys = table("a")
    keys.drop_keys(("a",))
    answer, _ = keys.create_keys(0, 1, (spec(1),), 0)
    assert answer is not None
    assert answer.error is None


class Entries(dict[Any, Any]):
    """Counts the entries that are looked at."""

    looks = 0

    def get(self, key: Any, default: Any = None) -> Any:
        self.looks += 1
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        for key in super().__iter__():
            self.looks += 1
            yield key


def test_keys_one_by_one_are_no_more_work_than_all_at_once() -> None:
    names = [f"k{at}" for at in range(500)]
    keys = KeyTable(1 << 20, [0, 0], False)
    keys.entries = entries = Entries()
    assert keys.lookup(1, 1, tuple(names), wait=True) is None
    for at, name in enumerate(names):
        keys.create_keys(0, at, (spec(name),), 0)
        keys.mark_ready((name,))
    assert not keys.is_waiting(1)
    assert entries.looks < 10 * len(names)


def spread(*names: str, whole: bool = False) -> tuple[m.KeySpec, ...]:
    """Describe keys of two slices."""
    return tuple(m.KeySpec(name, (1 << 19,), "float32", whole=whole) for name in names)


def spread_table() -> KeyTable:
    made = KeyTable(1 << 20, [0, 0], False)
    made.create_keys(0, 1, (*spread("a", "b"), spec("c")), 0)
    made.mark_ready(("a", "b", "c"))
    return made


def test_a_key_that_moves_is_where_it_was_until_it_is_where_it_will_be() -> None:
    keys = spread_table()
    before, loads = keys.entries["a"], list(keys.loads)
    assert keys.create_keys(1, 5, spread("a", whole=True), 0) == (None, ())  # it waits for the initializer
    answer, new = keys.create_keys(0, 6, spread("a", whole=True), 0)
    assert answer is not None
    assert answer.entries == new
    assert not new[0].ready
    assert len({one.server for one in new[0].slices}) == 1
    told = keys.lookup(1, 7, ("a",), wait=True)
    assert told is not None
    assert told.entries == (before,)
    [(rank, answer)] = keys.mark_ready(("a",))
    assert (rank, answer.request) == (1, 5)
    assert answer.entries[0].slices == new[0].slices
    assert list(keys.entries) == ["a", "b", "c"]  # in the order of init
    assert [one.number for one in keys.entries.values()] == [0, 1, 2]
    assert keys.dropped_slices() == []  # some still read where it was
    assert keys.leave_old_places(0, [0, 1]) == []
    assert keys.leave_old_places(1, [0, 1]) == [one.id for one in before.slices]
    assert keys.dropped_slices() == [one.id for one in before.slices]
    assert sum(keys.loads) == sum(loads)


def test_a_key_that_does_not_move_after_all_stays_and_no_worker_waits() -> None:
    keys = spread_table()
    entries, loads = dict(keys.entries), list(keys.loads)
    assert keys.create_keys(1, 5, spread("a", "b", whole=True), 0) == (None, ())
    _, new = keys.create_keys(0, 6, spread("a", "b", whole=True), 0)
    why = m.Failure("ConfigError", "on demand")
    slices, told = keys.cancel_move(("a", "b"), why)
    assert slices == [one.id for entry in new for one in entry.slices]
    assert told == [(1, m.MemberReply(5, error=why))]
    assert (keys.entries, keys.loads) == (entries, loads)
    assert not keys.is_waiting(1)
    assert keys.create_keys(0, 7, spread("a", whole=True), 0)[1] != ()  # the next one may try again


def test_a_worker_that_leaves_is_not_waited_for_to_leave_old_places() -> None:
    keys = spread_table()
    keys.create_keys(0, 6, spread("a", "b", whole=True), 0)
    keys.mark_ready(("a", "b"))
    assert keys.leave_old_places(0, [0, 1]) == []
    assert len(keys.leave_old_places(-1, [0])) == 4


def test_what_the_next_initializer_finds_half_moved_it_moves() -> None:
    keys = spread_table()
    assert keys.create_keys(1, 5, spread("a", whole=True), 0) == (None, ())
    _, new = keys.create_keys(0, 6, spread("a", whole=True), 0)
    keys.forget_waiter(0)
    [(rank, answer)], more = keys.answer_initializer(1)
    assert (rank, answer.entries, more) == (1, new, ())
