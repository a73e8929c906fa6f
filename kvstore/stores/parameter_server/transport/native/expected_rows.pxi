# Rows that are received at their destination. Part of _streams.pyx.

@cython.final
cdef class ExpectedRows:
    """Rows of one slice that a worker has requested, and their destination; holds references to both buffers.

    Parameters
    ----------
    slice : int
    ids : contiguous int64 array
        Row numbers in the whole table, as they were requested.
    into : writable buffer of bytes
        Receives the rows, if they arrive as a large frame.
    """

    cdef kp_expected x
    cdef object ids, into

    def __cinit__(self, uint32_t slice, const int64_t[::1] ids, unsigned char[::1] into):
        self.ids, self.into = ids, into
        self.x.slice, self.x.n = slice, ids.shape[0]
        self.x.ids_bytes, self.x.nbytes = 8 * self.x.n, into.shape[0]
        self.x.ids = <const char *>&ids[0] if ids.shape[0] else NULL
        self.x.into = <char *>&into[0] if into.shape[0] else NULL
