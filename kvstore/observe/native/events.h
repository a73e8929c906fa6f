#ifndef KV_EVENTS_H
#define KV_EVENTS_H

/* The events of a process, the last ones that a ring of fixed size holds, for a timeline.
 *
 * Every extension module that records has a pointer to the one ring of the process, in `kv_ring_here`, which the
 * module of kvstore.observe gives it, with the clock: code of state machines has no clock of its own. */

#include "counters.h"

/* Kinds of events, beyond the phases. Their names are in trace.h, in this order. */
enum kv_event_kind {
    KV_EVENT_CALL = KV_PHASES, /* a verb; `slice` is the kv_verb */
    KV_EVENT_ARRIVED,          /* a part of worker `whom` has arrived; an instant */
    KV_EVENT_LOST,             /* of worker or server `whom`; an instant */
    KV_EVENT_BACK,             /* the same, when it is back */
    KV_EVENT_STEP,             /* of a trainer or a hook */
    KV_EVENT_BUCKET,
    KV_EVENT_KINDS
};

typedef struct {
    uint64_t begin, end; /* ns of CLOCK_MONOTONIC */
    uint64_t slice;      /* the store's number of a key, or of a part of it; 0 is a number, too */
    uint64_t round, nbytes;
    uint32_t thread;     /* its number in the system */
    int32_t whom;        /* as in kv_counters */
    uint16_t kind, store; /* `store`: which of the process, see kvstore.observe.events */
    uint32_t written;    /* the low bits of 1 + its place in the order; else it is being written */
} kv_event;

typedef struct kv_activity kv_activity; /* see activity.h */

typedef struct {
    kv_count next; /* number of events there were */
    uint64_t size; /* a power of two; 0: nothing is recorded */
    kv_event *events;
    uint64_t (*now)(void);   /* ns of CLOCK_MONOTONIC */
    uint32_t (*thread)(void);
    kv_activity *(*activity)(void); /* of this thread */
    kv_count freed; /* number of counters that were freed */
    _Atomic int was_timed; /* some thread has been in a phase: before, none has one to end */
} kv_ring;

static kv_ring kv_no_ring; /* nothing is timed or recorded before a module was given another one */
static kv_ring *kv_ring_here = &kv_no_ring;

static void kv_record(kv_event event)
{
    kv_ring *ring = kv_ring_here;
    if (!ring->size)
        return;
    uint64_t at = atomic_fetch_add_explicit(&ring->next, 1, memory_order_relaxed);
    kv_event *to = &ring->events[at & (ring->size - 1)];
    event.thread = ring->thread();
    event.written = 0;
    *to = event;
    atomic_thread_fence(memory_order_release);
    *(volatile uint32_t *)&to->written = (uint32_t)(at + 1);
}

/* Return the beginning of a span: the time, or 0 if times are not taken. */
static inline uint64_t kv_begin(const kv_counters *c)
{
    return kv_is_timed(c) && kv_ring_here->now ? kv_ring_here->now() : 0;
}

/* The subject of a span. */
typedef struct {
    uint64_t slice, round, nbytes;
    int32_t whom;
    uint16_t store;
} kv_about;

static void kv_end_at(kv_counters *c, kv_phase phase, uint64_t begin, uint64_t end, kv_about about)
{
    uint64_t ns = end - begin;
    kv_add_to(&c->ns[phase], ns);
    kv_add_to(&c->spans[phase], 1);
    if (phase == KV_WAITING)
        kv_add_to(&c->waits[kv_bucket(ns)], 1);
    if (end > atomic_load_explicit(&c->timed_until, memory_order_relaxed))
        kv_set_to(&c->timed_until, 0);
    kv_record((kv_event){begin, end, about.slice, about.round, about.nbytes, 0, about.whom, (uint16_t)phase,
                         about.store, 0});
}

/* End a span that began at `begin`. */
static inline void kv_end(kv_counters *c, kv_phase phase, uint64_t begin, kv_about about)
{
    if (begin)
        kv_end_at(c, phase, begin, kv_ring_here->now(), about);
}

/* Record an event that has no length. */
static inline void kv_note(const kv_counters *c, enum kv_event_kind kind, kv_about about)
{
    uint64_t now = kv_begin(c);
    if (now)
        kv_record((kv_event){now, now, about.slice, about.round, about.nbytes, 0, about.whom, (uint16_t)kind, about.store, 0});
}

/* Publish a wait that has begun. `kv_end` with KV_WAITING must follow, and `kv_waits_no_more`. */
static inline void kv_waits_for(kv_counters *c, uint64_t begin, kv_about about)
{
    if (!begin)
        return;
    kv_set_to(&c->slice, about.slice);
    kv_set_to(&c->round, about.round);
    atomic_store_explicit(&c->whom, about.whom, memory_order_relaxed);
    kv_set_to(&c->since, begin);
}

static inline void kv_waits_no_more(kv_counters *c, uint64_t begin)
{
    if (begin)
        kv_set_to(&c->since, 0);
}

#endif
