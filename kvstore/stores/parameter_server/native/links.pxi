# What a server does with the messages of a worker's stream before Python sees them. Part of _native.pyx.

cdef enum:
    MOST_SEGMENTS = 4096
    MOST_NUMBERS = 1 << 20  # of slices that are found without Python: a worker may name any number


cdef class SliceTable(dict):
    """The slices of a store by number: a dict of `SliceState`, which `links.h` reads as well.

    Slices come by `table[number] = slice` and go by `pop` alone.
    """

    cdef kp_slices s

    def __dealloc__(self):
        free(self.s.all)

    def __setitem__(self, index, SliceState slice not None):
        cdef uint32_t capacity, number = index
        cdef kp_slice **all
        dict.__setitem__(self, index, slice)
        if number >= MOST_NUMBERS:
            return
        if number >= self.s.n:
            capacity = min(2 * number + 64, <uint32_t>MOST_NUMBERS)
            all = <kp_slice **>realloc(self.s.all, capacity * sizeof(kp_slice *))
            if all == NULL:
                raise MemoryError()
            memset(all + self.s.n, 0, (capacity - self.s.n) * sizeof(kp_slice *))
            self.s.all, self.s.n = all, capacity
        self.s.all[number] = &slice.s

    def pop(self, number, default=None):
        if number in self and number < self.s.n:
            self.s.all[<uint32_t>number] = NULL
        return dict.pop(self, number, default)


@cython.final
cdef class Sums:
    """Memory for sums, and the kernels that do them.

    `keeps_parts`: they are written over nothing that was pushed, though its worker may want that.
    """

    cdef kp_sums s
    cdef object kernels, counters

    def __cinit__(self, bint keeps_parts=False):
        self.s.keeps_parts = keeps_parts
        self.s.run = <kp_run>PyCapsule_GetPointer(cpu.run_pointer(), "kvstore.run")
        self.s.run_rows = <kp_run_rows>PyCapsule_GetPointer(cpu.run_rows_pointer(), "kvstore.run_rows")
        self.s.threads = <const int *>PyCapsule_GetPointer(cpu.threads_pointer(), "kvstore.threads")

    def __dealloc__(self):
        kp_free_sums(&self.s)

    @property
    def near(self):
        """How many workers of this host have streams."""
        return self.s.near

    def observe(self, counters not None):
        """Take times in `counters`, a `Counters`, from now on."""
        self.counters = counters
        self.s.observer = observer_of(counters)


@cython.no_gc_clear  # the last it does is to tell its session
cdef class Link:
    """Handles the requests of one worker's stream that need nothing special.

    Parameters
    ----------
    effects : Effects
        Of the server; where something is left in them, Python carries it out.
    members : Members
    session : Session
    slices : SliceTable
    sums : Sums
    report : int
        Bytes of requests after which a worker is told that they have come.
    version, job : int
        As in the head of a message.
    """

    cdef kp_link l
    cdef Effects effects
    cdef Members members
    cdef readonly Session session
    cdef SliceTable slices
    cdef Sums sums
    cdef bint is_near

    def __cinit__(
        self, Effects effects not None, Members members not None, Session session not None,
        SliceTable slices not None, Sums sums not None, uint64_t report, uint16_t version, uint64_t job,
    ):
        self.effects, self.members, self.session = effects, members, session
        self.slices, self.sums = slices, sums
        self.l.effects, self.l.members, self.l.session = &effects.e, &members.m, &session.s
        self.l.slices, self.l.sums, self.l.report = &slices.s, &sums.s, report
        self.l.replier.members, self.l.replier.slices = &members.m, &slices.s
        self.l.replier.version, self.l.replier.job = version, job
        self.l.replier.observer = &effects.e.observer
        self.l.inlet = kp_inlet(&self.l, kp_handle_message)

    def __dealloc__(self):
        kp_close_link(&self.l)

    @property
    def inlet(self):
        """A capsule for the stream: who takes its messages."""
        return PyCapsule_New(&self.l.inlet, "kvstore.inlet", NULL)

    def connect(self, outlet):
        """Answer by a stream from now on, of which this is the capsule."""
        self.l.replier.outlet = (<kp_outlet *>PyCapsule_GetPointer(outlet, "kvstore.outlet"))[0]

    def close(self):
        """The stream is closed. A second call does nothing."""
        kp_close_link(&self.l)
        self.near = False
        release_dropped()

    @property
    def near(self):
        """Whether the worker is on this host, and needs a core while it sends; not after `close`."""
        return bool(self.is_near)

    @near.setter
    def near(self, bint near):
        self.sums.s.near += near - self.is_near
        self.is_near = near

    @property
    def reads_here(self):
        """Whether the worker reads this process's memory."""
        return bool(self.l.replier.reads_here)

    @reads_here.setter
    def reads_here(self, bint reads):
        self.l.replier.reads_here = reads

    def map(self, uint32_t number, memory):
        """Know a segment of the worker's shared memory: an array of its bytes, which stays as long as this."""
        cdef uint8_t[::1] view
        cdef kp_segment *segments
        if number >= MOST_SEGMENTS or (number < self.l.n_segments and self.l.segments[number].holder != NULL):
            return
        if number >= self.l.n_segments:
            segments = <kp_segment *>realloc(self.l.segments, (number + 1) * sizeof(kp_segment))
            if segments == NULL:
                raise MemoryError()
            memset(segments + self.l.n_segments, 0, (number + 1 - self.l.n_segments) * sizeof(kp_segment))
            self.l.segments, self.l.n_segments = segments, number + 1
        view = memory
        self.l.segments[number] = kp_segment(buffer_of(memory), <char *>&view[0], view.nbytes)


@cython.final
cdef class Payload:
    """Memory of a message that was handled without Python, as a buffer of bytes."""

    cdef kp_buffer *data

    def __dealloc__(self):
        kp_release(self.data)

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data.data, <Py_ssize_t>self.data.nbytes, 0, flags)


cdef tuple payload_of(kp_buffer *data):
    cdef Payload payload = Payload.__new__(Payload)
    payload.data = kp_retain(data)
    return (payload,)
