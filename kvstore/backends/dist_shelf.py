"""What a server of parameters holds for one store: values, optimizer states, settings.

No socket and no round: the server's loop hands over what is complete, and reads what is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..memory.outbox import Values
from ..optimizer import Optimizer
from ..ps.messages import KeyEntry
from .entry import Array
from .rows import Ids


class Payload(NamedTuple):
    """What a worker sends for a slice.

    Plain elements in native byte order, packed ones (`coding` and `threshold` as `kernels.cpu.Coded` takes
    them), or rows of a table. The memory is only read, and not looked at again after the call.
    """

    #: A buffer; for rows one with the int64 ids and then the rows, or a pair of buffers.
    data: Any
    coding: int = 0
    threshold: float = 0.0
    #: How many rows; their ids are those of the whole table, ascending, each once. -1: not row-sparse.
    rows: int = -1


class Job(NamedTuple):
    """One round of one slice, as `events.Job`."""

    slice: int
    round: int
    #: In rank order: (rank, payload). Of a round without any, only the count goes on.
    parts: list[tuple[int, Payload]]
    version: int = 0
    clock: int = 0


class Place(NamedTuple):
    """Where a value lies in the server's shared memory, and its stamp; see `kvstore.memory.outbox`."""

    segment: int
    offset: int
    nbytes: int
    stamp: int


class Shelf:
    """What one server holds for one store.

    Parameters
    ----------
    store : int
        The store's number.
    server : int
        This server's; of the keys that are defined it keeps the slices with that number.
    memory : Values, optional
        Where dense values are put, so that workers of this machine can read them. None: private memory.

    Notes
    -----
    Every method is called by the one thread of the server's loop. What a payload, a settings text or a state
    gets wrong is one of `kvstore.errors`; after it everything is as before.
    """

    def __init__(self, store: int, server: int, memory: Values | None = None) -> None:
        raise NotImplementedError

    def define(self, entries: Sequence[KeyEntry]) -> None:
        """Take note of slices that will come; known ones stay."""
        raise NotImplementedError

    def forget(self, slices: Sequence[int]) -> None:
        """Drop slices and all that belongs to them; unknown ones are no error."""
        raise NotImplementedError

    def close(self) -> None:
        """Let all memory go."""
        raise NotImplementedError

    # --------------------------------------------------------------------------------------------- values

    def write(self, slice: int, payload: Payload, first: bool) -> None:
        """Set the value of a slice.

        Parameters
        ----------
        first : bool
            INIT: a slice that has a value keeps it. Else ASSIGN: float32 copies of 16-bit weights follow.

        Raises
        ------
        KeyNotFoundError
            No such slice here.
        ShapeError, DTypeError, RowIndexError
            The payload is not one for this slice.
        """
        raise NotImplementedError

    def gather(self, jobs: Sequence[Job]) -> list[Job]:
        """Return the jobs that can be applied now.

        Most come back at once. A rule that needs whole tensors gets all slices of a key together: jobs of
        such keys are kept until the last one of their round is there. Payloads must stay good meanwhile.
        """
        raise NotImplementedError

    def apply(self, jobs: Sequence[Job]) -> list[Exception | None]:
        """Sum the parts of each job, and update or replace the slice's value.

        Many small slices take one call of the kernels. Numbers are those of the `local` store, bit by bit,
        for one push with the parts as the list of values, however the key is cut.

        Returns
        -------
        list
            For each job None, or what went wrong: an UpdaterError, CodecError, ShapeError, DTypeError ... Its
            slice is as it was, the others are through.
        """
        raise NotImplementedError

    def read(self, slice: int) -> Array:
        """Return the live, flat value of a dense slice."""
        raise NotImplementedError

    def rows(self, slice: int, ids: Ids | None = None) -> tuple[Ids, Array]:
        """Return rows of a table's slice as new arrays.

        Parameters
        ----------
        ids : int64 array, optional
            Ascending ids of the whole table, within the slice. None: all that are held; with an optimizer
            those that anybody has pushed or initialised.

        Returns
        -------
        ids : int64 array
        rows : array, shape (n, row size)
            What is not held comes as what it stands for, mostly zeros.
        """
        raise NotImplementedError

    def place(self, slice: int) -> Place | None:
        """Say where workers of this machine find the value of a dense slice; None: they do not."""
        raise NotImplementedError

    def placement(self) -> dict[int, int]:
        """Bytes of value that each slice takes."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- settings

    def install(self, version: int, kind: str, text: str) -> None:
        """Take in settings; they hold for jobs of this version or a later one.

        Parameters
        ----------
        version : int
            Counts upwards over all kinds.
        kind : {"optimizer", "configure", "none", "clock"}
            "optimizer": fresh states from now on. "configure": the same optimizer with other settings.
            "none": sums replace the value. "clock": the schedule's time is `text`, a whole number, plus the
            job's clock; after "optimizer" it is the optimizer's ``begin_num_update``.
        text : str
            For an optimizer JSON of `Optimizer.describe()`: ``{"name", "config"}``, after the change.

        Raises
        ------
        ConfigError
            Not known here, or no such settings.
        """
        raise NotImplementedError

    def fetch_state(self, slice: int) -> bytes:
        """Return the optimizer's state of a slice, for `dist_states.join_states`."""
        raise NotImplementedError

    def put_state(self, slice: int, data: bytes) -> None:
        """Take over a state that `dist_states.split_states` made.

        Raises
        ------
        StateFileError
            Damaged, of another optimizer, or not for this slice.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ snapshots

    def snapshot(self, folder: str | os.PathLike[str], rounds: dict[str, Any]) -> None:
        """Write everything to a folder of this shelf's own, in one step.

        What has not changed since the last time stays where it is.

        Parameters
        ----------
        rounds : dict
            What the server's machine wants to find again; plain values, fit for JSON.
        """
        raise NotImplementedError

    @classmethod
    def restore(
        cls, folder: str | os.PathLike[str], memory: Values | None = None
    ) -> tuple[Shelf, dict[str, Any]]:
        """Return what `snapshot` wrote: a shelf, and the rounds.

        Raises
        ------
        StateFileError
            Damaged or foreign.
        FileNotFoundError
            There is none.
        """
        raise NotImplementedError


def needs_whole_keys(kind: str, text: str) -> bool:
    """Whether settings are an optimizer whose keys must lie on one server each: norms, noise, own rules."""
    raise NotImplementedError
