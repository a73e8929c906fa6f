/* The record of a worker's activity, for its counters and the timeline; see activity.h.
 *
 * A function that returns to Python with any outcome but KV_TICK ends the span.
 */
#ifndef KV_RECORDING_H
#define KV_RECORDING_H

#include "activity.h"
#include "wait.h"

/* Begin a phase of a round of a key, or continue it. Ends the phase that this thread was in. Does not block. */
static inline void kv_enter_round(kv_self *me, kv_phase phase, uint64_t slice, uint64_t round, uint64_t nbytes)
{
    kv_enter(me->counters, phase, (kv_about){slice, round, nbytes, KV_NOBODY, me->store});
}

/* ------------------------------------------------------------------------------------------------- waits */

/* Describe what a wait waits for at this moment. */
typedef kv_about (*kv_describe)(const void *context);

typedef struct {
    kv_condition ready;
    kv_describe describe;
    void *context;
} kv_described;

/* A condition for `kv_wait` that also records the worker that is missing: the last one recorded is the last to
 * arrive. */
static int kv_ready_or_missing(void *context)
{
    const kv_described *one = (const kv_described *)context;
    if (one->ready(one->context))
        return 1;
    int32_t whom = one->describe(one->context).whom;
    if (whom != KV_NOBODY)
        kv_ring_here->activity()->about.whom = whom;
    return 0;
}

static int kv_wait_or_spin(kv_self *me, kv_condition ready, void *context, int patient)
{
    return patient ? kv_wait(me, ready, context) : kv_spin(me, ready, context) ? KV_READY : KV_TICK;
}

static int kv_wait_timed(kv_self *me, kv_condition ready, kv_describe describe, void *context, int patient)
{
    kv_described one = {ready, describe, context};
    if (ready(context))
        return KV_READY;
    kv_enter_timed(me->counters, KV_WAITING, describe(context));
    int outcome = kv_wait_or_spin(me, kv_ready_or_missing, &one, patient);
    if (outcome == KV_READY)
        kv_leave();
    return outcome;
}

/* Wait as `kv_wait` does, and record the wait; without patience only as long as a spin lasts. A wait with the outcome
 * KV_READY is ended here; the caller ends all others with `kv_leave`. */
static int kv_wait_recorded(kv_self *me, kv_condition ready, kv_describe describe, void *context, int patient)
{
    if (kv_is_timed(me->counters) && kv_ring_here->activity)
        return kv_wait_timed(me, ready, describe, context, patient);
    return kv_wait_or_spin(me, ready, context, patient);
}

/* ------------------------------------------------------------------------------------------------ counts */

/* Count bytes that were sent. The caller has the interpreter's lock: the count has one writer at a time. */

static inline void kv_count_sent(kv_self *me, uint64_t nbytes)
{
    if (me->counters)
        kv_add_alone(&me->counters->sent[KV_BY_SHARED], nbytes);
}

/* Count bytes that were received, as `kv_count_sent`. */
static inline void kv_count_received(kv_self *me, uint64_t nbytes)
{
    if (me->counters)
        kv_add_alone(&me->counters->received[KV_BY_SHARED], nbytes);
}

/* Record an event of the timeline, if there is one. Does not block. */
static void kv_record_event(kv_self *me, uint16_t kind, int whom, uint64_t slice, uint64_t round, uint64_t nbytes)
{
    uint64_t now = kv_ring_here->size ? kv_ring_here->now() : 0;
    if (now)
        kv_record((kv_event){now, now, slice, round, nbytes, 0, whom, kind, me->store, 0});
}

/* Count the workers that were lost since the last call, and record in the timeline which are lost and which are
 * back. */
static void kv_note_losses(kv_self *me)
{
    uint64_t lost = atomic_load(&me->head->lost), before = atomic_exchange(&me->known_lost, lost);
    for (int w = 0; me->counters && lost != before && w < me->size; w++) {
        if (lost & ~before & kv_rank_bit(w)) {
            kv_add_to(&me->counters->losses, 1);
            kv_record_event(me, KV_EVENT_LOST, w, KV_NO_SLICE, 0, 0);
        } else if (before & ~lost & kv_rank_bit(w)) {
            kv_record_event(me, KV_EVENT_BACK, w, KV_NO_SLICE, 0, 0);
        }
    }
}

#endif
