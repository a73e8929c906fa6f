# Values of dense slices. Part of _native.pyx.

ValueBuffer = namedtuple("ValueBuffer", "array block place")
cdef int64_t MOST_COUNT = <int64_t>1 << 62

cdef class UpdateCounts:
    """How many updates there were, and the schedule's time of the last one; `sums.h` counts as well."""

    cdef kp_counts c

    @property
    def updates(self):
        """How many updates there were."""
        return self.c.updates

    @updates.setter
    def updates(self, count):
        self.c.updates = limited(count)

    @property
    def num_update(self):
        """The schedule's time of the last update."""
        return self.c.num_update

    @num_update.setter
    def num_update(self, time):
        self.c.num_update = limited(time)


cdef int64_t limited(number) except? -1:
    """A number that has room; from the wire and from files any can come."""
    return max(-MOST_COUNT, min(MOST_COUNT, number))


cdef class SliceValue:
    """The value of a dense slice, in one of two buffers: an array each, which others may read in shared memory.

    Buffer 0 is where it begins. A sum of several parts goes to the other buffer, which is the value then. What stays packed
    (`packed_sum.h`) is summed when somebody asks for the array, and is not packed any more then: the array may be written.
    """

    cdef kp_value v
    cdef list arrays, held
    cdef tuple planned  # keeps what the plan points to

    def __cinit__(self, *_args, **_named):
        self.arrays, self.held = [None, None], [None, None]
        self.v.before = self.v.kept_after = -1
        self.v.sums = True
        self.v.run = <kp_run>PyCapsule_GetPointer(cpu.run_pointer(), "kvstore.run")

    def __dealloc__(self):
        kp_free_value_buffer(&self.v.buffers[0])
        kp_free_value_buffer(&self.v.buffers[1])
        release_dropped()

    @property
    def value(self):
        """The array that has the value; None: there is none yet."""
        self.catch_up(self.v.current)
        return self.arrays[self.v.current]

    cdef int catch_up(self, int number) except -1:
        """Have the value of a buffer in its array alone."""
        cdef kp_value_buffer *buffer = &self.v.buffers[number]
        if kp_unpack_sum(&self.v, buffer):
            raise MemoryError("the sum of packed gradients")
        kp_forget_packed(buffer)
        release_dropped()
        return 0

    @property
    def block(self):
        """The block of shared memory that the value is in, as `set_memory` was given it."""
        return self.held[self.v.current]

    @property
    def place(self):
        """Segment and offset in shared memory; None: nobody else reads it."""
        return self.buffer(self.v.current).place

    @property
    def blocks(self):
        """The blocks of shared memory of both buffers, whatever is in them; None where there is none."""
        return tuple(self.held)

    @property
    def current(self):
        """In which buffer the value is."""
        return self.v.current

    @property
    def before(self):
        """The round after which the other buffer has what the value was then; -1: of none."""
        return self.v.before

    @before.setter
    def before(self, int64_t round):
        self.v.before = round

    @property
    def kept_after(self):
        """The round after which the optimizer's states were what was kept of them; -1: of none."""
        return self.v.kept_after

    @property
    def kept_counts(self):
        """The counts of updates as they were then."""
        return self.v.kept_counts.updates, self.v.kept_counts.num_update

    def note_kept(self, int64_t after, UpdateCounts counts not None):
        """Say after which round the states, and these counts, were what was kept of them; -1: of none."""
        self.v.kept_after, self.v.kept_counts = after, counts.c

    @property
    def sums(self):
        """Whether rounds replace the value, since there are no settings of an optimizer."""
        return bool(self.v.sums)

    @sums.setter
    def sums(self, bint sums):
        self.v.sums = sums

    def buffer(self, int number):
        """Return a buffer's array and block, and its place in shared memory; None where there is none."""
        cdef kp_value_buffer *buffer = &self.v.buffers[number]
        block = self.held[number]
        self.catch_up(number)
        return ValueBuffer(self.arrays[number], block, None if block is None else (buffer.segment, buffer.offset))

    def set_memory(self, int number, array, int dtype, block=None, uint32_t segment=0, uint64_t offset=0, seqlock=None):
        """Give a buffer its memory.

        Parameters
        ----------
        number : int
            0 or 1.
        array : numpy.ndarray
            Contiguous; it has the same size and type in both buffers.
        dtype : int
            The kernels' number of its type.
        block, segment, offset
            Where others find it.
        seqlock : numpy.ndarray or None
            One uint64, odd while the array is written. It lies in memory that lives as long as `array`.
        """
        cdef kp_value_buffer *buffer = &self.v.buffers[number]
        cdef const uint8_t[::1] view = array.view("u1")
        cdef uint64_t[::1] lock
        kp_free_value_buffer(buffer)
        self.v.dtype, self.v.n, self.v.nbytes = dtype, array.size, array.nbytes
        if array.nbytes:
            buffer.at = <char *>&view[0]
        buffer.holder = buffer_of(array)
        buffer.segment, buffer.offset = segment, offset
        if seqlock is not None:
            lock = seqlock
            buffer.seqlock = <kp_atomic *>&lock[0]
        self.arrays[number], self.held[number] = array, block

    @property
    def has_plan(self):
        """Whether updates are planned."""
        return self.v.plan.counts != NULL

    def plan_updates(
        self, int rule, tuple params not None, tuple states not None, UpdateCounts counts not None, version, epoch,
        tuple kept=None,
    ):
        """Have rounds update the value without Python, until `withdraw_plan`. Numbers without room are left to Python.

        Parameters
        ----------
        rule, params, states
            As `kernels.cpu.update` takes them; the same for all these updates, with the settings as they are.
        counts : UpdateCounts
            Of the state, which has had an update.
        version : int
            Of the settings: the newest that a round of the slice has had.
        epoch : int
            Of the update counts; stamps of another epoch say nothing about the time of the schedule.
        kept : tuple of numpy.ndarray
            Arrays like the states, which get what these were before each round of several parts; None: nobody asks.
        """
        cdef kp_plan *plan = &self.v.plan
        cdef char[::1] memory
        cdef int i
        self.withdraw_plan()
        if len(params) > KV_MAX_PARAMS or len(states) > KV_MAX_STATES or self.v.nbytes == 0:
            return
        if counts.c.updates >= <int64_t>KP_MOST_CLOCK:
            return
        plan.rule, plan.n_states = rule, <int>len(states)
        plan.version, plan.epoch = version, epoch
        for i in range(KV_MAX_PARAMS):
            plan.p[i] = params[i] if i < len(params) else 0
        for i in range(len(states)):
            memory = states[i].reshape(-1).view("i1")
            plan.states[i] = &memory[0]
        plan.keeps = kept is not None
        for i in range(len(states) if kept is not None else 0):
            memory = kept[i].view("i1")
            plan.kept[i] = &memory[0]
        self.planned = (states, counts, kept)
        plan.counts = &counts.c

    def withdraw_plan(self):
        """Leave updates to Python."""
        self.v.plan.counts = NULL
        self.planned = None

    def clear(self):
        """Have no memory any more."""
        cdef int number
        self.withdraw_plan()
        for number in range(2):
            kp_free_value_buffer(&self.v.buffers[number])
            self.arrays[number] = self.held[number] = None
        self.v.current, self.v.before = 0, -1
        self.v.kept_after = -1
        release_dropped()

    def swap_buffers(self, uint64_t round):
        """Make what was written to the other buffer in this round the value."""
        kp_swap_buffers(&self.v, round)

    def use_first_buffer(self):
        """Make buffer 0 the value's again; the content of the other buffer is invalid."""
        self.v.current, self.v.before = 0, -1

    def take_changed(self):
        """Whether sums have changed it outside of Python since the last call."""
        cdef bint changed = self.v.changed
        self.v.changed = False
        return changed
