# An exchange with a server; see exchange.h. Part of _streams.pyx.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t
from libc.stdlib cimport calloc, qsort, realloc

from .....kernels import cpu

cdef extern from "exchange.h" nogil:
    int kp_unplace(kp_stream *s)
    enum:
        KP_LOOKS
        KP_DATA
        KP_PAGE
        KP_PUSH
        KP_PULL
        KP_PUSHPULL
        KP_PULL_ROWS
        KV_PLAIN
        KV_N_CODES
        KV_DIVIDED
    const int *kv_code_bits
    Py_ssize_t kv_encoded_bytes(int code, Py_ssize_t n)
    struct pollfd:
        int fd
        short events, revents
    enum:
        POLLIN
    ctypedef struct kp_head:
        char *magic
        uint16_t version
        uint8_t kind
        uint64_t job
        int32_t store, rank
        uint64_t incarnation, epoch
    ctypedef struct kp_part:
        uint32_t slice, key
        uint64_t start, nbytes, carried, clock, pushed, complete
        const char *from_ "from"
        char *into
        int64_t rows
        const char *ids
        uint64_t ids_bytes
        int is_shared, in_place
        uint32_t segment
        uint64_t offset
        uint32_t seen
        int answered
    ctypedef struct kp_mapped:
        const char *at
        uint64_t nbytes
    ctypedef int (*kp_run)(void *, Py_ssize_t, Py_ssize_t, int)
    ctypedef struct kp_exchange:
        kp_head head
        uint8_t kind
        uint64_t batch_bytes, frame_limit, credit, report, window
        int is_wide
        uint32_t wide, wider
        unsigned looks
        uint32_t n
        kp_part *parts
        kp_mapped *segments
        uint32_t n_segments
        kp_run run
        const int *threads
        kp_exchange *before
        uint32_t version
        uint8_t coding
        double threshold
        uint64_t first
        uint32_t next, oldest
        uint64_t flying
        uint32_t left, replies
        uint64_t gone, back, base, received
        kp_buffer *owner
        kp_observer observer
        int32_t whom
    ctypedef struct kp_way:
        kp_exchange *exchange
        kp_stream *stream
        const kp_exchange *until
    int kp_send_first(kp_stream *s, kp_exchange *x)
    void kp_await_replies(kp_way *ways, size_t n_ways, int alone, pollfd *waits, unsigned long n, double end)


cdef struct Extent:
    uint64_t begin, end


cdef int by_begin(const void *one, const void *other) noexcept nogil:
    cdef uint64_t a = (<const Extent *>one).begin, b = (<const Extent *>other).begin
    return (a > b) - (a < b)


@cython.final
cdef class Exchange:
    """Pushes into slices of one server, pulls of them, or both, or pulls of rows; one call at a time.

    Parameters
    ----------
    head : tuple
        Version of the protocol, hash of the job's name, store, rank, and incarnation; as in frames.py.
    parts : list of tuple
        For each slice its number, the array that it is a part of, its first byte there, and its number of bytes.
    sizes : list of int
        Bytes of each array.
    batch_bytes : int
        Bytes that are put together in one message.
    frame_limit : int
        Bytes of the largest payload that is received.
    credit : int
        Bytes of requests that may be on the way, if it is more than one message.
    report : int
        Bytes that the server may have taken in without telling.
    kind : int
        `KP_PUSHPULL`, `KP_PUSH`, `KP_PULL` or `KP_PULL_ROWS`.
    """

    cdef kp_exchange x
    cdef list sizes, mapped
    cdef object arrays
    cdef Exchange before
    cdef object counters  # keeps what `x` counts in
    cdef bytes apart  # addresses of values and outs that are known to be apart

    def __cinit__(
        self, tuple head, list parts, list sizes, uint64_t batch_bytes, uint64_t frame_limit, uint64_t credit,
        uint64_t report, int kind=KP_PUSHPULL,
    ):
        cdef uint32_t at
        cdef kp_part *part
        if kind not in (KP_PUSHPULL, KP_PUSH, KP_PULL, KP_PULL_ROWS):
            raise ValueError(f"an exchange pushes, pulls or does both, which {kind} does not say")
        self.x.kind = kind
        for at in range(4):
            self.x.head.magic[at] = b"KVST"[at]
        self.x.head.kind = KP_DATA
        (self.x.head.version, self.x.head.job, self.x.head.store, self.x.head.rank,
         self.x.head.incarnation) = head
        self.x.batch_bytes, self.x.frame_limit, self.x.credit = batch_bytes, frame_limit, credit
        self.x.report, self.x.looks = max(report, 1), KP_LOOKS
        self.x.run = <kp_run>PyCapsule_GetPointer(cpu.run_pointer(), "kvstore.run")
        self.x.threads = <const int *>PyCapsule_GetPointer(cpu.threads_pointer(), "kvstore.threads")
        self.sizes, self.mapped = sizes, []
        self.x.n = len(parts)
        self.x.parts = <kp_part *>calloc(self.x.n + 1, sizeof(kp_part))
        if self.x.parts == NULL:
            raise MemoryError()
        for at in range(self.x.n):
            part = &self.x.parts[at]
            part.slice, part.key, part.start, part.nbytes = parts[at]
            part.rows = -1
            if part.key >= <uint32_t>len(sizes) or part.start + part.nbytes > <uint64_t>sizes[part.key]:
                raise ValueError("a slice is not within its array")

    def __dealloc__(self):
        self.clear()
        free(self.x.parts)
        free(self.x.segments)

    def observe(self, counters not None, int server):
        """Count in `counters`, a `Counters`, from now on, and take times there; `server` is the rank of the server."""
        self.counters = counters
        self.x.observer, self.x.whom = observer_of(counters), -1 - server

    def map(self, segments):
        """Know the server's memory: arrays of bytes by number, each a segment with seqlocks; they are kept."""
        cdef uint32_t number
        cdef const uint8_t[::1] view
        cdef kp_mapped *grown
        for number, memory in segments:
            if number >= self.x.n_segments:
                grown = <kp_mapped *>realloc(self.x.segments, (number + 1) * sizeof(kp_mapped))
                if grown == NULL:
                    raise MemoryError()
                while self.x.n_segments <= number:
                    grown[self.x.n_segments] = kp_mapped(NULL, 0)
                    self.x.n_segments += 1
                self.x.segments = grown
            view = memory
            self.x.segments[number] = kp_mapped(<const char *>&view[0], view.nbytes)
            self.mapped.append(memory)

    def unmap(self):
        """Know none of the server's memory any more: another process may have taken its place."""
        self.x.n_segments = 0
        self.mapped.clear()

    def set(self, bytes values, bytes outs, arrays):
        """Take the memory of a call.

        Parameters
        ----------
        values, outs : bytes
            An address for each array, as numbers of 64 bits; None of values for a pull, of outs for a push.
        arrays : object
            Keeps that memory as it is.

        Returns
        -------
        bool
            False: an out overlaps another array of the call, and is not the value of its key.
        """
        cdef const uint64_t *from_ = NULL
        cdef const uint64_t *into = NULL
        cdef uint32_t at
        cdef kp_part *part
        self.clear()
        self.check_dense()
        if self.x.kind == KP_PULL_ROWS or (values is None) != (self.x.kind == KP_PULL) or (outs is None) != (self.x.kind == KP_PUSH):
            raise ValueError("a pull has no values, and a push no outs")
        if values is not None:
            from_ = self.addresses(values)
        if outs is not None:
            into = self.addresses(outs)
            if not self.check_apart(values or outs, outs):
                return False
        for at in range(self.x.n):
            part = &self.x.parts[at]
            part.from_ = part.into = NULL
            part.carried = 0
            if from_ != NULL:
                part.from_ = <const char *>from_[part.key] + part.start
                part.carried = part.nbytes
            if into != NULL:
                part.into = <char *>into[part.key] + part.start
            part.is_shared = part.in_place = part.answered = 0
        self.start_call(arrays)
        return True

    def set_rows(self, list places not None, const int64_t[::1] ids not None, rows not None):
        """Take the memory of a call about rows of a table, in place of `set`; both buffers are kept.

        Parameters
        ----------
        places : list of (int, int)
            For each part, which of the ids are of rows in it: the first one, and the first one after them.
        ids : contiguous int64 array
            Ids of the whole table, as they are sent.
        rows : contiguous buffer of bytes
            The rows of these ids, which are pushed, or are written as they come.
        """
        cdef const unsigned char[::1] pushed = None
        cdef unsigned char[::1] pulled = None
        cdef char *data
        cdef Py_ssize_t low, high, n = ids.shape[0]
        cdef uint64_t each
        cdef uint32_t at
        cdef kp_part *part
        self.clear()
        if self.x.kind not in (KP_PUSH, KP_PULL_ROWS) or <Py_ssize_t>self.x.n != len(places) or not n:
            raise ValueError("no exchange of rows, or no place for each part, or no ids")
        if self.x.kind == KP_PUSH:
            pushed = rows
            data, each = <char *>&pushed[0], pushed.shape[0]
        else:
            pulled = rows
            data, each = <char *>&pulled[0], pulled.shape[0]
        if each % <uint64_t>n or each < <uint64_t>n:
            raise ValueError(f"{each} bytes are not {n} rows")
        each //= n
        for at in range(self.x.n):
            low, high = places[at]
            if not 0 <= low < high <= n:
                raise ValueError(f"rows {low} to {high} are not some of {n}")
            part = &self.x.parts[at]
            part.ids, part.rows = <const char *>&ids[low], high - low
            part.ids_bytes, part.nbytes = 8 * part.rows, each * part.rows
            part.from_, part.into, part.carried = part.ids, data + each * low, part.ids_bytes
            if self.x.kind == KP_PUSH:
                part.from_, part.into, part.carried = part.into, NULL, part.ids_bytes + part.nbytes
            part.is_shared = part.in_place = part.answered = 0
        self.start_call((ids, rows))

    cdef int check_dense(self) except -1:
        if self.x.n and self.x.parts[0].rows >= 0:
            raise ValueError("an exchange of rows has no arrays")
        return 0

    cdef void start_call(self, object arrays):
        """Have sent nothing of a call, whose memory `arrays` keep."""
        self.x.next, self.x.oldest, self.x.left, self.x.received = 0, 0, self.x.n, 0
        self.x.gone = self.x.back = 0
        self.x.coding, self.x.threshold = KV_PLAIN, 0
        self.arrays = arrays

    cdef const uint64_t *addresses(self, bytes numbers) except NULL:
        if PyBytes_GET_SIZE(numbers) != 8 * <Py_ssize_t>len(self.sizes):
            raise ValueError("not an address for each array")
        return <const uint64_t *>PyBytes_AS_STRING(numbers)

    cdef bint check_apart(self, bytes values, bytes outs) except -1:
        """As `are_apart`, which is known of the last call's arrays."""
        if self.apart is not None and self.apart == values + outs:
            return True
        self.apart = None
        if not are_apart(self.addresses(values), self.addresses(outs), self.sizes):
            return False
        self.apart = values + outs
        return True

    def pack(self, int code, double threshold, bytes words not None, memory):
        """Push, of arrays of float32, what a codec has packed: from the addresses in `words`; `memory` keeps it."""
        cdef const uint64_t *from_ = self.addresses(words)
        cdef uint32_t at
        cdef uint64_t begin, end
        cdef kp_part *part
        self.check_dense()
        if self.arrays is None or self.x.kind == KP_PULL or not KV_PLAIN < code < KV_N_CODES:
            raise ValueError("no values are pushed, or no codec has this number")
        self.arrays = (self.arrays, memory)
        self.x.coding, self.x.threshold = code, threshold
        for at in range(self.x.n):
            part = &self.x.parts[at]
            begin, end = part.start // 4 * kv_code_bits[code] // 8, part.start + part.nbytes
            if end == <uint64_t>self.sizes[part.key]:
                end = kv_encoded_bytes(code, end // 4)
            else:
                end = end // 4 * kv_code_bits[code] // 8
            part.from_ = <const char *>from_[part.key] + begin
            part.carried = end - begin

    def divide(self, double divisor):
        """Push arrays of float32 that count divided."""
        self.check_dense()
        if self.arrays is None or self.x.kind == KP_PULL or self.x.coding != KV_PLAIN or not divisor > 0:
            raise ValueError("no plain values are pushed, or the divisor is not positive")
        self.x.coding, self.x.threshold = KV_DIVIDED, divisor

    def follow(self, Exchange before):
        """Read answers to another exchange, too, which is sent before this one, and may follow another one."""
        cdef Exchange one = before
        while one is not None:
            if one is self:
                raise ValueError("an exchange cannot follow itself")
            one = one.before
        self.before = before
        self.x.before = NULL if before is None else &before.x

    def share(self, dict places not None):
        """Push values by where they lie in memory that the server reads.

        `places` are by number of the array: segment, offset, and whether the sum may be written there.
        """
        cdef uint32_t at
        cdef kp_part *part
        self.check_dense()
        for at in range(self.x.n):
            part = &self.x.parts[at]
            place = places.get(part.key)
            if place is not None:
                part.segment, part.offset, part.in_place = place
                part.offset += part.start
                part.is_shared, part.carried = 1, 0

    def lead(self):
        """Follow none any more: what it follows is answered."""
        cdef kp_exchange *before = self.x.before
        if before != NULL:
            self.x.base = before.base + before.gone
            self.follow(None)

    def clear(self):
        """Let the arrays go."""
        self.arrays = None
        self.follow(None)
        kp_release(self.x.owner)
        self.x.owner = NULL
        release_dropped()

    @property
    def left(self):
        """Number of parts that have no answer."""
        return self.x.left

    @property
    def answered_bytes(self):
        """Bytes of the payloads of parts that have an answer."""
        cdef uint32_t at
        cdef uint64_t nbytes = 0
        for at in range(self.x.n):
            nbytes += self.x.parts[at].carried if self.x.parts[at].answered else 0
        return nbytes

    @property
    def sent(self):
        """Number of parts that have been sent, from the first."""
        return self.x.next

    @property
    def received(self):
        """Bytes of all requests that the server has taken in, as it says."""
        return self.x.received

    def rounds(self):
        """Return for each part the last round that is complete, as the server says; None: no answer has come."""
        cdef uint32_t at
        return [self.x.parts[at].complete if self.x.parts[at].answered else None for at in range(self.x.n)]

    cdef bint begin(
        self, kp_stream *s, list rounds, list clocks, uint64_t first, uint64_t base, uint64_t epoch, uint32_t version
    ) except -1:
        cdef uint32_t at
        cdef kp_part *part
        cdef int failed
        if self.arrays is None or <Py_ssize_t>self.x.n != len(rounds) or len(clocks) != len(self.sizes):
            raise ValueError("no arrays, or not a round for each part, or not a clock for each array")
        for at in range(self.x.n):
            part = &self.x.parts[at]
            part.pushed, part.complete, part.seen = rounds[at], 0, 0
            part.clock = clocks[part.key]
        self.x.head.epoch, self.x.version, self.x.first = epoch, version, first
        self.x.flying, self.x.base = 0, base
        self.x.replies = 0
        if self.before is not None:
            self.x.replies = self.x.before.replies
            self.x.received = max(self.x.received, self.x.before.received)
        if self.x.owner == NULL:
            self.x.owner = kp_buffer_of(<void *>self.arrays)
            if self.x.owner == NULL:
                raise MemoryError()
            Py_INCREF(self.arrays)
        with nogil:
            failed = kp_send_first(s, &self.x)
        return not failed


cdef bint are_apart(const uint64_t *values, const uint64_t *outs, list sizes) except -1:
    """Whether no out overlaps another array, but for the value of its own key."""
    cdef Py_ssize_t at, low, high, middle, n = len(sizes)
    cdef uint64_t nbytes
    cdef Extent *all = <Extent *>malloc((n + 1) * sizeof(Extent))
    cdef bint apart = True
    if all == NULL:
        raise MemoryError()
    for at in range(n):
        all[at] = Extent(outs[at], outs[at] + <uint64_t>sizes[at])
    qsort(all, n, sizeof(Extent), by_begin)
    for at in range(1, n):
        apart = apart and all[at - 1].end <= all[at].begin
    for at in range(n if apart else 0):
        nbytes = sizes[at]
        if values[at] == outs[at]:
            continue
        low, high = 0, n  # the first out that ends behind the value's begin
        while low < high:
            middle = (low + high) // 2
            if all[middle].end <= values[at]:
                low = middle + 1
            else:
                high = middle
        apart = apart and (low == n or all[low].begin >= values[at] + nbytes)
    free(all)
    return apart


def await_replies(list ways not None, bytes descriptors not None, double end, list untils=None):
    """Wait for the replies to exchanges until `end` of the monotonic clock; less if something else comes.

    Parameters
    ----------
    ways : list of (Exchange, Stream)
        The last exchange over each stream.
    descriptors : bytes
        Ints: what else ends the wait when it is readable. A signal ends it, too.
    untils : list of Exchange or None, optional
        For each way an exchange, the last or one that it follows: the wait ends when these have their answers. If
        this is None, it ends when all have.

    Returns
    -------
    list of (int, list of Frame)
        Other messages that have come, as `Stream.receive` returns them, each with the number of its way.
    """
    cdef Py_ssize_t at, n_ways = len(ways), n = PyBytes_GET_SIZE(descriptors) // sizeof(int)
    cdef const int *others = <const int *>PyBytes_AS_STRING(descriptors)
    cdef unsigned long used = n_ways
    cdef Stream stream
    cdef Exchange exchange, until
    cdef list found = []
    cdef kp_way *raw = <kp_way *>malloc((n_ways + 1) * sizeof(kp_way))
    cdef pollfd *waits = <pollfd *>malloc((n_ways + n + 1) * sizeof(pollfd))
    cdef bint good = raw != NULL and waits != NULL, alone
    cdef set known = set()
    try:
        if not good:
            raise MemoryError()
        for at in range(n_ways):
            exchange, stream = ways[at]
            if exchange.arrays is None:
                raise ValueError("no arrays")
            until = exchange if untils is None else untils[at]
            raw[at] = kp_way(&exchange.x, &stream.s, NULL)
            if until is not None:
                raw[at].until = &until.x
            waits[at].fd, waits[at].events = stream.s.fd, POLLIN
            known.add(stream.s.fd)
            good = good and not stream.closed and stream.s.end in (KP_OPEN, KP_BLOCKED)
        for at in range(n):
            if others[at] not in known:
                waits[used].fd, waits[used].events = others[at], POLLIN
                used += 1
        release_dropped()
        if good:
            alone = untils is not None
            with nogil:
                kp_await_replies(raw, n_ways, alone, waits, used, end)
    finally:
        free(raw)
        free(waits)
    for at in range(n_ways):
        stream = ways[at][1]
        if not stream.closed:
            found += [(at, frames) for _, frames in stream.messages()]
    return found
