/* Sums and updates of rounds by the kernels, if the parts are plain, and mapped in this process.
 *
 * All functions need exclusive use of the store's state, as in links.h. The functions that run kernels block for their
 * time, and may use helper threads; no other blocks. */
#ifndef KP_SUMS_H
#define KP_SUMS_H

#include <string.h>

#include "rounds.h"

enum {
    KP_ALONE_BYTES = 1 << 20, /* of one call, read and written: below, the calling thread does it alone */
    KP_KEPT_BYTES = 1 << 20   /* of a frame with several payloads, of which one part may hold a reference */
};
#define KP_MOST_CLOCK ((uint64_t)1 << 61) /* Python's counts have space for twice as much */
#define KP_TIME_BITS 40 /* of a stamp: see kvstore/optimizer/update_clock.py */

typedef void (*kp_run_rows)(const kv_rows *rows, const kv_group *group, int threads); /* as kv_run_rows */

/* The sums of one call of the kernels. */
typedef struct {
    kp_run run;
    kp_run_rows run_rows;
    const int *threads;
    int near; /* number of workers of this host with streams */
    int keeps_parts; /* pushed arrays must not be overwritten: a restarted server receives them again */
    kv_item *items;
    kp_slice **slices;
    char **pointers;
    kv_coding *codings; /* by pointer; used for the first source of an item */
    size_t n, items_capacity, slices_capacity, n_pointers, pointers_capacity, codings_capacity;
    ptrdiff_t nbytes;
    int plain_sent; /* no value is updated, and all parts arrived over streams */
    kp_observer observer;
} kp_sums;

/* Release all memory, and zero it. */
static void kp_free_sums(kp_sums *sums)
{
    free(sums->items);
    free(sums->slices);
    free(sums->pointers);
    free(sums->codings);
    memset(sums, 0, sizeof *sums);
}

/* Return the newest settings for which rounds can be done here. */
static uint32_t kp_newest_version(const kp_value *v)
{
    return v->sums ? 0 : v->plan.version;
}

/* Return whether elements are plain, or plain and to be divided. */
static int kp_is_unpacked(const kp_record *r)
{
    return !r->coding || r->coding == KV_DIVIDED;
}

/* Return whether a part fits the value: plain elements, or packed or divided as in the first part. */
static int kp_part_fits(const kp_value *v, const kp_part *part, const kp_record *first)
{
    const kp_record *r = &part->request;
    uint64_t nbytes = (uint64_t)v->nbytes, unit = (uint64_t)kv_itemsize[v->dtype];
    if (r->coding) {
        if (v->dtype != KV_F32 || r->coding > KV_DIVIDED || r->threshold != first->threshold)
            return 0;
        if (r->coding == KV_DIVIDED && !(r->threshold > 0))
            return 0;
        unit = 4; /* whole words of 32 bits */
    }
    if (!kp_is_unpacked(r))
        nbytes = (uint64_t)kv_encoded_bytes(r->coding, v->n);
    return part->at && r->coding == first->coding && r->rows == -1 && r->version <= kp_newest_version(v) &&
           r->clock < KP_MOST_CLOCK && r->nbytes == nbytes && (uintptr_t)part->at % unit == 0;
}

/* Return whether the kernels can sum a slice's next round as it is. */
static int kp_can_sum(const kp_slice *slice, const kp_open *open)
{
    const kp_value *v = slice->value;
    if (!v || !(v->sums || v->plan.counts) || !v->buffers[0].at || (open->n > 1 && !v->buffers[1].at) || !v->buffers[v->current].at)
        return 0;
    if (!v->sums && v->buffers[v->current].is_behind)
        return 0;
    for (int i = 0; i < open->n; i++)
        if (!kp_part_fits(v, &open->parts[i], &open->parts[0].request))
            return 0;
    return 1;
}

/* Grow an array to `need` elements of `size`. 0; -1: no memory. */
static int kp_grow_array(void **memory, size_t *capacity, size_t need, size_t size)
{
    if (need <= *capacity)
        return 0;
    size_t more = need > 2 * *capacity ? need : 2 * *capacity;
    void *grown = realloc(*memory, more * size);
    if (!grown)
        return -1;
    *memory = grown;
    *capacity = more;
    return 0;
}

/* Return the buffer for the sum. One part alone replaces the value in place, since no reader can need the value before. */
static int kp_target_index(const kp_value *v, const kp_open *open)
{
    return open->n > 1 ? 1 - v->current : v->current;
}

/* Return whether the sum also overwrites a part, as its worker has allowed. */
static int kp_overwrites_part(const kp_sums *sums, const kp_part *part)
{
    const kp_record *r = &part->request;
    return !sums->keeps_parts && r->flags == KP_IN_PLACE && r->place == KP_SHARED && kp_is_unpacked(r);
}

/* Add the rule to an item, if the round updates the value. */
static void kp_add_rule(const kp_value *v, kv_item *it)
{
    if (v->sums)
        return;
    it->rule = v->plan.rule;
    it->n_states = v->plan.n_states;
    memcpy(it->states, v->plan.states, sizeof it->states);
    it->p = v->plan.p;
    if (it->dst == v->buffers[v->current].at)
        return;
    it->weight = v->buffers[v->current].at;
    if (v->plan.keeps)
        it->kept = v->plan.kept;
}

/* Add a slice's next round. 0; -1: no memory. */
static int kp_add_sum(kp_sums *sums, kp_slice *slice, const kp_open *open)
{
    const kp_value *v = slice->value;
    size_t pointers = sums->n_pointers + 2 * (size_t)open->n;
    if (kp_grow_array((void **)&sums->items, &sums->items_capacity, sums->n + 1, sizeof *sums->items) ||
        kp_grow_array((void **)&sums->slices, &sums->slices_capacity, sums->n + 1, sizeof *sums->slices) ||
        kp_grow_array((void **)&sums->pointers, &sums->pointers_capacity, pointers, sizeof *sums->pointers) ||
        kp_grow_array((void **)&sums->codings, &sums->codings_capacity, pointers, sizeof *sums->codings))
        return -1;
    kv_item *it = &sums->items[sums->n];
    *it = (kv_item){.dtype = v->dtype, .rule = -1, .n = v->n, .k = open->n, .dst = v->buffers[kp_target_index(v, open)].at};
    kp_add_rule(v, it);
    for (int i = 0; i < open->n; i++) {
        const kp_record *r = &open->parts[i].request;
        sums->plain_sent &= v->sums && r->place == KP_FRAME;
        sums->codings[sums->n_pointers] = kp_coding_of(r->coding, r->threshold);
        sums->pointers[sums->n_pointers++] = (char *)open->parts[i].at;
    }
    for (int i = 0; i < open->n; i++)
        if (kp_overwrites_part(sums, &open->parts[i])) {
            sums->pointers[sums->n_pointers++] = (char *)open->parts[i].at;
            it->m++;
        }
    sums->nbytes += v->nbytes * (it->k + it->m + 1 + (v->sums ? 0 : 1 + (it->kept ? 3 : 2) * it->n_states));
    sums->slices[sums->n++] = slice;
    return 0;
}

/* Have the value of the last added round written to `to` as well. 0; -1: no memory. */
static int kp_add_out(kp_sums *sums, char *to)
{
    if (kp_grow_array((void **)&sums->pointers, &sums->pointers_capacity, sums->n_pointers + 1, sizeof *sums->pointers))
        return -1;
    sums->pointers[sums->n_pointers++] = to;
    sums->items[sums->n - 1].m++;
    sums->nbytes += sums->slices[sums->n - 1]->value->nbytes;
    return 0;
}

/* Remove all rounds. */
static void kp_clear_sums(kp_sums *sums)
{
    sums->n = sums->n_pointers = 0;
    sums->nbytes = 0;
    sums->plain_sent = 1;
}

/* Return whether a part can be stored as it arrived: in memory of its own, or in a small frame. */
static int kp_can_keep_frame(const kp_part *part)
{
    size_t frame = part->data ? part->data->nbytes : 0;
    return part->request.place == KP_FRAME && frame && (frame <= KP_KEPT_BYTES || frame == part->request.nbytes);
}

/* Return whether the parts of a round may be stored instead of their sum: they have at most half of its bytes. */
static int kp_may_stay_packed(const kp_value *v, const kp_open *open)
{
    const kp_record *first = &open->parts[0].request;
    if (!v->run || !v->sums || !kp_is_narrow(first->coding) || open->n > KP_MOST_PACKED ||
        2 * (uint64_t)open->n * first->nbytes > (uint64_t)v->nbytes)
        return 0;
    for (int i = 0; i < open->n; i++)
        if (!kp_can_keep_frame(&open->parts[i]))
            return 0;
    return 1;
}

/* Store the parts of a slice's next round as its value. 0; -1: no memory. */
static int kp_keep_packed(kp_slice *slice, const kp_open *open)
{
    kp_value *v = slice->value;
    kp_value_buffer *buffer = &v->buffers[kp_target_index(v, open)];
    kp_packed *packed = kp_packed_memory(buffer->packed, open->n);
    if (!packed)
        return -1;
    buffer->packed = packed;
    packed->coding = open->parts[0].request.coding;
    packed->threshold = open->parts[0].request.threshold;
    packed->nbytes = (ptrdiff_t)open->parts[0].request.nbytes;
    for (int i = 0; i < open->n; i++)
        packed->parts[packed->n++] = (kp_packed_part){kp_retain(open->parts[i].data), open->parts[i].at};
    buffer->is_behind = 1;
    if (open->n > 1)
        kp_swap_buffers(v, slice->round + 1);
    v->changed = 1;
    return 0;
}

/* Mark the waiting requests with pushed arrays that the value has overwritten. */
static void kp_mark_overwritten(const kp_sums *sums, kp_slice *slice, const kp_open *open)
{
    for (int i = 0; i < open->n; i++)
        for (int j = 0; kp_overwrites_part(sums, &open->parts[i]) && j < slice->pulls.n; j++) {
            kp_waiter *one = &slice->pulls.all[j];
            if (one->session->seat == open->parts[i].rank && one->request.sequence == open->parts[i].request.sequence)
                one->request.flags = KP_WRITTEN;
        }
}

static kp_value_buffer *kp_target_buffer(const kp_slice *slice)
{
    return &slice->value->buffers[kp_target_index(slice->value, kp_find_open(slice, slice->round + 1))];
}

/* Count an update, as `Optimizer._update_count` does with the settings of a round. */
static void kp_count_update(const kp_plan *plan, const kp_open *open)
{
    kp_counts *counts = plan->counts;
    int64_t time = 0;
    for (int i = 0; i < open->n; i++) {
        uint64_t stamp = open->parts[i].request.clock;
        int64_t one = (int64_t)(stamp & ((1ull << KP_TIME_BITS) - 1));
        if (stamp >> KP_TIME_BITS == plan->epoch && one > time)
            time = one;
    }
    counts->updates++;
    counts->num_update = time > counts->updates ? time : counts->updates;
}

/* Record the begin of these sums, for a timeline. */
static void kp_enter_sums(const kp_sums *sums)
{
    kv_phase phase = KV_SUMMING;
    uint64_t nbytes = 0;
    for (size_t i = 0; i < sums->n; i++) {
        nbytes += (uint64_t)sums->slices[i]->value->nbytes;
        phase = sums->slices[i]->value->sums ? phase : KV_UPDATING;
    }
    const kp_slice *one = sums->n == 1 ? sums->slices[0] : NULL;
    uint64_t number = one ? kp_slice_number(one->store, one->id) : KV_NO_SLICE;
    kv_about about = {number, one ? one->round + 1 : 0, nbytes, KV_NOBODY, sums->observer.store};
    kv_enter(sums->observer.counters, phase, about);
}

/* Return how many threads to use. A helper thread occupies a core longer than a short sum needs. Workers of this host that
 * send are awake, and use their cores better; those whose parts lie in shared memory sleep now, and an update is long. */
static int kp_choose_threads(const kp_sums *sums)
{
    int others = sums->plain_sent ? sums->near : 0;
    return sums->nbytes < KP_ALONE_BYTES || *sums->threads <= others ? 1 : *sums->threads - others;
}

/* Run the kernels for all sums, as kv_run_dense. */
static int kp_run_items(kp_sums *sums)
{
    kv_activity before = kv_doing();
    if (kv_is_timed(sums->observer.counters))
        kp_enter_sums(sums);
    int failed = sums->run(sums->items, (ptrdiff_t)sums->n, sums->nbytes, kp_choose_threads(sums));
    kv_go_back(&before);
    return failed;
}

/* Run all sums; the values are then those of the new rounds, which are not counted yet (`kp_finish_round`). 0; -1: no memory. */
static int kp_run_sums(kp_sums *sums)
{
    char **pointer = sums->pointers;
    for (size_t i = 0; i < sums->n; i++) {
        kv_item *it = &sums->items[i];
        it->src = pointer;
        if (sums->codings[pointer - sums->pointers].code)
            it->coding = sums->codings + (pointer - sums->pointers);
        it->out = pointer + it->k;
        pointer += it->k + it->m;
        kp_bump_seqlock(kp_target_buffer(sums->slices[i]));
    }
    int failed = kp_run_items(sums);
    for (size_t i = 0; i < sums->n; i++) {
        kp_slice *slice = sums->slices[i];
        const kp_open *open = kp_find_open(slice, slice->round + 1);
        kp_bump_seqlock(kp_target_buffer(slice));
        if (failed)
            continue;
        kp_forget_packed(kp_target_buffer(slice));
        kp_mark_overwritten(sums, slice, open);
        if (!slice->value->sums) {
            kp_note_copied_states(slice->value, slice->round + 1, slice->value->plan.keeps && open->n > 1);
            kp_count_update(&slice->value->plan, open);
        }
        if (open->n > 1)
            kp_swap_buffers(slice->value, slice->round + 1);
        slice->value->changed = 1;
    }
    return failed;
}

#endif
