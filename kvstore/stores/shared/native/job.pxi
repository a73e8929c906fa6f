# A process's part in a job, and memory of the region. Part of _shared.pyx.

cdef class RegionPiece:
    """Memory of the region under arrays; freed with the last of them."""

    cdef Job job
    cdef uint64_t offset, size
    cdef bint pinned

    def __dealloc__(self):
        if self.job is not None and not self.pinned and not self.job.closed:
            self.job.free_piece(self.offset, self.size)


cdef class Job:
    """One process's part in a job.

    Parameters
    ----------
    fd : int
        Descriptor of the region; the job owns it from now on.
    rank, size : int
    window : int
        Bytes of address space to map.
    reserved : int
        Bytes of the region that are reserved.
    found : bool
        Write the header: the region is new, and its first `KV_HEADER_BYTES` and some more are reserved.
    go_on : bool
        The loss of a worker is no error.
    spin : float
        Seconds that a wait spins before it sleeps.
    dead_after : float
        Seconds without a heartbeat after which a worker counts as lost.
    timeout : float
        Seconds after which a wait for the region's lock fails.
    """

    cdef kv_self *me
    cdef list owed  # memory to free later: pairs of offset and size
    cdef readonly bint closed
    cdef readonly dict handles
    cdef public double timeout
    cdef public object names  # the rank that each worker of the region has in its job
    cdef object counters  # keeps the memory of `me.counters` alive
    cdef object __weakref__

    def __cinit__(self, int fd, int rank, int size, uint64_t window, uint64_t reserved, bint found, bint go_on,
                  double spin, double dead_after, double timeout):
        cdef int w
        self.me = <kv_self *>calloc(1, sizeof(kv_self))
        if self.me == NULL:
            raise MemoryError()
        self.closed = True
        self.owed = []
        self.handles = {}
        self.timeout, self.names = timeout, range(size)
        self.me.fd = -1
        self.me.rank, self.me.size = rank, size
        for w in range(KV_MAX_WORKERS):
            self.me.pidfd[w] = -1
        self.me.word = KV_MAGIC
        self.me.spin = <uint64_t>(spin * 1e9)
        self.me.silence = <uint64_t>(min(dead_after, 1e9) * 1e9)
        self.me.crowded = size > len(os.sched_getaffinity(0))
        self.me.level = <const kv_level *const *>PyCapsule_GetPointer(cpu.level_pointer(), "kvstore.level")
        self.me.bounce = <char *>malloc(size * (KV_SHARE_BYTES + 256))
        if self.me.bounce == NULL:
            raise MemoryError()
        if kv_map_region(self.me, fd, window, max(reserved, <uint64_t>KV_HEADER_BYTES)):
            raise MemoryError(f"no address space for {reserved} bytes of shared memory (RLIMIT_AS?)")
        if found and kv_create_region(self.me, reserved):
            raise MemoryError("no memory for the job's table of keys")
        if found:
            kv_put(&self.me.head.go_on, go_on)
        if not kv_is_region(self.me):
            raise ValueError("the memory is not the region of a job, or is of another version of kvstore")
        if not kv_narrow_window(self.me):
            raise MemoryError(
                f"worker {rank}: the job's shared region has {kv_get(&self.me.head.top)} bytes, of which this process "
                f"can map {self.me.window}; raise its limit of address space (ulimit -v)")
        self.me.go_on = <int>kv_get(&self.me.head.go_on)

    def __dealloc__(self):
        if self.me != NULL:
            if not self.closed:
                self.leave(False)
            kv_unmap_region(self.me)  # every array in the region has kept this object alive
            free(self.me.bounce)
            free(self.me)

    @property
    def size(self):
        """Number of workers, as the founder has recorded it."""
        return kv_get(&self.me.head.n_workers)

    @property
    def continues_after_loss(self):
        """Whether the loss of a worker is no error, as the founder has recorded it."""
        return bool(self.me.go_on)

    def register(self):
        """Register this process with its rank; False: a living process has it."""
        cdef uint64_t scratch
        if kv_register(self.me):
            return False
        if not self.me.worker.log.scratch:
            self.me.worker.log.scratch = self.allocate(KV_LOG_ARRAYS * (KV_LOG_ELEMENTS * 8 + 1088) + 4096)
        if kv_start_heartbeat(self.me):
            raise MemoryError("no thread can be started for the heartbeat")
        self.closed = False
        return True

    def workers_have_met(self):
        """Whether a worker of the region has reached a barrier."""
        return any(kv_get(&self.me.head.worker[w].barriers) for w in range(self.me.size))

    def rank_was_used(self):
        """Whether a process had this rank before; only valid before `register`."""
        return kv_get(&self.me.head.worker[self.me.rank].incarnation) > 0

    def returned(self):
        """Whether this process has replaced another of its rank."""
        return self.me.incarnation > 1

    def become_member(self):
        """Make this worker a member: rounds wait for it."""
        self.retry_until_done(kv_make_member)

    def rejoin(self):
        """Replace an earlier process of this rank; no round waits for this worker until `catch_up` is called."""
        self.retry_until_done(kv_rejoin)

    def catch_up(self, Handle first):
        """After `rejoin`: advance towards the pass of the other workers over the keys, which begins with `first`.

        Returns whether this worker is in step. Until then the rounds of the other workers do not wait for it.
        """
        cdef int done
        with nogil:
            done = kv_catch_up(self.me, first.e)
        return bool(done)

    def observe(self, counters):
        """Count in `counters`, the counters of this process's store, from now on."""
        self.counters = counters
        self.me.store = counters.number
        self.me.counters = <kv_counters *>PyCapsule_GetPointer(counters.capsule, "kvstore.counters")

    def receive(self, uint64_t nbytes):
        """Count bytes of values that a call has received."""
        kv_count_received(self.me, nbytes)

    def enter(self, int phase, Handle handle, uint64_t round, uint64_t nbytes):
        """Begin a phase of `kvstore.observe.counters.PHASES` of one key or of several, which ends any other."""
        kv_enter_round(self.me, phase, KV_NO_SLICE if handle is None else handle.e.number, round, nbytes)

    def leave_phase(self):
        """End the phase of this thread, if there is one."""
        kv_leave()

    def wait_for_all(self):
        """Wait until every rank is registered; an outcome."""
        cdef int outcome
        with nogil:
            outcome = kv_wait(self.me, kv_all_registered, self.me)
        return outcome

    def probe(self):
        """Find out whether this process can read the others' private memory.

        If not, no worker of this job does so.
        """
        cdef int w
        kv_detect_losses(self.me)  # open the descriptors that report deaths
        for w in range(self.me.size):
            if w != self.me.rank and self.state(w) == KV_ALIVE and not kv_can_read_peer(self.me, w):
                kv_put(&self.me.head.no_peer_reads, 1)

    def can_read_peers(self):
        """Whether workers read each other's private memory."""
        return not kv_get(&self.me.head.no_peer_reads)

    @property
    def barriers(self):
        """The number of barriers that this worker has reached."""
        return kv_get(&self.me.worker.barriers)

    def arrive_at_barrier(self):
        """Reach the next barrier; returns its number."""
        cdef uint64_t number = self.barriers + 1
        kv_put(&self.me.worker.barriers, number)
        kv_wake_all(self.me)
        return number

    def wait_at_barrier(self, uint64_t number):
        """Wait until every member has reached barrier number `number`; an outcome."""
        cdef kv_barrier context
        cdef int outcome
        context.me, context.number = self.me, number
        with nogil:
            outcome = kv_wait_recorded(self.me, kv_barrier_complete, kv_about_barrier, &context, 1)
            if outcome != KV_TICK:
                kv_leave()
        return outcome

    def missing_at_barrier(self, uint64_t number):
        """Ranks that have not reached a barrier."""
        members = kv_get(&self.me.head.members)
        return [w for w in range(self.me.size)
                if members >> w & 1 and kv_get(&self.me.head.worker[w].barriers) < number]

    def stop_taking_part(self):
        """Let rounds and barriers no longer wait for this worker."""
        kv_deregister(self.me, KV_JOINED)

    def retire(self):
        """Let no round or barrier wait for this worker.

        Return whether no member remains, which is true for one worker only.
        """
        self.retry_until_done(kv_retire)
        return bool(self.me.is_last)

    def declare_lost(self):
        """Declare this worker lost. It is alive, and knows that it is fenced."""
        with nogil:
            kv_deregister(self.me, KV_LOST)

    def leave(self, bint lost):
        """End this process's part; with `lost`, the other workers treat it as dead. A second call does nothing."""
        cdef int given[KV_MAX_WORKERS + 1]
        cdef int n, i
        if self.me.fd < 0:
            return
        if not self.closed and not self.me.forked:
            kv_stop_heartbeat(self.me)
            with nogil:
                kv_deregister(self.me, KV_LOST if lost else KV_LEFT)
        self.closed = True
        with nogil:
            n = kv_give_up_descriptors(self.me, given)
        for i in range(n):
            os.close(given[i])
        # Arrays that handles keep would keep this object, and the garbage collector does not look into arrays. If
        # this object itself is collected, the handles are already gone.
        if self.handles is not None:
            for handle in self.handles.values():
                (<Handle>handle).arrays = [None, None]

    def note_fork(self):
        """Record that this process is a fork: the rank is its parent's."""
        self.me.forked = 1

    @property
    def forked(self):
        """Whether this process is a fork of the registered process."""
        return bool(self.me.forked)

    def check_membership(self):
        """`READY` while this worker may take part, else `PEER_LOST` or `FENCED`."""
        return kv_check_membership(self.me)

    def detect_losses(self):
        """Detect workers that have died or are silent."""
        kv_detect_losses(self.me)

    def state(self, int w):
        """State of a rank: 0 absent, 1 alive, 2 joined, 3 left, 4 lost, 5 registered and not a member yet."""
        return kv_worker_state(self.me, w)

    def pid(self, int w):
        """Process id of a rank."""
        return kv_get(&self.me.head.worker[w].pid)

    def silence(self, int w):
        """Seconds since a rank's last heartbeat."""
        return max(<int64_t>0, <int64_t>(kv_now_ns() - kv_get(&self.me.head.worker[w].beat))) / 1e9

    def lost(self):
        """Ranks that are lost and have not returned; the first loss comes first."""
        kv_note_losses(self.me)
        bits, first = kv_get(&self.me.head.lost), kv_get(&self.me.head.first_lost)
        return sorted([w for w in range(self.me.size) if bits >> w & 1], key=lambda w: w + 1 != first)

    def members(self):
        """Ranks of the members."""
        bits = kv_get(&self.me.head.members)
        return [w for w in range(self.me.size) if bits >> w & 1]

    def reserved(self):
        """Bytes of memory that the job holds."""
        return kv_get(&self.me.head.reserved)

    # ------------------------------------------------------------------------------------------ memory

    cdef int lock(self) except -1:
        return self.retry_until_done(kv_lock_region)

    cdef int retry_until_done(self, kv_attempt attempt) except -1:
        """Repeat an attempt that only waits for the region's lock until it succeeds."""
        cdef int outcome
        with nogil:
            outcome = attempt(self.me)
        if outcome == KV_TICK:
            clock = WaitClock(self.timeout)
            with clock.described_by(self.waiting_for_lock):
                outcome = self.continue_retry(attempt, clock)
        if outcome != KV_READY:
            raise InterruptedError("fenced")
        return 0

    cdef int continue_retry(self, kv_attempt attempt, clock) except -1:
        cdef int outcome = KV_TICK
        while outcome == KV_TICK:
            check_signals()
            clock.read()
            with nogil:
                outcome = attempt(self.me)
            if outcome == KV_TICK and clock.is_over:
                raise TimeoutError(self.waiting_for_lock(clock.waited))
            if outcome == KV_TICK and clock.notice_due():
                log.warning("%s", self.waiting_for_lock(clock.waited))
        return outcome

    def waiting_for_lock(self, waited):
        """Return the message of a wait for the region's lock, with its holder."""
        cdef int w = <int>(kv_get(&self.me.head.lock) & 0xff) - 1
        holder = "other workers hold one after the other" if w < 0 else (
            f"worker {self.names[w]} (process {self.pid(w)}, last heartbeat {self.silence(w):.1f} s ago) holds; look "
            "at that process: it may wait for memory")
        return (f"worker {self.names[self.me.rank]} has waited {waited:.0f} s for the lock of the job's shared region, "
                f"which {holder}")

    cdef uint64_t allocate(self, uint64_t size, int colour=0) except 0:
        cdef uint64_t offset
        self.lock()
        self.free_owed()
        with nogil:
            offset = kv_allocate_coloured(self.me, size, colour)
            kv_unlock_region(self.me)
        if not offset:
            raise no_memory(size)
        return offset

    cdef free_piece(self, uint64_t offset, uint64_t size):
        """Free memory; if another worker holds the lock, the next `allocate` does it.

        This method does not wait: the garbage collector may call it while this thread itself holds the lock.
        """
        cdef int locked
        if self.me.forked:
            return
        with nogil:
            locked = kv_try_lock(self.me)
        if not locked:
            self.owed.append((offset, size))
            return
        kv_free_locked(self.me, offset, size)
        kv_unlock_region(self.me)

    cdef free_owed(self):
        """Free the memory that `free_piece` could not; the caller holds the region's lock."""
        while self.owed:
            offset, size = self.owed.pop()
            kv_free_locked(self.me, offset, size)

    cdef array(self, uint64_t offset, shape, dtype, object base):
        """Return an array over memory of the region."""
        memory = np_ndarray(shape, dtype, buffer=RegionBuffer.over(self, self.me.base + offset, shape, dtype, base))
        return memory

    def empty(self, shape, dtype):
        """Return a new array in the region; other workers read it without a copy."""
        cdef RegionPiece piece = RegionPiece()
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        piece.offset = self.allocate(max(size, 1), KV_SOURCE_COLOUR + self.me.rank)
        piece.size = max(size, 1)
        piece.job = self
        return self.array(piece.offset, shape, dtype, piece)

    def offset_of(self, cnp.ndarray a):
        """Return the offset of a contiguous array in the region; 0: it is not there."""
        cdef char *data = <char *>cnp.PyArray_DATA(a)
        if data < self.me.base or data >= self.me.base + kv_get(&self.me.head.top):
            return 0
        return data - self.me.base

    def place_of(self, cnp.ndarray a):
        """As `offset_of`, for an array that other workers change; KVStoreError if it is not in the region."""
        cdef uint64_t offset = self.offset_of(a)
        if not kv_is_given(self.me, offset, a.nbytes):
            raise KVStoreError(f"an array of {a.nbytes} bytes that is to be updated is not in the job's shared region")
        return offset


cdef class Phase:
    """A phase of this thread, of one key or of several, as a context; see `Job.enter`."""

    cdef Job job
    cdef int phase
    cdef uint64_t slice, round, nbytes

    def __cinit__(self, Job job, int phase, Handle handle, uint64_t round, uint64_t nbytes):
        self.job, self.phase, self.round, self.nbytes = job, phase, round, nbytes
        self.slice = KV_NO_SLICE if handle is None else handle.e.number

    def __enter__(self):
        kv_enter_round(self.job.me, self.phase, self.slice, self.round, self.nbytes)

    def __exit__(self, *_):
        kv_leave()


cdef class RegionBuffer:
    """A buffer over memory of the region that keeps its owner alive."""

    cdef object owner, job
    cdef char *data
    cdef Py_ssize_t size

    @staticmethod
    cdef RegionBuffer over(Job job, char *data, shape, dtype, object owner):
        cdef RegionBuffer self = RegionBuffer()
        self.job, self.owner, self.data = job, owner, data
        self.size = dtype.itemsize
        for n in shape:
            self.size *= n
        return self

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data, self.size, 0, flags)

    def __releasebuffer__(self, Py_buffer *view):
        pass


cdef extern from "Python.h":
    int PyBuffer_FillInfo(Py_buffer *view, object owner, void *data, Py_ssize_t size, int readonly, int flags) except -1
    int PyErr_CheckSignals() except -1


cdef int check_signals() except -1:
    return PyErr_CheckSignals()


def no_memory(size):
    """Return the error of a region that cannot grow."""
    return MemoryError(
        f"no memory for {size} more bytes of the job's shared region: the machine, its cgroup or a limit of this "
        "process (RLIMIT_AS, RLIMIT_FSIZE) has no more"
    )



_DAMAGE = {
    KV_INTACT: "",
    KV_DAMAGED_HEADER: "its header is overwritten",
    KV_DAMAGED_ENTRY: "the entry of a key is overwritten",
    KV_DAMAGED_TEXT: "a description of states or settings is overwritten",
}


def damage_of(int fd):
    """Describe the damage to the region of a running job in which this process has no part; "": there is none.

    The region is only read. None: it is of another version of kvstore, or its founder has not finished it.
    """
    return _DAMAGE.get(kv_find_damage(fd))
