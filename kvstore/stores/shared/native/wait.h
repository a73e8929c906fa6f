/* Waits for a condition on the region: a short spin, then sleep, with a look for dead workers now and then. */
#ifndef KV_WAIT_H
#define KV_WAIT_H

#include "members.h"

/* A condition reads the region only, does not block, and may be called by any thread any number of times. */
typedef int (*kv_condition)(void *context);
typedef int (*kv_attempt)(kv_self *me);

/* Poll the condition for `me->spin` nanoseconds; return whether it holds. */
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

/* Wait until the condition holds. Blocks for KV_TICK_AFTER at most, without the interpreter's lock. The caller does
 * not hold `me->busy` or the region's lock. KV_READY: it holds. KV_TICK: time for the caller to check signals and
 * deadlines. KV_PEER_LOST, KV_FENCED: as `kv_check_membership`, only while the condition does not hold. */
static int kv_wait(kv_self *me, kv_condition ready, void *context)
{
    if (kv_spin(me, ready, context))
        return KV_READY;
    uint64_t start = kv_now_ns();
    const struct timespec nap = {0, KV_NAP * 1000000};
    for (;;) {
        uint32_t seen = atomic_load(&me->worker->futex);
        atomic_fetch_add(&me->sleepers, 1);
        kv_set_bits(&me->head->asleep, kv_rank_bit(me->rank));
        kv_fence();
        int held = ready(context);
        if (!held)
            syscall(SYS_futex, &me->worker->futex, FUTEX_WAIT, seen, &nap, NULL, 0);
        if (atomic_fetch_sub(&me->sleepers, 1) == 1) { /* else another thread of this process still sleeps */
            kv_clear_bits(&me->head->asleep, kv_rank_bit(me->rank));
            if (atomic_load(&me->sleepers)) /* a thread that has begun to sleep since */
                kv_set_bits(&me->head->asleep, kv_rank_bit(me->rank));
        }
        if (held || ready(context))
            return KV_READY;
        uint64_t now = kv_now_ns();
        if (now - me->looked > KV_NAP / 2 * KV_MILLISECOND)
            kv_detect_losses(me);
        int standing = kv_check_membership(me);
        if (standing != KV_READY)
            return ready(context) ? KV_READY : standing;
        if (now - start > KV_TICK_AFTER * KV_MILLISECOND)
            return KV_TICK;
    }
}

#endif
