"""What a server holds for all stores, as its loop carries out what the machine wants."""

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
from ....settings.hosts import host_identity, is_beside
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
    Install,
    Kind,
    PayloadLocation,
    Record,
)
from ..protocol.payloads import ABSENT, SHARED_BYTES, as_bytes
from ..transport.shared_buffers import PeerBuffers, Values
from .payload import Payload, SliceUpdate, SliceValueWrite, opaque
from .snapshot import Folder
from .store_shard import StoreShard

log = logging.getLogger("kvstore.server")

_READ = Record(Kind.VALUE, 0, 0)
_JOB = "job"  # file that says whose the snapshots are


class ServerStorage:
    """Values, states and settings of all stores; every method is called by the one thread of the loop."""

    def __init__(self, server: int, config: PsConfig) -> None:
        self._server, self._config = server, config
        self._shards: dict[int, StoreShard] = {}
        self._values: dict[int, Values] = {}
        self._worker_buffers: dict[tuple[int, int], PeerBuffers] = {}
        #: By store and slice, whose requests (rank and sequence) the last round has answered in their memory.
        self._in_place: dict[tuple[int, int], set[tuple[int, int]]] = {}
        #: Else a server that is started again gets what was pushed again: it has to be as it was.
        self._writes_over_parts = not config.snapshot
        self._saving = False
        #: Folders of stores that were closed while a snapshot was being written.
        self._to_remove: list[Folder] = []
        if config.threads:
            cpu.set_threads(config.threads)

    def shard(self, store: int) -> StoreShard:
        """Return the shard of a store, made when first needed."""
        found = self._shards.get(store)
        if found is None:
            memory = self._values[store] = Values()
            found = self._shards[store] = StoreShard(store, self._server, memory)
        return found

    # ------------------------------------------------------------------------------------------- rounds

    def apply(self, action: events.Apply) -> events.Applied | None:
        """Sum and update; None where all rounds wait for others."""
        shard = self.shard(action.store)
        ready = shard.rounds.gather([self._job(action.store, job, shard) for job in action.jobs])
        done = self._apply(action.store, ready, shard)
        return events.Applied(action.store, done) if done else None

    def withdraw(self, action: events.Withdraw) -> events.Applied:
        """Give up what waits for slices that a worker which is gone does not push; do what waited for it."""
        shard = self.shard(action.store)
        given_up, ready = shard.rounds.withdraw(action.rank)
        return events.Applied(action.store, self._apply(action.store, ready, shard), given_up)

    def _apply(
        self, store: int, jobs: Sequence[SliceUpdate], shard: StoreShard
    ) -> list[tuple[int, Failure | None]]:
        errors = shard.rounds.apply(jobs)
        for job, error in zip(jobs, errors, strict=True):
            if error is not None or job.slice not in shard.rounds.written:
                self._in_place.pop((store, job.slice), None)
        return [
            (job.slice, None if error is None else self._failure(error))
            for job, error in zip(jobs, errors, strict=True)
        ]

    def abort(self, action: events.Abort) -> events.Applied:
        """Give up rounds of whole keys, some slices of which have none."""
        return events.Applied(action.store, [], self.shard(action.store).rounds.abort())

    def _job(self, store: int, job: events.SliceRound, shard: StoreShard) -> SliceUpdate:
        parts = [(rank, _payload(record, frames)) for rank, record, frames in job.parts]
        outs: list[Any] = []
        written = set()
        for (rank, payload), (_, record, _) in zip(parts, job.parts, strict=True):
            if self._writes_over_parts and record.flags == IN_PLACE and shard.writes_to(job.slice, payload):
                outs.append(payload.data)
                written.add((rank, record.sequence))
        self._in_place[store, job.slice] = written
        return SliceUpdate(job.slice, job.round, parts, job.version, job.clock, tuple(outs))

    def reach(self, batch: Batch) -> tuple[Batch, Mapping[int, Any]]:
        """Put what lies in shared memory beside the frames; return the segments by number, too.

        Their worker may die before they are read. Requests of one that is gone already are left out, as what
        has not come.
        """
        if not any(record.place == PayloadLocation.SHARED for record in batch.records):
            return batch, {}
        buffers = self._worker_buffers.get((batch.store, batch.rank))
        records, frames = [], list(batch.frames)
        for record in batch.records:
            if record.place == PayloadLocation.SHARED:
                memory = self._shared(buffers, batch.rank, record)
                if memory is None:
                    continue
                frames.append(memory)
                record = record._replace(frame=len(frames) - 1, offset=0)
            records.append(record)
        there = {} if buffers is None else buffers.segments
        return batch._replace(records=records, frames=tuple(frames)), there

    def _shared(self, buffers: PeerBuffers | None, rank: int, record: Record) -> Any:
        """View a payload; an error in its place fails whoever looks at it. None: its worker is gone."""
        if buffers is None:
            return ProtocolError(f"worker {rank} speaks of memory that server {self._server} cannot read")
        try:
            return buffers.view(record.frame, record.offset, record.nbytes)
        except ProtocolError as error:
            if isinstance(error.__cause__, FileNotFoundError | ProcessLookupError):
                return None
            return ProtocolError(f"server {self._server}, memory of worker {rank}: {error}")

    def reads_here(self, store: int, rank: int) -> bool:
        """Whether a worker reads this process's memory."""
        return (store, rank) in self._worker_buffers

    def held(self, store: int, slice: int) -> SliceValue | TableRows | None:
        """Return the value of a slice; None: it is not here."""
        return self.shard(store).held(slice)

    # ------------------------------------------------------------------------------------------- values

    def write(self, action: events.Write) -> events.Applied:
        """Set values, or states."""
        shard = self.shard(action.store)
        values, results = [], []
        for slice, record, frames in action.writes:
            payload = _payload(record, frames)
            if record.kind == Kind.PUT_STATE:
                results.append((slice, self._put_state(shard, slice, payload, record.version)))
            else:
                values.append(SliceValueWrite(slice, payload, record.kind == Kind.INIT))
        errors = shard.write(values)
        for (slice, _, _), error in zip(values, errors, strict=True):
            results.append((slice, None if error is None else self._failure(error)))
        return events.Applied(action.store, results)

    def _put_state(self, shard: StoreShard, slice: int, payload: Payload, ordinal: int) -> Failure | None:
        try:
            shard.put_state(slice, opaque(payload), ordinal)
        except (KVStoreError, MemoryError) as error:
            return self._failure(error)
        return None

    def read(
        self, store: int, rank: int, request: Record, frames: Sequence[Any], steady: bool, past: bool = False
    ) -> tuple[Record, list[Any]]:
        """Find what is asked for: place, rows, nbytes, and buffers where place is FRAME.

        Live memory only where `steady`: the value stays as it is until the worker has it. `past`: as it was
        after round `request.round`, which is not the last.
        """
        shard = self.shard(store)
        written = request.flags == IN_PLACE and self._was_written(store, rank, request)
        if written or request.flags == WRITTEN:
            return _READ._replace(flags=IN_PLACE), []
        if past:
            return self._past(shard, request, frames)
        if request.kind == Kind.FETCH_STATE:
            return _state_found(shard.fetch_state(request.slice))
        if request.kind == Kind.PULL_ROWS or shard.is_table(request.slice):
            return self._rows(shard, request, frames)
        if request.flags not in (BY_FRAME, OF_ROUND) and (store, rank) in self._worker_buffers:
            place = shard.place(request.slice)
            if place is not None and place.nbytes >= SHARED_BYTES:
                found = _READ._replace(place=PayloadLocation.SHARED, frame=place.segment, offset=place.offset)
                return found._replace(nbytes=place.nbytes, flags=place.seqlock), []
        value = shard.read(request.slice)
        if not steady:
            value = value.copy()
        return _READ._replace(place=PayloadLocation.FRAME, nbytes=value.nbytes), [as_bytes(value)]

    def _was_written(self, store: int, rank: int, request: Record) -> bool:
        """Whether the round has written its value over what was pushed; that counts for one answer."""
        written = self._in_place.get((store, request.slice), set())
        there = (rank, request.sequence) in written
        written.discard((rank, request.sequence))
        return there

    def _past(self, shard: StoreShard, request: Record, frames: Sequence[Any]) -> tuple[Record, list[Any]]:
        """Find what was there after a round that is not the last."""
        if request.kind == Kind.FETCH_STATE:
            return _state_found(shard.past_state(request.slice, request.round))
        found = shard.past(request.slice, request.round, _ids(request, frames))
        if isinstance(found, tuple):
            absent = shard.absent(request.slice, request.round) if request.kind == Kind.PULL else None
            return _rows_found(*found, absent)
        return _READ._replace(place=PayloadLocation.FRAME, nbytes=found.nbytes), [as_bytes(found)]

    def _rows(self, shard: StoreShard, request: Record, frames: Sequence[Any]) -> tuple[Record, list[Any]]:
        ids = _ids(request, frames)
        if ids is not None and (found := shard.gathered(request.slice, ids)) is not None:
            record = _READ._replace(
                place=PayloadLocation.FRAME, rows=len(ids), nbytes=ids.nbytes + found.nbytes
            )
            return record, [as_bytes(ids), found]
        there, rows = shard.rows(request.slice, ids)
        return _rows_found(there, rows, shard.absent(request.slice) if ids is None else None)

    def _failure(self, error: Exception) -> Failure:
        """Say what workers are told of an error."""
        if isinstance(error, MemoryError):
            text = f"server {self._server} has too little memory: {str(error) or type(error).__name__}"
            return Failure("KVStoreError", f"{text}; start more servers (-s), or raise its limit (ulimit -v)")
        name = type(error).__name__ if isinstance(error, KVStoreError) else "KVStoreError"
        return Failure(name, str(error) or type(error).__name__)

    # --------------------------------------------------------------------------------------------- rest

    def set_rank(self, rank: int) -> None:
        """Learn which server this is."""
        self._server = rank

    def define(self, action: events.Define) -> None:
        """Expect slices."""
        self.shard(action.store).define(action.keys)

    def forget(self, action: events.Forget) -> None:
        """Drop slices, or a store."""
        if action.slices is not None:
            self.shard(action.store).forget(action.slices)
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
            folder = Folder(self._folder(action.store))
            if self._saving:
                self._to_remove.append(folder)
            else:
                folder.remove()

    def configure(self, install: Install) -> Failure | None:
        """Install settings, or log a command; return a failure that names this server."""
        if install.kind == "command":
            log.info("command %d: %s", install.head, install.text)
            return None
        try:
            shard = self.shard(install.store)
            settings = SettingsAt(install.ordinal, install.text, install.epoch, install.keeps_states)
            shard.install(install.since, settings)
        except KVStoreError as error:
            failure = self._failure(error)
            return Failure(failure.error, f"server {self._server}: {failure.text}")
        return None

    def attach(self, action: events.Attachment) -> str:
        """Open a worker's memory; where that goes, it may read the values here."""
        key = action.store, action.rank
        old = self._worker_buffers.pop(key, None)
        if old is not None:
            old.close()
        beside = not action.host or is_beside(action.host, host_identity())
        buffers = PeerBuffers.open(action.memory, writes=True) if action.memory and beside else None
        if buffers is None:
            return ""
        self._worker_buffers[key] = buffers
        self.shard(action.store)
        return self._values[action.store].handle()

    def check_snapshots(self) -> None:
        """Raise StateFileError if snapshots are wanted, and nothing can be written to their folder."""
        if not self._config.snapshot:
            return
        folder = self._root if self._server >= 0 else Path(self._config.snapshot)
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

    def save(self, machine: dict[str, Any]) -> Callable[[], None]:
        """Note each shard as it is, with what the machine knows of the store; return what writes it all.

        That writes what can be written, and raises the first error, also that there was no memory to note a
        shard. `end_snapshot` has to follow.
        """
        writes: list[Callable[[], None]] = []
        errors: list[Exception] = []
        for state in machine["stores"]:
            with _noting(errors, MemoryError):
                writes.append(self.shard(state["store"]).capture(self._folder(state["store"]), state))
        self._saving = True

        def write() -> None:
            for one in writes:
                with _noting(errors, Exception):
                    one()
            if errors:
                raise errors.pop(0)

        return write

    def end_snapshot(self) -> None:
        """Know that nothing is written any more: remove the folders of stores that were closed meanwhile."""
        self._saving = False
        while self._to_remove:
            self._to_remove.pop().remove()

    def begin_snapshots(self, job: str) -> None:
        """Make the folder this job's: snapshots of an earlier one count no more."""
        (self._root / _JOB).unlink(missing_ok=True)  # first, in case of a kill: both jobs may have one name
        for old in self._root.glob("store-*"):
            log.info("%s is of an earlier job, and is removed", old)
            Folder(old).remove()
        self._root.mkdir(parents=True, exist_ok=True)
        write_with_checksum(self._root / _JOB, _fingerprint(job))

    def restore(self, job: str) -> dict[str, Any]:
        """Take up this job's last snapshots, and return what the machine wants to find again.

        Raises StateFileError for one that is damaged. A store has none whose first one is not complete, or
        whose last one was being removed.
        """
        states: list[dict[str, Any]] = []
        whose = self._root / _JOB
        if not whose.exists() or read_with_checksum(whose) != _fingerprint(job):
            log.warning(
                "server %d comes back without a snapshot: this job has none in %s", self._server, self._root
            )
            return {"stores": states}
        for path in sorted(self._root.glob("store-*")):
            folder = Folder(path)
            if not folder.is_there():
                log.warning("%s has no complete snapshot, and is removed", path)
                folder.remove()
                continue
            memory = Values()
            shard, state = StoreShard.restore(path, memory)
            store = int(state["store"])
            self._values[store], self._shards[store] = memory, shard
            states.append(state)
        return {"stores": states}

    @property
    def _root(self) -> Path:
        return Path(self._config.snapshot) / f"server-{self._server}"

    def _folder(self, store: int) -> Path:
        return self._root / f"store-{store}"

    def close(self) -> None:
        """Let everything go; no snapshot is being written."""
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
def _noting(errors: list[Exception], kind: type[Exception]) -> Iterator[None]:
    """Add to `errors` what the body raises, without the frames, which hold copies of values."""
    try:
        yield
    except kind as error:
        errors.append(error.with_traceback(None))


def _fingerprint(job: str) -> bytes:
    """Return what tells jobs apart, as JSON, and not the name, with which others could take part."""
    return f'"{hashlib.sha256(job.encode()).hexdigest()}"'.encode()


def _ids(request: Record, frames: Sequence[Any]) -> Any:
    """Ids of the rows that are asked for; None: all. ProtocolError: they have not come with the request."""
    if request.kind != Kind.PULL_ROWS:
        return None
    ids = _one(request, frames)[: request.rows * 8] if request.place == PayloadLocation.FRAME else b""
    if request.rows < 0 or len(ids) != request.rows * 8:
        raise ProtocolError(
            f"{request.rows} rows of slice {request.slice} are asked for by {len(ids)} bytes of ids; "
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


def _one(record: Record, frames: Sequence[Any]) -> memoryview:
    view = memoryview(frames[record.frame]).cast("B")
    return view[record.offset : record.offset + record.nbytes]


def _payload(record: Record, frames: Sequence[Any]) -> Payload:
    """Find a payload; an error in its place fails whoever looks at it."""
    data: Any = b""
    if record.place == PayloadLocation.SHARED:
        memory = frames[record.frame]
        wrong = isinstance(memory, ProtocolError)
        data = memory if wrong else memory[record.offset : record.offset + record.nbytes]
    elif record.place == PayloadLocation.FRAME:
        data = _of_frames(record, frames)
    return Payload(data, record.coding, record.threshold, record.rows)


def _of_frames(record: Record, frames: Sequence[Any]) -> Any:
    """View a payload as one buffer; rows in two frames as two."""
    first = memoryview(frames[record.frame]).cast("B")
    if record.rows >= 0 and first.nbytes < record.offset + record.nbytes:
        ids = first[record.offset : record.offset + record.rows * 8]
        rest = record.nbytes - record.rows * 8
        return ids, memoryview(frames[record.frame + 1]).cast("B")[:rest]
    return first[record.offset : record.offset + record.nbytes]
