"""Rivals of other environments: one table, which the page repeats."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench import ROOT
from bench.peers.worker import PEERS
from bench.runner import rivals

pytestmark = pytest.mark.bench


def test_the_page_has_every_variable_and_its_claims() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| `(KVSTORE_BENCH_\w+)` \| ([^|]+) \|", text, re.MULTILINE)
    found = {variable: tuple(re.findall(r"`(\w+)`", claims)) for variable, claims in rows}
    assert found == {rival.variable: rival.claims for rival in rivals.RIVALS.values()}


def test_every_rival_is_a_peer_of_its_claims() -> None:
    for claim, peers in PEERS.items():
        named = {rival.variable for peer in peers if (rival := rivals.rival(peer))}
        assert named == {rival.variable for rival in rivals.RIVALS.values() if claim in rival.claims}


def test_a_rival_is_found_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for rival in rivals.RIVALS.values():
        monkeypatch.delenv(rival.variable, raising=False)
    assert [s.name for s in rivals.settings("dist", ("ours", "mxnet ipc", "gloo"))] == ["ours"]
    monkeypatch.setenv("KVSTORE_BENCH_TORCH", "some/python")
    monkeypatch.setenv("KVSTORE_BENCH_MXNET", "/other/python")
    found = {s.name: s.python for s in rivals.settings("dist", ("mxnet ipc", "gloo"))}
    assert found == {"mxnet ipc": "/other/python", "gloo": str(Path("some/python").absolute())}


def test_variants_of_a_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_BENCH_MXNET", "/other/python")
    found = rivals.settings("local", ("mxnet",), {"mxnet": {"tuned": {"A": "1"}, "plain": {}}})
    assert [(s.label, s.env) for s in found] == [("tuned", (("A", "1"),)), ("plain", ())]


ALONE = """
import importlib, sys
sys.modules["kvstore"] = None  # an import raises
for name in "worker group.base shared.all_reduce dist.base local.plain".split():
    importlib.import_module(f"bench.peers.{name}")
"""


def test_workers_of_rivals_need_no_kvstore() -> None:
    """Their environments have none."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
