"""The runner that all claims share: options, order, what an interrupt leaves, peers that fail."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as command
from bench import claims
from bench.cases.common import Case
from bench.peers.group.driver import Group
from bench.peers.setting import Setting
from bench.runner import run
from bench.runner.claim import Claim
from bench.runner.machine import Probe
from bench.runner.rounds import Measured, Plan
from kvstore.observe.bench.worker_group import PeerFailure

pytestmark = pytest.mark.bench


@dataclass(frozen=True)
class Job(Case):
    name: str
    job: int = 0
    goals: dict[str, float] = field(default_factory=dict)


CASES = [Job("a", 2), Job("b", 1, {"rival": 2.0}), Job("c", 2)]


class Instant(Group):
    """A peer whose every call takes as long as its name says."""

    failing: tuple[str, ...] = ()
    prepared: list[tuple[str, str]]

    @property
    def pids(self) -> list[int]:
        return []

    def start_prepare(self, case: Any) -> None:
        self.prepared.append((self.setting.name, case.name))

    def finish_prepare(self) -> tuple[list[str], list[float]]:
        return ["way"], []

    def rest(self) -> None:
        """Nothing is held."""

    def run(self, variant: str, repeats: int) -> list[float]:
        if self.setting.name in self.failing:
            self.failure = "no more"
            raise PeerFailure(self.failure)
        return [{"ours": 1.0, "rival": 3.0}[self.setting.name]] * repeats


class Fake(Claim):
    name, title = "fake", "A claim"
    process = Instant
    picture = ""

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return CASES

    def settings(self, cases: Any) -> list[Setting]:
        return [Setting("ours"), Setting("rival")]

    def job(self, case: Job) -> int:
        return case.job

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Any]:
        return run.measured(self, chosen, Plan(rounds=2, spare=0), lambda: Probe(1.0, 1.0), options.peers)  # type: ignore[arg-type]

    def sections(self, found: list[Measured]) -> Iterator[str]:
        yield " ".join(m.case.name for m in found)


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instant, "prepared", [], raising=False)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)


def written(path: Path) -> list[str]:
    return [case["case"] for case in json.loads(path.with_suffix(".json").read_text())["cases"]]


def test_cases_are_measured_job_by_job_and_shown_in_their_order(tmp_path: Path) -> None:
    assert run.main(Fake(), ["--write", str(tmp_path / "x")]) == 0
    assert [case for peer, case in Instant.prepared if peer == "ours"] == ["b", "a", "c"]
    assert written(tmp_path / "x") == ["a", "b", "c"]
    assert "a b c" in (tmp_path / "x.md").read_text()


def test_an_interrupt_leaves_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(self: Instant, case: Any) -> None:
        if case.name == "c":
            raise KeyboardInterrupt

    monkeypatch.setattr(Instant, "start_prepare", prepare)
    assert run.main(Fake(), ["--write", str(tmp_path / "x")]) == 0
    assert written(tmp_path / "x") == ["a", "b"]
    assert "stopped" in capsys.readouterr().err


def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instant, "failing", ("rival",))
    peers = [Instant(setting) for setting in Fake().settings(CASES)]
    result = run.one(Fake(), CASES[0], peers, Plan(rounds=2, spare=0), lambda: Probe(1.0, 1.0))
    assert result is not None
    assert list(result.seconds) == ["ours"]


def test_a_failure_that_no_peer_owns_to_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Instant, variant: str, repeats: int) -> list[float]:
        raise PeerFailure("gone")

    monkeypatch.setattr(Instant, "run", broken)
    peers = [Instant(setting) for setting in Fake().settings(CASES)]
    with pytest.raises(PeerFailure, match="gone"):
        run.one(Fake(), CASES[0], peers, Plan(rounds=2, spare=0), lambda: Probe(1.0, 1.0))


def test_peers_without_memory_are_left_out_from_the_end_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fake, "memory", lambda self, case, setting: 10.0)
    monkeypatch.setattr(run, "available_memory", lambda: 15)
    peers = [Instant(setting) for setting in Fake().settings(CASES)]
    result = run.one(Fake(), CASES[0], peers, Plan(rounds=2, spare=0), lambda: Probe(1.0, 1.0))
    assert result is not None
    assert list(result.seconds) == ["ours"]


@pytest.mark.parametrize(
    ("options", "names"), [([], "a b c"), (["--goals"], "b"), (["--only", "[ac]"], "a c")]
)
def test_list(options: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(Fake(), [*options, "--list"])
    assert capsys.readouterr().out.split() == names.split()


def test_peers_are_picked_beside_ours() -> None:
    assert run.main(Fake(), ["--only", "a", "--peers", "nobody"]) == 0
    assert Instant.prepared == [("ours", "a")]


def test_an_unknown_claim_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["unheard-of"]) == 2
    assert "local,shared" in capsys.readouterr().err


@pytest.mark.parametrize("name", [name for name in claims.NAMES if name != "convergence"])
def test_every_claim_lists_its_cases(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    claim = claims.find(name)
    assert claim.name == name
    with pytest.raises(SystemExit):
        run.main(claim, ["--list"])
    names = capsys.readouterr().out.splitlines()
    assert names
    assert len(set(names)) == len(names)
