"""Settings of a store: who means which, and what is forgotten of very many."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scheduled import Job

from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler import settings
from kvstore.stores.parameter_server.scheduler.settings import Setting, SettingsTable
from kvstore.stores.parameter_server.server.optimizer import OptimizerVersions

SERVERS = {0, 1, 2, 3}
KEPT = 8


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_KEPT", KEPT)


def rate(number: int) -> str:
    return json.dumps({"name": "sgd", "config": {"learning_rate": number / 1024}})


class Asked:
    """A table, its workers, and servers that install at once."""

    def __init__(self, unpaced: Any = ()) -> None:
        self.table, self.unpaced = SettingsTable(0), unpaced
        self.requests = itertools.count()

    def ask(self, rank: int, kind: str, text: str, ordinal: int = 1) -> tuple[int, bool]:
        """Return the version of the answer, and whether the servers had to be told."""
        request = next(self.requests)
        asked = m.Settings(request, 0, kind, ordinal, text)
        setting, new = self.table.ask(rank, asked, set(SERVERS), self.unpaced)
        assert setting is not None
        answers = setting.answers()
        for server in SERVERS if new else ():
            answers += self.table.installed(server, setting.install.version, None)
        assert answers == [(rank, m.Answer(request, version=setting.install.version))]
        return setting.install.version, new


def newest(installs: list[m.Install]) -> OptimizerVersions:
    """What a server has that has heard this."""
    versions = OptimizerVersions()
    for install in installs:
        made = versions.after(install.version, install.kind, install.text)
        assert made is not None
        versions.add(made)
    return versions


# ------------------------------------------------------------------------------------------------ very many


@pytest.mark.parametrize(("workers", "changes"), [(1, 20_000), (3, 5000)])
def test_many_changes_cost_each_the_same_and_take_no_more_memory(
    monkeypatch: pytest.MonkeyPatch, workers: int, changes: int
) -> None:
    looks = 0

    def install(setting: Setting) -> m.Install:
        nonlocal looks
        looks += 1
        return setting.__dict__["install"]  # type: ignore[no-any-return]

    job = Asked()
    job.ask(0, "optimizer", rate(0))
    counted = property(install, lambda one, value: one.__dict__.update(install=value))
    monkeypatch.setattr(Setting, "install", counted, raising=False)
    for number in range(1, changes + 1):
        told = [job.ask(rank, "configure", rate(number)) for rank in range(workers)]
        assert told == [(number + 1, rank == 0) for rank in range(workers)]
    assert looks < 150 * workers * changes
    assert len(job.table.history) <= 2 * settings._KEPT + 4
    again = job.table.again(0)
    assert [again[0].kind, again[-1].text] == ["optimizer", rate(changes)]
    assert len(again) == len(job.table.history)


def test_many_commands_are_forgotten_once_all_servers_have_them() -> None:
    table = SettingsTable(0)
    for number in range(1000):
        version = table.command(0, m.Command(number, 0, 7, "body"), set(SERVERS)).install.version
        for server in SERVERS:
            answers = table.installed(server, version, None)
        assert answers == [(0, m.Answer(number, version=version))]
    assert table.again(0) == []


# ------------------------------------------------------------------------------------- nobody notices it

KINDS = st.sampled_from(["configure", "configure", "configure", "clock", "steps", "optimizer", "none"])


def valid(program: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Set an optimizer wherever one is changed that is not there."""
    made = [("optimizer", 0)]
    for kind, number in program:
        made.append(("optimizer" if made[-1][0] == "none" and kind != "none" else kind, number))
    return made


@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=st.lists(st.tuples(KINDS, st.integers(0, 3)), max_size=120),
    lags=st.lists(st.integers(0, KEPT - 1), min_size=1, max_size=3),
)
def test_workers_in_step_are_answered_as_if_nothing_were_forgotten(
    few_kept: None, program: list[tuple[str, int]], lags: list[int]
) -> None:
    job, kept = Asked(), Asked()
    kept.table._most = 1 << 60
    program = valid(program)
    for step in range(len(program) + max(lags)):
        for rank, lag in enumerate([0, *lags]):
            if 0 <= (at := step - lag) < len(program):
                kind, number = program[at]
                ordinal = sum(one in ("optimizer", "none") for one, _ in program[: at + 1])
                text = {"none": "", "steps": "", "clock": str(number)}.get(kind, rate(number))
                asked = rank, kind, text, ordinal
                assert job.ask(*asked) == kept.ask(*asked)
        ours, all_ = newest(job.table.again(0)), newest(kept.table.again(0))
        for version in range(max(0, kept.table._versions - KEPT + 1), kept.table._versions + 1):
            mine, other = ours.at(version), all_.at(version)
            assert mine._replace(optimizer=None, version=0) == other._replace(optimizer=None, version=0)


def test_workers_without_rounds_may_be_any_number_of_settings_behind(few_kept: None) -> None:
    job = Asked(unpaced=[0, 1])
    told = [job.ask(0, "configure", rate(number)) for number in range(10 * KEPT)]
    assert [job.ask(1, "configure", rate(number)) for number in range(10 * KEPT)] == [
        (version, False) for version, _ in told
    ]
    for number in range(10 * KEPT, 20 * KEPT):
        for rank in (0, 1):
            job.ask(rank, "configure", rate(number))
    assert len(job.table.history) <= 20 * KEPT
    assert job.table.history[0].install.version > KEPT


def test_what_a_server_has_not_got_is_kept(few_kept: None) -> None:
    job = Asked()
    setting, _ = job.table.ask(1, m.Settings(0, 0, "configure", 1, rate(0)), set(SERVERS))
    assert setting is not None
    for number in range(1, 10 * KEPT):
        job.ask(0, "configure", rate(number))
    assert job.table.again(0)[0] == setting.install
    for server in SERVERS:
        answers = job.table.installed(server, 1, None)
    assert [rank for rank, _ in answers] == [1]
    for number in range(10 * KEPT, 20 * KEPT):
        job.ask(0, "configure", rate(number))
    assert job.table.again(0)[0].version > 1


# --------------------------------------------------------------------------------------- who comes back


def test_who_comes_back_changes_nothing_by_what_was_forgotten(few_kept: None) -> None:
    last = 10 * KEPT
    job = Asked()
    for rank in (0, 1):
        job.ask(rank, "optimizer", rate(0))
    for number in range(1, last):
        job.ask(0, "configure", rate(number))
    job.table.forget(1)
    assert job.ask(1, "optimizer", rate(0)) == (1, False)
    told = [job.ask(1, "configure", rate(number)) for number in range(1, last)]
    assert not any(new for _, new in told)
    versions = [version for version, _ in told]
    assert versions == sorted(versions)
    assert versions[-KEPT:] == list(range(last - KEPT + 1, last + 1))
    assert job.ask(1, "configure", rate(last)) == (last + 1, True)


def test_who_comes_back_and_stays_behind_changes_nothing(few_kept: None) -> None:
    job, behind = Asked(), KEPT + 3
    for number in range(3 * KEPT):
        job.ask(0, "configure", rate(number))
    job.table.forget(1)
    for number in range(3 * KEPT, 12 * KEPT):
        job.ask(0, "configure", rate(number))
        _, new = job.ask(1, "configure", rate(number - behind))
        assert not new


def test_who_comes_back_may_change_what_nobody_has_changed_so_often(few_kept: None) -> None:
    job = Asked()
    for number in range(5 * KEPT):
        job.ask(0, "configure", rate(number))
    job.table.forget(1)
    assert job.ask(1, "steps", "") == (5 * KEPT + 1, True)


def test_the_settings_of_a_job_whose_worker_comes_back(few_kept: None) -> None:
    job, last = Job(2), 6 * KEPT
    job.start(on_peer_loss="continue")
    for number in range(1, last + 1):
        job.say("w0", m.Settings(number, 0, "configure", 0, rate(number)))
        job.say("s0.1", m.Installed(0, number))
    job.pass_time(6.0, "w0", "s0.1")
    job.worker(1, "again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    for number in range(1, last + 1):
        job.say("again", m.Settings(number, 0, "configure", 0, rate(number)))
        assert job.last("again", m.Answer).request == number
    assert job.last("again", m.Answer).version == last
    assert {body.version for body in job.sent["s0.1"] if type(body) is m.Install} == set(range(1, last + 1))


def test_a_server_that_comes_back_hears_what_counts(few_kept: None) -> None:
    job, last = Job(2, server_grace=60.0), 100 * KEPT
    job.start()
    for number in range(1, last + 1):
        job.say("w0", m.Settings(number, 0, "configure", 0, rate(number)))
        job.say("s0.1", m.Installed(0, number))
    job.pass_time(6.0, "w0", "w1")
    job.server(0, 2, restarted=True)
    heard = [body for body in job.sent["s0.2"] if type(body) is m.Install]
    assert len(heard) <= 2 * KEPT + 1
    assert heard[-1].text == rate(last)
