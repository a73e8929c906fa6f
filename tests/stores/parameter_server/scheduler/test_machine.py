"""The scheduler as a whole: the processes that it knows, and its answers to unknown ones."""

from __future__ import annotations

from scheduled import Job

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m


def test_a_process_that_knows_another_scheduler_is_fenced() -> None:
    job = Job()
    job.step(e.MessageReceived("old", m.ReliableMessage(9, 8, m.BarrierRequest(1, 0, 1))))
    assert job.last("old", m.FenceNotice) is not None


def test_a_stopped_scheduler_blames_no_process() -> None:
    job = Job()
    job.start()
    job.now += 60
    job.step(e.TickEvent())
    assert job.last("w0", m.ViewNotice) is None


def test_it_says_whom_the_job_waits_for() -> None:
    job = Job(2, 2)
    job.worker(1)
    assert job.machine.waits_for() == "worker 0"
    job.pass_time(6, "s0.1", "w1")
    job.worker(0)
    assert job.machine.waits_for() == "server 1"


def test_no_process_is_answered_before_a_hello() -> None:
    job = Job()
    job.say("w0", m.PingRequest(3))
    assert "w0" not in job.sent
    job.worker(0)
    job.say("w0", m.PingRequest(4))
    assert job.last("w0", m.PingReply) == m.PingReply(4)


def test_strangers_are_forgotten_when_there_are_many() -> None:
    job = Job()
    job.worker(0)
    for one in range(9000):
        job.now += 0.01
        job.step(e.MessageReceived(one, m.ReliableMessage(0, 0, None)))
    assert len(job.machine._peers) < 5000
    job.say("w0", m.PingRequest(1))
    assert job.last("w0", m.PingReply) is not None
