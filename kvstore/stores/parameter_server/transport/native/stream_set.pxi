# The streams of a server, served together. Part of _streams.pyx.

@cython.no_gc_clear  # a second thread may use the streams until this is closed
cdef class StreamSet:
    """Waits for streams and other descriptors; messages that a `Link` handles do not reach Python.

    Parameters
    ----------
    two_threads : bool
        Where there are several streams, a second thread serves every other stream with messages of medium size.
    """

    cdef object epoll
    cdef dict streams  # by descriptor; references that last as long as the streams are served
    cdef kp_observer observer
    cdef const kp_waits *waits
    cdef object counters, waiting  # references to the objects behind `observer` and `waits`
    cdef kp_second second
    cdef bint two_threads, moves
    cdef int pid

    def __cinit__(self, bint two_threads=False):
        self.epoll, self.streams = select.epoll(), {}
        self.two_threads, self.pid = two_threads, getpid()

    def __dealloc__(self):
        self.end_second()

    def observe(self, counters not None, waits not None):
        """Record times in `counters`, a `Counters`; `waits` is a capsule that names the workers it waits for."""
        self.counters, self.waiting = counters, waits
        self.observer = observer_of(counters)
        self.waits = <const kp_waits *>PyCapsule_GetPointer(waits, "kvstore.waits")

    def add(self, Stream stream not None):
        """Serve a stream, too."""
        if kp_wait_for(self.epoll.fileno(), stream.s.fd, &stream.s):
            raise OSError(errno, os.strerror(errno))
        if self.two_threads and self.streams and not self.second.runs:
            self.two_threads = not kp_start_second(&self.second, self.epoll.fileno(), &self.observer)
        stream.s.most_unsent = KP_MOST_UNSENT
        kp_assign_to_first(&self.second, &stream.s, self.epoll.fileno(), self.moves)
        self.moves = not self.moves
        self.streams[stream.s.fd] = stream

    def watch(self, int descriptor):
        """Wait for a descriptor that is not a stream."""
        if kp_wait_for(self.epoll.fileno(), descriptor, NULL):
            raise OSError(errno, os.strerror(errno))

    def remove(self, int descriptor):
        """Stop waiting for a stream or descriptor; must be called before it is closed."""
        cdef Stream stream = self.streams.pop(descriptor, None)
        if stream is not None:
            kp_send_requested(&stream.s)
        if stream is not None and kp_is_second(&self.second, &stream.s):
            kp_remove_from_second(&self.second, &stream.s)
        else:
            self.epoll.unregister(descriptor)

    def serve(self, double seconds):
        """Serve streams until there is something for Python, at most `seconds`.

        Returns
        -------
        list of Stream
            The streams that have messages for Python, or have ended. Empty after an event of another descriptor, a
            signal, or the time limit.
        """
        cdef kp_serving serving
        cdef int at
        cdef int64_t nanoseconds = <int64_t>(min(seconds, 1e6) * 1e9)
        serving.epoll, serving.second = self.epoll.fileno(), &self.second if self.second.runs else NULL
        serving.observer, serving.waits = &self.observer, self.waits
        release_dropped()
        with nogil:
            kp_serve(&serving, nanoseconds)
        release_dropped()
        return [self.streams[serving.left[at].fd] for at in range(serving.n_left)]

    def close(self):
        """End the second thread, if any, and stop waiting; the streams must be closed before."""
        self.end_second()
        self.epoll.close()
        self.streams.clear()

    cdef void end_second(self) noexcept:
        with nogil:
            kp_stop_second(&self.second, getpid() == self.pid)
