# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Streams of messages over connected sockets: one system call where ZeroMQ has several threads.

stream.h has the bytes and their checks; sender.h the thread that sends what a socket did not accept at once; serve_streams.h waits
for the streams of a server; cipher.h encrypts.
"""

import os
import select

cimport cython
from posix.unistd cimport close as close_descriptor, getpid
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from .....observe.native._observe import ring

cdef extern from "serve_streams.h" nogil:
    ctypedef struct kv_counters:
        pass
    ctypedef struct kv_ring:
        pass
    kv_ring *kv_ring_here
    ctypedef struct kp_observer:
        kv_counters *counters
        uint16_t store
    ctypedef struct kp_waits:
        pass
    enum:
        KP_MAGIC
    enum kp_outcome:
        KP_OPEN
        KP_BLOCKED
        KP_CLOSED
        KP_FOREIGN
        KP_NO_MEMORY
    ctypedef struct kp_buffer:
        char *data
        size_t nbytes
        void *owner
        kp_buffer *next
    kp_buffer *kp_buffer_of(void *owner)
    kp_buffer *kp_new_buffer(size_t nbytes)
    kp_buffer *kp_retain(kp_buffer *buffer)
    void kp_release(kp_buffer *buffer)
    kp_buffer *kp_take_released()
    ctypedef struct kp_message:
        kp_message *next
        uint32_t n, handled
        kp_buffer **frames
    ctypedef struct kp_deferred:
        pass
    ctypedef struct kp_piece:
        const char *at
        size_t nbytes
        kp_buffer *owner
        kp_deferred *rows
    ctypedef struct kp_outlet:
        void *stream
        int (*send)(void *stream, const kp_piece *pieces, size_t n)
    ctypedef struct kp_inlet:
        void *context
    ctypedef struct kp_aead:
        size_t nonce_bytes, tag_bytes
    ctypedef struct kp_cipher:
        pass
    kp_cipher *kp_new_cipher(const kp_aead *aead, const void *send_key, const void *receive_key, uint64_t chunks_of_key)
    void kp_free_cipher(kp_cipher *c)
    const uint64_t KP_MOST_UNSENT
    ctypedef struct kp_stream:
        int fd
        int is_near, limits_in_flight
        uint64_t most_unsent
        int broken
        kp_outcome end
        const kp_inlet *inlet
        kp_buffer *(*place)(kp_stream *s)
        void *placer
        kp_observer observer
    ctypedef struct kp_sender:
        int runs
    int kp_open_stream(kp_stream *s, int fd, uint64_t frame_limit, kp_cipher *cipher)
    void kp_free_stream(kp_stream *s)
    kp_outcome kp_receive(kp_stream *s, int until_whole)
    kp_message *kp_take_messages(kp_stream *s)
    int kp_start_sender(kp_sender *sender)
    void kp_stop_sender(kp_sender *sender, int ours)
    int kp_add_stream(kp_sender *sender, kp_stream *s)
    void kp_remove_stream(kp_stream *s)
    int kp_send(kp_stream *s, const kp_piece *pieces, size_t n)
    int kp_send_to(void *stream, const kp_piece *pieces, size_t n)
    int kp_is_full(kp_stream *s)
    int kp_is_sent(kp_stream *s)
    void kp_send_requested(kp_stream *s)
    int kp_wait_for(int epoll, int descriptor, kp_stream *stream)
    ctypedef struct kp_second:
        int runs
    int kp_start_second(kp_second *second, int first_epoll, const kp_observer *observer)
    void kp_stop_second(kp_second *second, int ours)
    void kp_assign_to_first(kp_second *second, kp_stream *s, int epoll, int may_move)
    int kp_is_second(const kp_second *second, const kp_stream *s)
    void kp_remove_from_second(kp_second *second, kp_stream *s)
    ctypedef struct kp_serving:
        int epoll
        kp_second *second
        const kp_observer *observer
        const kp_waits *waits
        kp_stream **left
        int n_left
    void kp_serve(kp_serving *serving, int64_t nanoseconds)
    enum:
        KP_KEY_BYTES
        KP_NONCE_BYTES
        KP_TAG_BYTES

cdef extern from "send_rows.h" nogil:
    ctypedef struct kp_gather:
        const char *table
        size_t row_bytes
        const int64_t *rows
        size_t n
    int kp_is_within(const kp_gather *g, int64_t table_rows)
    void kp_copy_rows(const kp_gather *g, size_t first, size_t last, char *into)
    int kp_send_rows(kp_stream *s, const kp_gather *g)

cdef extern from "expected_rows.h" nogil:
    ctypedef struct kp_expected:
        kp_expected *next
        uint32_t slice
        const char *ids
        char *into
        uint64_t n, ids_bytes, nbytes
    int kp_has_equal(const kp_expected *first, const kp_expected *rows)
    kp_buffer *kp_place_rows(kp_stream *s)

kv_ring_here = <kv_ring *>PyCapsule_GetPointer(ring, "kvstore.events")

include "exchange.pxi"
include "expected_rows.pxi"
include "gathered_rows.pxi"

cdef size_t COPIED = 32 * 1024  # bytes: smaller frames are copied behind the head


@cython.final
cdef class Frame:
    """A received frame, as a buffer of bytes."""

    cdef kp_buffer *data

    def __dealloc__(self):
        kp_release(self.data)

    def __len__(self):
        return self.data.nbytes

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.data.data, <Py_ssize_t>self.data.nbytes, 0, flags)


cdef class Sender:
    """The thread that sends for all streams of a process what their sockets did not accept at once."""

    cdef kp_sender s
    cdef int pid

    def __cinit__(self):
        self.pid = getpid()
        if kp_start_sender(&self.s):
            raise OSError(errno, os.strerror(errno))

    def close(self):
        """End the thread; its streams must be closed before. A second call does nothing."""
        with nogil:
            kp_stop_sender(&self.s, getpid() == self.pid)

    def __dealloc__(self):
        kp_stop_sender(&self.s, getpid() == self.pid)


@cython.final
cdef class Cipher:
    """The encryption of one stream.

    Parameters
    ----------
    aead : tuple of int
        Addresses of libsodium's `crypto_aead_*_encrypt_detached`, `*_decrypt_detached`, and `crypto_generichash`;
        bytes of a nonce and of a tag.
    send_key, receive_key : bytes
        The keys of sent and of received bytes, 32 bytes each.
    chunks_of_key : int
        The chunks of 64 KB after which a key is replaced; the same at both ends.
    """

    cdef kp_cipher *c

    def __cinit__(self, aead not None, bytes send_key not None, bytes receive_key not None,
                  uint64_t chunks_of_key=1 << 20):
        cdef size_t parts[5]
        if len(aead) != 5 or not all(aead):
            raise ValueError("a cipher has three functions, nonces and tags")
        parts[0], parts[1], parts[2], parts[3], parts[4] = aead
        if not 8 <= parts[3] <= KP_NONCE_BYTES or parts[4] > KP_TAG_BYTES:
            raise ValueError(f"a nonce has 8 to 32 bytes and a tag up to 32, not {parts[3]} and {parts[4]}")
        if len(send_key) != KP_KEY_BYTES or len(receive_key) != KP_KEY_BYTES or send_key == receive_key or not chunks_of_key:
            raise ValueError("a cipher has two keys of 32 bytes, one for each direction")
        self.c = kp_new_cipher(<kp_aead *>parts, <char *>send_key, <char *>receive_key, chunks_of_key)
        if self.c == NULL:
            raise MemoryError()

    def __dealloc__(self):
        kp_free_cipher(self.c)


@cython.no_gc_clear  # `close` needs the sender
cdef class Stream:
    """One end of a stream. All methods belong to one thread at a time.

    Parameters
    ----------
    sender : Sender
    descriptor : int
        A connected socket that does not block; the stream owns it from now on.
    frame_limit : int
        Bytes of the largest frame that is received.
    cipher : Cipher, optional
        Encrypts all bytes. It serves one stream only: its keys are never used twice.
    """

    cdef kp_stream s
    cdef Sender sender
    cdef kp_outlet outlet
    cdef object link, counters
    cdef list expected
    cdef kp_expected *first_expected
    cdef readonly bint closed

    def __cinit__(self, Sender sender not None, int descriptor, uint64_t frame_limit, Cipher cipher=None):
        self.closed, self.expected = True, []
        if cipher is not None and cipher.c == NULL:
            close_descriptor(descriptor)
            raise ValueError("a cipher serves one stream only")
        if kp_open_stream(&self.s, descriptor, frame_limit, NULL if cipher is None else cipher.c):
            close_descriptor(descriptor)
            raise MemoryError()
        self.closed = False
        if cipher is not None:
            cipher.c = NULL
        self.sender = sender
        if kp_add_stream(&sender.s, &self.s):
            self.close()
            raise MemoryError()

    def __dealloc__(self):
        self.close()

    def observe(self, counters not None):
        """Record the times of the sender's thread in `counters`, a `Counters`."""
        self.counters = counters
        self.s.observer = observer_of(counters)

    def fileno(self):
        """Return the descriptor, which is readable when there are bytes to receive; -1: closed."""
        return -1 if self.closed else self.s.fd

    def send(self, list frames):
        """Send a message of frames, each a contiguous buffer of bytes, without blocking.

        Frames of more than 32 KiB are read until they are sent, and must not change until the peer answers;
        `GatheredRows` as the last frame must not change until this returns. False: nothing was sent, because the stream has
        ended, or the peer has not read for long.
        """
        cdef Py_ssize_t n = len(frames)
        cdef GatheredRows last = frames[n - 1] if n and type(frames[n - 1]) is GatheredRows else None
        cdef size_t copied = 8 + 8 * n, used = 0, nbytes
        cdef list views = []
        cdef Py_buffer *view
        cdef kp_piece *pieces
        cdef kp_buffer *head
        cdef kp_buffer *owner
        cdef char *end
        cdef char *begin
        cdef int failed
        if self.closed:
            return False
        release_dropped()
        for frame in frames if last is None else frames[:n - 1]:
            kept = PyMemoryView_FromObject(frame)
            views.append(kept)
            nbytes = PyMemoryView_GET_BUFFER(kept).len
            if nbytes <= COPIED:
                copied += nbytes
        pieces = <kp_piece *>malloc((2 * n + 2) * sizeof(kp_piece))
        head = kp_new_buffer(copied)
        if pieces == NULL or head == NULL:
            free(pieces)
            kp_release(head)
            raise MemoryError()
        begin = end = head.data
        (<uint32_t *>end)[0], (<uint32_t *>end)[1] = KP_MAGIC, <uint32_t>n
        end += 8
        for kept in views:
            (<uint64_t *>end)[0] = PyMemoryView_GET_BUFFER(kept).len
            end += 8
        if last is not None:
            (<uint64_t *>end)[0] = last.nbytes
            end += 8
        for kept in views:
            view = PyMemoryView_GET_BUFFER(kept)
            if <size_t>view.len <= COPIED:
                memcpy(end, view.buf, view.len)
                end += view.len
                continue
            if end > begin:
                pieces[used] = kp_piece(begin, end - begin, kp_retain(head), NULL)
                used += 1
                begin = end
            owner = kp_buffer_of(<void *>kept)
            if owner == NULL:
                drop_pieces(pieces, used)
                kp_release(head)
                raise MemoryError()
            Py_INCREF(kept)
            pieces[used] = kp_piece(<char *>view.buf, view.len, owner, NULL)
            used += 1
        pieces[used] = kp_piece(begin, end - begin, head, NULL)
        used += 1
        with nogil:
            failed = kp_send(&self.s, pieces, used)
        if failed:
            drop_pieces(pieces, used)
        else:
            free(pieces)
            if last is not None:
                with nogil:
                    failed = kp_send_rows(&self.s, &last.g)
        release_dropped()
        return not failed

    def receive(self):
        """Return the messages that have arrived, each a list of `Frame`, without blocking.

        Raises ConnectionError where the stream has ended, after all earlier messages were returned; it is
        ConnectionAbortedError where the received bytes are invalid.
        """
        if not self.closed:
            release_dropped()
            with nogil:
                kp_receive(&self.s, 0)
        return [frames for _, frames in self.take_messages()]

    def take_messages(self):
        """Return the received messages that no link has handled, without blocking.

        Returns
        -------
        list of (int, list of Frame)
            The number of records of the message that are handled, and its frames.

        Raises
        ------
        ConnectionError
            The stream has ended, and there are none. ConnectionAbortedError: the received bytes are invalid.
        """
        cdef list found = [] if self.closed else self.messages()
        if not found and self.s.end not in (KP_OPEN, KP_BLOCKED):
            raise (ConnectionAbortedError if self.s.end == KP_FOREIGN else ConnectionError)(REASONS[<int>self.s.end])
        return found

    def expect(self, ExpectedRows rows not None):
        """Receive rows at their destination, if they arrive over this stream.

        False: they arrive in other memory, because equal ones are expected, with the same slice and ids.
        """
        if kp_has_equal(self.first_expected, &rows.x):
            return False
        self.expected.append(rows)
        self.place_expected()
        return True

    def expect_no_more(self, ExpectedRows rows not None):
        """Stop writing to the destination of rows, whether they have arrived or not."""
        if rows not in self.expected:
            return
        self.expected.remove(rows)
        if not self.closed and kp_unplace(&self.s) and self.s.end in (KP_OPEN, KP_BLOCKED):
            self.s.end = KP_NO_MEMORY
        self.place_expected()

    cdef void place_expected(self) noexcept:
        cdef ExpectedRows rows
        self.first_expected = NULL
        for rows in self.expected:
            rows.x.next = self.first_expected
            self.first_expected = &rows.x
        self.s.placer = &self.first_expected
        self.s.place = NULL
        if self.expected:
            self.s.place = kp_place_rows

    def set_link(self, link not None):
        """Have a `Link` handle messages from now on, as far as it can, and answer over this stream."""
        if self.link is not None:
            self.link.close()
        self.outlet = kp_outlet(&self.s, kp_send_to)
        link.connect(PyCapsule_New(&self.outlet, "kvstore.outlet", NULL))
        self.s.inlet = <const kp_inlet *>PyCapsule_GetPointer(link.inlet, "kvstore.inlet")
        self.link = link

    cdef list messages(self):
        """Return the complete messages, as `take_messages`."""
        cdef kp_message *message = kp_take_messages(&self.s)
        cdef kp_message *following
        cdef list found = []
        while message != NULL:
            found.append((message.handled, frames_of(message)))
            following = message.next
            free(message)
            message = following
        return found

    def begin(
        self, Exchange exchange not None, list rounds not None, list clocks not None, uint64_t first,
        uint64_t base, uint64_t epoch, uint32_t version,
    ):
        """Send the requests of an exchange that is set, without blocking; otherwise as `send`.

        `rounds` are those of the parts, `clocks` those of the arrays, `first` is the first sequence, `base` the bytes of all
        earlier requests, in the server's count; the others are as in `Record`. `await_replies` sends the requests that
        exceed the credit.
        """
        release_dropped()
        if self.closed or self.s.end not in (KP_OPEN, KP_BLOCKED):
            return False
        return exchange.begin(&self.s, rounds, clocks, first, base, epoch, version)

    @property
    def is_near(self):
        """Whether the peer is known to be on this host: fewer bytes are then in flight to it at a time."""
        return bool(self.s.is_near)

    @is_near.setter
    def is_near(self, bint near):
        self.s.is_near = near

    @property
    def limits_in_flight(self):
        """Whether all workers that send to a peer on this host should have few bytes in flight."""
        return bool(self.s.limits_in_flight)

    @limits_in_flight.setter
    def limits_in_flight(self, bint turns):
        self.s.limits_in_flight = turns

    @property
    def is_full(self):
        """Whether the peer has not read for so long that nothing is sent to it."""
        return not self.closed and bool(kp_is_full(&self.s))

    @property
    def sent(self):
        """Whether all messages are passed to the kernel."""
        return self.closed or bool(kp_is_sent(&self.s))

    def close(self):
        """Close it; unsent messages are dropped. A second call does nothing."""
        if self.closed:
            return
        self.closed = True
        if self.link is not None:
            self.link.close()
            self.link = None
        if self.sender is not None and self.sender.pid != getpid():
            close_descriptor(self.s.fd)  # in a fork, whose locks may be held for ever
            self.s.end = KP_CLOSED
            return
        with nogil:
            kp_remove_stream(&self.s)
        kp_free_stream(&self.s)
        self.s.end = KP_CLOSED
        release_dropped()


include "stream_set.pxi"


cdef dict REASONS = {
    KP_CLOSED: "the connection was closed",
    KP_FOREIGN: "a message begins with an invalid header, or is too large, or was altered",
    KP_NO_MEMORY: "no memory for a message",
}


cdef kp_observer observer_of(object counters):
    """Return where a `Counters` counts; the caller holds a reference to it."""
    cdef kp_observer found
    found.counters = <kv_counters *>PyCapsule_GetPointer(counters.capsule, "kvstore.counters")
    found.store = counters.number
    return found


cdef list frames_of(kp_message *message):
    cdef list frames = []
    cdef Frame frame
    cdef uint32_t at
    for at in range(message.n):
        frame = Frame.__new__(Frame)
        frame.data = message.frames[at]
        frames.append(frame)
    return frames


cdef void drop_pieces(kp_piece *pieces, size_t n) noexcept:
    cdef size_t at
    for at in range(n):
        kp_release(pieces[at].owner)
    free(pieces)


cdef void release_dropped() noexcept:
    """Release the Python objects whose bytes are sent."""
    cdef kp_buffer *first = kp_take_released()
    cdef kp_buffer *following
    while first != NULL:
        following = first.next
        Py_DECREF(<object>first.owner)
        free(first)
        first = following
