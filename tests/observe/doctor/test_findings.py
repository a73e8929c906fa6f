"""A check that raises, or does not come back, becomes a line of the report."""

from __future__ import annotations

import sys
import threading

import pytest

from kvstore.observe.doctor.findings import Finding, checked

ONE = Finding("one", "ok", "fine")
TWO = Finding("two", "warning", "slow", "hurry")


def test_a_python_that_this_user_may_not_execute() -> None:
    def refused() -> Finding:
        raise PermissionError(13, "Permission denied", sys.executable)

    (found,) = checked(refused)
    assert found.text == f"not done: this user may not execute {sys.executable}"
    assert "bug" not in found.cure


def several() -> list[Finding]:
    return [ONE, TWO]


def one() -> Finding:
    return ONE


def a_broken_check() -> Finding:
    raise ZeroDivisionError("division by nothing")


def test_findings_of_a_check_are_those_that_it_returns() -> None:
    assert checked(one) == [ONE]
    assert checked(several) == [ONE, TWO]


def test_an_exception_is_an_error_with_its_text() -> None:
    (found,) = checked(a_broken_check)
    assert (found.subject, found.level) == ("a broken check", "error")
    assert "ZeroDivisionError: division by nothing" in found.text
    assert found.cure


def test_a_check_without_an_answer_is_given_up() -> None:
    end = threading.Event()

    def a_long_check() -> Finding:
        end.wait()
        return ONE

    try:
        (found,) = checked(a_long_check, deadline=0.05)
    finally:
        end.set()
    assert (found.subject, found.level) == ("a long check", "error")
    assert "within 0.05 s" in found.text


def test_a_finding_does_not_change() -> None:
    with pytest.raises(AttributeError):
        ONE.level = "error"  # type: ignore[misc]
