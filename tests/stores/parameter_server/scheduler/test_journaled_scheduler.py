"""The records of a scheduler hold its whole state: after a restart it answers as without one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.reliable_link import ReliableLink
from kvstore.stores.parameter_server.scheduler.journaled_scheduler import JournaledScheduler
from kvstore.stores.parameter_server.scheduler.machine import SchedulerOptions
from kvstore.stores.parameter_server.scheduler.machine_state import dump_state

OPTIONS = SchedulerOptions("job", 2, 1)
PLACES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")


class Company:
    """A job whose scheduler is killed between any two of its turns; one message is a turn."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.links: dict[bytes, ReliableLink] = {}
        self.heard: dict[bytes, list[object]] = {}
        self.begin()

    def begin(self) -> None:
        self.scheduler = JournaledScheduler(OPTIONS, str(self.folder))
        self.scheduler.continue_job(PLACES)

    def kill(self) -> None:
        self.scheduler.journal.close()
        self.begin()

    def say(self, name: bytes, body: object) -> None:
        link = self.links.setdefault(name, ReliableLink(1.0))
        self.step(e.MessageReceived(name, link.write(body, 0.0)))

    def step(self, event: e.Event) -> None:
        actions = self.scheduler.step(event)
        self.scheduler.commit()
        for action in actions:
            assert isinstance(action, e.SendMessage)
            link = self.links.setdefault(action.peer, ReliableLink(1.0))  # type: ignore[arg-type]
            assert link.is_current_term(action.message)  # type: ignore[arg-type]
            self.heard.setdefault(action.peer, []).extend(link.read(action.message, 0.0))  # type: ignore[arg-type]


SGD = '{"name": "sgd", "config": {}}'


def hello(role: str, rank: int) -> m.HelloRequest:
    return m.HelloRequest(role, rank, rank + 1, f"{role}{rank}", "job", m.PROTOCOL, options={"mode": "sync"})


def played(folder: Path, kills: bool) -> Company:
    job = Company(folder)
    program: list[tuple[bytes, object]] = [
        (b"s0", hello("server", 0)),
        (b"w0", hello("worker", 0)),
        (b"w1", hello("worker", 1)),
        (b"w1", m.CreateKeysRequest(1, 0, (m.KeySpec("w", (3000,), "float32"),))),
        (b"w0", m.CreateKeysRequest(1, 0, (m.KeySpec("w", (3000,), "float32"),))),
        (b"w0", m.KeysReadyRequest(2, 0, ("w",))),
        (b"w0", m.SettingsRequest(3, 0, "optimizer", 1, SGD)),
        (b"s0", m.InstallReply(0, 1)),
        (b"w0", m.SettingsRequest(4, 0, "configure", 1, '{"wd": 0.5}', 3)),
        (b"s0", m.InstallReply(0, 2)),
        (b"w1", m.SettingsRequest(2, 0, "optimizer", 1, SGD)),
        (b"w1", m.SettingsRequest(3, 0, "configure", 1, '{"learning_rate": 0.5}', 1)),
        (b"s0", m.InstallReply(0, 3)),
        (b"s0", m.InstallReply(0, 4, m.Failure("ConfigError", "server 0: no"))),
        (b"w0", m.BarrierRequest(5, 0, 1)),
        (b"w1", m.BarrierRequest(4, 0, 1)),
        (b"w1", m.JoinRequest(5, 0)),
        (b"w1", m.LeaveNotice(0)),
        (b"w1", m.ProcessEndNotice("worker1")),
        (b"w0", m.LeaveNotice(0)),
        (b"w0", m.ProcessEndNotice("worker0")),
    ]
    for name, body in program:
        job.say(name, body)
        if kills:
            job.kill()
    return job


def test_it_goes_on_as_one_that_was_never_killed(tmp_path: Path) -> None:
    killed, lived = played(tmp_path / "killed", True), played(tmp_path / "lived", False)
    assert killed.heard == lived.heard
    assert killed.scheduler.machine.term == 22
    answers = [one for one in killed.heard[b"w1"] if isinstance(one, m.MemberReply)]
    assert [one.request for one in answers] == [1, 2, 3, 4, 5]


def test_a_state_that_is_read_is_the_one_that_was_written(tmp_path: Path) -> None:
    job = played(tmp_path, False)
    before = dump_state(job.scheduler.machine.state())
    job.scheduler.journal.close()
    again = JournaledScheduler(OPTIONS, str(tmp_path))
    after = dump_state(again.machine.state())
    assert after == before
    again.journal.close()


def test_it_is_replaced_by_the_state_when_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.stores.parameter_server.scheduler.journaled_scheduler._LARGE", 100)
    monkeypatch.setattr("kvstore.stores.parameter_server.scheduler.journaled_scheduler._GROWTH", 1)
    job = played(tmp_path, True)
    assert job.heard == played(tmp_path / "lived", False).heard


def test_what_was_forgotten_of_the_settings_is_forgotten_after_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.stores.parameter_server.scheduler.settings._KEPT", 4)
    monkeypatch.setattr("kvstore.stores.parameter_server.scheduler.journaled_scheduler._LARGE", 10_000)
    heard, sizes = [], []
    for name in ("killed", "lived"):
        job = Company(tmp_path / name)
        for role, rank in (("server", 0), ("worker", 0), ("worker", 1)):
            job.say(f"{role[0]}{rank}".encode(), hello(role, rank))
        for number in range(1, 101):
            kind, text = ("optimizer", SGD) if number == 1 else ("configure", f'{{"wd": {number}}}')
            job.say(b"w0", m.SettingsRequest(number, 0, kind, 1, text, number))
            job.say(b"s0", m.InstallReply(0, number))
            job.say(b"w1", m.SettingsRequest(number, 0, kind, 1, text, number))
            if name == "killed" and number % 7 == 0:
                job.kill()
        heard.append(job.heard)
        sizes.append(len(job.scheduler.state_record(PLACES)))
        job.scheduler.journal.close()
    assert heard[0] == heard[1]
    assert max(sizes) < 10_000


def test_an_absence_does_not_count_as_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Company(tmp_path)
    for role, rank in (("server", 0), ("worker", 0), ("worker", 1)):
        job.say(f"{role[0]}{rank}".encode(), hello(role, rank))
    job.scheduler.journal.close()
    # Another boot of the machine: its clock has begun anew.
    again = job.scheduler = JournaledScheduler(OPTIONS, str(tmp_path), lambda: time.monotonic() - 50_000.0)
    again.continue_job(PLACES)
    job.step(e.TickEvent())
    assert not any(isinstance(one, m.ViewNotice) for one in job.heard[b"w0"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (SchedulerOptions("job", 3, 1), "num_workers 3 instead of 2"),
        (SchedulerOptions("job", 2, 1, dead_after=9.0), "dead_after 9.0 instead of 5.0"),
    ],
)
def test_a_journal_of_other_options_is_refused(tmp_path: Path, options: SchedulerOptions, told: str) -> None:
    Company(tmp_path).scheduler.journal.close()
    with pytest.raises(ConfigError, match=told):
        JournaledScheduler(options, str(tmp_path))


def test_a_journal_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Company(tmp_path).scheduler.journal.close()
    monkeypatch.setattr("kvstore.__version__", "9.9")
    with pytest.raises(ConfigError, match=r"this is kvstore 9\.9"):
        JournaledScheduler(OPTIONS, str(tmp_path))


def test_the_older_of_two_ends_when_it_hears_of_the_newer(tmp_path: Path) -> None:
    job = Company(tmp_path)
    actions = job.scheduler.step(e.MessageReceived(b"w0", m.ReliableMessage(0, 0, m.PingRequest(0), 2)))
    ends = [one for one in actions if isinstance(one, e.JobEnded)]
    assert ends and ends[0].error is not None
    assert "replaced" in ends[0].error.text


def test_others_follow_the_newer_of_two() -> None:
    link = ReliableLink(1.0)
    assert link.is_current_term(m.ReliableMessage(0, 0, None, 2))
    assert not link.is_current_term(m.ReliableMessage(0, 0, None, 1))
    assert link.send_unreliable(None).term == 2
