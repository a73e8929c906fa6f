/* The members of a job: the states of workers, the detection of dead and silent ones, the record of their loss, the
 * region's lock, and wake-ups. */
#ifndef KV_MEMBERS_H
#define KV_MEMBERS_H

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "layout.h"

enum kv_outcome { KV_READY, KV_TICK, KV_PEER_LOST, KV_FENCED, KV_PLAN, KV_NEW_MODE, KV_NO_MEMORY, KV_UNREADABLE };

#define KV_MILLISECOND 1000000ull
enum {
    KV_NAP = 20,        /* milliseconds of one sleep: the longest time until a death is noticed */
    KV_TICK_AFTER = 100 /* milliseconds after which a wait returns, so that the caller can check for signals */
};

/* Return nanoseconds of CLOCK_MONOTONIC. */
static inline uint64_t kv_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* Wake the sleeping threads of the workers in `whom`. */
static void kv_wake(kv_self *me, uint64_t whom)
{
    for (; whom; whom &= whom - 1) {
        _Atomic uint32_t *futex = &me->head->worker[__builtin_ctzll(whom)].futex;
        atomic_fetch_add(futex, 1);
        syscall(SYS_futex, futex, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
    }
}

/* Wake all sleeping threads, those of this process included, after a change that they may wait for. Does not block. */
static inline void kv_wake_all(kv_self *me)
{
    kv_fence();
    uint64_t asleep = kv_get(&me->head->asleep);
    if (asleep)
        kv_wake(me, asleep);
}

#define KV_UNKNOWN (~0ull)

/* Return the start time of a process in clock ticks; 0: there is no such process; KV_UNKNOWN: it cannot be read. A
 * process id alone names no process for good: the system uses the id of a dead process again. */
static uint64_t kv_process_start(uint64_t pid)
{
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    FILE *file = fopen(path, "re");
    if (!file) /* without descriptors or memory this says nothing about the process */
        return errno == ENOENT || errno == ESRCH ? 0 : KV_UNKNOWN;
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = 0;
    char *at = strrchr(text, ')'); /* the name may contain any character, blanks and brackets included */
    unsigned long long ticks = 0;
    if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X')
        return 0;
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at)
        sscanf(at, " %llu", &ticks);
    return ticks;
}

/* Whether the process that registered as worker `w` still exists. */
static int kv_process_exists(kv_self *me, int w)
{
    uint64_t pid = kv_get(&me->head->worker[w].pid), then = kv_get(&me->head->worker[w].started), now = kv_process_start(pid);
    if (now == KV_UNKNOWN || then == KV_UNKNOWN)
        return kill((pid_t)pid, 0) == 0 || errno != ESRCH;
    return now == then;
}

/* Return a descriptor that becomes readable when the worker's process ends. The caller holds `me->busy`. -1 with
 * `errno` ESRCH: it has ended; other values: the system has no descriptor. */
static int kv_pidfd(kv_self *me, int w)
{
    kv_worker *peer = &me->head->worker[w];
    uint64_t incarnation = kv_get(&peer->incarnation);
    if (me->pidfd[w] >= 0 && me->pidfd_of[w] == incarnation)
        return me->pidfd[w];
    if (me->pidfd[w] >= 0)
        close(me->pidfd[w]);
    uint64_t pid = kv_get(&peer->pid);
    int fd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    if (fd >= 0 && !kv_process_exists(me, w)) {
        close(fd);
        fd = -1;
        errno = ESRCH;
    }
    me->pidfd[w] = fd;
    me->pidfd_of[w] = incarnation;
    return fd;
}

/* Whether the process of a worker has ended. The caller holds `me->busy`, or is the only thread. */
static int kv_process_ended(kv_self *me, int w)
{
    int fd = kv_pidfd(me, w);
    if (fd < 0) /* the system has no descriptor: read the process table */
        return errno == ESRCH || !kv_process_exists(me, w);
    struct pollfd one = {fd, POLLIN, 0};
    return poll(&one, 1, 0) > 0 && one.revents & POLLIN; /* an error does not mean that it has ended */
}

/* Return the delay of its own heartbeat, in nanoseconds, from which on a process declares no other worker silent. */
static inline uint64_t kv_longest_own_delay(const kv_self *me)
{
    return me->silence / 5;
}

/* Whether this process was stopped a short time ago: then the other workers may have been too, and have had no time
 * for a heartbeat since. */
static int kv_was_stopped(kv_self *me, uint64_t now)
{
    uint64_t beat = kv_get(&me->worker->beat); /* read before `lenient_until`, which the heartbeat thread writes first */
    return (now > beat && now - beat > kv_longest_own_delay(me)) || now < kv_get(&me->lenient_until);
}

/* Whether a worker has sent no heartbeat for `me->silence`. */
static int kv_is_silent(kv_self *me, int w, uint64_t now)
{
    uint64_t beat = kv_get(&me->head->worker[w].beat);
    return now > beat && now - beat > me->silence;
}

/* Return the state in a worker's state word. */
static inline int kv_state_in(uint64_t word)
{
    return (int)(word & 0xff);
}

/* Return the present state of a worker. */
static inline int kv_worker_state(const kv_self *me, int w)
{
    return kv_state_in(kv_get(&me->head->worker[w].state));
}

/* Whether a state word is of a worker that is present: not absent, left or lost. */
static int kv_is_present(uint64_t word)
{
    int state = kv_state_in(word);
    return state == KV_ALIVE || state == KV_JOINED || state == KV_COMING;
}

#define KV_ONE_WORK 0x100ull

/* Whether a state word is of a worker that is at work. */
static inline int kv_is_at_work(uint64_t word)
{
    return (word & 0xffffff00ull) != 0;
}

/* Whether the other workers have declared this process lost, or another process has its rank. `word`: the state word
 * of the rank. */
static inline int kv_is_fenced(const kv_self *me, uint64_t word)
{
    return word >> 32 != me->incarnation || kv_state_in(word) == KV_LOST;
}

/* Begin work: until `kv_end_work`, this worker changes memory that other workers read. If it is silent for too long
 * during that time, it is killed before it is declared lost, because it could continue to write later. One word holds
 * state and count of work, so that no worker is lost and at work. Does not block. 0: this worker is fenced, and must
 * change nothing. */
static int kv_begin_work(kv_self *me)
{
    uint64_t now;
    do {
        now = kv_get(&me->worker->state);
        if (kv_is_fenced(me, now))
            return 0;
    } while (!kv_swap(&me->worker->state, now, now + KV_ONE_WORK));
    return 1;
}

/* End what `kv_begin_work` has begun; each successful begin needs one end. Does nothing if this worker is fenced. */
static void kv_end_work(kv_self *me)
{
    uint64_t now;
    do {
        now = kv_get(&me->worker->state);
        if (kv_is_fenced(me, now) || !kv_is_at_work(now))
            return;
    } while (!kv_swap(&me->worker->state, now, now - KV_ONE_WORK));
}

/* Change the state of this worker. 0: it is not present any more, and nothing has changed. */
static int kv_set_state(kv_self *me, enum kv_worker_state state)
{
    uint64_t now;
    do {
        now = kv_get(&me->worker->state);
        if (!kv_is_present(now) || kv_is_fenced(me, now))
            return 0;
    } while (!kv_swap(&me->worker->state, now, (now & ~0xffull) | (uint64_t)state));
    return 1;
}

/* Try once to acquire the region's lock; begins work. Does not block. 0: another worker holds it, or this worker is
 * fenced. The lock of a dead holder is free, and so is a lock that an earlier process of a rank has left. */
static int kv_try_lock(kv_self *me)
{
    uint64_t holder = kv_get(&me->head->lock), own = me->incarnation << 8 | ((uint64_t)me->rank + 1);
    int w = (int)(holder & 0xff) - 1;
    if (holder && kv_worker_state(me, w) != KV_LOST && kv_get(&me->head->worker[w].incarnation) == holder >> 8)
        return 0;
    if (!kv_begin_work(me))
        return 0;
    if (kv_swap(&me->head->lock, holder, own))
        return 1;
    kv_end_work(me);
    return 0;
}

/* Release the region's lock, end the work, and wake waiting workers. Does nothing if another worker has acquired the
 * lock since, because this worker was declared lost. */
static void kv_unlock_region(kv_self *me)
{
    if (kv_swap(&me->head->lock, me->incarnation << 8 | ((uint64_t)me->rank + 1), 0)) {
        kv_end_work(me);
        kv_wake_all(me);
    }
}

/* Collect the bits of the lost workers, and of the workers that rounds should not wait for. Without `go_on` a loss
 * ends the rounds: they continue to wait for the lost worker and for workers that leave after it. Otherwise a round
 * that others then read would lack the push of a survivor. */
static void kv_collect_departed(kv_self *me, uint64_t *lost, uint64_t *out)
{
    *lost = *out = 0;
    for (int w = 0; w < me->size; w++) {
        int state = kv_worker_state(me, w);
        if (state == KV_LOST)
            *lost |= kv_rank_bit(w);
        if (state == KV_LOST || state == KV_LEFT || state == KV_JOINED)
            *out |= kv_rank_bit(w);
    }
    if (*lost && !me->go_on)
        *out = 0;
}

/* Record lost workers and workers that have left in the header. The caller holds the lock. */
static void kv_record_departed(kv_self *me)
{
    kv_header *head = me->head;
    uint64_t lost, out;
    kv_collect_departed(me, &lost, &out);
    if (lost && !kv_get(&head->lost)) /* others may fail as a consequence */
        kv_put(&head->first_lost, (uint64_t)__builtin_ctzll(lost) + 1);
    kv_set_bits(&head->lost, lost);
    kv_clear_bits(&head->members, out);
    kv_add(&head->epoch, 1);
}

/* Let rounds stop waiting for lost workers and workers that have left. Every worker that looks around does this,
 * because the worker that marked a loss, or left, may have died before it could. It happens under the lock: so a
 * worker that slept while the rank came back cannot repeat it, and a loss is recorded either before or after a worker
 * leaves. Does not block; if the lock is held, the next look repeats it. */
static void kv_drop_departed(kv_self *me)
{
    kv_header *head = me->head;
    uint64_t lost, out;
    kv_collect_departed(me, &lost, &out);
    if (!(lost & ~kv_get(&head->lost)) && !(out & kv_get(&head->members)))
        return;
    if (!kv_try_lock(me))
        return; /* the next call does it */
    kv_record_departed(me);
    kv_unlock_region(me);
}

/* Declare a worker lost. `seen`: its state word from before the caller found that it is gone; if the word has changed
 * since, nothing happens. */
static void kv_mark_lost(kv_self *me, int w, uint64_t seen)
{
    if (kv_is_present(seen))
        kv_swap(&me->head->worker[w].state, seen, (seen & ~0xffull) | KV_LOST);
}

/* Kill the process of a worker and wait until it has ended, at most KV_TICK_AFTER. The caller holds `me->busy`. */
static void kv_end_process(kv_self *me, int w)
{
    struct pollfd one = {me->pidfd[w], POLLIN, 0};
    if (one.fd < 0)
        kill((pid_t)kv_get(&me->head->worker[w].pid), SIGKILL);
    else if (!syscall(SYS_pidfd_send_signal, one.fd, SIGKILL, NULL, 0))
        poll(&one, 1, KV_TICK_AFTER);
}

/* Release the lock of a worker that has left. Such a worker is not lost when its process ends, but it leaves under
 * the lock: the lock of an ended process is free, and a process that is stopped while it holds the lock is killed. */
static void kv_release_lock_of(kv_self *me, int w, uint64_t now)
{
    uint64_t holder = kv_get(&me->head->lock);
    if ((int)(holder & 0xff) - 1 != w || kv_worker_state(me, w) != KV_LEFT ||
        kv_get(&me->head->worker[w].incarnation) != holder >> 8)
        return;
    if (kv_process_ended(me, w))
        kv_swap(&me->head->lock, holder, 0);
    else if (kv_is_silent(me, w, now) && !kv_was_stopped(me, now))
        kv_end_process(me, w);
}

/* Find the workers that have died or are silent, and declare them lost. A worker that was stopped at work could write
 * later: it is killed first. Blocks at most KV_TICK_AFTER for each worker that is killed. Does nothing while another
 * thread of this process holds `me->busy`. */
static void kv_detect_losses(kv_self *me)
{
    uint64_t now = kv_now_ns();
    if (pthread_mutex_trylock(&me->busy) != 0)
        return; /* another thread of this process is at work; the next call does it */
    me->looked = now;
    for (int w = 0; w < me->size && !me->blind; w++) {
        kv_worker *peer = &me->head->worker[w];
        uint64_t seen = kv_get(&peer->state);
        if (w == me->rank)
            continue;
        kv_release_lock_of(me, w, now);
        if (!kv_is_present(seen))
            continue;
        int gone = kv_process_ended(me, w);
        if (!gone && kv_is_silent(me, w, now) && !kv_was_stopped(me, now)) {
            if (kv_is_at_work(seen))
                kv_end_process(me, w);
            gone = 1;
        }
        if (gone)
            kv_mark_lost(me, w, seen);
    }
    kv_drop_departed(me);
    pthread_mutex_unlock(&me->busy);
}

/* Return KV_READY while this worker may take part, KV_PEER_LOST after a loss that is an error, KV_FENCED if this
 * worker is not present any more. */
static int kv_check_membership(kv_self *me)
{
    if (!kv_is_present(kv_get(&me->worker->state)) || kv_get(&me->worker->incarnation) != me->incarnation)
        return KV_FENCED;
    if (!me->go_on && kv_get(&me->head->lost))
        return KV_PEER_LOST;
    return KV_READY;
}

#endif
