/* What lies in the region of memory that the workers of a job share.
 *
 * Places are offsets from the beginning of the region, for each process maps it where it likes. Nothing in it is ever
 * moved. A worker may die between any two instructions: the order of the stores is what keeps the rest whole.
 */
#ifndef KV_LAYOUT_H
#define KV_LAYOUT_H

#include <pthread.h>
#include <stddef.h>

#include "atomics.h"
#include "events.h"
#include "job.h"

enum {
    KV_LAYOUT_VERSION = 13,
    KV_TIME_BITS = 40,         /* of a stamp */
    KV_MAX_WORKERS = 64,
    KV_BLOCK_KEYS = 1024,      /* entries are made in blocks of so many */
    KV_MAX_KEY_BLOCKS = 16384,
    KV_SIZE_CLASSES = 256,
    KV_SMALL_KEY = 64 * 1024,  /* bytes: up to here each worker sums for itself */
    KV_SHARE_BYTES = 128 * 1024, /* of each array, in one chunk of work */
    KV_LOG_ELEMENTS = 2048,    /* updated at a time */
    KV_READ_TRIES = 4,         /* until rounds wait for a read that they outrun */
    KV_FAILURES = 8,           /* failed rounds that are kept of a key, for workers that have yet to be told */
    KV_LOG_ARRAYS = 2 + KV_MAX_STATES
};

#define KV_MAGIC 0x4b5653746f726531ull

/* Stands within the header, each entry and each text, and never changes: see guards.h. */
#define KV_GUARD 0x7ffc6b5669644721ull

enum kv_state { KV_ABSENT, KV_ALIVE, KV_JOINED, KV_LEFT, KV_LOST, KV_COMING /* has the rank, and is no member yet */ };

/* A chunk under way: enough for another worker to finish it. What is before `at` is done. If `changing` lies behind
 * `at`, the elements between are being updated, and `scratch` has them as they were. */
typedef struct {
    _Atomic uint64_t entry;     /* offset; 0: nothing is under way */
    _Atomic uint64_t changing;
    uint64_t round, chunk, at;
    uint64_t scratch;
} kv_log;

typedef struct {
    _Atomic uint64_t state;       /* and from bit 8 on how many things it is at work on: see kv_begin_work; from bit 32
                                   * on the incarnation: a new life is not taken for the old one */
    _Atomic uint64_t incarnation; /* how often the rank was taken */
    _Atomic uint64_t pid, started; /* together they name a process for good */
    _Atomic uint64_t beat;        /* nanoseconds of CLOCK_MONOTONIC */
    _Atomic uint64_t barriers;    /* barriers reached */
    _Atomic uint64_t probe;       /* address of a word in its own memory that holds KV_MAGIC */
    _Atomic uint64_t joined;      /* incarnation that said that it has no more batches */
    _Atomic uint64_t calls, whole; /* calls with several keys: begun, and arrived at all of their keys */
    _Alignas(128) _Atomic uint32_t futex; /* sleeps here */
    _Alignas(128) kv_log log;
} kv_worker;

/* One worker's part in a key; only that worker writes it. */
typedef struct {
    _Alignas(64) _Atomic uint64_t pushed[2]; /* by parity: last round it, or an earlier process, pushed into */
    uint64_t source[2];        /* of those */
    uint32_t kind[2];          /* and, above it, how it is coded; KV_DIVIDED: a plain one that counts divided */
    float threshold[2];        /* of the coding; of KV_DIVIDED the divisor */
    _Atomic uint64_t filling;  /* round whose source it writes to a slot, or has written */
    _Atomic uint64_t first;    /* first round that waits for it */
    _Alignas(64) _Atomic uint64_t arrived;   /* last round that is behind it */
    uint64_t slot[2];          /* memory for copies of what it pushes; 0: none yet */
    uint64_t call[2];          /* of `pushed`, where KV_OF_CALL stands in `kind`: the worker's call that it was a part of */
    uint64_t stamp[2];         /* of `pushed`: epoch and time of the push; see kvstore/optimizer/update_clock.py */
} kv_part;

/* KV_ON_GPU: in the memory of a GPU, where other processes reach it and this region does not. */
enum kv_kind { KV_SLOT, KV_IN_PLACE, KV_PRIVATE, KV_ROWS, KV_PACKED, KV_ON_GPU };

#define KV_OF_CALL 0x80u /* beside the kind: other keys were pushed by the same call */

static inline enum kv_kind kv_kind_of(const kv_part *part, int parity) { return (enum kv_kind)(part->kind[parity] & 0x7f); }
static inline int kv_code_of(const kv_part *part, int parity) { return (int)(part->kind[parity] >> 8); }

#define KV_NO_ROUND (~0ull) /* of a value that is being written, or was not written to its end */

/* A key. */
typedef struct {
    _Alignas(64) _Atomic uint64_t phase; /* see round.h */
    _Atomic uint64_t planned;  /* phase of an opening whose opener has still to carry it out by Python */
    uint64_t mask;             /* who is in the open round */
    _Atomic uint64_t of[2];    /* round that each value is of */
    int32_t dtype, rule, n_states, sparse;
    uint64_t n, nbytes, chunks;
    uint64_t value[2];         /* the one in use is said by the phase; the other takes the next sum */
    uint64_t parts, map;
    uint64_t master, states[KV_MAX_STATES];
    double params[KV_MAX_PARAMS];
    uint64_t guard;
    /* What Python keeps here. */
    uint64_t number, name, name_bytes, shape, ndim;
    int64_t int_key;
    uint64_t is_text, is_side; /* of a side key: it is only summed, whatever the mode */
    uint64_t hash;
    _Atomic uint64_t updates[2]; /* of the optimizer, by parity of the round that they are complete with */
    _Atomic uint64_t record;   /* description of the states: see texts.h */
    _Atomic uint64_t undo;     /* offset of what an update by one worker is about to change; 0: nothing. See kv_undo */
    uint64_t rows_of;          /* row-sparse: for each value, where its rows lie and what an absent one is; it has no
                                * `value`, and Python does its rounds */
    _Atomic uint64_t gpu_table; /* offset of what the workers say of the key's memory on GPUs; 0: nothing yet */
    _Atomic uint64_t failed[KV_FAILURES]; /* rounds that came to nothing, each in the place of its remainder */
    _Atomic uint64_t why[KV_FAILURES];    /* offsets of the texts for those: see texts.h */
    uint64_t last_guard;
} kv_entry;

typedef struct {
    uint64_t magic, version, size, n_workers;
    _Atomic uint64_t members;  /* bit by rank: rounds wait for these */
    _Atomic uint64_t lost;     /* bit by rank: dead, and not back */
    _Atomic uint64_t first_lost; /* rank + 1 of the one that was lost before the others; 0: it is back */
    _Atomic uint64_t newcomers; /* bit by rank: came back, and is not in any round yet */
    _Atomic uint64_t asleep;   /* bit by rank: is to be woken */
    _Atomic uint64_t epoch;
    _Atomic uint64_t go_on;    /* the loss of a worker is no error */
    _Atomic uint64_t lock;     /* rank + 1 of the holder, and from bit 8 on its incarnation */
    _Atomic uint64_t no_peer_reads; /* process_vm_readv does not work between some two workers */
    _Atomic uint64_t mode;     /* what a round does to the value: see round.h */
    _Atomic uint64_t settings, settings_version;
    _Atomic uint64_t num_update;
    _Atomic uint64_t text_keys; /* 0: no key yet, 1: int keys, 2: str keys */
    _Atomic uint64_t top, reserved; /* used and reserved bytes of the region */
    _Atomic uint64_t window;   /* bytes that every worker so far could map: it grows no further */
    _Atomic uint64_t index;    /* of the hash table: offset | log2 of its length */
    _Atomic uint64_t n_keys;
    uint64_t guard;
    uint64_t free[KV_SIZE_CLASSES];
    uint64_t blocks[KV_MAX_KEY_BLOCKS];
    kv_worker worker[KV_MAX_WORKERS];
    uint64_t last_guard;
} kv_header;

/* One process's view of the job. */
typedef struct {
    char *base;
    kv_header *head;
    kv_worker *worker; /* its own */
    uint64_t window;   /* bytes mapped */
    int rank, size, fd;
    int forked;        /* this is a child of the process that joined */
    int blind;         /* it has left, and judges nobody any more */
    int is_last;       /* when this worker rested, nobody was waited for any more */
    int go_on;         /* the loss of a peer is no error */
    int crowded;       /* more workers than processors */
    uint64_t mode, tried; /* the mode that this process can carry out, and that it tried to */
    uint64_t incarnation, spin, looked;
    uint64_t silence;                  /* nanoseconds without a heartbeat after which a worker counts as lost */
    uint64_t epoch, begin, time;       /* of the update counts that this worker has set; 0: it has set none. The count of a key
                                        * without updates; the largest count of all keys at the place of its last push */
    uint64_t calling;                  /* number of the call with several keys that is arriving; 0: none is */
    uint64_t left, left_told, left_at; /* bits: who left without having joined; of these, who was told of; the epoch */
    int pidfd[KV_MAX_WORKERS];
    uint64_t pidfd_of[KV_MAX_WORKERS];
    const kv_level *const *level;
    char *bounce;
    uint64_t word; /* for `probe` */
    pthread_t heartbeat; /* the heartbeat's thread */
    pthread_mutex_t heartbeat_lock;
    pthread_cond_t heartbeat_wake;
    int heartbeat_runs, heartbeat_stop;
    _Atomic uint64_t forgives; /* until then it takes nobody's silence for a loss; in ns */
    pthread_mutex_t busy; /* log and bounce buffer serve one thread of the process at a time */
    _Atomic int sleepers; /* threads of the process that sleep */
    kv_counters *counters; /* NULL: nobody counts */
    uint16_t store;        /* its number among the stores of the process */
    _Atomic uint64_t known_lost; /* bits: losses that were counted */
} kv_self;

static const uint64_t KV_HEADER_BYTES = sizeof(kv_header);

static inline void *kv_at(const kv_self *me, uint64_t offset)
{
    return me->base + offset;
}

/* Whether so many bytes lie in the memory that the region has given out: not in its header, not behind its end. */
static inline int kv_is_given(const kv_self *me, uint64_t offset, uint64_t bytes)
{
    uint64_t top = kv_get(&me->head->top);
    return !bytes || (offset >= KV_HEADER_BYTES && offset <= top && bytes <= top - offset);
}

static inline uint64_t kv_bit(int rank)
{
    return 1ull << rank;
}

#endif
