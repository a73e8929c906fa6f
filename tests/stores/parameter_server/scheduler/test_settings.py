"""Settings of a store: changes of late workers, servers that refuse, and the bound on the number kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from scheduled import Job

from kvstore.errors import ConfigError
from kvstore.optimizer import settings_log
from kvstore.optimizer.settings_log import SettingsAt
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler import settings
from kvstore.stores.parameter_server.scheduler.settings import SettingsTable
from kvstore.stores.parameter_server.server.optimizer import OptimizerVersion, OptimizerVersions

SERVERS = {0, 1, 2, 3}
KEPT = 8


@pytest.fixture
def few_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_KEPT", KEPT)


def described(number: int = 0) -> str:
    return json.dumps({"name": "sgd", "config": {"learning_rate": number / 1024}})


def rate(number: int, name: str = "learning_rate") -> str:
    return json.dumps({name: number / 1024})


def config(text: str) -> dict[str, float]:
    return {name: value * 1024 for name, value in json.loads(text)["config"].items()} if text else {}


class Asked:
    """A table, its workers, and servers that install at once."""

    def __init__(self, unpaced: Any = ()) -> None:
        self.table, self.unpaced = SettingsTable(0), unpaced
        self.requests = itertools.count()
        #: All messages to servers, and the settings of a server that has received them.
        self.told: list[m.InstallRequest] = []
        self.server = OptimizerVersions()

    def make(
        self, rank: int, kind: str, text: str = "", place: int = 0, ordinal: int = 1
    ) -> tuple[m.SettingsRequest, list[m.InstallRequest]]:
        """Let a worker ask; return its question, and the messages due to the servers."""
        asked = m.SettingsRequest(next(self.requests), 0, kind, ordinal, text, place)
        installs = self.table.request_change(rank, asked, set(SERVERS), self.unpaced)
        self.tell(installs)
        return asked, installs

    def tell(self, installs: Iterable[m.InstallRequest]) -> None:
        for install in installs:
            self.told.append(install)
            put(self.server, install)

    def installed(
        self, install: m.InstallRequest, error: m.Failure | None = None, servers: Iterable[int] = SERVERS
    ) -> list[tuple[int, m.MemberReply]]:
        """Let servers have settings, of which the last refuses them, if there is an error."""
        answers: list[tuple[int, m.MemberReply]] = []
        for server in servers:
            fault = error if server == max(SERVERS) else None
            found, more = self.table.note_installed(server, install.version, fault, set(SERVERS))
            answers += found
            self.tell(more)
            assert error is not None or not more
        return answers

    def ask(
        self, rank: int, kind: str, text: str = "", place: int = 0, ordinal: int = 1
    ) -> tuple[m.MemberReply, int]:
        """Return the answer, and the number of messages to servers."""
        asked, installs = self.make(rank, kind, text, place, ordinal)
        answers = self.table.immediate_answers()
        for install in installs:
            answers += self.installed(install)
        [(answered, answer)] = answers
        assert (answered, answer.request, answer.error) == (rank, asked.request, None)
        assert answer.version <= max([one.since for one in self.told], default=0)
        return answer, len(installs)

    def holds(self, place: int) -> SettingsAt:
        return at(self.server, place)


def put(server: OptimizerVersions, install: m.InstallRequest) -> None:
    assert install.kind == "settings"
    described = SettingsAt(install.ordinal, install.text, install.epoch, install.keeps_states)
    server.install_version(OptimizerVersion(install.since, described[0], None, *described[1:]))


def at(server: OptimizerVersions, place: int) -> SettingsAt:
    """Return the settings that a server uses for pushes after the changes of a place."""
    found = server.settings_at(place + 1)
    return SettingsAt(found.generation, found.text, found.epoch, found.keeps_states)


def newest(installs: Iterable[m.InstallRequest]) -> OptimizerVersions:
    """Return the settings of a server that has received these messages."""
    server = OptimizerVersions()
    for install in installs:
        put(server, install)
    return server


# ---------------------------------------------------------------------------------------------- in lockstep

KINDS = st.sampled_from(["configure", "configure", "configure", "wd", "counts", "steps", "optimizer", "none"])
PROGRAMS = st.lists(st.tuples(KINDS, st.integers(0, 3), st.integers(0, 2)), max_size=40)
Change = tuple[str, str, int, int]  # kind, text, place, ordinal


def program_of(drawn: list[tuple[str, int, int]]) -> list[Change]:
    """Return a program that sets an optimizer first."""
    made: list[Change] = [("optimizer", described(), 0, 1)]
    for kind, number, passed in drawn:
        _, _, place, ordinal = made[-1]
        texts = {
            "none": "",
            "steps": "",
            "counts": "",
            "optimizer": described(number),
            "wd": rate(number, "wd"),
        }
        text, kind = texts.get(kind, rate(number)), "configure" if kind == "wd" else kind
        made.append((kind, text, place + passed, ordinal + (kind in ("optimizer", "none"))))
    return made


@given(drawn=PROGRAMS, order=st.lists(st.integers(0, 2), max_size=120))
def test_servers_have_the_settings_of_one_process_at_each_place(
    drawn: list[tuple[str, int, int]], order: list[int]
) -> None:
    program = program_of(drawn)
    job, alone = Asked(), Asked()
    for kind, text, place, ordinal in program:
        alone.ask(0, kind, text, place, ordinal)
    steps = [0, 0, 0]
    for rank in [*order, *(rank for rank in range(3) for _ in program)]:
        if steps[rank] < len(program):
            kind, text, place, ordinal = program[steps[rank]]
            steps[rank] += 1
            answer, _ = job.ask(rank, kind, text, place, ordinal)
            assert answer.version == place + 1
    places = range(program[-1][2] + 2)
    ours, theirs = ([one.holds(place)._replace(epoch=0) for place in places] for one in (job, alone))
    assert ours == theirs
    assert [job.holds(place) for place in places] == [job.table.log.settings_at(place) for place in places]
    again = newest(job.table.for_restarted_server(0))
    assert [at(again, place) for place in places] == [job.holds(place) for place in places]


@given(drawn=PROGRAMS, order=st.lists(st.integers(0, 2), max_size=120))
def test_servers_have_what_the_log_says_whatever_workers_do(
    drawn: list[tuple[str, int, int]], order: list[int]
) -> None:
    """Changes are made by any worker, in any order of places; each has an optimizer of its own number."""
    job, ranks = Asked(), itertools.chain(order, itertools.cycle([0, 1, 2]))
    job.ask(0, "optimizer", described())
    for kind, number, place in drawn:
        rank = next(ranks)
        texts = {"counts": "", "steps": "", "wd": rate(number, "wd")}
        if kind in ("optimizer", "none"):
            continue
        job.ask(rank, "configure" if kind == "wd" else kind, texts.get(kind, rate(number)), place)
        for at_ in range(4):
            assert job.holds(at_) == job.table.log.settings_at(at_)


def test_update_counts_that_two_workers_set_twice_at_one_place_are_those_that_both_know() -> None:
    job = Asked()
    for rank in (0, 1):
        job.ask(rank, "optimizer", described())
    answers = [job.ask(rank, "counts", place=3)[0] for rank in (0, 1) for _ in range(2)]
    assert answers[1].epoch == answers[3].epoch == job.holds(3).epoch


def test_a_change_that_two_workers_make_is_told_once_and_answered_alike() -> None:
    job = Asked()
    found = []
    for rank in (0, 1):
        calls = [("optimizer", described(), 0), ("configure", rate(1), 0), ("configure", rate(2), 4)]
        found.append([job.ask(rank, *call) for call in calls])
    (first, second) = found
    assert [told for _, told in first] == [1, 1, 1]
    assert [told for _, told in second] == [0, 0, 0]
    assert [answer.version for answer, _ in first] == [1, 1, 5]
    for (one, _), (other, _) in zip(first[1:], second[1:], strict=True):
        assert (one.version, one.text, one.epoch) == (other.version, other.text, other.epoch)


def test_a_worker_that_shares_a_change_makes_it_the_last_at_its_place() -> None:
    job = Asked()
    job.ask(0, "optimizer", described())
    for rank, number in ((0, 1), (1, 2), (1, 1)):
        answer, _ = job.ask(rank, "configure", rate(number, "wd"), 3)
        assert config(answer.text)["wd"] == config(job.holds(3).text)["wd"] == number


# ------------------------------------------------------------------------------------------- late workers


def test_a_change_of_a_late_worker_reaches_the_settings_of_later_places() -> None:
    job = Asked()
    for rank in (0, 1):
        job.ask(rank, "optimizer", described(512))
    job.ask(0, "configure", rate(256), 5)
    job.ask(0, "counts", "", 8)
    _, told = job.ask(1, "configure", rate(64, "wd"), 2)
    assert told == 3
    assert [install.since for install in job.told[-3:]] == [3, 6, 9]
    found = [config(job.holds(place).text) for place in (1, 2, 5, 8)]
    assert found == [
        {"learning_rate": 512}, {"learning_rate": 512, "wd": 64},
        {"learning_rate": 256, "wd": 64}, {"learning_rate": 256, "wd": 64},
    ]  # fmt: skip


def test_a_worker_is_answered_when_the_servers_have_all_places_that_its_change_reaches() -> None:
    job = Asked()
    job.ask(0, "optimizer", described(512))
    job.ask(0, "configure", rate(256), 5)
    asked, (early, late) = job.make(1, "configure", rate(64, "wd"), 2)
    answers = [*job.installed(late), *job.table.immediate_answers()]
    assert answers == []
    [(rank, answer)] = job.installed(early)
    assert (rank, answer.request, answer.version) == (1, asked.request, 3)


def test_changes_of_an_older_optimizer_are_answered_and_change_nothing() -> None:
    job = Asked()
    job.ask(0, "optimizer", described(512), 0, 1)
    job.ask(0, "optimizer", described(256), 0, 2)
    there = job.holds(0)
    job.ask(1, "optimizer", described(512), 0, 1)
    job.ask(1, "configure", rate(128), 0, 1)
    job.ask(1, "counts", "", 0, 1)
    assert job.holds(0) == there
    job.ask(1, "optimizer", described(256), 0, 2)
    assert job.holds(0) == there


def test_another_optimizer_is_refused_and_changes_nothing() -> None:
    job = Asked()
    job.ask(0, "optimizer", described(512))
    there = list(job.told)
    for kind, text in (("optimizer", described(256)), ("none", "")):
        asked = m.SettingsRequest(9, 0, kind, 1, text, 3)
        with pytest.raises(ConfigError, match=r"two workers differ.*on worker 0 .* on worker 1"):
            job.table.request_change(1, asked, set(SERVERS))
    assert (job.told, job.table.immediate_answers()) == (there, [])


def test_a_change_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    job = Asked()
    job.ask(0, "optimizer", described(512))
    schedule = {"name": "FactorScheduler", "config": {"step": 2, "base_lr": 0.5}}
    job.ask(0, "configure", json.dumps({"lr_scheduler": schedule, "learning_rate": 0.5}), 2)
    before = [job.holds(place) for place in range(5)]
    asked = m.SettingsRequest(9, 0, "configure", 1, rate(1), 3)
    with pytest.raises(ConfigError, match="is that of a schedule"):
        job.table.request_change(1, asked, set(SERVERS))
    assert job.table.immediate_answers() == []
    assert [job.holds(place) for place in range(5)] == before
    assert job.ask(1, "configure", rate(1, "wd"), 3)[0].version == 4


# ----------------------------------------------------------------------------------- servers that refuse

REFUSED = m.Failure("ConfigError", "server 3: not here")


@pytest.mark.parametrize("ranks", [(0,), (0, 1), (1, 0)])
def test_a_change_that_a_server_refuses_was_never_made(ranks: tuple[int, ...]) -> None:
    job = Asked()
    for rank in (0, 1):
        job.ask(rank, "optimizer", described(512))
    before = [job.holds(place) for place in range(8)]
    asked = {}
    installs: list[m.InstallRequest] = []
    for rank in ranks:
        asked[rank], told = job.make(rank, "configure", rate(1, "wd"), 4)
        installs += told
    assert job.table.immediate_answers() == []
    answers = [answer for install in installs for answer in job.installed(install, REFUSED)]
    assert {(rank, answer.request, answer.error) for rank, answer in answers} == {
        (rank, asked[rank].request, REFUSED) for rank in ranks
    }
    assert len(answers) == len(ranks)
    assert [job.holds(place) for place in range(8)] == before
    assert [at(newest(job.table.for_restarted_server(0)), place) for place in range(8)] == before
    answer, told_again = job.ask(0, "configure", rate(1, "wd"), 4)  # once more
    assert (told_again > 0, config(answer.text)) == (True, {"learning_rate": 512, "wd": 1})


def test_an_optimizer_that_a_server_refuses_can_be_set_once_more() -> None:
    job = Asked()
    _, [install] = job.make(0, "optimizer", described(512))
    [(rank, answer)] = job.installed(install, REFUSED)
    assert (rank, answer.error) == (0, REFUSED)
    assert job.holds(0).text == ""
    job.ask(0, "optimizer", described(256))
    assert config(job.holds(0).text) == {"learning_rate": 256}


def test_changes_at_later_places_go_on_without_one_that_a_server_refuses() -> None:
    job = Asked()
    job.ask(0, "optimizer", described(512))
    job.ask(0, "configure", rate(256), 5)
    _, installs = job.make(1, "configure", rate(1, "wd"), 2)
    answers = [answer for install in installs for answer in job.installed(install, REFUSED)]
    assert [(rank, answer.error) for rank, answer in answers] == [(1, REFUSED)]
    assert config(job.holds(2).text) == {"learning_rate": 512}
    assert config(job.holds(5).text) == {"learning_rate": 256}


def test_a_change_beside_one_that_a_server_refuses_is_kept_or_its_worker_is_told() -> None:
    """Both are at one place, and the servers get the second before they have the first."""
    job = Asked()
    job.ask(0, "optimizer", described(512))
    bad, [first] = job.make(0, "configure", rate(1, "wd"), 2)
    good, [second] = job.make(1, "configure", rate(2, "clip_gradient"), 2)
    answers = job.installed(first, REFUSED) + job.installed(second, REFUSED)
    for install in job.told[job.told.index(second) + 1 :]:
        answers += job.installed(install)
    errors = {answer.request: answer.error for _, answer in answers}
    assert errors == {bad.request: REFUSED, good.request: None}
    assert config(job.holds(2).text) == {"learning_rate": 512, "clip_gradient": 2}


def test_a_change_whose_withdrawal_another_one_does_not_survive() -> None:
    """A rate that was allowed since the schedule was gone; the server refuses that."""
    job = Asked()
    schedule = {"name": "FactorScheduler", "config": {"step": 2, "base_lr": 0.5}}
    text = json.dumps({"name": "sgd", "config": {"lr_scheduler": schedule, "learning_rate": 0.5}})
    job.ask(0, "optimizer", text)
    _, [first] = job.make(0, "configure", json.dumps({"lr_scheduler": None, "learning_rate": 0.25}), 1)
    job.make(1, "configure", rate(1), 2)
    [(first_rank, answer), (rank, other)] = job.installed(first, REFUSED)
    assert (first_rank, answer.error) == (0, REFUSED)
    assert rank == 1
    assert other.error is not None
    assert (other.error.error, "schedule" in other.error.text) == ("ConfigError", True)
    assert [job.holds(place) for place in range(4)] == [
        job.table.log.settings_at(place) for place in range(4)
    ]


# ------------------------------------------------------------------------------------------------ very many


@pytest.mark.parametrize(("workers", "changes"), [(1, 10_000), (3, 4000)])
def test_many_changes_cost_each_the_same_and_take_no_more_memory(
    monkeypatch: pytest.MonkeyPatch, workers: int, changes: int
) -> None:
    looks, after = 0, settings_log._settings_after

    def counted(*arguments: Any) -> SettingsAt:
        nonlocal looks
        looks += 1
        return after(*arguments)

    monkeypatch.setattr(settings_log, "_settings_after", counted)
    job = Asked()
    for rank in range(workers):
        job.ask(rank, "optimizer", described())
    for number in range(1, changes + 1):
        for rank in range(workers):
            answer, told = job.ask(rank, "configure", rate(number), number)
            assert (answer.version, told > 0) == (number + 1, rank == 0)
        del job.told[:-10]
    assert looks <= 4 * workers * (changes + 1)
    log, again = job.table.log, job.table.for_restarted_server(0)
    assert len(log.changes) <= 2 * settings._KEPT + 4
    assert len(again) <= len(log.changes) + 1
    assert again[-1].text == log.newest.text
    assert len(job.table.pending) + len(job.table._returned) == 0
    assert len(log._made) == workers


def test_many_optimizers_take_no_more_memory(few_kept: None) -> None:
    job = Asked()
    for number in range(1, 50 * KEPT):
        for rank in (0, 1):
            job.ask(rank, "optimizer", described(number), number, number)
    assert len(job.table.log.changes) <= 2 * KEPT + 4
    assert len(job.table._optimizers) <= 2 * KEPT + 4
    assert len(job.table._newest) <= 2 * KEPT + 4


def test_many_commands_are_forgotten_once_all_servers_have_them() -> None:
    table = SettingsTable(0)
    for number in range(1000):
        version = table.request_command(0, m.CommandRequest(number, 0, 7, "body"), set(SERVERS)).version
        for server in SERVERS:
            answers, installs = table.note_installed(server, version, None, SERVERS)
        assert (answers, installs) == ([(0, m.MemberReply(number))], [])
    assert table.for_restarted_server(0) == []
    assert not table.pending


# ------------------------------------------------------------------------------------- it is not noticed


@examples(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    drawn=st.lists(st.tuples(KINDS, st.integers(0, 3), st.integers(1, 2)), max_size=120),
    lags=st.lists(st.integers(0, KEPT - 1), min_size=1, max_size=3),
)
def test_workers_in_step_are_answered_as_if_nothing_were_forgotten(
    few_kept: None, drawn: list[tuple[str, int, int]], lags: list[int]
) -> None:
    program = program_of(drawn)
    job, kept = Asked(), Asked()
    kept.table._most = 1 << 60
    for step in range(len(program) + max(lags)):
        for rank, lag in enumerate([0, *lags]):
            if 0 <= (now := step - lag) < len(program):
                kind, text, place, ordinal = program[now]
                asked = rank, kind, text, place, ordinal
                assert job.ask(*asked) == kept.ask(*asked)
        ours, all_ = newest(job.table.for_restarted_server(0)), newest(kept.table.for_restarted_server(0))
        log = job.table.log
        first = log.changes[-KEPT].place if len(log.changes) >= KEPT else 0
        for place in range(first, log.changes[-1].place + 1):
            assert at(ours, place) == at(all_, place) == kept.holds(place)


def test_workers_without_rounds_may_be_any_number_of_settings_behind(few_kept: None) -> None:
    job, count = Asked(unpaced=[0, 1]), 10 * KEPT
    job.ask(0, "optimizer", described())
    told = [job.ask(0, "configure", rate(number), number) for number in range(1, count)]
    behind = [job.ask(1, "configure", rate(number), number) for number in range(1, count)]
    assert [(answer.version, answer.text) for answer, _ in behind] == [
        (answer.version, answer.text) for answer, _ in told
    ]
    assert not any(again for _, again in behind)
    for number in range(count, 3 * count):
        for rank in (0, 1):
            job.ask(rank, "configure", rate(number), number)
    assert len(job.table.log.changes) <= 2 * count
    assert job.table.log.changes[0].place > KEPT


def test_a_server_knows_the_settings_before_those_that_are_kept(few_kept: None) -> None:
    job = Asked(unpaced=[0, 1])
    for number in range(1, 3 * KEPT):
        for rank in (0, 1):
            job.ask(
                rank,
                "optimizer" if number == 1 else "configure",
                described() if number == 1 else rate(number),
                number,
            )
    for number in range(3 * KEPT, 20 * KEPT):  # the other is behind: nothing more is dropped
        job.ask(0, "configure", rate(number), number)
        log, again = job.table.log, newest(job.table.for_restarted_server(0))
        first = log.changes[0].place
        assert at(again, first - 1) == log.settings_at(first - 1), number
        assert at(again, first) == log.settings_at(first)


def test_what_a_server_has_not_got_is_kept(few_kept: None) -> None:
    job = Asked()
    job.ask(0, "optimizer", described())
    asked, [install] = job.make(1, "configure", rate(1), 1)
    for number in range(2, 10 * KEPT):
        job.ask(0, "configure", rate(number), number)
    assert install in job.table.for_restarted_server(0)
    assert job.table.for_restarted_server(0) == sorted(
        job.table.for_restarted_server(0), key=lambda one: one.version
    )
    [(rank, answer)] = job.installed(install)
    assert (rank, answer.request, answer.version) == (1, asked.request, 2)
    for number in range(10 * KEPT, 20 * KEPT):
        job.ask(0, "configure", rate(number), number)
    assert install not in job.table.for_restarted_server(0)


# --------------------------------------------------------------------------------------- coming back


@pytest.mark.parametrize("skipped", [0, 3, KEPT // 2])
def test_a_worker_that_comes_back_changes_nothing_by_what_was_forgotten(few_kept: None, skipped: int) -> None:
    last = 10 * KEPT
    job = Asked()
    for rank in (0, 1):
        job.ask(rank, "optimizer", described())
    for number in range(1, last):
        job.ask(0, "configure", rate(number), number)
    job.table.forget_rank(1)
    before = [job.holds(place) for place in range(last)]
    # Its program begins anew, and so do its places: it may leave out its earlier pushes.
    assert job.ask(1, "optimizer", described())[1] == 0
    answers = [job.ask(1, "configure", rate(number), number // 2) for number in range(1 + skipped, last)]
    assert not any(told for _, told in answers)
    versions = [answer.version for answer, _ in answers]
    assert versions == sorted(versions)
    assert versions[-KEPT:] == list(range(last - KEPT + 1, last + 1))
    assert [job.holds(place) for place in range(last)] == before
    answer, told = job.ask(1, "configure", rate(last), last // 2)
    assert (answer.version >= last, told > 0) == (True, True)
    assert config(job.holds(last).text)["learning_rate"] == last


def test_a_worker_that_comes_back_and_stays_behind_changes_nothing(few_kept: None) -> None:
    job, behind = Asked(), KEPT + 3
    job.ask(0, "optimizer", described())
    for number in range(1, 3 * KEPT):
        job.ask(0, "configure", rate(number), number)
    job.table.forget_rank(1)
    for number in range(3 * KEPT, 12 * KEPT):
        job.ask(0, "configure", rate(number), number)
        _, told = job.ask(1, "configure", rate(number - behind), number - behind)
        assert not told
        assert config(job.holds(number).text)["learning_rate"] == number


def test_a_worker_that_comes_back_may_change_what_no_other_has_changed_so_often(few_kept: None) -> None:
    job = Asked()
    job.ask(0, "optimizer", described())
    for number in range(1, 5 * KEPT):
        job.ask(0, "configure", rate(number), number)
    job.table.forget_rank(1)
    answer, told = job.ask(1, "steps")
    assert (answer.version, told) == (5 * KEPT, 1)
    assert job.holds(5 * KEPT).keeps_states


def test_requests_of_a_worker_that_is_lost_are_answered_to_no_other() -> None:
    job = Asked()
    job.ask(0, "optimizer", described())
    _, [install] = job.make(1, "configure", rate(1), 1)
    asked, _ = job.make(0, "configure", rate(1), 1)
    job.table.forget_rank(1)
    assert [(rank, answer.request) for rank, answer in job.installed(install)] == [(0, asked.request)]
    _, [install] = job.make(0, "configure", rate(2), 2)
    assert [rank for rank, _ in job.table.clear_waiters()] == [0]
    assert job.installed(install) == []


# ------------------------------------------------------------------------------------------- in a job


def say(job: Job, peer: str, number: int, kind: str, text: str, place: int) -> m.MemberReply | None:
    """Let a worker make a change; return its answer, once the server has its message."""
    told = len(installs(job, "s0.1"))
    job.say(peer, m.SettingsRequest(number, 0, kind, 1, text, place))
    for install in installs(job, "s0.1")[told:]:
        job.say("s0.1", m.InstallReply(0, install.version))
    answer: m.MemberReply | None = job.last(peer, m.MemberReply)
    return answer


def installs(job: Job, server: str) -> list[m.InstallRequest]:
    """Return the messages to a server, each once."""
    told = (body for body in job.sent.get(server, []) if type(body) is m.InstallRequest)
    return list({install.version: install for install in told}.values())


def test_the_settings_of_a_job_whose_worker_comes_back(few_kept: None) -> None:
    job, last = Job(2), 6 * KEPT
    job.start(on_peer_loss="continue")
    say(job, "w0", 0, "optimizer", described(), 0)
    for number in range(1, last + 1):
        say(job, "w0", number, "configure", rate(number), number)
    told = len(installs(job, "s0.1"))
    job.pass_time(6.0, "w0", "s0.1")
    job.worker(1, "again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    say(job, "again", 0, "optimizer", described(), 0)
    for number in range(1, last + 1):
        answer = say(job, "again", number, "configure", rate(number), number)
        assert answer is not None and answer.request == number
    assert answer is not None and answer.version == last + 1
    assert len(installs(job, "s0.1")) == told


def test_a_server_that_comes_back_hears_what_counts(few_kept: None) -> None:
    job, last = Job(2, server_grace=60.0), 40 * KEPT
    job.start()
    say(job, "w0", 0, "optimizer", described(), 0)
    for number in range(1, last + 1):
        say(job, "w0", number, "configure", rate(number), number)
    job.pass_time(6.0, "w0", "w1")
    job.server(0, 2, restarted=True)
    heard = installs(job, "s0.2")
    assert len(heard) <= 2 * KEPT + 4
    both = newest(installs(job, "s0.1")), newest(heard)
    for place in range(last - KEPT, last + 1):
        assert at(both[0], place) == at(both[1], place)


def test_a_server_that_comes_back_hears_of_a_change_at_an_earlier_place() -> None:
    job = Job(2, server_grace=60.0)
    job.start()
    for number, peer in enumerate(("w0", "w1")):
        say(job, peer, number, "optimizer", described(512), 0)
    say(job, "w0", 2, "configure", rate(256), 5)
    say(job, "w1", 3, "configure", rate(64, "wd"), 2)
    job.pass_time(6.0, "w0", "w1")
    job.server(0, 2, restarted=True)
    both = newest(installs(job, "s0.1")), newest(installs(job, "s0.2"))
    for place in range(7):
        assert at(both[0], place) == at(both[1], place)
    assert config(at(both[1], 2).text) == {"learning_rate": 512, "wd": 64}
    assert config(at(both[1], 6).text) == {"learning_rate": 256, "wd": 64}


def test_a_change_that_does_not_fit_is_an_error_of_its_worker_alone() -> None:
    job = Job(2)
    job.start()
    say(job, "w0", 1, "optimizer", described(512), 0)
    schedule = {"name": "FactorScheduler", "config": {"step": 2, "base_lr": 0.5}}
    say(job, "w0", 2, "configure", json.dumps({"lr_scheduler": schedule, "learning_rate": 0.5}), 0)
    answer = say(job, "w1", 1, "configure", rate(1), 0)
    assert answer is not None and answer.error is not None
    assert answer.error.error == "ConfigError"
    assert "worker 1" in answer.error.text and "is that of a schedule" in answer.error.text
    answer = say(job, "w1", 2, "configure", rate(1, "wd"), 0)
    assert answer is not None and answer.error is None


def test_what_a_server_refuses_is_withdrawn_on_all() -> None:
    job = Job(1, 2)
    job.start()
    job.say("w0", m.SettingsRequest(1, 0, "optimizer", 1, described(512), 0))
    [install] = installs(job, "s0.1")
    job.say("s0.1", m.InstallReply(0, install.version))
    job.say("s1.1", m.InstallReply(0, install.version, m.Failure("ConfigError", "server 1: no")))
    assert job.last("w0", m.MemberReply).error == m.Failure("ConfigError", "server 1: no")
    for server in ("s0.1", "s1.1"):
        *_, back = installs(job, server)
        assert (back.since, back.text, back.ordinal, back.version > install.version) == (1, "", 0, True)


def test_workers_that_have_joined_are_shown_with_the_settings_that_they_have_changed() -> None:
    job = Job(3)
    job.start()
    say(job, "w0", 1, "optimizer", described(512), 0)
    say(job, "w1", 1, "optimizer", described(512), 0)
    say(job, "w1", 2, "configure", rate(256), 7)
    for peer in ("w1", "w2"):
        job.say(peer, m.JoinRequest(3, 0))
    job.pass_time(1.0, "w0", "w1", "w2", "s0.1")
    assert dict(job.last("s0.1", m.ViewNotice).settled) == {1: 8, 2: 0}


def test_a_barrier_tells_of_the_newest_settings() -> None:
    job = Job(2)
    job.start()
    job.say("w1", m.BarrierRequest(1, 0, 1))
    say(job, "w0", 1, "optimizer", described(512), 4)
    job.say("w0", m.BarrierRequest(2, 0, 1))
    newest = {"version": 5, "text": described(512), "count": 1}
    assert job.last("w0", m.MemberReply) == m.MemberReply(2, **newest)
    assert job.last("w1", m.MemberReply) == m.MemberReply(1, **newest)
