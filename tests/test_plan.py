"""Plans of host arrays: a `pushpull` checked once, and done again."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore as kv


@pytest.mark.filterwarnings("ignore:Setting the dtype:DeprecationWarning")  # NumPy 2.5 warns, and does it
def test_arrays_that_were_changed_in_place() -> None:
    """A plan looks at NumPy arrays once more: it does not sum what `pushpull` would refuse."""
    with kv.create("local", processes=1) as store:
        store.init("w", np.zeros((2, 2), np.float32))
        value, out = np.ones((2, 2), np.float32), np.zeros((2, 2), np.float32)
        plan = store.bind("w", value, out=out)
        plan()
        np.testing.assert_array_equal(out, 1)
        value.dtype = np.int32
        with pytest.raises(kv.DTypeError):
            plan()
        value.dtype = np.float32
        out.flags.writeable = False
        with pytest.raises(kv.ArrayError, match="read-only"):
            plan()
        out.flags.writeable = True
        value[...] = 3
        plan()
        np.testing.assert_array_equal(out, 3)
