# Tables of row-sparse slices. Part of _native.pyx.

@cython.no_gc_clear  # `shown` is read until it is deallocated
cdef class TableRows:
    """The rows of a row-sparse slice, as long as they are shown: read, and updated, without Python then.

    Whoever changes rows or states hides them first.
    """

    cdef kp_table t
    cdef tuple shown  # keeps what the struct points to

    def __cinit__(self, *_args, **_named):
        self.t.kept_after = -1

    def __dealloc__(self):
        kp_copy_deferred(&self.t.deferred)

    @property
    def is_shown(self):
        """Whether rows can be read without Python."""
        return self.t.at != NULL

    @property
    def has_plan(self):
        """Whether updates are planned."""
        return self.t.plan.counts != NULL

    def show(
        self, rows, int dtype, int64_t first, int rule, tuple params not None, tuple states not None,
        UpdateCounts counts not None, version, epoch, ids, maps, kept=None,
    ):
        """Have rounds read and update the rows without Python, until `hide` or `withdraw_plan`.

        Numbers without room are left to Python.

        Parameters
        ----------
        rows : numpy.ndarray
            All rows of the slice, contiguous; `first` is the id of the first one.
        dtype : int
            The kernels' number of its type.
        rule, params, states, counts, version, epoch
            As `SliceValue.plan_updates` takes them.
        ids : numpy.ndarray
            int64, memory for the ids of a round.
        maps : numpy.ndarray
            int64, for each part as much.
        kept : numpy.ndarray
            Memory for as many rows, which gets them as they were before a round of several parts; None: there are none.
        """
        cdef kp_table *t = &self.t
        cdef kp_plan *plan = &t.plan
        cdef char[::1] memory
        cdef int64_t[::1] numbers
        cdef int i
        self.hide()
        if len(params) > KV_MAX_PARAMS or len(states) > KV_MAX_STATES or not rows.nbytes or not len(ids):
            return
        if counts.c.updates >= <int64_t>KP_MOST_CLOCK:
            return
        t.dtype, t.n, t.first = dtype, len(rows), first
        t.row_bytes, t.cols = rows.nbytes // len(rows), rows.size // len(rows)
        plan.rule, plan.n_states, plan.version, plan.epoch = rule, <int>len(states), version, epoch
        for i in range(KV_MAX_PARAMS):
            plan.p[i] = params[i] if i < len(params) else 0
        for i in range(len(states)):
            memory = states[i].reshape(-1).view("i1")
            plan.states[i] = &memory[0]
        numbers = ids
        t.ids, t.capacity = &numbers[0], len(ids)
        numbers = maps.reshape(-1)
        t.maps, t.most_parts = &numbers[0], min(<int>(len(numbers) // len(ids)), KP_MOST_ROW_PARTS)
        t.kept_capacity = 0 if kept is None else len(kept)
        if t.kept_capacity:
            memory = kept.reshape(-1).view("i1")
            t.kept = &memory[0]
        memory = rows.reshape(-1).view("i1")
        self.shown = (rows, states, counts, ids, maps, kept)
        plan.counts = &counts.c
        t.at = &memory[0]

    def hide(self):
        """Leave reads and updates to Python, which may change the rows then."""
        self.withdraw_plan()
        with nogil:
            kp_copy_deferred(&self.t.deferred)
        self.t.at = NULL
        self.shown = None

    def withdraw_plan(self):
        """Leave updates to Python."""
        self.t.plan.counts = NULL

    def take_kept(self):
        """What rounds have kept since the last call: after which round, or -1 for none, and how many rows; None: no round was."""
        if not self.t.has_kept:
            return None
        self.t.has_kept = False
        return self.t.kept_after, self.t.n_kept

    def take_changed(self):
        """Whether rounds have changed it outside of Python since the last call."""
        cdef bint changed = self.t.changed
        self.t.changed = False
        return changed
