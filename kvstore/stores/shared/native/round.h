/* Rounds: every worker pushes into a key once, and whoever waits does the work.
 *
 * A key's phase is one word: the round, who opened it, which of the two values is in use, and the step.
 *
 *   CLOSED(r)    round r is complete. Once every member has arrived at r + 1, one of them makes it
 *   OPENING(r+1) and prepares the work: which workers take part, what is summed, what the rule's numbers are; then
 *   OPEN(r+1)    every waiting worker takes chunks; whoever finds all chunks complete makes it CLOSED(r+1).
 *
 * Who is in round r: those who pushed into it, { w : pushed[w][r & 1] = r }; a push waits until the round two before is
 * complete. A member that dies stops being waited for after its last arrival is written, so everybody who finds the
 * round complete finds the same set; and what it pushed counts even if its rank comes back before the round is.
 *
 * A sum goes to the value that is not in use, and closing the round puts it in use: a round that comes to nothing
 * leaves the last one readable. An update works on the weights in place, block by block through a log.
 */
#ifndef KV_ROUND_H
#define KV_ROUND_H

#include <sys/uio.h>

#include "spans.h"
#include "table.h"

enum kv_step { KV_CLOSED, KV_OPENING, KV_OPEN };

/* What a round does to the value: an even mode replaces it by the sum, an odd one is planned by Python. A mode's other
 * bits count how often it was set, so that a worker that has not caught up does not open rounds. */
static inline int kv_sums(const kv_self *me)
{
    return !(kv_get(&me->head->mode) & 1);
}

/* `version`: how often another value was put in use, modulo 16; by it a reader sees that its value has changed. */
static inline uint64_t kv_phase_word(uint64_t round, int rank, uint64_t version, enum kv_step step)
{
    return round << 16 | (uint64_t)rank << 8 | (version & 0xf) << 4 | (uint64_t)step;
}

static inline uint64_t kv_round_of(uint64_t phase) { return phase >> 16; }
static inline int kv_opener_of(uint64_t phase) { return (int)(phase >> 8 & 0xff); }
static inline uint64_t kv_version_of(uint64_t phase) { return phase >> 4 & 0xf; }
static inline uint64_t kv_current_of(uint64_t phase) { return kv_version_of(phase) & 1; }
static inline enum kv_step kv_step_of(uint64_t phase) { return (enum kv_step)(phase & 0xf); }
static inline uint64_t kv_complete_round(uint64_t phase)
{
    return kv_step_of(phase) == KV_CLOSED ? kv_round_of(phase) : kv_round_of(phase) - 1;
}

/* Whether a round is being prepared by this worker, and no other has taken it over. */
static inline int kv_holds(const kv_self *me, uint64_t phase, uint64_t round)
{
    return kv_step_of(phase) == KV_OPENING && kv_round_of(phase) == round && kv_opener_of(phase) == me->rank;
}

/* One key of one call of this process. */
typedef struct {
    kv_entry *entry;
    uint64_t round;
    char **outs;       /* arrays of this process that receive the result */
    int n_outs;
    int stream;        /* the call is larger than the cache */
    unsigned char *delivered; /* by chunk: the outs have it already; may be NULL */
} kv_call;

static inline kv_part *kv_parts(kv_self *me, const kv_entry *e)
{
    return (kv_part *)kv_at(me, e->parts);
}

/* Whether a worker that has arrived has arrived at all keys of that call. A call is a part of all of its rounds or of
 * none: a round that was opened with one who then dies could be complete, and the next key's could never be. */
static int kv_whole(kv_self *me, const kv_part *part, int w, int parity)
{
    return !(part->kind[parity] & KV_OF_CALL) || part->call[parity] <= kv_get(&me->head->worker[w].whole);
}

/* The first member that `round` waits for; KV_NOBODY: all have arrived, and `in` says who is in it. */
static int kv_first_missing(kv_self *me, const kv_entry *e, uint64_t round, uint64_t *in)
{
    const kv_part *part = kv_parts(me, e);
    uint64_t members = kv_get(&me->head->members), arrived = 0;
    for (int w = 0; w < me->size; w++) {
        if (kv_get(&part[w].pushed[round & 1]) >= round) {
            if (members & kv_bit(w) && !kv_whole(me, &part[w], w, (int)(round & 1)))
                return w;
            arrived |= kv_bit(w);
        } else if (members & kv_bit(w) && kv_get(&part[w].first) <= round)
            return w;
    }
    *in = arrived;
    return KV_NOBODY;
}

/* Whether every member that `round` waits for has arrived, and who is in it. */
static int kv_everyone(kv_self *me, const kv_entry *e, uint64_t round, uint64_t *in)
{
    return kv_first_missing(me, e, round, in) == KV_NOBODY && *in != 0;
}

/* This worker writes to its slot from now on; who sums a small key for itself may still be reading there. */
static inline void kv_fill(kv_self *me, const kv_entry *e)
{
    kv_part *part = &kv_parts(me, e)[me->rank];
    kv_put(&part->filling, kv_get(&part->arrived) + 1);
    kv_fence();
}

/* Whether the sources of `round` were all there until now: no slot was filled again in the meantime. */
static int kv_still_there(kv_self *me, const kv_entry *e, uint64_t round, uint64_t in)
{
    const kv_part *part = kv_parts(me, e);
    atomic_thread_fence(memory_order_acquire);
    for (int w = 0; w < me->size; w++)
        if (in >> w & 1 && kv_get(&part[w].filling) > round + 1)
            return 0;
    return 1;
}

/* What this worker arrives at from here to `kv_end_call` is one call. Nothing between them waits for another worker. */
static void kv_begin_call(kv_self *me)
{
    me->calling = kv_add(&me->worker->calls, 1) + 1;
}

static void kv_end_call(kv_self *me)
{
    me->calling = 0;
    kv_put(&me->worker->whole, kv_get(&me->worker->calls));
    kv_wake_all(me);
}

/* This worker's source of its next round is in place. */
static void kv_arrive_as(kv_self *me, kv_entry *e, uint32_t kind, float threshold, uint64_t source)
{
    kv_part *part = &kv_parts(me, e)[me->rank];
    uint64_t round = atomic_load_explicit(&part->arrived, memory_order_relaxed) + 1, in;
    kv_put(&part->filling, round);
    atomic_thread_fence(memory_order_release);
    part->source[round & 1] = source;
    part->kind[round & 1] = me->calling ? kind | KV_OF_CALL : kind;
    part->call[round & 1] = me->calling;
    part->threshold[round & 1] = threshold;
    kv_put(&part->pushed[round & 1], round);
    kv_put(&part->arrived, round);
    if (kv_is_timed(me->counters))
        kv_tell(me, KV_EVENT_ARRIVED, me->rank, e->number, round, e->nbytes);
    kv_fence();
    uint64_t asleep = kv_get(&me->head->asleep) & ~kv_bit(me->rank);
    if (asleep && kv_everyone(me, e, round, &in))
        kv_wake(me, asleep);
}

static void kv_arrive(kv_self *me, kv_entry *e, enum kv_kind kind, uint64_t source)
{
    kv_arrive_as(me, e, kind, 0, source);
    kv_count_sent(me, kind == KV_ROWS ? 0 : e->nbytes); /* of rows, who has put them there knows how many */
}

static void kv_arrive_packed(kv_self *me, kv_entry *e, int code, float threshold, uint64_t source)
{
    kv_arrive_as(me, e, KV_PACKED | (uint32_t)code << 8, threshold, source);
    kv_count_sent(me, (uint64_t)kv_encoded_bytes(code, (ptrdiff_t)e->n));
}

/* Whether an out of the call lies over what this worker has pushed into the round. It is then written after the round
 * only: if its owner dies within a chunk, that is summed again from what was pushed. (What its owner leaves in place,
 * without an out, or pushes from its own memory, is known as such: see kv_take_over.) */
static int kv_over_own(kv_self *me, const kv_call *call)
{
    const kv_part *part = &kv_parts(me, call->entry)[me->rank];
    int parity = (int)(call->round & 1);
    const char *from = (const char *)kv_at(me, part->source[parity]), *end = from + call->entry->nbytes;
    if (!call->round || kv_kind_of(part, parity) != KV_SLOT || kv_get(&part->pushed[parity]) != call->round)
        return 0;
    for (int j = 0; j < call->n_outs; j++)
        if (call->outs[j] < end && from < call->outs[j] + call->entry->nbytes)
            return 1;
    return 0;
}

/* ------------------------------------------------------------------------------------------------ the work */

static inline ptrdiff_t kv_chunk_size(const kv_entry *e)
{
    return KV_SHARE_BYTES / kv_itemsize[e->dtype];
}

static int kv_in_place_now(const kv_self *me, const kv_part *part, int parity)
{
    return kv_kind_of(part, parity) == KV_IN_PLACE && !me->go_on;
}

/* The sum of one chunk, from arrays that this process can reach, into the value that is not in use, the arrays in the
 * region that want it, and this process's own outs. */
static void kv_sum_here(kv_self *me, const kv_call *call, char *to, char **src, const kv_coding *coding, int k, char **out,
                        int m, ptrdiff_t from, ptrdiff_t end)
{
    kv_item it = {.dtype = call->entry->dtype, .rule = -1, .k = k, .m = m, .n = (ptrdiff_t)call->entry->n};
    it.stream = call->stream;
    it.dst = to;
    it.src = src;
    it.coding = coding;
    it.out = out;
    (*me->level)->item_span(&it, from, end);
    if (it.stream)
        (*me->level)->fence();
}

/* Read a block of another worker's own memory. */
static int kv_read_peer(kv_self *me, int w, uint64_t address, char *to, size_t bytes)
{
    pid_t pid = (pid_t)kv_get(&me->head->worker[w].pid);
    while (bytes) {
        struct iovec here = {to, bytes}, there = {(void *)(uintptr_t)address, bytes};
        ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (got <= 0)
            return -1;
        to += got;
        address += (uint64_t)got;
        bytes -= (size_t)got;
    }
    return 0;
}

static int kv_read_private(kv_self *me, int w, uint64_t address, char *to, uint64_t bytes)
{
    if (w != me->rank)
        return kv_read_peer(me, w, address, to, (size_t)bytes);
    memcpy(to, (const void *)(uintptr_t)address, (size_t)bytes);
    return 0;
}

/* Everything that goes into a sum, in the order of the ranks. */
typedef struct {
    char *src[KV_MAX_WORKERS], *out[2 * KV_MAX_WORKERS + 16];
    int worker[KV_MAX_WORKERS], remote[KV_MAX_WORKERS];
    uint64_t address[KV_MAX_WORKERS];
    kv_coding coding[KV_MAX_WORKERS];
    const kv_coding *coded; /* NULL where all are plain */
    int k, m, n_remote;
} kv_sources;

static void kv_gather(kv_self *me, const kv_call *call, uint64_t round, uint64_t mask, kv_sources *s)
{
    const kv_entry *e = call->entry;
    const kv_part *part = kv_parts(me, e);
    int parity = (int)(round & 1), mine = round == call->round;
    s->k = s->m = s->n_remote = 0;
    s->coded = NULL;
    for (int w = 0; w < me->size; w++) {
        if (!(mask >> w & 1))
            continue;
        int i = s->k++;
        s->worker[i] = w;
        s->remote[i] = 0;
        s->address[i] = part[w].source[parity];
        s->coding[i] = (kv_coding){0};
        if (kv_kind_of(&part[w], parity) == KV_PACKED) {
            s->src[i] = (char *)kv_at(me, s->address[i]);
            s->coding[i].code = (int)(part[w].kind[parity] >> 8);
            s->coding[i].packed = 1;
            s->coding[i].threshold = part[w].threshold[parity];
            s->coded = s->coding;
        } else if (kv_kind_of(&part[w], parity) != KV_PRIVATE) {
            s->src[i] = (char *)kv_at(me, s->address[i]);
            if (kv_in_place_now(me, &part[w], parity) && kv_sums(me))
                s->out[s->m++] = s->src[i];
        } else if (w == me->rank) {
            s->src[i] = (char *)(uintptr_t)s->address[i];
        } else {
            s->remote[i] = 1;
            s->n_remote++;
        }
    }
    if (mine && call->delivered)
        for (int j = 0; j < call->n_outs; j++)
            s->out[s->m++] = call->outs[j];
}

/* Blocks of what lies in other processes go through a buffer that stays in the cache. */
static int kv_fetch_remote(kv_self *me, kv_sources *s, ptrdiff_t size, ptrdiff_t from, ptrdiff_t end)
{
    char *buffer = me->bounce;
    for (int i = 0; i < s->k && s->n_remote; i++) {
        if (!s->remote[i])
            continue;
        size_t bytes = (size_t)((end - from) * size);
        if (kv_read_peer(me, s->worker[i], s->address[i] + (uint64_t)(from * size), buffer, bytes))
            return KV_UNREADABLE;
        s->src[i] = buffer - from * size;
        buffer += KV_SHARE_BYTES + 256;
    }
    return KV_READY;
}

static int kv_sum_gathered(kv_self *me, const kv_call *call, kv_sources *s, char *to, ptrdiff_t from, ptrdiff_t end)
{
    int outcome = kv_fetch_remote(me, s, kv_itemsize[call->entry->dtype], from, end);
    if (outcome == KV_READY)
        kv_sum_here(me, call, to, s->src, s->coded, s->k, s->out, s->m, from, end);
    return outcome;
}

static int kv_sum_chunk(kv_self *me, const kv_call *call, uint64_t round, uint64_t mask, uint64_t current,
                        ptrdiff_t from, ptrdiff_t end)
{
    kv_sources s;
    kv_gather(me, call, round, mask, &s);
    return kv_sum_gathered(me, call, &s, (char *)kv_at(me, call->entry->value[1 - current]), from, end);
}

/* The sum of what these have pushed into a round, into memory of this process. */
static void kv_sum_of(kv_self *me, kv_entry *e, uint64_t round, uint64_t mask, char *to)
{
    kv_call call = {.entry = e};
    kv_sources s;
    pthread_mutex_lock(&me->busy);
    kv_enter_round(me, KV_SUMMING, e->number, round, e->nbytes);
    kv_gather(me, &call, round, mask, &s);
    s.m = 0;
    for (ptrdiff_t at = 0, size = kv_chunk_size(e); at < (ptrdiff_t)e->n && kv_get(&e->failed) != round; at += size) {
        ptrdiff_t end = at + size < (ptrdiff_t)e->n ? at + size : (ptrdiff_t)e->n;
        if (kv_sum_gathered(me, &call, &s, to, at, end) != KV_READY)
            kv_put(&e->failed, round);
    }
    pthread_mutex_unlock(&me->busy);
}

/* The sum of an opened round. */
static void kv_sum_private(kv_self *me, kv_entry *e, uint64_t round, char *to)
{
    kv_sum_of(me, e, round, e->mask, to);
}

/* What an update works on: weight, float32 copy, states. */
typedef struct {
    char *home[KV_LOG_ARRAYS];
    ptrdiff_t size[KV_LOG_ARRAYS];
    int n;
} kv_homes;

static void kv_find_homes(kv_self *me, const kv_entry *e, uint64_t current, kv_homes *h)
{
    ptrdiff_t size = kv_itemsize[e->dtype], wide = e->master ? (ptrdiff_t)sizeof(float) : size;
    h->n = 0;
    h->home[h->n] = (char *)kv_at(me, e->value[current]);
    h->size[h->n++] = size;
    if (e->master) {
        h->home[h->n] = (char *)kv_at(me, e->master);
        h->size[h->n++] = wide;
    }
    for (int j = 0; j < e->n_states; j++) {
        h->home[h->n] = (char *)kv_at(me, e->states[j]);
        h->size[h->n++] = wide;
    }
}

static char *kv_saved(kv_self *me, const kv_log *log, int i)
{
    return (char *)kv_at(me, log->scratch) + (size_t)i * KV_LOG_ELEMENTS * sizeof(double) + (size_t)(i % 4) * 1088;
}

/* Remember a block as it is, then say that it is about to change. */
static void kv_save_block(kv_self *me, kv_log *log, const kv_homes *h, uint64_t end)
{
    uint64_t from = log->at;
    for (int i = 0; i < h->n; i++)
        memcpy(kv_saved(me, log, i), h->home[i] + from * (uint64_t)h->size[i], (end - from) * (uint64_t)h->size[i]);
    kv_put(&log->changing, end);
    kv_fence();
}

/* A block that somebody died within: as it was before. */
static void kv_restore_block(kv_self *me, const kv_log *log, const kv_homes *h)
{
    uint64_t from = log->at, end = kv_get(&log->changing);
    for (int i = 0; i < h->n && from < end; i++)
        memcpy(h->home[i] + from * (uint64_t)h->size[i], kv_saved(me, log, i), (end - from) * (uint64_t)h->size[i]);
}

/* Update elements `from` to `end`. */
static int kv_update_block(kv_self *me, const kv_call *call, uint64_t round, const kv_homes *h, ptrdiff_t from,
                           ptrdiff_t end)
{
    const kv_entry *e = call->entry;
    kv_sources s;
    kv_gather(me, call, round, e->mask, &s);
    int outcome = kv_fetch_remote(me, &s, kv_itemsize[e->dtype], from, end);
    if (outcome != KV_READY)
        return outcome;
    kv_item it = {.dtype = e->dtype, .rule = e->rule, .k = s.k, .n = (ptrdiff_t)e->n, .n_states = e->n_states};
    it.src = s.src;
    it.coding = s.coded;
    it.dst = h->home[0];
    it.master = e->master ? h->home[1] : NULL;
    for (int j = 0; j < e->n_states; j++)
        it.states[j] = h->home[j + (e->master ? 2 : 1)];
    it.p = e->params;
    (*me->level)->item_span(&it, from, end);
    return KV_READY;
}

static int kv_update_chunk(kv_self *me, const kv_call *call, kv_log *log, uint64_t current, ptrdiff_t end)
{
    kv_homes h;
    kv_find_homes(me, call->entry, current, &h);
    kv_restore_block(me, log, &h);
    while ((ptrdiff_t)log->at < end) {
        ptrdiff_t from = (ptrdiff_t)log->at, to = from + KV_LOG_ELEMENTS < end ? from + KV_LOG_ELEMENTS : end;
        kv_save_block(me, log, &h, (uint64_t)to);
        int outcome = kv_update_block(me, call, log->round, &h, from, to);
        if (outcome != KV_READY)
            return outcome;
        atomic_thread_fence(memory_order_release);
        log->at = (uint64_t)to;
    }
    return KV_READY;
}

/* ----------------------------------------------------------------------------------------------- the chunks */

/* Each chunk has a word: the last round that took it, by whom, and whether it is done. */
enum kv_taken { KV_TAKEN = 1, KV_DONE = 2 };

static inline uint64_t kv_chunk_word(uint64_t round, int rank, enum kv_taken how)
{
    return round << 16 | (uint64_t)rank << 8 | (uint64_t)how;
}

static inline _Atomic uint64_t *kv_map(kv_self *me, const kv_entry *e)
{
    return (_Atomic uint64_t *)kv_at(me, e->map);
}

static int kv_all_done(kv_self *me, const kv_entry *e, uint64_t round)
{
    const _Atomic uint64_t *map = kv_map(me, e);
    for (uint64_t c = 0; c < e->chunks; c++) {
        uint64_t word = kv_get(&map[c]);
        if (word >> 16 != round || (word & 0xff) != KV_DONE)
            return 0;
    }
    return 1;
}

/* Whether somebody has given up a round whose sum would read its memory: no array of that worker may be touched then,
 * least of all by itself, to whom no system call says that it is gone. Updates read slots only, and go on. */
static int kv_withdrawn(const kv_entry *e, uint64_t round)
{
    return e->rule < 0 && kv_get(&e->failed) == round;
}

/* The chunk that the log names, to its end. What cannot be read fails the round, and the round goes on. */
static int kv_finish_chunk(kv_self *me, kv_call *call, kv_log *log, uint64_t phase)
{
    kv_entry *e = call->entry;
    ptrdiff_t size = kv_chunk_size(e), from = (ptrdiff_t)log->chunk * size;
    ptrdiff_t end = from + size < (ptrdiff_t)e->n ? from + size : (ptrdiff_t)e->n;
    uint64_t nbytes = (uint64_t)(end - from) * (uint64_t)kv_itemsize[e->dtype], current = kv_current_of(phase);
    int outcome = KV_UNREADABLE;
    kv_enter_round(me, e->rule < 0 ? KV_SUMMING : KV_UPDATING, e->number, log->round, nbytes);
    if (!kv_withdrawn(e, log->round))
        outcome = e->rule < 0 ? kv_sum_chunk(me, call, log->round, e->mask, current, from, end)
                              : kv_update_chunk(me, call, log, current, end);
    if (outcome != KV_READY)
        kv_put(&e->failed, log->round);
    else if (e->rule < 0 && call->delivered && log->round == call->round)
        call->delivered[log->chunk] = 1;
    kv_put(&kv_map(me, e)[log->chunk], kv_chunk_word(log->round, me->rank, KV_DONE));
    kv_put(&log->entry, 0);
    return KV_READY;
}

static int kv_do_chunk(kv_self *me, kv_call *call, kv_log *log, uint64_t phase, uint64_t chunk)
{
    log->round = kv_round_of(phase);
    log->chunk = chunk;
    log->at = chunk * (uint64_t)kv_chunk_size(call->entry);
    kv_put(&log->changing, 0);
    kv_put(&log->entry, (uint64_t)((char *)call->entry - me->base));
    return kv_finish_chunk(me, call, log, phase);
}

static int kv_take_chunk(kv_self *me, const kv_entry *e, uint64_t round, uint64_t chunk)
{
    _Atomic uint64_t *word = &kv_map(me, e)[chunk];
    uint64_t now = kv_get(word);
    return now >> 16 < round && kv_swap(word, now, kv_chunk_word(round, me->rank, KV_TAKEN));
}

/* Take chunks until none is left: of the own share first, so that its memory stays in this core's cache; of the
 * others' from behind, where their owners come last. */
static int kv_work(kv_self *me, kv_call *call, uint64_t phase)
{
    uint64_t chunks = call->entry->chunks, size = (uint64_t)me->size, round = kv_round_of(phase);
    for (int i = 0; i < me->size; i++) {
        uint64_t w = (uint64_t)((me->rank + i) % me->size), begin = chunks * w / size, end = chunks * (w + 1) / size;
        for (uint64_t j = begin; j < end; j++) {
            uint64_t chunk = i ? end - 1 - (j - begin) : j;
            pthread_mutex_lock(&me->busy);
            if (kv_take_chunk(me, call->entry, round, chunk))
                kv_do_chunk(me, call, &me->worker->log, phase, chunk);
            pthread_mutex_unlock(&me->busy);
        }
    }
    return KV_READY;
}

/* Whether a sum that a dead worker had begun may be in arrays that it reads. The own memory of a dead one is such: it
 * can be read for some time after the death is known, and has the result where that goes to the array which was pushed.
 * Of any dead one: who finishes what another has begun may die over it, too. */
static int kv_over_sources(kv_self *me, const kv_entry *e, uint64_t round)
{
    const kv_part *part = kv_parts(me, e);
    int parity = (int)(round & 1);
    for (int w = 0; w < me->size && e->rule < 0; w++)
        if (e->mask >> w & 1 && (kv_in_place_now(me, &part[w], parity) ||
                                 (kv_state(me, w) == KV_LOST && kv_kind_of(&part[w], parity) == KV_PRIVATE)))
            return 1;
    return 0;
}

/* A chunk that its owner, who is dead, had taken. A sum over its own sources cannot be done again once it was begun:
 * the round then comes to nothing. */
static void kv_take_over(kv_self *me, kv_call *call, int owner, uint64_t phase, uint64_t chunk)
{
    kv_entry *e = call->entry;
    kv_log *log = &me->head->worker[owner].log;
    uint64_t round = kv_round_of(phase), here = (uint64_t)((char *)e - me->base);
    if (kv_get(&log->entry) != here || log->round != round || log->chunk != chunk) {
        kv_do_chunk(me, call, log, phase, chunk);
    } else if (!kv_over_sources(me, e, round)) {
        kv_finish_chunk(me, call, log, phase);
    } else {
        kv_put(&e->failed, round);
        kv_put(&kv_map(me, e)[chunk], kv_chunk_word(round, me->rank, KV_DONE));
        kv_put(&log->entry, 0);
    }
}

/* Finish what the dead have taken: each chunk in its owner's log, so that another can go on should this worker die
 * too. A chunk without a log was not begun. */
static int kv_recover(kv_self *me, kv_call *call, uint64_t phase)
{
    kv_entry *e = call->entry;
    uint64_t round = kv_round_of(phase);
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    for (uint64_t c = 0; c < e->chunks && kv_get(&e->phase) == phase; c++) {
        uint64_t word = kv_get(&kv_map(me, e)[c]);
        int owner = (int)(word >> 8 & 0xff);
        if (word >> 16 != round || (word & 0xff) != KV_TAKEN || kv_state(me, owner) != KV_LOST)
            continue;
        if (kv_get(&kv_map(me, e)[c]) != word)
            continue; /* it was done before its owner died */
        pthread_mutex_lock(&me->busy);
        kv_take_over(me, call, owner, phase, c);
        pthread_mutex_unlock(&me->busy);
    }
    kv_unlock_region(me);
    return KV_READY;
}

/* --------------------------------------------------------------------------------------------- the phases */

/* Make the round of an opened or opening phase complete; `current` is the value that is in use from now on. */
static int kv_close(kv_self *me, kv_entry *e, uint64_t phase, uint64_t current)
{
    uint64_t version = kv_version_of(phase) + (current != kv_current_of(phase));
    if (kv_get(&e->failed) != kv_round_of(phase))
        kv_put(&e->of[current], kv_round_of(phase));
    if (!kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase), kv_opener_of(phase), version, KV_CLOSED)))
        return 0;
    kv_wake_all(me);
    return 1;
}

/* The other value and the chunks' bookkeeping, made when they are first needed. The lock is not held. */
static int kv_make_room(kv_self *me, kv_entry *e)
{
    for (int i = 0; i < 2; i++)
        if (!e->value[i]) {
            uint64_t offset;
            int outcome = kv_take(me, e->nbytes, KV_VALUE_COLOUR + i, &offset);
            if (outcome != KV_READY)
                return outcome;
            e->value[i] = offset;
        }
    return KV_READY;
}

/* Put the work of an opening round out for everybody. `rule` < 0: a sum. */
static void kv_put_out(kv_self *me, kv_entry *e, uint64_t phase, int rule)
{
    e->rule = rule;
    kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase), kv_opener_of(phase), kv_version_of(phase), KV_OPEN));
    kv_wake_all(me);
}

/* Make a key the opener's; the phase that it has then, or 0: another was faster. */
static uint64_t kv_hold(kv_self *me, kv_entry *e, uint64_t phase)
{
    uint64_t round = kv_complete_round(phase) + 1;
    uint64_t opening = kv_phase_word(round, me->rank, kv_version_of(phase), KV_OPENING);
    if (!kv_swap(&e->phase, phase, opening))
        return 0;
    kv_put(&e->of[1 - kv_current_of(phase)], KV_NO_ROUND);
    kv_put(&e->updates[round & 1], kv_get(&e->updates[1 - (round & 1)]));
    return opening;
}

/* Updates that the optimizer has made of the key. Those of the round under way do not count before it is complete. */
static _Atomic uint64_t *kv_updates(kv_entry *e)
{
    return &e->updates[kv_complete_round(kv_get(&e->phase)) & 1];
}

static _Atomic uint64_t *kv_next_updates(kv_entry *e)
{
    return &e->updates[(kv_complete_round(kv_get(&e->phase)) + 1) & 1];
}

static void kv_return(kv_self *me, kv_entry *e, int other)
{
    uint64_t phase = kv_get(&e->phase), version = kv_version_of(phase) + (other != 0);
    if (other)
        kv_put(&e->of[1 - kv_current_of(phase)], kv_round_of(phase) - 1);
    kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase) - 1, 0, version, KV_CLOSED));
    kv_wake_all(me);
}

static int kv_has_kind(kv_self *me, const kv_entry *e, uint64_t round, uint64_t mask, enum kv_kind kind)
{
    const kv_part *part = kv_parts(me, e);
    for (int w = 0; w < me->size; w++)
        if (mask >> w & 1 && kv_kind_of(&part[w], (int)(round & 1)) == kind)
            return 1;
    return 0;
}

/* Whether a source of the opened round is a list of rows: Python adds those up. */
static int kv_has_rows(kv_self *me, const kv_entry *e, uint64_t round, uint64_t mask)
{
    return e->sparse || kv_has_kind(me, e, round, mask, KV_ROWS);
}

/* Whether a source lies on a GPU: Python says what becomes of the round. */
static int kv_has_on_gpu(kv_self *me, const kv_entry *e, uint64_t round, uint64_t mask)
{
    return kv_get(&e->gpu_table) && kv_has_kind(me, e, round, mask, KV_ON_GPU);
}

static int kv_is_python_s(kv_self *me, const kv_entry *e, uint64_t round, uint64_t mask)
{
    return kv_has_rows(me, e, round, mask) || kv_has_on_gpu(me, e, round, mask);
}

/* What stands in a block of `undo`: for which round, how many pieces, and each piece: where it belongs, bytes of a row,
 * number of rows, whether ids stand before the rows (else all rows follow each other). */
typedef struct {
    uint64_t home, row_bytes, n, by_ids;
} kv_piece;

/* Put back what the worker that opened `round` had begun to change, and did not live to see through. */
static void kv_undo(kv_self *me, kv_entry *e, uint64_t round)
{
    uint64_t offset = kv_get(&e->undo), *block = (uint64_t *)kv_at(me, offset);
    if (!offset || block[0] != round)
        return;
    char *at = (char *)(block + 2);
    for (uint64_t i = 0; i < block[1]; i++) {
        kv_piece piece;
        memcpy(&piece, at, sizeof piece);
        const uint64_t *ids = (const uint64_t *)(at + sizeof piece);
        const char *rows = (const char *)(ids + (piece.by_ids ? piece.n : 0));
        for (uint64_t j = 0; j < piece.n; j++)
            memcpy((char *)kv_at(me, piece.home) + (piece.by_ids ? ids[j] : j) * piece.row_bytes,
                   rows + j * piece.row_bytes, piece.row_bytes);
        at = (char *)rows + ((piece.n * piece.row_bytes + 7) & ~7ull);
    }
    kv_put(&e->undo, 0);
}

/* The round was opened by this worker, or taken over from a dead one: prepare its work.
 * KV_PLAN: Python does, and then calls kv_put_out or kv_close. */
static int kv_prepare(kv_self *me, kv_call *call, uint64_t phase)
{
    kv_entry *e = call->entry;
    kv_undo(me, e, kv_round_of(phase));
    if (!kv_everyone(me, e, kv_round_of(phase), &e->mask)) {
        kv_return(me, e, 0);
        return KV_READY;
    }
    if (!kv_sums(me) || kv_is_python_s(me, e, kv_round_of(phase), e->mask))
        return KV_PLAN;
    int outcome = kv_make_room(me, e);
    if (outcome != KV_READY) {
        kv_return(me, e, 0);
        return outcome;
    }
    if (e->nbytes > KV_SMALL_KEY) {
        kv_put_out(me, e, phase, -1);
        return KV_READY;
    }
    uint64_t current = kv_current_of(phase);
    kv_enter_round(me, KV_SUMMING, e->number, kv_round_of(phase), e->nbytes);
    kv_sum_chunk(me, call, kv_round_of(phase), e->mask, current, 0, (ptrdiff_t)e->n);
    if (call->delivered && kv_round_of(phase) == call->round)
        call->delivered[0] = 1;
    kv_close(me, e, phase, 1 - current);
    return KV_READY;
}

static int kv_in_step(const kv_self *me)
{
    return kv_sums(me) || me->mode == kv_get(&me->head->mode);
}

typedef struct {
    kv_self *me;
    const kv_entry *entry;
    uint64_t phase, epoch;
} kv_watch;

/* Whether there is something to do, or to look at again, in a key that was seen in a phase. */
static int kv_changed(void *context)
{
    const kv_watch *watch = (const kv_watch *)context;
    const kv_entry *e = watch->entry;
    uint64_t in;
    if (kv_get(&e->phase) != watch->phase || kv_get(&watch->me->head->epoch) != watch->epoch)
        return 1;
    if (kv_step_of(watch->phase) == KV_CLOSED)
        return kv_in_step(watch->me) && kv_everyone(watch->me, e, kv_round_of(watch->phase) + 1, &in);
    return kv_step_of(watch->phase) == KV_OPEN && kv_all_done(watch->me, e, kv_round_of(watch->phase));
}

/* Who holds up an open round: the owner of a chunk that is not done. */
static int kv_slowest(kv_self *me, const kv_entry *e, uint64_t round)
{
    for (uint64_t c = 0; c < e->chunks; c++) {
        uint64_t word = kv_get(&kv_map(me, e)[c]);
        if (word >> 16 == round && (word & 0xff) == KV_TAKEN)
            return (int)(word >> 8 & 0xff);
    }
    return KV_NOBODY;
}

static kv_about kv_about_watch(const void *context)
{
    const kv_watch *watch = (const kv_watch *)context;
    const kv_entry *e = watch->entry;
    uint64_t round = kv_complete_round(watch->phase) + 1, in;
    int whom = kv_opener_of(watch->phase);
    if (kv_step_of(watch->phase) == KV_CLOSED)
        whom = kv_first_missing(watch->me, e, round, &in);
    else if (kv_step_of(watch->phase) == KV_OPEN)
        whom = kv_slowest(watch->me, e, round);
    return (kv_about){e->number, round, e->nbytes, whom, watch->me->store};
}

/* Whether this worker may open the next round, or take over the opening of a dead one. */
static int kv_may_open(kv_self *me, const kv_entry *e, uint64_t phase)
{
    uint64_t in;
    if (!kv_in_step(me))
        return 0;
    if (kv_step_of(phase) == KV_CLOSED)
        return kv_everyone(me, e, kv_round_of(phase) + 1, &in);
    int opener = kv_opener_of(phase);
    return opener != me->rank && !kv_here(kv_get(&me->head->worker[opener].state));
}

static int kv_open(kv_self *me, kv_call *call, uint64_t phase)
{
    uint64_t opening = kv_hold(me, call->entry, phase);
    return opening ? kv_prepare(me, call, opening) : KV_READY;
}

/* An open round: work, then see it closed, or what the dead have left of it finished. */
static int kv_bring_to_close(kv_self *me, kv_call *call, uint64_t phase)
{
    kv_entry *e = call->entry;
    uint64_t round = kv_round_of(phase), current = kv_current_of(phase);
    kv_work(me, call, phase);
    if (!kv_all_done(me, e, round) && kv_get(&me->head->lost)) {
        int outcome = kv_recover(me, call, phase);
        if (outcome != KV_READY)
            return outcome;
    }
    if (kv_all_done(me, e, round))
        kv_close(me, e, phase, e->rule < 0 && kv_get(&e->failed) != round ? 1 - current : current);
    return KV_READY;
}

/* Bring the key forward until the call's round is complete, or, without patience, as far as it goes without waiting. */
static int kv_bring_forward(kv_self *me, kv_call *call, int patient)
{
    kv_entry *e = call->entry;
    for (;;) {
        kv_watch watch = {me, e, 0, kv_get(&me->head->epoch)};
        uint64_t phase = watch.phase = kv_get(&e->phase);
        int outcome = KV_READY;
        if (kv_complete_round(phase) >= call->round)
            return KV_READY;
        if (!kv_in_step(me) && me->tried != kv_get(&me->head->mode))
            return KV_NEW_MODE;
        if (kv_step_of(phase) == KV_OPEN)
            outcome = kv_bring_to_close(me, call, phase);
        else if (kv_may_open(me, e, phase))
            outcome = kv_open(me, call, phase);
        if (outcome != KV_READY)
            return outcome;
        if (kv_get(&e->phase) != phase)
            continue;
        if (!patient)
            return KV_TICK;
        outcome = kv_await(me, kv_changed, kv_about_watch, &watch, 1);
        /* An open round can be brought to its end by those who are left, and is. */
        if (outcome == KV_PEER_LOST && kv_step_of(phase) == KV_OPEN)
            continue;
        if (outcome != KV_READY)
            return outcome;
    }
}

static int kv_advance(kv_self *me, kv_call *call)
{
    return kv_bring_forward(me, call, 1);
}

/* Hold a closed key, or one that a dead worker has left held or opening, so that nobody opens its next round; for
 * changes from outside of rounds. KV_TICK: not yet. */
static int kv_borrow(kv_self *me, kv_entry *e)
{
    kv_watch watch = {me, e, 0, kv_get(&me->head->epoch)};
    uint64_t phase = watch.phase = kv_get(&e->phase);
    kv_call call = {.entry = e, .round = kv_round_of(phase)};
    int outcome, opener = kv_opener_of(phase);
    if (kv_step_of(phase) == KV_OPEN)
        outcome = kv_advance(me, &call);
    else if (kv_step_of(phase) == KV_CLOSED || (opener != me->rank && !kv_here(kv_get(&me->head->worker[opener].state))))
        return kv_hold(me, e, phase) ? KV_READY : KV_TICK;
    else
        outcome = kv_await(me, kv_changed, kv_about_watch, &watch, 1);
    return outcome == KV_READY ? KV_TICK : outcome;
}

typedef struct {
    kv_self *me;
    const kv_entry *entry;
    uint64_t round, in, epoch;
} kv_arrivals;

static int kv_have_arrived(void *context)
{
    kv_arrivals *a = (kv_arrivals *)context;
    return kv_everyone(a->me, a->entry, a->round, &a->in) || kv_get(&a->me->head->epoch) != a->epoch;
}

static kv_about kv_about_arrivals(const void *context)
{
    const kv_arrivals *a = (const kv_arrivals *)context;
    uint64_t in;
    int whom = kv_first_missing(a->me, a->entry, a->round, &in);
    return (kv_about){a->entry->number, a->round, a->entry->nbytes, whom, a->me->store};
}

/* Store the sum of a small key, as the value. The same worker does it every time: its cache has the place. */
static int kv_store_sum(kv_self *me, kv_entry *e, uint64_t round, uint64_t in, const char *sum)
{
    uint64_t phase = kv_get(&e->phase), opening;
    if (kv_complete_round(phase) >= round)
        return 1;
    if (phase >> 16 != round - 1 || kv_step_of(phase) != KV_CLOSED || !(opening = kv_hold(me, e, phase)))
        return 0;
    e->mask = in;
    memcpy(kv_at(me, e->value[1 - kv_current_of(phase)]), sum, e->nbytes);
    kv_close(me, e, opening, 1 - kv_current_of(phase));
    return 1;
}

/* A small key that is only summed: nobody waits for the work of another. As soon as all have arrived, each sums for
 * itself; the lowest rank stores the sum. From then on the others may fill their slots anew, for round + 2: who has
 * not read them yet takes what was stored. Without patience, all must arrive while this worker spins. */
static int kv_sum_small(kv_self *me, kv_call *call, int patient)
{
    kv_entry *e = call->entry;
    kv_arrivals a = {me, e, call->round, 0, kv_get(&me->head->epoch)};
    int outcome = kv_await(me, kv_have_arrived, kv_about_arrivals, &a, patient);
    if (outcome != KV_READY)
        return outcome;
    if (!a.in || !kv_sums(me) || !call->n_outs || kv_is_python_s(me, e, call->round, a.in))
        return kv_bring_forward(me, call, patient);
    /* Another worker may have seen the round complete, as an update, and then have gone back to sums. */
    if (kv_get(&me->head->mode) && kv_complete_round(kv_get(&e->phase)) >= call->round)
        return kv_bring_forward(me, call, patient);
    kv_sources s;
    kv_enter_round(me, KV_SUMMING, e->number, call->round, e->nbytes);
    kv_gather(me, call, call->round, a.in, &s);
    kv_sum_here(me, call, NULL, s.src, s.coded, s.k, call->outs, call->n_outs, 0, (ptrdiff_t)e->n);
    if (!kv_still_there(me, e, call->round, a.in))
        return kv_bring_forward(me, call, patient);
    call->delivered[0] = 1;
    if (me->rank == __builtin_ctzll(a.in) && !kv_store_sum(me, e, call->round, a.in, call->outs[0]))
        return kv_bring_forward(me, call, patient);
    return KV_READY;
}

/* The last round that this worker has pushed into; 0: none. */
static uint64_t kv_pushed_round(kv_self *me, const kv_entry *e)
{
    const kv_part *part = &kv_parts(me, e)[me->rank];
    uint64_t arrived = kv_get(&part->arrived);
    return arrived >= kv_get(&part->first) ? arrived : 0;
}

/* The first key from number `from` on with a round that this worker has pushed into and that is not complete; else `n`. */
static uint64_t kv_next_behind(kv_self *me, uint64_t from, uint64_t n)
{
    for (; from < n; from++) {
        const kv_entry *e = kv_entry_at(me, from);
        if (kv_pushed_round(me, e) > kv_complete_round(kv_get(&e->phase)))
            break;
    }
    return from;
}

/* Whether a round that is not complete has all its parts, and has been opened by nobody who is here; `in`: who is in it. */
static int kv_is_unopened(kv_self *me, const kv_entry *e, uint64_t round, uint64_t *in)
{
    uint64_t phase = kv_get(&e->phase);
    if (kv_step_of(phase) != KV_CLOSED && kv_round_of(phase) == round &&
        kv_here(kv_get(&me->head->worker[kv_opener_of(phase)].state)))
        return 0;
    return round > kv_complete_round(phase) && kv_everyone(me, e, round, in);
}

/* Whether nobody is at work on the key's value: what is left is the round of a value that stays, or a dead worker's. */
static int kv_at_rest(kv_self *me, const kv_entry *e)
{
    uint64_t phase = kv_get(&e->phase);
    if (kv_step_of(phase) == KV_OPENING)
        return !kv_here(kv_get(&me->head->worker[kv_opener_of(phase)].state));
    return kv_step_of(phase) == KV_CLOSED;
}

/* After a loss: have the value of an earlier round in use again. 0: it is not there, or an optimizer's states are ahead. */
static int kv_step_back(kv_self *me, kv_entry *e, uint64_t round)
{
    uint64_t phase = kv_get(&e->phase), current = kv_current_of(phase);
    if (kv_step_of(phase) != KV_CLOSED || !kv_sums(me) || kv_get(&e->gpu_table) || kv_get(&e->of[1 - current]) != round)
        return 0;
    uint64_t version = kv_version_of(phase) + 1;
    return kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase), kv_opener_of(phase), version, KV_CLOSED));
}

/* Who has left without having joined, and was not told of yet. */
static uint64_t kv_leavers(kv_self *me)
{
    uint64_t epoch = kv_get(&me->head->epoch);
    if (epoch == me->left_at)
        return me->left & ~me->left_told;
    me->left_at = epoch;
    me->left = 0;
    kv_note_losses(me);
    for (int w = 0; w < me->size; w++) {
        const kv_worker *peer = &me->head->worker[w];
        if (kv_state(me, w) == KV_LEFT && kv_get(&peer->joined) != kv_get(&peer->incarnation))
            me->left |= kv_bit(w);
    }
    me->left_told &= me->left;
    return me->left & ~me->left_told;
}

/* Of these, who has pushed into the key and is not in a round that is complete. */
static uint64_t kv_left_out(kv_self *me, const kv_entry *e, uint64_t round)
{
    const kv_part *part = kv_parts(me, e);
    uint64_t out = kv_leavers(me);
    for (int w = 0; out && w < me->size; w++) {
        uint64_t even = kv_get(&part[w].pushed[0]), odd = kv_get(&part[w].pushed[1]), last = even > odd ? even : odd;
        if (!last || last >= round)
            out &= ~kv_bit(w);
    }
    return out;
}

/* Push number `arrived + 1` needs the memory of the push before the last: see that round complete. */
static int kv_wait_for_free_slot(kv_self *me, kv_entry *e)
{
    uint64_t arrived = kv_get(&kv_parts(me, e)[me->rank].arrived);
    if (arrived < 2 || kv_complete_round(kv_get(&e->phase)) + 1 >= arrived)
        return KV_READY;
    kv_call call = {.entry = e, .round = arrived - 1};
    return kv_advance(me, &call);
}

/* After the round: the result into those outs and chunks that do not have it yet. KV_TICK: the value changed meanwhile
 * (which only a worker that is no member can see); try again. */
static int kv_deliver(kv_self *me, kv_call *call)
{
    kv_entry *e = call->entry;
    if (!call->n_outs)
        return KV_READY;
    uint64_t phase = kv_get(&e->phase);
    if (kv_step_of(phase) == KV_OPEN) { /* perhaps by the dead only: see it closed */
        kv_call other = {.entry = e, .round = kv_round_of(phase)};
        int outcome = kv_advance(me, &other);
        return outcome == KV_READY ? KV_TICK : outcome;
    }
    char *from = (char *)kv_at(me, e->value[kv_current_of(phase)]);
    ptrdiff_t size = kv_chunk_size(e);
    for (uint64_t c = 0; c < e->chunks; c++) {
        ptrdiff_t at = (ptrdiff_t)c * size, end = at + size < (ptrdiff_t)e->n ? at + size : (ptrdiff_t)e->n;
        if (call->delivered && call->delivered[c])
            continue;
        uint64_t nbytes = (uint64_t)(end - at) * (uint64_t)kv_itemsize[e->dtype];
        kv_enter_round(me, KV_MOVING, e->number, kv_complete_round(phase), nbytes);
        kv_sum_here(me, call, NULL, &from, NULL, 1, call->outs, call->n_outs, at, end);
    }
    atomic_thread_fence(memory_order_acquire);
    uint64_t now = kv_get(&e->phase);
    /* Only an open round writes to the value in use; one that is being prepared, perhaps by a dead worker, does not. */
    int calm = kv_step_of(now) != KV_OPEN && kv_version_of(now) == kv_version_of(phase) &&
               kv_complete_round(now) == kv_complete_round(phase);
    return calm ? KV_READY : KV_TICK;
}

#endif
