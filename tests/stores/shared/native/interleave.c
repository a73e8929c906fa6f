/* The protocol of the shared region, run through seeded interleavings.
 *
 * The headers of kvstore/stores/shared/native are compiled as they are. Each worker is a coroutine, and KV_STEP, which stands before
 * every atomic step, may switch to another coroutine; copies and sums switch between their elements, too. The system
 * calls below are stand-ins: a process is a bit, and sleeping means not being chosen. A worker dies by not being
 * resumed, and is stopped by not being resumed for some time, without a heartbeat. Programmes are those of the store's
 * Python (backend.py, rounds.pxi), in short.
 *
 *   interleave FIRST COUNT [-v]    run the seeds FIRST to FIRST + COUNT - 1; 1 and a report at the first violation
 *
 * What is checked: whenever a round closes, the value in use is the sum, or the update by the sum, of exactly the
 * values pushed into it; rounds close in order and once; a worker receives a whole round's value; no worker waits for
 * ever, or sleeps when its condition already holds; no worker arrives at a round that is complete; the lock and the
 * logs are free at the end.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static void step(void);
#define KV_STEP() step()

#include "layout.h"

/* A few elements are many chunks, and a chunk is several blocks of an update. */
#define KV_SHARE_BYTES (2 * 8)
#define KV_SMALL_KEY (3 * 8)
#define KV_LOG_ELEMENTS 1
#define KV_READ_TRIES 1
#define KV_BLOCK_KEYS 2

enum { WORKERS = 4, KEYS = 2, ELEMENTS = 9, ROUNDS = 5, VERSIONS = 32, PROCESSES = 64, REGION = 4 << 20, TAIL = 40 };

static const char *spot_in = "";
static int spot_line;
#define SPOT(call) (spot_in = __func__, spot_line = __LINE__, call)
#define kv_get(word) SPOT(kv_get(word))
#define kv_put(word, value) SPOT(kv_put(word, value))
static int noted_swap(_Atomic uint64_t *word, uint64_t old, uint64_t value, const char *in);
#define kv_swap(word, old, value) SPOT(noted_swap(word, old, value, __func__))
#define kv_set_bits(word, bits) SPOT(kv_set_bits(word, bits))
#define kv_clear_bits(word, bits) SPOT(kv_clear_bits(word, bits))
#define kv_add(word, more) SPOT(kv_add(word, more))

/* Stand-ins for the system. The number of a process is the descriptor that watches it. */
static char process_lives[PROCESSES];
static uint64_t memory_goes[PROCESSES], steps;
static int at_work_on_memory(void), own_process(void);
static void end_process(int pid);

static long stand_in_syscall(long number, ...)
{
    va_list rest;
    va_start(rest, number);
    int pid = number == SYS_pidfd_open || number == SYS_pidfd_send_signal ? va_arg(rest, int) : 0;
    va_end(rest);
    if (number == SYS_pidfd_send_signal)
        end_process(pid);
    if (number != SYS_pidfd_open)
        return 0;
    errno = ESRCH;
    return process_lives[pid] ? pid : -1;
}

static void copy(void *to, const void *from, size_t bytes)
{
    if (bytes % 8 || !at_work_on_memory()) {
        memcpy(to, from, bytes);
        return;
    }
    for (size_t i = 0; i < bytes / 8; i++) {
        SPOT(step());
        ((uint64_t *)to)[i] = ((const uint64_t *)from)[i];
    }
}

/* The memory of a killed process is freed some time after the others know of the death. */
static ssize_t stand_in_readv(int pid, const struct iovec *here, const struct iovec *there)
{
    if (!process_lives[pid] && steps >= memory_goes[pid])
        return -1;
    copy(here->iov_base, there->iov_base, here->iov_len);
    return process_lives[pid] || steps < memory_goes[pid] ? (ssize_t)here->iov_len : -1;
}

#define syscall(...) stand_in_syscall(__VA_ARGS__)
#define poll(watched, n, timeout) ((watched)->revents = POLLIN, !process_lives[(watched)->fd])
#define process_vm_readv(pid, here, n, there, m, flags) stand_in_readv(pid, here, there)
#define clock_gettime(clock, t) (*(t) = (struct timespec){1, 0})
#define getpid() own_process()
#define fopen(path, mode) NULL
#define close(fd) ((void)(fd))
#define kill(pid, number) 0
#define sched_yield() step()
#define memcpy(to, from, bytes) copy(to, from, bytes)
#define pthread_mutex_lock(mutex) ((void)(mutex)) /* each worker is one thread here */
#define pthread_mutex_unlock(mutex) ((void)(mutex))
#define pthread_mutex_trylock(mutex) ((void)(mutex), 0)

/* Waiting is not being chosen: everything that waits calls this one. */
#define kv_wait kv_wait_asleep
#include "wait.h"
#undef kv_wait
static int kv_wait(kv_self *me, kv_condition ready, void *context);

#include "reading.h"
#include "region.h"

/* -------------------------------------------------------------------------------------------------- the world */

typedef struct {
    jmp_buf start, at;
    ucontext_t context;
    char *stack;
    kv_self self;
    int lives, done, begun, parked, pid, told, stopped, was_stopped, interrupted;
    uint64_t wakes_at;
    uint32_t futex;
    kv_condition ready;
    void *ready_context;
    uint64_t salt; /* of its pushed values: another for each life */
    uint64_t bounce[WORKERS * (KV_SHARE_BYTES + 256) / 8];
    uint64_t private[ELEMENTS], out[2][ELEMENTS];
    uint64_t home[KEYS][4], undo[KEYS];
    const char *doing;
} worker;

typedef struct {
    uint64_t value[ELEMENTS], state[ELEMENTS], round;
} version;

typedef struct {
    kv_entry *e;
    uint64_t n, last_phase, updates, state;
    uint64_t salt[WORKERS][ROUNDS + 4]; /* of the value pushed into a round; 0: none was */
    unsigned in[ROUNDS + 4];            /* the workers in it when it closed */
    int closing[ROUNDS + 4];            /* the version that it left */
    version of[VERSIONS];
    int versions;
    uint64_t overwriting[ELEMENTS];
    int overwriter;
} key;

/* The draws of a seed. */
static struct {
    int workers, keys, steps, go_on, updates, by_hand, overwrites, joiner, join_after, deaths, returns, pace, calls, stops;
    int in_place, reads; /* by hand in place; reads besides those of calls */
    int order[2 * ROUNDS];
    uint64_t fate_at;
    const char *fate_in;
    int fate_in_count;
} plan;

static worker all[WORKERS], *running;
static key keys[KEYS];
static char *region;
static uint64_t seed, state_of_chance, naps, used;
static int budget, quiet = 1, verbose, died, pids, gave_up;
static jmp_buf home;
static char broken[512];
static struct {
    uint64_t rounds, steps, deaths, returns, updates, peer_reads, overwrites, joins, lost, failed, finished, in_place, calls;
    uint64_t updates_in_place, reads, again, held, stops, fenced, ended, interrupted;
} count;

static uint64_t chance(void)
{
    state_of_chance ^= state_of_chance << 13;
    state_of_chance ^= state_of_chance >> 7;
    state_of_chance ^= state_of_chance << 17;
    return state_of_chance * 0x2545f4914f6cdd1dull >> 16;
}

static int draw(int n) { return (int)(chance() % (uint64_t)n); }

static uint64_t mixed(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    return x ^ x >> 31;
}

static int rank_of(const worker *w) { return (int)(w - all); }
static int at_work_on_memory(void) { return !quiet; }
static int own_process(void) { return running->pid; }

static struct { int who, line; const char *in, *what; uint64_t a, b; } tail[TAIL];
static uint64_t noted;

static void note(const char *what, uint64_t a, uint64_t b)
{
    int i = (int)(noted++ % TAIL);
    tail[i].who = running ? rank_of(running) : -1;
    tail[i].line = spot_line;
    tail[i].in = spot_in;
    tail[i].what = what;
    tail[i].a = a;
    tail[i].b = b;
    if (verbose)
        printf("%6llu  worker %d  %-18s %4d  %s %llu %llu\n", (unsigned long long)steps, tail[i].who, spot_in,
               spot_line, what, (unsigned long long)a, (unsigned long long)b);
}

static void violation(const char *text, ...)
{
    va_list rest;
    va_start(rest, text);
    vsnprintf(broken, sizeof broken, text, rest);
    va_end(rest);
    quiet = 1;
    _longjmp(home, 1);
}

/* --------------------------------------------------------------------------------------------- the next worker */

static void kill_worker(worker *w);
static void stop_worker(worker *w);
static void wake_worker(worker *w);
static void bring_back(worker *w);

/* Deaths and returns, each some steps after the previous event. */
static void fates(void)
{
    static const int later[3] = {40, 400, 1500};
    worker *w = &all[draw(plan.workers)];
    plan.fate_at = steps + 1 + (uint64_t)draw(later[draw(3)]);
    int living = 0;
    for (int i = 0; i < plan.workers; i++)
        living += all[i].lives;
    if (w->lives && !w->done && plan.stops && living > 1) {
        plan.stops--;
        stop_worker(w);
    } else if (w->lives && plan.deaths && living > 1) {
        plan.deaths--;
        kill_worker(w);
    } else if (!w->lives && plan.returns) {
        plan.returns--;
        bring_back(w);
    } else if (!plan.deaths && !plan.stops && !(plan.returns && died))
        plan.fate_at = ~0ull;
}

/* All sleep: a worker that could continue must have been woken, or all wait for as long as its nap. */
static void check_futexes(worker **asleep, int m)
{
    quiet = 1;
    for (int i = 0; i < m && !died; i++)
        if (asleep[i]->ready(asleep[i]->ready_context))
            violation("worker %d sleeps, though what it waits for has come", rank_of(asleep[i]));
    quiet = 0;
}

static worker *chosen(void)
{
    worker *free_to_go[WORKERS], *asleep[WORKERS];
    int n = 0, m = 0, left = 0;
    for (worker *w = all; w < all + plan.workers; w++)
        if (w->lives && !w->done && w->stopped && steps >= w->wakes_at)
            wake_worker(w);
    for (worker *w = all; w < all + plan.workers; w++) {
        if (!w->lives || w->done || w->stopped)
            continue;
        left++;
        if (w->parked && atomic_load(&w->self.worker->futex) == w->futex)
            asleep[m++] = w;
        else
            free_to_go[n++] = w;
    }
    for (worker *w = all; !left && w < all + plan.workers; w++)
        if (w->lives && !w->done && w->stopped) {
            wake_worker(w);
            return w;
        }
    if (!left)
        return NULL;
    if (m && (!n || draw(24) == 0)) {
        if (!n && ++naps > 60 * WORKERS)
            violation("all wait for ever");
        if (!n)
            check_futexes(asleep, m);
        return asleep[draw(m)];
    }
    return free_to_go[draw(n)];
}

static void hand_over(void)
{
    worker *from = running;
    budget = 1 + draw(plan.pace);
    if (steps > 60000)
        violation("no end after %llu steps", (unsigned long long)steps);
    if (steps >= plan.fate_at)
        fates();
    worker *next = chosen();
    if (!next) {
        quiet = 1;
        _longjmp(home, 2);
    }
    if (next == from && from->begun)
        return;
    if (verbose)
        note("hands over to", (uint64_t)rank_of(next), 0);
    if (from && from->lives && !from->done && _setjmp(from->at))
        return;
    running = next;
    int first = !next->begun;
    next->begun = 1;
    _longjmp(first ? next->start : next->at, 1);
}

static void look_at_phase(key *k);

static void step(void)
{
    if (quiet)
        return;
    steps++;
    for (int i = 0; i < plan.keys; i++)
        if (atomic_load_explicit(&keys[i].e->phase, memory_order_relaxed) != keys[i].last_phase)
            look_at_phase(&keys[i]);
    if (plan.fate_in_count && !strcmp(plan.fate_in, spot_in) && --plan.fate_in_count == 0 && plan.deaths + plan.stops) {
        int living = 0;
        for (int i = 0; i < plan.workers; i++)
            living += all[i].lives;
        if (living > 1) {
            if (plan.stops) {
                plan.stops--;
                stop_worker(running);
            } else {
                plan.deaths--;
                kill_worker(running);
            }
            hand_over();
        }
    }
    if (--budget <= 0)
        hand_over();
}

/* kv_wait, with its sleep a turn of the other workers. */
static int kv_wait(kv_self *me, kv_condition ready, void *context)
{
    worker *w = running;
    for (int turn = 0;; turn++) {
        w->futex = atomic_load(&me->worker->futex);
        kv_set_bits(&me->head->asleep, kv_rank_bit(me->rank));
        int held = ready(context);
        if (!held) {
            w->ready = ready;
            w->ready_context = context;
            w->parked = 1;
            spot_in = __func__;
            hand_over();
            w->parked = 0;
        }
        kv_clear_bits(&me->head->asleep, kv_rank_bit(me->rank));
        if (held || ready(context)) {
            naps = 0;
            return KV_READY;
        }
        kv_detect_losses(me);
        int standing = kv_check_membership(me);
        if (standing != KV_READY)
            return ready(context) ? KV_READY : standing;
        if (turn && draw(8) == 0)
            return KV_TICK;
    }
}

/* --------------------------------------------------------------------------------------------------- the model */

static uint64_t gradient(uint64_t salt, const key *k, uint64_t round, uint64_t i)
{
    return mixed(salt << 32 ^ (uint64_t)(k - keys) << 24 ^ round << 8 ^ (i + 1));
}

/* The workers that have pushed into a round so far. */
static unsigned pushed_into(key *k, uint64_t round)
{
    unsigned in = 0;
    const kv_part *part = (const kv_part *)(region + k->e->parts);
    for (int w = 0; w < plan.workers; w++)
        if (k->salt[w][round] && atomic_load(&part[w].pushed[round & 1]) >= round)
            in |= 1u << w;
    return in;
}

static uint64_t summed(const key *k, uint64_t round, unsigned in, uint64_t i)
{
    uint64_t sum = 0;
    for (int w = 0; w < plan.workers; w++)
        if (in >> w & 1)
            sum += gradient(k->salt[w][round], k, round, i);
    return sum;
}

static uint64_t updated(uint64_t weight, uint64_t state, uint64_t sum, uint64_t t) { return 3 * weight + sum + state + 7 * t; }
static uint64_t moved(uint64_t state, uint64_t sum) { return 5 * state + sum; }

static version *last_of(key *k) { return &k->of[k->versions - 1]; }

static version *new_version(key *k, uint64_t round)
{
    if (k->versions == VERSIONS)
        violation("the test has too few versions");
    version *v = &k->of[k->versions++];
    *v = v[-1];
    v->round = round;
    return v;
}

static const uint64_t *value_in_use(const key *k, uint64_t phase)
{
    return (const uint64_t *)(region + k->e->value[phase >> 4 & 1]);
}

static void check_in_use(key *k, uint64_t phase, const char *when)
{
    const version *v = last_of(k);
    const uint64_t *value = value_in_use(k, phase), *states = (const uint64_t *)(region + k->state);
    for (uint64_t i = 0; i < k->n; i++) {
        if (value[i] != v->value[i])
            violation("key %d, %s round %llu: element %llu of the value is wrong (it holds %s)", (int)(k - keys), when,
                      (unsigned long long)v->round, (unsigned long long)i,
                      k->versions > 1 && value[i] == v[-1].value[i] ? "the last round's" : "neither round's");
        if (k->state && states[i] != v->state[i])
            violation("key %d, %s round %llu: element %llu of the state is wrong", (int)(k - keys), when,
                      (unsigned long long)v->round, (unsigned long long)i);
    }
}

static void close_in_model(key *k, uint64_t round, int other)
{
    unsigned in = pushed_into(k, round);
    const kv_entry *e = k->e;
    int failed = kv_has_failed(e, round) && !(other && !plan.updates);
    version *v = new_version(k, round);
    note("round is closed, by so many", round, (uint64_t)__builtin_popcount(in));
    count.rounds++;
    k->in[round] = in;
    k->closing[round] = k->versions - 1;
    if (!in)
        violation("key %d: round %llu closed without anybody in it", (int)(k - keys), (unsigned long long)round);
    for (int w = 0; w < plan.workers; w++)
        if (all[w].told && !(in >> w & 1))
            violation("key %d: round %llu closed without worker %d, who was told of a loss", (int)(k - keys),
                      (unsigned long long)round, w);
    if (failed) {
        count.failed++;
        if (plan.go_on || plan.updates || (!died && !gave_up))
            violation("key %d: round %llu came to nothing", (int)(k - keys), (unsigned long long)round);
        return;
    }
    k->updates += (uint64_t)plan.updates;
    count.updates += (uint64_t)plan.updates;
    for (uint64_t i = 0; i < k->n; i++) {
        uint64_t sum = summed(k, round, in, i);
        if (!plan.updates) {
            v->value[i] = sum;
            continue;
        }
        if (k->state)
            v->state[i] = moved(v->state[i], sum);
        v->value[i] = updated(v->value[i], v->state[i], sum, k->updates);
    }
    if (!plan.updates && !other)
        violation("key %d: round %llu closed with the old value", (int)(k - keys), (unsigned long long)round);
}

static uint64_t updates_of(const kv_entry *e, uint64_t phase)
{
    return atomic_load(&e->updates[kv_complete_round(phase) & 1]);
}

/* The changes of phases so far: the step before and after, whether the round after it is the next one, and the function. */
enum { CHANGES = 64 };
static struct { enum kv_step from, to; int next; const char *in; } changes[CHANGES];
static int changes_seen;

/* `kv_swap`, which records a change of a phase by the function `in`. */
static int noted_swap(_Atomic uint64_t *word, uint64_t old, uint64_t value, const char *in)
{
    int swapped = (kv_swap)(word, old, value), next = kv_round_of(value) > kv_complete_round(old), i = 0, of_key = 0;
    for (int k = 0; k < plan.keys; k++)
        of_key |= keys[k].e && word == &keys[k].e->phase;
    if (!swapped || !of_key)
        return swapped;
    while (i < changes_seen && (changes[i].from != kv_step_of(old) || changes[i].to != kv_step_of(value) ||
                                changes[i].next != next || strcmp(changes[i].in, in)))
        i++;
    if (i == changes_seen && i < CHANGES) {
        changes[changes_seen++].from = kv_step_of(old);
        changes[i].to = kv_step_of(value);
        changes[i].next = next;
        changes[i].in = in;
    }
    return swapped;
}

/* The phase of a key has changed, by one step. */
static void look_at_phase(key *k)
{
    int was_quiet = quiet;
    uint64_t before = k->last_phase, phase = atomic_load(&k->e->phase);
    uint64_t from = kv_complete_round(before), to = kv_complete_round(phase);
    int other = kv_current_of(before) != kv_current_of(phase);
    k->last_phase = phase;
    quiet = 1;
    note("phase: complete round and step", to, kv_step_of(phase));
    if (to != from && to != from + 1)
        violation("key %d: round %llu followed round %llu", (int)(k - keys), (unsigned long long)to,
                  (unsigned long long)from);
    if (to == from + 1)
        close_in_model(k, to, other);
    else if (other) {
        version *v = new_version(k, to);
        memcpy(v->value, k->overwriting, sizeof v->value);
        note("overwritten", to, 0);
        count.overwrites++;
    }
    if (to == from + 1 || other) {
        check_in_use(k, phase, "at the end of");
        if (updates_of(k->e, phase) != k->updates)
            violation("key %d: %llu updates are counted, and %llu were made", (int)(k - keys),
                      (unsigned long long)updates_of(k->e, phase), (unsigned long long)k->updates);
    }
    quiet = was_quiet;
}

/* Whether elements are those of one version, none older than `from`. */
static int is_version(const key *k, const uint64_t *got, int from, uint64_t begin, uint64_t end)
{
    for (int v = from; v < k->versions; v++)
        if (!memcmp(got + begin, &k->of[v].value[begin], (end - begin) * 8))
            return 1;
    return 0;
}

/* A value that a worker has received must be one whole version. Where others overwrite the key at the same time, the
 * chunks that arrived while it worked on them may be of the round, and the rest of the version that overwrote it. */
static void check_received(key *k, const uint64_t *got, int from, const char *how)
{
    uint64_t chunk = KV_SHARE_BYTES / 8, at = 0;
    if (is_version(k, got, from, 0, k->n))
        return;
    while (plan.overwrites && at < k->n && is_version(k, got, from, at, at + chunk < k->n ? at + chunk : k->n))
        at += chunk;
    if (at >= k->n)
        return;
    violation("key %d: what worker %d received by %s is no value that the key had", (int)(k - keys), rank_of(running),
              how);
}

/* The value that a worker has received as the result of a round, which may not be stored yet. */
static void check_result(key *k, const uint64_t *got, uint64_t round, const char *how)
{
    quiet = 1;
    if (!round || k->closing[round])
        check_received(k, got, k->closing[round], how);
    else
        for (uint64_t i = 0; i < k->n; i++)
            if (got[i] != summed(k, round, pushed_into(k, round), i))
                violation("key %d: worker %d received a wrong sum of round %llu by %s", (int)(k - keys),
                          rank_of(running), (unsigned long long)round, how);
    quiet = 0;
}

/* The kernel: sums, and one rule. */
static void span(const kv_item *it, ptrdiff_t from, ptrdiff_t end)
{
    for (ptrdiff_t i = from; i < end; i++) {
        uint64_t sum = 0;
        for (int j = 0; j < it->k; j++) {
            SPOT(step());
            sum += ((uint64_t *)it->src[j])[i];
        }
        if (it->rule >= 0) {
            uint64_t *w = (uint64_t *)it->dst, *s = (uint64_t *)it->states[0];
            if (it->n_states)
                s[i] = moved(s[i], sum);
            SPOT(step());
            sum = updated(w[i], it->n_states ? s[i] : 0, sum, (uint64_t)it->p[0]);
        }
        if (it->dst)
            ((uint64_t *)it->dst)[i] = sum;
        for (int j = 0; j < it->m; j++) {
            SPOT(step());
            ((uint64_t *)it->out[j])[i] = sum;
        }
        SPOT(step());
    }
}

static void no_fence(void) {}
static const kv_level level = {.name = "test", .item_span = span, .fence = no_fence};
static const kv_level *const the_level = &level;

/* ---------------------------------------------------------------------------------------------------- the verbs */

static kv_part *part_of(worker *w, key *k) { return &((kv_part *)(region + k->e->parts))[rank_of(w)]; }
static uint64_t arrived(worker *w, key *k) { return atomic_load(&part_of(w, k)->arrived); }

static uint64_t pushed_round(worker *w, key *k)
{
    uint64_t round = arrived(w, k);
    return round >= atomic_load(&part_of(w, k)->first) ? round : 0;
}

/* A worker that finds itself declared dead raises an error, in the middle of its operation. */
static void end_if_fenced(worker *w, int outcome)
{
    if (outcome != KV_FENCED)
        return;
    note("is fenced", w->self.incarnation, 0);
    count.fenced++;
    if (!w->was_stopped)
        violation("worker %d is taken for dead, and was never stopped", rank_of(w));
    process_lives[w->pid] = 0;
    w->lives = 0;
    for (;;)
        hand_over();
}

/* As Job.lock: a tick is no reason to stop. */
static void lock(worker *w)
{
    int outcome;
    while ((outcome = kv_lock_region(&w->self)) == KV_TICK)
        ;
    end_if_fenced(w, outcome);
    if (outcome != KV_READY)
        violation("worker %d cannot have the lock: outcome %d", rank_of(w), outcome);
}

static uint64_t take(worker *w, uint64_t bytes)
{
    lock(w);
    uint64_t offset = kv_allocate_locked(&w->self, bytes);
    kv_unlock_region(&w->self);
    if (!offset)
        violation("the test has too little memory");
    return offset;
}

/* As Updates._do: the whole update by the opener, into the other value. */
static void update_by_hand(worker *w, key *k)
{
    kv_self *me = &w->self;
    kv_entry *e = k->e;
    uint64_t phase = kv_get(&e->phase), current = kv_current_of(phase), merged[ELEMENTS];
    kv_sum_private(me, e, kv_round_of(phase), (char *)merged);
    if (!e->value[1 - current])
        e->value[1 - current] = take(w, e->nbytes);
    uint64_t t = kv_get(kv_update_count(e)) + 1, *to = (uint64_t *)kv_at(me, e->value[1 - current]);
    memcpy(to, kv_at(me, e->value[current]), e->nbytes);
    for (uint64_t i = 0; i < k->n; i++)
        to[i] = updated(to[i], 0, merged[i], t);
    kv_put(kv_next_updates(e), t);
    kv_end_round(me, e, phase, 1 - current);
}

/* As Handle.note_undo. */
static void note_undo(worker *w, key *k, uint64_t round, uint64_t home_at)
{
    uint64_t offset = w->undo[k - keys], *block = (uint64_t *)kv_at(&w->self, offset);
    kv_piece piece = {home_at, sizeof(uint64_t), k->n, 0};
    kv_put(&k->e->undo, 0);
    block[0] = round;
    block[1] = 1;
    memcpy(block + 2, &piece, sizeof piece);
    memcpy(block + 2 + sizeof piece / 8, kv_at(&w->self, home_at), k->e->nbytes);
    kv_put(&k->e->undo, offset);
    kv_fence();
}

/* As SparseKeys._update: the whole update by the opener, in place. */
static void update_in_place(worker *w, key *k)
{
    kv_self *me = &w->self;
    kv_entry *e = k->e;
    uint64_t phase = kv_get(&e->phase), home_at = e->value[kv_current_of(phase)], merged[ELEMENTS];
    uint64_t *to = (uint64_t *)kv_at(me, home_at), t = kv_get(kv_update_count(e)) + 1;
    kv_sum_private(me, e, kv_round_of(phase), (char *)merged);
    note_undo(w, k, kv_round_of(phase), home_at);
    for (uint64_t i = 0; i < k->n; i++) {
        SPOT(step());
        to[i] = updated(to[i], 0, merged[i], t);
    }
    kv_put(kv_next_updates(e), t);
    kv_end_round(me, e, phase, kv_current_of(phase));
    count.updates_in_place++;
}

/* As Updates._plan. */
static void plan_update(worker *w, key *k)
{
    kv_entry *e = k->e;
    uint64_t phase = kv_get(&e->phase);
    uint64_t t = kv_get(kv_update_count(e)) + 1;
    e->params[0] = (double)t;
    e->n_states = 1;
    e->states[0] = k->state;
    kv_put(kv_next_updates(e), t);
    kv_publish_work(&w->self, e, phase, 0);
}

/* As RoundWaiter._prepare. */
static void carry_out(worker *w, key *k)
{
    uint64_t phase = kv_get(&k->e->phase);
    if (!kv_is_planned(&w->self, k->e, phase) || !kv_swap(&k->e->planned, phase, 0))
        return; /* it was taken over */
    if (plan.by_hand)
        (plan.in_place ? update_in_place : update_by_hand)(w, k);
    else
        plan_update(w, k);
    kv_end_work(&w->self);
}

static int prepared(worker *w, key *k, int outcome)
{
    if (outcome == KV_PLAN && (w->salt + kv_get(&k->e->phase)) % 7 == 0 && !w->interrupted) {
        w->interrupted = 1; /* by a signal, before it was carried out: then the call is made again */
        count.interrupted++;
        note("is interrupted", kv_get(&k->e->phase) >> 16, k - keys);
    } else if (outcome == KV_PLAN)
        carry_out(w, k);
    else if (outcome == KV_NEW_MODE)
        w->self.mode = w->self.tried = kv_get(&w->self.head->mode);
    else
        return outcome == KV_TICK;
    return 1;
}

static int is_small(const key *k) { return k->e->nbytes <= KV_SMALL_KEY; }

/* As Call.advance and RoundWaiter.wait. */
static int see_complete(worker *w, key *k, kv_call *call)
{
    for (;;) {
        int outcome;
        if (kv_complete_round(kv_get(&k->e->phase)) >= call->round)
            return KV_READY;
        if (call->n_outs && is_small(k) && !call->delivered[0])
            outcome = kv_sum_small(&w->self, call, 1);
        else
            outcome = kv_advance(&w->self, call);
        if (!prepared(w, k, outcome))
            return outcome;
    }
}

static int wait_for_free_slot(worker *w, key *k)
{
    int outcome;
    while (prepared(w, k, outcome = kv_wait_for_free_slot(&w->self, k->e)))
        ;
    return outcome;
}

/* As RoundWaiter.help. */
static int help(worker *w, key *k)
{
    kv_call call = {.entry = k->e, .round = pushed_round(w, k)};
    int outcome;
    while ((outcome = kv_bring_forward(&w->self, &call, 0)) == KV_PLAN || outcome == KV_NEW_MODE)
        prepared(w, k, outcome);
    return outcome == KV_TICK ? KV_READY : outcome;
}

/* As Call.deliver. */
static int deliver(worker *w, key *k, kv_call *call)
{
    int outcome = KV_READY;
    if (is_small(k) && call->delivered && call->delivered[0])
        return kv_check_membership(&w->self) == KV_FENCED ? KV_FENCED : KV_READY;
    while (outcome = kv_deliver(&w->self, call), prepared(w, k, outcome))
        SPOT(step());
    if (outcome == KV_READY && w->self.worker && kv_worker_state(&w->self, rank_of(w)) == KV_LOST)
        outcome = KV_FENCED; /* the copy may be of a round of the other workers */
    if (outcome != KV_READY && outcome != KV_FENCED)
        violation("worker %d reads: outcome %d", rank_of(w), outcome);
    return outcome;
}

/* Push into the next round; `place` says where the source lies. */
static int push(worker *w, key *k, enum kv_kind place, int at_home, uint64_t **source)
{
    kv_self *me = &w->self;
    int outcome = wait_for_free_slot(w, k);
    if (outcome != KV_READY)
        return outcome;
    kv_part *part = part_of(w, k);
    uint64_t round = kv_get(&part->arrived) + 1, offset = 0;
    if (place == KV_PRIVATE)
        *source = w->private;
    else if (at_home)
        offset = w->home[k - keys][round & 3];
    else {
        kv_announce_overwrite(me, k->e);
        if (!part->slot[round & 1])
            part->slot[round & 1] = take(w, k->e->nbytes);
        offset = part->slot[round & 1];
    }
    if (place != KV_PRIVATE)
        *source = (uint64_t *)kv_at(me, offset);
    for (uint64_t i = 0; i < k->n; i++) {
        SPOT(step());
        (*source)[i] = gradient(w->salt, k, round, i);
    }
    k->salt[rank_of(w)][round] = w->salt;
    note("pushes into round", round, (uint64_t)place);
    kv_arrive(me, k->e, place, place == KV_PRIVATE ? (uint64_t)(uintptr_t)*source : offset);
    if (kv_get(&part->arrived) != round) {
        k->salt[rank_of(w)][round] = 0;
        return KV_FENCED;
    }
    if (k->closing[round] && !(k->in[round] >> rank_of(w) & 1))
        violation("key %d: worker %d came too late for round %llu", (int)(k - keys), rank_of(w),
                  (unsigned long long)round);
    return KV_READY;
}

static void scribble(uint64_t *array, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        array[i] = 0xdeadbeefull;
}

/* A pull, or the second half of a pushpull; `first` is the first of the outs. */
static int receive(worker *w, key *k, uint64_t *first, int n_outs, const char *how)
{
    unsigned char delivered[ELEMENTS] = {0};
    char *outs[2] = {(char *)first, (char *)w->out[1]};
    kv_call call = {.entry = k->e, .round = pushed_round(w, k), .outs = outs, .n_outs = n_outs};
    call.delivered = n_outs && !kv_overlaps_slot(&w->self, &call) ? delivered : NULL;
    int outcome = see_complete(w, k, &call);
    if (outcome != KV_READY || (call.round && kv_has_failed(k->e, call.round)))
        return outcome;
    if ((outcome = deliver(w, k, &call)) != KV_READY)
        return outcome;
    for (int i = 0; i < n_outs; i++)
        check_result(k, (uint64_t *)outs[i], call.round, how);
    return KV_READY;
}

static int settle(worker *w, key *k) { return receive(w, k, w->out[0], 0, "settle"); }

/* As ValueReader.read. */
static int read_once(worker *w, key *k, kv_reading *reading)
{
    int outcome = KV_READY, stays = kv_is_stable(&w->self, k->e);
    if (!stays && (outcome = kv_begin_read(&w->self, k->e, reading)) != KV_READY)
        return outcome;
    count.held += (uint64_t)reading->holds;
    for (uint64_t i = 0; i < k->n; i++) {
        SPOT(step());
        w->out[0][i] = value_in_use(k, kv_get(&k->e->phase))[i];
    }
    if (stays) /* who is taken for dead meanwhile has read while rounds went on */
        return kv_is_stable(&w->self, k->e) || kv_check_membership(&w->self) != KV_FENCED ? KV_READY : KV_FENCED;
    return kv_end_read(&w->self, k->e, reading) ? KV_READY : KV_TICK;
}

static int read_by_python(worker *w, key *k, int times)
{
    int outcome = KV_READY;
    w->doing = "read by Python";
    for (int i = 0; i < times && plan.reads && outcome == KV_READY; i++) {
        kv_reading reading = {0};
        int before = k->versions - 1;
        while (prepared(w, k, outcome = read_once(w, k, &reading)))
            SPOT(step());
        quiet = 1;
        if (outcome == KV_READY && !plan.overwrites)
            check_received(k, w->out[0], before, w->doing);
        quiet = 0;
        count.reads++;
        count.again += reading.tries > 0;
    }
    return outcome;
}

/* As RoundWaiter.complete: a worker that gives up while others may read its memory fails the round. */
static void give_up(worker *w, key *k)
{
    uint64_t round = pushed_round(w, k);
    gave_up = 1;
    if (kv_complete_round(kv_get(&k->e->phase)) < round)
        kv_fail(k->e, round);
}

static int pushpull(worker *w, key *k)
{
    int may_be_private = !is_small(k) && !plan.go_on && !plan.updates, at_home = !is_small(k) && draw(3) == 0;
    int is_private = may_be_private && !at_home && draw(2), in_place = at_home && may_be_private && draw(2);
    uint64_t *source;
    enum kv_kind place = is_private ? KV_PRIVATE : in_place ? KV_IN_PLACE : KV_SLOT;
    w->doing = is_private ? "pushpull, private" : in_place ? "pushpull in place" : at_home ? "pushpull, region" : "pushpull";
    int outcome = push(w, k, place, at_home, &source);
    if (outcome != KV_READY)
        return outcome;
    uint64_t round = arrived(w, k);
    uint64_t *first = (is_private || at_home) && draw(2) ? source : w->out[0];
    outcome = receive(w, k, first, in_place ? 0 : 1 + draw(2), w->doing);
    if (is_private && outcome != KV_READY)
        give_up(w, k);
    if (outcome == KV_READY && in_place && !kv_has_failed(k->e, round)) {
        count.in_place++;
        check_result(k, source, round, w->doing);
    }
    count.peer_reads += (uint64_t)is_private;
    if (is_private || (at_home && outcome == KV_READY))
        scribble(source, k->n); /* the array is the caller's again */
    return outcome;
}

static int plain_push(worker *w, key *k)
{
    uint64_t *source;
    w->doing = "push";
    int outcome = push(w, k, KV_SLOT, !is_small(k) && draw(2), &source);
    return outcome == KV_READY ? help(w, k) : outcome;
}

/* A push of both keys by one call, as SharedBackend.start_push: it is a part of both rounds or of none. */
static int push_both(worker *w, uint64_t round)
{
    uint64_t *source;
    int outcome = KV_READY;
    w->doing = "push of both keys";
    for (int i = 0; i < KEYS && outcome == KV_READY; i++)
        outcome = wait_for_free_slot(w, &keys[i]);
    if (outcome != KV_READY)
        return outcome;
    kv_begin_call(&w->self);
    for (int i = 0; i < KEYS; i++)
        if (arrived(w, &keys[i]) < round && (outcome = push(w, &keys[i], KV_SLOT, 0, &source)) != KV_READY)
            end_if_fenced(w, outcome), violation("worker %d waits within a call: outcome %d", rank_of(w), outcome);
    kv_end_call(&w->self);
    for (int i = 0; i < KEYS && outcome == KV_READY; i++)
        outcome = draw(2) ? receive(w, &keys[i], w->out[0], 1, "pull of both") : help(w, &keys[i]);
    return outcome;
}

/* As SharedBackend._overwrite. */
static int overwrite(worker *w, key *k)
{
    kv_self *me = &w->self;
    kv_entry *e = k->e;
    w->doing = "overwrite";
    int outcome = settle(w, k);
    if (outcome != KV_READY)
        return outcome;
    while (prepared(w, k, outcome = kv_hold_key(me, e, 1)))
        SPOT(step());
    if (outcome != KV_READY)
        return outcome;
    uint64_t phase = kv_get(&e->phase), current = kv_current_of(phase);
    int back = draw(4) == 0; /* it was in vain */
    if (!e->value[1 - current])
        e->value[1 - current] = take(w, e->nbytes);
    uint64_t *to = (uint64_t *)kv_at(me, e->value[1 - current]), salt = chance();
    for (uint64_t i = 0; i < k->n; i++) {
        SPOT(step());
        to[i] = mixed(salt + i);
    }
    for (uint64_t i = 0; i < k->n && !back; i++)
        k->overwriting[i] = to[i];
    kv_release_key(me, e, phase, !back);
    kv_end_work(me);
    return KV_READY;
}

static int settle_all(worker *w)
{
    int outcome = KV_READY;
    for (int i = 0; i < plan.keys && outcome == KV_READY; i++)
        outcome = settle(w, &keys[i]);
    return outcome;
}

/* ------------------------------------------------------------------------------------------------ the programmes */

static int take_part_by_calls(worker *w)
{
    for (int round = 1; round <= plan.steps / KEYS; round++) {
        if (arrived(w, &keys[0]) >= (uint64_t)round && arrived(w, &keys[1]) >= (uint64_t)round)
            continue;
        if (plan.joiner == rank_of(w) && round == 1 + plan.join_after)
            return KV_READY;
        int outcome = kv_check_membership(&w->self);
        if (outcome == KV_READY)
            outcome = push_both(w, (uint64_t)round);
        if (outcome != KV_READY)
            return outcome;
    }
    return KV_READY;
}

static int take_part(worker *w)
{
    if (plan.calls)
        return take_part_by_calls(w);
    int seen[KEYS] = {0}, done = 0;
    for (int s = 0; s < plan.steps; s++) {
        key *k = &keys[plan.order[s]];
        if (arrived(w, k) >= (uint64_t)++seen[k - keys])
            continue; /* an earlier life has pushed this, or the round continued without it */
        if (plan.joiner == rank_of(w) && done++ == plan.join_after)
            return KV_READY;
        int outcome = kv_check_membership(&w->self), what = draw(8);
        if (outcome == KV_READY)
            outcome = what < 4 ? pushpull(w, k) : plain_push(w, k);
        if (outcome == KV_READY && what > 5)
            outcome = receive(w, k, w->out[0], 1, "pull");
        if (outcome == KV_READY && plan.reads)
            outcome = read_by_python(w, &keys[draw(plan.keys)], 2);
        if (outcome == KV_READY && plan.overwrites && draw(6) == 0)
            outcome = overwrite(w, &keys[draw(plan.keys)]);
        if (outcome != KV_READY)
            return outcome;
    }
    return KV_READY;
}

/* As RoundWaiter._rest: rounds that can be finished without the dead are. */
static int rest(worker *w, key *k)
{
    for (;;) {
        kv_call call = {.entry = k->e, .round = pushed_round(w, k)};
        int outcome = kv_bring_forward(&w->self, &call, 0);
        if (outcome == KV_TICK && kv_is_idle(&w->self, k->e))
            return KV_READY;
        if (!prepared(w, k, outcome))
            return outcome;
        if (outcome == KV_TICK)
            kv_detect_losses(&w->self);
        SPOT(step());
    }
}

/* After the loss of a peer: what there is can be read. */
static void read_on(worker *w)
{
    w->doing = "read after a loss";
    count.lost++;
    for (int i = 0; i < plan.keys; i++) {
        key *k = &keys[i];
        unsigned char delivered[ELEMENTS] = {0};
        char *outs[1] = {(char *)w->out[0]};
        kv_call call = {.entry = k->e, .round = pushed_round(w, k), .outs = outs, .n_outs = 1, .delivered = delivered};
        int before = k->versions - 1, outcome = rest(w, k);
        end_if_fenced(w, outcome);
        if (outcome != KV_READY && outcome != KV_PEER_LOST)
            violation("worker %d, after a loss: outcome %d", rank_of(w), outcome);
        memset(delivered, 0, sizeof delivered);
        end_if_fenced(w, deliver(w, k, &call));
        check_received(k, w->out[0], before, w->doing);
        if ((outcome = read_by_python(w, k, 2)) != KV_READY)
            end_if_fenced(w, outcome), violation("worker %d reads after a loss: outcome %d", rank_of(w), outcome);
    }
}

/* As Job.rejoin. */
static void rejoin(worker *w)
{
    kv_self *me = &w->self;
    w->doing = "comes back";
    if (kv_register(me))
        violation("rank %d is taken", rank_of(w));
    if (!me->worker->log.scratch)
        me->worker->log.scratch = take(w, KV_LOG_ARRAYS * (KV_LOG_ELEMENTS * 8 + 1088) + 4096);
    int outcome;
    while ((outcome = kv_rejoin(me)) == KV_TICK)
        ;
    end_if_fenced(w, outcome);
    if (outcome != KV_READY)
        violation("worker %d cannot come back: outcome %d", rank_of(w), outcome);
    note("is back", me->incarnation, 0);
    for (int i = 0; i < plan.keys; i++)
        if ((outcome = read_by_python(w, &keys[i], 2)) != KV_READY)
            end_if_fenced(w, outcome), violation("worker %d, a newcomer, reads: outcome %d", rank_of(w), outcome);
    while (!kv_catch_up(me, keys[plan.order[0]].e)) /* before its first push, as RoundWaiter._catch_up */
        end_if_fenced(w, kv_check_membership(me));
    note("has fallen in", me->incarnation, 0);
}

static void life(worker *w)
{
    if (w->salt > WORKERS)
        rejoin(w);
    int outcome = take_part(w);
    w->doing = "settles";
    if (outcome == KV_READY)
        outcome = settle_all(w);
    end_if_fenced(w, outcome);
    if (outcome == KV_READY) {
        int joins = plan.joiner == rank_of(w) || draw(2);
        kv_deregister(&w->self, joins ? KV_JOINED : KV_LEFT);
        note("has settled", (uint64_t)joins, 0);
        if (joins && draw(2) && (outcome = receive(w, &keys[0], w->out[0], 1, "pull after join")) != KV_READY && plan.go_on)
            end_if_fenced(w, outcome), violation("worker %d, joined, reads: outcome %d", rank_of(w), outcome);
        for (int i = 0; joins && i < plan.keys; i++)
            if ((outcome = read_by_python(w, &keys[i], 30)) != KV_READY)
                end_if_fenced(w, outcome), violation("worker %d, joined, reads by Python: outcome %d", rank_of(w), outcome);
        count.joins += (uint64_t)joins;
    } else if (outcome == KV_PEER_LOST && !plan.go_on) {
        read_on(w);
        w->told = 1;
        if ((seed + (uint64_t)rank_of(w)) % 2)
            kv_deregister(&w->self, KV_LEFT);
    } else
        violation("worker %d, %s: outcome %d", rank_of(w), w->doing, outcome);
    w->doing = "done";
    w->done = 1;
    count.finished++;
}

static void coroutine(void)
{
    worker *w = running;
    if (!_setjmp(w->start))
        _longjmp(home, 1);
    w = running;
    quiet = 0;
    life(w);
    for (;;)
        hand_over();
}

/* ----------------------------------------------------------------------------------------------- life and death */

static void kill_worker(worker *w)
{
    note("dies: worker", (uint64_t)rank_of(w), 0);
    count.deaths++;
    died = 1;
    w->lives = 0;
    process_lives[w->pid] = 0;
    memory_goes[w->pid] = steps + 1 + (uint64_t)draw(draw(2) ? 2000 : 2);
    for (int i = 0; i < plan.keys; i++)
        for (uint64_t r = 1; r < ROUNDS + 4; r++)
            if (atomic_load(&part_of(w, &keys[i])->pushed[r & 1]) < r)
                keys[i].salt[rank_of(w)][r] = 0; /* it was about to */
}

/* SIGKILL. */
static void end_process(int pid)
{
    for (worker *w = all; w < all + plan.workers; w++)
        if (w->lives && w->pid == pid) {
            count.ended++;
            kill_worker(w);
        }
}

/* SIGSTOP: its heartbeat stops. */
static void stop_worker(worker *w)
{
    static const int times[4] = {30, 300, 3000, 20000};
    note("is stopped: worker", (uint64_t)rank_of(w), 0);
    count.stops++;
    died = 1;
    w->stopped = w->was_stopped = 1;
    w->wakes_at = steps + 1 + (uint64_t)draw(times[draw(4)]);
    w->self.head->worker[rank_of(w)].beat = 0;
}

static void wake_worker(worker *w)
{
    note("wakes: worker", (uint64_t)rank_of(w), 0);
    w->stopped = 0;
    w->self.head->worker[rank_of(w)].beat = ~0ull;
}

static void new_process(worker *w)
{
    memory_goes[w->pid] = 0; /* of the earlier process */
    kv_self *me = &w->self;
    memset(me, 0, sizeof *me);
    me->base = region;
    me->head = (kv_header *)region;
    me->window = REGION;
    me->fd = -1;
    me->rank = rank_of(w);
    me->size = plan.workers;
    me->go_on = plan.go_on;
    me->word = KV_MAGIC;
    me->level = &the_level;
    me->bounce = (char *)w->bounce;
    for (int i = 0; i < plan.workers; i++)
        me->pidfd[i] = -1;
    w->pid = ++pids;
    process_lives[w->pid] = 1;
    w->lives = 1;
    w->done = w->begun = w->parked = w->told = w->stopped = w->was_stopped = w->interrupted = 0;
    w->doing = "begins";
}

static void bring_back(worker *w)
{
    if (pids + 1 >= PROCESSES)
        return;
    new_process(w);
    w->salt += WORKERS;
    note("begins again: worker", (uint64_t)rank_of(w), 0);
    count.returns++;
}

static void set_up(worker *w)
{
    new_process(w);
    w->salt = (uint64_t)rank_of(w) + 1;
    kv_worker *place = &w->self.head->worker[rank_of(w)];
    w->self.worker = place;
    w->self.incarnation = 1;
    place->incarnation = 1;
    place->pid = (uint64_t)w->pid;
    place->beat = ~0ull;
    place->state = kv_state_word(&w->self, KV_ALIVE);
    w->self.head->members |= kv_rank_bit(rank_of(w));
    place->log.scratch = take(w, KV_LOG_ARRAYS * (KV_LOG_ELEMENTS * 8 + 1088) + 4096);
}

static void make_key(key *k, int number)
{
    worker *w = &all[0];
    memset(k, 0, offsetof(key, of));
    k->versions = 1;
    k->n = draw(2) ? 1 + (uint64_t)draw(KV_SMALL_KEY / 8) : 4 + (uint64_t)draw(ELEMENTS - 3);
    kv_entry *e = k->e = kv_new_entry(&w->self);
    e->int_key = number;
    e->hash = kv_hash(NULL, 0, number);
    e->dtype = KV_I64;
    e->n = k->n;
    e->nbytes = 8 * k->n;
    e->chunks = (e->nbytes + KV_SHARE_BYTES - 1) / KV_SHARE_BYTES;
    uint64_t parts = (uint64_t)plan.workers * sizeof(kv_part);
    e->parts = take(w, parts);
    e->map = take(w, 8 * e->chunks);
    e->value[0] = take(w, e->nbytes);
    if (e->nbytes <= KV_SMALL_KEY)
        e->value[1] = take(w, e->nbytes);
    memset(region + e->parts, 0, parts);
    memset(region + e->map, 0, 8 * e->chunks);
    memset(&k->of[0], 0, sizeof k->of[0]);
    for (uint64_t i = 0; i < k->n; i++)
        ((uint64_t *)(region + e->value[0]))[i] = k->of[0].value[i] = mixed(i + 77);
    if (plan.updates && !plan.by_hand) {
        k->state = take(w, e->nbytes);
        memset(region + k->state, 0, e->nbytes);
    }
    for (int i = 0; i < plan.workers; i++)
        for (int j = 0; j < 4; j++)
            all[i].home[number][j] = take(w, e->nbytes);
    for (int i = 0; plan.in_place && i < plan.workers; i++)
        all[i].undo[number] = take(w, 16 + sizeof(kv_piece) + e->nbytes);
    kv_publish_entry(&w->self, e);
    e->of[1] = KV_NO_ROUND;
    k->last_phase = e->phase;
}

static void decide(void)
{
    static const int paces[] = {1, 2, 2, 4, 8, 24};
    static const char *const places[] = {
        "kv_mark_lost", "kv_mark_lost", "kv_do_chunk", "kv_finish_chunk", "kv_update_chunk", "kv_recover_chunks", "kv_end_earlier_process",
        "kv_rejoin_key", "kv_end_round", "kv_prepare_work", "kv_publish_work", "kv_open_round", "kv_arrive", "kv_lock_region",
        "kv_unlock_region", "kv_store_sum", "kv_allocate_locked", "kv_complete_open_round", "rejoin", "update_by_hand", "kv_release_key", "kv_hold_key",
        "span", "copy", "kv_allocate_values", "kv_claim_chunk", "carry_out", "overwrite", "kv_register", "kv_deregister",
        "kv_wake_all", "kv_arrive_as", "kv_arrive_as", "kv_begin_call", "kv_end_call", "kv_rejoin", "kv_make_member",
        "kv_settle_lost", "kv_finish_marking", "kv_deliver", "kv_begin_work", "kv_end_work", "kv_try_lock", "kv_open_for_write",
        "push"};
    memset(&plan, 0, sizeof plan);
    plan.workers = 2 + draw(WORKERS - 1);
    plan.keys = 1 + draw(KEYS);
    plan.updates = draw(2);
    plan.by_hand = plan.updates && draw(3) == 0;
    plan.calls = plan.keys == KEYS && draw(4) == 0;
    plan.go_on = draw(2);
    plan.deaths = draw(3) ? 0 : 1 + draw(plan.go_on ? 4 : 2);
    plan.stops = draw(6) ? 0 : 1 + draw(2);
    plan.returns = plan.go_on && plan.deaths + plan.stops ? draw(4) : 0;
    plan.overwrites = draw(4) == 0;
    plan.joiner = draw(4) ? -1 : draw(plan.workers);
    plan.join_after = draw(3);
    plan.pace = paces[draw(6)];
    plan.fate_at = plan.deaths + plan.stops ? (uint64_t)draw(draw(2) ? 300 : 2500) : ~0ull;
    if (plan.deaths + plan.stops && draw(2)) {
        plan.fate_in = places[draw((int)(sizeof places / sizeof *places))];
        plan.fate_in_count = 1 + draw(draw(2) ? 8 : 60);
    }
    uint64_t more = mixed(seed ^ 0x5eed); /* not drawn: the other seeds stay unchanged */
    plan.reads = more % 3 == 0;
    plan.in_place = plan.by_hand && more >> 8 & 1;
    if (plan.in_place && plan.reads && more >> 20 & 1)
        plan.joiner = (int)(more >> 24 & 63) % plan.workers;
    if (plan.in_place && plan.deaths && more >> 9 & 1) {
        plan.fate_in = more >> 10 & 1 ? "update_in_place" : "kv_undo";
        plan.fate_in_count = 1 + (int)(more >> 16 & 15);
    }
    int rounds[KEYS] = {0};
    for (int i = 0, wanted = plan.calls * KEYS * (1 + draw(ROUNDS - 1)); i < wanted; i++)
        plan.order[plan.steps++] = i % KEYS;
    for (int wanted = plan.calls ? 0 : (1 + draw(ROUNDS - 1)) * plan.keys; plan.steps < wanted; ) {
        int k = draw(plan.keys);
        if (rounds[k]++ < ROUNDS)
            plan.order[plan.steps++] = k;
    }
}

static void make_world(void)
{
    kv_header *head = (kv_header *)region;
    quiet = 1;
    running = NULL;
    steps = naps = noted = 0;
    budget = died = pids = gave_up = 0;
    state_of_chance = mixed(seed + 1) | 1;
    spot_in = "";
    decide();
    memset(head, 0, offsetof(kv_header, blocks) + 8 * sizeof head->blocks[0]);
    memset(head->worker, 0, WORKERS * sizeof head->worker[0]);
    memset(region + sizeof *head, 0x5a, used > sizeof *head ? used - sizeof *head : 0);
    memset(process_lives, 0, sizeof process_lives);
    memset(all[0].self.pidfd, -1, sizeof all[0].self.pidfd);
    new_process(&all[0]);
    kv_create_region(&all[0].self, REGION);
    pids = 0;
    head->go_on = (uint64_t)plan.go_on;
    head->mode = (uint64_t)plan.updates;
    for (int i = 0; i < plan.workers; i++)
        set_up(&all[i]);
    for (int i = 0; i < plan.keys; i++)
        make_key(&keys[i], i);
}

/* ------------------------------------------------------------------------------------------------- the end of it */

static void check_end(void)
{
    kv_header *head = (kv_header *)region;
    uint64_t holder = head->lock;
    int told = 0, lost = 0;
    int last = (int)(holder & 0xff) - 1;
    if (holder && all[last].lives && all[last].self.incarnation == holder >> 8)
        violation("worker %d has left the lock behind", last);
    for (worker *w = all; w < all + plan.workers; w++) {
        told |= w->told;
        lost += !w->lives;
        if (w->lives && head->worker[rank_of(w)].log.entry)
            violation("worker %d has left a chunk behind", rank_of(w));
    }
    /* A worker that does not know of the loss yet may arrive after the others have looked, unless it is lost itself. */
    if (plan.calls && told && lost < 2 && kv_complete_round(keys[0].e->phase) != kv_complete_round(keys[1].e->phase))
        violation("a call is complete in round %llu of key 0, in round %llu of key 1",
                  (unsigned long long)kv_complete_round(keys[0].e->phase),
                  (unsigned long long)kv_complete_round(keys[1].e->phase));
    count.calls += (uint64_t)(plan.calls && told);
    for (int i = 0; i < plan.keys; i++) {
        key *k = &keys[i];
        if (k->e->phase != k->last_phase)
            look_at_phase(k);
        if (!told && !died && kv_step_of(k->last_phase) != KV_CLOSED)
            violation("key %d was left open", i);
        if (!plan.updates || kv_step_of(k->last_phase) == KV_CLOSED || (kv_step_of(k->last_phase) != KV_OPEN && !plan.in_place))
            check_in_use(k, k->last_phase, "after");
        for (worker *w = all; w < all + plan.workers && !told; w++)
            if (w->lives && pushed_round(w, k) > kv_complete_round(k->last_phase))
                violation("key %d: worker %d has pushed into round %llu, which is not complete", i, rank_of(w),
                          (unsigned long long)pushed_round(w, k));
    }
}

/* After a run: what Python does with a key after an error, and after a loss. The programmes above do neither. */
static void change_after_errors(void)
{
    worker *w = all;
    while (w < all + plan.workers && !(w->lives && w->done))
        w++;
    for (int i = 0; w < all + plan.workers && i < plan.keys; i++) {
        kv_entry *e = keys[i].e;
        uint64_t phase = kv_get(&e->phase), opening;
        if (kv_step_of(phase) != KV_CLOSED)
            continue;
        kv_restore_round(&w->self, e, kv_get(&e->of[1 - kv_current_of(phase)]));
        if ((opening = kv_become_opener(&w->self, e, kv_get(&e->phase))))
            kv_release_opened(&w->self, e, opening);
    }
}

static int run_seed(void)
{
    broken[0] = 0;
    make_world();
    int how = _setjmp(home);
    if (how == 0) {
        running = &all[0];
        budget = 1;
        quiet = 0;
        hand_over();
    }
    quiet = 1;
    if (how == 2 && _setjmp(home) == 0) {
        check_end();
        change_after_errors();
    }
    count.steps += steps;
    used = ((kv_header *)region)->top;
    return broken[0] != 0;
}

static void make_coroutines(void)
{
    const size_t size = 64 * 1024;
    ucontext_t back;
    for (worker *volatile w = all; w < all + WORKERS; w++) {
        w->stack = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        getcontext(&w->context);
        w->context.uc_stack.ss_sp = w->stack;
        w->context.uc_stack.ss_size = size;
        w->context.uc_link = NULL;
        makecontext(&w->context, coroutine, 0);
        running = w;
        if (!_setjmp(home))
            swapcontext(&back, &w->context);
    }
}

static void report(const char *program)
{
    printf("seed %llu: %s\n", (unsigned long long)seed, broken);
    printf("%d workers, %d keys of %llu and %llu elements, on loss: %s, %s%s, %d turns\n", plan.workers, plan.keys,
           (unsigned long long)keys[0].n, (unsigned long long)(plan.keys > 1 ? keys[1].n : 0),
           plan.go_on ? "continue" : "raise", plan.updates ? "updates" : "sums", plan.by_hand ? " by hand" : "", plan.steps);
    for (worker *w = all; w < all + plan.workers; w++)
        printf("worker %d: %s%s\n", rank_of(w), w->lives ? "" : "dead, ", w->doing);
    for (uint64_t i = noted > TAIL ? noted - TAIL : 0; i < noted && !verbose; i++) {
        int at = (int)(i % TAIL);
        printf("  worker %d  %-18s %4d  %s %llu %llu\n", tail[at].who, tail[at].in, tail[at].line, tail[at].what,
               (unsigned long long)tail[at].a, (unsigned long long)tail[at].b);
    }
    printf("again, step by step: %s %llu 1 -v\n", program, (unsigned long long)seed);
}

int main(int n, char **arguments)
{
    if (n < 3)
        return 2;
    uint64_t first = strtoull(arguments[1], NULL, 10), how_many = strtoull(arguments[2], NULL, 10);
    verbose = n > 3;
    region = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    make_coroutines();
    for (seed = first; seed < first + how_many; seed++)
        if (run_seed()) {
            report(arguments[0]);
            return 1;
        }
    printf("{\"runs\": %llu, \"steps\": %llu, \"rounds\": %llu, \"finished\": %llu, \"deaths\": %llu, \"returns\": %llu, "
           "\"updates\": %llu, \"peer_reads\": %llu, \"in_place\": %llu, \"overwrites\": %llu, \"joins\": %llu, \"lost\": %llu, "
           "\"failed\": %llu, \"calls\": %llu, \"updates_in_place\": %llu, \"reads\": %llu, \"again\": %llu, \"held\": %llu, "
           "\"stops\": %llu, \"fenced\": %llu, \"ended\": %llu, \"interrupted\": %llu, \"changes\": [",
           (unsigned long long)how_many, (unsigned long long)count.steps, (unsigned long long)count.rounds,
           (unsigned long long)count.finished, (unsigned long long)count.deaths, (unsigned long long)count.returns,
           (unsigned long long)count.updates, (unsigned long long)count.peer_reads, (unsigned long long)count.in_place,
           (unsigned long long)count.overwrites, (unsigned long long)count.joins, (unsigned long long)count.lost,
           (unsigned long long)count.failed, (unsigned long long)count.calls, (unsigned long long)count.updates_in_place,
           (unsigned long long)count.reads, (unsigned long long)count.again, (unsigned long long)count.held,
           (unsigned long long)count.stops, (unsigned long long)count.fenced, (unsigned long long)count.ended,
           (unsigned long long)count.interrupted);
    for (int i = 0; i < changes_seen; i++)
        printf("%s[%d, %d, %d, \"%s\"]", i ? ", " : "", (int)changes[i].from, (int)changes[i].to, changes[i].next, changes[i].in);
    puts("]}");
    return 0;
}
