/* The value of a dense slice that rounds replace or update: in two buffers in turn, so that the value before a round stays
 * unchanged.
 *
 * All functions need exclusive use of the store's state, as in links.h; only `kp_unpack_sum` runs kernels. */
#ifndef KP_VALUES_H
#define KP_VALUES_H

#include "buffers.h"
#include "packed_sum.h"

typedef struct {
    char *at; /* NULL: there is no memory yet */
    kp_buffer *holder;
    _Atomic uint64_t *seqlock; /* NULL: no other process reads it */
    uint32_t segment;          /* the place for these processes */
    uint64_t offset;
    kp_packed *packed; /* the value as parts to be summed; NULL or empty: it is only in `at` */
    uint8_t is_behind; /* `at` does not have the sum of `packed` yet: see `kp_unpack_sum` */
} kp_value_buffer;

/* The number of updates of an optimizer's state, and the schedule's time of the last of them. */
typedef struct {
    int64_t updates, num_update;
} kp_counts;

/* The parameters of the next updates, which Python has computed; Python withdraws them before they change. */
typedef struct {
    int rule, n_states;
    char *states[KV_MAX_STATES];
    char *kept[KV_MAX_STATES]; /* where each state is copied before it changes, */
    int keeps;                 /* if this is set, in rounds of several parts */
    double p[KV_MAX_PARAMS];
    uint32_t version;  /* of the settings: the newest that a round of the slice has had */
    uint64_t epoch;    /* of the update counts: stamps of other epochs say nothing about the time */
    kp_counts *counts; /* of the state; NULL: there is no plan */
} kp_plan;

typedef struct {
    int dtype; /* the kernels' number */
    int64_t n, nbytes;
    kp_value_buffer buffers[2];
    int current;
    int64_t before;  /* the round of the value in the other buffer; -1: none */
    uint8_t sums;    /* rounds replace the value: there are no settings of an optimizer */
    uint8_t changed; /* since Python has last read it */
    kp_plan plan;    /* where there are settings */
    int64_t kept_after; /* the round after which the states were as in `plan.kept`; -1: none */
    kp_counts kept_counts;
    kp_run run;      /* NULL: no value stays packed */
} kp_value;

/* Increment the seqlock, before and after a buffer is written: a process that reads at that time reads again. */
static void kp_bump_seqlock(const kp_value_buffer *buffer)
{
    if (buffer->seqlock)
        atomic_fetch_add(buffer->seqlock, 1);
}

/* Make the other buffer, which was written, the value after a round. */
static void kp_swap_buffers(kp_value *v, uint64_t round)
{
    v->current = 1 - v->current;
    v->before = (int64_t)round - 1;
}

/* Record the round of the states that are copied; called before an update is counted. */
static void kp_note_copied_states(kp_value *v, uint64_t round, int kept)
{
    v->kept_after = kept ? (int64_t)round - 1 : -1;
    v->kept_counts = *v->plan.counts;
}

/* Drop the packed parts, because the value in the buffer was or will be written. */
static void kp_forget_packed(kp_value_buffer *buffer)
{
    if (buffer->packed)
        kp_release_parts(buffer->packed);
    buffer->is_behind = 0;
}

/* Release the memory of a buffer, and zero it. */
static void kp_free_value_buffer(kp_value_buffer *buffer)
{
    kp_release(buffer->holder);
    kp_free_packed(buffer->packed);
    *buffer = (kp_value_buffer){0};
}

/* Compute the sum of packed parts, for a reader of the value itself. 0; -1: no memory, and the value stays packed. */
static int kp_unpack_sum(const kp_value *v, kp_value_buffer *buffer)
{
    char *from[KP_MOST_PACKED];
    kv_coding codings[KP_MOST_PACKED];
    if (!buffer->is_behind)
        return 0;
    const kp_packed *p = buffer->packed;
    kv_item it = {.dtype = KV_F32, .rule = -1, .n = v->n, .k = p->n, .dst = buffer->at, .src = from, .coding = codings};
    for (int i = 0; i < p->n; i++) {
        from[i] = (char *)p->parts[i].at;
        codings[i] = kp_coding_of(p->coding, p->threshold);
    }
    kp_bump_seqlock(buffer);
    int failed = v->run(&it, 1, v->nbytes + p->n * p->nbytes, 1);
    kp_bump_seqlock(buffer);
    buffer->is_behind = failed != 0;
    return failed ? -1 : 0;
}

#endif
