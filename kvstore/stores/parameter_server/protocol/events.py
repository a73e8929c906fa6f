"""What goes into the state machines, and what comes out.

`machine.step(event, now)` takes one event and the time in seconds, of any clock that only goes forward, and
returns a list of actions, which the loop carries out in that order. A machine touches no socket, reads no
clock and draws no random number; payloads are opaque to it. `Tick` may come as often as the loop likes; ten
times a second is enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from .messages import Answer, Batch, Control, Failure, Install, KeyEntry, Kind, Met, Record, View, Welcome

#: Name of the scheduler's echo, where it is a peer.
ECHO = "echo"

# -------------------------------------------------------------------------------------------------- events


class Start(NamedTuple):
    """First event of a worker or a server: say hello to the scheduler."""


class Tick(NamedTuple):
    """Time has passed."""


class Received(NamedTuple):
    """A message came in.

    `peer` names who sent it in a way that `Send` can name it again. Scheduler: the identity of the sender's
    socket, which no other process or store ever has. Server: ``"scheduler"``, or the identity of a worker's
    data socket. Worker: ``"scheduler"``, or the rank of a server. Both: `ECHO` for what the scheduler's echo
    has sent back.
    """

    peer: Hashable
    message: Control | Batch


class Heard(NamedTuple):
    """Scheduler: a process, by the name in its `Hello`, has echoed a heartbeat."""

    process: str


class Resumed(NamedTuple):
    """Scheduler: it was started again, for the `term`-th time, and takes up what it was."""

    term: int


class SliceRequest(NamedTuple):
    """What a worker wants of one slice.

    `record` says kind, slice, version, clock, coding, threshold, rows, place, nbytes, and where place is
    SHARED also frame and offset. The machine fills in sequence and round; it counts the pushes itself.
    `payload` is put into `Batch.frames` where place is FRAME. `record.nbytes` counts against the credit, and
    so may `back`, the bytes of the answer.
    """

    server: int
    record: Record
    payload: Any = None
    back: int = 0


class Submit(NamedTuple):
    """Worker: send these requests; `Done` comes when all are answered, `SliceReceived` for each value.

    Payloads stay as they are until `Done`. `op` is the caller's name for it. Operations on one slice are
    submitted when the one before is done; a pull counts the pushes before it.
    """

    op: Any
    parts: Sequence[SliceRequest]
    priority: int = 0


class RetrySlice(NamedTuple):
    """Worker: the value in shared memory changed before it was copied; ask for it in a frame.

    `part` is the one submitted. If the `Done` of `op` is among the actions in hand, the loop drops it:
    another one comes, with its `error`.
    """

    op: Any
    index: int  # type: ignore[assignment]
    part: SliceRequest
    error: Failure | None = None


class Taken(NamedTuple):
    """Worker, without rounds: what lay in a server's memory is copied, or is asked for again in a frame.

    An action that comes after these values; the loop gives it back as an event when it gets there. Pushes
    that were submitted after a read of the same slice go out only then.
    """

    server: int
    #: Slice and round of each, as the requests counted.
    reads: Sequence[tuple[int, int]]


class SchedulerLost(NamedTuple):
    """Worker: another store of this process has found that the scheduler is lost; what one knows all know."""

    failure: Failure


class StoodStill(NamedTuple):
    """Worker: this process has done nothing for so many seconds: it was stopped, or slept."""

    seconds: float


class StreamLost(NamedTuple):
    """Worker: a stream to a server has ended, and what was on its way with it, perhaps."""

    server: int


class SchedulerRequest(NamedTuple):
    """Worker, after `Welcome`: a request to the scheduler; `Done` comes with the answer.

    CreateKeys, Lookup, Ready, Drop, Barrier, JoinRounds, Settings, Command, Leave or Bye, whatever `request`
    and `store` say. `Leave` and `Bye` have no answer: they are done when the scheduler has them.
    """

    op: Any
    message: Control


class Applied(NamedTuple):
    """Server: jobs or writes are through, each a slice and what went wrong with it.

    Every slice of an `Apply` or `Write` must come back once, in any order and any portions; until then the
    machine keeps all other requests away from the slice. A failed job leaves the value as it was. A job that
    was given up (`Abort`, `Withdraw`) comes back in `given_up`: its round never was.
    """

    store: int
    results: Sequence[tuple[int, Failure | None]]
    given_up: Sequence[int] = ()


class Saved(NamedTuple):
    """Server: the snapshot that `Save` asked for, or a later one, is on disk; or why it is not."""

    error: Failure | None = None


class Configured(NamedTuple):
    """Server: how an `Install` went (a command, too)."""

    store: int
    version: int
    error: Failure | None = None


_OfWorker = Submit | RetrySlice | Taken | SchedulerLost | StoodStill | StreamLost | SchedulerRequest
Event = Start | Tick | Received | Heard | Resumed | _OfWorker | Applied | Saved | Configured

# ------------------------------------------------------------------------------------------------- actions

# What the scheduler says and the loop has to know is an action as it is. `Met`: the scheduler knows us,
# wants signs of life, and has said where its `ECHO` is. `Welcome`: it has let us in, and requests are taken
# from now on. `View`, of a worker: a new one of the store, after that. `Install`, of a server: take in
# settings or a command, then `Configured`, before any other event.


class Send(NamedTuple):
    """Send a message. A peer that is not there any more, and a full queue, may lose it: it is sent again.

    Worker's batches: `frames` are payloads as submitted, one for each record with place FRAME, and
    `record.frame` is an index into them; the loop may pack small ones together and rewrite the places.
    """

    peer: Hashable
    message: Control | Batch


class Connect(NamedTuple):
    """Worker: open a data socket to a server, or a new one in place of the old."""

    server: int
    address: str
    incarnation: int


class Shrunk(NamedTuple):
    """Worker: sums lack one that left, whose last round of the slice, as this worker counts, was `round`."""

    rank: int
    slice: int
    round: int


class RoundsSeen(NamedTuple):
    """Worker: so many rounds of slices more are known to be complete."""

    rounds: int


class SliceReceived(NamedTuple):
    """Worker: the value that part `index` of an operation asked for; `frames` are those of the batch.

    The loop copies it where it belongs before it carries out the next action.
    """

    op: Any
    index: int  # type: ignore[assignment]
    record: Record
    frames: Sequence[Any]
    #: The round that was asked for, as the request counted.
    asked: int


class Done(NamedTuple):
    """Worker: an operation is complete, or has failed.

    After an error all its requests are settled as well, and nothing reads its payloads any more.
    """

    op: Any
    error: Failure | None = None
    answer: Answer | None = None


class Failed(NamedTuple):
    """Worker, server: this process is out (refused, fenced, or the scheduler is lost).

    All operations have got their `Done` with that error; later ones get it at once.
    """

    failure: Failure


class SliceRound(NamedTuple):
    """One round of one slice: parts in rank order as (rank, record, frames of its batch).

    No parts: all of this round, and of rounds before it, are lost with a server's memory.
    """

    slice: int
    round: int
    parts: list[tuple[int, Record, Sequence[Any]]]
    #: Highest version of the settings, and highest clock, of the parts.
    version: int
    clock: int


class Apply(NamedTuple):
    """Server: sum and update; `Applied` for each slice when it is through.

    Values that are still being sent to somebody must be sent as they were: copy, or wait for the trackers.
    A PUSH is answered before it is applied: if its payload lies in shared memory, which the worker then uses
    again, the loop has copied it before it gave it to the machine.
    """

    store: int
    jobs: list[SliceRound]


class Abort(NamedTuple):
    """Server: no more rounds; jobs that wait for others, as those of whole keys do, come back `given_up`."""

    store: int


class Withdraw(NamedTuple):
    """Server without rounds: a worker is gone, perhaps in the midst of a push.

    Its jobs that wait for its other slices come back `given_up`; jobs that wait for them are done.
    """

    store: int
    rank: int


class SliceWrite(NamedTuple):
    """An INIT, ASSIGN or PUT_STATE of one slice."""

    slice: int
    record: Record
    frames: Sequence[Any]


class Write(NamedTuple):
    """Server: carry these out, of different slices, states first; then `Applied` with all.

    FORGET is a `Forget`.
    """

    store: int
    writes: list[SliceWrite]


class Reply(NamedTuple):
    """Server: answer requests of one worker in one batch (or several).

    `answers` are (kind, request, complete round, detail). The reply's record has that kind and round and the
    request's slice and sequence. VALUE: read the slice as `request.kind` says (PULL and PUSHPULL: the value;
    PULL_ROWS: rows; FETCH_STATE: state); detail is the request's frames; if reading fails, answer FAILED.
    With ``request.flags == BY_FRAME`` the value goes into a frame. With OF_ROUND, too, and if `request.round`
    is not the complete one, the value is the one that it was then. FAILED: detail is the `Failure`.
    DONE, UNKNOWN: nothing more. `batch` has the head of the message; its records and frames are empty.
    """

    peer: Hashable
    batch: Batch
    answers: list[tuple[Kind, Record, int, Any]]


class Define(NamedTuple):
    """Server: these slices will come (its own and others')."""

    store: int
    keys: tuple[KeyEntry, ...]


class Forget(NamedTuple):
    """Server: drop these slices, or with None the whole store; an `Apply` may still be under way."""

    store: int
    slices: tuple[int, ...] | None


class Save(NamedTuple):
    """Server: write a snapshot soon, since a key has its first value; then `Saved`."""


class Attachment(NamedTuple):
    """Server: a worker is there (`memory`: the handle of its shared memory), or with None gone.

    The loop fills in `memory` of the `Attached` that is sent to it later.
    """

    store: int
    rank: int
    incarnation: int
    memory: str | None
    #: Identity of the worker's host, where the server shares memory with workers of its own host only.
    host: str = ""


class End(NamedTuple):
    """Scheduler, server: the job is over; `error` where it did not end well."""

    error: Failure | None = None


_ByWorker = Connect | View | Shrunk | RoundsSeen | SliceReceived | Taken | Done
_ByServer = Apply | Abort | Withdraw | Write | Reply | Define | Forget | Install | Save | Attachment
Action = Send | Met | Welcome | Failed | End | _ByWorker | _ByServer
