/* The barrier between the processes of each peer: it spins briefly, then yields the core. */
#ifndef KVSTORE_BENCH_GATE_H
#define KVSTORE_BENCH_GATE_H
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

enum { SPINS = 2000, LOOK = 4096 };
static const double DEADLINE = 120.0; /* seconds */

typedef struct {
    _Alignas(64) atomic_uint waiting;
    _Alignas(64) atomic_uint turn;
} gate;

static inline double gate_clock(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

/* Wait before poll number i of a condition; return -1 at the deadline. */
static inline int not_yet(long i, double *end)
{
    if (i < SPINS) {
        relax();
        return 0;
    }
    sched_yield();
    if (i % LOOK)
        return 0;
    if (*end == 0)
        *end = gate_clock() + DEADLINE;
    return gate_clock() < *end ? 0 : -1;
}

/* Return 0 when all n processes have arrived, -1 at the deadline. */
static inline int gate_pass(gate *g, unsigned n)
{
    double end = 0;
    unsigned turn = atomic_load(&g->turn);
    if (atomic_fetch_add(&g->waiting, 1) + 1 == n) {
        atomic_store(&g->waiting, 0);
        atomic_store(&g->turn, turn + 1);
        return 0;
    }
    for (long i = 1; atomic_load_explicit(&g->turn, memory_order_acquire) == turn; i++)
        if (not_yet(i, &end))
            return -1;
    return 0;
}
#endif
