/* Helper threads for one job at a time: the caller works too, and helpers join when they can.
 *
 * - A caller that finds the helpers busy with another caller's job does its own job alone: no queue, no deadlock.
 *
 * - A helper joins a job through `gate` while it is open; the caller closes it when no chunk is left, and waits only
 * for helpers that have joined. A helper that wakes up late finds the gate closed and has no cost.
 *
 * - A child of fork() starts without helpers and creates its own.
 *
 * - Helpers spin for about ten microseconds after a job (the next call of a training loop is near), then sleep.
 */
#ifndef KV_HELPER_THREADS_H
#define KV_HELPER_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

typedef void (*kv_task)(void *context, ptrdiff_t index);

enum { KV_MAX_HELPERS = 63, KV_SPINS = 4000 };

/* gate: generation in the upper half, an open bit, and the number of helpers inside. */
#define KV_GATE_OPEN ((uint64_t)1 << 31)
#define KV_GATE_STEP ((uint64_t)1 << 32)
#define KV_GATE_INSIDE (KV_GATE_OPEN - 1)

static struct {
    pthread_mutex_t owner;   /* held by the caller of the open job */
    pthread_mutex_t lock;    /* guards sleeping */
    pthread_cond_t wake;
    atomic_uint_fast64_t gate;
    atomic_int sleepers;
    int helpers;
    int watches_fork;
    kv_task task;
    void *context;
    int shares;
    struct {
        _Alignas(64) atomic_ptrdiff_t next;
        ptrdiff_t end;
    } share[KV_MAX_HELPERS + 1];
} kv_pool = {.owner = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER};

static inline void kv_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Process tasks until none is left. Each thread has its own share, the same in every call of a loop, so that its part
 * of small arrays stays in its cache; when its share is done it helps the other threads. */
static void kv_run_tasks(int self)
{
    int shares = kv_pool.shares;
    for (int turn = 0; turn < shares; turn++) {
        int s = (self + turn) % shares;
        ptrdiff_t end = kv_pool.share[s].end, i;
        while ((i = atomic_fetch_add(&kv_pool.share[s].next, 1)) < end)
            kv_pool.task(kv_pool.context, i);
    }
}

static void kv_assign_shares(ptrdiff_t n, int shares)
{
    kv_pool.shares = shares;
    for (int s = 0; s < shares; s++) {
        atomic_store_explicit(&kv_pool.share[s].next, n * s / shares, memory_order_relaxed);
        kv_pool.share[s].end = n * (s + 1) / shares;
    }
}

/* Wait until a gate newer than `seen` opens: spin first, then sleep. */
static uint64_t kv_next_gate(uint64_t seen)
{
    for (int spin = 0; spin < KV_SPINS; spin++) {
        uint64_t gate = atomic_load(&kv_pool.gate);
        if (gate / KV_GATE_STEP != seen / KV_GATE_STEP)
            return gate;
        kv_pause();
    }
    pthread_mutex_lock(&kv_pool.lock);
    atomic_fetch_add(&kv_pool.sleepers, 1);
    uint64_t gate;
    while ((gate = atomic_load(&kv_pool.gate)) / KV_GATE_STEP == seen / KV_GATE_STEP)
        pthread_cond_wait(&kv_pool.wake, &kv_pool.lock);
    atomic_fetch_sub(&kv_pool.sleepers, 1);
    pthread_mutex_unlock(&kv_pool.lock);
    return gate;
}

static void *kv_helper(void *number)
{
    uint64_t seen = 0; /* an older gate, so that a helper joins an open job at once */
    int self = (int)(intptr_t)number;
    for (;;) {
        uint64_t gate = kv_next_gate(seen);
        while (gate & KV_GATE_OPEN)
            if (atomic_compare_exchange_weak(&kv_pool.gate, &gate, gate + 1)) {
                kv_run_tasks(self);
                atomic_fetch_sub(&kv_pool.gate, 1);
                break;
            }
        seen = gate;
    }
    return NULL;
}

static void kv_pool_after_fork(void)
{
    pthread_mutex_init(&kv_pool.owner, NULL);
    pthread_mutex_init(&kv_pool.lock, NULL);
    pthread_cond_init(&kv_pool.wake, NULL);
    atomic_store(&kv_pool.gate, 0);
    atomic_store(&kv_pool.sleepers, 0);
    kv_pool.helpers = 0;
}

/* Create helper threads. Only the owner calls this. If a thread cannot be created, the job runs without it. */
static void kv_pool_grow(int helpers)
{
    sigset_t all, before;
    pthread_attr_t detached;
    if (!kv_pool.watches_fork)
        kv_pool.watches_fork = pthread_atfork(NULL, NULL, kv_pool_after_fork) == 0;
    if (!kv_pool.watches_fork)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are delivered to the program's own threads */
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    while (kv_pool.helpers < helpers && kv_pool.helpers < KV_MAX_HELPERS) {
        pthread_t thread;
        if (pthread_create(&thread, &detached, kv_helper, (void *)(intptr_t)(kv_pool.helpers + 1)) != 0)
            break;
        kv_pool.helpers++;
    }
    pthread_attr_destroy(&detached);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void kv_open_gate(void)
{
    uint64_t old = atomic_load(&kv_pool.gate);
    atomic_store(&kv_pool.gate, (old / KV_GATE_STEP + 1) * KV_GATE_STEP | KV_GATE_OPEN);
    if (atomic_load(&kv_pool.sleepers) > 0) {
        pthread_mutex_lock(&kv_pool.lock);
        pthread_cond_broadcast(&kv_pool.wake);
        pthread_mutex_unlock(&kv_pool.lock);
    }
}

static void kv_shut_gate(void)
{
    atomic_fetch_and(&kv_pool.gate, ~KV_GATE_OPEN);
    for (int spin = 0; atomic_load(&kv_pool.gate) & KV_GATE_INSIDE; spin++)
        if (spin < KV_SPINS)
            kv_pause();
        else
            sched_yield();
}

/* Run task(context, i) for i in 0..n-1 on up to `threads` threads, in no particular order; returns when all are done.
 * Any thread may call this; `task` must not call it with a job of the same owner, and must be safe for concurrent
 * calls with different i. */
static void kv_parallel(kv_task task, void *context, ptrdiff_t n, int threads)
{
    if (threads < 2 || n < 2 || pthread_mutex_trylock(&kv_pool.owner) != 0) {
        for (ptrdiff_t i = 0; i < n; i++)
            task(context, i);
        return;
    }
    if (kv_pool.helpers < threads - 1)
        kv_pool_grow(threads - 1);
    kv_pool.task = task;
    kv_pool.context = context;
    kv_assign_shares(n, kv_pool.helpers + 1 < threads ? kv_pool.helpers + 1 : threads);
    kv_open_gate();
    kv_run_tasks(0);
    kv_shut_gate();
    pthread_mutex_unlock(&kv_pool.owner);
}

#endif
