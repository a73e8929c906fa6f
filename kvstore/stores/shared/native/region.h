/* Beginning and end: making the region, taking a rank in it, the heartbeat. */
#ifndef KV_REGION_H
#define KV_REGION_H

#include <signal.h>

#include "round.h"
#include "texts.h"

enum {
    KV_BEAT = 250, /* milliseconds, or less */
    KV_GOES_AFTER = 1000, /* milliseconds, however long other threads are at work */
    KV_FIRST_INDEX = 8 /* log2 of the first hash table's length */
};

#define KV_ROOM ((size_t)64 << 20) /* bytes of addresses for stacks and heaps */

static uint64_t kv_round_up(uint64_t bytes)
{
    return (bytes + KV_PAGE - 1) & ~(KV_PAGE - 1);
}

/* Whether the process may address what the heartbeat's thread, and others, need. */
static int kv_has_room(void)
{
    void *room = mmap(NULL, KV_ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return room != MAP_FAILED && !munmap(room, KV_ROOM);
}

/* Map as much of the region's future as the process may address; what is not reserved yet is not touched. */
static int kv_map_region(kv_self *me, int fd, uint64_t window, uint64_t least)
{
    for (; window >= least; window /= 2) {
        void *base = mmap(NULL, window, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (base != MAP_FAILED && !kv_has_room()) {
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

static void kv_unmap_region(kv_self *me)
{
    if (me->base && !me->heartbeat_runs)
        munmap(me->base, me->window);
    me->base = NULL;
}

/* Write the header into a new region whose first bytes are reserved. The magic comes last. */
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

static int kv_is_region(const kv_self *me)
{
    return kv_get((const _Atomic uint64_t *)&me->head->magic) == KV_MAGIC &&
           me->head->version == KV_LAYOUT_VERSION && me->head->size == sizeof(kv_header);
}

/* Have the region grow no further than this process can follow. 0: it has grown further already. */
static int kv_narrow_window(kv_self *me)
{
    uint64_t now;
    do
        now = kv_get(&me->head->window);
    while (now > me->window && !kv_swap(&me->head->window, now, me->window));
    kv_fence(); /* who grows it looks again at how far it may, after it has */
    return kv_get(&me->head->top) <= me->window;
}

static void kv_beat(kv_self *me, uint64_t now)
{
    if (now - kv_get(&me->worker->beat) > kv_still(me))
        kv_put(&me->forgives, now + me->silence);
    kv_put(&me->worker->beat, now);
}

/* The heartbeat has a thread of its own: a long computation that holds the interpreter does not stop it. */
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
        kv_beat(me, kv_now_ns());
        pthread_cond_timedwait(&me->heartbeat_wake, &me->heartbeat_lock, &until);
    }
    pthread_mutex_unlock(&me->heartbeat_lock);
    return NULL;
}

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
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the program's own threads */
    me->heartbeat_stop = 0;
    me->heartbeat_runs = pthread_create(&me->heartbeat, NULL, kv_heartbeat, me) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return me->heartbeat_runs ? 0 : -1;
}

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

static uint64_t kv_life(const kv_self *me, enum kv_state state)
{
    return me->incarnation << 32 | (uint64_t)state;
}

/* Take the rank. 1: another living process has it. */
static int kv_register(kv_self *me)
{
    kv_worker *w = &me->head->worker[me->rank];
    uint64_t state = kv_get(&w->state);
    me->worker = w;
    if (kv_here(state) && !kv_ended(me, me->rank))
        return 1;
    kv_mark_lost(me, me->rank, state);
    me->incarnation = kv_get(&w->incarnation) + 1;
    kv_put(&w->pid, (uint64_t)getpid());
    kv_put(&w->started, kv_started((uint64_t)getpid()));
    kv_put(&w->probe, (uint64_t)(uintptr_t)&me->word);
    kv_put(&w->beat, kv_now_ns());
    kv_put(&w->whole, kv_get(&w->calls)); /* what an earlier process has pushed counts, with the rest or without */
    kv_put(&w->incarnation, me->incarnation);
    kv_put(&w->state, kv_life(me, KV_COMING)); /* from now on this process's death is noticed */
    return 0;
}

/* Be a member from now on: rounds wait for this worker. Under the lock: see kv_write_off. */
static int kv_enlist(kv_self *me)
{
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    kv_become(me, KV_ALIVE);
    kv_clear_bits(&me->head->lost, kv_bit(me->rank));
    if (kv_get(&me->head->first_lost) == (uint64_t)me->rank + 1)
        kv_put(&me->head->first_lost, 0);
    kv_set_bits(&me->head->members, kv_bit(me->rank));
    kv_add(&me->head->epoch, 1);
    kv_unlock_region(me);
    return KV_READY;
}

/* A rank comes back, first step, before it is a member: end what its earlier process was in the middle of. */
static void kv_clean_up(kv_self *me, kv_entry *e)
{
    kv_call call = {.entry = e};
    uint64_t phase = kv_get(&e->phase), round = kv_round_of(phase);
    if (kv_step_of(phase) == KV_OPENING && kv_opener_of(phase) == me->rank) { /* if nobody has taken it over by now */
        uint64_t held = kv_seize(me, e, phase);
        if (held) {
            kv_undo(me, e, round);
            kv_return(me, e, held, 0);
            kv_end_work(me);
        }
    }
    for (uint64_t c = 0; kv_step_of(phase) == KV_OPEN && c < e->chunks; c++) {
        if (kv_get(&kv_map(me, e)[c]) != kv_chunk_word(round, me->rank, KV_TAKEN))
            continue;
        kv_take_over(me, &call, me->rank, phase, c);
    }
}

#define KV_NEVER (1ull << 47)

/* From its first push on: every round of a key that anybody has pushed into goes on without it. Who finds a round
 * complete has pushed into it before looking at `first`; so no round from here on is missed. */
static void kv_rejoin_key(kv_self *me, kv_entry *e)
{
    kv_part *part = kv_parts(me, e);
    uint64_t latest = 0;
    kv_put(&part[me->rank].first, 0); /* no round of the key becomes complete meanwhile */
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

/* Whether all who take part have pushed into a round, newcomers aside. */
static int kv_others_in(kv_self *me, const kv_entry *e, uint64_t round)
{
    const kv_part *part = kv_parts(me, e);
    uint64_t newcomers = kv_get(&me->head->newcomers) | kv_bit(me->rank);
    uint64_t members = kv_get(&me->head->members) & ~newcomers;
    for (int w = 0; w < me->size; w++)
        if (members >> w & 1 && kv_get(&part[w].first) <= round && kv_get(&part[w].pushed[round & 1]) < round)
            return 0;
    return 1;
}

/* The others are in the middle of a pass over their keys when a rank comes back, and it begins one. It is in step once
 * all of them wait in the round of the key that it pushes into first; until then it lets the rounds of all other keys,
 * and barriers, go on without it. Whoever has pushed into a later key of the same pass has pushed into the first one
 * before: so that is looked at last. 1: in step. */
static int kv_catch_up(kv_self *me, kv_entry *first)
{
    kv_look_around(me);
    uint64_t n = kv_get(&me->head->n_keys), least = ~0ull, round;
    uint64_t others = kv_get(&me->head->members) & ~kv_get(&me->head->newcomers) & ~kv_bit(me->rank);
    for (uint64_t i = 0; i < n; i++) {
        kv_entry *e = kv_entry_at(me, i);
        if (e != first && kv_get(&kv_parts(me, e)[me->rank].first) == KV_NEVER)
            kv_rejoin_key(me, e);
    }
    if (kv_get(&kv_parts(me, first)[me->rank].first) == KV_NEVER) /* after those that the others push into later */
        kv_rejoin_key(me, first);
    round = kv_get(&kv_parts(me, first)[me->rank].first);
    for (uint64_t i = 0; i < n && !kv_others_in(me, first, round); i++) {
        kv_entry *e = kv_entry_at(me, i);
        kv_part *mine = &kv_parts(me, e)[me->rank];
        uint64_t next = kv_get(&mine->first);
        if (e == first || !kv_others_in(me, e, next) || kv_others_in(me, first, round))
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
    if (!kv_others_in(me, first, round))
        return 0;
    kv_clear_bits(&me->head->newcomers, kv_bit(me->rank));
    return 1;
}

/* Whether this worker can read another's own memory. */
static int kv_can_read_peer(kv_self *me, int w)
{
    uint64_t word = 0;
    return kv_read_peer(me, w, kv_get(&me->head->worker[w].probe), (char *)&word, sizeof word) == 0 && word == KV_MAGIC;
}

/* Take the place of an earlier process of this rank; no round waits for it before it pushes. */
static int kv_rejoin(kv_self *me)
{
    uint64_t barriers = 0, n = kv_get(&me->head->n_keys);
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    for (uint64_t i = 0; i < n; i++)
        kv_clean_up(me, kv_entry_at(me, i));
    kv_put(&me->worker->log.entry, 0);
    kv_unlock_region(me);
    /* Barriers that others wait at go on without it, too. */
    for (int w = 0; w < me->size; w++) {
        uint64_t reached = kv_get(&me->head->worker[w].barriers);
        barriers = reached > barriers ? reached : barriers;
    }
    kv_put(&me->worker->barriers, barriers);
    /* First: if its death is not written off yet, another that comes back would see it in some keys only. */
    kv_set_bits(&me->head->newcomers, kv_bit(me->rank));
    for (uint64_t i = 0; i < n; i++)
        kv_put(&kv_parts(me, kv_entry_at(me, i))[me->rank].first, KV_NEVER);
    return kv_enlist(me);
}

typedef struct {
    kv_self *me;
    uint64_t number;
} kv_barrier;

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

static int kv_has_grown(void *context)
{
    const kv_growth *growth = (const kv_growth *)context;
    return kv_get(&growth->me->head->n_keys) > growth->n;
}

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

/* The lowest member makes the keys. */
static kv_about kv_about_growth(const void *context)
{
    const kv_growth *growth = (const kv_growth *)context;
    uint64_t members = kv_get(&growth->me->head->members);
    int whom = members ? __builtin_ctzll(members) : KV_NOBODY;
    return (kv_about){growth->n, 0, 0, whom, growth->me->store};
}

static int kv_all_registered(void *context)
{
    kv_self *me = (kv_self *)context;
    for (int w = 0; w < me->size; w++)
        if (kv_state(me, w) == KV_ABSENT || kv_state(me, w) == KV_COMING)
            return 0;
    return 1;
}

/* Go once no other thread of this process is at work: what it changes then, another takes over. It may be long at it,
 * in an updater of the user's: some time is enough. */
static int kv_go(kv_self *me, enum kv_state state)
{
    const struct timespec nap = {0, KV_MILLISECOND / 5};
    uint64_t end = kv_now_ns() + KV_GOES_AFTER * KV_MILLISECOND, now;
    do {
        while (kv_is_at_work(now = kv_get(&me->worker->state)) && kv_now_ns() < end)
            nanosleep(&nap, NULL);
        if (!kv_here(now) || kv_is_out(me, now))
            return 0;
    } while (!kv_swap(&me->worker->state, now, (now & ~0xffull) | (uint64_t)state));
    return 1;
}

/* Leave, be lost, or stop taking part in rounds; the others go on without this worker. */
static void kv_deregister(kv_self *me, enum kv_state state)
{
    if (state == KV_JOINED)
        kv_put(&me->worker->joined, me->incarnation);
    if (state == KV_JOINED ? kv_become(me, state) : kv_go(me, state)) {
        kv_write_off(me); /* where the lock is held by another: the others do */
        kv_add(&me->head->epoch, 1);
        kv_wake_all(me);
    }
}

/* Hand out the descriptors for the caller to close; returns how many. Other threads of the process may still be in a
 * wait, or grow the region: they use them under this lock, and find none afterwards. A fork has no other threads, and
 * may have inherited the lock as it was held. */
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

/* Be waited for no longer, and still be here: the last step before leaving. `is_last`: now nobody is waited for. Under
 * the lock, so that one of all who leave is the last, and sees what nobody else will open. */
static int kv_rest(kv_self *me)
{
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    int was = kv_state(me, me->rank) == KV_ALIVE && kv_become(me, KV_JOINED);
    kv_note_gone(me);
    me->is_last = was && !kv_get(&me->head->members);
    kv_unlock_region(me);
    return KV_READY;
}

#endif
