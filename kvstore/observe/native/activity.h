#ifndef KV_ACTIVITY_H
#define KV_ACTIVITY_H

/* The activity of a thread: one phase at a time, so that no time is counted twice.
 *
 * A phase ends the phase before it, at the same moment. Entering the same phase of the same round again continues it,
 * so consecutive pieces are one span. A wait is continued too while its thread checks a deadline, and has the key and
 * round of its last entry. All modules of a process see the same activity of a thread, through
 * the ring. */

#include "events.h"

struct kv_activity {
    kv_counters *counters;
    uint64_t begin; /* 0: no phase is timed */
    uint64_t freed; /* as it was in the ring: if other counters were freed since, these may be */
    kv_phase phase;
    kv_about about;
};

/* Return whether the counters of an activity may have been freed: an exception can leave an activity unfinished. */
static inline int kv_is_stale(const kv_activity *a)
{
    return a->freed != atomic_load_explicit(&kv_ring_here->freed, memory_order_relaxed);
}

static inline int kv_is_same(const kv_activity *a, const kv_counters *c, kv_phase phase, kv_about about)
{
    if (!a->begin || a->counters != c || a->phase != phase || kv_is_stale(a))
        return 0;
    return phase == KV_WAITING || (a->about.slice == about.slice && a->about.round == about.round);
}

static void kv_end_activity(kv_activity *a, uint64_t end)
{
    if (!kv_is_stale(a)) {
        if (a->phase == KV_WAITING)
            kv_waits_no_more(a->counters, a->begin);
        kv_end_at(a->counters, a->phase, a->begin, end, a->about);
    }
    a->begin = 0;
}

static void kv_enter_timed(kv_counters *c, kv_phase phase, kv_about about)
{
    kv_activity *a = kv_ring_here->activity();
    int waits = phase == KV_WAITING;
    atomic_store_explicit(&kv_ring_here->was_timed, 1, memory_order_relaxed);
    if (!kv_is_same(a, c, phase, about)) {
        uint64_t now = kv_ring_here->now();
        if (a->begin)
            kv_end_activity(a, now);
        *a = (kv_activity){c, now, atomic_load_explicit(&kv_ring_here->freed, memory_order_relaxed), phase, about};
    } else if (!waits) {
        a->about.nbytes += about.nbytes;
    } else if (about.whom != KV_NOBODY || about.slice != KV_NO_SLICE) {
        a->about = about;
    }
    if (waits)
        kv_waits_for(c, a->begin, a->about);
}

/* Return the activity of this thread, or NULL if it has none. */
static inline kv_activity *kv_activity_here(void)
{
    int may_have = KV_COUNTS && atomic_load_explicit(&kv_ring_here->was_timed, memory_order_relaxed);
    return may_have ? kv_ring_here->activity() : 0;
}

/* Enter a phase, if times are taken. `kv_leave` follows, or another phase. */
static inline void kv_enter(kv_counters *c, kv_phase phase, kv_about about)
{
    if (kv_is_timed(c) && kv_ring_here->activity)
        kv_enter_timed(c, phase, about);
}

/* Return the activity of this thread. */
static inline kv_activity kv_doing(void)
{
    kv_activity *a = kv_activity_here();
    return a ? *a : (kv_activity){0};
}

/* End the phase that this thread is in, if it is in one. */
static inline void kv_leave(void)
{
    kv_activity *a = kv_activity_here();
    if (a && a->begin)
        kv_end_activity(a, kv_ring_here->now());
}

/* The same, except for a wait, which continues. */
static inline void kv_leave_work(void)
{
    kv_activity *a = kv_activity_here();
    if (a && a->begin && a->phase != KV_WAITING)
        kv_end_activity(a, kv_ring_here->now());
}

/* Continue the activity before a phase that ends now. */
static inline void kv_go_back(const kv_activity *before)
{
    if (before->begin)
        kv_enter(before->counters, before->phase, before->about);
    else
        kv_leave();
}

/* Count bytes for the phase of this thread. */
static inline void kv_note_bytes(kv_counters *c, uint64_t nbytes)
{
    kv_activity *a = kv_is_timed(c) ? kv_activity_here() : 0;
    if (a && a->begin)
        a->about.nbytes += nbytes;
}

#endif
