/* Reads of a value: each result is of one round, although rounds may complete during the read.
 *
 * Rounds do not wait for a worker that has joined, nor for a restarted worker that has not pushed yet; and after a
 * loss, another worker may complete a round after the reader has begun. So a read is repeated if the value has
 * changed during it. After KV_READ_TRIES failures, because rounds are faster than the reader, the next round waits
 * for the read.
 */
#ifndef KV_READING_H
#define KV_READING_H

#include "round.h"

/* Whether the next round waits for this worker's arrival: until then the value does not change. */
static int kv_is_stable(kv_self *me, const kv_entry *e)
{
    const kv_part *mine = &kv_key_parts(me, e)[me->rank];
    uint64_t round = kv_complete_round(kv_get(&e->phase)) + 1;
    uint64_t waited_for = kv_get(&me->head->members) & ~kv_get(&me->head->newcomers);
    uint64_t state = kv_get(&me->worker->state);
    return kv_state_in(state) == KV_ALIVE && !kv_is_fenced(me, state) && waited_for & kv_rank_bit(me->rank) &&
           kv_get(&mine->first) <= round && kv_get(&mine->pushed[round & 1]) < round;
}

/* Return the round that is recorded to change the value in place, and may be changing it now; 0: none. */
static uint64_t kv_changed_in_place(kv_self *me, const kv_entry *e)
{
    uint64_t undo = kv_get(&e->undo);
    return undo ? *(const uint64_t *)kv_at(me, undo) : 0;
}

/* Whether another worker may be changing the value in use. The caller has read `in_place` before the phase. */
static int kv_is_changing(const kv_self *me, uint64_t phase, uint64_t in_place)
{
    if (kv_step_of(phase) != KV_OPENING)
        return kv_step_of(phase) == KV_OPEN;
    return kv_round_of(phase) == in_place && kv_opener_of(phase) != me->rank;
}

/* Whether a dead worker has left a round that this process cannot carry out: the read then holds the key, which
 * undoes the changes in place. */
static int kv_is_abandoned(kv_self *me, const kv_entry *e, uint64_t phase)
{
    return kv_step_of(phase) == KV_OPENING && !kv_knows_mode(me, e) &&
           !kv_is_present(kv_get(&me->head->worker[kv_opener_of(phase)].state));
}

/* Hold the key until the read ends, so that no round opens. */
static int kv_read_holding(kv_self *me, kv_entry *e, kv_reading *reading)
{
    if (kv_check_membership(me) == KV_FENCED)
        return KV_FENCED;
    int outcome = kv_hold_key(me, e, 0);
    reading->holds = outcome == KV_READY;
    reading->phase = kv_get(&e->phase);
    return outcome;
}

/* Begin to read the value in use. Blocks as `kv_wait` does. KV_READY: read, then call `kv_end_read`, in any case.
 * KV_TICK: not yet. Other outcomes: there is no read to end. */
static int kv_begin_read(kv_self *me, kv_entry *e, kv_reading *reading)
{
    int outcome = KV_READY;
    uint64_t in_place = kv_changed_in_place(me, e), phase = reading->phase = kv_get(&e->phase);
    if (reading->tries >= KV_READ_TRIES || kv_is_abandoned(me, e, phase))
        outcome = kv_read_holding(me, e, reading);
    else if (kv_is_changing(me, phase, in_place)) { /* its worker may be dead: bring the round to its end */
        kv_call other = {.entry = e, .round = kv_round_of(phase)};
        outcome = kv_advance(me, &other);
        outcome = outcome == KV_READY ? KV_TICK : outcome;
    }
    return outcome == KV_PEER_LOST ? KV_TICK : outcome; /* reads are allowed after a loss */
}

/* End a read. Returns whether the data is the value of one round; else the caller reads again. Does not block. */
static int kv_end_read(kv_self *me, kv_entry *e, kv_reading *reading)
{
    atomic_thread_fence(memory_order_acquire);
    uint64_t in_place = kv_changed_in_place(me, e), now = kv_get(&e->phase), before = reading->phase;
    if (reading->holds) {
        int held = kv_is_opener(me, now, kv_round_of(before)); /* this worker was not fenced */
        reading->holds = 0;
        if (held)
            kv_release_key(me, e, now, 0);
        kv_end_work(me);
        return held;
    }
    int calm = !kv_is_changing(me, now, in_place) && kv_version_of(now) == kv_version_of(before) &&
               kv_complete_round(now) == kv_complete_round(before);
    reading->tries += !calm;
    return calm;
}

/* Copy the result of a complete round to the outs and chunks that do not have it yet. Blocks as `kv_begin_read` does.
 * KV_TICK: the value changed during the copy; the caller tries again. On failure the contents of the outs are
 * undefined. */
static int kv_deliver(kv_self *me, kv_call *call)
{
    kv_entry *e = call->entry;
    if (!call->n_outs)
        return KV_READY;
    int outcome = kv_begin_read(me, e, &call->reading);
    if (outcome != KV_READY)
        return outcome;
    uint64_t phase = call->reading.phase, value = e->value[kv_current_of(phase)];
    char *from = (char *)kv_at(me, value);
    if (!kv_is_given(me, value, e->nbytes))
        return kv_end_read(me, e, &call->reading) ? KV_UNREADABLE : KV_TICK;
    ptrdiff_t size = kv_chunk_size(e);
    for (uint64_t c = 0; c < e->chunks; c++) {
        ptrdiff_t at = (ptrdiff_t)c * size, end = at + size < (ptrdiff_t)e->n ? at + size : (ptrdiff_t)e->n;
        if (call->delivered && call->delivered[c])
            continue;
        uint64_t nbytes = (uint64_t)(end - at) * (uint64_t)kv_itemsize[e->dtype];
        kv_enter_round(me, KV_MOVING, e->number, kv_complete_round(phase), nbytes);
        kv_sum_here(me, call, NULL, &from, NULL, 1, call->outs, call->n_outs, at, end);
    }
    return kv_end_read(me, e, &call->reading) ? KV_READY : KV_TICK;
}

#endif
