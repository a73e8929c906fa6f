# Rows of a table that are copied when they are sent. Part of _streams.pyx.

@cython.final
cdef class GatheredRows:
    """Rows of a table as one contiguous buffer: a frame that is not copied before it is sent.

    `Stream.send` gathers the last frame of a message while it sends. Any other use of the buffer gathers the rows once, at
    that time. The table must not change before.

    Parameters
    ----------
    table : buffer of bytes
    row_bytes : int
        Bytes of a row; the table has whole rows.
    rows : contiguous int64 array
        Numbers of the rows in the table; -1 stands for a row of zeros.
    """

    cdef kp_gather g
    cdef kp_buffer *gathered
    cdef object table, rows
    cdef readonly Py_ssize_t nbytes

    def __cinit__(self, const unsigned char[::1] table, size_t row_bytes, const int64_t[::1] rows):
        if row_bytes < 1 or table.shape[0] % row_bytes:
            raise ValueError(f"a table of {table.shape[0]} bytes has no rows of {row_bytes}")
        self.table, self.rows = table, rows
        self.g.table = <const char *>&table[0] if table.shape[0] else NULL
        self.g.rows = &rows[0] if rows.shape[0] else NULL
        self.g.row_bytes, self.g.n = row_bytes, rows.shape[0]
        self.nbytes = self.g.n * row_bytes
        if not kp_is_within(&self.g, table.shape[0] // row_bytes):
            raise IndexError(f"rows must lie in [-1, {table.shape[0] // row_bytes})")

    def __dealloc__(self):
        kp_release(self.gathered)

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        if self.gathered == NULL:
            self.gathered = kp_new_buffer(self.nbytes)
            if self.gathered == NULL:
                raise MemoryError()
            with nogil:
                kp_copy_rows(&self.g, 0, self.g.n, self.gathered.data)
        PyBuffer_FillInfo(view, self, self.gathered.data, self.nbytes, 1, flags)
