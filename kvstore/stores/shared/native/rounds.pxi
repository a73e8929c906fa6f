# Rounds of keys. Part of _shared.pyx.

cdef class Call:
    """A round of a key that this process waits for, and the arrays that receive its result."""

    cdef kv_call c
    cdef readonly Handle handle
    cdef list keep
    cdef char *few[8]
    cdef char **many
    cdef unsigned char *delivered
    cdef int pending  # an outcome that `advance` is yet to return
    cdef bint receives  # a result is expected, and not received yet

    def __dealloc__(self):
        free(self.many)
        free(self.delivered)

    def __init__(self, Handle handle, list outs, bint large, bint receives=False):
        """Prepare a wait for the last round that this process has pushed into.

        `outs`: plain arrays of the key's shape and type. `large`: the whole call is larger than the cache.
        `receives`: the caller gets the value, in `outs` or otherwise; its bytes are counted.
        """
        cdef Py_ssize_t i, n = len(outs)
        cdef char **into = self.few
        self.handle, self.keep, self.receives = handle, outs, receives
        if n > 8:
            into = self.many = <char **>malloc(n * sizeof(char *))
        if n:
            self.delivered = <unsigned char *>calloc(handle.e.chunks, 1)
        if into == NULL or (n and self.delivered == NULL):
            raise MemoryError()
        for i in range(n):
            into[i] = <char *>cnp.PyArray_DATA(<cnp.ndarray>outs[i])
        self.c.entry = handle.e
        self.c.round = pushed_round(handle)
        self.c.outs, self.c.n_outs = into, <int>n
        self.c.delivered = NULL if kv_overlaps_slot(handle.job.me, &self.c) else self.delivered
        self.c.stream = large

    @property
    def round(self):
        """The round that the call waits for."""
        return self.c.round

    @property
    def opens(self):
        """Whether `finish` has found that this process has opened the round, and is to carry it out."""
        return self.pending == KV_PLAN

    def advance(self):
        """Advance the round towards its end, and do work for it; return an outcome."""
        cdef int outcome
        cdef kv_self *me = self.handle.job.me
        if self.pending != KV_READY:
            outcome, self.pending = self.pending, KV_READY
            return outcome
        with nogil:
            if kv_complete_round(kv_get(&self.c.entry.phase)) >= self.c.round:
                outcome = KV_READY
            elif self.c.n_outs and self.c.entry.nbytes <= KV_SMALL_KEY and not self.c.delivered[0]:
                outcome = kv_sum_small(me, &self.c, 1)
            else:
                outcome = kv_advance(me, &self.c)
            if outcome != KV_TICK:
                kv_leave()
        if outcome == KV_READY:
            count_rounds(self.handle, self.c.round)
        return outcome

    def help(self):
        """Do the work of the round that needs no wait; return an outcome."""
        cdef int outcome
        with nogil:
            outcome = kv_bring_forward(self.handle.job.me, &self.c, 0)
            kv_leave()
        if outcome == KV_READY:
            count_rounds(self.handle, self.c.round)
        return outcome

    def deliver(self):
        """Write the result to the arrays that do not have it yet; return an outcome."""
        cdef int outcome = KV_READY
        cdef kv_self *me = self.handle.job.me
        if self.c.entry.nbytes > KV_SMALL_KEY or not self.c.n_outs or not self.c.delivered[0]:
            with nogil:
                outcome = kv_deliver(me, &self.c)
                if outcome != KV_TICK:
                    kv_leave()
        if outcome == KV_READY and kv_check_membership(me) == KV_FENCED:
            return KV_FENCED  # what was copied may be of a round of the others
        if self.receives and outcome == KV_READY:
            self.receives = False
            kv_count_received(me, self.c.entry.nbytes)
        return outcome

    def finish(self):
        """Wait for the round, and deliver; False if there is something to report, or more to do.

        That may be work for this worker, or a wait that has become long.
        """
        cdef kv_self *me = self.handle.job.me
        self.pending = KV_READY
        self.pending = self.advance()
        if self.pending != KV_READY or kv_first_unreported(me, self.handle.e, self.handle.reported, self.c.round):
            return False
        return not kv_left_out(me, self.handle.e, self.c.round) and self.deliver() == KV_READY


cdef class Calls:
    """Rounds of several small dense keys that this process waits for, each with one array that receives its result.
    """

    cdef readonly list handles
    cdef list outs
    cdef int outcome  # of the last key processed

    def __init__(self, list handles, list outs=None):
        """`outs`: plain arrays of the keys' shapes and types; None: the caller does not need the results."""
        if outs is not None and len(outs) != len(handles):
            raise ValueError(f"{len(outs)} arrays for {len(handles)} keys")
        self.handles, self.outs, self.outcome = handles, outs, KV_TICK

    def finish(self, Py_ssize_t at):
        """As `Call.finish`, for each key from number `at` on.

        Return the first unfinished one, or the number of keys.
        """
        cdef Py_ssize_t n = len(self.handles)
        while at < n and self.finish_one(at):
            at += 1
        return at

    def help(self, Py_ssize_t at):
        """As `Call.help` for each key from number `at` on; return the first that needs more, or the number of keys.
        """
        cdef Py_ssize_t n = len(self.handles)
        while at < n and self.help_one(at):
            at += 1
        return at

    def late(self, Py_ssize_t at):
        """Return the call of the key at which `finish` or `help` has stopped, to continue it."""
        cdef Call call = Call(self.handles[at], [] if self.outs is None else [self.outs[at]], False, self.outs is not None)
        if self.outcome != KV_TICK:
            call.pending = self.outcome  # KV_PLAN: this worker has opened the round, and must plan it
        return call

    cdef bint finish_one(self, Py_ssize_t at) except *:
        cdef Handle h = <Handle?>self.handles[at]
        cdef kv_self *me = h.job.me
        cdef kv_call c
        cdef char *target[1]
        cdef unsigned char delivered = 0
        self.begin(&c, h)
        target[0] = <char *>cnp.PyArray_DATA(<cnp.ndarray?>self.outs[at])
        c.outs, c.n_outs, c.delivered = &target[0], 1, &delivered
        with nogil:
            if kv_complete_round(kv_get(&c.entry.phase)) >= c.round:
                self.outcome = KV_READY
            else:
                self.outcome = kv_sum_small(me, &c, 1)
            if self.outcome != KV_TICK:
                kv_leave()
        if self.outcome != KV_READY:
            return False
        count_rounds(h, c.round)
        if kv_first_unreported(me, h.e, h.reported, c.round) or kv_left_out(me, h.e, c.round):
            return False
        if not delivered:
            with nogil:
                self.outcome = kv_deliver(me, &c)
                kv_leave()
            if self.outcome != KV_READY:
                self.outcome = KV_READY  # of the round
                return False
        if kv_check_membership(me) == KV_FENCED:
            return False  # what was copied may be of a round of the others
        kv_count_received(me, h.e.nbytes)
        return True

    cdef bint help_one(self, Py_ssize_t at) except *:
        cdef Handle h = <Handle?>self.handles[at]
        cdef kv_call c
        self.begin(&c, h)
        with nogil:
            self.outcome = kv_bring_forward(h.job.me, &c, 0)
            kv_leave()
        if self.outcome == KV_READY:
            count_rounds(h, c.round)
        return (self.outcome == KV_READY or self.outcome == KV_TICK) and not kv_has_failed(h.e, c.round)

    cdef void begin(self, kv_call *c, Handle h):
        memset(c, 0, sizeof(c[0]))
        c.entry, c.round = h.e, pushed_round(h)


def can_arrive(Job job, list handles):
    """Whether this worker can push copies of small arrays into all of these keys without a wait."""
    cdef Handle h
    cdef kv_self *me = job.me
    cdef kv_part *part
    cdef uint64_t arrived
    if job.closed or me.forked or kv_check_membership(me) != KV_READY:
        return False
    for handle in handles:
        h = <Handle?>handle
        part = &kv_key_parts(me, h.e)[me.rank]
        arrived = kv_get(&part.arrived)
        if not part.slot[arrived + 1 & 1] or kv_complete_round(kv_get(&h.e.phase)) + 1 < arrived:
            return False
    return True


def arrive_with_copies(list handles, list values, float divisor=1):
    """As `arrive_with_copy`, for each key."""
    cdef Py_ssize_t at
    cdef Handle h
    for at in range(len(handles)):
        h = <Handle?>handles[at]
        kv_arrive_divided(h.job.me, h.e, KV_SLOT, divisor, slot_with_copy(h, <cnp.ndarray?>values[at]))
    kv_leave()


def wait_for_free_slot(Handle handle):
    """Wait until the memory of the next push is free; return an outcome."""
    cdef int outcome
    with nogil:
        outcome = kv_wait_for_free_slot(handle.job.me, handle.e)
        if outcome != KV_TICK:
            kv_leave()
    return outcome


def is_clear(Job job, list keys):
    """Whether no push into any of these keys has to wait for its memory."""
    cdef Handle h
    cdef uint64_t arrived
    for key in keys:
        known = job.handles.get(key)
        if known is None:
            continue
        h = known
        arrived = kv_get(&kv_key_parts(job.me, h.e)[job.me.rank].arrived)
        if arrived >= 2 and kv_complete_round(kv_get(&h.e.phase)) + 1 < arrived:
            return False
    return True


def rounds_of(list handles):
    """Return the last round of each key that this process pushed into."""
    return [pushed_round(<Handle>h) for h in handles]


def begin_call(Job job, list handles):
    """Begin a call: all pushes until `end_call` belong to it, and no round is opened with a part of it only.

    The stamps of the pushes are recorded here, in the order of the keys; the pushes may follow in another order.
    """
    cdef Handle h
    kv_begin_call(job.me)
    for handle in handles:
        h = <Handle?>handle
        kv_record_stamp(job.me, h.e, pushed_round(h) + 1)


def end_call(Job job):
    """End a call: this worker has pushed into all of its keys."""
    kv_end_call(job.me)


def slot(Handle handle):
    """Return the slot of this worker's next push of the key, as an array; the caller writes to it at once."""
    cdef kv_self *me = handle.job.me
    cdef kv_part *part = &kv_key_parts(me, handle.e)[me.rank]
    kv_announce_overwrite(me, handle.e)
    return handle.job.array(slot_of(handle, part), handle.shape, handle.dtype, None)


cdef uint64_t slot_of(Handle handle, kv_part *part) except 0:
    cdef uint64_t parity = kv_get(&part.arrived) + 1 & 1
    if not part.slot[parity]:
        part.slot[parity] = handle.job.allocate(max(<uint64_t>1, handle.e.nbytes), KV_SOURCE_COLOUR + handle.job.me.rank)
    return part.slot[parity]


def arrive_with_slot(Handle handle, float divisor=1):
    """Push the slot. With a `divisor`, here and below, the sum divides the float32 numbers by it."""
    cdef kv_self *me = handle.job.me
    kv_arrive_divided(me, handle.e, KV_SLOT, divisor, slot_of(handle, &kv_key_parts(me, handle.e)[me.rank]))


def arrive_with_copy(Handle handle, cnp.ndarray value, float divisor=1):
    """Copy a small array, plain and of the key's shape and type, to the slot, and push it."""
    kv_arrive_divided(handle.job.me, handle.e, KV_SLOT, divisor, slot_with_copy(handle, value))
    kv_leave()


cdef uint64_t slot_with_copy(Handle handle, cnp.ndarray value) except 0:
    cdef kv_self *me = handle.job.me
    cdef uint64_t slot = slot_of(handle, &kv_key_parts(me, handle.e)[me.rank])
    kv_enter_round(me, KV_MOVING, handle.e.number, pushed_round(handle) + 1, handle.e.nbytes)
    kv_announce_overwrite(me, handle.e)
    memcpy(me.base + slot, cnp.PyArray_DATA(value), handle.e.nbytes)
    return slot


def packing_slot(Handle handle, int code):
    """Return the slot as bytes: as many as the packed key needs."""
    array = slot(handle)
    return array.reshape(-1).view(np.uint8)[:kv_encoded_bytes(code, handle.e.n)]


def arrive_packed(Handle handle, int code, double threshold):
    """Push the packed numbers in the slot."""
    cdef kv_self *me = handle.job.me
    kv_arrive_packed(me, handle.e, code, <float>threshold, slot_of(handle, &kv_key_parts(me, handle.e)[me.rank]))


def arrive_in_region(Handle handle, uint64_t offset, bint in_place, float divisor=1):
    """Push an array of the region; with `in_place`, it receives the sum."""
    kv_arrive_divided(handle.job.me, handle.e, KV_IN_PLACE if in_place else KV_SLOT, divisor, offset)


def arrive_privately(Handle handle, cnp.ndarray array, float divisor=1):
    """Push an array that other workers will read from this process's memory while this process waits."""
    kv_arrive_divided(handle.job.me, handle.e, KV_PRIVATE, divisor, <uintptr_t>cnp.PyArray_DATA(array))


def arrive_with_rows(Handle handle, uint64_t offset, uint64_t nbytes):
    """Push rows of a table with `nbytes` of data: the count, the ids and the data are at `offset`."""
    kv_arrive(handle.job.me, handle.e, KV_ROWS, offset)
    kv_count_sent(handle.job.me, nbytes)


def arrive_on_gpu(Handle handle):
    """Push a value on a GPU; the opener of the round decides how it is summed."""
    kv_arrive(handle.job.me, handle.e, KV_ON_GPU, 0)


def opened_on_gpu(Handle handle):
    """Return the ranks with a part of the opened round on a GPU, and all ranks in the round."""
    cdef uint64_t round = kv_round_of(kv_get(&handle.e.phase))
    cdef kv_part *part = kv_key_parts(handle.job.me, handle.e)
    if not kv_has_on_gpu(handle.job.me, handle.e, round, handle.e.mask):
        return [], []
    ranks = [w for w in range(handle.job.me.size) if handle.e.mask >> w & 1]
    return [w for w in ranks if kv_kind_of(&part[w], round & 1) == KV_ON_GPU], ranks


def opened_with_rows(Handle handle):
    """Whether the round that this worker has opened has parts that are rows."""
    return bool(kv_has_rows(handle.job.me, handle.e, kv_round_of(kv_get(&handle.e.phase)), handle.e.mask))


def opened_privately(Handle handle):
    """Whether a part of the round that this worker has opened is in the private memory of another process."""
    return bool(kv_has_kind(handle.job.me, handle.e, kv_round_of(kv_get(&handle.e.phase)), handle.e.mask, KV_PRIVATE))


def opened_sources(Handle handle):
    """Return the parts of the opened round, by rank: arrays, offsets of rows, or None for GPU memory."""
    return sources_of(handle, kv_round_of(kv_get(&handle.e.phase)), handle.e.mask)


cdef list sources_of(Handle handle, uint64_t round, uint64_t mask):
    cdef kv_part *part = kv_key_parts(handle.job.me, handle.e)
    cdef int w, parity = round & 1
    found = []
    for w in range(handle.job.me.size):
        if not mask >> w & 1:
            continue
        if kv_kind_of(&part[w], parity) == KV_ROWS:
            found.append(part[w].source[parity])
        elif kv_kind_of(&part[w], parity) == KV_ON_GPU:
            found.append(None)
        elif kv_kind_of(&part[w], parity) == KV_PACKED:
            code, array = kv_code_of(&part[w], parity), np.empty(handle.shape, handle.dtype)
            packed = handle.job.array(part[w].source[parity], (kv_encoded_bytes(code, handle.e.n),), np.dtype("u1"), None)
            cpu.decode(code, part[w].threshold[parity], [packed], array)
            found.append(array)
        elif kv_kind_of(&part[w], parity) == KV_PRIVATE:
            array = np.empty(handle.shape, handle.dtype)
            if kv_has_failed(handle.e, round) or kv_read_private(handle.job.me, w, part[w].source[parity], <char *>cnp.PyArray_DATA(array), array.nbytes):
                raise OSError(f"the memory of worker {w} could not be read")
            found.append(quotient(array, &part[w], parity))
        else:
            array = handle.job.array(part[w].source[parity], handle.shape, handle.dtype, None)
            found.append(quotient(array, &part[w], parity))
    return found


cdef object quotient(array, kv_part *part, int parity):
    """Return a plain part as the sum uses it: an array, of any shape."""
    if kv_code_of(part, parity) != KV_DIVIDED:
        return array
    return np.divide(array, np.float32(part.threshold[parity]), out=np.empty_like(array))


def quick_pushpull(Job job, key, value, out):
    """Push and pull one small dense key; return None if the general path is needed, else an outcome or a `Call`.

    `READY`: it is done. A `Call`: this worker has pushed, and the caller waits for the call; this function waits no
    longer than a spin.
    """
    handle = job.handles.get(key)
    if handle is None or job.closed or job.me.forked:
        return None
    cdef Handle h = handle
    cdef kv_self *me = job.me
    cdef kv_part *part
    cdef kv_call c
    cdef char *target[1]
    cdef unsigned char delivered = 0
    cdef int outcome
    if h.e.nbytes > KV_SMALL_KEY or h.e.sparse or not kv_replaces_by_sum(me, h.e):
        return None
    if not fits(value, h.like, out is None) or not (out is None or fits(out, h.like, True)):
        return None
    part = &kv_key_parts(me, h.e)[me.rank]
    if kv_check_membership(me) != KV_READY or kv_complete_round(kv_get(&h.e.phase)) + 1 < kv_get(&part.arrived):
        return None
    if not part.slot[kv_get(&part.arrived) + 1 & 1]:
        return None
    kv_enter_round(me, KV_MOVING, h.e.number, kv_get(&part.arrived) + 1, h.e.nbytes)
    kv_announce_overwrite(me, h.e)
    memcpy(me.base + slot_of(h, part), cnp.PyArray_DATA(<cnp.ndarray>value), h.e.nbytes)
    kv_arrive(me, h.e, KV_SLOT, slot_of(h, part))
    target[0] = <char *>cnp.PyArray_DATA(<cnp.ndarray>(value if out is None else out))
    memset(&c, 0, sizeof(c))
    c.entry, c.round = h.e, kv_get(&part.arrived)
    c.outs, c.n_outs = &target[0], 1
    c.delivered = &delivered
    with nogil:
        outcome = kv_sum_small(me, &c, 0)
        if outcome == KV_READY and not delivered:
            outcome = kv_deliver(me, &c)
        if outcome != KV_TICK:
            kv_leave()
    if outcome == KV_READY and kv_check_membership(me) == KV_FENCED:
        outcome = KV_FENCED
    if outcome == KV_READY and not kv_first_unreported(me, h.e, h.reported, c.round) and not kv_left_out(me, h.e, c.round):
        count_rounds(h, c.round)
        kv_count_received(me, h.e.nbytes)
        return KV_READY
    cdef Call late = Call(h, [value if out is None else out], False, True)
    if outcome != KV_TICK:
        late.pending = outcome  # KV_PLAN: this worker has opened the round, and must plan it
    return late


def quick_call(Handle h, cnp.ndarray like, value, out):
    """Push, pull or both, for a small key that the workers do not sum each for itself; None: use the general path.

    `value` and `out`, one of which may be None, are arrays as `like`. With a `value`, this worker has arrived, and
    has woken no other: the caller advances the call at once, and opens the round if it was the last to arrive.
    """
    cdef kv_self *me = h.job.me
    cdef kv_part *part
    if h.job.closed or me.forked or h.e.nbytes > KV_SMALL_KEY or h.e.sparse or kv_check_membership(me) != KV_READY:
        return None
    if not (value is None or fits(value, like, False)) or not (out is None or fits(out, like, True)):
        return None
    if value is not None:
        part = &kv_key_parts(me, h.e)[me.rank]
        if kv_complete_round(kv_get(&h.e.phase)) + 1 < kv_get(&part.arrived):
            return None
        if not part.slot[kv_get(&part.arrived) + 1 & 1]:
            return None
        kv_arrive_silently(me, h.e, KV_SLOT, 0, slot_with_copy(h, value))
        kv_count_sent(me, h.e.nbytes)
        kv_leave()
    return Call(h, [] if out is None else [out], False, out is not None)


# ------------------------------------------------------------------------------------------- updates by Python

def publish_work(Handle handle, int rule, tuple params, master, list states, uint64_t updates):
    """Publish the work of the round that this worker has opened: an update by a compiled rule."""
    cdef kv_entry *e = handle.e
    cdef int i
    if not handle.is_opened:
        return
    for i in range(16):
        e.params[i] = params[i] if i < len(params) else 0
    places = [handle.job.place_of(array) for array in states]
    e.master = handle.job.place_of(master) if master is not None else 0
    e.n_states = <int>len(places)
    for i in range(e.n_states):
        e.states[i] = places[i]
    kv_put(kv_next_updates(e), updates)
    kv_publish_work(handle.job.me, e, handle.held, rule)


def sum_opened(Handle handle, cnp.ndarray to):
    """Write the sum of the round that this worker has opened to an array of this process."""
    cdef uint64_t phase = kv_get(&handle.e.phase)
    cdef char *data = <char *>cnp.PyArray_DATA(to)
    with nogil:
        kv_sum_private(handle.job.me, handle.e, kv_round_of(phase), data)


def sum_unopened(Handle handle, uint64_t round, merge):
    """Return the sum of a round that has all its parts and no present opener; None: it is not such a round.

    If parts are rows, it is the result of `merge` for the parts, as `opened_sources` returns them.
    """
    cdef kv_self *me = handle.job.me
    cdef uint64_t within = 0
    cdef char *data
    if not kv_is_unopened(me, handle.e, round, &within):
        return None
    if kv_has_rows(me, handle.e, round, within):
        total = merge(sources_of(handle, round, within))
        return None if kv_has_failed(handle.e, round) else total
    total = np.empty(handle.shape, handle.dtype)
    data = <char *>cnp.PyArray_DATA(total)
    with nogil:
        kv_sum_of(me, handle.e, round, within, data)
        kv_leave()
    return None if kv_has_failed(handle.e, round) else total


def close_opened(Handle handle, bint other, updates=None):
    """Complete the opened round, if this worker is still its opener; with `other`, the other value is in use then."""
    cdef uint64_t current = kv_current_of(handle.held)
    if not handle.is_opened:
        return
    if updates is not None:
        kv_put(kv_next_updates(handle.e), updates)
    kv_end_round(handle.job.me, handle.e, handle.held, 1 - current if other else current)


cdef class OpenedWork:
    """Work on an opened round, as a context; False if another worker has become the opener."""

    cdef Handle handle
    cdef uint64_t round
    cdef bint begun

    def __cinit__(self, Handle handle, uint64_t round):
        self.handle, self.round = handle, round

    def __enter__(self):
        self.begun = kv_begin_work(self.handle.job.me)
        return self.begun and is_opener(self.handle, self.round)

    def __exit__(self, *_):
        if self.begun:
            kv_end_work(self.handle.job.me)


cdef bint is_opener(Handle handle, uint64_t round) noexcept:
    """Whether this worker is the opener of a round, and is not fenced."""
    cdef kv_self *me = handle.job.me
    return kv_is_opener(me, kv_get(&handle.e.phase), round) and kv_check_membership(me) != KV_FENCED


def close_if_opener(Handle handle, uint64_t round, bint other):
    """As `close_opened`, for a given round; return whether this worker has completed it."""
    cdef uint64_t phase = kv_get(&handle.e.phase), current = kv_current_of(phase)
    if not kv_is_opener(handle.job.me, phase, round):
        return False
    return bool(kv_end_round(handle.job.me, handle.e, phase, 1 - current if other else current))


# ------------------------------------------------------------------------------------------- the job's settings

def mode(Job job):
    """Return the mode of the job: odd if an updater or optimizer is set."""
    return kv_get(&job.me.head.mode)


def note_mode(Job job, uint64_t mode, bint able):
    """Record the mode that this process can carry out, or that it cannot."""
    job.me.tried = mode
    if able:
        job.me.mode = mode


def set_mode(Job job, uint64_t mode):
    """Change the mode of the job; the caller holds `RegionLock`."""
    kv_put(&job.me.head.mode, mode)
    kv_wake_all(job.me)


def settings_version(Job job):
    """Return the version of the settings, which changes with each of their changes."""
    return kv_get(&job.me.head.settings_version)


def settings(Job job):
    """Return the description of the optimizer; the caller holds `RegionLock`."""
    return text_at(job, kv_get(&job.me.head.settings))


def set_settings(Job job, bytes text):
    """Set the description of the optimizer; the caller holds `RegionLock`."""
    if kv_set_settings(job.me, <char *>text, len(text)):
        raise no_memory(len(text))


def num_update(Job job):
    """Return the largest count of updates over all keys."""
    return kv_get(&job.me.head.num_update)


def begin_counts(Job job, uint64_t epoch, uint64_t begin, uint64_t time):
    """Give the pushes of this worker stamps of an epoch; `begin` is the count of a key without updates."""
    job.me.epoch, job.me.begin, job.me.time = epoch, begin, time


def note_stamp(Handle handle, uint64_t round, uint64_t stamp):
    """Record the stamp of this worker's push into a round, before it arrives there."""
    kv_key_parts(handle.job.me, handle.e)[handle.job.me.rank].stamp[round & 1] = stamp


def stamp(Handle handle, uint64_t round, uint64_t mask):
    """Return the highest stamp of a round's pushes by the workers in `mask`."""
    cdef kv_part *part = kv_key_parts(handle.job.me, handle.e)
    cdef uint64_t found = 0
    cdef int w
    for w in range(handle.job.me.size):
        if mask >> w & 1 and part[w].stamp[round & 1] > found:
            found = part[w].stamp[round & 1]
    return found


def stamp_of_opened(Handle handle):
    """Return the highest stamp of the pushes of the opened round."""
    return stamp(handle, kv_complete_round(kv_get(&handle.e.phase)) + 1, handle.e.mask)


def raise_num_update(Job job, uint64_t n):
    """Raise the largest count to at least `n`."""
    cdef uint64_t now = kv_get(&job.me.head.num_update)
    while now < n and not kv_swap(&job.me.head.num_update, now, n):
        now = kv_get(&job.me.head.num_update)


def set_num_update(Job job, uint64_t n):
    """Set the largest count."""
    kv_put(&job.me.head.num_update, n)


cdef class RegionLock:
    """The region's lock, as a context; for short sections without waits."""

    cdef Job job

    def __cinit__(self, Job job):
        self.job = job

    def __enter__(self):
        self.job.lock()

    def __exit__(self, *_):
        kv_unlock_region(self.job.me)
