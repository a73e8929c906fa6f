/* The value of a dense slice, where sums replace it: two places in turn, so that the value before stays as it was. */
#ifndef KP_VALUES_H
#define KP_VALUES_H

#include "buffers.h"

typedef struct {
    char *at; /* NULL: there is no memory yet */
    kp_buffer *holder;
    _Atomic uint64_t *seqlock; /* NULL: no other process reads it */
    uint32_t segment;          /* where those find it */
    uint64_t offset;
} kp_room;

typedef struct {
    int dtype; /* the kernels' number */
    int64_t n, nbytes;
    kp_room rooms[2];
    int current;
    int64_t before;  /* the round after which the other room has what the value was then; -1: of none */
    uint8_t sums;    /* rounds replace the value: there are no settings of an optimizer */
    uint8_t changed; /* since somebody asked */
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

static void kp_leave_room(kp_room *room)
{
    kp_drop(room->holder);
    *room = (kp_room){0};
}

#endif
