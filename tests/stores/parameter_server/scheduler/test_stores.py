"""Stores: their start, and workers that rejoin and begin again."""

from __future__ import annotations

from scheduled import SPEC, Job

from kvstore.stores.parameter_server.protocol import messages as m


def test_all_are_welcomed_once_all_are_there() -> None:
    job = Job()
    job.worker(0)
    assert job.last("w0", m.WelcomeNotice) is None
    job.worker(1)
    welcome = job.last("w0", m.WelcomeNotice)
    assert (welcome.rank, welcome.size, welcome.epoch, welcome.returned) == (0, 2, 1, False)
    assert [one.rank for one in welcome.members] == [0, 1]
    assert job.last("s0.1", m.ViewNotice).epoch == 1


def back(job: Job, rank: int) -> str:
    """Lose a worker, and start it again."""
    alive = [f"w{one}" for one in range(job.workers) if one != rank]
    job.pass_time(6.0, *alive, "s0.1")
    return job.worker(rank, f"w{rank}again", 2, options={"mode": "sync", "on_peer_loss": "continue"})


def test_a_rejoined_worker_begins_after_the_furthest_of_the_others() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 2)
    assert job.last(again, m.WelcomeNotice).late == (2,)
    assert job.last(again, m.ViewNotice) is None  # its welcome says it all
    assert job.last("w0", m.ViewNotice).late == (2,)
    job.say(again, m.RejoinBeginNotice(0, 7))
    epoch = job.last("w0", m.ViewNotice).epoch
    assert job.last("w0", m.ViewNotice).begin == 7
    job.say("w0", m.JoinPointNotice(0, epoch, ((7, 3), (8, 3))))
    job.say("w1", m.JoinPointNotice(0, epoch - 1, ((7, 9), (8, 9))))  # of a view that does not count any more
    assert job.last("s0.1", m.ViewNotice).begun == -1
    job.say("w1", m.JoinPointNotice(0, epoch, ((7, 4), (8, 4), (9, 1))))
    for peer in (again, "w0", "s0.1"):
        view = job.last(peer, m.ViewNotice)
        assert (view.epoch, view.late, view.begin, view.begun) == (epoch + 1, (), -1, 2)
        assert view.bases == ((7, 4), (8, 4), (9, 1))


def test_no_worker_rejoins_a_store_that_raises_even_if_it_was_lost_after_it_had_left() -> None:
    job = Job(3)
    job.start()
    job.say("w2", m.LeaveNotice(0))
    alive = ("w0", "w1", "s0.1")
    job.pass_time(6.0, *alive)
    job.worker(2, "again", 2)
    assert job.last("again", m.RefusalNotice).error == "PeerLostError"
    assert [one.rank for one in job.last("w0", m.ViewNotice).members] == [0, 1]


def test_a_host_is_whole_when_its_last_worker_has_left() -> None:
    job = Job(3)
    for rank, host in enumerate("aab"):
        job.worker(
            rank, f"w{rank}", rank, host=host, options={"on_peer_loss": "continue", "hierarchy": "host"}
        )
    assert job.last("s0.1", m.ViewNotice).seats == ((0, 0), (1, 0), (2, 2))
    job.say("w1", m.LeaveNotice(0))
    assert job.last("s0.1", m.ViewNotice).whole == ()
    job.say("w0", m.LeaveNotice(0, last=True))
    job.pass_time(1.0)
    assert job.last("s0.1", m.ViewNotice).whole == (0,)


def test_others_say_it_again_when_one_of_them_is_gone() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 2)
    job.say(again, m.RejoinBeginNotice(0, 7))
    job.say("w1", m.JoinPointNotice(0, job.last("w0", m.ViewNotice).epoch, ((7, 5),)))
    job.say("w1", m.LeaveNotice(0))
    view = job.last("w0", m.ViewNotice)
    assert (view.begin, view.begun) == (7, -1)
    job.say("w0", m.JoinPointNotice(0, view.epoch, ((7, 6),)))
    assert job.last("w0", m.ViewNotice).bases == ((7, 6),)


def test_one_begins_at_a_time_and_at_once_if_there_is_no_other() -> None:
    job = Job(2)
    job.start(on_peer_loss="continue")
    first = back(job, 0)
    job.pass_time(6.0, first, "s0.1")
    second = job.worker(1, "w1again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    job.say(first, m.RejoinBeginNotice(0, 7))
    assert job.last(first, m.ViewNotice).begun == 0
    job.say(second, m.RejoinBeginNotice(0, 8))
    view = job.last(first, m.ViewNotice)
    assert (view.late, view.begin, view.begun) == ((1,), 8, -1)
    job.say(first, m.JoinPointNotice(0, view.epoch, ((7, 1), (8, 0))))
    assert job.last(second, m.ViewNotice).begun == 1


def test_no_worker_waits_at_a_barrier_or_an_init_for_one_that_rejoins() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 0)
    job.say("w1", m.BarrierRequest(1, 0, 1))
    job.say("w2", m.BarrierRequest(1, 0, 1))
    assert job.last("w1", m.MemberReply) == m.MemberReply(1)
    job.say(again, m.CreateKeysRequest(1, 0, (SPEC,)))
    assert job.last(again, m.MemberReply) is None
    job.say("w1", m.CreateKeysRequest(2, 0, (SPEC,)))
    assert job.last("w1", m.MemberReply).entries
    job.say(again, m.MissingRequest(0, -1, 0))
    assert job.last(again, m.MissingReply).ranks == (1,)  # for its values
    job.say("w1", m.KeysReadyRequest(3, 0, ("w",)))
    assert job.last(again, m.MemberReply).entries
    job.say(again, m.RejoinBeginNotice(0, 0))
    job.say("w1", m.JoinPointNotice(0, job.last("w1", m.ViewNotice).epoch, ()))
    job.say(again, m.MissingRequest(0, -1, 0))
    assert job.last(again, m.MissingReply).ranks == (2,)


def test_many_that_leave_at_once_are_told_of_together() -> None:
    job = Job(5)
    job.start()
    for rank in (1, 2, 3):
        job.say(f"w{rank}", m.LeaveNotice(0))
    told = [one for one in job.sent["w0"] if type(one) is m.ViewNotice]
    assert [len(one.members) for one in told] == [4]
    job.pass_time(0.5, "w0", "w4", "s0.1")
    told = [one for one in job.sent["w0"] if type(one) is m.ViewNotice]
    assert [[one.rank for one in view.members] for view in told] == [[0, 2, 3, 4], [0, 4]]
    assert job.last("s0.1", m.ViewNotice) == told[-1]


def test_a_loss_is_told_at_once_with_all_that_was_not_told_yet() -> None:
    job = Job(5)
    job.start()
    for rank in (1, 2):
        job.say(f"w{rank}", m.LeaveNotice(0))
    job.say("w3", m.LeaveNotice(0, lost=True))
    view = job.last("w0", m.ViewNotice)
    assert ([one.rank for one in view.members], view.broken) == ([0, 4], True)
    shown = len(job.sent["w0"])
    job.pass_time(0.5, "w0", "w4", "s0.1")
    assert not [one for one in job.sent["w0"][shown:] if type(one) is m.ViewNotice]


def test_the_last_workers_that_leave_are_not_reported() -> None:
    job = Job(3)
    job.start()
    for rank in range(3):
        job.say(f"w{rank}", m.LeaveNotice(0))
    job.pass_time(0.5, "w0", "w1", "w2", "s0.1")
    assert [len(one.members) for one in job.sent["s0.1"] if type(one) is m.ViewNotice] == [3, 2]
    assert job.last("s0.1", m.InstallRequest).kind == "drop"


def test_a_worker_does_not_start_alone_a_store_whose_others_were_turned_away() -> None:
    job = Job()
    job.worker(0, ordinal=1)
    job.worker(1)
    job.pass_time(6, "w1", "s0.1")
    assert job.last("w1", m.RefusalNotice).error == "PeerLostError"
    job.worker(0, "w0 again", 2, restarted=True)
    assert job.last("w0 again", m.WelcomeNotice) is None
    job.say("w1", m.ProcessEndNotice("w1", True))
    job.pass_time(1, "w0 again", "s0.1")
    assert job.last("w0 again", m.WelcomeNotice) is None
    assert job.last("w0 again", m.RefusalNotice).rank == 1
