"""The requests of a trainer to its store: first values, sums of gradients, updates with an optimizer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.sparse import RowSparseArray
from ..averaging.agreement import make_agreement
from ..errors import ConfigError
from ..observe.timeline.marks import Marks
from ..optimizer import Optimizer, Updater, states
from ..optimizer.descriptions import text_of
from ..optimizer.updater import Counts
from ..store import KVStore, counters_of, updater_of, whole_step
from .gradients import StepGradients
from .store_choice import StoreChoice


class StoreExchange:
    """The exchange of values and gradients with a store; without a store, its methods do nothing."""

    def __init__(self, choice: StoreChoice, optimizer: Optimizer, check_every: int) -> None:
        self._store, self._updates = choice.store, choice.updates
        self._check_every, self._sums = check_every, 0
        self._agreement = make_agreement(choice.store, "trainer", 1, restarts=choice.updates)
        self._marks = Marks(counters_of(choice.store))
        #: Whether the store is a `KVStore`, which gets all keys in one call; other stores get one call per
        #: key, as in Gluon.
        self._has_lists = isinstance(choice.store, KVStore)
        #: Whether the store updates with its own copy of the optimizer, which has the settings and counts by
        #: itself.
        self._has_copy = self._is_copied(optimizer)

    def _is_copied(self, optimizer: Optimizer) -> bool:
        if not (self._updates and self._has_lists):
            return False
        updater = updater_of(self._store)
        return updater is not None and updater.optimizer is not optimizer

    def init(self, values: dict[int, list[Any]]) -> None:
        """Set the first values in the store: replicas by key."""
        if self._store is None or not values:
            return
        dense = [key for key, arrays in values.items() if not isinstance(arrays[0], RowSparseArray)]
        if self._has_lists and dense:
            self._store.broadcast(dense, [values[key][0] for key in dense], [values[key] for key in dense])
        for key, arrays in values.items():
            if isinstance(arrays[0], RowSparseArray):
                self._store.init(key, arrays[0])
            elif not self._has_lists:
                self._store.broadcast(key, arrays[0], arrays)

    def sum(self, gradients: Sequence[StepGradients], optimizer: Optimizer) -> None:
        """Sum gradients over replicas and workers: in place, or into the weights if the store updates."""
        if self._store is None:
            return
        begin = self._marks.begin()
        self._compare_workers(gradients, optimizer)
        dense = [one for one in gradients if not one.is_sparse()]
        sparse = [one for one in gradients if one.is_sparse()]
        with whole_step(self._store):
            if self._has_lists:
                self._sum_as_list(dense)
            else:
                self._sum_one_by_one(dense)
            for one in sparse:
                self._store.push(one.key, one.pushed(), priority=-one.key)
        for one in sparse:
            self._receive_rows(one)
        if self._has_copy:
            for one in gradients:
                optimizer._update_count(one.key)
        self._marks.step(begin)

    def _compare_workers(self, gradients: Sequence[StepGradients], optimizer: Optimizer) -> None:
        """Raise an error before the exchange if workers differ; see `StepAgreement`."""
        if self._agreement is not None:
            keys = [one.key for one in gradients]
            self._agreement.compare(self._sums, keys, lambda: self._describe_settings(optimizer))
            self._sums += 1

    def _describe_settings(self, optimizer: Optimizer) -> str:
        """Return the settings for the comparison: all settings in some steps, the usual ones in each."""
        if self._updates or not self._check_every:
            return ""  # a store compares the settings of its own optimizer
        if self._sums % self._check_every == 0:
            with contextlib.suppress(ConfigError):  # a rule of the program that has no description
                return text_of(optimizer)
        rate, decay, scale = optimizer.learning_rate, optimizer.wd, optimizer.rescale_grad
        return f"{type(optimizer).__name__}: learning_rate={rate}, wd={decay}, rescale_grad={scale}"

    def _sum_as_list(self, gradients: list[StepGradients]) -> None:
        """Sum all keys in one call: one pass over memory, or one exchange with servers."""
        if gradients:
            keys = [one.key for one in gradients]
            outs = [self._pushpull_outs(one) for one in gradients]
            self._store.pushpull(keys, [one.pushed() for one in gradients], out=outs)

    def _sum_one_by_one(self, gradients: list[StepGradients]) -> None:
        for one in gradients:
            if self._updates or not all(one.fresh):
                self._store.pushpull(one.key, one.pushed(), out=self._pushpull_outs(one), priority=-one.key)
            else:
                self._store.pushpull(one.key, one.pushed(), priority=-one.key)

    def _pushpull_outs(self, one: StepGradients) -> list[Any]:
        return one.param.list_data() if self._updates else one.param.list_grad()

    def _receive_rows(self, one: StepGradients) -> None:
        key = one.key
        weights = one.param.list_data()
        if isinstance(weights[0], RowSparseArray):
            return  # rows are pulled when a batch needs them
        if self._updates:
            self._store.pull(key, out=weights, priority=-key)
            return
        total = np.empty(weights[0].shape, one.param.list_grad()[0].dtype)
        self._store.pull(key, out=total, priority=-key)
        for grad in one.param.list_grad():
            rows = RowSparseArray.from_dense(total)
            grad.data, grad.indices = rows.data, rows.indices

    def load_states(self, fname: str | os.PathLike[str], optimizer: Optimizer) -> Optimizer:
        """Let the store read a file of states, and return the optimizer of the file."""
        self._store.load_optimizer_states(fname)
        if self._has_copy:
            content = states.read_states(fname)
            self.set_counts(optimizer, (content.counts, content.num_update))
        return self.current_optimizer(optimizer)

    def set_counts(self, optimizer: Optimizer, counts: Counts) -> None:
        """Set the counts of the optimizer to those of a file, unless the store has done so."""
        if self._has_copy:
            Updater(optimizer).restore_counts(counts)

    def current_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer that updates: the given one, or the one that the store has loaded instead."""
        return optimizer if self._has_copy else getattr(updater_of(self._store), "optimizer", optimizer)

    def pull(self, weights: dict[int, list[Any]]) -> None:
        """Write values of the store to all replicas.

        Rows of sparse weights are pulled when a batch needs them.
        """
        dense = [key for key, arrays in weights.items() if not isinstance(arrays[0], RowSparseArray)]
        if dense:
            self._store.pull(dense, out=[weights[key] for key in dense])
