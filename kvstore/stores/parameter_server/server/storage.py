"""The values, optimizer states and settings of all stores of a server, with their snapshots."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ....atomic_files import read_with_checksum, write_with_checksum
from ....errors import KVStoreError, ProtocolError, StateFileError
from ....kernels import cpu
from ....optimizer.settings_log import SettingsAt
from ....settings.hosts import host_identity, is_same_host
from ....settings.parameter_server import PsConfig
from ..native._native import SliceValue, TableRows
from ..protocol import events
from ..protocol.messages import (
    BY_FRAME,
    IN_PLACE,
    OF_ROUND,
    WRITTEN,
    Batch,
    Failure,
    InstallRequest,
    PayloadLocation,
    Record,
    RecordKind,
)
from ..protocol.payload_bytes import ABSENT, SHARED_BYTES, as_bytes
from ..transport.shared_buffers import PeerBuffers, SharedValues
from .payload import SlicePayload, SliceUpdate, SliceValueWrite, opaque_bytes
from .snapshot import SnapshotFolder
from .store_shard import StoreShard

log = logging.getLogger("kvstore.server")

_READ = Record(RecordKind.VALUE, 0, 0)
_JOB = "job"  # file that identifies the job of the snapshots


class ServerStorage:
    """The data of a server; every method is called by the loop's thread."""

    def __init__(self, server: int, config: PsConfig) -> None:
        self._server, self._config = server, config
        self._shards: dict[int, StoreShard] = {}
        self._values: dict[int, SharedValues] = {}
        self._worker_buffers: dict[tuple[int, int], PeerBuffers] = {}
        #: By store and slice, the requests (rank, sequence) whose memory the last round has written.
        self._in_place: dict[tuple[int, int], set[tuple[int, int]]] = {}
        #: With snapshots, a restarted server receives pushes again: pushed arrays must not change.
        self._writes_over_parts = not config.snapshot
        self._saving = False
        #: Folders of stores that were closed while a snapshot is written.
        self._to_remove: list[SnapshotFolder] = []
        if config.threads:
            cpu.set_threads(config.threads)

    def store_shard(self, store: int) -> StoreShard:
        """Return the shard of a store, a new one if there is none."""
        found = self._shards.get(store)
        if found is None:
            memory = self._values[store] = SharedValues()
            found = self._shards[store] = StoreShard(store, self._server, memory)
        return found

    # ------------------------------------------------------------------------------------------- rounds

    def apply_rounds(self, action: events.ApplyRounds) -> events.JobsApplied | None:
        """Sum and update; None where all rounds wait for others."""
        shard = self.store_shard(action.store)
        ready = shard.rounds.applicable_jobs(
            [self._slice_update(action.store, job, shard) for job in action.jobs]
        )
        done = self._apply_jobs(action.store, ready, shard)
        return events.JobsApplied(action.store, done) if done else None

    def withdraw_jobs(self, action: events.WithdrawJobs) -> events.JobsApplied:
        """Cancel jobs that wait for slices of a lost worker; execute the jobs that waited for those."""
        shard = self.store_shard(action.store)
        given_up, ready = shard.rounds.whole_keys.withdraw_jobs(action.rank)
        return events.JobsApplied(action.store, self._apply_jobs(action.store, ready, shard), given_up)

    def _apply_jobs(
        self, store: int, jobs: Sequence[SliceUpdate], shard: StoreShard
    ) -> list[tuple[int, Failure | None]]:
        errors = shard.rounds.apply_jobs(jobs)
        for job, error in zip(jobs, errors, strict=True):
            if error is not None or job.slice not in shard.rounds.written:
                self._in_place.pop((store, job.slice), None)
        return [
            (job.slice, None if error is None else self._error_failure(error))
            for job, error in zip(jobs, errors, strict=True)
        ]

    def abort_jobs(self, action: events.AbortJobs) -> events.JobsApplied:
        """Cancel rounds of whole keys for which some slices have no job."""
        return events.JobsApplied(
            action.store, [], self.store_shard(action.store).rounds.whole_keys.abort_jobs()
        )

    def _slice_update(self, store: int, job: events.SliceRound, shard: StoreShard) -> SliceUpdate:
        parts = [(rank, _payload_of(record, frames)) for rank, record, frames in job.parts]
        outs: list[Any] = []
        written = set()
        for (rank, payload), (_, record, _) in zip(parts, job.parts, strict=True):
            if self._writes_over_parts and record.flags == IN_PLACE and shard.writes_to(job.slice, payload):
                outs.append(payload.data)
                written.add((rank, record.sequence))
        self._in_place[store, job.slice] = written
        return SliceUpdate(job.slice, job.round, parts, job.version, job.clock, tuple(outs))

    def add_shared_payloads(self, batch: Batch) -> tuple[Batch, Mapping[int, Any]]:
        """Add payloads in shared memory to the frames; return the segments by number, too.

        Their worker may end before they are read. Requests of a worker that has ended are omitted, as if they
        had not arrived.
        """
        if not any(record.place == PayloadLocation.SHARED for record in batch.records):
            return batch, {}
        buffers = self._worker_buffers.get((batch.store, batch.rank))
        records, frames = [], list(batch.frames)
        for record in batch.records:
            if record.place == PayloadLocation.SHARED:
                memory = self._shared_view(buffers, batch.rank, record)
                if memory is None:
                    continue
                frames.append(memory)
                record = record._replace(frame=len(frames) - 1, offset=0)
            records.append(record)
        there = {} if buffers is None else buffers.segments
        return batch._replace(records=records, frames=tuple(frames)), there

    def _shared_view(self, buffers: PeerBuffers | None, rank: int, record: Record) -> Any:
        """View a payload; or return an error, which fails its job. None: its worker has ended."""
        if buffers is None:
            return ProtocolError(f"worker {rank} refers to memory that server {self._server} cannot read")
        try:
            return buffers.view_block(record.frame, record.offset, record.nbytes)
        except ProtocolError as error:
            if isinstance(error.__cause__, FileNotFoundError | ProcessLookupError):
                return None
            return ProtocolError(f"server {self._server}, memory of worker {rank}: {error}")

    def reads_here(self, store: int, rank: int) -> bool:
        """Return whether a worker maps this process's memory."""
        return (store, rank) in self._worker_buffers

    def slice_value(self, store: int, slice: int) -> SliceValue | TableRows | None:
        """Return the value of a slice; None: this server does not have it."""
        return self.store_shard(store).held_slice(slice)

    # ------------------------------------------------------------------------------------------- values

    def write_slices(self, action: events.WriteSlices) -> events.JobsApplied:
        """Assign values, or states."""
        shard = self.store_shard(action.store)
        values, results = [], []
        for slice, record, frames in action.writes:
            payload = _payload_of(record, frames)
            if record.kind == RecordKind.PUT_STATE:
                results.append((slice, self._put_state(shard, slice, payload, record.version)))
            else:
                values.append(SliceValueWrite(slice, payload, record.kind == RecordKind.INIT))
        errors = shard.write_values(values)
        for (slice, _, _), error in zip(values, errors, strict=True):
            results.append((slice, None if error is None else self._error_failure(error)))
        return events.JobsApplied(action.store, results)

    def _put_state(
        self, shard: StoreShard, slice: int, payload: SlicePayload, ordinal: int
    ) -> Failure | None:
        try:
            shard.put_state(slice, opaque_bytes(payload), ordinal)
        except (KVStoreError, MemoryError) as error:
            return self._error_failure(error)
        return None

    def read_slice(
        self, store: int, rank: int, request: Record, frames: Sequence[Any], steady: bool, past: bool = False
    ) -> tuple[Record, list[Any]]:
        """Return the place, rows and nbytes of a reply, and its buffers where place is FRAME.

        Live memory only where `steady`: the value does not change before the worker has it. `past`: read the
        value after round `request.round`, which is not the last.
        """
        shard = self.store_shard(store)
        written = request.flags == IN_PLACE and self._was_written(store, rank, request)
        if written or request.flags == WRITTEN:
            return _READ._replace(flags=IN_PLACE), []
        if past:
            return self._read_past(shard, request, frames)
        if request.kind == RecordKind.FETCH_STATE:
            return _state_found(shard.fetch_state(request.slice))
        if request.kind == RecordKind.PULL_ROWS or shard.is_table(request.slice):
            return self._read_rows(shard, request, frames)
        if request.flags not in (BY_FRAME, OF_ROUND) and (store, rank) in self._worker_buffers:
            place = shard.shared_location(request.slice)
            if place is not None and place.nbytes >= SHARED_BYTES:
                found = _READ._replace(place=PayloadLocation.SHARED, frame=place.segment, offset=place.offset)
                return found._replace(nbytes=place.nbytes, flags=place.seqlock), []
        value = shard.read_value(request.slice)
        if not steady:
            value = value.copy()
        return _READ._replace(place=PayloadLocation.FRAME, nbytes=value.nbytes), [as_bytes(value)]

    def _was_written(self, store: int, rank: int, request: Record) -> bool:
        """Return whether the round has written its value over a pushed array; True only for one reply."""
        written = self._in_place.get((store, request.slice), set())
        there = (rank, request.sequence) in written
        written.discard((rank, request.sequence))
        return there

    def _read_past(
        self, shard: StoreShard, request: Record, frames: Sequence[Any]
    ) -> tuple[Record, list[Any]]:
        """Read the value after a round that is not the last."""
        if request.kind == RecordKind.FETCH_STATE:
            return _state_found(shard.fetch_state(request.slice, request.round))
        found = shard.past_value(request.slice, request.round, _requested_ids(request, frames))
        if isinstance(found, tuple):
            absent = (
                shard.absent_row(request.slice, request.round) if request.kind == RecordKind.PULL else None
            )
            return _rows_found(*found, absent)
        return _READ._replace(place=PayloadLocation.FRAME, nbytes=found.nbytes), [as_bytes(found)]

    def _read_rows(
        self, shard: StoreShard, request: Record, frames: Sequence[Any]
    ) -> tuple[Record, list[Any]]:
        ids = _requested_ids(request, frames)
        if ids is not None and (found := shard.gather_rows(request.slice, ids)) is not None:
            record = _READ._replace(
                place=PayloadLocation.FRAME, rows=len(ids), nbytes=ids.nbytes + found.nbytes
            )
            return record, [as_bytes(ids), found]
        there, rows = shard.read_rows(request.slice, ids)
        return _rows_found(there, rows, shard.absent_row(request.slice) if ids is None else None)

    def _error_failure(self, error: Exception) -> Failure:
        """Return the failure that workers receive for an error."""
        if isinstance(error, MemoryError):
            text = f"server {self._server} has too little memory: {str(error) or type(error).__name__}"
            return Failure("KVStoreError", f"{text}; start more servers (-s), or raise its limit (ulimit -v)")
        name = type(error).__name__ if isinstance(error, KVStoreError) else "KVStoreError"
        return Failure(name, str(error) or type(error).__name__)

    # --------------------------------------------------------------------------------------------- rest

    def set_rank(self, rank: int) -> None:
        """Set the rank of this server."""
        self._server = rank

    def define_slices(self, action: events.DefineSlices) -> None:
        """Add slices that workers will use."""
        self.store_shard(action.store).define_slices(action.keys)

    def forget_slices(self, action: events.ForgetSlices) -> None:
        """Drop slices, or a store."""
        if action.slices is not None:
            self.store_shard(action.store).forget_slices(action.slices)
            for slice_ in action.slices:
                self._in_place.pop((action.store, slice_), None)
            return
        self._in_place = {key: one for key, one in self._in_place.items() if key[0] != action.store}
        shard = self._shards.pop(action.store, None)
        if shard is not None:
            shard.close()
        values = self._values.pop(action.store, None)
        if values is not None:
            values.close()
        for store, rank in [key for key in self._worker_buffers if key[0] == action.store]:
            self._worker_buffers.pop((store, rank)).close()
        if self._config.snapshot:
            folder = SnapshotFolder(self._store_folder(action.store))
            if self._saving:
                self._to_remove.append(folder)
            else:
                folder.remove_files()

    def install_settings(self, install: InstallRequest) -> Failure | None:
        """Install settings, or log a command; a failure names this server."""
        if install.kind == "command":
            log.info("command %d: %s", install.head, install.text)
            return None
        try:
            shard = self.store_shard(install.store)
            settings = SettingsAt(install.ordinal, install.text, install.epoch, install.keeps_states)
            shard.install_settings(install.since, settings)
        except KVStoreError as error:
            failure = self._error_failure(error)
            return Failure(failure.error, f"server {self._server}: {failure.text}")
        return None

    def attach_worker(self, action: events.WorkerAttachment) -> str:
        """Open the memory of a worker; if that succeeds, the worker can read the values of this server."""
        key = action.store, action.rank
        old = self._worker_buffers.pop(key, None)
        if old is not None:
            old.close()
        same_host = not action.host or is_same_host(action.host, host_identity())
        buffers = PeerBuffers.open(action.memory, writes=True) if action.memory and same_host else None
        if buffers is None:
            return ""
        self._worker_buffers[key] = buffers
        self.store_shard(action.store)
        return self._values[action.store].handle()

    def check_snapshots(self) -> None:
        """Raise StateFileError if there should be snapshots, and their folder cannot be written."""
        if not self._config.snapshot:
            return
        folder = self._root_folder if self._server >= 0 else Path(self._config.snapshot)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            who = f"server {self._server}" if self._server >= 0 else "this server"
            raise StateFileError(
                f"{who} cannot write snapshots to {folder}: {error.strerror or error}. Give it a folder to "
                "which it may write (--snapshot, KVSTORE_SNAPSHOT)"
            ) from error

    def capture_stores(self, machine: dict[str, Any]) -> Callable[[], None]:
        """Capture each shard, with the machine's state of the store; return a function that writes them all.

        It writes as much as possible, and raises the first error, also that a shard could not be captured for
        lack of memory. `end_snapshot` has to follow.
        """
        writes: list[Callable[[], None]] = []
        errors: list[Exception] = []
        for state in machine["stores"]:
            with _collect_error(errors, MemoryError):
                writes.append(
                    self.store_shard(state["store"]).capture(self._store_folder(state["store"]), state)
                )
        self._saving = True

        def write() -> None:
            for one in writes:
                with _collect_error(errors, Exception):
                    one()
            if errors:
                raise errors.pop(0)

        return write

    def end_snapshot(self) -> None:
        """End a snapshot: remove the folders of stores that were closed while it was written."""
        self._saving = False
        while self._to_remove:
            self._to_remove.pop().remove_files()

    def begin_snapshots(self, job: str) -> None:
        """Prepare the folder for this job: snapshots of an earlier job are removed."""
        (self._root_folder / _JOB).unlink(
            missing_ok=True
        )  # first: after a kill, both jobs may have the same name
        for old in self._root_folder.glob("store-*"):
            log.info("%s is of an earlier job, and is removed", old)
            SnapshotFolder(old).remove_files()
        self._root_folder.mkdir(parents=True, exist_ok=True)
        write_with_checksum(self._root_folder / _JOB, _job_fingerprint(job))

    def restore_stores(self, job: str) -> dict[str, Any]:
        """Read this job's last snapshots, and return the machine's state.

        Raises StateFileError for a damaged snapshot. A store has none if its first one is not complete, or
        its last one was being removed.
        """
        states: list[dict[str, Any]] = []
        whose = self._root_folder / _JOB
        if not whose.exists() or read_with_checksum(whose) != _job_fingerprint(job):
            log.warning(
                "server %d restarts without a snapshot: this job has none in %s",
                self._server,
                self._root_folder,
            )
            return {"stores": states}
        for path in sorted(self._root_folder.glob("store-*")):
            folder = SnapshotFolder(path)
            if not folder.is_there():
                log.warning("%s has no complete snapshot, and is removed", path)
                folder.remove_files()
                continue
            memory = SharedValues()
            shard, state = StoreShard.restore(path, memory)
            store = int(state["store"])
            self._values[store], self._shards[store] = memory, shard
            states.append(state)
        return {"stores": states}

    @property
    def _root_folder(self) -> Path:
        return Path(self._config.snapshot) / f"server-{self._server}"

    def _store_folder(self, store: int) -> Path:
        return self._root_folder / f"store-{store}"

    def close(self) -> None:
        """Release all memory; no snapshot is being written."""
        self.end_snapshot()
        for shard in self._shards.values():
            shard.close()
        for memory in self._values.values():
            memory.close()
        for buffers in self._worker_buffers.values():
            buffers.close()
        self._shards.clear()
        self._values.clear()
        self._worker_buffers.clear()


@contextmanager
def _collect_error(errors: list[Exception], kind: type[Exception]) -> Iterator[None]:
    """Add the body's exception to `errors`, without its frames, which hold copies of values."""
    try:
        yield
    except kind as error:
        errors.append(error.with_traceback(None))


def _job_fingerprint(job: str) -> bytes:
    """Return a text that identifies a job, as JSON, but not its name, with which others could take part."""
    return f'"{hashlib.sha256(job.encode()).hexdigest()}"'.encode()


def _requested_ids(request: Record, frames: Sequence[Any]) -> Any:
    """Return the requested row ids; None: all. ProtocolError: they are not in the request."""
    if request.kind != RecordKind.PULL_ROWS:
        return None
    ids = (
        _payload_view(request, frames)[: request.rows * 8] if request.place == PayloadLocation.FRAME else b""
    )
    if request.rows < 0 or len(ids) != request.rows * 8:
        raise ProtocolError(
            f"{request.rows} rows of slice {request.slice} are requested by {len(ids)} bytes of ids; "
            "the request was not carried out"
        )
    return np.frombuffer(ids, np.int64).copy()


def _state_found(state: bytes) -> tuple[Record, list[Any]]:
    return _READ._replace(place=PayloadLocation.FRAME, nbytes=len(state)), [state]


def _rows_found(ids: Any, rows: Any, absent: Any = None) -> tuple[Record, list[Any]]:
    if absent is not None:
        ids = np.concatenate([np.array([ABSENT]), ids])
        rows = np.concatenate([absent.reshape(1, -1), rows])
    record = _READ._replace(place=PayloadLocation.FRAME, rows=len(ids), nbytes=ids.nbytes + rows.nbytes)
    return record, [as_bytes(ids), as_bytes(rows)]


def _payload_view(record: Record, frames: Sequence[Any]) -> memoryview:
    view = memoryview(frames[record.frame]).cast("B")
    return view[record.offset : record.offset + record.nbytes]


def _payload_of(record: Record, frames: Sequence[Any]) -> SlicePayload:
    """Return a payload; an error in its place fails the job."""
    data: Any = b""
    if record.place == PayloadLocation.SHARED:
        memory = frames[record.frame]
        wrong = isinstance(memory, ProtocolError)
        data = memory if wrong else memory[record.offset : record.offset + record.nbytes]
    elif record.place == PayloadLocation.FRAME:
        data = _of_frames(record, frames)
    return SlicePayload(data, record.coding, record.threshold, record.rows)


def _of_frames(record: Record, frames: Sequence[Any]) -> Any:
    """View a payload as one buffer; rows in two frames as two."""
    first = memoryview(frames[record.frame]).cast("B")
    if record.rows >= 0 and first.nbytes < record.offset + record.nbytes:
        ids = first[record.offset : record.offset + record.rows * 8]
        rest = record.nbytes - record.rows * 8
        return ids, memoryview(frames[record.frame + 1]).cast("B")[:rest]
    return first[record.offset : record.offset + record.nbytes]
