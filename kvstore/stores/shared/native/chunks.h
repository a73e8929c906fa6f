/* The assignment of an open round's chunks to workers, and the recovery of chunks that a dead worker has left. All
 * functions here need the caller to be at work (`kv_begin_work`). */
#ifndef KV_CHUNKS_H
#define KV_CHUNKS_H

#include "summing.h"

/* Each chunk has a word: the last round in which it was claimed, the worker that claimed it, and whether it is
 * complete. */
enum kv_chunk_step { KV_CLAIMED = 1, KV_DONE = 2 };

static inline uint64_t kv_chunk_word(uint64_t round, int rank, enum kv_chunk_step how)
{
    return round << 16 | (uint64_t)rank << 8 | (uint64_t)how;
}

/* Return the words of a key's chunks. */
static inline _Atomic uint64_t *kv_chunk_words(kv_self *me, const kv_entry *e)
{
    return (_Atomic uint64_t *)kv_at(me, e->map);
}

/* Whether all chunks of a round are complete. */
static int kv_all_done(kv_self *me, const kv_entry *e, uint64_t round)
{
    const _Atomic uint64_t *map = kv_chunk_words(me, e);
    for (uint64_t c = 0; c < e->chunks; c++) {
        uint64_t word = kv_get(&map[c]);
        if (word >> 16 != round || (word & 0xff) != KV_DONE)
            return 0;
    }
    return 1;
}

/* Whether a worker has failed a round with a sum that would read private memory: then no thread may read the arrays
 * of that worker, not even the worker itself, because no system call reports that they are gone. Updates read slots
 * only, and continue. */
static int kv_is_sum_failed(const kv_entry *e, uint64_t round)
{
    return e->rule < 0 && kv_has_failed(e, round);
}

/* Complete the chunk that the log names. The caller holds `me->busy`. If a source cannot be read, the round fails,
 * and its other chunks continue. */
static int kv_finish_chunk(kv_self *me, kv_call *call, kv_log *log, uint64_t phase)
{
    kv_entry *e = call->entry;
    ptrdiff_t size = kv_chunk_size(e), from = (ptrdiff_t)log->chunk * size;
    ptrdiff_t end = from + size < (ptrdiff_t)e->n ? from + size : (ptrdiff_t)e->n;
    uint64_t nbytes = (uint64_t)(end - from) * (uint64_t)kv_itemsize[e->dtype], current = kv_current_of(phase);
    int outcome = KV_UNREADABLE;
    kv_enter_round(me, e->rule < 0 ? KV_SUMMING : KV_UPDATING, e->number, log->round, nbytes);
    if (!kv_is_sum_failed(e, log->round))
        outcome = e->rule < 0 ? kv_sum_chunk(me, call, log->round, e->mask, current, from, end)
                              : kv_update_chunk(me, call, log, current, end);
    if (outcome != KV_READY)
        kv_fail(e, log->round);
    else if (e->rule < 0 && kv_writes_outs(call) && log->round == call->round)
        call->delivered[log->chunk] = 1;
    kv_put(&kv_chunk_words(me, e)[log->chunk], kv_chunk_word(log->round, me->rank, KV_DONE));
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

static int kv_claim_chunk(kv_self *me, const kv_entry *e, uint64_t round, uint64_t chunk)
{
    _Atomic uint64_t *word = &kv_chunk_words(me, e)[chunk];
    uint64_t now = kv_get(word);
    return now >> 16 < round && kv_swap(word, now, kv_chunk_word(round, me->rank, KV_CLAIMED));
}

/* Process chunks until all are claimed. Begins with this worker's own share, which stays in the cache of its core;
 * then claims from the end of the other shares, which their owners reach last. Blocks for the time of the
 * computation, and on `me->busy`. */
static int kv_process_chunks(kv_self *me, kv_call *call, uint64_t phase)
{
    uint64_t chunks = call->entry->chunks, size = (uint64_t)me->size, round = kv_round_of(phase);
    for (int i = 0; i < me->size; i++) {
        uint64_t w = (uint64_t)((me->rank + i) % me->size), begin = chunks * w / size, end = chunks * (w + 1) / size;
        for (uint64_t j = begin; j < end; j++) {
            uint64_t chunk = i ? end - 1 - (j - begin) : j;
            pthread_mutex_lock(&me->busy);
            if (kv_claim_chunk(me, call->entry, round, chunk))
                kv_do_chunk(me, call, &me->worker->log, phase, chunk);
            pthread_mutex_unlock(&me->busy);
        }
    }
    return KV_READY;
}

/* Whether a sum that a dead worker had begun may have overwritten its own sources. The private memory of a dead
 * worker counts: it remains readable for a short time after the death is known, and holds the result if the pushed
 * array is also an out. This applies to every dead worker in the round, because a worker that completes the chunk of
 * another may die in it too. */
static int kv_may_overwrite_sources(kv_self *me, const kv_entry *e, uint64_t round)
{
    const kv_part *part = kv_key_parts(me, e);
    int parity = (int)(round & 1);
    for (int w = 0; w < me->size && e->rule < 0; w++)
        if (e->mask >> w & 1 && (kv_in_place_now(me, &part[w], parity) ||
                                 (kv_worker_state(me, w) == KV_LOST && kv_kind_of(&part[w], parity) == KV_PRIVATE)))
            return 1;
    return 0;
}

/* Complete a chunk that a dead worker had claimed. The caller holds the region's lock and `me->busy`. A sum over its
 * own sources cannot be repeated once it was begun: then the round fails. */
static void kv_recover_chunk(kv_self *me, kv_call *call, int owner, uint64_t phase, uint64_t chunk)
{
    kv_entry *e = call->entry;
    kv_log *log = &me->head->worker[owner].log;
    uint64_t round = kv_round_of(phase), here = (uint64_t)((char *)e - me->base);
    if (kv_get(&log->entry) != here || log->round != round || log->chunk != chunk) {
        kv_do_chunk(me, call, log, phase, chunk);
    } else if (!kv_may_overwrite_sources(me, e, round)) {
        kv_finish_chunk(me, call, log, phase);
    } else {
        kv_fail(e, round);
        kv_put(&kv_chunk_words(me, e)[chunk], kv_chunk_word(round, me->rank, KV_DONE));
        kv_put(&log->entry, 0);
    }
}

/* Complete the chunks that dead workers had claimed, each in the log of its owner, so that a third worker can
 * continue if this worker dies too. A chunk without a log was not begun. Blocks as `kv_lock_region` does, and returns
 * its outcome on failure. */
static int kv_recover_chunks(kv_self *me, kv_call *call, uint64_t phase)
{
    kv_entry *e = call->entry;
    uint64_t round = kv_round_of(phase);
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    for (uint64_t c = 0; c < e->chunks && kv_get(&e->phase) == phase; c++) {
        uint64_t word = kv_get(&kv_chunk_words(me, e)[c]);
        int owner = (int)(word >> 8 & 0xff);
        if (word >> 16 != round || (word & 0xff) != KV_CLAIMED || kv_worker_state(me, owner) != KV_LOST)
            continue;
        if (kv_get(&kv_chunk_words(me, e)[c]) != word)
            continue; /* it was done before its owner died */
        pthread_mutex_lock(&me->busy);
        kv_recover_chunk(me, call, owner, phase, c);
        pthread_mutex_unlock(&me->busy);
    }
    kv_unlock_region(me);
    return KV_READY;
}

#endif
