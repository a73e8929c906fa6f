"""Names and sizes of the slices that a server has."""

from __future__ import annotations

from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.server.held_slices import HeldSlices

WHOLE = m.KeyEntry(m.KeySpec("w", (10, 4), "float32"), 0, (m.Slice(0, 0, 0, 40),), False)
CUT = m.KeyEntry(m.KeySpec(7, (10,), "float16"), 1, (m.Slice(1, 0, 0, 6), m.Slice(2, 1, 6, 10)), False)
TABLE = m.KeyEntry(m.KeySpec("t", (8, 3), "float64", sparse=True), 2, (m.Slice(3, 0, 2, 5),), False)


def test_a_server_knows_the_slices_that_are_its_own() -> None:
    held = HeldSlices()
    held.add_slices(0, 0, (WHOLE, CUT))
    held.add_slices(0, 0, (WHOLE,))  # is sent again
    held.add_slices(0, 5, (TABLE,))
    assert held.slice_names() == {0: "w", 1: "7 (part 1 of 2)", 5 << 32 | 3: "t"}
    assert (held.key_count, held.nbytes) == (3, 160 + 12 + 3 * 3 * 8)


def test_names_stay_when_slices_go() -> None:
    held = HeldSlices()
    held.add_slices(0, 0, (WHOLE, CUT))
    held.add_slices(0, 1, (WHOLE,))
    held.forget_slices(0, (1, 99))
    assert (held.key_count, held.nbytes) == (2, 320)
    held.forget_slices(0, None)
    assert (held.key_count, held.nbytes) == (1, 160)
    held.forget_slices(1, None)
    assert (held.key_count, held.nbytes) == (0, 0)
    assert sorted(held.slice_names().values()) == ["7 (part 1 of 2)", "w", "w"]
