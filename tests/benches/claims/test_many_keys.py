"""Calls with many keys: both kvstores do the work in each store, and the page has the measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.claims import many_keys
from bench.claims.many_keys import CLAIM
from bench.runner import run

pytestmark = pytest.mark.bench


@pytest.mark.timeout(300)
def test_each_store_is_measured_beside_the_older_kvstore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_BENCH_BEFORE", sys.executable)
    assert run.main(CLAIM, ["--rounds", "2", "--counts", "7", "--write", f"{tmp_path}/keys"]) == 0
    cases = json.loads((tmp_path / "keys.json").read_text())["cases"]
    assert [case["store"] for case in cases] == list(many_keys.STORES)
    for case in cases:
        assert {name: len(times) for name, times in case["seconds"].items()} == {"ours": 2, "before": 2}
        assert all(one > 0 for times in case["seconds"].values() for one in times)
    assert (tmp_path / "keys.md").read_text().count("| 7 |") == len(many_keys.STORES)


def results(**seconds: list[float]) -> dict[str, Any]:
    cases = [
        {
            "store": "local",
            "keys": keys,
            "seconds": {name: [one * keys for one in s] for name, s in seconds.items()},
        }
        for keys in (100, 200)
    ]
    return {"machine": "a machine", "cases": cases}


def test_times_are_microseconds_a_key_and_ratios_of_rounds() -> None:
    page = many_keys.page_of(results(ours=[1e-6, 2e-6, 3e-6], before=[4e-6, 4e-6, 6e-6]))
    ours, before = "2.00 [1.00-3.00] µs | 1.00", "4.00 [4.00-6.00] µs | 1.00"
    assert f"| 200 | {ours} | {before} | 2.00 [2.00-4.00] |" in page


def test_without_an_older_kvstore_there_are_no_columns_for_it() -> None:
    page = many_keys.page_of(results(ours=[1e-6]))
    assert "before" not in page.partition("## local")[2]
    assert "| 100 | 1.00 [1.00-1.00] µs | 1.00 |" in page
