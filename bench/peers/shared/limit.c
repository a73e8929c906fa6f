/* The limits between processes of this machine, in C and without anything else.
 *
 * Sums and updates of arrays that all processes have mapped: each computes its share, with the loops of the local limit.
 * Sums of private arrays through process_vm_readv and process_vm_writev. memcpy. Ping-pong of one line, of one futex.
 */
#define _GNU_SOURCE
#include "../local/limit.c"
#include "../group/gate.h"
#include <errno.h>
#include <linux/futex.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { SHARED, PRIVATE, MEMCPY, LINE, FUTEX };

typedef struct {
    _Alignas(64) atomic_long at;
} mark;

/* The arguments of one process. `work` is its share of the arrays; `own` is its whole array, which is rescaled before each
 * repetition, as a training loop writes its gradients. */
typedef struct {
    gate *gate;
    mark *marks;
    int rank, size;
    long epoch, calls;
    int grows;
    item work;
    float *own, *bounce;
    ptrdiff_t n, from, end, block;
    const params *params;
    int pids[MAX_VALUES];
    float *remote[MAX_VALUES];
} place;

/* Each process writes its own line and reads the lines of the other processes. */
static int meet(place *p)
{
    double end = 0;
    long epoch = ++p->epoch;
    atomic_store_explicit(&p->marks[p->rank].at, epoch, memory_order_release);
    for (int j = 0; j < p->size; j++)
        for (long i = 1; atomic_load_explicit(&p->marks[j].at, memory_order_acquire) < epoch; i++)
            if (not_yet(i, &end))
                return -1;
    return 0;
}

static int shared(place *p, int update, int how)
{
    params q = at_step(p->params, update, (int)p->calls + 1);
    if (meet(p))
        return -1;
    for (ptrdiff_t c = 0; c * CHUNK < p->work.n; c++)
        do_chunk(&p->work, c, update, how, &q);
    return meet(p);
}

static int move(place *p, int j, float *mine, ptrdiff_t at, ptrdiff_t n, int write)
{
    size_t bytes = (size_t)n * sizeof *mine;
    struct iovec local = {mine, bytes}, remote = {p->remote[j] + at, bytes};
    ssize_t done = write ? process_vm_writev(p->pids[j], &local, 1, &remote, 1, 0)
                         : process_vm_readv(p->pids[j], &local, 1, &remote, 1, 0);
    return done == (ssize_t)bytes ? 0 : -1;
}

static int private_block(place *p, ptrdiff_t at, ptrdiff_t n)
{
    item it = {.n = n, .k = p->size, .m = 1, .out = {p->own + at}};
    for (int j = 0; j < p->size; j++) {
        float *buffer = p->bounce + j * p->block;
        it.src[j] = j == p->rank ? p->own + at : buffer;
        if (j != p->rank && move(p, j, buffer, at, n, 0))
            return -1;
    }
    sum_any(&it, 0, n, 0);
    for (int j = 0; j < p->size; j++)
        if (j != p->rank && move(p, j, p->own + at, at, n, 1))
            return -1;
    return 0;
}

static int private(place *p)
{
    if (meet(p))
        return -1;
    for (ptrdiff_t at = p->from; at < p->end; at += p->block)
        if (private_block(p, at, p->end - at < p->block ? p->end - at : p->block))
            return -1;
    return meet(p);
}

/* Move one line from the first process to the second and back. */
static int ball(place *p)
{
    double end = 0;
    long mine = 2 * ++p->epoch + p->rank, wanted = p->rank ? mine - 1 : mine + 1;
    atomic_long *word = &p->marks[0].at;
    if (p->rank > 1)
        return 0;
    if (p->rank == 0)
        atomic_store_explicit(word, mine, memory_order_release);
    for (long i = 1; atomic_load_explicit(word, memory_order_acquire) != wanted; i++)
        if (not_yet(i, &end))
            return -1;
    if (p->rank == 1)
        atomic_store_explicit(word, mine, memory_order_release);
    return 0;
}

static void hand_over(atomic_uint *word, unsigned value)
{
    atomic_store(word, value);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static int sleep_until(atomic_uint *word, unsigned wanted)
{
    struct timespec limit = {(time_t)DEADLINE, 0};
    for (unsigned seen; (seen = atomic_load(word)) != wanted;)
        if (syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0) && errno == ETIMEDOUT)
            return -1;
    return 0;
}

static int futex_ball(place *p)
{
    unsigned mine = 2 * (unsigned)++p->epoch + (unsigned)p->rank;
    atomic_uint *word = (atomic_uint *)&p->marks[1].at;
    if (p->rank > 1)
        return 0;
    if (p->rank == 0)
        hand_over(word, mine);
    if (sleep_until(word, p->rank ? mine - 1 : mine + 1))
        return -1;
    if (p->rank == 1)
        hand_over(word, mine);
    return 0;
}

static int once(place *p, int kind, int update, int how)
{
    switch (kind) {
    case SHARED: return shared(p, update, how);
    case PRIVATE: return private(p);
    case MEMCPY: memcpy(p->bounce, p->own, (size_t)p->n * sizeof *p->own); return 0;
    case LINE: return ball(p);
    default: return futex_ball(p);
    }
}

/* Wait until the other process sleeps before a futex is woken. */
static void idle(double seconds)
{
    for (double end = gate_clock() + seconds; gate_clock() < end;)
        relax();
}

/* Undo the growth of the values since the last call. */
static void rescale(place *p, long *since)
{
    float factor = p->grows ? (float)pow(p->size, -(double)(p->calls - *since)) : 1.0f;
    *since = p->calls;
    for (ptrdiff_t i = 0; i < p->n; i++)
        p->own[i] *= factor;
}

/* Measure `repeats` calls in chains of `links`, whose first call does not count; -1 if another process has ended. */
int place_run(place *p, int kind, int update, int how, int links, int repeats, double *seconds, long *since)
{
    for (int done = 0, count; done < repeats; done += count) {
        rescale(p, since);
        if (gate_pass(p->gate, (unsigned)p->size))
            return -1;
        count = links < repeats - done ? links : repeats - done;
        for (int i = links > 1 ? -1 : 0; i < count; i++, p->calls++) {
            if (kind == FUTEX && p->rank == 0)
                idle(50e-6);
            double start = gate_clock();
            if (once(p, kind, update, how))
                return -1;
            if (i >= 0)
                seconds[done + i] = kind >= LINE && p->rank ? 0 : gate_clock() - start;
        }
    }
    return 0;
}

/* Permit the other processes to read and write this process's memory, where Yama requires it. */
void place_open(void)
{
#ifdef PR_SET_PTRACER
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
#endif
}
