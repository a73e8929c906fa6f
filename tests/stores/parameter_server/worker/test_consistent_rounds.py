"""Which round of a key is whole."""

from __future__ import annotations

from kvstore.stores.parameter_server.worker.consistent_rounds import PushCalls, slices_behind


def test_the_last_round_of_a_key_without_pushes_is_that_of_all_slices() -> None:
    assert PushCalls().whole_round("w", {"w": [3, 5, 4]}) == 3


def test_a_round_is_whole_in_all_keys_of_its_call() -> None:
    calls = PushCalls()
    for count in (1, 2, 3):
        calls.note_call({"a": count, "b": count})
    calls.note_call({"c": 1})
    assert calls.pushed_together(["a"]) == ["a", "b"]
    assert calls.pushed_together(["c"]) == ["c"]
    rounds = {"a": [3, 3], "b": [3, 2], "c": [1]}
    assert [calls.whole_round(key, rounds) for key in "abc"] == [2, 2, 1]
    rounds = {"a": [3, 3], "b": [3, 3], "c": [0]}
    assert [calls.whole_round(key, rounds) for key in "abc"] == [3, 3, 0]
    rounds = {"a": [3, 3], "b": [1, 2], "c": [1]}
    assert [calls.whole_round(key, rounds) for key in "abc"] == [1, 1, 1]


def test_a_key_that_was_pushed_alone_too_goes_back_by_its_own_calls() -> None:
    calls = PushCalls()
    calls.note_call({"b": 1})
    calls.note_call({"b": 2})
    calls.note_call({"a": 1, "b": 3})
    rounds = {"a": [1], "b": [1]}
    assert calls.whole_round("a", rounds) == 0
    assert calls.whole_round("b", rounds) == 1


def test_rounds_of_others_go_on_when_a_worker_has_joined() -> None:
    calls = PushCalls()
    calls.note_call({"a": 1, "b": 1})
    assert calls.whole_round("a", {"a": [7, 6], "b": [7]}) == 6
    assert calls.whole_round("b", {"a": [7, 6], "b": [7]}) == 7


def test_keys_whose_servers_are_lost_do_not_count() -> None:
    calls = PushCalls()
    calls.note_call({"a": 1, "b": 1})
    assert calls.whole_round("a", {"a": [1], "b": []}) == 1


def test_behind() -> None:
    assert slices_behind([4, 4, 4]) == []
    assert slices_behind([4, 5, 3]) == [0, 2]
    assert slices_behind([]) == []
