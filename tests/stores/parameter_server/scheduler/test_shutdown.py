"""How the job ends."""

from __future__ import annotations

from scheduled import SPEC, Job

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m


def test_the_job_is_over_when_all_have_said_so() -> None:
    job = Job()
    job.start()
    for peer in ("w0", "w1"):
        job.say(peer, m.LeaveNotice(0))
        assert job.last("s0.1", m.JobEndNotice) is None
        job.say(peer, m.ProcessEndNotice(peer))
    assert job.last("s0.1", m.InstallRequest).kind == "drop"
    assert job.last("s0.1", m.JobEndNotice).error == ""
    seen = len(job.sent["s0.1"])
    job.step(e.MessageReceived("s0.1", m.ReliableMessage(0, seen, None)))
    job.pass_time(2, "s0.1")
    assert job.machine.ended


def test_the_job_is_given_up_without_workers() -> None:
    job = Job(timeout=20.0)
    job.pass_time(40, "s0.1")
    assert job.machine.ended
    assert "no worker" in job.last("s0.1", m.JobEndNotice).error


def test_a_process_that_waits_for_a_rank_is_refused_at_the_end() -> None:
    job = Job(timeout=10.0)
    job.pass_time(9, "s0.1")
    job.server(0, 2)
    job.pass_time(2)
    assert job.last("s0.2", m.RefusalNotice).text == "the job is over"
    job.worker(0)
    assert job.last("w0", m.RefusalNotice).text == "the job is over"
    job.pass_time(4)  # the rank becomes free during this time
    assert {one.text for one in job.sent["s0.2"] if type(one) is not m.HelloReply} == {"the job is over"}


def test_all_are_lost() -> None:
    job = Job()
    job.start()
    job.pass_time(12, "s0.1")
    assert job.last("s0.1", m.JobEndNotice).error == "all workers are lost"


def test_the_end_waits_until_all_know_it_but_not_for_ever() -> None:
    job = Job(1)
    job.start()
    job.say("w0", m.ProcessEndNotice("w0"))
    job.pass_time(4, "s0.1")
    assert not job.machine.ended
    job.pass_time(2, "s0.1")
    assert job.machine.ended


def test_keys_of_a_store_that_is_over_weigh_nothing() -> None:
    job = Job(1, 2)
    homes = []
    for number in range(2):
        job.worker(0, f"w0.{number}", process="w0", ordinal=number)
        job.say(f"w0.{number}", m.CreateKeysRequest(1, number, (SPEC,)))
        homes.append(job.last(f"w0.{number}", m.MemberReply).entries[0].slices[0].server)
        job.say(f"w0.{number}", m.LeaveNotice(number))
    assert homes == [0, 0]
    assert [len(store.keys.entries) for store in job.machine._stores.values()] == [0, 0]
