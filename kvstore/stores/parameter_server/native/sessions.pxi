# Sessions of workers, and the results of a step. Part of _native.pyx.

cdef class Session:
    """An attached worker: which of its requests have arrived, and which have no answer yet."""

    cdef kp_session s
    cdef public object peer

    def __cinit__(self, int store, int rank, uint64_t incarnation, *_args, **_named):
        self.s.owner = <void *>self
        self.s.store, self.s.rank, self.s.incarnation = store, rank, incarnation
        self.s.seat = rank

    def __dealloc__(self):
        kp_close_session(&self.s)

    @property
    def store(self):
        return self.s.store

    @property
    def rank(self):
        return self.s.rank

    @property
    def seat(self):
        """For whom it pushes: for itself, or for its host, by the lowest rank there."""
        return self.s.seat

    def push_for_host(self, int seat):
        """Push for a host from now on."""
        self.s.seat, self.s.of_host = seat, True

    @property
    def incarnation(self):
        return self.s.incarnation

    @property
    def epoch(self):
        """Of a view that it knew, and whose join point it had reached if there is one."""
        return self.s.epoch

    @epoch.setter
    def epoch(self, uint64_t epoch):
        self.s.epoch = epoch

    @property
    def gone(self):
        """Whether it is a member no more, and nobody is to be answered."""
        return bool(self.s.gone)

    @gone.setter
    def gone(self, bint gone):
        self.s.gone = gone

    @property
    def overtaken(self):
        """Whether requests have come that wait for others before them."""
        return bool(self.s.overtaken)

    @overtaken.setter
    def overtaken(self, bint overtaken):
        self.s.overtaken = overtaken

    @property
    def received(self):
        """Bytes of its requests that have come."""
        return self.s.received

    @received.setter
    def received(self, uint64_t received):
        self.s.received = received

    @property
    def reported(self):
        """How many of these it has been told of."""
        return self.s.reported

    @property
    def low(self):
        """All requests up to this one have come."""
        return self.s.duplicates.low

    @property
    def above(self):
        """Requests after `low` that have come, ascending."""
        cdef uint64_t number, low = self.s.duplicates.low
        cdef list found = []
        if self.s.duplicates.above.count:
            for number in range(low + 1, low + KP_SPAN + 1):
                if kp_has_number(&self.s.duplicates.above, number):
                    found.append(number)
        return found

    def has_come(self, uint64_t sequence):
        """Whether a request has come before."""
        return bool(kp_has_arrived(&self.s.duplicates, sequence))

    def take(self, uint64_t sequence):
        """Note a request that has not come before; False: it is too far ahead, and has to come again later."""
        if sequence > self.s.duplicates.low + KP_SPAN:
            return False
        if kp_mark_arrived(&self.s.duplicates, sequence):
            raise MemoryError()
        return True

    def restore(self, uint64_t low, above):
        """Take up what had come before the server was restarted."""
        self.s.duplicates.low = low
        for sequence in above:
            self.take(sequence)

    def resume(self, uint64_t end, unanswered):
        """Note as come what will not come again: requests below `end` that another process has answered."""
        cdef uint64_t number, last
        cdef set left = set(unanswered)
        kp_skip_to(&self.s.duplicates, min(left, default=end))
        last = self.s.duplicates.low + KP_SPAN
        for number in range(self.s.duplicates.low + 1, min(end, last + 1)):
            if number not in left and not self.has_come(number):
                self.take(number)

    def answered(self):
        """Which requests have come and are answered: all up to a number, and a list of others."""
        cdef uint64_t number, low = self.s.duplicates.low
        cdef uint64_t first = low - min(low, KP_SPAN)
        for number in range(first + 1, low + 1):
            if kp_has_number(&self.s.waiting, number):
                low = number - 1
                break
        known = [*range(low + 1, self.s.duplicates.low + 1), *self.above]
        return low, [number for number in known if not kp_has_number(&self.s.waiting, number)]

    def wait(self, uint64_t sequence):
        """Note that a request has no answer yet."""
        if kp_insert_number(&self.s.waiting, sequence):
            raise MemoryError()

    def waits(self, uint64_t sequence):
        """Whether a request has no answer yet."""
        return bool(kp_has_number(&self.s.waiting, sequence))


cdef class Effects:
    """The results of one step of a server: answers by session, and rounds to sum."""

    cdef kp_effects e
    cdef kp_waits w
    cdef dict jobs
    cdef object counters  # keeps what `e` counts in

    def __cinit__(self, *_args, **_named):
        kp_init_effects(&self.e)
        self.w = kp_waits(&self.e, kp_about_wait)
        self.jobs = {}

    def __dealloc__(self):
        free(self.e.lates.all)

    def observe(self, counters not None):
        """Count in `counters`, a `Counters`, from now on."""
        self.counters = counters
        self.e.observer = observer_of(counters)

    @property
    def waits(self):
        """A capsule for who waits for messages: it says whom the server waits for."""
        return PyCapsule_New(&self.w, "kvstore.waits", NULL)

    def watch_arrivals(self):
        """Note for whom rounds wait, from now on."""
        if self.e.lates.all == NULL:
            self.e.lates.all = <kp_late *>malloc(KP_MOST_LATE * sizeof(kp_late))
            if self.e.lates.all == NULL:
                raise MemoryError()

    def take_late(self):
        """Return how many rounds of several workers were complete, and what was late: see `LatePart` of observe."""
        cdef size_t at
        cdef kp_late *one
        cdef uint64_t rounds = self.e.lates.rounds
        cdef list found = []
        for at in range(self.e.lates.n):
            one = &self.e.lates.all[at]
            found.append((one.rank, one.begin, one.end, one.rounds, one.longest, one.slice))
        self.e.lates.n = self.e.lates.rounds = 0
        return rounds, found

    def count_round(self, SliceState slice not None):
        """Count the next round of a slice, which is complete."""
        kp_count_rounds(&self.e.observer, 1)
        kp_note_wait(&self.e, &slice.s)

    def note_arrival(self, SliceState slice not None, int32_t rank, object record):
        """Tell who looks on that a part of a round has come."""
        cdef kp_record r
        if self.counters is not None or self.e.lates.all != NULL:
            to_record(record, &r)
            kp_note_arrival(&self.e, &slice.s, rank, &r)

    def answer(self, Session session not None, int kind, object record, uint64_t round, detail=None):
        """Answer one request."""
        cdef kp_record r
        to_record(record, &r)
        kp_answer_request(&self.e, &session.s, kind, &r, round, NULL if detail is None else buffer_of(detail))
        self.hold()

    def report(self, Session session not None):
        """Tell the worker at least how much has come."""
        session.s.report = 1
        kp_queue_session(&self.e, &session.s)
        self.hold()

    cdef void hold(self) noexcept:
        """Keep the answered sessions alive until their replies are made."""
        cdef kp_session *s = self.e.touched
        while s != NULL:
            if s.touched == 1:
                s.touched = 2
                Py_INCREF(<object>s.owner)
            s = s.next

    def replies(self):
        """Return what the workers are told, as `SendReplies`; all sessions are as before the step then."""
        cdef kp_session *s
        cdef list found = []
        while self.e.touched != NULL:
            s = self.e.touched
            self.e.touched = s.next
            if kp_reply_session(s):
                s.touched = 0
                Py_DECREF(<object>s.owner)
                continue
            head = Batch(s.store, s.rank, s.incarnation, 0, [], (), s.received)
            found.append(SendReplies((<Session>s.owner).peer, head, answers_of(s)))
            kp_forget_answers(s)
            s.touched = s.report = 0
            s.reported = s.received
            Py_DECREF(<object>s.owner)
        self.e.last_touched = &self.e.touched
        release_dropped()
        return found

    def gather(self):
        """Take what was left by `links.h`, so that Python carries it out; before any slice can be dropped."""
        self.collect()

    cdef int collect(self) except -1:
        """Take the rounds that `rounds.h` has begun, before their slices can be dropped."""
        cdef kp_slice *slice
        while self.e.jobs != NULL:
            slice = self.e.jobs
            self.e.jobs = slice.next
            self.job(slice.store, (<SliceState>slice.owner).next_round())
        self.e.last_job = &self.e.jobs
        self.hold()
        release_dropped()
        return 0

    def job(self, int store, job):
        """Have a round summed."""
        self.jobs.setdefault(store, []).append(job)

    def rounds(self):
        """Return the rounds that are to be summed, as one `ApplyRounds` for each store."""
        jobs, self.jobs = self.jobs, {}
        return [ApplyRounds(store, rounds) for store, rounds in jobs.items()]


cdef list answers_of(kp_session *s):
    cdef size_t at
    cdef kp_answer *one
    cdef list found = []
    for at in range(s.n_answers):
        one = &s.answers[at]
        record, detail = request_of(&one.request, one.detail)
        found.append((KINDS[one.kind], record, one.round, detail))
    return found
