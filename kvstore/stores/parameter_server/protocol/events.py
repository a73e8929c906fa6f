"""The events and actions of the state machines.

`machine.step(event, now)` receives one event and the time in seconds, of any monotonic clock, and returns a
list of actions, which the loop executes in that order. A machine uses no socket, no clock and no random
numbers, and does not read payloads. The loop may send `TickEvent` at any rate; ten times a second is enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from .messages import (
    Batch,
    Control,
    Failure,
    HelloReply,
    InstallRequest,
    KeyEntry,
    MemberReply,
    Record,
    RecordKind,
    ViewNotice,
    WelcomeNotice,
)

#: Name of the scheduler's echo, where it is a peer.
ECHO = "echo"

# -------------------------------------------------------------------------------------------------- events


class StartEvent(NamedTuple):
    """First event of a worker or a server: send `HelloRequest` to the scheduler."""


class TickEvent(NamedTuple):
    """Time has passed."""


class MessageReceived(NamedTuple):
    """A message arrived.

    `peer` is the sender, in the form that `SendMessage` accepts. Scheduler: the identity of the sender's
    socket, which is unique for ever. Server: ``"scheduler"``, or the identity of a worker's data socket.
    Worker: ``"scheduler"``, or the rank of a server. Worker and server: `ECHO` for messages that the
    scheduler's echo has returned.
    """

    peer: Hashable
    message: Control | Batch


class HeartbeatReceived(NamedTuple):
    """Scheduler: a process, by the name in its `HelloRequest`, has echoed a heartbeat."""

    process: str


class SchedulerRestarted(NamedTuple):
    """Scheduler: it was restarted, for the `term`-th time, and continues from its journal."""

    term: int


class SliceRequest(NamedTuple):
    """A worker's request about one slice.

    The caller sets kind, slice, version, clock, coding, threshold, rows, place and nbytes of `record`, and
    also frame and offset where place is SHARED. The machine sets sequence and round; it counts the pushes.
    `payload` is put into `Batch.frames` where place is FRAME. `record.nbytes` counts against the credit, and
    so does `back`, the bytes of the reply, where the caller sets it.
    """

    server: int
    record: Record
    payload: Any = None
    back: int = 0


class SubmitRequests(NamedTuple):
    """Worker: send requests; the machine returns `SliceReceived` for each value, then `OperationDone`.

    Payloads must not change until `OperationDone`. `op` is the caller's name of the operation. An operation
    on a slice is submitted only when the operation before it on that slice is done; a pull counts the pushes
    before it.
    """

    op: Any
    parts: Sequence[SliceRequest]
    priority: int = 0


class RetrySlice(NamedTuple):
    """Worker: the value in shared memory changed before it was copied; request it again in a frame.

    `part` is the request that was submitted. If the `OperationDone` of `op` is among the actions that the
    loop is executing, the loop drops it: the machine returns another `OperationDone` later, with `error`.
    """

    op: Any
    index: int  # type: ignore[assignment]
    part: SliceRequest
    error: Failure | None = None


class ReadsCopied(NamedTuple):
    """Worker, without rounds: values in a server's memory are copied, or requested again in a frame.

    The machine returns it as an action behind these values; the loop passes it back as an event when it
    reaches it. Pushes that were submitted after a read of the same slice are sent only then.
    """

    server: int
    #: Slice and round of each, as the requests counted.
    reads: Sequence[tuple[int, int]]


class SchedulerLost(NamedTuple):
    """Worker: another store of this process has found that the scheduler is lost."""

    failure: Failure


class StoodStill(NamedTuple):
    """Worker: this process has not run for so many seconds: it was stopped, or the machine was suspended."""

    seconds: float


class StreamLost(NamedTuple):
    """Worker: a stream to a server has ended; messages in flight on it may be lost."""

    server: int


class SchedulerRequest(NamedTuple):
    """Worker, after `WelcomeNotice`: a request to the scheduler; `OperationDone` has its answer.

    `message` is a `MemberRequest`, a `LeaveNotice` or a `ProcessEndNotice`; the machine sets `request` and
    `store`. The two notices have no reply: they are done when the scheduler has received them.
    """

    op: Any
    message: Control


class JobsApplied(NamedTuple):
    """Server: the loop has executed jobs or writes; each result is a slice and its failure, if any.

    The loop returns every slice of an `ApplyRounds` or `WriteSlices` once, in any order and number of events;
    until then the machine lets no other request use the slice. A failed job leaves the value as it was. A job
    that was cancelled (`AbortJobs`, `WithdrawJobs`) is listed in `given_up`: its round has no effect.
    """

    store: int
    results: Sequence[tuple[int, Failure | None]]
    given_up: Sequence[int] = ()


class SnapshotSaved(NamedTuple):
    """Server: the snapshot that `SaveSnapshot` requested, or a later one, is on disk; or the error."""

    error: Failure | None = None


class InstallDone(NamedTuple):
    """Server: the result of an `InstallRequest`, also of a command."""

    store: int
    version: int
    error: Failure | None = None


_OfWorker = (
    SubmitRequests | RetrySlice | ReadsCopied | SchedulerLost | StoodStill | StreamLost | SchedulerRequest
)
Event = (
    StartEvent
    | TickEvent
    | MessageReceived
    | HeartbeatReceived
    | SchedulerRestarted
    | _OfWorker
    | JobsApplied
    | SnapshotSaved
    | InstallDone
)

# ------------------------------------------------------------------------------------------------- actions

# A message of the scheduler that the loop has to know is an action without change. `HelloReply`: the
# scheduler knows this process, expects heartbeats, and has named the address of its `ECHO`. `WelcomeNotice`:
# this process is admitted, and requests are accepted from now on. `ViewNotice`, of a worker: a later view of
# the store. `InstallRequest`, of a server: apply settings or a command, then pass `InstallDone` before any
# other event.


class SendMessage(NamedTuple):
    """Send a message. If the peer has ended or its queue is full, the message may be lost; it is repeated.

    Batches of a worker: `frames` are the submitted payloads, one for each record with place FRAME, and
    `record.frame` is an index into them; the loop may pack small payloads together and change the places.
    """

    peer: Hashable
    message: Control | Batch


class ConnectServer(NamedTuple):
    """Worker: open a data socket to a server; it replaces an earlier one."""

    server: int
    address: str
    incarnation: int


class RoundsShrunk(NamedTuple):
    """Worker: rounds of the slice after `round`, in this worker's count, lack a worker that left."""

    rank: int
    slice: int
    round: int


class RoundsSeen(NamedTuple):
    """Worker: this number of further rounds of slices is known to be complete."""

    rounds: int


class SliceReceived(NamedTuple):
    """Worker: the value for part `index` of an operation; `frames` are those of the batch.

    The loop copies the value to its destination before it executes the next action.
    """

    op: Any
    index: int  # type: ignore[assignment]
    record: Record
    frames: Sequence[Any]
    #: The requested round, in the count of the request.
    asked: int


class OperationDone(NamedTuple):
    """Worker: an operation is complete, or has failed.

    After an error all its requests are finished too, and nothing reads its payloads any more.
    """

    op: Any
    error: Failure | None = None
    answer: MemberReply | None = None


class ProcessFailed(NamedTuple):
    """Worker, server: this process can not continue (refused, fenced, or the scheduler is lost).

    All operations have received their `OperationDone` with that error; later operations receive it at once.
    """

    failure: Failure


class SliceRound(NamedTuple):
    """One round of one slice: parts in rank order as (rank, record, frames of its batch).

    No parts: all parts of this round, and of earlier rounds, were lost with a server's memory.
    """

    slice: int
    round: int
    parts: list[tuple[int, Record, Sequence[Any]]]
    #: The highest version of the settings, and the highest clock, of the parts.
    version: int
    clock: int


class ApplyRounds(NamedTuple):
    """Server: sum and update; the loop passes `JobsApplied` for each slice when it is done.

    A value that is still being sent must be sent unchanged: copy it, or wait for the trackers. A PUSH is
    answered before it is applied: if its payload lies in shared memory, which the worker then reuses, the
    loop has copied it before it passed it to the machine.
    """

    store: int
    jobs: list[SliceRound]


class AbortJobs(NamedTuple):
    """Server: apply no more rounds; jobs that wait for others, as jobs of whole keys do, are `given_up`."""

    store: int


class WithdrawJobs(NamedTuple):
    """Server without rounds: a worker is lost, perhaps between the parts of one push.

    Its jobs that wait for its other slices are `given_up`; jobs that wait for those jobs are executed.
    """

    store: int
    rank: int


class SliceWrite(NamedTuple):
    """An INIT, ASSIGN or PUT_STATE of one slice."""

    slice: int
    record: Record
    frames: Sequence[Any]


class WriteSlices(NamedTuple):
    """Server: execute these writes, of different slices, states first; then pass `JobsApplied` with all.

    For FORGET there is the action `ForgetSlices`.
    """

    store: int
    writes: list[SliceWrite]


class SendReplies(NamedTuple):
    """Server: answer requests of one worker in one batch, or in several.

    `answers` are (kind, request, complete round, detail). The reply's record has that kind and round, and the
    request's slice and sequence. VALUE: read the slice as `request.kind` requires (PULL and PUSHPULL: the
    value; PULL_ROWS: rows; FETCH_STATE: state); detail is the request's frames; if reading fails, answer
    FAILED. With ``request.flags == BY_FRAME`` the value is sent in a frame. With OF_ROUND it is also sent in
    a frame, and if `request.round` is not the complete round, it is the value after `request.round`. FAILED:
    detail is the `Failure`. DONE, UNKNOWN: no detail. `batch` has the head of the message; its records and
    frames are empty.
    """

    peer: Hashable
    batch: Batch
    answers: list[tuple[RecordKind, Record, int, Any]]


class DefineSlices(NamedTuple):
    """Server: announce slices that workers will use (of this server and of others)."""

    store: int
    keys: tuple[KeyEntry, ...]


class ForgetSlices(NamedTuple):
    """Server: drop these slices, or with None the whole store; an `ApplyRounds` may still be in progress."""

    store: int
    slices: tuple[int, ...] | None


class SaveSnapshot(NamedTuple):
    """Server: write a snapshot soon, because a key has its first value; then pass `SnapshotSaved`."""


class WorkerAttachment(NamedTuple):
    """Server: a worker has attached (`memory`: the handle of its shared memory), or with None has left.

    The loop sets `memory` of the `AttachReply` that is sent to the worker afterwards.
    """

    store: int
    rank: int
    incarnation: int
    memory: str | None
    #: Identity of the worker's host, where the server shares memory with workers of its own host only.
    host: str = ""


class JobEnded(NamedTuple):
    """Scheduler, server: the job has ended; `error` where it ended with an error."""

    error: Failure | None = None


_ByWorker = (
    ConnectServer | ViewNotice | RoundsShrunk | RoundsSeen | SliceReceived | ReadsCopied | OperationDone
)
_ByServer = (
    ApplyRounds
    | AbortJobs
    | WithdrawJobs
    | WriteSlices
    | SendReplies
    | DefineSlices
    | ForgetSlices
    | InstallRequest
    | SaveSnapshot
    | WorkerAttachment
)
Action = SendMessage | HelloReply | WelcomeNotice | ProcessFailed | JobEnded | _ByWorker | _ByServer
