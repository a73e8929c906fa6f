# Slices of a server. Part of _native.pyx.

cdef class SliceState:
    """One slice on its server: rounds, parts, and who waits for them."""

    cdef kp_slice s
    cdef object held

    def __cinit__(self, int store, uint32_t id, *_args, **_named):
        self.s.owner = <void *>self
        self.s.store, self.s.id = store, id

    def __dealloc__(self):
        kp_close_slice(&self.s)
        release_dropped()

    @property
    def id(self):
        return self.s.id

    @property
    def defined(self):
        """Whether the scheduler has said what it is."""
        return bool(self.s.defined)

    @defined.setter
    def defined(self, bint defined):
        self.s.defined = defined

    @property
    def ready(self):
        """Whether it has a value."""
        return bool(self.s.ready)

    @ready.setter
    def ready(self, bint ready):
        self.s.ready = ready

    @property
    def kept(self):
        """Whether it has been in a snapshot."""
        return bool(self.s.kept)

    @kept.setter
    def kept(self, bint kept):
        self.s.kept = kept

    @property
    def round(self):
        """The last round that is complete."""
        return self.s.round

    @round.setter
    def round(self, uint64_t round):
        self.s.round = round

    @property
    def busy(self):
        """What is being done to it, as `SliceActivity`."""
        return self.s.busy

    @busy.setter
    def busy(self, uint8_t activity):
        self.s.busy = activity

    @property
    def special(self):
        """Whether the Python class keeps state that `rounds.h` does not know."""
        return bool(self.s.special)

    @special.setter
    def special(self, bint special):
        self.s.special = special

    def hold(self, value not None):
        """Know where the value is, a `SliceValue` or a `TableRows`, so that rounds can be summed without Python."""
        if isinstance(value, TableRows):
            self.s.table = &(<TableRows>value).t
        else:
            self.s.value = &(<SliceValue?>value).v
        self.held = value

    # ------------------------------------------------------------------------------------------------ parts

    def open_rounds(self):
        """Numbers of the rounds that are not complete and have parts, ascending."""
        return sorted([self.s.open[at].number for at in range(self.s.n_open)])

    def ranks(self, uint64_t round):
        """Ranks that have pushed into a round, ascending."""
        cdef kp_open *open = kp_find_open(&self.s, round)
        return [] if open == NULL else [open.parts[at].rank for at in range(open.n)]

    def put(self, uint64_t round, int32_t rank, object record, frames):
        """Keep a part; False if there is one of that rank."""
        cdef kp_record r
        cdef kp_open *open
        cdef kp_payload payload
        cdef int failed
        to_record(record, &r)
        open = kp_open_round(&self.s, round)
        if open == NULL:
            raise MemoryError()
        if kp_part_of(open, rank) >= 0:
            return False
        payload = kp_payload(buffer_of(frames), NULL, NULL, NULL)
        failed = kp_insert_part(open, rank, &r, &payload)
        kp_release(payload.data)
        if failed:
            raise MemoryError()
        return True

    def parts(self, uint64_t round):
        """What was pushed into a round: (rank, record, frames), by rank."""
        cdef kp_open *open = kp_find_open(&self.s, round)
        if open == NULL:
            return []
        return [(open.parts[at].rank, *part_of(&open.parts[at])) for at in range(open.n)]

    def drop_parts(self, uint64_t round, ranks=None):
        """Drop what these ranks have pushed into a round; None: all of it."""
        cdef kp_open *open = kp_find_open(&self.s, round)
        cdef int at, left = 0
        if open == NULL:
            return
        for at in range(open.n):
            if ranks is None or open.parts[at].rank in ranks:
                kp_release_part(&open.parts[at])
            else:
                open.parts[left] = open.parts[at]
                left += 1
        open.n = left
        if not left:
            kp_drop_open(&self.s, open)
        release_dropped()

    def complete(self):
        """One round more is complete."""
        kp_complete_round(&self.s)
        release_dropped()

    def next_round(self):
        """The next round as it is to be summed."""
        cdef kp_open *open = kp_find_open(&self.s, self.s.round + 1)
        cdef uint32_t version = 0
        cdef uint64_t clock = 0
        cdef int at
        if open != NULL:
            for at in range(open.n):
                version = max(version, open.parts[at].request.version)
                clock = max(clock, open.parts[at].request.clock)
        return SliceRound(self.s.id, self.s.round + 1, self.parts(self.s.round + 1), version, clock)

    # -------------------------------------------------------------------------------------------- who waits

    def wait_for_value(self, Session session not None, object record, frames):
        """Note a request that is answered with the value, once its round is complete."""
        wait_in(&self.s.pulls, session, record, frames)

    def wait_to_push(self, Session session not None, object record):
        """Note a push that is answered once the rounds have come near it."""
        wait_in(&self.s.held, session, record, ())

    def take_value_waiters(self):
        """Remove and return the requests that wait for a value: (session, record, frames)."""
        return taken(&self.s.pulls)

    def take_push_waiters(self):
        """Remove and return the pushes that wait for their answer: (session, record)."""
        return [one[:2] for one in taken(&self.s.held)]

    def leave(self, Session session not None):
        """Remove the waiting requests of a session."""
        drop_of(&self.s.pulls, &session.s)
        drop_of(&self.s.held, &session.s)


cdef tuple part_of(const kp_part *part):
    cdef kp_record r = part.request
    if part.at != NULL and r.place == KP_SHARED:  # its data is a segment, and no message's
        r.frame = 0
        return from_record(&r), (<object>part.data.owner,)
    record, frames = request_of(&r, part.data)
    return record, frames if part.more == NULL else (*frames, *payload_of(part.more))


cdef int wait_in(kp_waiters *waiters, Session session, object record, frames) except -1:
    cdef kp_record r
    cdef kp_buffer *data = NULL
    to_record(record, &r)
    if frames:
        data = buffer_of(frames)
    cdef int failed = kp_add_waiter(waiters, &session.s, &r, data)
    kp_release(data)
    if failed:
        raise MemoryError()
    return 0


cdef list taken(kp_waiters *waiters):
    cdef int at
    cdef kp_waiter *one
    cdef list found = []
    for at in range(waiters.n):
        one = &waiters.all[at]
        found.append((<Session>one.session.owner, *request_of(&one.request, one.data)))
    kp_drop_waiters(waiters)
    release_dropped()
    return found


cdef void drop_of(kp_waiters *waiters, kp_session *session) noexcept:
    cdef int at, left = 0
    for at in range(waiters.n):
        if waiters.all[at].session == session:
            kp_release(waiters.all[at].data)
        else:
            waiters.all[left] = waiters.all[at]
            left += 1
    waiters.n = left
    release_dropped()


cdef class Members:
    """The ranks that the rounds of a store wait for."""

    cdef kp_members m

    def __dealloc__(self):
        free(self.m.needed)

    def set(self, needed, bint usual, uint64_t epoch=0, bint at_once=False):
        """Set the ranks; `usual`: the store has rounds, and no member is lost, rejoins, or left without `join`.

        `at_once`: there are no rounds, and no member or server is lost or on its way back. `epoch` is that of the
        view which tells so.
        """
        cdef list ranks = sorted(needed)
        cdef int32_t *made = <int32_t *>malloc(max(1, len(ranks)) * sizeof(int32_t))
        if made == NULL:
            raise MemoryError()
        for at, rank in enumerate(ranks):
            made[at] = rank
        free(self.m.needed)
        self.m.needed, self.m.n_needed, self.m.usual, self.m.epoch = made, <int>len(ranks), usual, epoch
        self.m.at_once = at_once


def take_usual(Effects effects not None, Members members not None, Session session not None, slices, batch):
    """Handle requests of a message up to the first that needs something special; return the rest.

    Parameters
    ----------
    slices : dict or SliceTable
        The store's `SliceState` by number.
    batch : Batch

    Returns
    -------
    list of Record
    """
    cdef kp_record r
    cdef kp_buffer *data = NULL
    cdef kp_payload payload
    cdef SliceState slice
    cdef Py_ssize_t done = 0
    try:
        for record in batch.records:
            slice = slices.get(record[1])
            if slice is None:
                break
            to_record(record, &r)
            if data == NULL and r.place:
                data = buffer_of(batch.frames)
            payload = kp_payload(NULL, NULL, NULL, NULL)
            if r.place:
                payload.data = data
            if not kp_request(&slice.s, &session.s, &members.m, &r, &payload, &effects.e):
                break
            done += 1
    finally:
        kp_release(data)
        effects.collect()
    return batch.records[done:]


def applied_usual(Effects effects not None, Members members not None, SliceState slice not None):
    """Complete a round that was summed; False: nothing has happened, since the slice needs something special."""
    cdef bint usual = kp_finish_round(&slice.s, &members.m, &effects.e)
    effects.collect()
    return usual
