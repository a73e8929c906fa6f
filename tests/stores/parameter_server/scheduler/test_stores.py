"""Stores: their start, and workers that rejoin and begin again."""

from __future__ import annotations

from scheduled import SPEC, Job

from kvstore.stores.parameter_server.protocol import messages as m


def test_all_are_welcomed_once_all_are_there() -> None:
    job = Job()
    job.worker(0)
    assert job.last("w0", m.Welcome) is None
    job.worker(1)
    welcome = job.last("w0", m.Welcome)
    assert (welcome.rank, welcome.size, welcome.epoch, welcome.returned) == (0, 2, 1, False)
    assert [one.rank for one in welcome.members] == [0, 1]
    assert job.last("s0.1", m.View).epoch == 1


def back(job: Job, rank: int) -> str:
    """Lose a worker, and start it again."""
    alive = [f"w{one}" for one in range(job.workers) if one != rank]
    job.pass_time(6.0, *alive, "s0.1")
    return job.worker(rank, f"w{rank}again", 2, options={"mode": "sync", "on_peer_loss": "continue"})


def test_a_rejoined_worker_begins_after_the_furthest_of_the_others() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 2)
    assert job.last(again, m.Welcome).late == (2,)
    assert job.last(again, m.View) is None  # its welcome says it all
    assert job.last("w0", m.View).late == (2,)
    job.say(again, m.Begin(0, 7))
    epoch = job.last("w0", m.View).epoch
    assert job.last("w0", m.View).begin == 7
    job.say("w0", m.JoinPointReached(0, epoch, ((7, 3), (8, 3))))
    job.say(
        "w1", m.JoinPointReached(0, epoch - 1, ((7, 9), (8, 9)))
    )  # of a view that does not count any more
    assert job.last("s0.1", m.View).begun == -1
    job.say("w1", m.JoinPointReached(0, epoch, ((7, 4), (8, 4), (9, 1))))
    for peer in (again, "w0", "s0.1"):
        view = job.last(peer, m.View)
        assert (view.epoch, view.late, view.begin, view.begun) == (epoch + 1, (), -1, 2)
        assert view.bases == ((7, 4), (8, 4), (9, 1))


def test_no_worker_rejoins_a_store_that_raises_even_if_it_was_lost_after_it_had_left() -> None:
    job = Job(3)
    job.start()
    job.say("w2", m.Leave(0))
    alive = ("w0", "w1", "s0.1")
    job.pass_time(6.0, *alive)
    job.worker(2, "again", 2)
    assert job.last("again", m.Refused).error == "PeerLostError"
    assert [one.rank for one in job.last("w0", m.View).members] == [0, 1]


def test_a_host_is_whole_when_its_last_worker_has_left() -> None:
    job = Job(3)
    for rank, host in enumerate("aab"):
        job.worker(
            rank, f"w{rank}", rank, host=host, options={"on_peer_loss": "continue", "hierarchy": "host"}
        )
    assert job.last("s0.1", m.View).seats == ((0, 0), (1, 0), (2, 2))
    job.say("w1", m.Leave(0))
    assert job.last("s0.1", m.View).whole == ()
    job.say("w0", m.Leave(0, last=True))
    job.pass_time(1.0)
    assert job.last("s0.1", m.View).whole == (0,)


def test_others_say_it_again_when_one_of_them_is_gone() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 2)
    job.say(again, m.Begin(0, 7))
    job.say("w1", m.JoinPointReached(0, job.last("w0", m.View).epoch, ((7, 5),)))
    job.say("w1", m.Leave(0))
    view = job.last("w0", m.View)
    assert (view.begin, view.begun) == (7, -1)
    job.say("w0", m.JoinPointReached(0, view.epoch, ((7, 6),)))
    assert job.last("w0", m.View).bases == ((7, 6),)


def test_one_begins_at_a_time_and_at_once_if_there_is_no_other() -> None:
    job = Job(2)
    job.start(on_peer_loss="continue")
    first = back(job, 0)
    job.pass_time(6.0, first, "s0.1")
    second = job.worker(1, "w1again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    job.say(first, m.Begin(0, 7))
    assert job.last(first, m.View).begun == 0
    job.say(second, m.Begin(0, 8))
    view = job.last(first, m.View)
    assert (view.late, view.begin, view.begun) == ((1,), 8, -1)
    job.say(first, m.JoinPointReached(0, view.epoch, ((7, 1), (8, 0))))
    assert job.last(second, m.View).begun == 1


def test_no_worker_waits_at_a_barrier_or_an_init_for_one_that_rejoins() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 0)
    job.say("w1", m.Barrier(1, 0, 1))
    job.say("w2", m.Barrier(1, 0, 1))
    assert job.last("w1", m.Answer) == m.Answer(1)
    job.say(again, m.CreateKeys(1, 0, (SPEC,)))
    assert job.last(again, m.Answer) is None
    job.say("w1", m.CreateKeys(2, 0, (SPEC,)))
    assert job.last("w1", m.Answer).entries
    job.say(again, m.Who(0, -1, 0))
    assert job.last(again, m.Missing).ranks == (1,)  # for its values
    job.say("w1", m.Ready(3, 0, ("w",)))
    assert job.last(again, m.Answer).entries
    job.say(again, m.Begin(0, 0))
    job.say("w1", m.JoinPointReached(0, job.last("w1", m.View).epoch, ()))
    job.say(again, m.Who(0, -1, 0))
    assert job.last(again, m.Missing).ranks == (2,)


def test_many_that_leave_at_once_are_told_of_together() -> None:
    job = Job(5)
    job.start()
    for rank in (1, 2, 3):
        job.say(f"w{rank}", m.Leave(0))
    told = [one for one in job.sent["w0"] if type(one) is m.View]
    assert [len(one.members) for one in told] == [4]
    job.pass_time(0.5, "w0", "w4", "s0.1")
    told = [one for one in job.sent["w0"] if type(one) is m.View]
    assert [[one.rank for one in view.members] for view in told] == [[0, 2, 3, 4], [0, 4]]
    assert job.last("s0.1", m.View) == told[-1]


def test_a_loss_is_told_at_once_with_all_that_was_not_told_yet() -> None:
    job = Job(5)
    job.start()
    for rank in (1, 2):
        job.say(f"w{rank}", m.Leave(0))
    job.say("w3", m.Leave(0, lost=True))
    view = job.last("w0", m.View)
    assert ([one.rank for one in view.members], view.broken) == ([0, 4], True)
    shown = len(job.sent["w0"])
    job.pass_time(0.5, "w0", "w4", "s0.1")
    assert not [one for one in job.sent["w0"][shown:] if type(one) is m.View]


def test_the_last_workers_that_leave_are_not_reported() -> None:
    job = Job(3)
    job.start()
    for rank in range(3):
        job.say(f"w{rank}", m.Leave(0))
    job.pass_time(0.5, "w0", "w1", "w2", "s0.1")
    assert [len(one.members) for one in job.sent["s0.1"] if type(one) is m.View] == [3, 2]
    assert job.last("s0.1", m.Install).kind == "drop"


def test_a_worker_does_not_start_alone_a_store_whose_others_were_turned_away() -> None:
    job = Job()
    job.worker(0, ordinal=1)
    job.worker(1)
    job.pass_time(6, "w1", "s0.1")
    assert job.last("w1", m.Refused).error == "PeerLostError"
    job.worker(0, "w0 again", 2, restarted=True)
    assert job.last("w0 again", m.Welcome) is None
    job.say("w1", m.Bye("w1", True))
    job.pass_time(1, "w0 again", "s0.1")
    assert job.last("w0 again", m.Welcome) is None
    assert job.last("w0 again", m.Refused).rank == 1
