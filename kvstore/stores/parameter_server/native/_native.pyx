# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The state of a server's sessions and slices as C structs, and the Python classes that own them.

`rounds.h` handles requests that need nothing special, and the end of a round, without Python. The state machine
of the server handles all other events; it works on the same structs through the classes of this module. Two functions,
which count values, are for workers too.
"""

from collections import namedtuple

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memset

from ....kernels import cpu
from ....observe.native._observe import ring
from ..protocol.events import ApplyRounds, SendReplies, SliceRound
from ..protocol.messages import Batch, PayloadLocation, Record, RecordKind

cdef extern from "links.h" nogil:
    const uint64_t KP_MOST_CLOCK
    enum:
        KP_MOST_LATE
        KP_MOST_ROW_PARTS
        KP_SPAN
        KP_SHARED
        KV_MAX_PARAMS
        KV_MAX_STATES
    enum:
        KP_FAILED
    ctypedef uint64_t kp_atomic "_Atomic uint64_t"
    ctypedef struct kv_counters:
        pass
    ctypedef struct kv_ring:
        pass
    kv_ring *kv_ring_here
    ctypedef struct kv_about:
        pass
    ctypedef struct kp_observer:
        kv_counters *counters
        uint16_t store
    ctypedef struct kp_moved:
        uint64_t carried, shared
    void kp_add_record_bytes(kp_moved *moved, const kp_record *r)
    void kp_count_sent(const kp_observer *o, int way, const kp_moved *moved)
    void kp_count_received(const kp_observer *o, int way, const kp_moved *moved)
    void kp_count_rounds(const kp_observer *o, uint64_t rounds)
    ctypedef struct kp_record:
        uint8_t kind, coding, place
        uint32_t slice, version, frame
        uint64_t sequence, round, clock, offset, nbytes, flags
        double threshold
        int64_t rows
    ctypedef struct kp_buffer:
        char *data
        size_t nbytes
        void *owner
        kp_buffer *next
    kp_buffer *kp_buffer_of(void *owner)
    kp_buffer *kp_retain(kp_buffer *buffer)
    void kp_release(kp_buffer *buffer)
    kp_buffer *kp_take_released()
    ctypedef struct kp_numbers:
        uint32_t count
    ctypedef struct kp_duplicates:
        uint64_t low
        kp_numbers above
    ctypedef struct kp_answer:
        int kind
        kp_record request
        uint64_t round
        kp_buffer *detail
    ctypedef struct kp_session:
        void *owner
        int32_t store, rank, seat
        int of_host
        uint64_t incarnation, epoch
        int gone, report, touched, overtaken
        uint64_t received, reported
        kp_duplicates duplicates
        kp_numbers waiting
        kp_answer *answers
        size_t n_answers
        kp_session *next
    int kp_has_number(const kp_numbers *set, uint64_t number)
    int kp_insert_number(kp_numbers *set, uint64_t number)
    void kp_erase_number(kp_numbers *set, uint64_t number)
    int kp_has_arrived(const kp_duplicates *d, uint64_t number)
    int kp_mark_arrived(kp_duplicates *d, uint64_t number)
    void kp_skip_to(kp_duplicates *d, uint64_t end)
    void kp_forget_answers(kp_session *s)
    void kp_close_session(kp_session *s)
    ctypedef struct kp_payload:
        kp_buffer *data
        kp_buffer *more
        const char *at
        const char *rows
    ctypedef struct kp_part:
        int32_t rank
        kp_record request
        kp_buffer *data
        kp_buffer *more
        const char *at
    ctypedef struct kp_value_buffer:
        char *at
        kp_buffer *holder
        kp_atomic *seqlock
        uint32_t segment
        uint64_t offset
    ctypedef int (*kp_run)(void *, Py_ssize_t, Py_ssize_t, int)
    ctypedef void (*kp_run_rows)(const void *, const void *, int)
    ctypedef struct kp_counts:
        int64_t updates, num_update
    ctypedef struct kp_plan:
        int rule, n_states
        char **states
        char **kept
        int keeps
        double *p
        uint32_t version
        uint64_t epoch
        kp_counts *counts
    ctypedef struct kp_value:
        int dtype
        int64_t n, nbytes
        kp_value_buffer *buffers
        int current
        int64_t before
        uint8_t sums, changed
        kp_plan plan
        int64_t kept_after
        kp_counts kept_counts
        kp_run run
    ctypedef struct kp_deferred:
        pass
    ctypedef struct kp_table:
        char *at
        int dtype
        int64_t n, first
        Py_ssize_t cols
        size_t row_bytes
        kp_plan plan
        int most_parts
        int64_t capacity, kept_capacity
        int64_t *ids
        int64_t *maps
        char *kept
        int64_t kept_after, n_kept
        uint8_t has_kept, changed
        kp_deferred *deferred
    void kp_copy_deferred(kp_deferred **all)
    void kp_swap_buffers(kp_value *v, uint64_t round)
    void kp_free_value_buffer(kp_value_buffer *buffer)
    int kp_unpack_sum(const kp_value *v, kp_value_buffer *buffer)
    void kp_forget_packed(kp_value_buffer *buffer)
    ctypedef struct kp_open:
        uint64_t number
        int n
        kp_part *parts
    ctypedef struct kp_waiter:
        kp_session *session
        kp_record request
        kp_buffer *data
    ctypedef struct kp_waiters:
        kp_waiter *all
        int n
    ctypedef struct kp_slice:
        void *owner
        int32_t store
        uint32_t id
        uint8_t defined, ready, kept, busy, special
        uint64_t round
        kp_value *value
        kp_table *table
        kp_open *open
        int n_open
        kp_waiters pulls, held
        kp_slice *next
    ctypedef struct kp_members:
        int usual, at_once, n_needed
        uint64_t epoch
        int32_t *needed
    ctypedef struct kp_late:
        uint64_t begin, end, rounds, longest, slice
        int32_t rank
    ctypedef struct kp_lates:
        kp_late *all
        size_t n
        uint64_t rounds
    ctypedef struct kp_effects:
        kp_lates lates
        kp_session *touched
        kp_session **last_touched
        kp_slice *jobs
        kp_slice **last_job
        kp_observer observer
    void kp_init_effects(kp_effects *e)
    void kp_queue_session(kp_effects *e, kp_session *s)
    void kp_answer_request(kp_effects *e, kp_session *s, int kind, const kp_record *request, uint64_t round, kp_buffer *detail)
    kp_open *kp_find_open(const kp_slice *slice, uint64_t number)
    kp_open *kp_open_round(kp_slice *slice, uint64_t number)
    int kp_part_of(const kp_open *open, int32_t rank)
    int kp_insert_part(kp_open *open, int32_t rank, const kp_record *request, const kp_payload *payload)
    void kp_release_part(const kp_part *part)
    void kp_note_wait(kp_effects *e, const kp_slice *slice)
    void kp_note_arrival(kp_effects *e, const kp_slice *slice, int32_t rank, const kp_record *r)
    void kp_drop_open(kp_slice *slice, kp_open *open)
    int kp_add_waiter(kp_waiters *w, kp_session *session, const kp_record *request, kp_buffer *data)
    void kp_drop_waiters(kp_waiters *w)
    void kp_close_slice(kp_slice *slice)
    int kp_request(kp_slice *slice, kp_session *session, const kp_members *members, const kp_record *r, const kp_payload *payload, kp_effects *e)
    void kp_complete_round(kp_slice *slice)
    int kp_finish_round(kp_slice *slice, const kp_members *members, kp_effects *e)
    int kp_reply_session(kp_session *session)
    ctypedef struct kp_sums:
        kp_run run
        kp_run_rows run_rows
        const int *threads
        int near, keeps_parts
        kp_observer observer
    void kp_free_sums(kp_sums *sums)
    ctypedef struct kp_slices:
        kp_slice **all
        uint32_t n
    ctypedef struct kp_outlet:
        void *stream
    ctypedef struct kp_message:
        pass
    ctypedef struct kp_inlet:
        void *context
        int (*handle)(void *context, kp_message *message)
    ctypedef struct kp_waits:
        void *context
        kv_about (*about)(void *context)
    ctypedef struct kp_replier:
        kp_outlet outlet
        uint16_t version
        uint64_t job
        const kp_members *members
        const kp_slices *slices
        int reads_here
        const kp_observer *observer
    ctypedef struct kp_segment:
        kp_buffer *holder
        char *at
        uint64_t nbytes
    ctypedef struct kp_link:
        kp_inlet inlet
        kp_replier replier
        kp_effects *effects
        kp_sums *sums
        const kp_members *members
        const kp_slices *slices
        kp_session *session
        uint64_t report
        kp_segment *segments
        uint32_t n_segments
    int kp_handle_message(void *context, kp_message *message)
    kv_about kp_about_wait(void *effects)
    void kp_close_link(kp_link *link)

kv_ring_here = <kv_ring *>PyCapsule_GetPointer(ring, "kvstore.events")

include "records.pxi"
include "sessions.pxi"
include "values.pxi"
include "tables.pxi"
include "slices.pxi"
include "links.pxi"
include "counts.pxi"
