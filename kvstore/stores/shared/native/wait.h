/* Waiting for other workers: spin a little, then sleep; and see it when one of them dies. */
#ifndef KV_WAIT_H
#define KV_WAIT_H

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
    KV_NAP = 20,        /* milliseconds of one sleep: how late a death may be noticed */
    KV_TICK_AFTER = 100 /* milliseconds after which the caller may look for signals */
};

static inline uint64_t kv_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void kv_wake(kv_self *me, uint64_t whom)
{
    for (; whom; whom &= whom - 1) {
        _Atomic uint32_t *futex = &me->head->worker[__builtin_ctzll(whom)].futex;
        atomic_fetch_add(futex, 1);
        syscall(SYS_futex, futex, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
    }
}

/* Wake everybody who sleeps, other threads of this process, too, after something has changed that they may wait for. */
static inline void kv_wake_all(kv_self *me)
{
    kv_fence();
    uint64_t asleep = kv_get(&me->head->asleep);
    if (asleep)
        kv_wake(me, asleep);
}

#define KV_UNKNOWN (~0ull)

/* When the process began, in clock ticks; 0: there is no such process; or KV_UNKNOWN. The number of a dead process is used again. */
static uint64_t kv_started(uint64_t pid)
{
    char path[48], text[1024];
    snprintf(path, sizeof path, "/proc/%llu/stat", (unsigned long long)pid);
    FILE *file = fopen(path, "re");
    if (!file) /* without descriptors or memory that is no news of the process */
        return errno == ENOENT || errno == ESRCH ? 0 : KV_UNKNOWN;
    size_t n = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[n] = 0;
    char *at = strrchr(text, ')'); /* the name may hold anything, blanks and brackets too */
    unsigned long long ticks = 0;
    if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X')
        return 0;
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at)
        sscanf(at, " %llu", &ticks);
    return ticks;
}

/* Whether the process that registered is there. */
static int kv_exists(kv_self *me, int w)
{
    uint64_t pid = kv_get(&me->head->worker[w].pid), then = kv_get(&me->head->worker[w].started), now = kv_started(pid);
    if (now == KV_UNKNOWN || then == KV_UNKNOWN)
        return kill((pid_t)pid, 0) == 0 || errno != ESRCH;
    return now == then;
}

/* A descriptor that becomes readable when the worker's process ends; -1: it has ended already. */
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
    if (fd >= 0 && !kv_exists(me, w)) {
        close(fd);
        fd = -1;
        errno = ESRCH;
    }
    me->pidfd[w] = fd;
    me->pidfd_of[w] = incarnation;
    return fd;
}

static int kv_ended(kv_self *me, int w)
{
    int fd = kv_pidfd(me, w);
    if (fd < 0) /* no descriptor to be had: ask the process table */
        return errno == ESRCH || !kv_exists(me, w);
    struct pollfd one = {fd, POLLIN, 0};
    return poll(&one, 1, 0) > 0 && one.revents & POLLIN; /* an error is no end */
}

/* How late its own heartbeat may be until a process judges nobody's silence. */
static inline uint64_t kv_still(const kv_self *me)
{
    return me->silence / 5;
}

/* Whether this process stood still a short time ago: then others may have, too, and have not been able to beat since. */
static int kv_stood_still(kv_self *me, uint64_t now)
{
    uint64_t beat = kv_get(&me->worker->beat); /* before `forgives`, which its own heartbeat writes first */
    return (now > beat && now - beat > kv_still(me)) || now < kv_get(&me->forgives);
}

static int kv_silent(kv_self *me, int w, uint64_t now)
{
    uint64_t beat = kv_get(&me->head->worker[w].beat);
    return now > beat && now - beat > me->silence;
}

static inline int kv_state_in(uint64_t word)
{
    return (int)(word & 0xff);
}

static inline int kv_state(const kv_self *me, int w)
{
    return kv_state_in(kv_get(&me->head->worker[w].state));
}

static int kv_here(uint64_t word)
{
    int state = kv_state_in(word);
    return state == KV_ALIVE || state == KV_JOINED || state == KV_COMING;
}

#define KV_ONE_WORK 0x100ull

static inline int kv_is_at_work(uint64_t word)
{
    return (word & 0xffffff00ull) != 0;
}

/* Whether the others take this process for dead, or another has its rank. `word`: the rank's state. */
static inline int kv_is_out(const kv_self *me, uint64_t word)
{
    return word >> 32 != me->incarnation || kv_state_in(word) == KV_LOST;
}

/* From here to `kv_end_work` this worker changes what others read. If it falls silent meanwhile, it is ended before
 * anybody takes it for lost: it could go on when it wakes. One word says both, so that nobody is lost and at work.
 * 0: it is taken for lost already. */
static int kv_begin_work(kv_self *me)
{
    uint64_t now;
    do {
        now = kv_get(&me->worker->state);
        if (kv_is_out(me, now))
            return 0;
    } while (!kv_swap(&me->worker->state, now, now + KV_ONE_WORK));
    return 1;
}

static void kv_end_work(kv_self *me)
{
    uint64_t now;
    do {
        now = kv_get(&me->worker->state);
        if (kv_is_out(me, now) || !kv_is_at_work(now))
            return;
    } while (!kv_swap(&me->worker->state, now, now - KV_ONE_WORK));
}

/* Change the state of this worker, which is here. 0: it is not any more. */
static int kv_become(kv_self *me, enum kv_state state)
{
    uint64_t now;
    do {
        now = kv_get(&me->worker->state);
        if (!kv_here(now) || kv_is_out(me, now))
            return 0;
    } while (!kv_swap(&me->worker->state, now, (now & ~0xffull) | (uint64_t)state));
    return 1;
}

/* One attempt to hold the region's lock. That of a dead holder is taken over, and what an earlier process of a rank
 * has left locked is a dead holder's. */
static int kv_try_lock(kv_self *me)
{
    uint64_t holder = kv_get(&me->head->lock), own = me->incarnation << 8 | ((uint64_t)me->rank + 1);
    int w = (int)(holder & 0xff) - 1;
    if (holder && kv_state(me, w) != KV_LOST && kv_get(&me->head->worker[w].incarnation) == holder >> 8)
        return 0;
    if (!kv_begin_work(me))
        return 0;
    if (kv_swap(&me->head->lock, holder, own))
        return 1;
    kv_end_work(me);
    return 0;
}

static void kv_unlock_region(kv_self *me)
{
    if (kv_swap(&me->head->lock, me->incarnation << 8 | ((uint64_t)me->rank + 1), 0)) {
        kv_end_work(me);
        kv_wake_all(me);
    }
}

/* Who is lost, and for whom rounds should not wait. Without `go_on` a loss ends the rounds: they wait for the lost, and
 * for who leaves after it too. Else what a survivor does not push would be missing from a round that others then read. */
static void kv_see_gone(kv_self *me, uint64_t *lost, uint64_t *out)
{
    *lost = *out = 0;
    for (int w = 0; w < me->size; w++) {
        int state = kv_state(me, w);
        if (state == KV_LOST)
            *lost |= kv_bit(w);
        if (state == KV_LOST || state == KV_LEFT || state == KV_JOINED)
            *out |= kv_bit(w);
    }
    if (*lost && !me->go_on)
        *out = 0;
}

/* The lock is held. */
static void kv_note_gone(kv_self *me)
{
    kv_header *head = me->head;
    uint64_t lost, out;
    kv_see_gone(me, &lost, &out);
    if (lost && !kv_get(&head->lost)) /* others may fail because of it */
        kv_put(&head->first_lost, (uint64_t)__builtin_ctzll(lost) + 1);
    kv_set_bits(&head->lost, lost);
    kv_clear_bits(&head->members, out);
    kv_add(&head->epoch, 1);
}

/* Rounds stop waiting for the lost and for who has left. Everybody who looks around does this, for who has marked a
 * worker, or left, may have died before it could; and under the lock, so that nobody does it who slept while the rank
 * came back, and that a loss is either known before a worker leaves or after. */
static void kv_write_off(kv_self *me)
{
    kv_header *head = me->head;
    uint64_t lost, out;
    kv_see_gone(me, &lost, &out);
    if (!(lost & ~kv_get(&head->lost)) && !(out & kv_get(&head->members)))
        return;
    if (!kv_try_lock(me))
        return; /* there is a next time */
    kv_note_gone(me);
    kv_unlock_region(me);
}

/* `seen`: its state, from before it was found to be gone. */
static void kv_mark_lost(kv_self *me, int w, uint64_t seen)
{
    if (kv_here(seen))
        kv_swap(&me->head->worker[w].state, seen, (seen & ~0xffull) | KV_LOST);
}

/* End a process, and see it ended: that takes a moment. */
static void kv_end_process(kv_self *me, int w)
{
    struct pollfd one = {me->pidfd[w], POLLIN, 0};
    if (one.fd < 0)
        kill((pid_t)kv_get(&me->head->worker[w].pid), SIGKILL);
    else if (!syscall(SYS_pidfd_send_signal, one.fd, SIGKILL, NULL, 0))
        poll(&one, 1, KV_TICK_AFTER);
}

/* Who has left is not lost when its process ends, but it leaves under the lock: that of a process which has ended is
 * free, and one that was stopped with it is ended. */
static void kv_release_lock_of(kv_self *me, int w, uint64_t now)
{
    uint64_t holder = kv_get(&me->head->lock);
    if ((int)(holder & 0xff) - 1 != w || kv_state(me, w) != KV_LEFT ||
        kv_get(&me->head->worker[w].incarnation) != holder >> 8)
        return;
    if (kv_ended(me, w))
        kv_swap(&me->head->lock, holder, 0);
    else if (kv_silent(me, w, now) && !kv_stood_still(me, now))
        kv_end_process(me, w);
}

/* See who is gone. A worker that was stopped at work could write later: it is ended, so that it cannot. */
static void kv_look_around(kv_self *me)
{
    uint64_t now = kv_now_ns();
    if (pthread_mutex_trylock(&me->busy) != 0)
        return; /* another thread of this process is at work; there is a next time */
    me->looked = now;
    for (int w = 0; w < me->size && !me->blind; w++) {
        kv_worker *peer = &me->head->worker[w];
        uint64_t seen = kv_get(&peer->state);
        if (w == me->rank)
            continue;
        kv_release_lock_of(me, w, now);
        if (!kv_here(seen))
            continue;
        int gone = kv_ended(me, w);
        if (!gone && kv_silent(me, w, now) && !kv_stood_still(me, now)) {
            if (kv_is_at_work(seen))
                kv_end_process(me, w);
            gone = 1;
        }
        if (gone)
            kv_mark_lost(me, w, seen);
    }
    kv_write_off(me);
    pthread_mutex_unlock(&me->busy);
}

/* KV_READY while this worker may take part. */
static int kv_standing(kv_self *me)
{
    if (!kv_here(kv_get(&me->worker->state)) || kv_get(&me->worker->incarnation) != me->incarnation)
        return KV_FENCED;
    if (!me->go_on && kv_get(&me->head->lost))
        return KV_PEER_LOST;
    return KV_READY;
}

typedef int (*kv_condition)(void *context);
typedef int (*kv_attempt)(kv_self *me);

static int kv_spin(kv_self *me, kv_condition ready, void *context)
{
    for (int i = 0; i < 64; i++)
        if (ready(context))
            return 1;
    if (!me->spin)
        return 0;
    uint64_t end = kv_now_ns() + me->spin;
    do {
        if (me->crowded)
            sched_yield();
        for (int i = 0; i < (me->crowded ? 1 : 32); i++) {
            if (ready(context))
                return 1;
            if (!me->crowded)
                kv_relax();
        }
    } while (kv_now_ns() < end);
    return 0;
}

/* Wait until the condition holds. KV_TICK comes now and then, for the caller to look for signals and deadlines;
 * other outcomes only while the condition does not hold. */
static int kv_wait(kv_self *me, kv_condition ready, void *context)
{
    if (kv_spin(me, ready, context))
        return KV_READY;
    uint64_t start = kv_now_ns();
    const struct timespec nap = {0, KV_NAP * 1000000};
    for (;;) {
        uint32_t seen = atomic_load(&me->worker->futex);
        atomic_fetch_add(&me->sleepers, 1);
        kv_set_bits(&me->head->asleep, kv_bit(me->rank));
        kv_fence();
        int held = ready(context);
        if (!held)
            syscall(SYS_futex, &me->worker->futex, FUTEX_WAIT, seen, &nap, NULL, 0);
        if (atomic_fetch_sub(&me->sleepers, 1) == 1) { /* else another thread of this process still sleeps */
            kv_clear_bits(&me->head->asleep, kv_bit(me->rank));
            if (atomic_load(&me->sleepers)) /* one that lay down meanwhile */
                kv_set_bits(&me->head->asleep, kv_bit(me->rank));
        }
        if (held || ready(context))
            return KV_READY;
        uint64_t now = kv_now_ns();
        if (now - me->looked > KV_NAP / 2 * KV_MILLISECOND)
            kv_look_around(me);
        int standing = kv_standing(me);
        if (standing != KV_READY)
            return ready(context) ? KV_READY : standing;
        if (now - start > KV_TICK_AFTER * KV_MILLISECOND)
            return KV_TICK;
    }
}

#endif
