/* Start and end of a worker's part in a region: creation of the region, registration of a rank, the heartbeat, the
 * return of a restarted worker, departure. */
#ifndef KV_REGION_H
#define KV_REGION_H

#include <signal.h>

#include "round.h"
#include "texts.h"

enum {
    KV_BEAT = 250, /* the longest pause between heartbeats, in milliseconds */
    KV_GOES_AFTER = 1000, /* milliseconds after which a worker leaves although other threads are at work */
    KV_FIRST_INDEX = 8 /* log2 of the first hash table's length */
};

#define KV_SPARE_ADDRESSES ((size_t)64 << 20) /* bytes of address space for stacks and heaps */

static uint64_t kv_round_up(uint64_t bytes)
{
    return (bytes + KV_PAGE - 1) & ~(KV_PAGE - 1);
}

/* Whether the process has address space left for the heartbeat's thread and other needs. */
static int kv_has_address_space(void)
{
    void *room = mmap(NULL, KV_SPARE_ADDRESSES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return room != MAP_FAILED && !munmap(room, KV_SPARE_ADDRESSES);
}

/* Map the region, and as much address space beyond it, for its growth, as the process may use: at least `least`
 * bytes. Pages that are not reserved are not touched. On success `me` owns the descriptor. -1: there is no address
 * space; `me` is unchanged, and the descriptor is the caller's. */
static int kv_map_region(kv_self *me, int fd, uint64_t window, uint64_t least)
{
    for (; window >= least; window /= 2) {
        void *base = mmap(NULL, window, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (base != MAP_FAILED && !kv_has_address_space()) {
            munmap(base, window);
        } else if (base != MAP_FAILED) {
            me->base = (char *)base;
            me->head = (kv_header *)base;
            me->window = window;
            me->fd = fd;
            return 0;
        }
    }
    return -1;
}

/* Unmap the region. No thread may use it any more; the heartbeat is stopped, or else the memory stays mapped. */
static void kv_unmap_region(kv_self *me)
{
    if (me->base && !me->heartbeat_runs)
        munmap(me->base, me->window);
    me->base = NULL;
}

/* Write the header of a new region, of which `reserved` bytes are reserved. Only its founder calls this. The magic is
 * written last. -1: there is no memory. */
static int kv_create_region(kv_self *me, uint64_t reserved)
{
    kv_header *head = me->head;
    head->version = KV_LAYOUT_VERSION;
    head->size = sizeof(kv_header);
    head->n_workers = (uint64_t)me->size;
    head->guard = head->last_guard = KV_GUARD;
    kv_put(&head->reserved, reserved);
    kv_put(&head->window, me->window);
    kv_put(&head->top, kv_round_up(sizeof(kv_header)));
    if (kv_grow_table(me, KV_FIRST_INDEX))
        return -1;
    kv_put((_Atomic uint64_t *)&head->magic, KV_MAGIC);
    return 0;
}

/* Whether the mapped memory is a complete region of this version. Needs no registered worker. */
static int kv_is_region(const kv_self *me)
{
    return kv_get((const _Atomic uint64_t *)&me->head->magic) == KV_MAGIC &&
           me->head->version == KV_LAYOUT_VERSION && me->head->size == sizeof(kv_header);
}

/* Limit the growth of the region to what this process has mapped. Needs no registered worker. 0: the region is larger
 * already. */
static int kv_narrow_window(kv_self *me)
{
    uint64_t now;
    do
        now = kv_get(&me->head->window);
    while (now > me->window && !kv_swap(&me->head->window, now, me->window));
    kv_fence(); /* a worker that has grown the region checks this limit afterwards */
    return kv_get(&me->head->top) <= me->window;
}

/* Write a heartbeat. If the previous heartbeat is late, this process was stopped, and for `me->silence` it declares
 * no other worker lost. */
static void kv_write_heartbeat(kv_self *me, uint64_t now)
{
    if (now - kv_get(&me->worker->beat) > kv_longest_own_delay(me))
        kv_put(&me->lenient_until, now + me->silence);
    kv_put(&me->worker->beat, now);
}

/* The heartbeat's thread: a long computation that holds the interpreter's lock does not stop it. */
static void *kv_heartbeat(void *self)
{
    kv_self *me = (kv_self *)self;
    uint64_t usual = KV_BEAT * KV_MILLISECOND, pause = me->silence / 20 < usual ? me->silence / 20 : usual;
    pthread_mutex_lock(&me->heartbeat_lock);
    while (!me->heartbeat_stop) {
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += (long)pause;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        kv_write_heartbeat(me, kv_now_ns());
        pthread_cond_timedwait(&me->heartbeat_wake, &me->heartbeat_lock, &until);
    }
    pthread_mutex_unlock(&me->heartbeat_lock);
    return NULL;
}

/* Start the heartbeat's thread, which blocks all signals. Needs a registered worker. -1: no thread can be started. */
static int kv_start_heartbeat(kv_self *me)
{
    sigset_t all, before;
    pthread_condattr_t clock;
    kv_put(&me->worker->beat, kv_now_ns());
    pthread_mutex_init(&me->heartbeat_lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&me->heartbeat_wake, &clock);
    pthread_condattr_destroy(&clock);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are delivered to the program's own threads */
    me->heartbeat_stop = 0;
    me->heartbeat_runs = pthread_create(&me->heartbeat, NULL, kv_heartbeat, me) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return me->heartbeat_runs ? 0 : -1;
}

/* Stop the heartbeat's thread and wait for its end. Does nothing if there is none, or in a fork. */
static void kv_stop_heartbeat(kv_self *me)
{
    if (!me->heartbeat_runs || me->forked)
        return;
    pthread_mutex_lock(&me->heartbeat_lock);
    me->heartbeat_stop = 1;
    pthread_cond_signal(&me->heartbeat_wake);
    pthread_mutex_unlock(&me->heartbeat_lock);
    pthread_join(me->heartbeat, NULL);
    me->heartbeat_runs = 0;
}

/* Return the state word of this incarnation. */
static uint64_t kv_state_word(const kv_self *me, enum kv_worker_state state)
{
    return me->incarnation << 32 | (uint64_t)state;
}

/* Register this process with its rank. The caller is the only thread. 1: a living process has the rank, and nothing
 * has changed but `me->worker`. */
static int kv_register(kv_self *me)
{
    kv_worker *w = &me->head->worker[me->rank];
    uint64_t state = kv_get(&w->state);
    me->worker = w;
    if (kv_is_present(state) && !kv_process_ended(me, me->rank))
        return 1;
    kv_mark_lost(me, me->rank, state);
    me->incarnation = kv_get(&w->incarnation) + 1;
    kv_put(&w->pid, (uint64_t)getpid());
    kv_put(&w->started, kv_process_start((uint64_t)getpid()));
    kv_put(&w->probe, (uint64_t)(uintptr_t)&me->word);
    kv_put(&w->beat, kv_now_ns());
    kv_put(&w->whole, kv_get(&w->calls)); /* pushes of an earlier process count, even if its call is incomplete */
    kv_put(&w->incarnation, me->incarnation);
    kv_put(&w->state, kv_state_word(me, KV_COMING)); /* from now on the death of this process is detected */
    return 0;
}

/* Make this worker a member: rounds wait for it. Acquires the region's lock (see kv_drop_departed), and blocks and fails
 * as `kv_lock_region` does; then nothing has changed. */
static int kv_make_member(kv_self *me)
{
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    kv_set_state(me, KV_ALIVE);
    kv_clear_bits(&me->head->lost, kv_rank_bit(me->rank));
    if (kv_get(&me->head->first_lost) == (uint64_t)me->rank + 1)
        kv_put(&me->head->first_lost, 0);
    kv_set_bits(&me->head->members, kv_rank_bit(me->rank));
    kv_add(&me->head->epoch, 1);
    kv_unlock_region(me);
    return KV_READY;
}

/* Return of a rank, first step, before it is a member: complete or undo what its earlier process has left in a key.
 * The caller holds the region's lock. */
static void kv_end_earlier_process(kv_self *me, kv_entry *e)
{
    kv_call call = {.entry = e};
    uint64_t phase = kv_get(&e->phase), round = kv_round_of(phase);
    if (kv_step_of(phase) == KV_OPENING && kv_opener_of(phase) == me->rank) { /* if no worker has replaced the opener
                                                                               * by now */
        uint64_t held = kv_become_opener(me, e, phase);
        if (held) {
            kv_undo(me, e, round);
            kv_release_key(me, e, held, 0);
            kv_end_work(me);
        }
    }
    for (uint64_t c = 0; kv_step_of(phase) == KV_OPEN && c < e->chunks; c++) {
        if (kv_get(&kv_chunk_words(me, e)[c]) != kv_chunk_word(round, me->rank, KV_CLAIMED))
            continue;
        kv_recover_chunk(me, &call, me->rank, phase, c);
    }
}

#define KV_NEVER (1ull << 47)

/* Return of a rank: rounds of the key wait for it only from its first push on, which is into the round after the
 * latest one that any worker has pushed into. A worker that finds a round complete has pushed into it before it reads
 * `first`; so no later round is missed. */
static void kv_rejoin_key(kv_self *me, kv_entry *e)
{
    kv_part *part = kv_key_parts(me, e);
    uint64_t latest = 0;
    kv_put(&part[me->rank].first, 0); /* no round of the key completes before the next store */
    kv_fence();
    for (int w = 0; w < me->size; w++) {
        uint64_t even = kv_get(&part[w].pushed[0]), odd = kv_get(&part[w].pushed[1]);
        latest = even > latest ? even : latest;
        latest = odd > latest ? odd : latest;
    }
    kv_put(&part[me->rank].first, latest + 1);
    kv_put(&part[me->rank].arrived, latest);
    kv_wake_all(me);
}

/* Whether all members but newcomers have pushed into a round. */
static int kv_have_others_arrived(kv_self *me, const kv_entry *e, uint64_t round)
{
    const kv_part *part = kv_key_parts(me, e);
    uint64_t newcomers = kv_get(&me->head->newcomers) | kv_rank_bit(me->rank);
    uint64_t members = kv_get(&me->head->members) & ~newcomers;
    for (int w = 0; w < me->size; w++)
        if (members >> w & 1 && kv_get(&part[w].first) <= round && kv_get(&part[w].pushed[round & 1]) < round)
            return 0;
    return 1;
}

/* Return of a rank, repeated step. The other workers are in the middle of a pass over their keys, and this worker
 * begins one. It is in step once all of them wait in the round of the key that it pushes into first; until then it
 * lets the rounds of all other keys, and barriers, continue without it. A worker that has pushed into a later key of
 * the same pass has pushed into the first key before: so the first key is read last. Does not block. Returns whether
 * this worker is in step. */
static int kv_catch_up(kv_self *me, kv_entry *first)
{
    kv_detect_losses(me);
    uint64_t n = kv_get(&me->head->n_keys), least = ~0ull, round;
    uint64_t others = kv_get(&me->head->members) & ~kv_get(&me->head->newcomers) & ~kv_rank_bit(me->rank);
    for (uint64_t i = 0; i < n; i++) {
        kv_entry *e = kv_entry_at(me, i);
        if (e != first && kv_get(&kv_key_parts(me, e)[me->rank].first) == KV_NEVER)
            kv_rejoin_key(me, e);
    }
    if (kv_get(&kv_key_parts(me, first)[me->rank].first) == KV_NEVER) /* after the keys that the other workers push into
                                                                   * later */
        kv_rejoin_key(me, first);
    round = kv_get(&kv_key_parts(me, first)[me->rank].first);
    for (uint64_t i = 0; i < n && !kv_have_others_arrived(me, first, round); i++) {
        kv_entry *e = kv_entry_at(me, i);
        kv_part *mine = &kv_key_parts(me, e)[me->rank];
        uint64_t next = kv_get(&mine->first);
        if (e == first || !kv_have_others_arrived(me, e, next) || kv_have_others_arrived(me, first, round))
            continue;
        kv_put(&mine->first, next + 1);
        kv_put(&mine->arrived, next);
        kv_wake_all(me);
    }
    for (int w = 0; w < me->size; w++) {
        uint64_t reached = kv_get(&me->head->worker[w].barriers);
        least = others >> w & 1 && reached < least ? reached : least;
    }
    if (others && least > kv_get(&me->worker->barriers)) {
        kv_put(&me->worker->barriers, least);
        kv_wake_all(me);
    }
    if (!kv_have_others_arrived(me, first, round))
        return 0;
    kv_clear_bits(&me->head->newcomers, kv_rank_bit(me->rank));
    return 1;
}

/* Whether this worker can read the private memory of another. */
static int kv_can_read_peer(kv_self *me, int w)
{
    uint64_t word = 0;
    return kv_read_peer(me, w, kv_get(&me->head->worker[w].probe), (char *)&word, sizeof word) == 0 && word == KV_MAGIC;
}

/* Replace an earlier process of this rank: no round waits for this worker before it pushes. Needs a registered
 * worker. Acquires the region's lock, and blocks and fails as `kv_lock_region` does; the caller can repeat the call. */
static int kv_rejoin(kv_self *me)
{
    uint64_t barriers = 0, n = kv_get(&me->head->n_keys);
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    for (uint64_t i = 0; i < n; i++)
        kv_end_earlier_process(me, kv_entry_at(me, i));
    kv_put(&me->worker->log.entry, 0);
    kv_unlock_region(me);
    /* Barriers that other workers wait at complete without it, too. */
    for (int w = 0; w < me->size; w++) {
        uint64_t reached = kv_get(&me->head->worker[w].barriers);
        barriers = reached > barriers ? reached : barriers;
    }
    kv_put(&me->worker->barriers, barriers);
    /* This is set first: if the death is not yet recorded, another restarted worker would find it in some keys only. */
    kv_set_bits(&me->head->newcomers, kv_rank_bit(me->rank));
    for (uint64_t i = 0; i < n; i++)
        kv_put(&kv_key_parts(me, kv_entry_at(me, i))[me->rank].first, KV_NEVER);
    return kv_make_member(me);
}

typedef struct {
    kv_self *me;
    uint64_t number;
} kv_barrier;

/* A condition: every member has reached the barrier. The context is a `kv_barrier`. */
static int kv_barrier_complete(void *context)
{
    const kv_barrier *barrier = (const kv_barrier *)context;
    uint64_t members = kv_get(&barrier->me->head->members);
    for (int w = 0; w < barrier->me->size; w++)
        if (members >> w & 1 && kv_get(&barrier->me->head->worker[w].barriers) < barrier->number)
            return 0;
    return 1;
}

typedef struct {
    kv_self *me;
    uint64_t n;
} kv_growth;

/* A condition: there are more than `n` keys. The context is a `kv_growth`. */
static int kv_has_grown(void *context)
{
    const kv_growth *growth = (const kv_growth *)context;
    return kv_get(&growth->me->head->n_keys) > growth->n;
}

/* Describe a wait at a barrier: the lowest rank that is missing. */
static kv_about kv_about_barrier(const void *context)
{
    const kv_barrier *barrier = (const kv_barrier *)context;
    uint64_t members = kv_get(&barrier->me->head->members);
    int whom = KV_NOBODY;
    for (int w = barrier->me->size - 1; w >= 0; w--)
        if (members >> w & 1 && kv_get(&barrier->me->head->worker[w].barriers) < barrier->number)
            whom = w;
    return (kv_about){KV_NO_SLICE, barrier->number, 0, whom, barrier->me->store};
}

/* Describe a wait for a new key: the lowest member makes the keys. */
static kv_about kv_about_growth(const void *context)
{
    const kv_growth *growth = (const kv_growth *)context;
    uint64_t members = kv_get(&growth->me->head->members);
    int whom = members ? __builtin_ctzll(members) : KV_NOBODY;
    return (kv_about){growth->n, 0, 0, whom, growth->me->store};
}

/* A condition: every rank has a worker that is or was a member. The context is a `kv_self`. */
static int kv_all_registered(void *context)
{
    kv_self *me = (kv_self *)context;
    for (int w = 0; w < me->size; w++)
        if (kv_worker_state(me, w) == KV_ABSENT || kv_worker_state(me, w) == KV_COMING)
            return 0;
    return 1;
}

/* Set the state of a worker that leaves, when no other thread of this process is at work: another worker would
 * complete what that thread is changing. The other thread may be in an updater of the user for a long time, so this
 * blocks for KV_GOES_AFTER at most. 0: this worker is fenced, and nothing has changed. */
static int kv_leave_when_idle(kv_self *me, enum kv_worker_state state)
{
    const struct timespec nap = {0, KV_MILLISECOND / 5};
    uint64_t end = kv_now_ns() + KV_GOES_AFTER * KV_MILLISECOND, now;
    do {
        while (kv_is_at_work(now = kv_get(&me->worker->state)) && kv_now_ns() < end)
            nanosleep(&nap, NULL);
        if (!kv_is_present(now) || kv_is_fenced(me, now))
            return 0;
    } while (!kv_swap(&me->worker->state, now, (now & ~0xffull) | (uint64_t)state));
    return 1;
}

/* Leave, declare this worker lost, or stop taking part in rounds (KV_JOINED); the other workers continue without it.
 * Blocks as `kv_leave_when_idle` does, but for KV_JOINED. Does nothing if this worker is fenced. */
static void kv_deregister(kv_self *me, enum kv_worker_state state)
{
    if (state == KV_JOINED)
        kv_put(&me->worker->joined, me->incarnation);
    if (state == KV_JOINED ? kv_set_state(me, state) : kv_leave_when_idle(me, state)) {
        kv_drop_departed(me); /* if another worker holds the lock, that worker does this later */
        kv_add(&me->head->epoch, 1);
        kv_wake_all(me);
    }
}

/* Give up the descriptors for the caller to close; returns their number. Other threads of the process may still wait,
 * or grow the region: they use the descriptors under `me->busy`, and find none afterwards. A fork has no other
 * threads, and may have inherited a locked mutex. Blocks on `me->busy`. */
static int kv_give_up_descriptors(kv_self *me, int *given)
{
    int n = 0;
    if (!me->forked)
        pthread_mutex_lock(&me->busy);
    me->blind = 1;
    given[n++] = me->fd;
    me->fd = -1;
    for (int w = 0; w < KV_MAX_WORKERS; w++) {
        if (me->pidfd[w] >= 0)
            given[n++] = me->pidfd[w];
        me->pidfd[w] = -1;
    }
    if (!me->forked)
        pthread_mutex_unlock(&me->busy);
    return n;
}

/* Let no round or barrier wait for this worker any more, while it is still present: the last step before it leaves.
 * `is_last`: no member remains. This happens under the region's lock, so that exactly one of the leaving workers is
 * the last, and opens the rounds that no other worker will open. Blocks and fails as `kv_lock_region` does. */
static int kv_retire(kv_self *me)
{
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    int was = kv_worker_state(me, me->rank) == KV_ALIVE && kv_set_state(me, KV_JOINED);
    kv_record_departed(me);
    me->is_last = was && !kv_get(&me->head->members);
    kv_unlock_region(me);
    return KV_READY;
}

#endif
