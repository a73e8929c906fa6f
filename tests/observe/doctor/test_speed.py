"""Speeds are numbers with units, and what cannot be measured says why. No time is judged."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.observe.doctor import children, self_tests
from kvstore.observe.doctor.table import SPEEDS


def test_speeds_are_measured_where_they_are_wanted(doctor: Callable[..., Any]) -> None:
    code, found = doctor("--no-tests", "--speed")
    assert code == 0
    assert re.search(r"64 MB at [0-9.]+ GB/s", found["speed of memory"]["text"])
    assert re.search(r"take [0-9.]+ ms: [0-9.]+ times", found["speed of local"]["text"])
    assert re.search(r"4 KB over one server takes [0-9]+ µs", found["speed of dist_sync"]["text"])


def test_figures_are_those_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, children.ProgramEnd(0, "seconds 0.0067108864 0.0268435456 3\n", ""))
    assert "10.0 GB/s" in self_tests.speed_of_memory().text
    assert "26.8 ms: 0.50 times that speed, with 3 threads" in self_tests.speed_of_local().text


@pytest.mark.parametrize(
    "ran", [children.ProgramEnd(1, "seconds 1 2", "why\n"), children.ProgramEnd(None, "", "why\n")]
)
def test_what_fails_is_an_error(monkeypatch: pytest.MonkeyPatch, ran: children.ProgramEnd) -> None:
    answers(monkeypatch, ran)
    for check in SPEEDS:
        found = check.run()
        assert (found.level, bool(found.cure)) == ("error", True)
        assert found.text.endswith("why")


def answers(monkeypatch: pytest.MonkeyPatch, ran: children.ProgramEnd) -> None:
    monkeypatch.setattr(children, "run", lambda command, deadline: ran)
