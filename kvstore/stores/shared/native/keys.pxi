# Keys in the region. Part of _shared.pyx.

cdef list dtype_names = list(cpu.dtypes())
cdef object INT64 = np.dtype(np.int64)
cdef object BYTES = np.dtype(np.uint8)
cdef enum:
    TABLE_WORDS = 8


cdef class Handle:
    """The object of this process for a key."""

    cdef kv_entry *e
    cdef Job job
    cdef readonly object key, dtype
    cdef readonly tuple shape
    cdef list arrays  # of the two values
    cdef uint64_t undo_at, undo_bytes  # memory for `note_undo`
    cdef uint64_t held  # phase of the round that this process carries out; if the key's phase differs, another worker has the round
    cdef uint64_t counted  # rounds up to this number were counted
    cdef uint64_t reported[KV_FAILURES]  # failed rounds that were reported to the caller, at the same places as `failed`
    cdef readonly cnp.ndarray like  # of the key's shape and type, without content

    @property
    def number(self):
        """The position in the order of init."""
        return self.e.number

    @property
    def sparse(self):
        """Whether the key is row-sparse."""
        return bool(self.e.sparse)

    @property
    def nbytes(self):
        """The bytes of the value."""
        return self.e.nbytes

    @property
    def is_side(self):
        """Whether it is a side key."""
        return bool(self.e.is_side)

    @property
    def small(self):
        """Whether each worker sums this key for itself."""
        return self.e.nbytes <= KV_SMALL_KEY

    @property
    def complete(self):
        """The last complete round."""
        return kv_complete_round(kv_get(&self.e.phase))

    def note_complete(self):
        """Count the rounds that other workers have completed."""
        count_rounds(self, min(self.complete, self.arrived))

    def newly_complete(self):
        """Return the number of rounds that this process has pushed into and that became complete since the last call.
        """
        cdef uint64_t last = min(self.complete, self.arrived), before = self.counted
        self.counted = max(last, before)
        return self.counted - before

    @property
    def arrived(self):
        """The last round that this process pushed into; 0: none."""
        return pushed_round(self)

    def has_failed(self, uint64_t round):
        """Whether a round has failed."""
        return bool(kv_has_failed(self.e, round))

    def first_unreported(self, uint64_t round):
        """Return the first failed round of this worker, up to a given round, that is not reported yet; or 0."""
        return kv_first_unreported(self.job.me, self.e, self.reported, round)

    def note_reported(self, uint64_t round):
        """Record that a failed round was reported to the caller."""
        self.reported[round % KV_FAILURES] = round

    def missing(self, uint64_t round):
        """Return the ranks that a round still waits for."""
        cdef kv_part *part = kv_key_parts(self.job.me, self.e)
        members = kv_get(&self.job.me.head.members)
        return [w for w in range(self.job.me.size)
                if members >> w & 1 and kv_get(&part[w].first) <= round
                and (kv_get(&part[w].arrived) < round or not kv_is_call_complete(self.job.me, &part[w], w, round & 1))]

    @property
    def value_round(self):
        """The round of the value."""
        return kv_get(&self.e.of[kv_current_of(kv_get(&self.e.phase))])

    def restore_round(self, uint64_t round):
        """Put the value of an earlier round in use again, if it is still there; return whether it is."""
        return bool(kv_restore_round(self.job.me, self.e, round))

    @property
    def is_idle(self):
        """Whether no present worker is changing the value."""
        return bool(kv_is_idle(self.job.me, self.e))

    def left_out(self, uint64_t round):
        """Return the workers of earlier rounds that have left without joining, and are not in this complete round.

        The result has pairs of rank and its last round; each rank is reported once.
        """
        cdef kv_self *me = self.job.me
        cdef kv_part *part = kv_key_parts(me, self.e)
        cdef uint64_t out = kv_left_out(me, self.e, round)
        me.left_reported |= out
        return [(w, max(kv_get(&part[w].pushed[0]), kv_get(&part[w].pushed[1])))
                for w in range(me.size) if out >> w & 1] if out else []

    @property
    def is_stable(self):
        """Whether rounds wait for this worker, which is not lost: the value stays as it is until it pushes."""
        return bool(kv_is_stable(self.job.me, self.e))

    def value(self, other=False):
        """Return the value in use, or the other one, as a writable array."""
        cdef uint64_t i = kv_current_of(kv_get(&self.e.phase)) ^ <uint64_t>bool(other)
        if self.arrays[i] is None:
            if not self.e.value[i]:
                self.e.value[i] = self.job.allocate(max(self.e.nbytes, 1), KV_VALUE_COLOUR + <int>i)
            self.arrays[i] = self.job.array(self.e.value[i], self.shape, self.dtype, None)
        return self.arrays[i]

    def table_words(self, other=False):
        """Return the description of the table in use, or the other: `TABLE_WORDS` numbers; see region_table.py."""
        return self.job.array(self.table_at(other), (TABLE_WORDS,), INT64, None)

    def blank_row(self, other=False):
        """Return the contents of an absent row of a table."""
        return self.job.array(self.table_at(other) + 8 * TABLE_WORDS, (1,) + self.shape[1:], self.dtype, None)

    cdef uint64_t table_at(self, other):
        cdef uint64_t i = kv_current_of(kv_get(&self.e.phase)) ^ <uint64_t>bool(other)
        return self.e.rows_of + i * table_bytes(row_bytes(self.shape, self.dtype))

    def free_memory(self, uint64_t offset, uint64_t nbytes):
        """Free memory that `new_state` has allocated."""
        self.job.free_piece(offset, max(nbytes, 1))

    def begin_plan(self):
        """Begin to carry out the round that this worker has opened; until `end_plan`, methods change this round only.

        False: another thread does so already, or another worker has become the opener.
        """
        cdef uint64_t phase = kv_get(&self.e.phase)
        if not kv_is_planned(self.job.me, self.e, phase) or not kv_swap(&self.e.planned, phase, 0):
            return False
        self.held = phase
        return True

    @property
    def is_opened(self):
        """Whether this worker is still the opener of the round of `begin_plan`."""
        return bool(kv_get(&self.e.phase) == self.held and kv_check_membership(self.job.me) != KV_FENCED)

    def end_plan(self, bint completes):
        """End what `begin_plan` has begun, if it has, and with it this worker's work.

        If it `completes` rounds, a round that is still open was interrupted: it is carried out again, by this worker
        or, if this process has left, by another.
        """
        cdef uint64_t held = self.held
        self.held = KV_NO_ROUND
        if held == KV_NO_ROUND:
            return
        if completes and kv_get(&self.e.phase) == held and kv_check_membership(self.job.me) != KV_FENCED:
            kv_undo(self.job.me, self.e, kv_round_of(held))
            kv_put(&self.e.planned, held)
        else:
            kv_end_work(self.job.me)

    def release_opened(self):
        """After an error: let any worker open again the round that this worker has opened and not carried out."""
        cdef kv_self *me = self.job.me
        if not self.begin_plan():
            return
        cdef uint64_t held = self.held
        self.held = KV_NO_ROUND
        kv_undo(me, self.e, kv_round_of(held))
        kv_release_opened(me, self.e, held)
        kv_end_work(me)

    def fail_round(self, uint64_t round, str text):
        """Mark a round as failed; the text tells the workers that wait for it the cause, if there is memory for it.
        """
        cdef bytes data = b"%d %b" % (round, text.encode(errors="replace")[:4000])
        try:
            self.job.lock()
            kv_set_why(self.job.me, self.e, round, <char *>data, len(data))
            kv_unlock_region(self.job.me)
        except (TimeoutError, InterruptedError):
            pass
        finally:
            kv_fail(self.e, round)

    def failure_text(self, uint64_t round):
        """Return the text of `fail_round` for a round, or None."""
        cdef uint64_t *place = &self.e.why[round % KV_FAILURES]
        cdef uint64_t offset = kv_get(place), size = kv_text_bytes(self.job.me, offset)
        if not offset or kv_get(place) != offset:  # the text of a later round has replaced it
            return None
        number, _, text = kv_text_start(self.job.me, offset)[:<Py_ssize_t>size].partition(b" ")
        return text.decode(errors="ignore") if number == b"%d" % round else None

    def gpu_table(self, uint64_t size):
        """Return memory, zeros at first, for the table of the key's GPU memory; all workers pass the same size."""
        cdef kv_self *me = self.job.me
        cdef uint64_t offset
        self.job.lock()
        offset = kv_get(&self.e.gpu_table)
        if not offset:
            offset = kv_allocate_locked(me, size)
            if offset:
                memset(me.base + offset, 0, size)
                kv_put(&self.e.gpu_table, offset)
        kv_unlock_region(me)
        if not offset:
            raise no_memory(size)
        return self.job.array(offset, (size,), BYTES, None)

    # --------------------------------------------------------------------------------------- optimizer

    @property
    def updates(self):
        """The complete updates of the optimizer."""
        return kv_get(kv_update_count(self.e))

    @updates.setter
    def updates(self, uint64_t n):
        kv_put(kv_update_count(self.e), n)

    @property
    def record_at(self):
        """The offset of the description of the states, which changes with it; 0: there is none."""
        return kv_get(&self.e.record)

    def record(self):
        """Return the offset of the description of the states, and the description; (0, b"") if there is none."""
        cdef uint64_t offset = kv_get(&self.e.record)
        if not offset:
            return 0, b""
        return offset, text_at(self.job, offset)

    def set_record(self, bytes text):
        """Set the description of the states, or remove it; only the opener of a round, or of all, may do so."""
        self.put_record(self.new_record(text) if text else 0)

    def new_record(self, bytes text):
        """Write a description of states, for `put_record`; return its offset."""
        self.job.lock()
        cdef uint64_t offset = kv_new_text(self.job.me, <char *>text, len(text))
        kv_unlock_region(self.job.me)
        if not offset:
            raise no_memory(len(text))
        return offset

    def put_record(self, uint64_t offset):
        """Use the description of the states at this offset; 0: there is none."""
        kv_put(&self.e.record, offset)

    def note_undo(self, list pieces):
        """Save the memory that the opened round will change, so that another worker can undo the change.

        `pieces`: arrays of the region, each with the ids of the rows that change, or None for all of it. The offset
        of the description of the states, which the round may replace, is saved too.
        """
        cdef uint64_t size = 16, offset
        where = self.job.array(<uint64_t>(<char *>&self.e.record - self.job.me.base), (1,), INT64, None)
        pieces = [*pieces, (where, None)]
        cdef uint64_t *head
        for array, ids in pieces:
            n = len(array) if ids is None else len(ids)
            size += 40 + (0 if ids is None else 8 * n) + (array.nbytes // max(len(array), 1)) * n
        kv_put(&self.e.undo, 0)
        if self.undo_bytes < size:
            if self.undo_at:
                self.job.free_piece(self.undo_at, self.undo_bytes)
            self.undo_at = self.undo_bytes = 0
            self.undo_at = self.job.allocate(size + size // 4)
            self.undo_bytes = size + size // 4
        block = self.job.array(self.undo_at, (self.undo_bytes,), BYTES, None)
        head = <uint64_t *>(self.job.me.base + self.undo_at)
        head[0], head[1] = kv_round_of(kv_get(&self.e.phase)), len(pieces)
        offset = 16
        for array, ids in pieces:
            n, per = len(array) if ids is None else len(ids), array.nbytes // max(len(array), 1)
            block[offset:offset + 32].view(INT64)[:] = (self.job.place_of(array), per, n, ids is not None)
            offset += 32
            if ids is not None:
                block[offset:offset + 8 * n].view(INT64)[:] = ids
                offset += 8 * n
            rows = block[offset:offset + n * per].view(array.dtype).reshape((n,) + array.shape[1:])
            if ids is None:
                rows[...] = array
            else:
                np.take(array, ids, axis=0, out=rows, mode="clip")
            offset += (n * per + 7) & ~7
        kv_put(&self.e.undo, self.undo_at)
        kv_fence()

    def undo(self):
        """Restore the memory that `note_undo` has saved for the round that this worker has opened."""
        kv_undo(self.job.me, self.e, kv_round_of(self.held))

    def region_array(self, offset, shape, dtype):
        """Return an array of a table or state.

        MemoryError: the numbers were read while they changed, and name no allocated memory.
        """
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if offset < 0 or not kv_is_given(self.job.me, offset, size):
            raise no_memory(offset + size)
        return self.job.array(offset, shape, dtype, None)

    def new_state(self, shape, dtype, int number):
        """Allocate memory for array number `number` of a state; return its offset, and an array over it."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        offset = self.job.allocate(max(size, 1), KV_STATE_COLOUR + number)
        return offset, self.job.array(offset, shape, dtype, None)


cdef class KeyHold:
    """A key that this worker holds as the opener of its next round would, to change the value outside of rounds."""

    cdef Handle handle
    cdef uint64_t held  # phase of the held key

    def __cinit__(self, Handle handle):
        self.handle, self.held = handle, KV_NO_ROUND

    def begin(self):
        """Hold the key until `end`; return an outcome."""
        cdef kv_self *me = self.handle.job.me
        cdef kv_entry *e = self.handle.e
        cdef uint64_t phase
        cdef int outcome
        with nogil:
            outcome = kv_hold_key(me, e, 1)
            if outcome != KV_TICK:
                kv_leave()
        phase = kv_get(&e.phase)
        if outcome == KV_READY and kv_is_opener(me, phase, kv_round_of(phase)):  # else this worker is fenced already
            self.held = phase
        return outcome

    def end(self, bint other):
        """Release the key, if `begin` has acquired it; with `other`, the other value is in use from now on."""
        if self.held != KV_NO_ROUND:
            kv_release_key(self.handle.job.me, self.handle.e, self.held, other)
            self.held = KV_NO_ROUND
            kv_end_work(self.handle.job.me)


cdef class ValueRead:
    """A read of a key's value; rounds that do not wait for this worker may complete during it."""

    cdef kv_reading reading
    cdef Handle handle

    def __cinit__(self, Handle handle):
        self.handle = handle
        memset(&self.reading, 0, sizeof(self.reading))

    def begin(self):
        """Begin to read; return an outcome."""
        cdef int outcome
        with nogil:
            outcome = kv_begin_read(self.handle.job.me, self.handle.e, &self.reading)
            if outcome != KV_TICK:
                kv_leave()
        return outcome

    def end(self):
        """End a read; return whether the value was of one round all the time. If not, the caller reads again."""
        return bool(kv_end_read(self.handle.job.me, self.handle.e, &self.reading))


cdef bytes text_at(Job job, uint64_t offset):
    if not offset:
        return b""
    if not kv_is_text(job.me, offset):
        raise KVStoreError(f"worker {job.names[job.me.rank]}: a description in the job's shared region is overwritten; "
                           "end the job, restart it from its last checkpoint, and report this as a bug of kvstore")
    return kv_text_start(job.me, offset)[:kv_text_bytes(job.me, offset)]


cdef uint64_t pushed_round(Handle h) noexcept:
    return kv_pushed_round(h.job.me, h.e)


cdef void count_rounds(Handle h, uint64_t round) noexcept:
    """Count the rounds up to a given round, which this worker has found complete."""
    if round > h.counted and h.job.me.counters != NULL:
        kv_add_alone(&h.job.me.counters.rounds, round - h.counted)
        h.counted = round


cdef bytes text_of(object key):
    """Return the bytes of a str key, None for an int key."""
    return (<str>key).encode("utf-8", "surrogatepass") if isinstance(key, str) else None


cdef uint64_t look_up(Job job, object key, bytes text):
    if text is None:
        return kv_find_key(job.me, NULL, 0, <int64_t>key)
    return kv_find_key(job.me, <char *>text, len(text), 0)


cdef class Keys:
    """The keys of a job, by name."""

    cdef Job job

    def __cinit__(self, Job job):
        self.job = job

    def __len__(self):
        return kv_get(&self.job.me.head.n_keys)

    def find(self, key):
        """Return the key's handle, or None."""
        handle = self.job.handles.get(key)
        if handle is not None:
            return handle
        cdef uint64_t found = look_up(self.job, key, text_of(key))
        return self.handle(found - 1) if found else None

    def handle(self, uint64_t number):
        """Return the handle of key number `number` in the order of init."""
        cdef Handle h = Handle.__new__(Handle)
        cdef kv_entry *e = kv_entry_at(self.job.me, number)
        h.e, h.job, h.held = e, self.job, KV_NO_ROUND
        h.counted = kv_complete_round(kv_get(&e.phase))
        h.key = e.int_key
        if e.is_text:
            h.key = (self.job.me.base + e.name)[:e.name_bytes].decode("utf-8", "surrogatepass")
        known = self.job.handles.get(h.key)
        if known is not None:
            return known
        h.shape = tuple([(<int64_t *>(self.job.me.base + e.shape))[i] for i in range(e.ndim)])
        h.dtype = dtype_named(dtype_names[e.dtype])
        h.arrays = [None, None]
        h.like = np.broadcast_to(np.empty((), h.dtype), h.shape)
        self.job.handles[h.key] = h
        return h

    def all(self, bint sides=False):
        """Return the handles of all keys in the order of init; with `sides`, side keys included."""
        return [self.handle(i) for i in range(len(self)) if sides or not kv_entry_at(self.job.me, i).is_side]

    def with_open_rounds(self):
        """Return the handles of the keys with incomplete rounds that this process has pushed into."""
        cdef uint64_t i = 0, n = len(self)
        cdef list found = []
        while True:
            with nogil:
                i = kv_next_behind(self.job.me, i, n)
            if i >= n:
                return found
            found.append(self.handle(i))
            i += 1

    def wait_for_more(self, uint64_t n):
        """Wait until there are more than `n` keys; return an outcome."""
        cdef kv_growth context
        cdef int outcome
        context.me, context.n = self.job.me, n
        with nogil:
            outcome = kv_wait_recorded(self.job.me, kv_has_grown, kv_about_growth, &context, 1)
            if outcome != KV_TICK:
                kv_leave()
        return outcome

    @property
    def kind(self):
        """0: there is no key yet, 1: int keys, 2: str keys."""
        return kv_get(&self.job.me.head.text_keys)

    def add(self, key, cnp.ndarray value, cnp.ndarray ids=None, tuple shape=None, bint side=False):
        """Add a key with a copy of `value`; return its handle, or None if the key exists.

        With `ids`, the key is row-sparse and of that `shape`: `value` has the rows of `ids`, and the others are
        absent. A `side` key may be int or str among keys of either kind.
        """
        cdef bytes text = text_of(key)
        cdef int dtype = dtype_names.index(value.dtype.name)
        cdef kv_entry *e
        cdef uint64_t number
        self.job.lock()
        try:
            if look_up(self.job, key, text):
                return None
            e = kv_new_entry(self.job.me)
            if e == NULL or self.fill(e, text, 0 if text is not None else key, value, dtype, ids, shape or (<object>value).shape):
                raise no_memory(value.nbytes)
            e.is_side = side
            if not side:
                kv_put(&self.job.me.head.text_keys, 2 if text is not None else 1)
            kv_publish_entry(self.job.me, e)
            number = e.number
        finally:
            kv_unlock_region(self.job.me)
        return self.handle(number)

    cdef int fill(self, kv_entry *e, bytes text, int64_t int_key, cnp.ndarray value, int dtype, cnp.ndarray ids, tuple shape):
        cdef kv_self *me = self.job.me
        cdef uint64_t size, i, per
        e.is_text = text is not None
        e.int_key = int_key
        e.name_bytes = len(text) if text is not None else 0
        e.hash = kv_hash(<char *>text, e.name_bytes, 0) if text is not None else kv_hash(NULL, 0, int_key)
        e.dtype, e.sparse = dtype, ids is not None
        e.n, e.ndim = math.prod(shape), len(shape)
        e.nbytes = e.n * <uint64_t>kv_itemsize[dtype]
        per = KV_SHARE_BYTES // kv_itemsize[dtype]
        e.chunks = max(<uint64_t>1, (e.n + per - 1) // per) if ids is None else 1
        size = 8 * e.ndim + e.name_bytes
        e.shape = kv_allocate_locked(me, size + 8)
        e.parts = kv_allocate_locked(me, me.size * sizeof(kv_part))
        e.map = kv_allocate_locked(me, 8 * e.chunks)
        if not (e.shape and e.parts and e.map):
            return -1
        if (self.fill_value(e, value) if ids is None else self.fill_table(e, value, ids, shape[0])) < 0:
            return -1
        e.of[1] = KV_NO_ROUND
        e.name = e.shape + 8 * e.ndim
        for i in range(e.ndim):
            (<int64_t *>(me.base + e.shape))[i] = shape[i]
        if text is not None:
            memcpy(me.base + e.name, <char *>text, e.name_bytes)
        memset(me.base + e.parts, 0, me.size * sizeof(kv_part))
        memset(me.base + e.map, 0, 8 * e.chunks)
        return 0

    cdef int fill_value(self, kv_entry *e, cnp.ndarray value):
        cdef kv_self *me = self.job.me
        e.value[0] = kv_allocate_locked(me, max(<uint64_t>1, e.nbytes))
        if e.nbytes <= KV_SMALL_KEY:
            e.value[1] = kv_allocate_coloured(me, max(<uint64_t>1, e.nbytes), KV_VALUE_COLOUR + 1)
        if not (e.value[0] and (e.value[1] or e.nbytes > KV_SMALL_KEY)):
            return -1
        memcpy(me.base + e.value[0], cnp.PyArray_DATA(value), e.nbytes)
        return 0

    cdef int fill_table(self, kv_entry *e, cnp.ndarray rows, cnp.ndarray ids, n_rows):
        """Write rows and their ids as region_table.py reads them; see `table_words`."""
        cdef kv_self *me = self.job.me
        cdef uint64_t size = table_bytes(row_bytes((<object>rows).shape, rows.dtype)), at_rows, at_ids
        cdef int64_t *words
        e.rows_of = kv_allocate_locked(me, 2 * size)
        at_rows = kv_allocate_locked(me, max(<uint64_t>1, <uint64_t>rows.nbytes))
        at_ids = kv_allocate_locked(me, max(<uint64_t>1, <uint64_t>ids.nbytes))
        if not (e.rows_of and at_rows and at_ids):
            return -1
        memset(me.base + e.rows_of, 0, 2 * size)
        memcpy(me.base + at_rows, cnp.PyArray_DATA(rows), rows.nbytes)
        memcpy(me.base + at_ids, cnp.PyArray_DATA(ids), ids.nbytes)
        words = <int64_t *>(me.base + e.rows_of)
        words[0] = -1 if ids.size == n_rows else ids.size
        words[1], words[2] = rows.shape[0], at_rows
        words[3], words[4] = ids.size, at_ids
        words[5] = 1
        return 0


cdef uint64_t row_bytes(tuple shape, object dtype):
    return math.prod(shape[1:]) * dtype.itemsize


cdef uint64_t table_bytes(uint64_t row):
    """Return the bytes of a table's description: the numbers, and the contents of an absent row."""
    return 8 * TABLE_WORDS + ((row + 63) & ~63ull)
