/* The value of a dense slice, where rounds replace or update it: two places in turn, so that the value before stays as it
 * was. */
#ifndef KP_VALUES_H
#define KP_VALUES_H

#include "buffers.h"
#include "packed.h"

typedef struct {
    char *at; /* NULL: there is no memory yet */
    kp_buffer *holder;
    _Atomic uint64_t *seqlock; /* NULL: no other process reads it */
    uint32_t segment;          /* where those find it */
    uint64_t offset;
    kp_packed *packed; /* parts whose sum the value is; NULL or none: only `at` has it */
    uint8_t is_behind; /* `at` has not the sum of these yet: see `kp_catch_up` */
} kp_room;

/* How many updates an optimizer's state has had, and the schedule's time of the last of them. */
typedef struct {
    int64_t updates, num_update;
} kp_counts;

/* Updates whose parameters stay the same, as Python has planned them; it withdraws them before it changes anything. */
typedef struct {
    int rule, n_states;
    char *states[KV_MAX_STATES];
    char *kept[KV_MAX_STATES]; /* where each goes before it changes */
    int keeps;                 /* whether that is so, in rounds of several parts */
    double p[KV_MAX_PARAMS];
    uint32_t version;  /* of the settings: the newest that a round of the slice has had */
    uint64_t epoch;    /* of the update counts: stamps of another one say nothing about the time */
    kp_counts *counts; /* the state's; NULL: nothing is planned */
} kp_plan;

typedef struct {
    int dtype; /* the kernels' number */
    int64_t n, nbytes;
    kp_room rooms[2];
    int current;
    int64_t before;  /* the round after which the other room has what the value was then; -1: of none */
    uint8_t sums;    /* rounds replace the value: there are no settings of an optimizer */
    uint8_t changed; /* since somebody asked */
    kp_plan plan;    /* where there are settings */
    int64_t kept_after; /* the round after which the states were what was kept of them; -1: of none */
    kp_counts kept_counts;
    kp_run run;      /* NULL: no value stays packed */
} kp_value;

/* Before, and after, a room is written: who reads it meanwhile reads again. */
static void kp_mark_written(const kp_room *room)
{
    if (room->seqlock)
        atomic_fetch_add(room->seqlock, 1);
}

/* What was written to the other room is the value after a round. */
static void kp_turn(kp_value *v, uint64_t round)
{
    v->current = 1 - v->current;
    v->before = (int64_t)round - 1;
}

/* Before a round is counted: say of which one the states are kept. */
static void kp_note_kept(kp_value *v, uint64_t round, int kept)
{
    v->kept_after = kept ? (int64_t)round - 1 : -1;
    v->kept_counts = *v->plan.counts;
}

/* Somebody has written, or is about to write, what the value is: no parts stand for it any more. */
static void kp_forget_packed(kp_room *room)
{
    if (room->packed)
        kp_drop_packed(room->packed);
    room->is_behind = 0;
}

static void kp_leave_room(kp_room *room)
{
    kp_drop(room->holder);
    kp_free_packed(room->packed);
    *room = (kp_room){0};
}

/* Write the sum of parts that were kept packed, for whoever reads the value itself. 0, or -1 where there is no memory. */
static int kp_catch_up(const kp_value *v, kp_room *room)
{
    char *from[KP_MOST_PACKED];
    kv_coding codings[KP_MOST_PACKED];
    if (!room->is_behind)
        return 0;
    const kp_packed *p = room->packed;
    kv_item it = {.dtype = KV_F32, .rule = -1, .n = v->n, .k = p->n, .dst = room->at, .src = from, .coding = codings};
    for (int i = 0; i < p->n; i++) {
        from[i] = (char *)p->parts[i].at;
        codings[i] = kp_coding_of(p->coding, p->threshold);
    }
    kp_mark_written(room);
    int failed = v->run(&it, 1, v->nbytes + p->n * p->nbytes, 1);
    kp_mark_written(room);
    room->is_behind = failed != 0;
    return failed ? -1 : 0;
}

#endif
