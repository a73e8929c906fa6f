#ifndef KV_COUNTERS_H
#define KV_COUNTERS_H

/* The counters of a store, or of a server, which other processes may read while it works.
 *
 * Counts are always kept. Times are taken on request: see kv_is_timed. All numbers are written with
 * relaxed atomics, by any thread; a reader may see numbers of different times. */

#include <stdatomic.h>
#include <stdint.h>

/* The order of these is known to kvstore/observe/counters.py. */
typedef enum { KV_CALL_INIT, KV_CALL_PUSH, KV_CALL_PULL, KV_CALL_PUSHPULL, KV_CALL_ROWS, KV_CALL_BARRIER, KV_CALLS } kv_verb;
typedef enum { KV_BY_MEMORY, KV_BY_SHARED, KV_BY_STREAM, KV_BY_FRAME, KV_WAYS } kv_way;
typedef enum { KV_WAITING, KV_MOVING, KV_SUMMING, KV_UPDATING, KV_CONVERTING, KV_PHASES } kv_phase;

enum { KV_BUCKETS = 128, KV_NAME = 64 };

#ifndef KV_COUNTS
#define KV_COUNTS 1 /* 0: nothing is counted or timed. For `bench observe`, which measures what that saves. */
#endif

#define KV_NOBODY INT32_MAX /* the process for which a thread waits is unknown */
#define KV_NO_SLICE UINT64_MAX /* of several keys, or of none */

typedef _Atomic uint64_t kv_count;

/* KV_INHERITED: by a store of the parent of this process; no reader shows it. */
enum kv_use { KV_FREE, KV_USED, KV_INHERITED };

typedef struct {
    kv_count used;         /* 0: this place is free; else a kv_use */
    kv_count timed_until;  /* ns of CLOCK_MONOTONIC; 0: no times are taken */
    char store[KV_NAME];   /* type of the store, or "server", "scheduler" */
    char job[KV_NAME];     /* hash of the name of the job */
    int32_t rank, size;    /* among workers, or among servers */
    kv_count keys, nbytes; /* of the values */
    kv_count calls[KV_CALLS];
    kv_count sent[KV_WAYS], received[KV_WAYS]; /* bytes of values */
    kv_count rounds;       /* that were complete here */
    kv_count losses;       /* of other processes of the job */
    kv_count ns[KV_PHASES];
    kv_count spans[KV_PHASES];
    kv_count waits[KV_BUCKETS]; /* number of waits by length, see kv_bucket */
    /* The wait that began last, as long as it lasts: `since` 0 is none. */
    kv_count since, slice, round;
    _Atomic int32_t whom;  /* rank, or KV_NOBODY; a server s is -1 - s */
} kv_counters;

static inline void kv_add_to(kv_count *count, uint64_t more)
{
    if (KV_COUNTS)
        atomic_fetch_add_explicit(count, more, memory_order_relaxed);
}

/* The same, without a locked instruction: no other thread may add to the count at the same time. */
static inline void kv_add_alone(kv_count *count, uint64_t more)
{
    if (KV_COUNTS)
        atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + more, memory_order_relaxed);
}

static inline void kv_set_to(kv_count *count, uint64_t value)
{
    if (KV_COUNTS)
        atomic_store_explicit(count, value, memory_order_relaxed);
}

/* Whether times are taken. */
static inline int kv_is_timed(const kv_counters *c)
{
    return KV_COUNTS && c && atomic_load_explicit(&c->timed_until, memory_order_relaxed) != 0;
}

/* Four buckets for each power of two, from 256 ns on; the last one has no end (it begins after half an hour). */
static inline unsigned kv_bucket(uint64_t ns)
{
    uint64_t v = ns >> 8;
    if (v < 4)
        return (unsigned)v;
    unsigned power = 63 - (unsigned)__builtin_clzll(v);
    unsigned bucket = (power - 1) * 4 + (unsigned)(v >> (power - 2) & 3);
    return bucket < KV_BUCKETS ? bucket : KV_BUCKETS - 1;
}

#endif
