"""The arguments of calls to the shared store: checked, and converted to handles and plain arrays."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...arrays.grouping import Group, Key, key_kind_error
from ...arrays.sparse import RowSparseArray
from ...devices.arrays import any_on_device, device_of
from ...errors import CapabilityError, KeyNotFoundError
from ...kernels import cpu
from ...settings.definitions import is_side
from ..entry import Array, dense_out, dense_source, first_value, row_source, sparse_outs
from ..outs import OutDeliveries, host_outs
from .gpu_access import Dense, GpuAccess
from .native import _shared as shm
from .optimizer import JobUpdater
from .reading import ValueReader

if TYPE_CHECKING:
    from .ipc.exchange import DeviceOutputs

log = logging.getLogger("kvstore.shared")

Handle = shm.Handle
Sparse = list[tuple[Handle, list[RowSparseArray]]]
#: Outs that the GPU of a key may write, and arrays that the host fills.
SplitOuts = tuple["DeviceOutputs", list[Array]]


class CallArguments:
    """The keys, values and outs of one process's calls."""

    def __init__(
        self,
        job: shm.Job,
        keys: shm.Keys,
        updater: JobUpdater,
        gpus: GpuAccess,
        reader: ValueReader,
        rank: int,
    ) -> None:
        self.job, self.keys, self.updater, self.gpus, self.rank = job, keys, updater, gpus, rank
        self.reader = reader
        self._told: set[Key] = set()
        #: Keys that this process has initialised.
        self.initialised: set[Key] = set()

    def first_value(self, key: Key, values: list[Any]) -> Array | RowSparseArray:
        """Return the first value of a key that is about to be initialised."""
        self.check_kind(key)
        taken = key in self.initialised
        if len(values) == 1 and not taken and any_on_device(values):
            values = [self.gpus.staging_in_use().copy_to_host(values[0], f"value of key {key!r}")]
        return first_value(key, values, taken)

    def check_kind(self, key: Key) -> None:
        """Raise an error if the store's keys are of the other kind."""
        kind = 0 if is_side(key) else self.keys.kind
        if kind and (kind == 2) != isinstance(key, str):
            raise key_kind_error(key, (int, str)[kind - 1])

    def handle(self, key: Key) -> Handle:
        """Return the handle of a key; KeyNotFoundError if it is not initialised."""
        handle = self.job.handles.get(key) or self.keys.find(key)
        if handle is not None:
            return handle
        self.check_kind(key)
        raise KeyNotFoundError(f"key {key!r} is not initialised; call init or broadcast with it first")

    def by_number(self, groups: list[Group]) -> list[tuple[Handle, list[Any]]]:
        """Return handles and arrays in the order of updates."""
        return self.by_order([(self.handle(key), arrays) for key, arrays in groups])

    @staticmethod
    def by_order(pairs: list[tuple[Handle, Any]]) -> list[tuple[Handle, Any]]:
        """Sort pairs into the order of updates: int keys ascend, str keys follow the order of their init."""
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: pair[0].key if isinstance(pair[0].key, int) else pair[0].number)
        return pairs

    def sources(self, groups: list[Group]) -> tuple[Dense, Sparse]:
        """Check everything that is pushed, before anything changes."""
        dense: Dense = []
        sparse: Sparse = []
        self.gpus.staging.discard_staged()
        for key, values in groups:
            handle = self.handle(key)
            self.updater.check(handle)
            if not values:
                continue
            if not handle.sparse and cpu.first_misfit(values, handle.like) < 0:
                dense.append((handle, values))
            elif handle.sparse or all(isinstance(value, RowSparseArray) for value in values):
                if any_on_device(values):
                    raise _rows_stay(handle)
                sparse.append((handle, [row_source(handle, value) for value in values]))
            else:
                dense.append((handle, self._dense_sources(handle, values)))
        return dense, sparse

    def _dense_sources(self, handle: Handle, values: list[Any]) -> list[Array]:
        if not any_on_device(values):
            return [dense_source(handle, value) for value in values]
        found: list[Array] = self.gpus.staging_in_use().sources(handle, values)
        return found

    def outs(
        self, handle: Handle, outs: list[Any], later: OutDeliveries, values: Sequence[Array] = ()
    ) -> list[Array]:
        """Return the arrays to fill; conversions and copies that follow are added to `later`.

        `values` are the arrays that the same call pushes to the key.
        """
        if cpu.first_misfit(outs, handle.like, True) < 0:
            return list(outs)
        value = partial(self.reader.read_value, handle)
        direct, on_gpu = host_outs(handle, outs, later, value)
        if on_gpu:
            way = later.setdefault(handle.key, [])
            direct += self.gpus.staging_in_use().outs(handle, on_gpu, values, direct, value, way)
        return direct

    def check_outs(self, rest: list[Group]) -> None:
        """Check before a push that the pull after it will work."""
        for key, outs in rest:
            handle = self.handle(key)
            for out in outs:
                if isinstance(out, RowSparseArray):
                    continue
                if device_of(out) is None:
                    dense_out(handle, out)
                elif handle.sparse:
                    raise _rows_stay(handle)
                else:
                    self.gpus.staging_in_use().check_out(handle, out)

    def split_outs(self, groups: list[tuple[Handle, list[Any]]], later: OutDeliveries) -> list[SplitOuts]:
        """Check the outs of keys with values that may be on GPUs."""
        found = []
        for handle, outs in groups:
            device, others = self.gpus.staging_in_use().device_outputs(handle, outs)
            found.append((device, self.outs(handle, others, later) if others else []))
        return found

    def sparse_outs(
        self, handle: Handle, outs: list[Any], ignore_sparse: bool
    ) -> list[tuple[Handle, RowSparseArray]]:
        """Return the row-sparse outs of a pull, which are unchanged unless the caller asks for them."""
        wanted = sparse_outs(handle, handle.sparse, outs, ignore_sparse, self._told, log)
        return [(handle, out) for out in wanted]


def _rows_stay(handle: Handle) -> CapabilityError:
    return CapabilityError(
        f"key {handle.key!r} is row-sparse, and its rows stay on the host; pass host arrays for it"
    )


def is_large(pairs: list[tuple[Handle, list[Any]]]) -> bool:
    """Whether a call moves more than the caches hold."""
    return sum(h.nbytes * (1 + len(arrays)) for h, arrays in pairs) * 2 >= cpu.stream_bytes()
