# The streams of a server, waited for together. Part of _streams.pyx.

cdef class StreamSet:
    """Waits for streams, and for other descriptors; messages that a `Link` handles are not seen by Python."""

    cdef object epoll
    cdef dict streams  # by descriptor; keeps them as long as they are waited for
    cdef kp_observer observer
    cdef const kp_waits *waits
    cdef object counters, waiting  # keep these two

    def __cinit__(self):
        self.epoll, self.streams = select.epoll(), {}

    def observe(self, counters not None, waits not None):
        """Take times in `counters`, a `Counters`; `waits` is a capsule that says whom the server waits for."""
        self.counters, self.waiting = counters, waits
        self.observer = observer_of(counters)
        self.waits = <const kp_waits *>PyCapsule_GetPointer(waits, "kvstore.waits")

    def add(self, Stream stream not None):
        """Wait for a stream too."""
        if kp_wait_for(self.epoll.fileno(), stream.s.fd, &stream.s):
            raise OSError(errno, os.strerror(errno))
        self.streams[stream.s.fd] = stream

    def watch(self, int descriptor):
        """Wait for a descriptor that is no stream."""
        if kp_wait_for(self.epoll.fileno(), descriptor, NULL):
            raise OSError(errno, os.strerror(errno))

    def remove(self, int descriptor):
        """Wait for a stream or descriptor no longer; before it is closed."""
        self.epoll.unregister(descriptor)
        self.streams.pop(descriptor, None)

    def serve(self, double seconds):
        """Serve streams until there is something for Python, at most `seconds`.

        Returns
        -------
        list of Stream
            Those that have messages for Python, or are at their end. Empty with another descriptor, a signal, and when
            the time is over.
        """
        cdef kp_stream *left[KP_EVENTS]
        cdef int at, n, epoll = self.epoll.fileno()
        cdef int64_t nanoseconds = <int64_t>(min(seconds, 1e6) * 1e9)
        release_dropped()
        with nogil:
            n = kp_serve(epoll, nanoseconds, left, &self.observer, self.waits)
        release_dropped()
        return [self.streams[left[at].fd] for at in range(n)]

    def close(self):
        """Wait for nothing any more; the streams are closed by now."""
        self.epoll.close()
        self.streams.clear()
