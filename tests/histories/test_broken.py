"""Histories that are broken by hand: the checker reports the fault of each, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from histories.checker import violations
from histories.story import Story

Teller = Callable[[Story], None]
BROKEN: list[tuple[str, Story, Teller]] = []


def broken(what: str, /, workers: int = 2, **job: object) -> Callable[[Teller], Teller]:
    """Note a history, and the one kind of violation that it has."""

    def note(tell: Teller) -> Teller:
        BROKEN.append((what, Story(workers, **job), tell))
        return tell

    return note


@pytest.mark.parametrize(("kind", "story", "tell"), BROKEN, ids=[tell.__name__ for _, _, tell in BROKEN])
def test_it_is_seen(kind: str, story: Story, tell: Teller) -> None:
    tell(story)
    found = violations(story.history())
    assert {one.kind for one in found} == {kind}, found
    assert all(len(one.text) > 20 for one in found)


def test_there_are_fifty() -> None:
    assert len(BROKEN) >= 50


# ---------------------------------------------------------------------------------------------- contents


@broken("garbage")
def a_value_that_is_no_sum(story: Story) -> None:
    story.everybody()
    story.pull(0, None)


@broken("twice")
def a_push_is_applied_twice(story: Story) -> None:
    story.everybody()
    story.pull(0, {0: [1], 1: [1, 1]})


@broken("twice", keeps="last")
def a_part_is_twice_in_a_sum(story: Story) -> None:
    story.everybody()
    story.pull(0, {0: [1], 1: [1, 1]})


@broken("twice", kind="async")
def a_push_is_sent_again_and_applied_again(story: Story) -> None:
    story.push(0)
    story.pull(0, {0: [1, 1]})


@broken("unknown push")
def a_push_nobody_made(story: Story) -> None:
    story.everybody()
    story.pull(0, {0: 1, 1: 2})


@broken("early")
def a_push_is_read_before_it_is_called(story: Story) -> None:
    story.push(0, start=0.0)
    story.pull(0, {0: 1, 1: 1}, start=1.0)
    story.push(1, start=9.0)


@broken("fenced", on_peer_loss="continue", workers=2)
def a_push_of_who_is_fenced_counts(story: Story) -> None:
    story.everybody()
    story.fault("stopped", 1)
    story.fails(1, "FencedError")
    story.push(1, error="FencedError")
    story.push(0)
    story.pull(0, {0: 2, 1: 2})


@broken("fenced", kind="async")
def a_push_counts_whose_worker_others_know_as_lost(story: Story) -> None:
    story.fault("stopped", 1)
    story.fails(0)
    story.push(1, error="FencedError")
    story.pull(0, {1: 1})


@broken("failed push")
def a_bad_gradient_is_applied(story: Story) -> None:
    story.push(0)
    story.push(1, bad=frozenset({("w", 0)}))
    story.pull(0, {0: 1, 1: 1})


# ------------------------------------------------------------------------------------------------- calls


@broken("no answer")
def a_call_hangs(story: Story) -> None:
    story.push(0, end=math.inf)


@broken("unexplained error")
def an_error_without_a_fault(story: Story) -> None:
    story.fails(0)


@broken("unexplained error")
def a_pause_costs_a_worker(story: Story) -> None:
    story.fault("paused", 1)
    story.fails(0)


@broken("unexplained error")
def who_was_never_stopped_is_fenced(story: Story) -> None:
    story.fault("stopped", 1)
    story.fails(0, "FencedError")


@broken("unexplained error", on_peer_loss="continue")
def the_living_are_told_where_they_should_go_on(story: Story) -> None:
    story.fault("killed", 1)
    story.fails(0)


@broken("unexplained error")
def an_error_of_another_kind_after_a_loss(story: Story) -> None:
    story.fault("killed", 1)
    story.fails(0, "TimeoutError")


@broken("works after fence", on_peer_loss="continue")
def who_is_fenced_pushes_on(story: Story) -> None:
    story.fault("stopped", 1)
    story.fails(1, "FencedError")
    story.push(1)


# ------------------------------------------------------------------------------------------------ rounds


@broken("torn")
def slices_of_two_rounds(story: Story) -> None:
    story.everybody()
    story.everybody()
    story.pull(0, {0: 2, 1: 2}, {0: 1, 1: 1})


@broken("torn", on_peer_loss="continue")
def a_worker_is_lost_and_slices_are_two_of_its_rounds_apart(story: Story) -> None:
    for _ in range(3):
        story.everybody()
    story.fault("killed", 1)
    story.pull(0, {0: 3, 1: 3}, {0: 3, 1: 1})


@broken("member missing")
def a_round_without_a_member(story: Story) -> None:
    story.everybody()
    story.pull(0, {0: 1})


@broken("member missing", keeps="last")
def a_sum_without_a_member(story: Story) -> None:
    story.everybody()
    story.pull(0, {0: 1})


@broken("member missing")
def a_round_does_not_wait(story: Story) -> None:
    story.push(0)
    story.pull(0, {0: 1})


@broken("member missing")
def a_round_without_the_dead_where_that_was_not_asked_for(story: Story) -> None:
    story.everybody()
    story.push(0)
    story.fault("killed", 1)
    story.pull(0, {0: 2, 1: 1})


@broken("member missing", on_peer_loss="continue")
def a_round_before_its_death_without_the_dead(story: Story) -> None:
    story.everybody()
    story.pull(0, {0: 1})
    story.fault("killed", 1)


@broken("member missing", workers=3, on_peer_loss="continue")
def the_living_are_left_out_with_the_dead(story: Story) -> None:
    story.everybody()
    story.fault("killed", 2)
    story.pull(0, {0: 1, 2: 1})


@broken("member missing", workers=3)
def a_round_goes_on_when_a_survivor_leaves_after_a_loss(story: Story) -> None:
    story.everybody()
    story.push(0)
    story.push(2)
    story.fault("killed", 2)
    story.fails(0)
    story.fails(1)
    story.call(1, "close")
    story.pull(0, {0: 2, 1: 1, 2: 2})


@broken("gap")
def a_push_is_skipped(story: Story) -> None:
    for _ in range(3):
        story.everybody()
    story.pull(0, {0: 3, 1: [1, 3]})


@broken("mixed", keeps="last")
def a_sum_of_two_rounds(story: Story) -> None:
    story.everybody()
    story.everybody()
    story.pull(0, {0: 2, 1: 1})


@broken("mixed", keeps="last")
def a_part_stays_in_the_sum_when_its_worker_has_joined(story: Story) -> None:
    story.everybody()
    story.call(1, "join")
    story.push(0)
    story.pull(0, {0: 2, 1: 1})


@broken("wrong round")
def a_read_is_of_the_round_before(story: Story) -> None:
    story.everybody()
    story.everybody()
    story.pull(0, {0: 1, 1: 1})


@broken("wrong round")
def a_read_is_of_the_first_value(story: Story) -> None:
    story.everybody()
    story.pull(0, {})


@broken("wrong round", on_peer_loss="continue")
def who_came_back_reads_the_round_before(story: Story) -> None:
    story.everybody()
    story.fault("killed", 1)
    story.push(0)
    story.push(3)
    story.pull(0, {0: 2, 1: 1, 3: 1})
    story.push(0)
    story.push(3)
    story.pull(3, {0: 2, 1: 1, 3: 1})


@broken("went back")
def who_has_joined_reads_what_is_older(story: Story) -> None:
    story.everybody()
    story.call(1, "join")
    story.push(0)
    story.pull(0, {0: 2, 1: 1})
    story.pull(1, {0: 1, 1: 1})


@broken("two values", workers=3, on_peer_loss="continue")
def two_see_different_values_of_a_round(story: Story) -> None:
    story.everybody()
    story.fault("killed", 2)
    story.pull(0, {0: 1, 1: 1, 2: 1})
    story.pull(1, {0: 1, 1: 1})


@broken("left again", on_peer_loss="continue", workers=3)
def the_dead_come_in_late(story: Story) -> None:
    story.everybody()
    story.everybody()
    story.fault("killed", 2)
    story.push(0)
    story.push(1)
    story.push(2, start=3.1, end=math.inf)
    story.pull(0, {0: 3, 1: 3, 2: 1})
    story.push(0)
    story.push(1)
    story.pull(1, {0: 4, 1: 4, 2: 2})


@broken("left again", on_peer_loss="continue", keeps="last", workers=2)
def the_dead_are_in_a_sum_after_one_without_them(story: Story) -> None:
    story.everybody()
    story.everybody()
    story.fault("killed", 1)
    story.pull(0, {0: 1}, start=1.6, end=9.0)
    story.pull(0, {0: 2, 1: 2})
    story.events[-2] = story.events[-2]._replace(called=0.7)


@broken("stays", on_peer_loss="continue", noticed=1.0)
def the_dead_are_in_the_round_after_the_one_of_their_death(story: Story) -> None:
    story.everybody()
    story.push(1)
    story.push(1)
    story.fault("killed", 1)
    story.push(0, start=9.0)
    story.push(0, start=10.0)
    story.pull(0, {0: 3, 1: 3})


# ---------------------------------------------------------------------------------------- after a loss


@broken("wrote after a loss")
def a_write_goes_well_after_a_loss(story: Story) -> None:
    story.fault("killed", 1)
    story.fails(0)
    story.push(0)


@broken("wrote after a loss", kind="async")
def a_write_goes_well_after_a_loss_without_rounds(story: Story) -> None:
    story.fault("killed", 1)
    story.fails(0)
    story.push(0)


@broken("unnamed rounds")
def a_read_after_a_loss_does_not_say_why_not(story: Story) -> None:
    story.fault("killed", 1)
    story.fails(0)
    story.fails(0)


@broken("torn")
def a_key_is_read_of_two_rounds_after_a_loss(story: Story) -> None:
    story.everybody()
    story.everybody()
    story.fault("killed", 1)
    story.fails(0)
    story.pull(0, {0: 2, 1: 2}, {0: 1, 1: 1})


@broken("went back")
def a_read_after_a_loss_is_two_rounds_old(story: Story) -> None:
    for _ in range(3):
        story.everybody()
    story.pull(0, {0: 3, 1: 3})
    story.fault("killed", 1)
    story.fails(0)
    story.pull(0, {0: 1, 1: 1})


@broken("keys apart")
def keys_of_one_call_are_read_of_two_rounds(story: Story) -> None:
    story.everybody("a", "b")
    story.everybody("a", "b")
    story.fault("killed", 1)
    story.fails(0)
    story.read(0, {"a": [{0: 2, 1: 2}], "b": [{0: 1, 1: 1}]})


@broken("two rounds", workers=3)
def survivors_read_different_rounds_for_good(story: Story) -> None:
    story.everybody()
    story.everybody()
    story.fault("killed", 2)
    story.fails(0)
    story.fails(1)
    story.pull(0, {0: 2, 1: 2, 2: 2})
    story.pull(1, {0: 1, 1: 1, 2: 1})


# ------------------------------------------------------------------------------------------------ orders


@broken("lost push", kind="async")
def a_push_that_its_worker_has_read_is_gone(story: Story) -> None:
    story.push(0)
    story.pull(0, {})


@broken("lost push", kind="local", workers=1)
def a_push_that_has_returned_is_not_there(story: Story) -> None:
    story.push(0)
    story.pull(1, {})


@broken("gap", kind="async")
def a_push_overtakes_one_of_its_worker(story: Story) -> None:
    story.push(0)
    story.push(0)
    story.pull(1, {0: [2]})


@broken("gap", kind="local", workers=2)
def a_push_overtakes_one_that_had_returned(story: Story) -> None:
    story.push(0)
    story.push(1)
    story.pull(1, {1: 1}, start=0.2, end=9.0)


@broken("not one order", kind="async", workers=4)
def two_readers_see_two_orders(story: Story) -> None:
    story.push(0, start=0.0, end=9.0)
    story.push(1, start=0.0, end=9.0)
    story.pull(2, {0: 1}, start=1.0, end=8.0)
    story.pull(3, {1: 1}, start=1.0, end=8.0)


@broken("went back", kind="async", workers=3)
def a_push_is_seen_and_then_not(story: Story) -> None:
    story.push(0)
    story.pull(1, {0: 1})
    story.pull(2, {})


@broken("not one order", kind="local", keeps="last", workers=2)
def a_value_comes_back_after_another(story: Story) -> None:
    story.push(0)
    story.push(1)
    story.pull(0, {1: 1})
    story.pull(0, {0: 1})


@broken("not one order", kind="local", keeps="last", workers=2)
def a_value_stays_that_was_replaced(story: Story) -> None:
    story.push(0)
    story.push(1)
    story.pull(1, {0: 1})


@broken("not one order", kind="async", keeps="last", workers=2)
def two_pushes_are_summed_without_rounds(story: Story) -> None:
    story.push(0)
    story.push(1)
    story.pull(1, {0: 1, 1: 1})


@broken("not one order", kind="async", keeps="last", workers=2)
def a_worker_reads_its_push_before_the_last(story: Story) -> None:
    story.push(0)
    story.push(0)
    story.pull(0, {0: [1]})


# ------------------------------------------------------------------------------------------------- steps


@broken("early")
def a_step_is_seen_before_its_block_ends(story: Story) -> None:
    story.call(1, "begin", error="KeyError")
    story.push(0, "a", "b", verb="step")
    story.read(0, {"a": [{0: 1, 1: 1}]})
    story.push(1, "a", "b", verb="step", start=9.0)


@broken("unknown push")
def a_step_counts_whose_worker_died_in_its_block(story: Story) -> None:
    story.push(0, "a", verb="step")
    story.call(1, "begin", end=math.inf)
    story.fault("killed", 1)
    story.fails(0)
    story.read(0, {"a": [{0: 1, 1: 1}]})


@broken("twice")
def a_step_counts_twice_in_one_key(story: Story) -> None:
    story.everybody("a", "b", verb="step")
    story.read(0, {"a": [{0: 1, 1: 1}], "b": [{0: 1, 1: [1, 1]}]})


@broken("wrong round")
def half_a_step_is_seen_while_all_live(story: Story) -> None:
    story.everybody("a", "b", verb="step")
    story.read(0, {"a": [{0: 1, 1: 1}], "b": [{}]})


@broken("half a step", kind="local")
def half_a_step_is_seen_by_another_thread(story: Story) -> None:
    story.push(0, "a", "b", verb="step", end=9.0)
    story.read(1, {"a": [{0: 1}], "b": [{}]}, start=1.0, end=8.0)


def until_a_loss(story: Story, *told: int) -> None:
    """Steps of all keys, and of some. In the last one worker 1 is killed, and the others get an error."""
    story.everybody("a", "b", "c", verb="step")
    story.everybody("b", "c", verb="step")
    story.everybody("a", "c", verb="step")
    story.push(1, "a", "b", verb="step", end=math.inf)
    story.fault("killed", 1)
    for slot in told or (0,):
        story.push(slot, "a", "b", verb="step", error="PeerLostError")


@broken("half a step")
def half_a_step_is_left_after_a_loss(story: Story) -> None:
    until_a_loss(story)
    story.read(0, {"a": [{0: 3, 1: 3}], "b": [{0: 2, 1: 2}]})


@broken("half a step", keeps="last")
def half_a_step_is_left_of_sums(story: Story) -> None:
    until_a_loss(story)
    story.read(0, {"a": [{0: 2, 1: 2}], "b": [{0: 3, 1: 3}]})


@broken("half a step")
def a_file_mixes_two_steps(story: Story) -> None:
    until_a_loss(story)
    now = {"a": [{0: 3, 1: 3}], "b": [{0: 2, 1: 2}], "c": [{0: 3, 1: 3}]}
    story.read(0, now, verb="save")


@broken("two steps")
def a_step_is_lost_by_one_of_two_keys_that_are_read_alone(story: Story) -> None:
    until_a_loss(story)
    story.read(0, {"a": [{0: 3, 1: 3}]})
    story.read(0, {"b": [{0: 2, 1: 2}]})


@broken("two steps", workers=3)
def two_workers_go_on_from_different_steps(story: Story) -> None:
    until_a_loss(story, 0, 2)
    story.read(0, {"a": [{0: 3, 1: 3, 2: 3}], "c": [{0: 3, 1: 3, 2: 3}]})
    story.read(2, {"b": [{0: 2, 1: 2, 2: 2}], "c": [{0: 3, 1: 3, 2: 3}]})


@broken("lost step")
def a_step_is_gone_that_all_have_made(story: Story) -> None:
    until_a_loss(story)
    story.read(0, {"a": [{0: 1, 1: 1}], "c": [{0: 2, 1: 2}], "b": [{0: 2, 1: 2}]})


@broken("lost step", workers=3)
def a_step_is_gone_that_was_read_in_all_its_keys(story: Story) -> None:
    until_a_loss(story, 0)
    story.push(2, "a", "b", verb="step")
    story.read(2, {"b": [{0: 3, 1: 3, 2: 3}], "a": [{0: 3, 1: 3, 2: 3}]})
    story.fails(2)
    story.read(0, {"b": [{0: 2, 1: 2, 2: 2}], "a": [{0: 2, 1: 2, 2: 2}]})


@broken("no step to read")
def a_survivor_cannot_save(story: Story) -> None:
    until_a_loss(story)
    story.fails(0, verb="save", text="the value of a has not been kept for this round")


# --------------------------------------------------------------------------------------- servers come back


@broken("lost push", forgotten=((5.0, 9.0),))
def a_push_is_gone_that_was_in_the_snapshot(story: Story) -> None:
    story.fault("killed", 0, role="server")
    story.push(0)
    story.pull(0, {0: 1})
    story.pull(0, {}, start=20.0)


@broken("twice", forgotten=((5.0, 9.0),))
def a_push_is_replayed_into_a_snapshot_that_has_it(story: Story) -> None:
    story.fault("killed", 0, role="server")
    story.push(0)
    story.pull(0, {0: [1, 1]})
