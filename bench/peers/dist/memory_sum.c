/* What shared memory allows a server that sums: each worker copies its array in, sums a share, copies the sum out.
 *
 * Block by block: in one step workers copy block k in, sum their shares of block k - 1, and copy block k - 2 out; so
 * they wait for each other once a block, and what the others need is still in a cache. The whole sum stays in memory,
 * as a server needs it for the next pull. */
#include "../group/gate.h"
#include <limits.h>
#include <linux/futex.h>
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

/* This worker's share of block k, in rank order. */
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

static void copy_out(const trip *t, ptrdiff_t k)
{
    const float *sum = t->sum + k * t->block;
    float *target = t->target + k * t->block;
    ptrdiff_t n = size_of(t, k), i = 0;
#if defined(__AVX__)
    for (; t->streams && i + 8 <= n; i += 8)
        _mm256_stream_ps(target + i, _mm256_load_ps(sum + i));
#endif
    memcpy(target + i, sum + i, (size_t)(n - i) * sizeof *sum);
}

/* Push n numbers and pull their sum over all workers; 0 if it went well. */
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
#if defined(__AVX__)
    if (t->streams)
        _mm_sfence();
#endif
    return 0;
}
