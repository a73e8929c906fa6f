"""Operations of all workers of a store without a key: sums, means, and exchanges of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..arrays.grouping import plain_key
from ..errors import ArgumentError, ConfigError, KVStoreError
from .exchange import ObjectExchange
from .meeting import SideKeys, WorkerMeetings
from .objects import NUMPY, ArrayKind, pack_object, unpack_object
from .reduction import ArrayReduction, operands_of

if TYPE_CHECKING:
    from ..engine import AsyncEngine, Work


class CollectiveCalls:
    """The calls of one worker; `sides` are side keys of its store, None if the store has no other workers.

    With `survives` the loss of a worker is not an error.
    """

    def __init__(self, engine: AsyncEngine, sides: SideKeys | None, survives: bool) -> None:
        self._engine, self._size = engine, 1 if sides is None else sides.num_workers
        self._alone = sides is None
        if sides is not None:
            meetings = WorkerMeetings(sides)
            self._reduction = ArrayReduction(meetings, survives)
            self._objects = ObjectExchange(meetings)

    def all_reduce(self, array: Any, average: bool, async_op: bool) -> Work | None:
        """See `KVStore.all_reduce`."""
        arrays = array if isinstance(array, (list, tuple)) else [array]
        if self._alone:
            operands_of(arrays, average)
            return self._engine.run_now(_complete_at_once, "all_reduce") if async_op else None
        self._check_outside()
        if async_op:
            return self._reduction.start(arrays, average)
        self._reduction.run(arrays, average)
        return None

    def broadcast_object(self, value: Any, root: int, kind: ArrayKind = NUMPY) -> Any:
        """See `KVStore.broadcast_object`.

        Arrays of other libraries than NumPy are received as arrays of `kind`.
        """
        root, size = _root_rank(root), self._size
        if not 0 <= root < size:
            raise ArgumentError(f"root must be the rank of a worker, from 0 to {size - 1}, not {root}")
        if self._alone:
            return unpack_object(pack_object(value, kind), kind)
        self._check_outside()
        return self._objects.broadcast(value, root, kind)

    def all_gather_object(self, value: Any, kind: ArrayKind = NUMPY) -> list[Any]:
        """See `KVStore.all_gather_object`."""
        if self._alone:
            return [unpack_object(pack_object(value, kind), kind)]
        self._check_outside()
        return self._objects.all_gather(value, kind)

    def _check_outside(self) -> None:
        """Raise in an updater: it would wait for the other workers, and they wait for its round."""
        if self._engine.in_own_operation():
            raise ConfigError(
                "all_reduce, broadcast_object and all_gather_object wait for all workers, which wait for the "
                "operation that contains this call: call it outside of updaters"
            )


def _root_rank(root: Any) -> int:
    try:
        rank = plain_key(root)
    except KVStoreError:
        rank = ""
    if isinstance(rank, str):
        raise ArgumentError(f"root must be the rank of a worker, not {root!r}")
    return rank


def _complete_at_once() -> None:
    """Complete at once: there is one worker."""
