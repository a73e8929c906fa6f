/* The phase of a key as one word, and the arrival of pushes in a round. round.h describes the life of a round. */
#ifndef KV_ARRIVALS_H
#define KV_ARRIVALS_H

#include "guards.h"
#include "recording.h"

enum kv_step { KV_CLOSED, KV_OPENING, KV_OPEN };

/* Whether a round only replaces the value by the sum. An even mode does so; for an odd mode, Python plans the round.
 * The other bits of a mode count how often it was set, so that a worker that does not know the current mode opens no
 * round. Side keys are summed in all modes. */
static inline int kv_replaces_by_sum(const kv_self *me, const kv_entry *e)
{
    return e->is_side || !(kv_get(&me->head->mode) & 1);
}

/* Encode a phase. `version`, modulo 16, shows a reader that the value has changed: it increases by one when the other
 * value is put in use, and by two when the in-place changes of an opener have been undone. */
static inline uint64_t kv_phase_word(uint64_t round, int rank, uint64_t version, enum kv_step step)
{
    return round << 16 | (uint64_t)rank << 8 | (version & 0xf) << 4 | (uint64_t)step;
}

/* The parts of a phase: its round, the rank of the opener, the version of the value, the value in use (0 or 1), and
 * the step. */
static inline uint64_t kv_round_of(uint64_t phase) { return phase >> 16; }
static inline int kv_opener_of(uint64_t phase) { return (int)(phase >> 8 & 0xff); }
static inline uint64_t kv_version_of(uint64_t phase) { return phase >> 4 & 0xf; }
static inline uint64_t kv_current_of(uint64_t phase) { return kv_version_of(phase) & 1; }
static inline enum kv_step kv_step_of(uint64_t phase) { return (enum kv_step)(phase & 0xf); }
/* Return the last complete round of a key in this phase. */
static inline uint64_t kv_complete_round(uint64_t phase)
{
    return kv_step_of(phase) == KV_CLOSED ? kv_round_of(phase) : kv_round_of(phase) - 1;
}

/* Whether this worker has opened the round, prepares it, and has not been replaced as its opener. */
static inline int kv_is_opener(const kv_self *me, uint64_t phase, uint64_t round)
{
    return kv_step_of(phase) == KV_OPENING && kv_round_of(phase) == round && kv_opener_of(phase) == me->rank;
}

/* A read of a value that does not stop rounds: see reading.h. */
typedef struct {
    uint64_t phase; /* of the key, when the read began */
    int tries;      /* failed reads: the value changed */
    int holds;      /* the reader holds the key: no round opens before the read ends */
} kv_reading;

/* One key of one call of this process. */
typedef struct {
    kv_entry *entry;
    uint64_t round;
    char **outs;       /* arrays of this process that receive the result */
    int n_outs;
    int stream;        /* the call is larger than the cache */
    unsigned char *delivered; /* by chunk: already written to the outs; may be NULL */
    kv_reading reading;
} kv_call;

enum { KV_MOST_OUTS = KV_MAX_WORKERS + 16 }; /* the most outs of a call that are written in the same pass as the sum */

/* Whether the outs of a call are written in the same pass as the sum; else they are written when the round is
 * complete. */
static inline int kv_writes_outs(const kv_call *call)
{
    return call->delivered && call->n_outs <= KV_MOST_OUTS;
}

/* Return the parts of a key, by rank. */
static inline kv_part *kv_key_parts(kv_self *me, const kv_entry *e)
{
    return (kv_part *)kv_at(me, e->parts);
}

/* Mark a round as failed. The mark remains until the round KV_FAILURES later fails too: a worker that asks late still
 * finds it. Any worker may call this; it does not block. */
static inline void kv_fail(kv_entry *e, uint64_t round)
{
    kv_put(&e->failed[round % KV_FAILURES], round);
}

/* Whether a round has failed, as far as `failed` still remembers it. */
static inline int kv_has_failed(const kv_entry *e, uint64_t round)
{
    return kv_get(&e->failed[round % KV_FAILURES]) == round;
}

/* Whether a worker that has arrived in this round has arrived at all keys of the same call. A call takes part in all
 * of its rounds or in none: otherwise, if that worker died, the round of one key could complete and that of the next
 * key never could. */
static int kv_is_call_complete(kv_self *me, const kv_part *part, int w, int parity)
{
    return !(part->kind[parity] & KV_OF_CALL) || part->call[parity] <= kv_get(&me->head->worker[w].whole);
}

/* Return the first member that `round` waits for; KV_NOBODY: all members have arrived, and `in` has the bits of the
 * workers in the round. */
static int kv_first_missing(kv_self *me, const kv_entry *e, uint64_t round, uint64_t *in)
{
    const kv_part *part = kv_key_parts(me, e);
    uint64_t members = kv_get(&me->head->members), arrived = 0;
    for (int w = 0; w < me->size; w++) {
        if (kv_get(&part[w].pushed[round & 1]) >= round) {
            if (members & kv_rank_bit(w) && !kv_is_call_complete(me, &part[w], w, (int)(round & 1)))
                return w;
            arrived |= kv_rank_bit(w);
        } else if (members & kv_rank_bit(w) && kv_get(&part[w].first) <= round)
            return w;
    }
    *in = arrived;
    return KV_NOBODY;
}

/* Whether every member that `round` waits for has arrived; if so, `in` has the bits of the workers in the round. */
static int kv_all_arrived(kv_self *me, const kv_entry *e, uint64_t round, uint64_t *in)
{
    return kv_first_missing(me, e, round, in) == KV_NOBODY && *in != 0;
}

/* Announce that this worker is about to overwrite its slot: a worker that sums a small key may still be reading it,
 * and detects this by `kv_are_sources_intact`. The caller has waited for a free slot. */
static inline void kv_announce_overwrite(kv_self *me, const kv_entry *e)
{
    kv_part *part = &kv_key_parts(me, e)[me->rank];
    kv_put(&part->filling, kv_get(&part->arrived) + 1);
    kv_fence();
}

/* Whether the sources of `round` were intact until now: no worker has begun to overwrite its slot. */
static int kv_are_sources_intact(kv_self *me, const kv_entry *e, uint64_t round, uint64_t in)
{
    const kv_part *part = kv_key_parts(me, e);
    atomic_thread_fence(memory_order_acquire);
    for (int w = 0; w < me->size; w++)
        if (in >> w & 1 && kv_get(&part[w].filling) > round + 1)
            return 0;
    return 1;
}

/* Begin a call with several keys: all arrivals until `kv_end_call` belong to it. The caller must not wait for another
 * worker between the two. */
static void kv_begin_call(kv_self *me)
{
    me->calling = kv_add(&me->worker->calls, 1) + 1;
}

/* End a call with several keys: from now on its rounds can be opened. If this worker is fenced, the call stays
 * incomplete. */
static void kv_end_call(kv_self *me)
{
    me->calling = 0;
    if (!kv_begin_work(me))
        return;
    kv_put(&me->worker->whole, kv_get(&me->worker->calls));
    kv_end_work(me);
    kv_wake_all(me);
}

/* Return the stamp of this worker's push into a round: the update counts that result if no earlier round fails. */
static uint64_t kv_next_stamp(kv_self *me, const kv_entry *e, uint64_t round)
{
    uint64_t phase, complete, count;
    do {
        phase = kv_get(&e->phase);
        complete = kv_complete_round(phase);
        count = kv_get(&e->updates[complete & 1]);
    } while (kv_get(&e->phase) != phase);
    count = (count ? count : me->begin) + (round - complete);
    me->time = count > me->time ? count : me->time;
    return me->epoch << KV_TIME_BITS | me->time;
}

/* Record the stamp of this worker's push into a round, if stamps are in use. Only the thread that pushes calls this. */
static void kv_record_stamp(kv_self *me, kv_entry *e, uint64_t round)
{
    if (me->epoch && !e->is_side)
        kv_key_parts(me, e)[me->rank].stamp[round & 1] = kv_next_stamp(me, e, round);
}

/* Record this worker's push into its next round; its source is in place. Wakes no other worker and does not block.
 * Returns the round, or 0 if this worker is fenced: then nothing has changed, because other workers may already have
 * read the set of arrivals. */
static uint64_t kv_arrive_silently(kv_self *me, kv_entry *e, uint32_t kind, float threshold, uint64_t source)
{
    kv_part *part = &kv_key_parts(me, e)[me->rank];
    uint64_t round = atomic_load_explicit(&part->arrived, memory_order_relaxed) + 1;
    if (!kv_begin_work(me))
        return 0;
    kv_put(&part->filling, round);
    atomic_thread_fence(memory_order_release);
    part->source[round & 1] = source;
    part->kind[round & 1] = me->calling ? kind | KV_OF_CALL : kind;
    part->call[round & 1] = me->calling;
    part->threshold[round & 1] = threshold;
    if (!me->calling)
        kv_record_stamp(me, e, round);
    kv_put(&part->pushed[round & 1], round);
    kv_put(&part->arrived, round);
    kv_end_work(me);
    if (kv_is_timed(me->counters))
        kv_record_event(me, KV_EVENT_ARRIVED, me->rank, e->number, round, e->nbytes);
    return round;
}

/* As `kv_arrive_silently`, and wakes the sleeping workers if the round now has all parts. */
static void kv_arrive_as(kv_self *me, kv_entry *e, uint32_t kind, float threshold, uint64_t source)
{
    uint64_t round = kv_arrive_silently(me, e, kind, threshold, source), in;
    kv_fence();
    uint64_t asleep = kv_get(&me->head->asleep);
    if (asleep && round && kv_all_arrived(me, e, round, &in))
        kv_wake(me, asleep);
}

/* Record a push of a plain array or of rows, and count its bytes. Needs the interpreter's lock for the count. Does
 * not block. */
static void kv_arrive(kv_self *me, kv_entry *e, enum kv_kind kind, uint64_t source)
{
    kv_arrive_as(me, e, kind, 0, source);
    kv_count_sent(me, kind == KV_ROWS ? 0 : e->nbytes); /* the caller counts the bytes of rows */
}

/* As `kv_arrive`, for float32 numbers that the sum divides by `divisor`; 1: no division. */
static void kv_arrive_divided(kv_self *me, kv_entry *e, enum kv_kind kind, float divisor, uint64_t source)
{
    uint32_t code = divisor == 1 ? KV_PLAIN : KV_DIVIDED;
    kv_arrive_as(me, e, kind | code << 8, divisor, source);
    kv_count_sent(me, e->nbytes);
}

/* As `kv_arrive`, for a slot that holds packed numbers. */
static void kv_arrive_packed(kv_self *me, kv_entry *e, int code, float threshold, uint64_t source)
{
    kv_arrive_as(me, e, KV_PACKED | (uint32_t)code << 8, threshold, source);
    kv_count_sent(me, (uint64_t)kv_encoded_bytes(code, (ptrdiff_t)e->n));
}

/* Whether an out of the call overlaps the slot that this worker has pushed into the round. Such an out is written
 * only after the round: if this worker dies within a chunk, another worker sums the chunk again from the slot.
 * (`kv_recover_chunk` handles arrays that are summed in place and arrays in private memory.) */
static int kv_overlaps_slot(kv_self *me, const kv_call *call)
{
    const kv_part *part = &kv_key_parts(me, call->entry)[me->rank];
    int parity = (int)(call->round & 1);
    const char *from = (const char *)kv_at(me, part->source[parity]), *end = from + call->entry->nbytes;
    if (!call->round || kv_kind_of(part, parity) != KV_SLOT || kv_get(&part->pushed[parity]) != call->round)
        return 0;
    for (int j = 0; j < call->n_outs; j++)
        if (call->outs[j] < end && from < call->outs[j] + call->entry->nbytes)
            return 1;
    return 0;
}

#endif
