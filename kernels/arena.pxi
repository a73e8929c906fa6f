# Pointers and numbers of one call. Part of _cpu.pyx.

cdef class Arena:
    """Memory for the pointers and numbers of one call, freed with it."""

    cdef char *at
    cdef char *memory
    cdef char small[2048]

    def __cinit__(self):
        self.memory = NULL

    def __dealloc__(self):
        free(self.memory)

    cdef int reserve(self, size_t size) except -1:
        self.at = self.small
        if size > sizeof(self.small):
            self.memory = <char *>malloc(size)
            if self.memory == NULL:
                raise MemoryError()
            self.at = self.memory
        return 0

    cdef void *take(self, size_t size) noexcept:
        cdef void *piece = self.at
        self.at += (size + 7) & ~<size_t>7
        return piece


cdef inline Py_ssize_t how_many(object arrays) except -1:
    """Return the number of arrays in a list, or 1 for an array without a list, or 0 for None."""
    if arrays is None:
        return 0
    return len(<list?>arrays) if type(arrays) is not np.ndarray else 1


cdef char **take_pointers(Arena arena, object arrays, int dtype, ptrdiff_t n, bint write) except? NULL:
    cdef char **pointers = <char **>arena.take(how_many(arrays) * sizeof(char *))
    cdef Py_ssize_t i
    if arrays is None:
        return pointers
    if type(arrays) is np.ndarray:
        pointers[0] = pointer(arrays, dtype, n, write)
        return pointers
    for i in range(len(arrays)):
        pointers[i] = pointer(arrays[i], dtype, n, write)
    return pointers


cdef inline size_t doubles_size(tuple params) noexcept:
    return max(<size_t>len(params), <size_t>KV_MAX_PARAMS) * sizeof(double)


cdef double *take_doubles(Arena arena, tuple params) except? NULL:
    """Copy the parameters of a rule; missing ones are zero, so that no rule reads beyond them."""
    cdef double *p = <double *>arena.take(doubles_size(params))
    cdef Py_ssize_t i
    for i in range(KV_MAX_PARAMS):
        p[i] = 0
    for i in range(len(params)):
        p[i] = params[i]
    return p


cdef int take_states(char **into, tuple states, int rule, int dtype, ptrdiff_t n) except -1:
    cdef Py_ssize_t i
    if rule < 0 or rule >= kv_n_rules:
        raise ValueError(f"no rule has the id {rule}")
    if len(states) != kv_rule_states[rule]:
        raise ValueError(f"rule {kv_rule_names[rule].decode()} needs {kv_rule_states[rule]} states, got {len(states)}")
    for i in range(len(states)):
        into[i] = pointer(states[i], dtype, n, True)
    return 0


cdef int check_rule_dtype(int dtype, object master) except -1:
    if not kv_is_float[dtype]:
        raise TypeError("update rules need floating-point weights")
    if master is not None and not kv_is_half[dtype]:
        raise TypeError("only 16-bit weights have a float32 master copy")
    return 0
