# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Counters and events of this process, and the counters of other processes.

The C code of the stores writes both, through the capsules of `Counters.capsule` and `ring`.
"""

import mmap
import os

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_New
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, strncpy
from posix.unistd cimport getpid

cdef extern from "page.h" nogil:
    enum:
        KV_CALLS
        KV_WAYS
        KV_PHASES
        KV_BUCKETS
        KV_NAME
        KV_BY_MEMORY
        KV_NOBODY
        KV_USED
        KV_FREE
        KV_EVENT_KINDS
        KV_PAGE_VERSION
        KV_PLACES
    const char *KV_PAGE_NAME
    const char *KV_PAGE_MAGIC
    uint64_t KV_NO_SLICE
    bint KV_COUNTS
    ctypedef uint64_t kv_count "_Atomic uint64_t"
    ctypedef int32_t kv_whom "_Atomic int32_t"
    ctypedef struct kv_counters:
        kv_count used, timed_until
        char store[64]
        char job[64]
        int32_t rank, size
        kv_count keys, nbytes
        kv_count calls[6]
        kv_count sent[4]
        kv_count received[4]
        kv_count rounds, losses
        kv_count ns[5]
        kv_count spans[5]
        kv_count waits[128]
        kv_count since, slice, round
        kv_whom whom
    ctypedef struct kv_event:
        uint64_t begin, end, slice, round, nbytes
        uint32_t thread
        int32_t whom
        uint16_t kind, store
        uint32_t written
    ctypedef struct kv_ring:
        kv_count next
        uint64_t size
        kv_event *events
        kv_count freed
    ctypedef struct kv_about:
        uint64_t slice, round, nbytes
        int32_t whom
        uint16_t store
    ctypedef enum kv_phase:
        pass
    ctypedef struct kv_page:
        char magic[8]
        uint32_t version, process
        uint64_t place_bytes, places
        kv_counters stores[32]
    ctypedef struct kv_activity:
        uint64_t begin
    kv_page *kv_page_here
    kv_ring kv_own_ring
    kv_ring *kv_ring_here
    int kv_open_page()
    kv_counters *kv_take_place()
    int kv_start_ring(uint64_t size)
    uint64_t kv_copy_events(kv_event *to)
    uint64_t kv_now()
    void kv_add_to(kv_count *count, uint64_t more)
    void kv_add_alone(kv_count *count, uint64_t more)
    void kv_set_to(kv_count *count, uint64_t value)
    int kv_is_timed(const kv_counters *c)
    uint64_t kv_begin(const kv_counters *c)
    void kv_end(kv_counters *c, kv_phase phase, uint64_t begin, kv_about about)
    void kv_waits_for(kv_counters *c, uint64_t begin, kv_about about)
    void kv_waits_no_more(kv_counters *c, uint64_t begin)
    void kv_record(kv_event event)
    void kv_enter(kv_counters *c, kv_phase phase, kv_about about)
    void kv_leave()
    void kv_end_activity(kv_activity *a, uint64_t end)
    kv_activity *kv_this_activity()
    unsigned kv_bucket(uint64_t ns)

cdef extern from "trace.h" nogil:
    enum:
        KV_EVENT_TEXT
    const char *kv_kind_names[]
    int kv_event_text(char *to, const kv_event *e, uint64_t origin, uint32_t process, int comma)

#: Names of the kinds of events; the phases are first.
KINDS = tuple(kv_kind_names[at].decode() for at in range(KV_EVENT_KINDS))
NOBODY = KV_NOBODY
NO_SLICE = KV_NO_SLICE
COUNTS = bool(KV_COUNTS)
PAGE_NAME = KV_PAGE_NAME.decode()
PAGE_VERSION = KV_PAGE_VERSION
BUCKETS = KV_BUCKETS

if kv_open_page():
    raise MemoryError("there is no memory for the counters of this process")
kv_ring_here = &kv_own_ring
ring = PyCapsule_New(&kv_own_ring, "kvstore.events", NULL)

cdef uint16_t made = 0  # number of the next store
cdef uint64_t timed_at_first = 0  # until when new stores take times


@cython.final
cdef class Slice:
    """A key, or a part of it, in counters and events: its number, without a sign, and the bytes of its value."""

    cdef readonly uint64_t number, nbytes

    def __init__(self, number, nbytes):
        self.number, self.nbytes = number & KV_NO_SLICE, min(nbytes, KV_NO_SLICE)  # more than memory: with all rows


cdef class Counters:
    """The counters of one store of this process, or of its server.

    Parameters
    ----------
    store : str
        Type of the store; ``"server"`` or ``"scheduler"``.
    job : str
        Name of the job, the same in all of its processes.
    rank, size : int
        Rank among the workers, or servers, and their number.
    shown : bool
        False: in memory that no other process sees.

    Attributes
    ----------
    number : int
        Number of the store in its process; -1 if not shown.
    quiet : bool
        Whether no spans are begun, as the present calls are part of one.
    """

    cdef kv_counters *c
    cdef bint own
    cdef uint32_t process
    cdef readonly int number
    cdef readonly object capsule
    cdef public bint quiet

    def __cinit__(self, str store, str job, int rank, int size, bint shown=True):
        global made
        self.c = kv_take_place() if shown else NULL
        self.process = kv_page_here.process
        if self.c == NULL:
            self.own = True
            self.c = <kv_counters *>calloc(1, sizeof(kv_counters))
            if self.c == NULL:
                raise MemoryError("there is no memory for the counters of a store")
        self.number = made if shown else -1
        made += shown
        kv_set_to(&self.c.timed_until, timed_at_first if shown else 0)
        self.describe(store, job, rank, size)
        self.capsule = PyCapsule_New(self.c, "kvstore.counters", NULL)

    def __dealloc__(self):
        if self.c != NULL and self.own:
            kv_add_to(&kv_own_ring.freed, 1)
            free(self.c)
        elif self.c != NULL and kv_page_here.process == <uint32_t>getpid():
            kv_set_to(&self.c.used, KV_FREE)

    def describe(self, str store, str job, int rank, int size):
        """Replace the description of the store; the parameters are those of the class."""
        strncpy(self.c.store, store.encode("utf-8", "replace"), KV_NAME - 1)
        strncpy(self.c.job, job_id(job).encode(), KV_NAME - 1)
        self.c.rank, self.c.size = rank, size

    def hold(self, uint64_t keys, uint64_t nbytes):
        """Set the number of keys, and the bytes of their values."""
        kv_set_to(&self.c.keys, keys)
        kv_set_to(&self.c.nbytes, nbytes)

    def hold_more(self, uint64_t keys, uint64_t nbytes):
        """Add to the number of keys, and to the bytes of their values."""
        kv_add_to(&self.c.keys, keys)
        kv_add_to(&self.c.nbytes, nbytes)

    cpdef void count(self, unsigned call) noexcept:
        """Count a call; `call` is a number of `kvstore.observe.counters.CALLS`."""
        if call < KV_CALLS:
            kv_add_alone(&self.c.calls[call], 1)  # only threads with the interpreter's lock count calls

    cpdef void move(self, unsigned way, uint64_t sent, uint64_t received) noexcept:
        """Count bytes of values, sent and received; `way` is a number of `kvstore.observe.counters.WAYS`."""
        if way < KV_WAYS:
            if sent:
                kv_add_to(&self.c.sent[way], sent)
            if received:
                kv_add_to(&self.c.received[way], received)

    cpdef void end_rounds(self, uint64_t rounds) noexcept:
        """Count rounds that are complete."""
        kv_add_to(&self.c.rounds, rounds)

    def lose(self, int whom):
        """Count the loss of a process: the rank of a worker, of a server -1 - rank; and record it."""
        kv_add_to(&self.c.losses, 1)
        self.instant(KV_PHASES + 2, whom)

    def instant(self, unsigned kind, int whom, uint64_t slice=0, uint64_t round=0, uint64_t nbytes=0):
        """Record an event that has no length; `kind` is a number of `kvstore.observe.events.KINDS`."""
        cdef uint64_t now = kv_now()
        self.record(kind, now, now, slice, round, nbytes, whom)

    def record(
        self, unsigned kind, uint64_t begin, uint64_t end, uint64_t slice=0, uint64_t round=0,
        uint64_t nbytes=0, int whom=KV_NOBODY,
    ):  # fmt: skip
        """Record an event, in ns of the monotonic clock; nothing happens unless a timeline is recorded."""
        if kind < KV_EVENT_KINDS:
            kv_record(kv_event(begin, end, slice, round, nbytes, 0, whom, <uint16_t>kind, <uint16_t>self.number, 0))

    def take_times(self, uint64_t until=0xFFFFFFFFFFFFFFFF):
        """Take times until the monotonic clock shows `until`, in ns; 0: none."""
        kv_set_to(&self.c.timed_until, until)

    @property
    def timed(self):
        """Whether times are taken."""
        return bool(kv_is_timed(self.c))

    cpdef uint64_t begin(self) noexcept:
        """Return the begin of a span, for `end`; 0 if times are not taken."""
        return 0 if self.quiet else kv_begin(self.c)

    cpdef void end(
        self, unsigned phase, uint64_t begin, uint64_t slice=0, uint64_t round=0, uint64_t nbytes=0, int whom=KV_NOBODY
    ) noexcept:
        """End a span; `phase` is a number of `kvstore.observe.counters.PHASES`."""
        if begin and phase < KV_PHASES:
            kv_end(self.c, <kv_phase>phase, begin, kv_about(slice, round, nbytes, whom, <uint16_t>self.number))

    cpdef void passed(
        self, unsigned phase, uint64_t begin, unsigned way, uint64_t sent, uint64_t received, uint64_t rounds=0,
        uint64_t slice=KV_NO_SLICE,
    ) noexcept:  # fmt: skip
        """Count bytes and rounds of a span, and end it: `move`, `end_rounds` and `end` in one call."""
        self.move(way, sent, received)
        if rounds:
            kv_add_to(&self.c.rounds, rounds)
        if begin:
            self.end(phase, begin, slice, 0, sent + received)

    cpdef int end_work(
        self, unsigned phase, uint64_t begin, unsigned way, Slice key, values, outs, uint64_t rounds=1
    ) except -1:
        """Call `passed` for one key; `values` and `outs` are each an array, or a list of arrays."""
        cdef uint64_t sent = key.nbytes * how_many(values), received = key.nbytes * how_many(outs)
        self.passed(phase, begin, way, sent, received, rounds, key.number)
        return 0

    def end_works(self, unsigned phase, uint64_t begin, unsigned way, works, uint64_t rounds=1):
        """Call `end_work` for many keys in one span; `works` has an entry with the key as `slice`, values, outs."""
        cdef uint64_t sent = 0, received = 0
        cdef Slice key = None
        for entry, values, outs in works:
            key = entry.slice
            sent += key.nbytes * how_many(values)
            received += key.nbytes * how_many(outs)
        self.passed(
            phase, begin, way, sent, received, rounds * len(works), key.number if len(works) == 1 else KV_NO_SLICE
        )

    cpdef bint count_small(self, unsigned call, Slice key, values, outs) except? True:
        """Count a call with one key in this process, its bytes and its round; return whether times are taken."""
        self.count(call)
        self.end_work(KV_PHASES, 0, KV_BY_MEMORY, key, values, outs, 1)
        return kv_is_timed(self.c)

    cpdef void wait_for(self, uint64_t begin, uint64_t slice=0, uint64_t round=0, int whom=KV_NOBODY) noexcept:
        """Publish a wait that has begun; `waited` ends it."""
        kv_waits_for(self.c, begin, kv_about(slice, round, 0, whom, <uint16_t>self.number))

    cpdef void waited(self, uint64_t begin, uint64_t slice=0, uint64_t round=0, int whom=KV_NOBODY) noexcept:
        """End a wait."""
        kv_waits_no_more(self.c, begin)
        self.end(0, begin, slice, round, 0, whom)

    cpdef void enter(
        self, unsigned phase, uint64_t slice=KV_NO_SLICE, uint64_t round=0, uint64_t nbytes=0, int whom=KV_NOBODY
    ) noexcept:
        """Enter a phase, which ends the phase of this thread; nothing happens unless times are taken.

        Entering `WAITING` again continues it. `leave` follows, or another phase.
        """
        if phase < KV_PHASES:
            kv_enter(self.c, <kv_phase>phase, kv_about(slice, round, nbytes, whom, <uint16_t>self.number))

    def during(
        self, unsigned phase, uint64_t slice=KV_NO_SLICE, uint64_t round=0, uint64_t nbytes=0, int whom=KV_NOBODY
    ):
        """Return a context that is counted as a phase; see `enter`."""
        cdef Phase made = Phase.__new__(Phase)
        made.counters, made.phase = self, phase
        made.about = kv_about(slice, round, nbytes, whom, <uint16_t>self.number)
        return made

    cpdef void leave(self, uint64_t at=0) noexcept:
        """End the phase that this thread is in, if it is in one; at an earlier time, or now."""
        cdef kv_activity *here = kv_this_activity()
        if here.begin and at >= here.begin:
            kv_end_activity(here, at)
        else:
            kv_leave()

    def read(self):
        """Return the numbers as `read_page` does."""
        return numbers(self.c)


def job_id(str job):
    """Return the hash of the name of a job, which is a secret in jobs without keys; empty for an empty name."""
    import hashlib

    return hashlib.sha256(job.encode("utf-8", "replace")).hexdigest()[:12] if job else ""


@cython.final
cdef class Phase:
    """A phase that a thread is in, as a context."""

    cdef Counters counters
    cdef unsigned phase
    cdef kv_about about

    def __enter__(self):
        if self.phase < KV_PHASES:
            kv_enter(self.counters.c, <kv_phase>self.phase, self.about)

    def __exit__(self, *_):
        kv_leave()


def now():
    """Return the time of the monotonic clock in ns."""
    return kv_now()


def record_events(uint64_t size):
    """Record the last `size` events of this process from now on; `size` is a power of two.

    Raises
    ------
    MemoryError
    """
    if not size or size & (size - 1):
        raise ValueError(f"the number of events must be a power of two, got {size}")
    if kv_start_ring(size):
        raise MemoryError(f"there is no memory for {size} events of {sizeof(kv_event)} bytes")


def recording():
    """Return whether events are recorded."""
    return kv_own_ring.size != 0


def recorded():
    """Return the number of events since `record_events`; the ring may have fewer."""
    return kv_own_ring.next


def take_times(uint64_t until=0xFFFFFFFFFFFFFFFF):
    """Take times in all stores of this process, also in later ones, until the monotonic clock shows `until`."""
    global timed_at_first
    cdef int i
    timed_at_first = until
    for i in range(KV_PLACES):
        if kv_page_here.stores[i].used == KV_USED:
            kv_set_to(&kv_page_here.stores[i].timed_until, until)


def read_own():
    """Read the counters of this process, as `read_page` does."""
    return counted(kv_page_here)


def packed_events():
    """Return the events that the ring has, the oldest first, as `kvstore.observe.events.PACKED` has them."""
    cdef uint64_t n
    cdef bytes copy = PyBytes_FromStringAndSize(NULL, kv_own_ring.size * sizeof(kv_event))
    cdef char *to = copy
    with nogil:
        n = kv_copy_events(<kv_event *>to)
    return copy[: n * sizeof(kv_event)]


def trace_text(bytes packed, uint64_t origin, uint32_t process):
    """Return packed events as objects of a trace in Chrome's format, with commas between them.

    The whole ring becomes text in some tenths of a second: a process that a signal ends waits for it.
    """
    cdef const kv_event *events = <const kv_event *><const char *>packed
    cdef size_t n = len(packed) // sizeof(kv_event), at, size = 0
    cdef bytes text = PyBytes_FromStringAndSize(NULL, n * KV_EVENT_TEXT)
    cdef char *to = text
    with nogil:
        for at in range(n):
            size += kv_event_text(to + size, &events[at], origin, process, at)
    return text[:size]


def read_page(int fd):
    """Read the counters of another process of this user.

    Parameters
    ----------
    fd : int
        Its page, opened for reading.

    Returns
    -------
    tuple or None
        The number of the process, and a list with the numbers of each of its stores, with its place in the page; None
        for any other file, and for a page of another version.
    """
    cdef bytes data = os.pread(fd, sizeof(kv_page), 0)
    cdef kv_page *page = <kv_page *><char *>data
    return (page.process, counted(page)) if len(data) == sizeof(kv_page) and is_page(page) else None


def ask_for_times(int fd, uint64_t until):
    """Have another process of this user take times until the monotonic clock shows `until`, in ns.

    `fd` is its page, opened for reading and writing. Stores that take times for longer are unchanged.
    """
    cdef uint8_t[::1] data
    cdef int i
    if read_page(fd) is None:
        return
    with mmap.mmap(fd, sizeof(kv_page)) as mapped:
        data = mapped
        page = <kv_page *>&data[0]
        for i in range(KV_PLACES):
            if page.stores[i].used == KV_USED and page.stores[i].timed_until < until:
                kv_set_to(&page.stores[i].timed_until, until)
        data = None  # the mapping cannot be closed before


def bucket_of(uint64_t ns):
    """Return the bucket of a wait of `ns` nanoseconds."""
    return kv_bucket(ns)


cdef uint64_t how_many(arrays) noexcept:
    if type(arrays) is list:
        return len(<list>arrays)
    return len(<tuple>arrays) if type(arrays) is tuple else 1


cdef bint is_page(kv_page *page) noexcept:
    same = not memcmp(page.magic, KV_PAGE_MAGIC, 8) and page.version == KV_PAGE_VERSION
    return same and page.place_bytes == sizeof(kv_counters) and page.places == KV_PLACES


cdef list counted(kv_page *page):
    cdef int i
    return [{"place": i, **numbers(&page.stores[i])} for i in range(KV_PLACES) if page.stores[i].used == KV_USED]


cdef dict numbers(kv_counters *c):
    cdef int i
    return {
        "store": c.store.decode("utf-8", "replace"),
        "job": c.job.decode("utf-8", "replace"),
        "rank": c.rank,
        "size": c.size,
        "keys": c.keys,
        "nbytes": c.nbytes,
        "calls": [c.calls[i] for i in range(KV_CALLS)],
        "sent": [c.sent[i] for i in range(KV_WAYS)],
        "received": [c.received[i] for i in range(KV_WAYS)],
        "rounds": c.rounds,
        "losses": c.losses,
        "ns": [c.ns[i] for i in range(KV_PHASES)],
        "spans": [c.spans[i] for i in range(KV_PHASES)],
        "waits": [c.waits[i] for i in range(KV_BUCKETS)],
        "waiting_since": c.since,
        "slice": c.slice,
        "round": c.round,
        "whom": c.whom,
    }
