# An exchange with a server; see exchange.h.

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, uint16_t
from libc.stdlib cimport calloc

cdef extern from "exchange.h" nogil:
    enum:
        KP_DATA
    struct pollfd:
        int fd
        short events, revents
    enum:
        POLLIN
    ctypedef struct kp_head:
        uint32_t magic
        uint16_t version
        unsigned char kind
        uint64_t job
        int32_t store, rank
        uint64_t incarnation, epoch
    ctypedef struct kp_part:
        uint32_t slice
        uint64_t start, nbytes, pushed, complete
        uint32_t seen
        int answered
    ctypedef struct kp_exchange:
        kp_head head
        uint64_t batch_bytes, frame_limit
        uint32_t n
        kp_part *parts
        size_t n_pieces
        const char *value
        char *into
        int apart
        uint32_t version
        uint64_t clock, first
        uint32_t left, replies
        uint64_t received
    void kp_measure(kp_exchange *x)
    int kp_send_exchange(kp_stream *s, kp_exchange *x, kp_buffer *owner)
    kp_outcome kp_await_replies(kp_exchange *x, kp_stream *s, pollfd *waits, unsigned long n, double end)


@cython.final
cdef class Exchange:
    """Pushes of one key to one server, and the values that come for them; one call at a time.

    Parameters
    ----------
    head : tuple
        Version of the protocol, hash of the job's name, store, rank, and incarnation; as in frames.py.
    parts : list of tuple
        Slice, first byte, and number of bytes of each part of the value.
    batch_bytes : int
        Bytes that are put together in one message.
    frame_limit : int
        Bytes of the largest payload that is received.
    """

    cdef kp_exchange x
    cdef Py_buffer value, out
    cdef bint is_set
    cdef uint64_t nbytes

    def __cinit__(self, tuple head, list parts, uint64_t batch_bytes, uint64_t frame_limit):
        cdef uint32_t at
        cdef kp_part *part
        self.x.head.magic, self.x.head.kind = KP_MAGIC, KP_DATA
        (self.x.head.version, self.x.head.job, self.x.head.store, self.x.head.rank,
         self.x.head.incarnation) = head
        self.x.batch_bytes, self.x.frame_limit = batch_bytes, frame_limit
        self.x.n = len(parts)
        self.x.parts = <kp_part *>calloc(self.x.n + 1, sizeof(kp_part))
        if self.x.parts == NULL:
            raise MemoryError()
        for at in range(self.x.n):
            part = &self.x.parts[at]
            part.slice, part.start, part.nbytes = parts[at]
            if part.start != self.nbytes:
                raise ValueError("parts follow one another")
            self.nbytes += part.nbytes
        kp_measure(&self.x)

    def __dealloc__(self):
        self.clear()
        free(self.x.parts)

    def set(self, value, out):
        """Take the arrays of a call: buffers of the value's size. False: they overlap, and are not the same."""
        cdef const char *value_end
        cdef const char *out_end
        self.clear()
        PyObject_GetBuffer(value, &self.value, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(out, &self.out, PyBUF_WRITABLE)
        except BaseException:
            PyBuffer_Release(&self.value)
            raise
        self.is_set = True
        if <uint64_t>self.value.len != self.nbytes or <uint64_t>self.out.len != self.nbytes:
            self.clear()
            raise ValueError("a value or an out is not of the size of its key")
        self.x.value, self.x.into = <char *>self.value.buf, <char *>self.out.buf
        value_end, out_end = self.x.value + self.nbytes, self.x.into + self.nbytes
        self.x.apart = self.x.value == self.x.into
        if not self.x.apart and self.x.value < out_end and self.x.into < value_end:
            self.clear()
            return False
        return True

    def clear(self):
        """Let the arrays go."""
        if self.is_set:
            self.is_set = False
            PyBuffer_Release(&self.value)
            PyBuffer_Release(&self.out)

    @property
    def left(self):
        """Number of parts whose value has not come."""
        return self.x.left

    @property
    def received(self):
        """Bytes of all requests that the server has taken in, as it says."""
        return self.x.received

    def rounds(self):
        """Return for each part the last round that is complete, as the server says; None: no value has come."""
        cdef uint32_t at
        return [self.x.parts[at].complete if self.x.parts[at].answered else None for at in range(self.x.n)]

    cdef bint begin(
        self, kp_stream *s, list rounds, uint64_t first, uint64_t epoch, uint32_t version, uint64_t clock
    ) except -1:
        cdef uint32_t at
        cdef kp_part *part
        cdef kp_buffer *owner = NULL
        cdef int failed
        if not self.is_set or <Py_ssize_t>self.x.n != len(rounds):
            raise ValueError("no arrays, or not a round for each part")
        for at in range(self.x.n):
            part = &self.x.parts[at]
            part.pushed, part.complete, part.seen, part.answered = rounds[at], 0, 0, 0
        self.x.head.epoch, self.x.version, self.x.clock, self.x.first = epoch, version, clock, first
        self.x.left, self.x.replies, self.x.received = self.x.n, 0, 0
        if self.x.n_pieces > 1:
            owner = kp_buffer_of(<void *>self.value.obj)
            if owner == NULL:
                raise MemoryError()
            Py_INCREF(<object>self.value.obj)
        with nogil:
            failed = kp_send_exchange(s, &self.x, owner)
            kp_drop(owner)
        return not failed

    cdef kp_outcome wait(self, kp_stream *s, bytes descriptors, double end) except *:
        cdef Py_ssize_t at, n = PyBytes_GET_SIZE(descriptors) // sizeof(int)
        cdef const int *others = <const int *>PyBytes_AS_STRING(descriptors)
        cdef unsigned long used = 1
        cdef kp_outcome outcome
        cdef pollfd *waits
        if not self.is_set:
            raise ValueError("no arrays")
        waits = <pollfd *>malloc((n + 1) * sizeof(pollfd))
        if waits == NULL:
            raise MemoryError()
        waits[0].fd, waits[0].events = s.fd, POLLIN
        for at in range(n):
            if others[at] != s.fd:
                waits[used].fd, waits[used].events = others[at], POLLIN
                used += 1
        with nogil:
            outcome = kp_await_replies(&self.x, s, waits, used, end)
            free(waits)
        return outcome
