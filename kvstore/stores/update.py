"""The update of a weight by a push: replacement, a compiled rule, or a callable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import numpy as np

from ..arrays.grouping import Key
from ..arrays.sparse import RowSparseArray
from ..compression import Pushed
from ..errors import DTypeError, KVStoreError, UpdaterError
from ..kernels import cpu
from ..observe.counters import SUMMING, UPDATING
from ..optimizer import Optimizer, Updater
from ..optimizer.updater import Counts
from .entry import Array, KeyDescription, StoredKey
from .row_table import is_lazy
from .rows import merge_rows, sum_rows
from .store_table import StoreTable

#: The sources of a sum: arrays, one array without a list, or coded arrays.
Sources = list[Array] | Array | Pushed
#: A dense key of one call: its entry, the sources, the arrays to fill with the result.
Work = tuple[StoredKey, Sources, list[Array] | Array | None]
Batch = Iterable[Work]
UserUpdater = Callable[[Key, Any, Array], None]


class WeightUpdate:
    """The way in which pushed values change the weights."""

    #: The phase in counters and events.
    phase = UPDATING
    #: Whether `dense` accepts an iterator over arrays without lists.
    takes_columns = False

    def check(self, entry: StoredKey) -> None:
        """Raise an error if the key's weight cannot be updated this way; called before any change."""

    def dense(self, batch: Batch) -> None:
        """Apply the sums of dense values, and write the outs."""
        raise NotImplementedError

    def small(self, entry: StoredKey, value: Any, out: Any) -> bool:
        """Apply the sum of one small key with plain arrays; False: nothing has happened."""
        return False

    def rows(self, entry: StoredKey, sources: list[RowSparseArray]) -> None:
        """Apply the sum of row-sparse values."""
        raise NotImplementedError


def apply_with(updater: UserUpdater | None) -> WeightUpdate:
    """Choose: no updater, a compiled rule, or any callable."""
    if updater is None:
        return AssignUpdate()
    if isinstance(updater, Updater) and updater.optimizer.fused:
        return FusedUpdate(updater)
    return CallbackUpdate(updater)


def emit_outs(batch: Batch) -> None:
    """Copy the stored value of each key to its outs."""
    cpu.reduce([([entry.value], None, outs) for entry, _, outs in batch if outs and entry.table is None])
    for entry, _, outs in batch:
        if entry.table is not None and outs is not None:
            for out in outs if isinstance(outs, list) else [outs]:
                entry.table.copy_dense(out)


def kernel_sources(srcs: Sources) -> cpu.Sources:
    """Return the sources as the kernels need them."""
    return srcs if isinstance(srcs, (list, np.ndarray)) else srcs.sources()


def keep_residuals(batch: Batch) -> None:
    """Keep the residuals of a batch, whose sums have been applied."""
    for _, srcs, _ in batch:
        if not isinstance(srcs, (list, np.ndarray)):
            srcs.keep()


def guard_residuals(srcs: Sources) -> Any:
    """Return a context that restores residuals if its body fails."""
    return nullcontext() if isinstance(srcs, (list, np.ndarray)) else srcs.guarded()


def check_floating(entry: KeyDescription, optimizer: Optimizer | None) -> None:
    """Raise DTypeError unless the key's weight can be updated by an optimizer, if there is one."""
    if optimizer is not None and entry.dtype.kind in "iu":
        rule = type(optimizer).__name__
        raise DTypeError(f"key {entry.key!r} holds {entry.dtype}; {rule} updates floating-point weights only")


def give_up(updater: Updater, counts: Counts, error: BaseException) -> NoReturn:
    """Restore the counts; raise an error of the user's schedule or setting as an error of the updater."""
    updater.restore_counts(counts)
    if isinstance(error, (KVStoreError, MemoryError)) or not isinstance(error, Exception):
        raise error
    what = type(updater.optimizer).__name__
    raise UpdaterError(f"{what} raised {type(error).__name__} (worker 0): {error}") from error


def updater_error(error: Exception, key: Key) -> UpdaterError:
    """Return the error for a callable that has raised."""
    return UpdaterError(f"the updater raised {type(error).__name__} on key {key!r} (worker 0): {error}")


class AssignUpdate(WeightUpdate):
    """The sum replaces the stored value."""

    phase = SUMMING
    takes_columns = True

    def dense(self, batch: Batch) -> None:
        """Replace all keys in one pass over memory."""
        cpu.reduce([(kernel_sources(srcs), entry.weight(), outs) for entry, srcs, outs in batch])
        keep_residuals(batch)

    def small(self, entry: StoredKey, value: Any, out: Any) -> bool:
        """Replace the value by one call of the kernels."""
        return cpu.reduce_small(value, entry.value, out)

    def rows(self, entry: StoredKey, sources: list[RowSparseArray]) -> None:
        """Store the union of the rows; a dense key gets zeros elsewhere."""
        if entry.table is not None:
            entry.table.replace(sources, merge_rows(sources))
            return
        gradient = sum_rows(sources)
        entry.value[...] = 0
        entry.value[gradient.indices] = gradient.data


class FusedUpdate(WeightUpdate):
    """An optimizer's compiled rule, in the same pass as the sum."""

    takes_columns = True

    def __init__(self, updater: Updater) -> None:
        self._updater = updater

    def check(self, entry: StoredKey) -> None:
        """Refuse integers, which have no gradient."""
        check_floating(entry, self._updater.optimizer)

    def dense(self, batch: Batch) -> None:
        """Update all keys in one pass over memory; if that fails, no update is counted."""
        counts = self._updater.snapshot_counts()
        plan = self._updater.plan
        try:
            items: list[cpu.UpdateItem] = []
            for entry, srcs, outs in batch:
                weight = entry.weight()
                if entry.table is not None:
                    entry.table.attach(self._updater)
                rule, params, master, states = plan(entry.key, weight)
                items.append((rule, params, kernel_sources(srcs), weight, master, states, outs))
            cpu.update(items)
            keep_residuals(batch)
        except BaseException as error:
            give_up(self._updater, counts, error)

    def rows(self, entry: StoredKey, sources: list[RowSparseArray]) -> None:
        """Update the pushed rows, or all rows if decay and momentum change absent ones too."""
        if entry.table is None and self._updater.optimizer.sparse_mode(False) == "dense":
            self.dense([(entry, [sum_rows(sources).todense()], [])])
            return
        counts = self._updater.snapshot_counts()
        try:
            if entry.table is not None:
                self._update_table(entry.table, sources)
                return
            rule, params, master, states = self._updater.plan(entry.key, entry.value)
            rows, maps, datas = merge_rows(sources)
            cpu.update_rows(rule, params, datas, maps, rows, entry.value, master, states)
        except BaseException as error:
            give_up(self._updater, counts, error)

    def _update_table(self, table: StoreTable, sources: list[RowSparseArray]) -> None:
        context = table.updater_for(self._updater)
        if is_lazy(self._updater.optimizer):
            table.update(merge_rows(sources), context)
        else:
            table.update_all(sum_rows(sources), context)


class CallbackUpdate(WeightUpdate):
    """Any callable ``updater(key, merged, stored)``; if it raises, the weight is as before."""

    def __init__(self, updater: UserUpdater) -> None:
        self._updater = updater

    def check(self, entry: StoredKey) -> None:
        """Let the callable decide, unless it is an optimizer."""
        if isinstance(self._updater, Updater):
            check_floating(entry, self._updater.optimizer)

    def dense(self, batch: Batch) -> None:
        """Sum and call, key by key in their order; then write the outs."""
        for entry, srcs, _ in batch:
            with entry.scratch("merged") as total, guard_residuals(srcs):
                entry.weight()  # with all its rows
                cpu.reduce([(kernel_sources(srcs), total, [])])
                self._call_updater(entry, total)
        emit_outs(batch)

    def rows(self, entry: StoredKey, sources: list[RowSparseArray]) -> None:
        """Pass the row-sparse sum to the callable."""
        self._call_updater(entry, sum_rows(sources))

    def _call_updater(self, entry: StoredKey, gradient: Array | RowSparseArray) -> None:
        if entry.table is not None and isinstance(self._updater, Updater):
            context = entry.table.updater_for(self._updater)
            with _updater_errors(entry.key):
                entry.table.call_rule(gradient, context)
            return
        weight = entry.weight()
        # Views: an updater may change the attributes of its arrays as it likes.
        shown = gradient if isinstance(gradient, RowSparseArray) else gradient.view()
        with entry.scratch("before") as before, _updater_errors(entry.key):
            np.copyto(before, weight)
            try:
                self._updater(entry.key, shown, weight.view())
            except BaseException:
                np.copyto(weight, before)
                raise


@contextmanager
def _updater_errors(key: Key) -> Iterator[None]:
    """Raise an exception of the user's code as an error of the updater; KeyboardInterrupt does not change."""
    try:
        yield
    except Exception as error:
        raise updater_error(error, key) from error
