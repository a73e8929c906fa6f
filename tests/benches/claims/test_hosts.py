"""The bench between hosts: its cases, its page, and every peer that is here, on links."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from benches.claims.test_dist import ODD, check, expected

import bench
from bench.cases.hosts import LIMITS, PEERS, RIVALS, SUM, HostsCase, Link, all_cases
from bench.claims import hosts as claim
from bench.peers.dist.hosts import Hosts
from bench.peers.dist.launch import HostsGroup
from bench.peers.dist.link_probe import LinkProbe
from bench.runner import compiled, run
from bench.runner.machine import Probe
from bench.runner.rounds import Measured

pytestmark = pytest.mark.bench


def made(name: str = "2 hosts x 1, 1 Gbit/s, 0 ms: 4 MB") -> Measured:
    """Two rounds of a case, with a limit."""
    case = next(case for case in all_cases() if case.name == name)
    seconds = {"ours flat": [0.04, 0.05], "cross": [0.04, 0.04], "cross reno": [0.05, 0.05]}
    moved = {peer: [1.5 * case.crossing] * 2 for peer in seconds}
    claim._probed[case.job] = LinkProbe(9e8, 1e-4, 0.0)
    cpu = {peer: [0.01, 0.01] for peer in seconds}
    probes = [Probe(1.0, 2.0)]
    return Measured(case, seconds, dict.fromkeys(seconds, ""), probes, [0.0, 0.0], cpu=cpu, moved=moved)


def test_what_the_wire_needs() -> None:
    case = made().case
    assert case.crossing == 4 << 20
    assert case.needed == pytest.approx(8 * (4 << 20) / 1e9)
    assert Link(10, 20).needs(0) == pytest.approx(0.04)
    four = next(case for case in all_cases() if case.name.startswith("4 hosts x 4"))
    assert (four.workers, four.servers, four.crossing) == (16, 4, 1.5 * four.nbytes)


def test_cases_are_sound() -> None:
    cases = list(all_cases())
    assert len({case.name for case in cases}) == len(cases)
    assert all("hosts" not in case.to_json() for case in cases)
    assert {case.link.relayed for case in cases} == {True, False}


def test_every_case_has_every_rival() -> None:
    """Some of them in a case of their own, in a job of their own: there is no memory for more."""
    cases = list(all_cases())
    whole = [case for case in cases if not case.beside]
    for case in whole:
        beside = [one for one in cases if one.beside and one.name.startswith(f"{case.name} beside ")]
        assert set(RIVALS) <= {*case.peers, *(one.beside for one in beside)}
        assert len({one.job for one in (case, *beside)}) == 1 + len(beside)
        assert all({*one.peers} - {*LIMITS} == {"ours host", one.beside} for one in beside)
    assert {SUM in case.peers for case in whole if case.workers > case.hosts} == {False}


def test_the_page_has_the_wire_and_the_limit() -> None:
    page = claim.CLAIM.page([made()], 60)
    assert "The wire needs 33.6 ms for 4,194,304 bytes" in page
    assert "| 45 ms | 1.34 [1.19-1.49] | 1.12 [1.00-1.25] | 1.500 | 10 ms |" in page


def test_other_cases_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    (tmp_path / "x.json").write_text(claim.CLAIM.to_json([made()], 60))
    (found,) = claim.kept("x")
    assert json.loads(claim.CLAIM.to_json([found], 60)) == json.loads(claim.CLAIM.to_json([made()], 60))
    assert list(claim.kept("y")) == []


@pytest.mark.timeout(300)
@pytest.mark.skipif(compiled.compiler() is None, reason="the barrier is C")
@pytest.mark.parametrize("link", [Link(10), Link(1, 1, 0.001)], ids=str)
@pytest.mark.parametrize("name", (*PEERS, SUM))
def test_sums(name: str, link: Link) -> None:
    case = HostsCase("sums", ODD, 4, 2, peers=(name,))
    found = claim.CLAIM.settings([case])
    if not found:
        pytest.skip(f"{name} cannot run here")
    with contextlib.ExitStack() as stack:
        try:
            HostsGroup.hosts = stack.enter_context(Hosts(2, link))
        except OSError as error:
            pytest.skip(str(error))
        peer = stack.enter_context(HostsGroup(found[0]))
        check(peer, case, None if name.startswith("cross") else expected(case))
        assert peer.moved > 0


@pytest.mark.timeout(300)
@pytest.mark.skipif(compiled.compiler() is None, reason="the limit is C")
def test_a_peer_says_what_it_does_not_do() -> None:
    case = HostsCase("sums", ODD, 2, 2, peers=("cross-sum",))
    with contextlib.ExitStack() as stack:
        try:
            HostsGroup.hosts = stack.enter_context(Hosts(2, Link(10)))
        except OSError as error:
            pytest.skip(str(error))
        peer = stack.enter_context(HostsGroup(claim.CLAIM.settings([case])[0]))
        peer.start_prepare(case)
        assert peer.finish_prepare() == "a host of one worker has no sum"


def test_cases_are_picked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(claim.CLAIM, ["--only", "2 hosts x 1, 10 Gbit/s, 0 ms: 4 MB", "--list"])
    assert capsys.readouterr().out.strip() == "2 hosts x 1, 10 Gbit/s, 0 ms: 4 MB"
