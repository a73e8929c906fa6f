"""Which processes the scheduler admits, with which rank, and which it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from scheduled import Job

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m


def test_ranks_are_given_from_the_lowest() -> None:
    job = Job(3)
    for name in "abc":
        job.worker(-1, name)
    assert [job.last(name, m.WelcomeNotice).rank for name in "abc"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"job": "other"}, "FencedError", "'other'"),
        ({"protocol": 99}, "ProtocolError", "99"),
        ({"options": {"mode": "async"}}, "ConfigError", "'async' instead of 'sync'"),
    ],
)
def test_strangers_are_refused(more: dict[str, Any], error: str, text: str) -> None:
    job = Job()
    job.worker(0)
    job.worker(1, **more)
    refused = job.last("w1", m.RefusalNotice)
    assert refused.error == error
    assert text in refused.text


def test_a_rank_out_of_range_is_refused() -> None:
    job = Job()
    job.worker(7)
    assert job.last("w7", m.RefusalNotice).error == "ConfigError"
    assert "worker 7" in job.last("w7", m.RefusalNotice).text


def test_a_rank_that_a_living_process_has_is_refused() -> None:
    job = Job()
    job.start()
    job.worker(0, "again", 2)
    assert job.last("again", m.RefusalNotice) is None  # the old one may be dead
    job.pass_time(4, "w0", "w1", "s0.1", "again")
    assert job.last("again", m.RefusalNotice).error == "FencedError"
    assert job.last("w1", m.ViewNotice) is None


def test_a_rank_of_a_dead_process_is_taken_over() -> None:
    job = Job()
    job.start(on_peer_loss="continue")
    job.worker(0, "again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    job.pass_time(7, "w1", "s0.1", "again")
    welcome = job.last("again", m.WelcomeNotice)
    assert (welcome.rank, welcome.returned) == (0, True)
    assert [one.incarnation for one in job.last("w1", m.ViewNotice).members] == [2, 1]
    job.step(e.HeartbeatReceived("w0"))
    assert job.last("w0", m.FenceNotice) is not None


@pytest.mark.parametrize("late_sign", [False, True])
def test_a_stopped_scheduler_does_not_take_a_dead_holder_for_a_living_one(late_sign: bool) -> None:
    job = Job()
    job.start(on_peer_loss="continue")
    job.worker(0, "again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    job.now += 3
    if late_sign:  # sent before the holder died, read after the pause
        job.step(e.HeartbeatReceived("w0"))
    job.step(e.TickEvent())
    assert job.last("again", m.RefusalNotice) is None
    job.pass_time(7, "w1", "s0.1", "again")
    assert job.last("again", m.WelcomeNotice).returned


def test_a_process_that_was_started_again_takes_its_rank_at_once() -> None:
    job = Job()
    job.start(on_peer_loss="continue")
    options = {"mode": "sync", "on_peer_loss": "continue"}
    job.worker(0, "again", 2, options=options, restarted=True)
    assert job.last("again", m.WelcomeNotice).returned
    job.say("w0", m.PingRequest(1))
    assert job.last("w0", m.FenceNotice) is not None
