# Rows that are received where they belong. Part of _streams.pyx.

@cython.final
cdef class ExpectedRows:
    """Rows of one slice that a worker has asked for, and where they belong; both buffers are kept.

    Parameters
    ----------
    slice : int
    ids : contiguous int64 array
        Ids of the whole table, as they were asked for.
    into : writable buffer of bytes
        Gets the rows, if they come as a large frame.
    """

    cdef kp_expected x
    cdef object ids, into

    def __cinit__(self, uint32_t slice, const int64_t[::1] ids, unsigned char[::1] into):
        self.ids, self.into = ids, into
        self.x.slice, self.x.n = slice, ids.shape[0]
        self.x.ids_bytes, self.x.nbytes = 8 * self.x.n, into.shape[0]
        self.x.ids = <const char *>&ids[0] if ids.shape[0] else NULL
        self.x.into = <char *>&into[0] if into.shape[0] else NULL
