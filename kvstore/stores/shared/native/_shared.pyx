# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The Python interface of the shared region: a job with keys, arrays in the region, rounds.

The headers in this folder hold the protocol (layout.h, members.h, wait.h, arena.h, texts.h, table.h, arrivals.h, summing.h,
chunks.h, round.h, reading.h, region.h), and _shared.pyi lists the names that Python code uses. No method blocks for
longer than a tenth of a second: a wait returns `TICK`, and the caller checks its deadline.
"""

cimport cython
cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

import logging
import math
import os
import weakref

import numpy as np

from ....arrays.element_types import dtype_named
from ....errors import KVStoreError, TimeoutError
from ....kernels import cpu
from ....observe.native._observe import ring
from ....waiting import WaitClock

cnp.import_array()

cdef extern from *:
    """
    #include "reading.h"
    #include "region.h"
    /* Cython knows no atomic types. */
    #define KV_WORD(at) ((_Atomic uint64_t *)(void *)(at))
    #define KV_GET(at) kv_get(KV_WORD(at))
    #define KV_PUT(at, value) kv_put(KV_WORD(at), value)
    #define KV_SET_BITS(at, bits) kv_set_bits(KV_WORD(at), bits)
    #define KV_CLEAR_BITS(at, bits) kv_clear_bits(KV_WORD(at), bits)
    #define KV_ADD(at, more) kv_add(KV_WORD(at), more)
    #define KV_SWAP(at, old, value) kv_swap(KV_WORD(at), old, value)
    """

cdef extern from "region.h" nogil:
    enum:
        KV_MAX_WORKERS
        KV_SMALL_KEY
        KV_SHARE_BYTES
        KV_LOG_ELEMENTS
        KV_LOG_ARRAYS
        KV_FAILURES
        KV_MAGIC
        KV_READY
        KV_TICK
        KV_PEER_LOST
        KV_FENCED
        KV_PLAN
        KV_NEW_MODE
        KV_NO_MEMORY
        KV_UNREADABLE
        KV_INTACT
        KV_DAMAGED_HEADER
        KV_DAMAGED_ENTRY
        KV_DAMAGED_TEXT
        KV_ALIVE
        KV_JOINED
        KV_LEFT
        KV_LOST
        KV_SLOT
        KV_IN_PLACE
        KV_PRIVATE
        KV_ROWS
        KV_PACKED
        KV_ON_GPU
        KV_DIVIDED
    uint64_t KV_NO_ROUND
    ctypedef struct kv_level:
        pass
    ctypedef struct kv_log:
        uint64_t entry, round, chunk, scratch
    ctypedef struct kv_worker:
        uint64_t state, incarnation, pid, started, beat, barriers, probe
        kv_log log
    ctypedef struct kv_part:
        uint64_t arrived, first
        uint64_t pushed[2]
        uint64_t slot[2]
        uint64_t source[2]
        uint32_t kind[2]
        uint64_t stamp[2]
        float threshold[2]
    ctypedef struct kv_entry:
        uint64_t phase, mask
        int32_t dtype, rule, n_states, sparse
        uint64_t n, nbytes, chunks
        uint64_t value[2], of[2]
        uint64_t parts, map, master
        uint64_t states[4]
        double params[16]
        uint64_t number, name, name_bytes, shape, ndim, is_text, is_side, hash
        int64_t int_key
        uint64_t record, rows_of, undo, planned, gpu_table
        uint64_t why[KV_FAILURES]
    ctypedef struct kv_header:
        uint64_t n_workers, members, lost, first_lost, epoch, no_peer_reads, mode, go_on, lock
        uint64_t settings, settings_version, num_update, text_keys, top, reserved, n_keys
        kv_worker *worker
    enum:
        KV_MOVING
    uint64_t KV_NO_SLICE
    ctypedef struct kv_counters:
        uint64_t rounds
    ctypedef struct kv_ring:
        pass
    kv_ring *kv_ring_here
    ctypedef struct kv_about:
        pass
    ctypedef struct kv_self:
        kv_counters *counters
        uint16_t store
        char *base
        kv_header *head
        kv_worker *worker
        uint64_t window, mode, tried, incarnation, spin, looked, silence, word, left_reported, epoch, begin, time
        int rank, size, fd, forked, is_last, go_on, crowded
        int *pidfd
        const kv_level *const *level
        char *bounce
    ctypedef struct kv_reading:
        uint64_t phase
    ctypedef struct kv_call:
        kv_entry *entry
        uint64_t round
        char **outs
        int n_outs, stream
        unsigned char *delivered
    const int *kv_itemsize
    uint64_t kv_get "KV_GET" (void *word)
    void kv_put "KV_PUT" (void *word, uint64_t value)
    uint64_t kv_set_bits "KV_SET_BITS" (void *word, uint64_t bits)
    uint64_t kv_clear_bits "KV_CLEAR_BITS" (void *word, uint64_t bits)
    uint64_t kv_add "KV_ADD" (void *word, uint64_t more)
    int kv_swap "KV_SWAP" (void *word, uint64_t expected, uint64_t value)
    uint64_t kv_now_ns()
    int kv_map_region(kv_self *me, int fd, uint64_t window, uint64_t least)
    void kv_unmap_region(kv_self *me)
    int kv_create_region(kv_self *me, uint64_t reserved)
    int kv_is_region(kv_self *me)
    int kv_register(kv_self *me)
    int kv_start_heartbeat(kv_self *me)
    void kv_stop_heartbeat(kv_self *me)
    void kv_deregister(kv_self *me, int state)
    int kv_retire(kv_self *me)
    int kv_give_up_descriptors(kv_self *me, int *given)
    ctypedef int (*kv_attempt)(kv_self *me)
    int kv_make_member(kv_self *me)
    void kv_fence()
    void kv_undo(kv_self *me, kv_entry *e, uint64_t round)
    int kv_catch_up(kv_self *me, kv_entry *first)
    int kv_rejoin(kv_self *me)
    int kv_worker_state(kv_self *me, int w)
    int kv_can_read_peer(kv_self *me, int w)
    int kv_check_membership(kv_self *me)
    int kv_replaces_by_sum(const kv_self *me, const kv_entry *e)
    void kv_detect_losses(kv_self *me)
    void kv_wake_all(kv_self *me)
    ctypedef int (*kv_condition)(void *)
    int kv_wait(kv_self *me, kv_condition ready, void *context)
    ctypedef kv_about (*kv_describe)(const void *context)
    int kv_wait_recorded(kv_self *me, kv_condition ready, kv_describe describe, void *context, int patient)
    kv_about kv_about_barrier(const void *context)
    kv_about kv_about_growth(const void *context)
    void kv_enter_round(kv_self *me, int phase, uint64_t slice, uint64_t round, uint64_t nbytes)
    void kv_leave()
    void kv_add_alone(void *count, uint64_t more)
    void kv_note_losses(kv_self *me)
    void kv_count_sent(kv_self *me, uint64_t nbytes)
    void kv_count_received(kv_self *me, uint64_t nbytes)
    int kv_all_registered(void *context)
    ctypedef struct kv_barrier:
        kv_self *me
        uint64_t number
    int kv_barrier_complete(void *context)
    int kv_try_lock(kv_self *me)
    int kv_narrow_window(kv_self *me)
    int kv_lock_region(kv_self *me)
    void kv_unlock_region(kv_self *me)
    enum:
        KV_VALUE_COLOUR
        KV_STATE_COLOUR
        KV_SOURCE_COLOUR
    uint64_t kv_allocate_coloured(kv_self *me, uint64_t size, int colour)
    uint64_t kv_allocate_locked(kv_self *me, uint64_t size)
    void kv_free_locked(kv_self *me, uint64_t offset, uint64_t size)
    uint64_t kv_text_bytes(kv_self *me, uint64_t offset)
    char *kv_text_start(kv_self *me, uint64_t offset)
    int kv_is_text(kv_self *me, uint64_t offset)
    int kv_is_given(kv_self *me, uint64_t offset, uint64_t size)
    int kv_find_damage(int fd)
    uint64_t kv_new_text(kv_self *me, const char *text, uint64_t size)
    int kv_set_settings(kv_self *me, const char *text, uint64_t size)
    void kv_set_why(kv_self *me, kv_entry *e, uint64_t round, const char *text, uint64_t size)
    uint64_t kv_hash(const char *text, uint64_t size, int64_t number)
    uint64_t kv_find_key(kv_self *me, const char *text, uint64_t size, int64_t number)
    kv_entry *kv_entry_at(kv_self *me, uint64_t number)
    kv_entry *kv_new_entry(kv_self *me)
    void kv_publish_entry(kv_self *me, kv_entry *e)
    kv_part *kv_key_parts(kv_self *me, kv_entry *e)
    uint64_t kv_complete_round(uint64_t phase)
    uint64_t kv_current_of(uint64_t phase)
    uint64_t kv_round_of(uint64_t phase)
    int kv_is_opener(const kv_self *me, uint64_t phase, uint64_t round)
    int kv_is_planned(kv_self *me, kv_entry *e, uint64_t phase)
    int kv_wait_for_free_slot(kv_self *me, kv_entry *e)
    void kv_announce_overwrite(kv_self *me, kv_entry *e)
    void kv_arrive(kv_self *me, kv_entry *e, int kind, uint64_t source)
    void kv_arrive_divided(kv_self *me, kv_entry *e, int kind, float divisor, uint64_t source)
    uint64_t kv_arrive_silently(kv_self *me, kv_entry *e, uint32_t kind, float threshold, uint64_t source)
    void kv_arrive_packed(kv_self *me, kv_entry *e, int code, float threshold, uint64_t source)
    int kv_kind_of(kv_part *part, int parity)
    int kv_code_of(kv_part *part, int parity)
    ptrdiff_t kv_encoded_bytes(int code, ptrdiff_t n)
    int kv_advance(kv_self *me, kv_call *call)
    int kv_bring_forward(kv_self *me, kv_call *call, int patient)
    int kv_sum_small(kv_self *me, kv_call *call, int patient)
    void kv_begin_call(kv_self *me)
    void kv_record_stamp(kv_self *me, kv_entry *e, uint64_t round)
    void kv_end_call(kv_self *me)
    int kv_is_call_complete(kv_self *me, kv_part *part, int w, int parity)
    int kv_overlaps_slot(kv_self *me, const kv_call *call)
    int kv_restore_round(kv_self *me, kv_entry *e, uint64_t round)
    int kv_is_idle(kv_self *me, kv_entry *e)
    uint64_t kv_pushed_round(kv_self *me, kv_entry *e)
    void kv_fail(kv_entry *e, uint64_t round)
    int kv_has_failed(kv_entry *e, uint64_t round)
    uint64_t kv_first_unreported(kv_self *me, kv_entry *e, const uint64_t *reported, uint64_t round)
    uint64_t kv_next_behind(kv_self *me, uint64_t start, uint64_t n)
    int kv_is_unopened(kv_self *me, kv_entry *e, uint64_t round, uint64_t *within)
    uint64_t kv_left_out(kv_self *me, kv_entry *e, uint64_t round)
    int kv_has_kind(kv_self *me, kv_entry *e, uint64_t round, uint64_t mask, int kind)
    int kv_has_rows(kv_self *me, kv_entry *e, uint64_t round, uint64_t mask)
    int kv_has_on_gpu(kv_self *me, kv_entry *e, uint64_t round, uint64_t mask)
    int kv_read_private(kv_self *me, int w, uint64_t address, char *to, uint64_t size)
    void kv_publish_work(kv_self *me, kv_entry *e, uint64_t phase, int rule)
    int kv_end_round(kv_self *me, kv_entry *e, uint64_t phase, uint64_t current)
    int kv_hold_key(kv_self *me, kv_entry *e, int writes)
    void kv_release_key(kv_self *me, kv_entry *e, uint64_t phase, int other)
    void kv_release_opened(kv_self *me, kv_entry *e, uint64_t phase)
    int kv_begin_work(kv_self *me)
    void kv_end_work(kv_self *me)
    void *kv_update_count(kv_entry *e)
    void *kv_next_updates(kv_entry *e)
    ctypedef struct kv_growth:
        kv_self *me
        uint64_t n
    int kv_has_grown(void *context)
    void kv_sum_private(kv_self *me, kv_entry *e, uint64_t round, char *to)
    void kv_sum_of(kv_self *me, kv_entry *e, uint64_t round, uint64_t mask, char *to)
    uint64_t KV_HEADER_BYTES

cdef extern from "reading.h" nogil:
    int kv_is_stable(kv_self *me, kv_entry *e)
    int kv_begin_read(kv_self *me, kv_entry *e, kv_reading *reading)
    int kv_end_read(kv_self *me, kv_entry *e, kv_reading *reading)
    int kv_deliver(kv_self *me, kv_call *call)

READY, TICK, PEER_LOST, FENCED = KV_READY, KV_TICK, KV_PEER_LOST, KV_FENCED
PLAN, NEW_MODE, NO_MEMORY, UNREADABLE = KV_PLAN, KV_NEW_MODE, KV_NO_MEMORY, KV_UNREADABLE
MAX_WORKERS = KV_MAX_WORKERS

kv_ring_here = <kv_ring *>PyCapsule_GetPointer(ring, "kvstore.events")

cdef object np_ndarray = np.ndarray
cdef object log = logging.getLogger("kvstore.shared")

include "fits.pxi"
include "job.pxi"
include "keys.pxi"
include "rounds.pxi"
