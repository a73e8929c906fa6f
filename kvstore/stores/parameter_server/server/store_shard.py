"""One store on one server: values, optimizer states, settings.

It has no socket and no rounds: the server's loop passes complete rounds, and reads requested values.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ....arrays.grouping import Key
from ....errors import DTypeError, KVStoreError, RowIndexError, StateFileError
from ....kernels import cpu
from ....optimizer.settings_log import SettingsAt
from ....settings.definitions import is_side
from ...entry import Array
from ...rows import Ids
from ..protocol.messages import KeyEntry
from ..protocol.optimizer_states import needs_whole_keys, pack_part, unpack_part
from ..transport.native._streams import GatheredRows
from ..transport.shared_buffers import SharedValues
from .dense import DenseSlice, ValueCopies
from .optimizer import OptimizerVersions, refuse_parts
from .payload import SharedLocation, SlicePayload, SliceValueWrite, not_kept, plain_elements, some_rows
from .round_updates import RoundUpdates
from .shard_slices import ShardSlices
from .snapshot import FORMAT, VERSION, SnapshotFolder, SnapshotManifest, describe_slice, taken_back
from .sparse import TableSlice


class StoreShard:
    """The data of a server for one store: the slices of its keys that have this server's number.

    Dense values are put in `memory`, so that workers of this machine can read them; None: private memory.
    `optimizers` are the settings of a restored shard; else there is no optimizer yet.

    Every method is called by the thread of the server's loop. An invalid payload, settings text or state
    raises one of `kvstore.errors`, and changes nothing.
    """

    def __init__(
        self,
        store: int,
        server: int,
        memory: SharedValues | None = None,
        optimizers: OptimizerVersions | None = None,
    ) -> None:
        self.store, self.server = store, server
        self._memory = memory
        self._optimizers = OptimizerVersions() if optimizers is None else optimizers
        self._slices = ShardSlices(store, server, memory)
        #: Applies complete rounds.
        self.rounds = RoundUpdates(self._slices, self._optimizers)
        self._folder: SnapshotFolder | None = None

    def define_slices(self, entries: Sequence[KeyEntry]) -> None:
        """Add slices that workers will use; known slices stay."""
        self._slices.add_slices(entries)

    def forget_slices(self, slices: Sequence[int]) -> None:
        """Drop slices and all that belongs to them; unknown ones are ignored."""
        self.rounds.forget_slices(slices)
        self._slices.forget_slices(slices)

    def close(self) -> None:
        """Release all memory."""
        self.forget_slices(list(self._slices.held))

    # --------------------------------------------------------------------------------------------- values

    def write_values(self, values: Sequence[SliceValueWrite]) -> list[KVStoreError | MemoryError | None]:
        """Assign the values of slices, each at most once; return for each its error or None.

        KeyNotFoundError: there is no such slice; ShapeError, DTypeError, RowIndexError: the payload does not
        fit it. Float32 copies of 16-bit weights are set too.
        """
        copies = ValueCopies(self._memory)
        errors = [_error_of(self._begin_write, one, copies) for one in values]
        failed = _error_of(copies.carry_out)
        for at, (one, error) in enumerate(zip(values, errors, strict=True)):
            failed_here = failed if one.slice in copies.slices else None
            errors[at] = error or failed_here or _error_of(self._end_write, one)
        return errors

    def _begin_write(self, write: SliceValueWrite, copies: ValueCopies) -> None:
        held = self._slices.find_slice(write.slice)
        if self._has_come(write):
            return
        if isinstance(held, TableSlice):
            held.drop_old_states(self._optimizers.newest())
            _write_table(held, write.payload)
        else:
            copies.add_value(held, write.payload)

    def _end_write(self, write: SliceValueWrite) -> None:
        if self._has_come(write):
            return
        held = self._slices.find_slice(write.slice)
        if isinstance(held, DenseSlice) and held.of.dtype.itemsize == 2:
            held.copy_to_master(self._optimizers.newest())
        self._slices.set_ready(write.slice)

    def _has_come(self, write: SliceValueWrite) -> bool:
        return write.first and write.slice in self._slices.ready

    def read_value(self, slice: int) -> Array:
        """Return the live, flat value of a dense slice."""
        held = self._slices.find_slice(slice)
        if isinstance(held, TableSlice):
            raise DTypeError(f"key {held.key!r} is row-sparse; it is read by rows")
        return held.live_value()

    def held_slice(self, slice: int) -> DenseSlice | TableSlice | None:
        """Return a slice; None: this server does not have it."""
        return self._slices.held.get(slice)

    def past_value(self, slice: int, round: int, ids: Ids | None = None) -> Array | tuple[Ids, Array]:
        """Return what `read_value` or `read_rows` returned after a round; KVStoreError: it is not stored."""
        held = self._slices.find_slice(slice)
        if isinstance(held, DenseSlice):
            return held.past_value(round)
        found, rows = held.past_rows(round, None if ids is None else self._relative_ids(held, ids))
        return found + held.start, rows.reshape(len(found), math.prod(rows.shape[1:]))

    def writes_to(self, slice: int, payload: SlicePayload) -> bool:
        """Return whether a round of the slice can write its value to a payload, too: `SliceUpdate.outs`."""
        held = self._slices.held.get(slice)
        return (
            isinstance(held, DenseSlice)
            and not payload.coding
            and payload.rows < 0
            and isinstance(payload.data, np.ndarray)
            and payload.data.flags.writeable
            and payload.data.nbytes == held.size * held.of.dtype.itemsize
            and payload.data.ctypes.data % held.of.dtype.itemsize == 0
        )

    def slice_key(self, slice: int) -> Key:
        """Return the key of a slice."""
        return self._slices.find_slice(slice).key

    def is_table(self, slice: int) -> bool:
        """Return whether a slice belongs to a row-sparse key."""
        return isinstance(self._slices.find_slice(slice), TableSlice)

    def read_rows(self, slice: int, ids: Ids | None = None) -> tuple[Ids, Array]:
        """Return ids and rows of a table's slice, as new arrays.

        `ids` are ascending ids of the whole table, within the slice. None: all rows that are held; with an
        optimizer the rows that any worker has pushed or initialised. Absent rows have the value of the blank
        row, mostly zeros.
        """
        held = self._slices.find_slice(slice)
        if not isinstance(held, TableSlice):
            raise DTypeError(f"key {held.of.key!r} is dense; it has no rows to read")
        if ids is None:
            held.show_all()
        found, rows = held.read(None if ids is None else self._relative_ids(held, ids))
        return found + held.start, rows.reshape(len(found), math.prod(rows.shape[1:]))

    def absent_row(self, slice: int, round: int | None = None) -> Array | None:
        """Return the value of the rows that `read_rows` or `past_value` leaves out; None: zeros."""
        held = self._slices.find_slice(slice)
        return held.absent_row(round) if isinstance(held, TableSlice) else None

    def gather_rows(self, slice: int, ids: Ids) -> GatheredRows | None:
        """Return the rows of `read_rows`, to be sent before they change; None: use `read_rows`."""
        held = self._slices.find_slice(slice)
        return held.gather_rows(self._relative_ids(held, ids)) if isinstance(held, TableSlice) else None

    def _relative_ids(self, table: TableSlice, ids: Ids) -> Ids:
        """Return row ids relative to the slice's first row."""
        ids = np.ascontiguousarray(ids, np.int64)
        ids = ids - table.start if table.start else ids
        if not cpu.ascending_ids(ids, table.shape[0]):
            stop = table.start + table.shape[0]
            raise RowIndexError(f"row ids must ascend within [{table.start}, {stop}), the rows of the slice")
        return ids

    def shared_location(self, slice: int) -> SharedLocation | None:
        """Return the place of a dense slice's value in shared memory; None: it is not there."""
        held = self._slices.find_slice(slice)
        if isinstance(held, TableSlice) or held.place is None or self._memory is None:
            return None
        return SharedLocation(*held.place, held.live_value().nbytes, self._memory.read_seqlock(*held.place))

    def value_bytes(self) -> dict[int, int]:
        """Return the bytes of value of each slice."""
        return {
            slice: held.nbytes if isinstance(held, TableSlice) else held.live_value().nbytes
            for slice, held in self._slices.held.items()
            if slice in self._slices.ready
        }

    # ------------------------------------------------------------------------------------------- settings

    def install_settings(self, version: int, described: SettingsAt) -> None:
        """Use settings for jobs of this version or a later one, up to the next version.

        They replace those of the same version. States are fresh with another ordinal. Raises ConfigError for
        an optimizer that this server does not know, and for a rule that needs whole tensors where a key has
        slices on several servers.
        """
        settings = self._optimizers.make_version(version, described)
        for entry in self._slices.current_entries():
            spec, homes = entry.spec, {piece.server for piece in entry.slices}
            parted = len(entry.slices) > 1 if spec.sparse else len(homes) > 1
            if parted and not is_side(spec.key) and needs_whole_keys(settings.optimizer, spec.sparse):
                refuse_parts(settings.optimizer, spec.key)
        self._optimizers.install_version(settings)
        self._slices.withdraw_plans()

    def fetch_state(self, slice: int, round: int | None = None) -> bytes:
        """Return the optimizer's state of a slice, now or after a round; b"" without an optimizer.

        Raises KVStoreError if the state after the round is not stored.
        """
        settings, held = self._optimizers.newest(), self._slices.find_slice(slice)
        if settings.optimizer is None:
            return b""
        if round is None:
            part = held.part_state(settings)
        elif isinstance(held, TableSlice):
            raise not_kept(held.key, round)
        else:
            part = held.past_state(settings, round)
        return pack_part(held.key, part, isinstance(held, TableSlice), settings.optimizer)

    def put_state(self, slice: int, data: bytes, ordinal: int | None = None) -> None:
        """Set a state that `optimizer_states.split_states` made.

        `ordinal` is that of its optimizer: if another worker has replaced that, the state is ignored. Raises
        StateFileError where the state is damaged, of another optimizer, or not for this slice.
        """
        settings, held = self._optimizers.newest(), self._slices.find_slice(slice)
        if ordinal is not None and ordinal < settings.generation:
            return
        if settings.optimizer is None:
            raise StateFileError("a state of an optimizer, and the store has none; set the optimizer first")
        held.put_state(
            unpack_part(held.key, data, isinstance(held, TableSlice), settings.optimizer), settings
        )
        self._slices.changed.add(slice)

    # ------------------------------------------------------------------------------------------ snapshots

    def capture(self, folder: str | os.PathLike[str], rounds: dict[str, Any]) -> Callable[[], None]:
        """Copy the content of a snapshot; the returned function writes it to a folder of this shard's own.

        The function may run in another thread, and raises OSError on failure; the previous snapshot then
        remains. Unchanged slices are not written again. One at a time: the next capture begins when the
        previous one is written, or has failed. `rounds` is the machine's state, as JSON types.
        """
        path = Path(folder)
        if self._folder is None or self._folder.path != path:
            self._folder, self._slices.changed = SnapshotFolder(path), set(self._slices.ready)
        self._slices.note_changed()
        place, changed = self._folder, self._slices.changed & self._slices.ready
        manifest = SnapshotManifest(
            FORMAT, VERSION, self.store, self.server, 0, list(self._slices.entries.values()),
            self._optimizers.describe_versions(), {}, {}, dict(self.rounds.versions), rounds,
        )  # fmt: skip
        content = {slice: describe_slice(self._slices.held[slice]) for slice in sorted(changed)}
        self._slices.changed -= changed

        def write() -> None:
            try:
                place.write_files(manifest, content)
            except BaseException:
                self._slices.changed |= changed & self._slices.ready
                raise

        return write

    @classmethod
    def restore(
        cls, folder: str | os.PathLike[str], memory: SharedValues | None = None
    ) -> tuple[StoreShard, dict[str, Any]]:
        """Return shard and rounds that `capture` has written; StateFileError: damaged, foreign, missing."""
        place = SnapshotFolder(folder)
        manifest = place.read_manifest()
        try:
            shard = cls._from_manifest(manifest, place.read_tensors(manifest), memory)
        except KVStoreError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise StateFileError(f"{place.path} holds a damaged snapshot: {error!r}") from error
        shard._folder = place
        return shard, manifest.rounds

    @classmethod
    def _from_manifest(
        cls, manifest: SnapshotManifest, tensors: dict[int, dict[str, Array]], memory: SharedValues | None
    ) -> StoreShard:
        optimizers = OptimizerVersions.from_description(manifest.rules)
        shard = cls(manifest.store, manifest.server, memory, optimizers)
        shard.rounds.versions = manifest.versions
        shard.define_slices(manifest.entries)
        versions = optimizers.all_versions()
        for slice, (_, said) in manifest.slices.items():
            taken_back(shard._slices.find_slice(slice), said, tensors[slice], versions, memory)
        shard._slices.ready.update(manifest.slices)
        return shard


def _error_of(call: Callable[..., None], *arguments: Any) -> KVStoreError | MemoryError | None:
    """Call; return its error if it is one that a payload can cause."""
    try:
        call(*arguments)
    except (KVStoreError, MemoryError) as error:
        return error
    return None


def _write_table(table: TableSlice, payload: SlicePayload) -> None:
    if payload.rows >= 0:
        table.assign(some_rows(payload, table.dtype, table.start, table.shape))
    else:
        table.assign_all(plain_elements(payload, table.dtype, math.prod(table.shape)))
    if table.dtype.itemsize == 2:
        table.follow()
