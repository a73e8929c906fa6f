/* A barrier at which workers sleep. Where servers and I/O threads share the cores with workers, a worker that spins at a
 * barrier would slow them. The last worker sets an instant for all, until which they spin: so no call begins before all
 * workers have woken up. */
#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const double DEADLINE = 120.0; /* seconds */
static const double LEAD = 200e-6;    /* seconds in which all workers wake up */

typedef struct {
    _Alignas(64) atomic_uint waiting;
    _Alignas(64) atomic_uint turn;
    _Alignas(64) double start;
} meeting;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void sleep_while(atomic_uint *word, unsigned value)
{
    struct timespec second = {1, 0};
    syscall(SYS_futex, word, FUTEX_WAIT, value, &second, 0, 0);
}

/* Return 0 when all n workers have arrived, -1 at the deadline. */
int gate_wait(meeting *m, unsigned n)
{
    double end = now() + DEADLINE;
    unsigned turn = atomic_load(&m->turn);
    if (atomic_fetch_add(&m->waiting, 1) + 1 == n) {
        atomic_store(&m->waiting, 0);
        m->start = now() + LEAD;
        atomic_store(&m->turn, turn + 1);
        syscall(SYS_futex, &m->turn, FUTEX_WAKE, (int)n, 0, 0, 0);
    }
    while (atomic_load(&m->turn) == turn) {
        if (now() > end)
            return -1;
        sleep_while(&m->turn, turn);
    }
    while (now() < m->start)
        sched_yield();
    return 0;
}
