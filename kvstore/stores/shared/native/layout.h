/* The layout of the memory region that the workers of a job share.
 *
 * Places are offsets from the beginning of the region, because each process maps it at another address. Nothing in it
 * is ever moved. A worker may die between any two instructions: the order of the stores keeps the rest consistent.
 *
 * Functions of these headers need a mapped region (`me->base`) and, but for guards.h, a registered worker
 * (`me->worker`). If its comment does not say otherwise, a function can be called by any thread of the process, needs
 * no lock, does not block, and cannot fail.
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
    KV_BLOCK_KEYS = 1024,      /* entries of one block */
    KV_MAX_KEY_BLOCKS = 16384,
    KV_SIZE_CLASSES = 256,
    KV_SMALL_KEY = 64 * 1024,  /* bytes: up to this size each worker sums the key itself */
    KV_SHARE_BYTES = 128 * 1024, /* bytes of each array in one chunk */
    KV_LOG_ELEMENTS = 2048,    /* elements of one block of an update */
    KV_READ_TRIES = 4,         /* failed reads after which rounds wait for the reader */
    KV_FAILURES = 8,           /* failed rounds of a key that are remembered, to be reported to workers that ask late */
    KV_LOG_ARRAYS = 2 + KV_MAX_STATES
};

#define KV_MAGIC 0x4b5653746f726531ull

/* A constant within the header, each entry and each text: see guards.h. */
#define KV_GUARD 0x7ffc6b5669644721ull

enum kv_worker_state { KV_ABSENT, KV_ALIVE, KV_JOINED, KV_LEFT, KV_LOST, KV_COMING /* registered, and not a member yet */ };

/* The log of a chunk in progress: enough for another worker to complete it. The elements before `at` are complete.
 * If `changing` is greater than `at`, the elements between are being updated, and `scratch` has their previous
 * contents. */
typedef struct {
    _Atomic uint64_t entry;     /* offset; 0: no chunk is in progress */
    _Atomic uint64_t changing;
    uint64_t round, chunk, at;
    uint64_t scratch;
} kv_log;

typedef struct {
    _Atomic uint64_t state;       /* from bit 8 on the count of work: see kv_begin_work; from bit 32 on the
                                   * incarnation, so that a new process is not mistaken for the old one */
    _Atomic uint64_t incarnation; /* how many processes have registered with the rank */
    _Atomic uint64_t pid, started; /* together they identify a process */
    _Atomic uint64_t beat;        /* nanoseconds of CLOCK_MONOTONIC */
    _Atomic uint64_t barriers;    /* barriers reached */
    _Atomic uint64_t probe;       /* address of a word in the process's own memory that holds KV_MAGIC */
    _Atomic uint64_t joined;      /* incarnation that has joined: it has no more batches */
    _Atomic uint64_t calls, whole; /* calls with several keys: begun, and arrived at all keys */
    _Alignas(128) _Atomic uint32_t futex; /* its threads sleep on this */
    _Alignas(128) kv_log log;
} kv_worker;

/* One worker's parts of a key; only that worker writes them. */
typedef struct {
    _Alignas(64) _Atomic uint64_t pushed[2]; /* by parity: last round that this process, or an earlier one, pushed
                                              * into */
    uint64_t source[2];        /* of those rounds */
    uint32_t kind[2];          /* from bit 8 on the coding; KV_DIVIDED: plain numbers that the sum divides */
    float threshold[2];        /* of the coding; with KV_DIVIDED the divisor */
    _Atomic uint64_t filling;  /* round of the source that is being, or was last, written to a slot */
    _Atomic uint64_t first;    /* first round that waits for this worker */
    _Alignas(64) _Atomic uint64_t arrived;   /* last round that it has pushed into or was excused from */
    uint64_t slot[2];          /* memory for copies of pushed values; 0: none yet */
    uint64_t call[2];          /* with KV_OF_CALL in `kind`: the worker's call that the push was a part of */
    uint64_t stamp[2];         /* epoch and time of the push; see kvstore/optimizer/update_clock.py */
} kv_part;

/* The place of a source. KV_ON_GPU: memory of a GPU, which other processes can map and this region does not hold. */
enum kv_kind { KV_SLOT, KV_IN_PLACE, KV_PRIVATE, KV_ROWS, KV_PACKED, KV_ON_GPU };

#define KV_OF_CALL 0x80u /* a bit of the kind: the same call pushed other keys too */

static inline enum kv_kind kv_kind_of(const kv_part *part, int parity) { return (enum kv_kind)(part->kind[parity] & 0x7f); }
static inline int kv_code_of(const kv_part *part, int parity) { return (int)(part->kind[parity] >> 8); }

#define KV_NO_ROUND (~0ull) /* of a value that is being written, or was not written completely */

/* A key. */
typedef struct {
    _Alignas(64) _Atomic uint64_t phase; /* see round.h */
    _Atomic uint64_t planned;  /* phase of a round that its opener has yet to carry out, in Python */
    uint64_t mask;             /* workers in the open round */
    _Atomic uint64_t of[2];    /* round of each value */
    int32_t dtype, rule, n_states, sparse;
    uint64_t n, nbytes, chunks;
    uint64_t value[2];         /* the phase names the value in use; the other receives the next sum */
    uint64_t parts, map;
    uint64_t master, states[KV_MAX_STATES];
    double params[KV_MAX_PARAMS];
    uint64_t guard;
    /* Fields that Python code uses. */
    uint64_t number, name, name_bytes, shape, ndim;
    int64_t int_key;
    uint64_t is_text, is_side; /* a side key is only summed, in every mode */
    uint64_t hash;
    _Atomic uint64_t updates[2]; /* updates by the optimizer, by parity of the round that completes them */
    _Atomic uint64_t record;   /* description of the states: see texts.h */
    _Atomic uint64_t undo;     /* offset of the saved contents of what an update by one worker changes; 0: nothing.
                                * See kv_undo */
    uint64_t rows_of;          /* row-sparse: for each value, the place of its rows and the contents of an absent row;
                                * it has no `value`, and Python carries out its rounds */
    _Atomic uint64_t gpu_table; /* offset of a table of the key's memory on GPUs; 0: none yet */
    _Atomic uint64_t failed[KV_FAILURES]; /* failed rounds, each at its remainder modulo KV_FAILURES */
    _Atomic uint64_t why[KV_FAILURES];    /* offsets of the causes of those: see texts.h */
    uint64_t last_guard;
} kv_entry;

typedef struct {
    uint64_t magic, version, size, n_workers;
    _Atomic uint64_t members;  /* bit by rank: rounds wait for these */
    _Atomic uint64_t lost;     /* bit by rank: lost, and not back */
    _Atomic uint64_t first_lost; /* rank + 1 of the worker that was lost first; 0: it is back */
    _Atomic uint64_t newcomers; /* bit by rank: restarted, and in no round yet */
    _Atomic uint64_t asleep;   /* bit by rank: has sleeping threads */
    _Atomic uint64_t epoch;
    _Atomic uint64_t go_on;    /* the loss of a worker is no error */
    _Atomic uint64_t lock;     /* rank + 1 of the holder, and from bit 8 on its incarnation */
    _Atomic uint64_t no_peer_reads; /* process_vm_readv fails between two of the workers */
    _Atomic uint64_t mode;     /* what a round does to the value: see kv_replaces_by_sum */
    _Atomic uint64_t settings, settings_version;
    _Atomic uint64_t num_update;
    _Atomic uint64_t text_keys; /* 0: no key yet, 1: int keys, 2: str keys */
    _Atomic uint64_t top, reserved; /* used and reserved bytes of the region */
    _Atomic uint64_t window;   /* bytes that all workers so far could map: the largest size of the region */
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
    kv_worker *worker; /* the entry of this process */
    uint64_t window;   /* bytes mapped */
    int rank, size, fd;
    int forked;        /* this is a fork of the process that registered */
    int blind;         /* it has left, and declares no worker lost */
    int is_last;       /* no member remained when this worker began to rest */
    int go_on;         /* the loss of a peer is no error */
    int crowded;       /* more workers than processors */
    uint64_t mode, tried; /* the mode that this process can carry out, and the mode that it last tried to adopt */
    uint64_t incarnation, spin, looked;
    uint64_t silence;                  /* nanoseconds without a heartbeat after which a worker counts as lost */
    uint64_t epoch, begin, time;       /* the epoch of the update counts that this worker has set, 0: none; the count
                                        * of a key without updates; the largest count of all keys at its last push */
    uint64_t calling;                  /* number of the current call with several keys; 0: none */
    uint64_t left, left_reported, left_at; /* bits of the workers that left without joining; of these, the reported ones;
                                        * the epoch of `left` */
    int pidfd[KV_MAX_WORKERS];
    uint64_t pidfd_of[KV_MAX_WORKERS];
    const kv_level *const *level;
    char *bounce;
    uint64_t word; /* the word that `probe` names */
    pthread_t heartbeat; /* the thread of the heartbeat */
    pthread_mutex_t heartbeat_lock;
    pthread_cond_t heartbeat_wake;
    int heartbeat_runs, heartbeat_stop;
    _Atomic uint64_t lenient_until; /* until this time, in ns, it declares no silent worker lost */
    pthread_mutex_t busy; /* protects log, bounce buffer and descriptors: one thread at a time */
    _Atomic int sleepers; /* sleeping threads of the process */
    kv_counters *counters; /* NULL: nothing is counted */
    uint16_t store;        /* number of the store in the process */
    _Atomic uint64_t known_lost; /* bits of the losses that were counted */
} kv_self;

static const uint64_t KV_HEADER_BYTES = sizeof(kv_header);

/* Return the address of an offset in this process. */
static inline void *kv_at(const kv_self *me, uint64_t offset)
{
    return me->base + offset;
}

/* Whether a piece of memory is within the allocated part of the region: not in its header, not beyond its end. */
static inline int kv_is_given(const kv_self *me, uint64_t offset, uint64_t bytes)
{
    uint64_t top = kv_get(&me->head->top);
    return !bytes || (offset >= KV_HEADER_BYTES && offset <= top && bytes <= top - offset);
}

/* Return the bit of a rank. */
static inline uint64_t kv_rank_bit(int rank)
{
    return 1ull << rank;
}

#endif
