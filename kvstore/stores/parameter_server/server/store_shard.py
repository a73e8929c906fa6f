"""What a server of parameters holds for one store: values, optimizer states, settings.

No socket and no round: the server's loop hands over what is complete, and reads what is asked for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....arrays.host import dtype_named
from ....arrays.sparse import RowSparseArray
from ....errors import DTypeError, KeyNotFoundError, KVStoreError, RowIndexError, StateFileError
from ....kernels import cpu
from ...entry import Array
from ...rows import Ids
from ..protocol.messages import KeyEntry, Slice
from ..protocol.optimizer_states import needs_whole_keys, pack_part, unpack_part
from ..transport.shared_buffers import Values
from .dense import Batch, DenseKey, DenseSlice, update_whole, writing
from .optimizer import OptimizerVersion, OptimizerVersions, check_dtype, explained, refuse_parts
from .payload import Payload, SharedLocation, SliceUpdate, plain, some_rows
from .snapshot import Folder, Manifest, described, taken_back, typed
from .sparse import Table

__all__ = ["Payload", "SharedLocation", "SliceUpdate", "StoreShard"]


class StoreShard:
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
        self.store, self.server = store, server
        self._memory = memory
        self._rules = OptimizerVersions()
        self._entries: dict[int, KeyEntry] = {}  # by the number of the key's first slice
        self._held: dict[int, DenseSlice | Table] = {}
        #: Slices whose last `apply` has written its outs.
        self.written: set[int] = set()
        self._ready: set[int] = set()
        #: Slices that are not as in the last snapshot.
        self._changed: set[int] = set()
        self._versions: dict[int, int] = {}
        self._waiting: dict[DenseKey, dict[int, SliceUpdate]] = {}
        self._folder: Folder | None = None

    def define(self, entries: Sequence[KeyEntry]) -> None:
        """Take note of slices that will come; known ones stay."""
        for entry in entries:
            mine = [piece for piece in entry.slices if piece.server == self.server]
            if mine and mine[0].id not in self._held:
                self._entries[mine[0].id] = entry
                make = self._make_tables if entry.spec.sparse else self._make_dense
                make(entry, mine)

    def _make_dense(self, entry: KeyEntry, mine: list[Slice]) -> None:
        spec = entry.spec
        whole = len(mine) == len(entry.slices)
        key = DenseKey(spec.key, tuple(spec.shape), dtype_named(spec.dtype), whole)
        key.slices = [DenseSlice(piece.id, key, piece.start, piece.stop) for piece in mine]
        self._held.update({part.id: part for part in key.slices})

    def _make_tables(self, entry: KeyEntry, mine: list[Slice]) -> None:
        spec = entry.spec
        dtype = dtype_named(spec.dtype)
        for piece in mine:
            shape = (piece.stop - piece.start, *spec.shape[1:])
            self._held[piece.id] = Table(spec.key, piece.start, shape, dtype, len(entry.slices) == 1)

    def forget(self, slices: Sequence[int]) -> None:
        """Drop slices and all that belongs to them; unknown ones are no error."""
        for slice in slices:
            held = self._held.pop(slice, None)
            if isinstance(held, DenseSlice):
                self._waiting.pop(held.of, None)
                self._give_back(held)
            self._entries.pop(slice, None)
            self._ready.discard(slice)
            self._changed.discard(slice)
            self._versions.pop(slice, None)

    def _give_back(self, part: DenseSlice) -> None:
        part.of.slices.remove(part)
        if self._memory is not None:
            part.let_go(self._memory)
        part.value, part.block = None, None

    def close(self) -> None:
        """Let all memory go."""
        self.forget(list(self._held))

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
        held = self._part(slice)
        if first and slice in self._ready:
            return
        if isinstance(held, Table):
            _write_table(held, payload)
        else:
            self._write_dense(held, payload)
        self._ready.add(slice)
        self._changed.add(slice)

    def _write_dense(self, part: DenseSlice, payload: Payload) -> None:
        if payload.rows >= 0:
            raise DTypeError(f"key {part.of.key!r} is dense; its value cannot be set by rows")
        value = plain(payload, part.of.dtype, part.size)
        weight = part.ensure(self._memory)
        with writing(self._memory, [part.place]):
            cpu.reduce([([value], weight, [])])
        if part.of.dtype.itemsize == 2:
            part.follow(self._rules.newest())

    def read(self, slice: int) -> Array:
        """Return the live, flat value of a dense slice."""
        held = self._part(slice)
        if isinstance(held, Table):
            raise DTypeError(f"key {held.key!r} is row-sparse; it is read by rows")
        return held.live()

    def past(self, slice: int, round: int, ids: Ids | None = None) -> Array | tuple[Ids, Array]:
        """Return what `read` or `rows` gave after a round.

        Raises
        ------
        KVStoreError
            It is not the one before the last, or that is not kept.
        """
        held = self._part(slice)
        if isinstance(held, DenseSlice):
            return held.past(round)
        found, rows = held.past(round, None if ids is None else self._within(held, ids))
        return found + held.start, rows.reshape(len(found), math.prod(rows.shape[1:]))

    def writes_to(self, slice: int, payload: Payload) -> bool:
        """Whether a round of the slice can write its value over a payload, too: `SliceUpdate.outs`."""
        held = self._held.get(slice)
        return (
            isinstance(held, DenseSlice)
            and not payload.coding
            and payload.rows < 0
            and isinstance(payload.data, np.ndarray)
            and payload.data.flags.writeable
            and payload.data.nbytes == held.size * held.of.dtype.itemsize
            and payload.data.ctypes.data % held.of.dtype.itemsize == 0
        )

    def is_table(self, slice: int) -> bool:
        """Whether a slice is one of a row-sparse key."""
        return isinstance(self._part(slice), Table)

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
        held = self._part(slice)
        if not isinstance(held, Table):
            raise DTypeError(f"key {held.of.key!r} is dense; it has no rows to read")
        found, rows = held.read(None if ids is None else self._within(held, ids))
        return found + held.start, rows.reshape(len(found), math.prod(rows.shape[1:]))

    def _within(self, table: Table, ids: Ids) -> Ids:
        """Count row ids from the slice's first row."""
        ids = np.subtract(ids, table.start, dtype=np.int64)
        if not cpu.ascending_ids(ids, table.shape[0]):
            stop = table.start + table.shape[0]
            raise RowIndexError(f"row ids must ascend within [{table.start}, {stop}), the rows of the slice")
        return ids

    def place(self, slice: int) -> SharedLocation | None:
        """Say where workers of this machine find the value of a dense slice; None: they do not."""
        held = self._part(slice)
        if isinstance(held, Table) or held.place is None or self._memory is None:
            return None
        return SharedLocation(*held.place, held.live().nbytes, self._memory.seqlock(*held.place))

    def placement(self) -> dict[int, int]:
        """Bytes of value that each slice takes."""
        return {
            slice: held.nbytes if isinstance(held, Table) else held.live().nbytes
            for slice, held in self._held.items()
            if slice in self._ready
        }

    def _part(self, slice: int) -> DenseSlice | Table:
        try:
            return self._held[slice]
        except KeyError:
            raise KeyNotFoundError(
                f"server {self.server} has no slice {slice} of store {self.store}; was its key forgotten?"
            ) from None

    # --------------------------------------------------------------------------------------------- rounds

    def gather(self, jobs: Sequence[SliceUpdate]) -> list[SliceUpdate]:
        """Return the jobs that can be applied now.

        Most come back at once. A rule that needs whole tensors gets all slices of a key together: jobs of
        such keys are kept until the last one of their round is there. Payloads must stay good meanwhile.
        """
        now: list[SliceUpdate] = []
        for job in jobs:
            held = self._held.get(job.slice)
            if not isinstance(held, DenseSlice) or not self._waits_for_others(held, job):
                now.append(job)
                continue
            waiting = self._waiting.setdefault(held.of, {})
            waiting[job.slice] = job
            if len(waiting) == len(held.of.slices):
                now += self._waiting.pop(held.of).values()
        return now

    def abort(self) -> list[int]:
        """Drop the jobs that `gather` has kept; return their slices."""
        slices = [slice for jobs in self._waiting.values() for slice in jobs]
        self._waiting.clear()
        return slices

    def _waits_for_others(self, part: DenseSlice, job: SliceUpdate) -> bool:
        return part.of.whole and len(part.of.slices) > 1 and needs_whole_keys(self._rule(job).optimizer)

    def apply(self, jobs: Sequence[SliceUpdate]) -> list[Exception | None]:
        """Sum the parts of each job, and update or replace the slice's value.

        Many small slices take one call of the kernels. Numbers are those of the `local` store, bit by bit,
        for one push with the parts as the list of values, however the key is cut.

        Returns
        -------
        list
            For each job None, or what went wrong: an UpdaterError, ShapeError, DTypeError ... Its slice is as
            it was, the others are through.
        """
        results: list[Exception | None] = [None] * len(jobs)
        self.written.clear()
        batch = Batch(self._memory)
        together: dict[int, tuple[int, OptimizerVersion, Any]] = {}
        whole: dict[tuple[DenseKey, int], list[int]] = {}
        for number, job in enumerate(jobs):
            try:
                rule, held = self._rule(job), self._part(job.slice)
                if not job.parts:
                    continue
                if isinstance(held, Table):
                    self._apply_table(held, job, rule)
                elif needs_whole_keys(rule.optimizer):
                    whole.setdefault((held.of, job.round), []).append(number)
                else:
                    if job.slice in together:  # its next round
                        self._run(batch, together, results)
                        batch, together = Batch(self._memory), {}
                    check_dtype(rule, held.of.key, held.of.dtype)
                    keeps = _may_be_undone(job)
                    if keeps and rule.optimizer is not None:
                        held.keep(job.round)
                    if batch.add(held, job, rule, keeps) and job.outs:
                        self.written.add(job.slice)
                    together[job.slice] = (number, rule, held.of.key)
            except Exception as error:
                results[number] = self._explained(error, job)
        self._run(batch, together, results)
        for numbers in whole.values():
            self._apply_whole([jobs[number] for number in numbers], numbers, results)
        self._changed.update(job.slice for job in jobs)
        return results

    def _run(self, batch: Batch, together: dict[int, Any], results: list[Exception | None]) -> None:
        try:
            batch.run()
        except Exception as error:  # no memory for the call itself; nothing was written
            for number, rule, key in together.values():
                results[number] = explained(error, rule, key, self.server)

    def _apply_table(self, table: Table, job: SliceUpdate, rule: OptimizerVersion) -> None:
        check_dtype(rule, table.key, table.dtype)
        sources: list[RowSparseArray | Array] = [
            some_rows(payload, table.dtype, table.start, table.shape)
            if payload.rows >= 0
            else plain(payload, table.dtype, math.prod(table.shape)).reshape(table.shape)
            for _, payload in job.parts
        ]
        table.apply(sources, rule, job.clock, job.round - 1 if _may_be_undone(job) else -1)

    def _apply_whole(
        self, jobs: list[SliceUpdate], numbers: list[int], results: list[Exception | None]
    ) -> None:
        parts = [(self._held[job.slice], job) for job in jobs]
        rule = max((self._rule(job) for job in jobs), key=lambda rule: rule.version)
        try:
            dense = [(part, job) for part, job in parts if isinstance(part, DenseSlice)]
            check_dtype(rule, dense[0][0].of.key, dense[0][0].of.dtype)
            for part, job in dense:
                if _may_be_undone(job):
                    part.keep(job.round)
            update_whole(dense, rule, self._memory)
        except Exception as error:
            for number, job in zip(numbers, jobs, strict=True):
                results[number] = self._explained(error, job)

    def _rule(self, job: SliceUpdate) -> OptimizerVersion:
        """Return the settings for a job; those of a slice never go back."""
        version = max(job.version, self._versions.get(job.slice, 0))
        self._versions[job.slice] = version
        return self._rules.at(version)

    def _explained(self, error: Exception, job: SliceUpdate) -> Exception:
        held = self._held.get(job.slice)
        if held is None:
            return error
        return explained(error, self._rule(job), held.key, self.server)

    # ------------------------------------------------------------------------------------------- settings

    def install(self, version: int, kind: str, text: str) -> None:
        """Take in settings; they hold for jobs of this version or a later one.

        Parameters
        ----------
        version : int
            Counts upwards over all kinds; one that is known changes nothing.
        kind : {"optimizer", "configure", "none", "clock"}
            "optimizer": fresh states from now on. "configure": the same optimizer with other settings.
            "none": sums replace the value. "clock": the schedule's time is `text`, a whole number, plus the
            job's clock; after "optimizer" it is the optimizer's ``begin_num_update``.
        text : str
            For an optimizer JSON of `Optimizer.describe()`: ``{"name", "config"}``, after the change.

        Raises
        ------
        ConfigError
            Not known here, no such settings, or a rule that needs whole tensors where a key has slices on
            several servers.
        """
        rule = self._rules.after(version, kind, text)
        if rule is None:
            return
        for entry in self._entries.values():
            spec, homes = entry.spec, {piece.server for piece in entry.slices}
            parted = len(entry.slices) > 1 if spec.sparse else len(homes) > 1
            if parted and needs_whole_keys(rule.optimizer, spec.sparse):
                refuse_parts(rule.optimizer, spec.key)
        self._rules.add(rule)

    def fetch_state(self, slice: int) -> bytes:
        """Return the optimizer's state of a slice, for `join_states`; b"" without an optimizer."""
        rule, held = self._rules.newest(), self._part(slice)
        if rule.optimizer is None:
            return b""
        return pack_part(held.key, held.part_state(rule), isinstance(held, Table), rule.optimizer)

    def put_state(self, slice: int, data: bytes) -> None:
        """Take over a state that `optimizer_states.split_states` made.

        Raises
        ------
        StateFileError
            Damaged, of another optimizer, or not for this slice.
        """
        rule, held = self._rules.newest(), self._part(slice)
        if rule.optimizer is None:
            raise StateFileError("a state of an optimizer, and the store has none; set the optimizer first")
        held.put_state(unpack_part(held.key, data, isinstance(held, Table), rule.optimizer), rule)
        self._changed.add(slice)

    # ------------------------------------------------------------------------------------------ snapshots

    def snapshot(self, folder: str | os.PathLike[str], rounds: dict[str, Any]) -> None:
        """Write everything to a folder of this shelf's own, in one step.

        What has not changed since the last time stays where it is.

        Parameters
        ----------
        rounds : dict
            What the server's machine wants to find again; plain values, fit for JSON.

        Raises
        ------
        OSError
            The folder cannot be written; the snapshot before is still there.
        """
        self.capture(folder, rounds, copied=False)()

    def capture(
        self, folder: str | os.PathLike[str], rounds: dict[str, Any], copied: bool = True
    ) -> Callable[[], None]:
        """Copy what a snapshot consists of; what is returned writes it, and may do so in another thread.

        One at a time: the next capture comes when the one before is written, or has failed.
        """
        path = Path(folder)
        if self._folder is None or self._folder.path != path:
            self._folder, self._changed = Folder(path), set(self._ready)
        place, changed = self._folder, self._changed & self._ready
        about = self._rules.described(), dict(self._versions)
        manifest = Manifest.of(self.store, self.server, list(self._entries.values()), *about, rounds)
        content = {slice: described(self._held[slice], copied) for slice in sorted(changed)}
        self._changed -= changed

        def write() -> None:
            try:
                place.write(manifest, content)
            except BaseException:
                self._changed |= changed & self._ready
                raise

        return write

    @classmethod
    def restore(
        cls, folder: str | os.PathLike[str], memory: Values | None = None
    ) -> tuple[StoreShard, dict[str, Any]]:
        """Return what `snapshot` wrote: a shelf, and the rounds.

        Raises
        ------
        StateFileError
            Damaged or foreign, or there is none.
        """
        place = Folder(folder)
        manifest = place.read()
        try:
            shelf = cls._from(manifest, place.tensors(manifest), memory)
        except KVStoreError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise StateFileError(f"{place.path} holds a damaged snapshot: {error!r}") from error
        shelf._folder = place
        return shelf, manifest.rounds

    @classmethod
    def _from(
        cls, manifest: Manifest, tensors: dict[int, dict[str, Array]], memory: Values | None
    ) -> StoreShard:
        shelf = cls(manifest.store, manifest.server, memory)
        shelf._rules = OptimizerVersions.from_description(manifest.rules)
        shelf._versions = manifest.versions
        shelf.define(manifest.entries)
        for slice, (_, said) in manifest.slices.items():
            shelf._take_back(slice, said, tensors[slice])
        return shelf

    def _take_back(self, slice: int, said: dict[str, Any], tensors: dict[str, Array]) -> None:
        held = self._part(slice)
        if isinstance(held, DenseSlice):
            value = typed(tensors["value"], held.of.dtype)
            if value.shape != (held.size,):
                raise StateFileError(
                    f"slice {slice} of a snapshot has {value.size} elements, not {held.size}"
                )
            np.copyto(held.ensure(self._memory), value)
        taken_back(held, said, tensors, self._rules.all())
        self._ready.add(slice)


def _may_be_undone(job: SliceUpdate) -> bool:
    """Whether a worker may be lost of which other slices never get their part."""
    return len(job.parts) > 1


def _write_table(table: Table, payload: Payload) -> None:
    if payload.rows >= 0:
        table.assign(some_rows(payload, table.dtype, table.start, table.shape))
    else:
        table.assign_all(plain(payload, table.dtype, math.prod(table.shape)))
    if table.dtype.itemsize == 2:
        table.follow()
