"""Reads in the background, which a push of their keys sees done."""

from __future__ import annotations

import pytest

from kvstore.stores.shared.undelivered import UndeliveredResults


def test_each_is_done_once_and_its_error_is_for_its_holder() -> None:
    reads, done = UndeliveredResults(), []

    def fails() -> None:
        done.append("fails")
        raise ValueError("of the read")

    good, bad = reads.note_read(["a"], lambda: done.append("good")), reads.note_read(["a", "b"], fails)
    assert reads.has_any(["b"])
    reads.deliver_keys(["a", "b"])
    assert not reads.has_any(["a", "b"])
    good()
    with pytest.raises(ValueError, match="of the read"):
        bad()
    assert done == ["good", "fails"]


def test_ctrl_c_in_a_push_is_no_error_of_a_read() -> None:
    reads, calls = UndeliveredResults(), []

    def read() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise KeyboardInterrupt

    one = reads.note_read(["a"], read)
    with pytest.raises(KeyboardInterrupt):
        reads.deliver_keys(["a"])
    assert reads.has_any(["a"])
    reads.deliver_keys(["a"])
    one()
    assert calls == [0, 1]
    assert not reads.has_any(["a"])
