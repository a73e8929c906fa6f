"""Parts of the store on MPI that need no MPI."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import kvstore as kv
from kvstore.stores.collectives.mpi import backend as mpi
from kvstore.stores.collectives.mpi.call_counts import missing_text


def test_without_mpi4py_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(
        kv.MissingBackendError, match=r"pip install 'kvstore-train\[mpi\]' mpich.*mpiexec -n 2 python"
    ):
        kv.create("mpi")


def test_small_arrays_of_a_type_travel_together_and_large_ones_do_not_move() -> None:
    large = np.arange(mpi._SMALL // 8 + 1, dtype=np.float64)
    small = [np.full(shape, i, np.float64) for i, shape in enumerate([(), (2, 3), (5,)])]
    single = np.zeros(4, np.int32)
    arrays = [large, small[0], single, np.zeros((0, 3), np.float32), *small[1:]]
    buffers, back = mpi._pack_arrays([(str(i), array) for i, array in enumerate(arrays)])
    assert [buffer is array for buffer, array in zip(buffers, (large, None, single), strict=True)] == [
        True,
        False,
        True,
    ]
    ((packed, places),) = back
    assert packed is buffers[1]
    assert packed.tolist() == [0] + 6 * [1] + 5 * [2]
    packed *= 10
    mpi._unpack_arrays(packed, places)
    assert [array.ravel().tolist() for array in small] == [[0], 6 * [10], 5 * [20]]
    assert small[1].shape == (2, 3)


def test_pieces_cover_an_array_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_MOST", 64)
    array = np.zeros((3, 7), np.float64)
    pieces = list(mpi._array_pieces(array))
    assert [piece.size for piece in pieces] == [8, 8, 5]
    for piece in pieces:
        piece += 1
    assert (array == 1).all()
    assert list(mpi._array_pieces(np.zeros((0, 2)))) == []


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "and all have: one of them is stopped, or has left"),
        ([2], "and worker 2 has not, or is stopped"),
        ([1, 3], "and workers 1 and 3 have not, or are stopped"),
        (list(range(9)), "and workers 0, 1, 2, 3, 4, 5, 6, 7 and 8 have not, or are stopped"),
        (list(range(99)), "and workers 0, 1, 2, 3, 4, 5, 6, 7 and 91 more have not, or are stopped"),
    ],
)
def test_who_is_absent_is_named_for_people(ranks: list[int], text: str) -> None:
    assert missing_text(ranks) == text
