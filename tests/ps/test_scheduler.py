"""The scheduler: who is let in and who is not, barriers, founders, settings, losses, the end."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.ps import events as e
from kvstore.ps import messages as m
from kvstore.ps.scheduler import Scheduler, SchedulerOptions

SPEC = m.KeySpec("w", (8,), "float32")


class Job:
    """A scheduler and what it has sent to whom."""

    def __init__(self, workers: int = 2, servers: int = 1, **options: Any) -> None:
        self.machine = Scheduler(SchedulerOptions("job", workers, servers, **options))
        self.now = 0.0
        self.sent: dict[Any, list[Any]] = {}
        self.numbers: dict[Any, int] = {}
        self.actions: list[e.Action] = []
        self.workers = workers
        for rank in range(servers):
            self.server(rank)

    def step(self, event: e.Event) -> None:
        self.actions = self.machine.step(event, self.now)
        for action in self.actions:
            if isinstance(action, e.Send):
                assert isinstance(action.message, m.Letter)
                if action.message.body is not None:
                    self.sent.setdefault(action.peer, []).append(action.message.body)

    def say(self, peer: Any, body: Any) -> None:
        number = self.numbers[peer] = self.numbers.get(peer, 0) + 1
        self.step(e.Received(peer, m.Letter(number, 0, body)))

    def server(self, rank: int, incarnation: int = 1, **more: Any) -> None:
        name = f"s{rank}.{incarnation}"
        self.say(name, m.Hello("server", rank, incarnation, name, "job", m.PROTOCOL, "tcp://x", **more))

    def worker(self, rank: int, peer: str | None = None, incarnation: int = 1, **more: Any) -> str:
        peer = peer or f"w{rank}"
        values: dict[str, Any] = {"options": {"mode": "sync"}, "job": "job", "protocol": m.PROTOCOL, **more}
        self.say(peer, m.Hello("worker", rank, incarnation, peer, group="default", **values))
        return peer

    def start(self, **options: Any) -> list[str]:
        return [self.worker(rank, options={"mode": "sync", **options}) for rank in range(self.workers)]

    def last(self, peer: Any, kind: type) -> Any:
        found = [body for body in self.sent.get(peer, []) if type(body) is kind]
        return found[-1] if found else None

    def pass_time(self, seconds: float, *alive: str) -> None:
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            for name in alive:
                self.step(e.Heard(name))
            self.step(e.Tick())


def test_all_are_welcomed_once_all_are_there() -> None:
    job = Job()
    job.worker(0)
    assert job.last("w0", m.Welcome) is None
    job.worker(1)
    welcome = job.last("w0", m.Welcome)
    assert (welcome.rank, welcome.size, welcome.epoch, welcome.returned) == (0, 2, 1, False)
    assert [one.rank for one in welcome.members] == [0, 1]
    assert job.last("s0.1", m.View).epoch == 1


def test_ranks_are_given_from_the_lowest() -> None:
    job = Job(3)
    for name in "abc":
        job.worker(-1, name)
    assert [job.last(name, m.Welcome).rank for name in "abc"] == [0, 1, 2]


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
    refused = job.last("w1", m.Refused)
    assert refused.error == error
    assert text in refused.text


def test_a_rank_out_of_range_is_refused() -> None:
    job = Job()
    job.worker(7)
    assert job.last("w7", m.Refused).error == "ConfigError"
    assert "worker 7" in job.last("w7", m.Refused).text


def test_a_rank_that_a_living_process_has_is_refused() -> None:
    job = Job()
    job.start()
    job.worker(0, "again", 2)
    assert job.last("again", m.Refused) is None  # the old one may be dead
    job.pass_time(4, "w0", "w1", "s0.1", "again")
    assert job.last("again", m.Refused).error == "FencedError"
    assert job.last("w1", m.View) is None


def test_a_rank_of_a_dead_process_is_taken_over() -> None:
    job = Job()
    job.start(on_peer_loss="continue")
    job.worker(0, "again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    job.pass_time(7, "w1", "s0.1", "again")
    welcome = job.last("again", m.Welcome)
    assert (welcome.rank, welcome.returned) == (0, True)
    assert [one.incarnation for one in job.last("w1", m.View).members] == [2, 1]
    job.step(e.Heard("w0"))
    assert job.last("w0", m.Fenced) is not None


def test_a_loss_breaks_a_store_or_not() -> None:
    for raises in (True, False):
        job = Job()
        job.start(on_peer_loss="raise" if raises else "continue")
        job.say("w1", m.Barrier(1, 0, 1))
        job.pass_time(6, "w1", "s0.1")
        view, answer = job.last("w1", m.View), job.last("w1", m.Answer)
        assert view.broken == raises
        assert [one.rank for one in view.losses] == [0]
        assert (answer.error is not None) == raises
        assert not raises or (answer.error.role, answer.error.rank) == ("worker", 0)


def test_a_stopped_scheduler_blames_nobody() -> None:
    job = Job()
    job.start()
    job.now += 60
    job.step(e.Tick())
    assert job.last("w0", m.View) is None


def test_a_barrier_waits_for_all_but_those_that_rest() -> None:
    job = Job(3)
    job.start()
    job.say("w0", m.Barrier(1, 0, 1))
    job.say("w1", m.Barrier(1, 0, 1))
    assert job.last("w0", m.Answer) is None
    job.say("w0", m.Who(0, -1, 0))
    assert job.last("w0", m.Missing).ranks == (2,)
    job.say("w2", m.JoinRounds(1, 0))
    assert job.last("w0", m.Answer).request == 1
    assert job.last("w1", m.View).resting == (2,)


def test_the_founder_fills_and_the_others_wait() -> None:
    job = Job()
    job.start()
    job.say("w1", m.Found(5, 0, (SPEC,)))
    assert job.last("w1", m.Answer) is None
    job.say("w0", m.Found(1, 0, (SPEC,)))
    assert [one.ready for one in job.last("w0", m.Answer).entries] == [False]
    assert job.last("s0.1", m.Slices).keys[0].spec == SPEC
    job.say("w0", m.Ready(2, 0, ("w",)))
    assert [one.ready for one in job.last("w1", m.Answer).entries] == [True]


def test_the_next_founder_fills_when_the_first_is_lost() -> None:
    job = Job()
    job.start(on_peer_loss="continue")
    job.say("w0", m.Found(1, 0, (SPEC,)))
    job.say("w1", m.Found(5, 0, (SPEC,)))
    job.pass_time(6, "w1", "s0.1")
    answer = job.last("w1", m.Answer)
    assert answer.request == 5
    assert [one.ready for one in answer.entries] == [False]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (m.KeySpec("w", (9,), "float32"), "ShapeError"),
        (m.KeySpec("w", (8,), "float64"), "DTypeError"),
        (m.KeySpec("w", (8,), "float32", True), "ArrayError"),
        (m.KeySpec(3, (8,), "float32"), "KeyKindError"),
        (m.KeySpec("x" * 2000, (8,), "float32"), "ShapeError"),
        (m.KeySpec("x", (1 << 50,), "float32"), "ConfigError"),
        (m.KeySpec("x", (8,), "strange"), "DTypeError"),
    ],
)
def test_keys_that_do_not_fit(spec: m.KeySpec, error: str) -> None:
    job = Job()
    job.start()
    job.say("w0", m.Found(1, 0, (SPEC,)))
    job.say("w1", m.Found(2, 0, (spec,)))
    assert job.last("w1", m.Answer).error.error == error


def test_lookup_waits_or_not_and_drop_forgets() -> None:
    job = Job()
    job.start()
    job.say("w0", m.Found(1, 0, (SPEC,)))
    job.say("w1", m.Lookup(1, 0, ("w",), wait=False))
    assert job.last("w1", m.Answer).entries == ()
    job.say("w1", m.Lookup(2, 0, ("w",)))
    assert job.last("w1", m.Answer).request == 1
    job.say("w0", m.Ready(2, 0, ("w",)))
    assert job.last("w1", m.Answer).request == 2
    job.say("w0", m.Drop(3, 0, ("w",)))
    assert (job.last("s0.1", m.Install).kind, job.last("s0.1", m.Install).text) == ("drop", "0")
    job.say("w1", m.Lookup(3, 0, ()))
    assert job.last("w1", m.Answer).entries == ()


def test_one_optimizer_for_all() -> None:
    job = Job()
    job.start()
    job.say("w0", m.Settings(1, 0, "optimizer", 1, "sgd"))
    assert job.last("w0", m.Answer) is None
    job.say("w1", m.Settings(1, 0, "optimizer", 1, "sgd"))
    job.say("s0.1", m.Installed(0, 1))
    assert [job.last(peer, m.Answer).version for peer in ("w0", "w1")] == [1, 1]
    job.say("w1", m.Settings(2, 0, "optimizer", 1, "adam"))
    assert job.last("w1", m.Answer).error.error == "ConfigError"
    assert [type(body) for body in job.sent["s0.1"]].count(m.Install) == 1


def test_a_worker_that_lags_gets_the_settings_of_its_step() -> None:
    job = Job()
    job.start()
    for request, text in enumerate("aba", 1):
        job.say("w0", m.Settings(request, 0, "configure", 0, text))
        job.say("s0.1", m.Installed(0, request))
    versions = []
    for request, text in enumerate("aba", 1):
        job.say("w1", m.Settings(request, 0, "configure", 0, text))
        versions.append(job.last("w1", m.Answer).version)
    assert versions == [1, 2, 3]


def test_what_a_server_could_not_install_is_told() -> None:
    job = Job()
    job.start()
    job.say("w0", m.Command(1, 0, 7, "body"))
    install = job.last("s0.1", m.Install)
    assert (install.kind, install.head, install.text) == ("command", 7, "body")
    job.say("s0.1", m.Installed(0, install.version, m.Failure("UpdaterError", "no")))
    assert job.last("w0", m.Answer).error.text == "no"


def test_a_server_that_is_lost_for_good_breaks_all() -> None:
    job = Job()
    job.start(on_peer_loss="continue")
    job.pass_time(6, "w0", "w1")
    view = job.last("w0", m.View)
    assert view.broken
    assert [(one.role, one.rank) for one in view.losses] == [("server", 0)]


def test_a_server_may_come_back_in_time_and_hears_everything() -> None:
    job = Job(server_grace=10.0)
    job.start()
    job.say("w0", m.Found(1, 0, (SPEC,)))
    job.say("w0", m.Settings(2, 0, "optimizer", 1, "sgd"))
    job.pass_time(7, "w0", "w1")
    assert job.last("w0", m.View) is None
    job.server(0, 2, restarted=True)
    kinds = [type(body) for body in job.sent["s0.2"]]
    assert kinds == [m.Welcome, m.Slices, m.Install, m.View]
    view = job.last("w1", m.View)
    assert (view.broken, view.epoch, view.servers[0].incarnation) == (False, 2, 2)


def test_a_server_without_its_values_cannot_come_back() -> None:
    job = Job(server_grace=10.0)
    job.start()
    job.say("w0", m.Found(1, 0, (SPEC,)))
    job.pass_time(6, "w0", "w1")
    job.server(0, 2)
    assert job.last("s0.2", m.Refused).error == "FencedError"


def test_the_job_is_over_when_all_have_said_so() -> None:
    job = Job()
    job.start()
    for peer in ("w0", "w1"):
        job.say(peer, m.Leave(0))
        assert job.last("s0.1", m.Over) is None
        job.say(peer, m.Bye(peer))
    assert job.last("s0.1", m.Install).kind == "drop"
    assert job.last("s0.1", m.Over).error == ""
    seen = len(job.sent["s0.1"])
    job.step(e.Received("s0.1", m.Letter(0, seen, None)))
    job.pass_time(2, "s0.1")
    assert job.machine.ended


def test_the_job_is_given_up_without_workers() -> None:
    job = Job(timeout=20.0)
    job.pass_time(40, "s0.1")
    assert job.machine.ended
    assert "no worker" in job.last("s0.1", m.Over).error


def test_somebody_who_knows_another_scheduler_is_fenced() -> None:
    job = Job()
    job.step(e.Received("old", m.Letter(9, 8, m.Barrier(1, 0, 1))))
    assert job.last("old", m.Fenced) is not None


def back(job: Job, rank: int) -> str:
    """Lose a worker, and start it again."""
    alive = [f"w{one}" for one in range(job.workers) if one != rank]
    job.pass_time(6.0, *alive, "s0.1")
    return job.worker(rank, f"w{rank}again", 2, options={"mode": "sync", "on_peer_loss": "continue"})


def test_who_comes_back_begins_after_the_furthest_of_the_others() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 2)
    assert job.last(again, m.Welcome).late == (2,)
    assert job.last("w0", m.View).late == (2,)
    job.say(again, m.Begin(0, 7))
    epoch = job.last("w0", m.View).epoch
    assert job.last("w0", m.View).begin == 7
    job.say("w0", m.Reached(0, epoch, ((7, 3), (8, 3))))
    job.say("w1", m.Reached(0, epoch - 1, ((7, 9), (8, 9))))  # of a view that does not count any more
    assert job.last("s0.1", m.View).begun == -1
    job.say("w1", m.Reached(0, epoch, ((7, 4), (8, 4), (9, 1))))
    for peer in (again, "w0", "s0.1"):
        view = job.last(peer, m.View)
        assert (view.epoch, view.late, view.begin, view.begun) == (epoch + 1, (), -1, 2)
        assert view.bases == ((7, 4), (8, 4), (9, 1))


def test_others_say_it_again_when_one_of_them_is_gone() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 2)
    job.say(again, m.Begin(0, 7))
    job.say("w1", m.Reached(0, job.last("w0", m.View).epoch, ((7, 5),)))
    job.say("w1", m.Leave(0))
    view = job.last("w0", m.View)
    assert (view.begin, view.begun) == (7, -1)
    job.say("w0", m.Reached(0, view.epoch, ((7, 6),)))
    assert job.last("w0", m.View).bases == ((7, 6),)


def test_one_begins_at_a_time_and_at_once_if_there_is_nobody_else() -> None:
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
    job.say(first, m.Reached(0, view.epoch, ((7, 1), (8, 0))))
    assert job.last(second, m.View).begun == 1


def test_nobody_waits_at_a_barrier_or_an_init_for_one_that_is_late() -> None:
    job = Job(3)
    job.start(on_peer_loss="continue")
    again = back(job, 0)
    job.say("w1", m.Barrier(1, 0, 1))
    job.say("w2", m.Barrier(1, 0, 1))
    assert job.last("w1", m.Answer) == m.Answer(1)
    job.say(again, m.Found(1, 0, (SPEC,)))
    assert job.last(again, m.Answer) is None
    job.say("w1", m.Found(2, 0, (SPEC,)))
    assert job.last("w1", m.Answer).entries
    job.say(again, m.Who(0, -1, 0))
    assert job.last(again, m.Missing).ranks == (1,)  # for its values
    job.say("w1", m.Ready(3, 0, ("w",)))
    assert job.last(again, m.Answer).entries
    job.say(again, m.Begin(0, 0))
    job.say("w1", m.Reached(0, job.last("w1", m.View).epoch, ()))
    job.say(again, m.Who(0, -1, 0))
    assert job.last(again, m.Missing).ranks == (2,)


def count(job: Job, peer: str, seconds: float) -> int:
    job.say(peer, m.Count(9, 0, seconds))
    found: int = job.last(peer, m.Answer).count
    return found


def test_the_dead_are_those_that_are_silent_or_lost_and_not_replaced() -> None:
    job = Job(3, 2, server_grace=60.0)
    job.start(on_peer_loss="continue")
    assert count(job, "w0", 1.0) == 0
    job.pass_time(3.0, "w0", "s0.1")
    assert (count(job, "w0", 4.0), count(job, "w0", 2.0)) == (0, 3)
    job.pass_time(3.0, "w0", "w1", "s0.1")
    assert count(job, "w0", 100.0) == 2  # a worker and a server are lost
    job.worker(2, "w2again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    assert count(job, "w0", 100.0) == 1
    job.say("w1", m.Bye("w1"))
    job.server(1, 2, restarted=True)
    assert count(job, "w0", 100.0) == 0


def test_the_dead_are_counted_in_a_broken_store() -> None:
    job = Job(2)
    job.start(on_peer_loss="raise")
    job.pass_time(6.0, "w0", "s0.1")
    assert count(job, "w0", 60.0) == 1
