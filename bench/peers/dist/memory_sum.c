/* The limit of a server that sums in shared memory: each worker copies its array in, sums a share, copies the sum out.
 *
 * Block by block: in one step workers copy block k in, sum their shares of block k - 1, and copy block k - 2 out. So
 * they wait for each other once a block, and the data of the other workers is still in a cache. The whole sum stays in
 * memory, as a server needs it for the next pull.
 *
 * With a server, a separate process with two threads sums whole arrays, as soon as all workers have copied theirs in.
 * It writes its sums to two places alternately: a server that survives losses keeps the previous value. */
#include "../group/gate.h"
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

enum { MAX_WORKERS = 64, LINE = 16 /* numbers in a cache line */ };

typedef struct {
    gate *gate;
    int rank, workers;
    float *parts[MAX_WORKERS]; /* shared: a block, or two, of each worker; and all of the sum */
    float *sum;
    const float *source;
    float *target;
    ptrdiff_t n, block;
    int sleeps, streams; /* wait by futex; write the target past the caches */
} trip;

static int sleep_at(gate *g, unsigned workers)
{
    double end = gate_clock() + DEADLINE;
    unsigned turn = atomic_load(&g->turn);
    if (atomic_fetch_add(&g->waiting, 1) + 1 == workers) {
        atomic_store(&g->waiting, 0);
        atomic_store(&g->turn, turn + 1);
        syscall(SYS_futex, &g->turn, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
        return 0;
    }
    while (atomic_load(&g->turn) == turn) {
        struct timespec second = {1, 0};
        if (gate_clock() > end)
            return -1;
        syscall(SYS_futex, &g->turn, FUTEX_WAIT, turn, &second, NULL, 0);
    }
    return 0;
}

static int meet(const trip *t)
{
    return t->sleeps ? sleep_at(t->gate, (unsigned)t->workers) : gate_pass(t->gate, (unsigned)t->workers);
}

static ptrdiff_t size_of(const trip *t, ptrdiff_t k)
{
    ptrdiff_t left = t->n - k * t->block;
    return left < t->block ? left : t->block;
}

static float *part(const trip *t, int rank, ptrdiff_t k)
{
    return t->parts[rank] + k % 2 * t->block;
}

static void add(float *restrict sum, const float *restrict a, const float *restrict b, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++)
        sum[i] = a[i] + b[i];
}

/* Sum this worker's share of block k, in rank order. */
static void sum_share(const trip *t, ptrdiff_t k)
{
    ptrdiff_t n = size_of(t, k), lines = (n + LINE - 1) / LINE;
    ptrdiff_t from = lines * t->rank / t->workers * LINE, end = lines * (t->rank + 1) / t->workers * LINE;
    float *sum = t->sum + k * t->block;
    end = end < n ? end : n;
    if (t->workers == 1)
        memcpy(sum, part(t, 0, k), (size_t)n * sizeof *sum);
    for (int rank = 1; rank < t->workers; rank++)
        add(sum + from, (rank == 1 ? part(t, 0, k) : sum) + from, part(t, rank, k) + from, end - from);
}

static void copy(float *target, const float *sum, ptrdiff_t n, int streams)
{
    ptrdiff_t i = 0;
#if defined(__AVX__)
    for (; streams && i + 8 <= n; i += 8)
        _mm256_stream_ps(target + i, _mm256_load_ps(sum + i));
#endif
    memcpy(target + i, sum + i, (size_t)(n - i) * sizeof *sum);
}

static void end_of_copies(int streams)
{
#if defined(__AVX__)
    if (streams)
        _mm_sfence();
#endif
}

static void copy_out(const trip *t, ptrdiff_t k)
{
    copy(t->target + k * t->block, t->sum + k * t->block, size_of(t, k), t->streams);
}

/* Push n numbers and pull their sum over all workers; return 0 on success. */
int memory_sum_trip(const trip *t)
{
    ptrdiff_t blocks = (t->n + t->block - 1) / t->block;
    for (ptrdiff_t k = 0; k < blocks + 2; k++) {
        if (k > 1)
            copy_out(t, k - 2);
        if (k > 0 && k <= blocks)
            sum_share(t, k - 1);
        if (k < blocks)
            memcpy(part(t, t->rank, k), t->source + k * t->block, (size_t)size_of(t, k) * sizeof(float));
        if (k <= blocks && meet(t))
            return -1;
    }
    end_of_copies(t->streams);
    return 0;
}

/* ------------------------------------------------------------------------------------------------ a server */

enum { CHUNK = 32 * 1024 /* numbers that a thread of the server sums at once */ };

/* The counters of workers and server, in shared memory. */
typedef struct {
    _Alignas(64) atomic_uint arrived;  /* pushes, of all workers */
    _Alignas(64) atomic_uint answered; /* sums */
    atomic_int looks;                  /* polls of a wait before it sleeps */
} bell;

typedef struct {
    bell *bell;
    int rank, workers;
    float *parts[MAX_WORKERS];
    float *sums[2];
    const float *source;
    float *target;
    ptrdiff_t n;
    int looks, streams;
} visit;

/* The shared state of the threads of a server: chunks are numbered over all sums. */
typedef struct {
    const visit *v;
    ptrdiff_t chunks;
    _Alignas(64) atomic_long next;
    _Alignas(64) atomic_long until;
    _Alignas(64) atomic_long done;
    _Alignas(64) atomic_uint calls;
} work;

static void wake(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

/* Wait until a counter reaches a value; return -1 at the deadline, if there is one. */
static int await(atomic_uint *word, unsigned count, int looks, int for_ever)
{
    double end = gate_clock() + DEADLINE;
    for (int i = 0; (int)(atomic_load(word) - count) < 0; i++) {
        unsigned seen = atomic_load(word);
        struct timespec second = {1, 0};
        if (i < looks)
            sched_yield();
        else if ((int)(seen - count) < 0)
            syscall(SYS_futex, word, FUTEX_WAIT, seen, &second, NULL, 0);
        if (!for_ever && i >= looks && gate_clock() > end)
            return -1;
    }
    return 0;
}

static void sum_chunk(const work *w, long number)
{
    const visit *v = w->v;
    ptrdiff_t from = number % w->chunks * CHUNK, left = v->n - from, n = left < CHUNK ? left : CHUNK;
    float *sum = v->sums[number / w->chunks % 2] + from;
    if (v->workers == 1)
        memcpy(sum, v->parts[0] + from, (size_t)n * sizeof *sum);
    for (int rank = 1; rank < v->workers; rank++)
        add(sum, (rank == 1 ? v->parts[0] + from : sum), v->parts[rank] + from, n);
}

static void sum_chunks(work *w)
{
    for (;;) {
        long number = atomic_load(&w->next);
        do
            if (number >= atomic_load(&w->until))
                return;
        while (!atomic_compare_exchange_weak(&w->next, &number, number + 1));
        sum_chunk(w, number);
        atomic_fetch_add(&w->done, 1);
    }
}

static void *help(void *context)
{
    work *w = context;
    for (unsigned calls = 1;; calls = atomic_load(&w->calls) + 1) {
        for (int i = 0; i < SPINS && atomic_load(&w->calls) < calls; i++)
            relax();
        await(&w->calls, calls, 0, 1);
        sum_chunks(w);
    }
    return NULL;
}

/* Run as the server, until the process ends. */
int memory_sum_serve(const visit *v)
{
    work w = {.v = v, .chunks = (v->n + CHUNK - 1) / CHUNK};
    pthread_t helper;
    if (pthread_create(&helper, NULL, help, &w))
        return -1;
    for (unsigned sums = 1;; sums++) {
        await(&v->bell->arrived, sums * (unsigned)v->workers, atomic_load(&v->bell->looks), 1);
        atomic_fetch_add(&w.until, w.chunks);
        atomic_fetch_add(&w.calls, 1);
        wake(&w.calls);
        sum_chunks(&w);
        while (atomic_load(&w.done) < atomic_load(&w.until))
            relax();
        atomic_store(&v->bell->answered, sums);
        wake(&v->bell->answered);
    }
}

/* Push n numbers to the server and pull their sum; return 0 on success. */
int memory_sum_visit(const visit *v)
{
    unsigned sums = atomic_load(&v->bell->answered) + 1; /* this worker has not pushed yet */
    atomic_store(&v->bell->looks, v->looks);
    memcpy(v->parts[v->rank], v->source, (size_t)v->n * sizeof(float));
    if ((atomic_fetch_add(&v->bell->arrived, 1) + 1) % (unsigned)v->workers == 0)
        wake(&v->bell->arrived);
    if (await(&v->bell->answered, sums, v->looks, 0))
        return -1;
    copy(v->target, v->sums[(sums - 1) % 2], v->n, v->streams);
    end_of_copies(v->streams);
    return 0;
}
