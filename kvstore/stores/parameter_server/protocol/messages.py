"""The messages between the processes of a parameter server.

Control messages are msgspec structs, each with a tag. A request is answered by a reply, a notice is not. The
tags are older than the names of the classes, and do not change with these. A data message is a `Batch` of
records with their payloads; `transport.frames` defines the bytes of both. State machines, the simulator and
the loops use these types directly.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from typing import Annotated, Any, Final, NamedTuple

import msgspec

#: Limits that the decoder checks before it creates an object.
_INT64 = msgspec.Meta(ge=-(2**63), le=2**63 - 1)
_SIZE = msgspec.Meta(ge=0, le=2**63 - 1)

#: Most bytes of a key as UTF-8, and most dimensions of its shape.
KEY_BYTES, DIMENSIONS = 1024, 64
Key = Annotated[int, _INT64] | Annotated[str, msgspec.Meta(max_length=KEY_BYTES)]
Shape = Annotated[tuple[Annotated[int, _SIZE], ...], msgspec.Meta(max_length=DIMENSIONS)]
#: Value of an option. Nothing nested: a decoded message then needs at most some 30 times its bytes.
Option = str | int | float | bool

#: Payloads up to this size are copied when they are sent; larger ones are sent from the caller's memory.
COPIED = 16 * 1024

#: A server accepts a request only if its number is at most this far above the oldest that has not arrived.
SPAN = 262144

#: Version of everything in this file; processes of another version are refused.
PROTOCOL = 11


class RecordKind(enum.IntEnum):
    """The kind of a request or a reply."""

    INIT = 1  # first value of a slice; reply DONE; no effect on a slice that has a value
    ASSIGN = 2  # overwrite a slice between rounds; reply DONE
    PUSH = 3  # one worker's part of a round; reply DONE when it is accepted
    PULL = 4  # the value after round `round` of this worker; reply VALUE
    PUSHPULL = 5  # both; reply VALUE when the round is complete
    PULL_ROWS = 6  # payload: int64 ids; reply VALUE with the rows
    FETCH_STATE = 7  # optimizer's state of a slice, packed; reply VALUE
    PUT_STATE = 8  # set the optimizer's state of a slice; reply DONE
    FORGET = 9  # drop a slice; reply DONE
    LAST_ROUND = 10  # reply DONE, which names the last round, once no further round can be complete
    SEAL = 11  # refuse pushes into a slice that moves, unless parts of a round wait in it; reply DONE
    UNSEAL = 12  # accept pushes again; reply DONE
    DONE = 20
    VALUE = 21
    FAILED = 22  # payload: msgpack of `Failure`
    UNKNOWN = 23  # the request that a PROBE names has not arrived: send it again with its payload
    BAD = 30  # never sent: stands at a server for a request of no known kind


class PayloadLocation(enum.IntEnum):
    """Where the payload of a record is."""

    NONE = 0
    FRAME = 1  # frame `frame` of the message, from `offset`
    SHARED = 2  # segment `frame` of the sender's shared memory, from `offset`


class Record(NamedTuple):
    """One request or reply about one slice."""

    kind: RecordKind
    slice: int
    #: The number of the request, from 1 for each worker and server; a reply repeats it.
    sequence: int
    #: Requests: the number of pushes of this worker into the slice, its own included. Replies: the last round
    #: that is complete.
    round: int = 0
    #: The newest settings that the worker knows (`MemberReply.version`); a round uses the highest of its
    #: parts. Of a state: the ordinal of its optimizer (`InstallRequest.ordinal`).
    version: int = 0
    #: A stamp of `UpdateClock`, the time of a schedule; a round uses the highest of its parts.
    clock: int = 0
    #: 0: plain elements; `kernels.cpu.DIVIDED`: elements to be divided by `threshold`; else a codec's number.
    coding: int = 0
    threshold: float = 0.0
    #: Row-sparse payloads: the number of rows; the payload is their int64 ids, then the rows. Else -1.
    rows: int = -1
    place: PayloadLocation = PayloadLocation.NONE
    frame: int = 0
    offset: int = 0
    nbytes: int = 0
    #: One of BY_FRAME, PROBE, IN_PLACE, OF_ROUND and PACKED, or 0; of a reply in shared memory its `seqlock`.
    flags: int = 0

    @property
    def seqlock(self) -> int:
        """Of a reply in shared memory: the value of the slice's seqlock while this value is valid."""
        return self.flags


#: Indexes of some of a record's fields, for loops in which access by name costs too much.
KIND: Final = 0
SLICE: Final = 1
SEQUENCE: Final = 2
ROUND: Final = 3
PLACE: Final = 9
NBYTES: Final = 12
FLAGS: Final = 13

#: `Record.flags` of a request whose reply must not lie in shared memory.
BY_FRAME = 1
#: `Record.flags` of a request that is repeated without its payload, to find out whether it has arrived.
PROBE = 2
#: `Record.flags` of a PUSHPULL in shared memory whose value may overwrite the pushed array, and of a reply
#: without payload because it did.
IN_PLACE = 3
#: `Record.flags` of a read that requires the value after round `round`, whether it is the last round or not.
OF_ROUND = 4
#: `Record.flags` of a read whose reply may be the parts of the round, one after the other in rank order, each
#: packed as the reply's `coding` and `threshold` say. Their sum is the value.
PACKED = 5
#: Never sent: at a server, of an IN_PLACE request whose value has overwritten the pushed array.
WRITTEN = 1 << 63


class Batch(NamedTuple):
    """A data message: records of one worker and one server, and their payloads."""

    store: int
    rank: int
    #: Distinguishes the successive processes of a rank.
    incarnation: int
    epoch: int
    records: list[Record]
    #: Buffers; a record's `frame` is an index into them.
    frames: tuple[Any, ...] = ()
    #: Replies: bytes of this worker's requests that the server has received so far, in all messages.
    received: int = 0


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The reason of a failed request: the name of a class in `kvstore.errors`, and its text."""

    error: str
    text: str
    role: str = ""
    """Of a `PeerLostError`: the lost process, and the seconds since its last heartbeat."""
    rank: int = -1
    silent: float | None = None


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A process in a view."""

    rank: int
    incarnation: int
    address: str = ""


class Loss(msgspec.Struct, frozen=True, array_like=True):
    """A process that is lost."""

    role: str
    rank: int
    #: Seconds since the scheduler last received from it.
    silent: float


class Slice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a key on one server: elements (dense) or rows (row-sparse) `start` to `stop`."""

    id: int
    server: int
    start: int
    stop: int


class KeySpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key as its initializer declares it."""

    key: Key
    shape: Shape
    dtype: str
    sparse: bool = False
    whole: bool = False
    """All of it belongs on one server; a key that is spread over servers is to be moved to one."""


class KeyEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A key and its slices; `ready`: every slice has a value."""

    spec: KeySpec
    #: Position in the order of init.
    number: int
    slices: tuple[Slice, ...]
    ready: bool

    @property
    def line(self) -> int:
        """Elements of a line: pushed rows of a dense key travel as lines, each within one slice."""
        return math.gcd(math.prod(self.spec.shape[1:]), *(part.start for part in self.slices))

    def slice_names(self) -> Iterator[tuple[int, str]]:
        """Yield each slice with a name: the key, and which part of it where the key is divided."""
        name, n = str(self.spec.key), len(self.slices)
        for at, part in enumerate(self.slices, 1):
            yield part.id, name if n == 1 else f"{name} (part {at} of {n})"


# ---------------------------------------------------------------------------------- any role -> scheduler


class HelloRequest(msgspec.Struct, frozen=True, tag="Hello"):
    """The process has started. A worker sends it for each of its stores, a server once."""

    role: str
    rank: int
    """-1: the scheduler assigns one."""
    incarnation: int
    process: str
    """The name of the process; heartbeats and `ProcessEndNotice` carry it too."""
    job: str
    protocol: int
    address: str = ""
    """The address of a server's data socket."""
    group: str = ""
    ordinal: int = 0
    """A worker's store: the `ordinal`-th of its group."""
    options: dict[str, Option] = {}
    """The options on which all workers of a store must agree: mode, on_peer_loss, slice_bytes, hierarchy."""
    restarted: bool = False
    """A server that restarts from a snapshot."""
    host: str = ""
    """Of a worker that requests a hierarchy: the same text in all workers that share memory."""
    version: str = ""
    """The version of the sender's kvstore."""


class ProcessEndNotice(msgspec.Struct, frozen=True, tag="Bye"):
    """The process ends."""

    process: str
    lost: bool = False
    """It has failed: the scheduler reports its loss to the other processes."""


class LeaveNotice(msgspec.Struct, frozen=True, tag="Leave"):
    """The worker closes its store."""

    store: int
    lost: bool = False
    """It has failed, and so have the rounds that wait for it."""
    last: bool = False
    """It is the last worker of its host, to its knowledge, and servers have all that the host has pushed."""


class MemberRequest(msgspec.Struct, frozen=True, tag=True):
    """A request of a worker; `MemberReply` repeats its number."""

    request: int
    store: int


class JoinRequest(MemberRequest, frozen=True, tag="JoinRounds"):
    """The worker has no more batches; all its pushes are accepted."""


class RejoinBeginNotice(msgspec.Struct, frozen=True, tag="Begin"):
    """A worker that replaced a lost one is about to push for the first time: into this slice."""

    store: int
    slice: int


class JoinPointNotice(msgspec.Struct, frozen=True, tag="Reached"):
    """The worker is about to push into the slice that `ViewNotice.begin` names, in the view of this epoch."""

    store: int
    epoch: int
    pushed: tuple[tuple[int, int], ...]
    """(slice, round): its last push into each slice up to here."""


class BarrierRequest(MemberRequest, frozen=True, tag="Barrier"):
    """The worker has reached its `number`-th barrier."""

    number: int


class CreateKeysRequest(MemberRequest, frozen=True, tag="Found"):
    """The initializer requests the placement of these keys."""

    keys: tuple[KeySpec, ...]


class KeysReadyRequest(MemberRequest, frozen=True, tag="Ready"):
    """These keys have their values."""

    keys: tuple[Key, ...]
    error: Failure | None = None
    """Of keys that were to move to one server: the reason why they have not moved."""


class LookupRequest(MemberRequest, frozen=True, tag="Lookup"):
    """A worker requests the entries of keys; without any, of all that are ready."""

    keys: tuple[Key, ...]
    wait: bool = True
    """Answer when all of them are ready; else at once, with those that are."""


class LostCountRequest(MemberRequest, frozen=True, tag="Count"):
    """Request the number of processes of the job that are lost, or have been silent for `seconds`."""

    seconds: float


class DropKeysRequest(MemberRequest, frozen=True, tag="Drop"):
    """Forget keys."""

    keys: tuple[Key, ...]
    error: Failure | None = None
    """Why they have no first values, for workers that wait for these; keys with values stay then."""


class SettingsRequest(MemberRequest, frozen=True, tag="Settings"):
    """Install an optimizer (equal ones count once, a different one is an error), or change settings."""

    kind: str
    """``"optimizer"``, ``"none"``, ``"configure"``, ``"counts"`` (update counts as a file has them) or
    ``"steps"`` (states are stored for one more round)."""
    ordinal: int
    """How many optimizers this worker has set, with this one."""
    text: str
    """An optimizer; of ``"configure"`` the changed settings; else empty."""
    place: int = 0
    """The number of calls of all workers together that this worker has made: in one program, two requests
    with the same place are the same request."""


class CommandRequest(MemberRequest, frozen=True, tag="Command"):
    """`send_command_to_servers`."""

    head: int
    body: str


class InstallReply(msgspec.Struct, frozen=True, tag="Installed"):
    """A server has applied settings or a command, or `error` is the reason why not.

    `version` is that of the `InstallRequest`.
    """

    store: int
    version: int
    error: Failure | None = None


class PingRequest(msgspec.Struct, frozen=True, tag="Ping"):
    """A request for a sign of life, in either direction."""

    number: int
    """The answer repeats it: 0, or the sender's time in ns where it compares clocks."""


# ---------------------------------------------------------------------------------- scheduler -> any role


class HelloReply(msgspec.Struct, frozen=True, tag="Met"):
    """The hello has arrived; other processes may still be missing."""

    pulse: str = ""
    """The address at which the scheduler receives heartbeats."""
    echo: str = ""
    """The address of the scheduler's echo, which returns every message even while the scheduler works."""
    absence: float = 0.0
    """Seconds that the scheduler may be absent, because it can be restarted; 0: its silence ends the job."""


class WelcomeNotice(msgspec.Struct, frozen=True, tag="Welcome"):
    """All processes have arrived. To a server, `store` is -1 and the view is empty."""

    store: int
    rank: int
    size: int
    epoch: int
    members: tuple[Member, ...]
    servers: tuple[Member, ...]
    returned: bool = False
    """This worker replaces a lost one."""
    late: tuple[int, ...] = ()
    """As in `ViewNotice`."""
    seats: tuple[tuple[int, int], ...] = ()
    """As in `ViewNotice`."""


class RefusalNotice(msgspec.Struct, frozen=True, tag="Refused"):
    """The process is refused: a class of `kvstore.errors` and the reason; of a `PeerLostError` the peer."""

    error: str
    text: str
    role: str = ""
    rank: int = -1
    silent: float | None = None


class ViewNotice(msgspec.Struct, frozen=True, tag="View"):
    """The members from now on. Epochs only grow."""

    store: int
    epoch: int
    members: tuple[Member, ...]
    """Workers that take part."""
    resting: tuple[int, ...]
    """Workers that no round waits for: they have joined; some may have left since the previous view."""
    losses: tuple[Loss, ...]
    """All losses so far without a replacement."""
    servers: tuple[Member, ...]
    broken: bool = False
    """on_peer_loss is "raise" and a process is lost, or a server is lost for good: writes raise."""
    mode: str = "sync"
    """``"sync"`` or ``"async"``; never changes."""
    late: tuple[int, ...] = ()
    """Members that replaced lost ones and have not pushed yet: no round and no barrier waits for them."""
    begin: int = -1
    """Slice into which one of them will push first. Every other worker that reaches it sends
    `JoinPointNotice`."""
    begun: int = -1
    """Rank that is late no more, because all others have reached its join point."""
    bases: tuple[tuple[int, int], ...] = ()
    """(slice, round): the last round of each slice without `begun`."""
    seats: tuple[tuple[int, int], ...] = ()
    """(rank, seat) where hosts push and not workers: a worker pushes for its host, whose seat is the lowest
    rank of its workers. Empty where each worker pushes for itself."""
    whole: tuple[int, ...] = ()
    """Seats of hosts whose last worker has left: servers have received all of their parts, and keep them."""
    settled: tuple[tuple[int, int], ...] = ()
    """(rank, version): the newest settings that a worker in `resting` knew. Rounds without it use these or
    newer ones."""


class MemberReply(msgspec.Struct, frozen=True, tag="Answer"):
    """The answer to a request of a worker; the request determines which fields are set."""

    request: int
    entries: tuple[KeyEntry, ...] = ()
    version: int = 0
    """The settings in effect; see `Record.version`."""
    text: str = ""
    error: Failure | None = None
    count: int = 0
    """Of settings at a barrier: the number of optimizers that were set, with that of `text`."""
    epoch: int = 0
    """As in `InstallRequest`."""


class InstallRequest(msgspec.Struct, frozen=True, tag="Install"):
    """To servers: settings of a store, or a command."""

    store: int
    version: int
    """Counts the messages to servers."""
    kind: str
    """``"settings"``, ``"command"``, or ``"drop"`` (slices in `text`; none: a store that all have left)."""
    text: str
    """Of settings: the optimizer; empty: none."""
    head: int = 0
    since: int = 0
    """The settings hold for pushes of this version and later, up to the next ones; see `Record.version`. They
    replace earlier settings."""
    ordinal: int = 0
    """The number of optimizers that were set, with this one; states belong to one of them."""
    epoch: int = 0
    """How often the update counts were set, with an optimizer or from a file: see `UpdateClock`."""
    keeps_states: bool = False
    """Whether states are stored for one more round, as values are: a step can be withdrawn."""


class SlicesNotice(msgspec.Struct, frozen=True, tag="Slices"):
    """To servers: the slices that will be used; sent before the initializer knows of them."""

    store: int
    keys: tuple[KeyEntry, ...]


class PingReply(msgspec.Struct, frozen=True, tag="Pong"):
    """The answer to `PingRequest`."""

    number: int
    time: int = 0
    """The scheduler's clock, in ns."""


class JobEndNotice(msgspec.Struct, frozen=True, tag="Over"):
    """To servers: the job has ended."""

    error: str = ""


# ------------------------------------------------------------------------------------- worker -> server


class AttachRequest(msgspec.Struct, frozen=True, tag="Attach"):
    """First message of a worker to a server, and again after either was replaced.

    A worker that returned sends it once more when it has begun, to learn in which rounds.
    `accepted` lists (slice, round): its last push that was answered, for a server that restarts. Those that
    the server's snapshot does not have are lost, and no round waits for them.
    """

    store: int
    rank: int
    incarnation: int
    epoch: int
    job: str
    accepted: tuple[tuple[int, int], ...] = ()
    met: bool = False
    """The worker knows its bases, of this server or of its predecessor: `accepted` is complete."""
    late: bool = False
    """The worker has not begun, to its knowledge; see `ViewNotice.late`."""
    memory: str = ""
    """The handle of this process's shared memory, if it offers any; see `transport.shared_buffers`."""
    report: int = 1 << 20
    """Bytes of requests after which the server acknowledges their arrival, if no reply does."""
    host: str = ""
    """Of a worker that pushes for its host: its identity. Servers of other hosts share no memory with it."""
    next: Annotated[int, _SIZE] = 1
    """Sequence of its next new request; for a server that restarts, as is `unanswered`."""
    unanswered: tuple[Annotated[int, _SIZE], ...] = ()
    """Lower sequences without a reply. All other lower ones are never repeated: no request waits for them."""


class AttachReply(msgspec.Struct, frozen=True, tag="Attached"):
    """The server accepts requests of this worker from now on."""

    incarnation: int
    memory: str = ""
    """The handle of the server's values, if it could read the worker's memory."""
    epoch: int = 0
    """The epoch of a view that is at least as new as the worker's when it attached."""
    bases: tuple[tuple[int, int], ...] = ()
    """(slice, round): these rounds proceed without this worker; its first push belongs to the next."""
    stream: str = ""
    """The address at which the worker can open a stream, its token and secret; see `transport.streams`."""

    def __repr__(self) -> str:
        """Omit the secret."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__ if name != "stream"}
        return f"AttachReply({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


class FenceNotice(msgspec.Struct, frozen=True, tag="Fenced"):
    """The receiver is no longer a member, or not yet."""

    epoch: int
    text: str


class MissingRequest(msgspec.Struct, frozen=True, tag="Who"):
    """Request the ranks that round `round` of this slice waits for."""

    store: int
    slice: int
    round: int


class MissingReply(msgspec.Struct, frozen=True, tag="Missing"):
    """Ranks of workers that have not pushed into the round, or of processes that have not arrived."""

    store: int
    slice: int
    round: int
    ranks: tuple[int, ...]
    servers: tuple[int, ...] = ()


class LeftOutNotice(msgspec.Struct, frozen=True, tag="LeftOut"):
    """To workers, once: rounds of this slice proceed without a worker that left and had not joined."""

    store: int
    slice: int
    rank: int
    round: int
    """The last round that it pushed into."""


_OfMember = (
    JoinRequest
    | BarrierRequest
    | CreateKeysRequest
    | KeysReadyRequest
    | LookupRequest
    | LostCountRequest
    | DropKeysRequest
    | SettingsRequest
    | CommandRequest
)
ToScheduler = (
    HelloRequest
    | ProcessEndNotice
    | LeaveNotice
    | RejoinBeginNotice
    | JoinPointNotice
    | InstallReply
    | PingRequest
    | PingReply
    | _OfMember
)
FromScheduler = (
    HelloReply
    | WelcomeNotice
    | RefusalNotice
    | ViewNotice
    | MemberReply
    | InstallRequest
    | SlicesNotice
    | PingReply
    | JobEndNotice
    | PingRequest
)
Direct = AttachRequest | AttachReply | FenceNotice | MissingRequest | MissingReply | LeftOutNotice


class ReliableMessage(msgspec.Struct, frozen=True, tag="Letter"):
    """A message between the scheduler and another process: numbered, so that it can be repeated."""

    number: int
    """From 1; 0: only an acknowledgement, or `FenceNotice` to a process that is no longer known."""
    seen: int
    """All messages of the other side up to this one have arrived."""
    body: ToScheduler | FromScheduler | FenceNotice | MissingRequest | MissingReply | None = None
    term: int = 0
    """How often the scheduler was started: its own count, or the highest that the other side has read."""


Control = ToScheduler | FromScheduler | Direct | ReliableMessage
