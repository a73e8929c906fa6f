"""What the processes of a parameter server tell each other.

Control messages are msgspec structs, each with a tag. Data messages are a `Batch` of records with their
payloads beside them; `transport.frames` says how both look on the wire. State machines, the simulator and
the loops use these types as they are.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple

import msgspec

#: Limits that the decoder holds before anything is made of what came in.
_INT64 = msgspec.Meta(ge=-(2**63), le=2**63 - 1)
_SIZE = msgspec.Meta(ge=0, le=2**63 - 1)

#: Most bytes of a key as UTF-8, and most dimensions of its shape.
KEY_BYTES, DIMENSIONS = 1024, 64
Key = Annotated[int, _INT64] | Annotated[str, msgspec.Meta(max_length=KEY_BYTES)]
Shape = Annotated[tuple[Annotated[int, _SIZE], ...], msgspec.Meta(max_length=DIMENSIONS)]
#: Value of an option. Nothing nested: what is read takes some 30 times the bytes it came in at most.
Option = str | int | float | bool

#: Payloads up to this size are copied as they are sent; of larger ones the caller's memory is.
COPIED = 16 * 1024

#: A server takes a request only if its number is at most so far above the oldest one that has not arrived.
SPAN = 262144

#: Version of everything in this file; processes of another version are refused.
PROTOCOL = 11


class Kind(enum.IntEnum):
    """What a record asks for, or answers."""

    INIT = 1  # first value of a slice; answered by DONE; on a slice that has one nothing happens
    ASSIGN = 2  # overwrite a slice between rounds; DONE
    PUSH = 3  # one worker's part of a round; DONE when it is accepted
    PULL = 4  # the value after round `round` of this worker; VALUE
    PUSHPULL = 5  # both; VALUE when the round is complete
    PULL_ROWS = 6  # payload: int64 ids; VALUE with the rows
    FETCH_STATE = 7  # optimizer's state of a slice, packed; VALUE
    PUT_STATE = 8  # DONE
    FORGET = 9  # drop a slice; DONE
    LAST_ROUND = 10  # DONE, which names the last round, once no more will be complete
    SEAL = 11  # refuse pushes into a slice that moves, unless parts of a round wait in it; DONE
    UNSEAL = 12  # take pushes again; DONE
    DONE = 20
    VALUE = 21
    FAILED = 22  # payload: msgpack of `Failure`
    UNKNOWN = 23  # a request sent again without its payload never came: send all of it
    BAD = 30  # never sent: what a server reads where a request is not in the protocol


class PayloadLocation(enum.IntEnum):
    """Where the payload of a record is."""

    NONE = 0
    FRAME = 1  # frame `frame` of the message, from `offset`
    SHARED = 2  # segment `frame` of the sender's shared memory, from `offset`


class Record(NamedTuple):
    """One request or reply about one slice."""

    kind: Kind
    slice: int
    #: Counts the requests of one worker to one server from 1; a reply repeats it.
    sequence: int
    #: Requests: how many pushes of this worker into the slice there are, with this one. Replies: the last
    #: round that is complete.
    round: int = 0
    #: The newest settings that the worker knows (`Answer.version`); of a round the highest counts. Of a
    #: state: the ordinal of its optimizer (`Install.ordinal`).
    version: int = 0
    #: A stamp of `UpdateClock`, which holds the time of a schedule; of a round the highest counts.
    clock: int = 0
    #: 0: plain elements; `kernels.cpu.DIVIDED`: these count divided by `threshold`; else a codec's number.
    coding: int = 0
    threshold: float = 0.0
    #: Row-sparse payloads: int64 ids of so many rows, then the rows; else -1.
    rows: int = -1
    place: PayloadLocation = PayloadLocation.NONE
    frame: int = 0
    offset: int = 0
    nbytes: int = 0
    #: One of BY_FRAME, PROBE, IN_PLACE, OF_ROUND and PACKED, or 0; of a reply in shared memory its `seqlock`.
    flags: int = 0

    @property
    def seqlock(self) -> int:
        """Of a reply in shared memory: what the slice's seqlock says while this value stands."""
        return self.flags


#: Where some of a record's fields stand, for loops in which access by name costs too much.
KIND: Final = 0
SLICE: Final = 1
SEQUENCE: Final = 2
ROUND: Final = 3
PLACE: Final = 9
NBYTES: Final = 12
FLAGS: Final = 13

#: `Record.flags` of a request whose answer must not lie in shared memory.
BY_FRAME = 1
#: `Record.flags` of a request sent again without its payload, to learn whether it came.
PROBE = 2
#: `Record.flags` of a PUSHPULL in shared memory whose value may be written over what was pushed, and of an
#: answer that has no payload because it was.
IN_PLACE = 3
#: `Record.flags` of a read that wants the value as it was after round `round`, last or not.
OF_ROUND = 4
#: `Record.flags` of a read whose answer may be the parts of the round, one behind the other in rank order,
#: each packed as the answer's `coding` and `threshold` say. Their sum is the value.
PACKED = 5
#: Never sent: at a server, of an IN_PLACE request whose value has been written over what was pushed.
WRITTEN = 1 << 63


class Batch(NamedTuple):
    """A data message: records of one worker and one server, and the payloads they speak of."""

    store: int
    rank: int
    #: Tells one process of a rank from the next.
    incarnation: int
    epoch: int
    records: list[Record]
    #: Buffers; a record's `frame` is an index into them.
    frames: tuple[Any, ...] = ()
    #: Replies: bytes of this worker's requests that the server has taken in so far, of all messages.
    received: int = 0


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request failed: the name of a class in `kvstore.errors`, and its text."""

    error: str
    text: str
    role: str = ""
    """Of a `PeerLostError`: who, and for how many seconds nobody has heard of it."""
    rank: int = -1
    silent: float | None = None


def another_optimizer(where: str, rank: int, text: str) -> str:
    """Return the text of a failure: a worker wants another optimizer than worker `rank` has set."""
    told = f"{where} has another optimizer already; set the same one on all workers"
    return f"{told}\n{msgspec.json.encode((rank, text)).decode()}"


def optimizer_there(failure: str) -> tuple[int, str] | None:
    """Return the rank and the text that `another_optimizer` has put into a text; None for other texts."""
    try:
        return msgspec.json.decode(failure.partition("\n")[2], type=tuple[int, str])
    except msgspec.DecodeError:
        return None


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process in a view."""

    rank: int
    incarnation: int
    address: str = ""


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """A process that is lost."""

    role: str
    rank: int
    #: Seconds since the scheduler last heard of it.
    silent: float


class Slice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a key on one server: elements (dense) or rows (row-sparse) `start` to `stop`."""

    id: int
    server: int
    start: int
    stop: int


class KeySpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key as its initializer describes it."""

    key: Key
    shape: Shape
    dtype: str
    sparse: bool = False
    whole: bool = False
    """All of it belongs on one server; of a key that is spread, its initializer wants to move it."""


class KeyEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key and where its slices are; `ready`: every slice has a value."""

    spec: KeySpec
    #: Place in the order of init.
    number: int
    slices: tuple[Slice, ...]
    ready: bool

    @property
    def line(self) -> int:
        """Elements of a line: rows that are pushed to a dense key travel as lines, each within one slice."""
        return math.gcd(math.prod(self.spec.shape[1:]), *(part.start for part in self.slices))

    def names(self) -> Iterator[tuple[int, str]]:
        """Yield each slice with a name: that of the key, and where it is cut which part of it."""
        name, n = str(self.spec.key), len(self.slices)
        for at, part in enumerate(self.slices, 1):
            yield part.id, name if n == 1 else f"{name} (part {at} of {n})"


# ------------------------------------------------------------------------------------ anyone -> scheduler


class Hello(msgspec.Struct, frozen=True, tag=True):
    """I am here. A worker says so for each of its stores, a server once."""

    role: str
    rank: int
    """-1: give me one."""
    incarnation: int
    process: str
    """Names the process; heartbeats and `Bye` carry it too."""
    job: str
    protocol: int
    address: str = ""
    """Where a server's data socket is."""
    group: str = ""
    ordinal: int = 0
    """A worker's store: the `ordinal`-th of its group."""
    options: dict[str, Option] = {}
    """What all workers of a store must agree on: mode, on_peer_loss, slice_bytes, and hierarchy if any."""
    restarted: bool = False
    """A server that comes back from a snapshot."""
    host: str = ""
    """Of a worker that asks for a hierarchy: the same text in all workers that share memory."""
    version: str = ""
    """Of the sender's kvstore."""


class Bye(msgspec.Struct, frozen=True, tag=True):
    """The process ends."""

    process: str
    lost: bool = False
    """It has failed: the others are to be told of its loss."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The worker closes its store."""

    store: int
    lost: bool = False
    """It has failed, and so have the rounds that wait for it."""
    last: bool = False
    """It is the last of its host, as far as that knows, and servers have all that the host has pushed."""


class MemberRequest(msgspec.Struct, frozen=True, tag=True):
    """What a worker asks for; `Answer` repeats the number."""

    request: int
    store: int


class JoinRounds(MemberRequest, frozen=True, tag=True):
    """The worker has no more batches; all its pushes are accepted."""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """A worker that took the place of a lost one is about to push for the first time: into this slice."""

    store: int
    slice: int


class JoinPointReached(msgspec.Struct, frozen=True, tag="Reached"):
    """The worker is about to push into the slice that `View.begin` names, in the view of this epoch."""

    store: int
    epoch: int
    pushed: tuple[tuple[int, int], ...]
    """(slice, round): its last push into each slice until then."""


class Barrier(MemberRequest, frozen=True, tag=True):
    """Worker at its `number`-th barrier."""

    number: int


class CreateKeys(MemberRequest, frozen=True, tag="Found"):
    """The initializer wants these keys placed."""

    keys: tuple[KeySpec, ...]


class Ready(MemberRequest, frozen=True, tag=True):
    """These keys have their values."""

    keys: tuple[Key, ...]
    error: Failure | None = None
    """Of keys that were to move to one server: why they stay where they are."""


class Lookup(MemberRequest, frozen=True, tag=True):
    """A worker wants to know keys; without any, all that are ready."""

    keys: tuple[Key, ...]
    wait: bool = True
    """Answer when all of them are ready; else at once, with those that are."""


class Count(MemberRequest, frozen=True, tag=True):
    """Ask how many processes of the job are lost, or have not been heard of for so many seconds."""

    seconds: float


class Drop(MemberRequest, frozen=True, tag=True):
    """Forget keys."""

    keys: tuple[Key, ...]
    error: Failure | None = None
    """Why they have no first values, for workers that wait for these; keys that have values stay then."""


class Settings(MemberRequest, frozen=True, tag=True):
    """Install an optimizer (the first of equals does, another one is an error), or change its settings."""

    kind: str
    """``"optimizer"``, ``"none"``, ``"configure"``, ``"counts"`` (update counts as a file has them) or
    ``"steps"`` (states are kept for one more round)."""
    ordinal: int
    """How many optimizers this worker has set, with this one."""
    text: str
    """An optimizer; of ``"configure"`` its settings that change; else empty."""
    place: int = 0
    """How many calls in which all workers take part this worker has made: two requests of one place in the
    same program are one."""


class Command(MemberRequest, frozen=True, tag=True):
    """`send_command_to_servers`."""

    head: int
    body: str


class Installed(msgspec.Struct, frozen=True, tag=True):
    """A server has settings or a command; `error`: why not. `version` is that of `Install`."""

    store: int
    version: int
    error: Failure | None = None


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Are you there? Either way."""

    number: int
    """The answer repeats it: 0, or of who compares clocks its own time in ns."""


# ------------------------------------------------------------------------------------ scheduler -> anyone


class Met(msgspec.Struct, frozen=True, tag=True):
    """Your hello has come; the others may still be missing."""

    pulse: str = ""
    """Where the scheduler listens for signs of life."""
    echo: str = ""
    """Where it gives its own: it sends everything back, whatever it is busy with."""
    absence: float = 0.0
    """Seconds that it may be away, since it can be started again; 0: silence is the end of it."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """All are there. To a server, `store` is -1 and the view empty."""

    store: int
    rank: int
    size: int
    epoch: int
    members: tuple[Member, ...]
    servers: tuple[Member, ...]
    returned: bool = False
    """This worker takes the place of a lost one."""
    late: tuple[int, ...] = ()
    """As in `View`."""
    seats: tuple[tuple[int, int], ...] = ()
    """As in `View`."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Go away: a class of `kvstore.errors`, and why; of a `PeerLostError` also who."""

    error: str
    text: str
    role: str = ""
    rank: int = -1
    silent: float | None = None


class View(msgspec.Struct, frozen=True, tag=True):
    """Who takes part from now on. Epochs only grow."""

    store: int
    epoch: int
    members: tuple[Member, ...]
    """Workers that are there."""
    resting: tuple[int, ...]
    """Those for which no round waits: they have joined; some may have left since the view before this one."""
    losses: tuple[Loss, ...]
    """All losses so far that nobody has replaced."""
    servers: tuple[Member, ...]
    broken: bool = False
    """on_peer_loss is "raise" and somebody is lost, or a server is for good: rounds end, writes raise."""
    mode: str = "sync"
    """``"sync"`` or ``"async"``; never changes."""
    late: tuple[int, ...] = ()
    """Members that took the place of lost ones and have not begun to push: no round and no barrier waits."""
    begin: int = -1
    """Slice into which one of them will push first. Whoever else comes to it says `JoinPointReached`."""
    begun: int = -1
    """Rank that is late no more, since all others have reached where it begins."""
    bases: tuple[tuple[int, int], ...] = ()
    """(slice, round): the last round of each slice that goes on without `begun`."""
    seats: tuple[tuple[int, int], ...] = ()
    """(rank, seat) where hosts push and not workers: a worker pushes for its host, which has the lowest rank
    of its workers as its seat. Empty where each worker pushes for itself."""
    whole: tuple[int, ...] = ()
    """Seats of hosts whose last worker has left: servers have all of their parts, and keep them."""
    settled: tuple[tuple[int, int], ...] = ()
    """(rank, version): the newest settings that a worker in `resting` knew. Rounds that it is not in have
    these or newer ones."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """To a request of a worker; which of the fields are filled depends on it."""

    request: int
    entries: tuple[KeyEntry, ...] = ()
    version: int = 0
    """The settings that hold; see `Record.version`."""
    text: str = ""
    error: Failure | None = None
    count: int = 0
    """Of settings at a barrier: how many optimizers were set, with that of `text`."""
    epoch: int = 0
    """As in `Install`."""


class Install(msgspec.Struct, frozen=True, tag=True):
    """To servers: settings of a store, or a command."""

    store: int
    version: int
    """Counts what servers are told."""
    kind: str
    """``"settings"``, ``"command"``, or ``"drop"`` (slices in `text`; none: a store that all left)."""
    text: str
    """Of settings: the optimizer; empty: there is none."""
    head: int = 0
    since: int = 0
    """The settings hold for pushes of this version on, up to the next one; see `Record.version`. They replace
    others."""
    ordinal: int = 0
    """How many optimizers were set, with this one; states belong to one of them."""
    epoch: int = 0
    """How often the update counts were set, with an optimizer or by a file: see `UpdateClock`."""
    keeps_states: bool = False
    """Whether states are kept for one more round, as values are: a step can be withdrawn."""


class Slices(msgspec.Struct, frozen=True, tag=True):
    """To servers: what the slices are that will come; before the initializer knows of them."""

    store: int
    keys: tuple[KeyEntry, ...]


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Yes."""

    number: int
    time: int = 0
    """The scheduler's: what its clock shows, in ns."""


class Over(msgspec.Struct, frozen=True, tag=True):
    """To servers: the job is over."""

    error: str = ""


# ------------------------------------------------------------------------------------- worker -> server


class Attach(msgspec.Struct, frozen=True, tag=True):
    """First message of a worker to a server, and again after either was replaced: who I am, what I have.

    A worker that came back says it once more when it has begun, to learn in which rounds.
    `accepted` lists (slice, round): its last push that was answered, for a server that comes back. What the
    server has forgotten of these is lost with the interval since its snapshot, and nobody waits for it.
    """

    store: int
    rank: int
    incarnation: int
    epoch: int
    job: str
    accepted: tuple[tuple[int, int], ...] = ()
    met: bool = False
    """Knows its bases, of this server or of the one whose place it has taken: `accepted` is all there is."""
    late: bool = False
    """As far as the worker knows it has not begun; see `View.late`."""
    memory: str = ""
    """Where this process's shared memory is, if it offers any; see `transport.shared_buffers`."""
    report: int = 1 << 20
    """Bytes of requests after which it is told that they have come, if no answer tells it."""
    host: str = ""
    """Of a worker that pushes for its host: its identity. Servers of other hosts share no memory with it."""
    next: Annotated[int, _SIZE] = 1
    """Sequence of its next new request; for a server that comes back, as is `unanswered`."""
    unanswered: tuple[Annotated[int, _SIZE], ...] = ()
    """Those below it without an answer. The others never come again: no request waits for them."""


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The server takes requests of this worker now."""

    incarnation: int
    memory: str = ""
    """Where the server's values are, if it could read the worker's memory."""
    epoch: int = 0
    """Of a view that the worker knew when it attached, or later."""
    bases: tuple[tuple[int, int], ...] = ()
    """(slice, round): these rounds go on without this worker; its first push belongs to the next."""
    stream: str = ""
    """Where the worker can open a stream, its token and secret; see `transport.streams`."""

    def __repr__(self) -> str:
        """Leave out what is secret."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "stream"}
        return f"Attached({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class Fenced(msgspec.Struct, frozen=True, tag=True):
    """You are not a member any more, or not yet one."""

    epoch: int
    text: str


class Who(msgspec.Struct, frozen=True, tag=True):
    """Ask whom round `round` of this slice waits for."""

    store: int
    slice: int
    round: int


class Missing(msgspec.Struct, frozen=True, tag=True):
    """Ranks of workers that have not pushed into it, or of processes that have not come."""

    store: int
    slice: int
    round: int
    ranks: tuple[int, ...]
    servers: tuple[int, ...] = ()


class LeftOut(msgspec.Struct, frozen=True, tag=True):
    """To workers, once: rounds of this slice go on without a worker that left and had not joined."""

    store: int
    slice: int
    rank: int
    round: int
    """The last one that it was in."""


_OfMember = JoinRounds | Barrier | CreateKeys | Ready | Lookup | Count | Drop | Settings | Command
ToScheduler = Hello | Bye | Leave | Begin | JoinPointReached | Installed | Ping | Pong | _OfMember
FromScheduler = Met | Welcome | Refused | View | Answer | Install | Slices | Pong | Over | Ping
Direct = Attach | Attached | Fenced | Who | Missing | LeftOut


class ReliableMessage(msgspec.Struct, frozen=True, tag="Letter"):
    """Everything between the scheduler and the others, either way: numbered, so that it can be sent again."""

    number: int
    """From 1; 0: only to say what has come, or `Fenced` to somebody who is no longer known."""
    seen: int
    """All messages of the other side up to this one have come."""
    body: ToScheduler | FromScheduler | Fenced | Who | Missing | None = None
    term: int = 0
    """How often the scheduler was started: its own, or the highest that the other side has heard of."""


Control = ToScheduler | FromScheduler | Direct | ReliableMessage
