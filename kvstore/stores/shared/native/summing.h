/* The work on one chunk of a key: the sum of the pushed sources, wherever they are, and the update of the weights. */
#ifndef KV_SUMMING_H
#define KV_SUMMING_H

#include <sys/uio.h>

#include "arrivals.h"

/* Return the number of elements of a chunk. */
static inline ptrdiff_t kv_chunk_size(const kv_entry *e)
{
    return KV_SHARE_BYTES / kv_itemsize[e->dtype];
}

/* Whether the sum is written to the pushed array itself: only if a loss is an error, because the sum could not be
 * repeated. */
static int kv_in_place_now(const kv_self *me, const kv_part *part, int parity)
{
    return kv_kind_of(part, parity) == KV_IN_PLACE && !me->go_on;
}

/* Sum elements `from` to `end` from arrays that this process can read into `to`, the value that is not in use (or
 * NULL), and into the `m` arrays `out`. */
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

/* Read private memory of another worker. -1: the worker is dead, or the system refuses; `to` is then undefined. */
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

/* As `kv_read_peer`, but for this worker too. */
static int kv_read_private(kv_self *me, int w, uint64_t address, char *to, uint64_t bytes)
{
    if (w != me->rank)
        return kv_read_peer(me, w, address, to, (size_t)bytes);
    memcpy(to, (const void *)(uintptr_t)address, (size_t)bytes);
    return 0;
}

/* Return the bytes of a source in the region. */
static uint64_t kv_source_bytes(const kv_entry *e, const kv_part *part, int parity)
{
    if (kv_kind_of(part, parity) == KV_PACKED)
        return (uint64_t)kv_encoded_bytes(kv_code_of(part, parity), (ptrdiff_t)e->n);
    return e->nbytes;
}

/* The sources and outputs of a sum, in the order of the ranks. */
typedef struct {
    char *src[KV_MAX_WORKERS], *out[KV_MAX_WORKERS + KV_MOST_OUTS];
    int worker[KV_MAX_WORKERS], remote[KV_MAX_WORKERS];
    uint64_t address[KV_MAX_WORKERS];
    kv_coding coding[KV_MAX_WORKERS];
    const kv_coding *coded; /* NULL where all are plain */
    int k, m, n_remote;
} kv_sources;

/* Collect the sources of a round from the workers in `mask`, and the outputs. KV_UNREADABLE: a source is outside the
 * region. */
static int kv_collect_sources(kv_self *me, const kv_call *call, uint64_t round, uint64_t mask, kv_sources *s)
{
    const kv_entry *e = call->entry;
    const kv_part *part = kv_key_parts(me, e);
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
        s->coding[i] = (kv_coding){.code = kv_code_of(&part[w], parity), .threshold = part[w].threshold[parity]};
        if (s->coding[i].code)
            s->coded = s->coding;
        if (kv_kind_of(&part[w], parity) != KV_PRIVATE &&
            !kv_is_given(me, s->address[i], kv_source_bytes(e, &part[w], parity)))
            return KV_UNREADABLE;
        if (kv_kind_of(&part[w], parity) == KV_PACKED) {
            s->src[i] = (char *)kv_at(me, s->address[i]);
            s->coding[i].packed = 1;
        } else if (kv_kind_of(&part[w], parity) != KV_PRIVATE) {
            s->src[i] = (char *)kv_at(me, s->address[i]);
            if (kv_in_place_now(me, &part[w], parity) && kv_replaces_by_sum(me, call->entry))
                s->out[s->m++] = s->src[i];
        } else if (w == me->rank) {
            s->src[i] = (char *)(uintptr_t)s->address[i];
        } else {
            s->remote[i] = 1;
            s->n_remote++;
        }
    }
    if (mine && kv_writes_outs(call))
        for (int j = 0; j < call->n_outs; j++)
            s->out[s->m++] = call->outs[j];
    return KV_READY;
}

/* Copy elements `from` to `end` of the sources in other processes to a buffer that stays in the cache. The caller
 * holds `me->busy`. KV_UNREADABLE: a process cannot be read. */
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

/* Sum a chunk into the value that is not in use. The caller holds `me->busy` if a source is private. KV_UNREADABLE: a
 * source cannot be read; the elements are then undefined. */
static int kv_sum_chunk(kv_self *me, const kv_call *call, uint64_t round, uint64_t mask, uint64_t current,
                        ptrdiff_t from, ptrdiff_t end)
{
    kv_sources s;
    uint64_t to = call->entry->value[1 - current];
    if (!kv_is_given(me, to, call->entry->nbytes) || kv_collect_sources(me, call, round, mask, &s) != KV_READY)
        return KV_UNREADABLE;
    return kv_sum_gathered(me, call, &s, (char *)kv_at(me, to), from, end);
}

/* Sum the sources that the workers in `mask` have pushed into a round, into memory of this process. Blocks on
 * `me->busy` and for the computation. If a source cannot be read, the round fails, and `to` is undefined. */
static void kv_sum_of(kv_self *me, kv_entry *e, uint64_t round, uint64_t mask, char *to)
{
    kv_call call = {.entry = e};
    kv_sources s;
    pthread_mutex_lock(&me->busy);
    kv_enter_round(me, KV_SUMMING, e->number, round, e->nbytes);
    if (kv_collect_sources(me, &call, round, mask, &s) != KV_READY)
        kv_fail(e, round);
    s.m = 0;
    for (ptrdiff_t at = 0, size = kv_chunk_size(e); at < (ptrdiff_t)e->n && !kv_has_failed(e, round); at += size) {
        ptrdiff_t end = at + size < (ptrdiff_t)e->n ? at + size : (ptrdiff_t)e->n;
        if (kv_sum_gathered(me, &call, &s, to, at, end) != KV_READY)
            kv_fail(e, round);
    }
    pthread_mutex_unlock(&me->busy);
}

/* As `kv_sum_of`, for the workers in the opened round. */
static void kv_sum_private(kv_self *me, kv_entry *e, uint64_t round, char *to)
{
    kv_sum_of(me, e, round, e->mask, to);
}

/* The arrays that an update changes: weight, float32 copy, states. */
typedef struct {
    char *home[KV_LOG_ARRAYS];
    ptrdiff_t size[KV_LOG_ARRAYS];
    int n;
} kv_homes;

static int kv_add_home(kv_self *me, const kv_entry *e, kv_homes *h, uint64_t offset, ptrdiff_t size)
{
    h->home[h->n] = (char *)kv_at(me, offset);
    h->size[h->n++] = size;
    return kv_is_given(me, offset, e->n * (uint64_t)size);
}

/* Collect the arrays that an update changes. KV_UNREADABLE: the plan of the update names memory outside the region. */
static int kv_find_homes(kv_self *me, const kv_entry *e, uint64_t current, kv_homes *h)
{
    ptrdiff_t size = kv_itemsize[e->dtype], wide = e->master ? (ptrdiff_t)sizeof(float) : size;
    h->n = 0;
    int given = kv_add_home(me, e, h, e->value[current], size);
    if (e->master)
        given &= kv_add_home(me, e, h, e->master, wide);
    for (int j = 0; j < e->n_states; j++)
        given &= kv_add_home(me, e, h, e->states[j], wide);
    return given ? KV_READY : KV_UNREADABLE;
}

static char *kv_saved_bytes(kv_self *me, const kv_log *log, int i)
{
    return (char *)kv_at(me, log->scratch) + (size_t)i * KV_LOG_ELEMENTS * sizeof(double) + (size_t)(i % 4) * 1088;
}

/* Save a block, then record that it is about to change. */
static void kv_save_block(kv_self *me, kv_log *log, const kv_homes *h, uint64_t end)
{
    uint64_t from = log->at;
    for (int i = 0; i < h->n; i++)
        memcpy(kv_saved_bytes(me, log, i), h->home[i] + from * (uint64_t)h->size[i], (end - from) * (uint64_t)h->size[i]);
    kv_put(&log->changing, end);
    kv_fence();
}

/* Restore a block in which a worker has died. */
static void kv_restore_block(kv_self *me, const kv_log *log, const kv_homes *h)
{
    uint64_t from = log->at, end = kv_get(&log->changing);
    for (int i = 0; i < h->n && from < end; i++)
        memcpy(h->home[i] + from * (uint64_t)h->size[i], kv_saved_bytes(me, log, i), (end - from) * (uint64_t)h->size[i]);
}

/* Update elements `from` to `end` of the weights. The caller holds `me->busy` and has saved the block. */
static int kv_update_block(kv_self *me, const kv_call *call, uint64_t round, const kv_homes *h, ptrdiff_t from,
                           ptrdiff_t end)
{
    const kv_entry *e = call->entry;
    kv_sources s;
    if (kv_collect_sources(me, call, round, e->mask, &s) != KV_READY)
        return KV_UNREADABLE;
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

/* Update a chunk from `log->at` to `end`, block by block. The caller holds `me->busy`. KV_UNREADABLE: a source or
 * state cannot be read; the blocks before `log->at` are updated, and the others are as before. */
static int kv_update_chunk(kv_self *me, const kv_call *call, kv_log *log, uint64_t current, ptrdiff_t end)
{
    kv_homes h;
    if (kv_find_homes(me, call->entry, current, &h) != KV_READY)
        return KV_UNREADABLE;
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

#endif
