"""The comparison of the workers of a job: their steps, parameters, settings and weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..engine import Work
from ..errors import ConfigError, KVStoreError
from ..settings.definitions import SIDE
from ..store import (
    KVStore,
    call_before_join,
    outlives_workers,
    side_store,
    start_pushpull,
    starts_quick_sums,
    uses_only_local_cpu,
)
from ..store_kinds import is_synchronous

#: Columns of the table, which has a row for each worker.
_STEPS, _PARAMETERS, _SETTINGS, _WEIGHTS = range(4)

#: In the first column: the worker has called `KVStore.join`.
_JOINED = -1


class StepAgreement:
    """Compares the steps, the parameters, the settings and the weights of all workers in each exchange.

    Each worker writes its row of a table of zeros, and the sum over the workers is the whole table. The sum
    has its own key, which no optimizer updates, so that the workers of two optimizers need no common order.
    The last row of a worker that calls `KVStore.join` has a mark. Any other row of zeros is that of a worker
    that has closed its store, or was lost in a store that continues.

    Parameters
    ----------
    store : KVStore
        A store with rounds.
    every : int
        Settings and weights are compared in one of this many steps; never, if 0.
    prefix : str
        Prefix of the keys of the optimizer.
    """

    def __init__(self, store: KVStore, every: int, prefix: str) -> None:
        self._rank, self._every = store.rank, every
        self._continues = outlives_workers(store)
        #: Whether another exchange can start before the replies of servers arrive.
        self._has_delay = starts_quick_sums(store) and not uses_only_local_cpu(store)
        self._side, self._key = side_store(store), f"{SIDE}steps/{prefix}"
        self._table = np.zeros((store.num_workers, 4), np.int64)
        self._joined: set[int] = set()
        self._settings = ""
        self._numbers: list[int] | None = None
        self._hash = 0
        self._is_unknown = False
        self._work: Work | None = None
        if self._side is not None:
            self._side.init(self._key, self._table)
            call_before_join(store, self._announce_join)

    def compare(
        self,
        steps: int,
        parameters: Sequence[int] = (),
        settings: Callable[[], str] = str,
        weights: Callable[[], int] = int,
    ) -> None:
        """Exchange the rows of all workers, and compare them. All workers call it in each exchange.

        Parameters
        ----------
        steps : int
            Number of steps that the worker has completed.
        parameters : sequence of int
            Numbers of the parameters whose gradients are exchanged.
        settings : callable
            Return the settings of the optimizer as a text.
        weights : callable
            Return a hash of the weights, at least 0 and less than 2**63.

        Raises
        ------
        KVStoreError
            The workers have completed different numbers of steps, one has closed its store, or their weights
            differ; or an error of the store.
        ConfigError
            The settings of their optimizers differ, or the parameters that take part.
        """
        self.start(steps, parameters, settings, weights)
        self.finish()

    def start(
        self,
        steps: int,
        parameters: Sequence[int] = (),
        settings: Callable[[], str] = str,
        weights: Callable[[], int] = int,
    ) -> None:
        """Start a comparison, with the arguments and errors of `compare`; `finish` completes it.

        In stores without a delay that another exchange could use, `start` completes the comparison.
        """
        self.finish()  # an exception can have ended the previous comparison
        if self._side is None:
            return
        if parameters != self._numbers:
            self._numbers, self._hash = list(parameters), zlib.crc32(np.array(parameters, np.int64).tobytes())
        row = [steps + 1, self._hash, 0, 0]
        if self._every and steps % self._every == 0:
            self._settings = settings()
            row[_SETTINGS:] = [zlib.crc32(self._settings.encode()), weights()]
        if self._is_unknown:
            raise KVStoreError(
                f"worker {self._rank}: an exception, such as a TimeoutError, has interrupted the last "
                "comparison of the workers, and it is unknown whether this worker took part in it: start the "
                "job again from its last checkpoint"
            )
        self._is_unknown = True
        self._write_row(row)
        if self._has_delay:
            self._work = start_pushpull(self._side, [self._key], [self._table], waits=True)
        else:
            self._side.pushpull(self._key, self._table, out=self._table)
            self._compare_rows()

    def finish(self) -> None:
        """Wait for the rows of all workers, if a comparison was started, and compare them."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._compare_rows()

    def _compare_rows(self) -> None:
        self._is_unknown = False
        if self._table.tobytes() != self._table[self._rank].tobytes() * len(self._table):
            self._find_difference()

    def _find_difference(self) -> None:
        rows = self._table.tolist()
        self._joined.update(rank for rank, row in enumerate(rows) if row[_STEPS] == _JOINED)
        present = {rank: row for rank, row in enumerate(rows) if row[_STEPS] > 0}
        self._check_present(present)
        self._compare_steps({rank: row[_STEPS] - 1 for rank, row in present.items()})
        self._compare_parameters({rank: row[_PARAMETERS] for rank, row in present.items()})
        self._compare_settings({rank: row[_SETTINGS] for rank, row in present.items()})
        self._compare_weights({rank: row[_WEIGHTS] for rank, row in present.items()})

    def _write_row(self, row: list[int]) -> None:
        self._table[:] = 0
        self._table[self._rank] = row

    def _announce_join(self) -> None:
        if self._side is not None:
            self._write_row([_JOINED, 0, 0, 0])
            self._side.push(self._key, self._table)

    def _check_present(self, present: dict[int, list[int]]) -> None:
        """Raise KVStoreError if a worker has closed its store."""
        closed = set(range(len(self._table))) - present.keys() - self._joined
        if closed and not self._continues:
            raise KVStoreError(
                f"worker {self._rank}: worker {min(closed)} has closed its store and takes no part in the "
                "exchange, so the results lack its gradients. It may have an error of its own; a worker "
                "without further batches calls store.join() before it closes its store"
            )

    def _compare_steps(self, steps: dict[int, int]) -> None:
        if len(set(steps.values())) > 1:
            counts = ", ".join(f"worker {rank} {count}" for rank, count in steps.items())
            raise KVStoreError(
                f"worker {self._rank}: the workers have completed different numbers of steps ({counts}), so "
                "gradients of different steps were averaged: all workers must call backward and step equally "
                "often, and skip a batch together; a worker without further batches calls store.join(). "
                "Start the job again from its last checkpoint"
            )

    def _compare_parameters(self, parameters: dict[int, int]) -> None:
        other = _find_other(parameters)
        if other is not None:
            raise ConfigError(
                f"worker {self._rank}: worker {other[1]} exchanges the gradients of other parameters than "
                f"worker {other[0]}: freeze and unfreeze (requires_grad, grad_req) the same ones on all "
                "workers"
            )

    def _compare_settings(self, settings: dict[int, int]) -> None:
        other = _find_other(settings)
        if other is not None:
            raise ConfigError(
                f"worker {self._rank}: the optimizer of worker {other[1]} has other settings than that "
                f"of worker {other[0]}, so their weights would differ. The settings here: {self._settings}. "
                "Set the same ones on all workers, or pass check_every=0 if they differ on purpose"
            )

    def _compare_weights(self, weights: dict[int, int]) -> None:
        other = _find_other(weights)
        if other is not None:
            raise KVStoreError(
                f"worker {self._rank}: the weights of worker {other[1]} differ from those of worker "
                f"{other[0]}, after the same gradients: the program has changed them in another way than by "
                "optimizer.step(), or the workers have different processors. Start the job again from its "
                "last checkpoint, or pass check_every=0 if they differ on purpose"
            )


def make_agreement(store: Any, prefix: str, every: int, restarts: bool) -> StepAgreement | None:
    """Return the comparison of the workers of a store.

    Parameters
    ----------
    store : KVStore, KVStoreBase or None
    every, prefix
        See `StepAgreement`.
    restarts : bool
        Whether restarted workers take part in a store that outlives its workers.

    Returns
    -------
    StepAgreement or None
        None if the workers cannot be compared: the store is of another class, it has no rounds, or restarted
        workers, which count their steps from 0, take part.
    """
    if not isinstance(store, KVStore) or not is_synchronous(store) or (restarts and outlives_workers(store)):
        return None
    return StepAgreement(store, every, prefix)


def _find_other(values: dict[int, int]) -> tuple[int, int] | None:
    """Return the first rank and the first rank that has another value; None if all have the same."""
    first = min(values)
    return next(((first, rank) for rank, value in values.items() if value != values[first]), None)
