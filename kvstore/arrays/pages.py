"""Memory for values and states of a store: on huge pages, if the system has them.

A sum reads several arrays at once. With pages of 4 KB, address translation and prefetchers that stop at the
end of each page reduce the memory bandwidth considerably. Small arrays are allocated from shared slabs; a
slab is returned to the system when its last array is deleted.
"""

from __future__ import annotations

import math
import mmap
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

_SMALL = 16 * 1024  # below this size, NumPy's own allocation
_LARGE = 2 * 1024 * 1024  # from this size on, separate pages
_SLAB = 8 * 1024 * 1024
_LINE = 64
# Arrays that start at the same offset in a page compete for lines of the first-level cache, and a load waits
# for a store to the same offset in another page. This cycle of offsets was the best of thirteen that were
# measured, together with arrays of NumPy, which start 16 bytes into a page.
_PLACES = (56 * _LINE, 17 * _LINE, 24 * _LINE, 40 * _LINE)

_lock = threading.Lock()
_slab: mmap.mmap | None = None
_used = 0
_colour = 0


def empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a new uninitialised array, C-contiguous, and aligned to a cache line unless it is small."""
    kind = np.dtype(dtype)
    nbytes = math.prod(shape) * kind.itemsize
    if nbytes < _SMALL:
        return np.empty(shape, kind)
    memory, offset = _own_pages(nbytes) if nbytes >= _LARGE else _from_slab(nbytes)
    return np.ndarray(shape, kind, buffer=memory, offset=offset)


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a new array of zeros; see `empty`."""
    array = empty(shape, dtype)
    array.fill(0)
    return array


def zeros_like(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return zeros of the shape and type of `array`; see `empty`."""
    return zeros(array.shape, array.dtype)


def copy(array: npt.NDArray[Any], dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    """Return a copy of `array`, of another type if `dtype` is given; see `empty`."""
    new = empty(array.shape, array.dtype if dtype is None else dtype)
    np.copyto(new, array, casting="unsafe")
    return new


def next_page_offset() -> int:
    """Return the offset in its page at which a large array starts; a different one at each call."""
    global _colour
    _colour = (_colour + 1) % len(_PLACES)
    return _PLACES[_colour]


def _own_pages(nbytes: int) -> tuple[mmap.mmap, int]:
    offset = next_page_offset()
    return _map_pages(nbytes + offset), offset


def _from_slab(nbytes: int) -> tuple[mmap.mmap, int]:
    global _slab, _used
    with _lock:
        offset = -(-_used // _LINE) * _LINE
        if _slab is None or offset + nbytes > _SLAB:
            _slab, offset = _map_pages(_SLAB), 0
        _used = offset + nbytes
        return _slab, offset


def _new_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)  # a thread of the parent can hold the old one


def _map_pages(nbytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes} bytes of values or states") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
