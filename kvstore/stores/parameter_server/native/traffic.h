/* Counts of the bytes of values in messages and in shared memory, and observations of slices for a timeline. */
#ifndef KP_TRAFFIC_H
#define KP_TRAFFIC_H

#include "activity.h"
#include "wire_format.h"

/* Where to count; `counters` may be NULL. */
typedef struct {
    kv_counters *counters;
    uint16_t store; /* the number of the counters in this process */
} kp_observer;

/* Bytes of values, without ids of rows. */
typedef struct {
    uint64_t carried, shared;
} kp_moved;

/* Add the bytes of a record's values. */
static inline void kp_add_record_bytes(kp_moved *moved, const kp_record *r)
{
    uint64_t ids = r->rows > 0 ? 8 * (uint64_t)r->rows : 0, nbytes = r->nbytes > ids ? r->nbytes - ids : 0;
    if (r->place == KP_FRAME)
        moved->carried += nbytes;
    else if (r->place == KP_SHARED)
        moved->shared += nbytes;
}

static inline void kp_count_moved(kv_count *ways, kv_way way, const kp_moved *moved)
{
    if (moved->carried)
        kv_add_to(&ways[way], moved->carried);
    if (moved->shared)
        kv_add_to(&ways[KV_BY_SHARED], moved->shared);
}

/* Count sent bytes of values; by any thread. */
static inline void kp_count_sent(const kp_observer *o, kv_way way, const kp_moved *moved)
{
    if (o->counters)
        kp_count_moved(o->counters->sent, way, moved);
}

/* Count received bytes of values; by any thread. */
static inline void kp_count_received(const kp_observer *o, kv_way way, const kp_moved *moved)
{
    if (o->counters)
        kp_count_moved(o->counters->received, way, moved);
}

/* Count completed rounds; by any thread. */
static inline void kp_count_rounds(const kp_observer *o, uint64_t rounds)
{
    if (o->counters && rounds)
        kv_add_to(&o->counters->rounds, rounds);
}

/* Return an observation about no slice in particular. */
static inline kv_about kp_about_all(const kp_observer *o)
{
    return (kv_about){KV_NO_SLICE, 0, 0, KV_NOBODY, o->store};
}

/* Return the number of a slice on a server that has several stores. */
static inline uint64_t kp_slice_number(int32_t store, uint32_t slice)
{
    return (uint64_t)(uint32_t)store << 32 | slice;
}

#endif
