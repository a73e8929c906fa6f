"""A check that raises an exception, or does not return, becomes a line of the report."""

from __future__ import annotations

import sys
import threading

import pytest

from kvstore.observe.doctor.checks import CheckFinding, DoctorCheck, error, ok, warning


def test_a_python_that_this_user_may_not_execute() -> None:
    def refused() -> CheckFinding:
        raise PermissionError(13, "Permission denied", sys.executable)

    found = DoctorCheck("one", refused).run()
    assert found.text == f"not done: this user may not execute {sys.executable}"
    assert "bug" not in found.cure


@pytest.mark.parametrize(
    ("outcome", "cure"),
    [
        (ok("fine"), ""),
        (warning("slow"), "of the row"),
        (error("broken"), "of the row"),
        (warning("slow", "of the outcome"), "of the outcome"),
    ],
)
def test_the_cure_is_that_of_the_outcome_or_of_the_row(outcome: CheckFinding, cure: str) -> None:
    found = DoctorCheck("one", lambda: outcome, "of the row").run()
    assert found == CheckFinding("one", outcome.level, outcome.text, cure)


def test_an_exception_is_an_error_with_its_text() -> None:
    def broken() -> CheckFinding:
        raise ZeroDivisionError("division by nothing")

    found = DoctorCheck("a broken check", broken, "of the row").run()
    assert (found.subject, found.level) == ("a broken check", "error")
    assert "ZeroDivisionError: division by nothing" in found.text
    assert "bug" in found.cure


def test_a_check_without_an_answer_is_given_up() -> None:
    end = threading.Event()

    def wait() -> CheckFinding:
        end.wait()
        return ok("fine")

    try:
        found = DoctorCheck("a long check", wait, deadline=0.05).run()
    finally:
        end.set()
    assert (found.subject, found.level) == ("a long check", "error")
    assert "within 0.05 s" in found.text


def test_a_finding_does_not_change() -> None:
    with pytest.raises(AttributeError):
        CheckFinding("one", "ok", "fine").level = "error"  # type: ignore[misc]
