/* Rounds: every worker pushes into a key once, and the workers that wait do the work.
 *
 * A key's phase is one word: the round, its opener, the value in use, and the step.
 *
 *   CLOSED(r)    round r is complete. Once every member has arrived at r + 1, one member sets
 *   OPENING(r+1) and prepares the work: the workers in the round, the sources, the numbers of the rule; then
 *   OPEN(r+1)    every waiting worker claims chunks; a worker that finds all chunks complete sets CLOSED(r+1).
 *
 * The steps of a key, whose last complete round is r, and the functions that change them. docs/states_page.py makes a
 * page of this table, and tests/stores/shared/native/test_interleave.py compares it with random interleavings.
 *
 *   key | CLOSED r    | OPENING r+1 | kv_become_opener  | all members have arrived, or the key is held for a change
 *   key | OPENING r+1 | OPENING r+1 | kv_become_opener  | the opener is dead, and this worker replaces it
 *   key | OPENING r+1 | OPEN r+1    | kv_publish_work   | the work is prepared: all workers may claim chunks
 *   key | OPENING r+1 | CLOSED r+1  | kv_end_round      | the opener has carried out the round alone, or it has failed
 *   key | OPEN r+1    | CLOSED r+1  | kv_end_round      | all chunks are complete, or the round has failed
 *   key | OPENING r+1 | CLOSED r    | kv_release_key    | the change is done, or a part is missing again
 *   key | OPENING r+1 | CLOSED r    | kv_release_opened | Python code has failed in the round; its changes are undone
 *   key | CLOSED r    | CLOSED r    | kv_restore_round  | after a loss: the value of the round before is used again
 *
 * The workers in round r are those that pushed into it, { w : pushed[w][r & 1] = r }; a push waits until the round two
 * before is complete. Rounds stop waiting for a dead member after its last arrival is written, so every worker that
 * finds the round complete finds the same set; and a push counts even if the rank of its worker returns before the
 * round is complete.
 *
 * A sum is written to the value that is not in use, and closing the round puts it in use: after a failed round the
 * previous value is readable. An update changes the weights in place, block by block through a log.
 */
#ifndef KV_ROUND_H
#define KV_ROUND_H

#include "chunks.h"

/* Complete the round of a phase, OPENING or OPEN; `current` is the value in use from now on. Wakes waiting workers.
 * 0: the phase has changed, and nothing else has: another worker has completed the round or replaced the opener. */
static int kv_end_round(kv_self *me, kv_entry *e, uint64_t phase, uint64_t current)
{
    uint64_t version = kv_version_of(phase) + (current != kv_current_of(phase));
    kv_check_guards(me, e);
    if (kv_get(&e->phase) != phase)
        return 0;
    if (!kv_has_failed(e, kv_round_of(phase)))
        kv_put(&e->of[current], kv_round_of(phase));
    if (!kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase), kv_opener_of(phase), version, KV_CLOSED)))
        return 0;
    kv_wake_all(me);
    return 1;
}

/* Allocate the value that is not in use, when it is first needed. Blocks as `kv_allocate` does, and returns its outcome;
 * the caller does not hold the region's lock. */
static int kv_allocate_values(kv_self *me, kv_entry *e)
{
    for (int i = 0; i < 2; i++)
        if (!e->value[i]) {
            uint64_t offset;
            int outcome = kv_allocate(me, e->nbytes, KV_VALUE_COLOUR + i, &offset);
            if (outcome != KV_READY)
                return outcome;
            e->value[i] = offset;
        }
    return KV_READY;
}

/* Publish the work of a round, OPENING to OPEN; every worker may claim its chunks. `rule` < 0: a sum. The caller has
 * opened the round and is at work; if it has been replaced as the opener, the phase is unchanged. */
static void kv_publish_work(kv_self *me, kv_entry *e, uint64_t phase, int rule)
{
    e->rule = rule;
    kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase), kv_opener_of(phase), kv_version_of(phase), KV_OPEN));
    kv_wake_all(me);
}

/* Become the opener of a key's next round, and begin work. Returns the new phase, or 0: another worker was faster, or
 * this worker is fenced; then nothing has changed. */
static uint64_t kv_become_opener(kv_self *me, kv_entry *e, uint64_t phase)
{
    uint64_t round = kv_complete_round(phase) + 1, version = kv_version_of(phase);
    if (kv_step_of(phase) == KV_OPENING) /* in-place changes of the opener before will be undone */
        version += 2;
    uint64_t opening = kv_phase_word(round, me->rank, version, KV_OPENING);
    if (!kv_begin_work(me))
        return 0;
    if (!kv_swap(&e->phase, phase, opening)) {
        kv_end_work(me);
        return 0;
    }
    kv_put(&e->updates[round & 1], kv_get(&e->updates[1 - (round & 1)]));
    return opening;
}

/* As `kv_become_opener`, for an opener that writes to the value that is not in use. */
static uint64_t kv_open_for_write(kv_self *me, kv_entry *e, uint64_t phase)
{
    uint64_t opening = kv_become_opener(me, e, phase);
    if (opening)
        kv_put(&e->of[1 - kv_current_of(phase)], KV_NO_ROUND);
    return opening;
}

/* Return the count of the optimizer's updates of the key. Updates of the round in progress do not count before it is
 * complete. */
static _Atomic uint64_t *kv_update_count(kv_entry *e)
{
    return &e->updates[kv_complete_round(kv_get(&e->phase)) & 1];
}

/* Return the count that holds when the next round is complete; only its opener writes it. */
static _Atomic uint64_t *kv_next_updates(kv_entry *e)
{
    return &e->updates[(kv_complete_round(kv_get(&e->phase)) + 1) & 1];
}

/* Release a key that `kv_become_opener` or `kv_open_for_write` has acquired, without a round; with `other`, the other value is in use
 * from now on. The caller ends its work. Does nothing if the phase has changed. */
static void kv_release_key(kv_self *me, kv_entry *e, uint64_t phase, int other)
{
    uint64_t version = kv_version_of(phase) + (other != 0);
    if (kv_get(&e->phase) != phase)
        return;
    if (other)
        kv_put(&e->of[1 - kv_current_of(phase)], kv_round_of(phase) - 1);
    kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase) - 1, 0, version, KV_CLOSED));
    kv_wake_all(me);
}

/* Let any worker open again the round that this worker has opened. The caller has undone its changes in place: the
 * new version shows them to workers that have read concurrently. Does nothing if the phase has changed. */
static void kv_release_opened(kv_self *me, kv_entry *e, uint64_t phase)
{
    uint64_t version = kv_version_of(phase) + 2;
    kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase) - 1, 0, version, KV_CLOSED));
    kv_wake_all(me);
}

/* Whether a worker of `mask` has pushed a source of this kind into the round. */
static int kv_has_kind(kv_self *me, const kv_entry *e, uint64_t round, uint64_t mask, enum kv_kind kind)
{
    const kv_part *part = kv_key_parts(me, e);
    for (int w = 0; w < me->size; w++)
        if (mask >> w & 1 && kv_kind_of(&part[w], (int)(round & 1)) == kind)
            return 1;
    return 0;
}

/* Whether a source of the round is a list of rows: Python code sums those. */
static int kv_has_rows(kv_self *me, const kv_entry *e, uint64_t round, uint64_t mask)
{
    return e->sparse || kv_has_kind(me, e, round, mask, KV_ROWS);
}

/* Whether a source of the round is on a GPU: Python code carries out the round. */
static int kv_has_on_gpu(kv_self *me, const kv_entry *e, uint64_t round, uint64_t mask)
{
    return kv_get(&e->gpu_table) && kv_has_kind(me, e, round, mask, KV_ON_GPU);
}

/* Whether Python code carries out the round because of its sources. */
static int kv_needs_python(kv_self *me, const kv_entry *e, uint64_t round, uint64_t mask)
{
    return kv_has_rows(me, e, round, mask) || kv_has_on_gpu(me, e, round, mask);
}

/* A piece of a block of `undo`. The block has the round, the number of pieces, and for each piece: its place, bytes
 * of a row, number of rows, whether ids precede the rows (else the rows are consecutive). */
typedef struct {
    uint64_t home, row_bytes, n, by_ids;
} kv_piece;

/* Undo the changes that the opener of `round` had begun and not completed. The caller has opened the round. Does
 * nothing if there is no record of that round. */
static void kv_undo(kv_self *me, kv_entry *e, uint64_t round)
{
    uint64_t offset = kv_get(&e->undo), *block = (uint64_t *)kv_at(me, offset);
    if (!kv_is_given(me, offset, 2 * sizeof(uint64_t)) || block[0] != round)
        return;
    char *at = (char *)(block + 2);
    for (uint64_t i = 0; i < block[1]; i++) {
        kv_piece piece;
        memcpy(&piece, at, sizeof piece);
        const uint64_t *ids = (const uint64_t *)(at + sizeof piece);
        const char *rows = (const char *)(ids + (piece.by_ids ? piece.n : 0));
        for (uint64_t j = 0; j < piece.n; j++) {
            uint64_t home = piece.home + (piece.by_ids ? ids[j] : j) * piece.row_bytes;
            if (kv_is_given(me, home, piece.row_bytes))
                memcpy(kv_at(me, home), rows + j * piece.row_bytes, piece.row_bytes);
        }
        at = (char *)rows + ((piece.n * piece.row_bytes + 7) & ~7ull);
    }
    kv_put(&e->undo, 0);
}

/* Prepare the work of a round that this worker has opened, also in place of a dead opener. Blocks for the sum of a
 * small key, and as `kv_allocate` does. KV_PLAN: Python code carries out the round, and then calls kv_publish_work or
 * kv_end_round. On failure the key is released. */
static int kv_prepare_work(kv_self *me, kv_call *call, uint64_t phase)
{
    kv_entry *e = call->entry;
    kv_undo(me, e, kv_round_of(phase));
    if (!kv_all_arrived(me, e, kv_round_of(phase), &e->mask)) {
        kv_release_key(me, e, phase, 0);
        return KV_READY;
    }
    if (!kv_replaces_by_sum(me, e) || kv_needs_python(me, e, kv_round_of(phase), e->mask)) {
        kv_put(&e->planned, phase);
        return KV_PLAN;
    }
    int outcome = kv_allocate_values(me, e);
    if (outcome != KV_READY) {
        kv_release_key(me, e, phase, 0);
        return outcome;
    }
    if (e->nbytes > KV_SMALL_KEY) {
        kv_publish_work(me, e, phase, -1);
        return KV_READY;
    }
    uint64_t current = kv_current_of(phase);
    kv_enter_round(me, KV_SUMMING, e->number, kv_round_of(phase), e->nbytes);
    int summed = kv_sum_chunk(me, call, kv_round_of(phase), e->mask, current, 0, (ptrdiff_t)e->n);
    if (summed != KV_READY)
        kv_fail(e, kv_round_of(phase));
    else if (kv_writes_outs(call) && kv_round_of(phase) == call->round)
        call->delivered[0] = 1;
    kv_end_round(me, e, phase, summed == KV_READY ? 1 - current : current);
    return KV_READY;
}

/* Whether a thread of this process has opened the round and not carried it out, because a signal has ended its call:
 * then another thread does. */
static int kv_is_planned(kv_self *me, const kv_entry *e, uint64_t phase)
{
    return kv_is_opener(me, phase, kv_round_of(phase)) && kv_get(&e->planned) == phase;
}

/* Whether this process can open rounds of the key: it can carry out the current mode, or the round is only summed. */
static int kv_knows_mode(const kv_self *me, const kv_entry *e)
{
    return kv_replaces_by_sum(me, e) || me->mode == kv_get(&me->head->mode);
}

typedef struct {
    kv_self *me;
    const kv_entry *entry;
    uint64_t phase, epoch;
} kv_watch;

/* A condition: the key has changed since it was in the phase of the watch, or this worker can do something for it. */
static int kv_key_changed(void *context)
{
    const kv_watch *watch = (const kv_watch *)context;
    const kv_entry *e = watch->entry;
    uint64_t in;
    if (kv_get(&e->phase) != watch->phase || kv_get(&watch->me->head->epoch) != watch->epoch)
        return 1;
    if (kv_step_of(watch->phase) == KV_CLOSED)
        return kv_knows_mode(watch->me, e) && kv_all_arrived(watch->me, e, kv_round_of(watch->phase) + 1, &in);
    return kv_step_of(watch->phase) == KV_OPEN && kv_all_done(watch->me, e, kv_round_of(watch->phase));
}

/* Return the worker that an open round waits for: the owner of a chunk that is not complete. */
static int kv_awaited_worker(kv_self *me, const kv_entry *e, uint64_t round)
{
    for (uint64_t c = 0; c < e->chunks; c++) {
        uint64_t word = kv_get(&kv_chunk_words(me, e)[c]);
        if (word >> 16 == round && (word & 0xff) == KV_CLAIMED)
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
        whom = kv_awaited_worker(watch->me, e, round);
    return (kv_about){e->number, round, e->nbytes, whom, watch->me->store};
}

/* Whether this worker may open the next round, or replace a dead opener. */
static int kv_may_open(kv_self *me, const kv_entry *e, uint64_t phase)
{
    uint64_t in;
    if (!kv_knows_mode(me, e))
        return 0;
    if (kv_step_of(phase) == KV_CLOSED)
        return kv_all_arrived(me, e, kv_round_of(phase) + 1, &in);
    int opener = kv_opener_of(phase);
    return opener != me->rank && !kv_is_present(kv_get(&me->head->worker[opener].state));
}

/* Return the outcome for a key that could not be acquired: KV_FENCED, or KV_READY to try again. */
static int kv_outcome_of_refusal(kv_self *me)
{
    return kv_is_fenced(me, kv_get(&me->worker->state)) ? KV_FENCED : KV_READY;
}

static int kv_open_round(kv_self *me, kv_call *call, uint64_t phase)
{
    uint64_t opening = kv_open_for_write(me, call->entry, phase);
    if (!opening)
        return kv_outcome_of_refusal(me);
    int outcome = kv_prepare_work(me, call, opening);
    if (outcome != KV_PLAN) /* else Python code is at work */
        kv_end_work(me);
    return outcome;
}

/* Process the chunks of an open round, recover those of dead workers, and complete the round if all are done. */
static int kv_complete_open_round(kv_self *me, kv_call *call, uint64_t phase)
{
    kv_entry *e = call->entry;
    uint64_t round = kv_round_of(phase), current = kv_current_of(phase);
    int outcome = KV_READY;
    if (!kv_begin_work(me))
        return KV_FENCED;
    kv_process_chunks(me, call, phase);
    if (!kv_all_done(me, e, round) && kv_get(&me->head->lost))
        outcome = kv_recover_chunks(me, call, phase);
    if (outcome == KV_READY && kv_all_done(me, e, round))
        kv_end_round(me, e, phase, e->rule < 0 && !kv_has_failed(e, round) ? 1 - current : current);
    kv_end_work(me);
    return outcome;
}

/* Advance the key until the call's round is complete. Without patience, does all that needs no wait and returns
 * KV_TICK. Blocks for the computation, and as `kv_wait` does if patient. KV_READY: the round is complete, or has
 * failed. KV_PLAN: this process has opened a round that Python code carries out. KV_NEW_MODE: this process does not
 * know the current mode. Other outcomes as `kv_wait` and `kv_allocate`. */
static int kv_bring_forward(kv_self *me, kv_call *call, int patient)
{
    kv_entry *e = call->entry;
    for (;;) {
        kv_watch watch = {me, e, 0, kv_get(&me->head->epoch)};
        uint64_t phase = watch.phase = kv_get(&e->phase);
        int outcome = KV_READY;
        if (kv_complete_round(phase) >= call->round)
            return KV_READY;
        if (!kv_knows_mode(me, e) && me->tried != kv_get(&me->head->mode))
            return KV_NEW_MODE;
        if (kv_step_of(phase) == KV_OPEN)
            outcome = kv_complete_open_round(me, call, phase);
        else if (kv_may_open(me, e, phase))
            outcome = kv_open_round(me, call, phase);
        else if (kv_is_planned(me, e, phase))
            outcome = KV_PLAN;
        if (outcome != KV_READY)
            return outcome;
        if (kv_get(&e->phase) != phase)
            continue;
        if (!patient)
            return KV_TICK;
        outcome = kv_wait_recorded(me, kv_key_changed, kv_about_watch, &watch, 1);
        /* The remaining workers can complete an open round, and do so within the caller's deadline. */
        if (outcome == KV_PEER_LOST && kv_step_of(phase) == KV_OPEN)
            return KV_TICK;
        if (outcome != KV_READY)
            return outcome;
    }
}

/* As `kv_bring_forward`, with patience. */
static int kv_advance(kv_self *me, kv_call *call)
{
    return kv_bring_forward(me, call, 1);
}

/* Acquire a closed key, or one that a dead worker has left acquired or opened, so that no worker opens its next
 * round: for changes outside of rounds, and for reads that fail repeatedly. Blocks as `kv_wait` does. KV_READY: this
 * worker is the opener, is at work, and calls `kv_release_key` and `kv_end_work`. KV_TICK: not yet. */
static int kv_hold_key(kv_self *me, kv_entry *e, int writes)
{
    kv_watch watch = {me, e, 0, kv_get(&me->head->epoch)};
    uint64_t phase = watch.phase = kv_get(&e->phase);
    kv_call call = {.entry = e, .round = kv_round_of(phase)};
    int outcome, opener = kv_opener_of(phase);
    if (kv_step_of(phase) == KV_OPEN)
        outcome = kv_advance(me, &call);
    else if (kv_step_of(phase) == KV_CLOSED || (opener != me->rank && !kv_is_present(kv_get(&me->head->worker[opener].state)))) {
        uint64_t held = writes ? kv_open_for_write(me, e, phase) : kv_become_opener(me, e, phase);
        if (held)
            kv_undo(me, e, kv_round_of(held));
        return held ? KV_READY : kv_outcome_of_refusal(me) == KV_FENCED ? KV_FENCED : KV_TICK;
    } else if (kv_is_planned(me, e, phase))
        outcome = KV_PLAN;
    else
        outcome = kv_wait_recorded(me, kv_key_changed, kv_about_watch, &watch, 1);
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
    return kv_all_arrived(a->me, a->entry, a->round, &a->in) || kv_get(&a->me->head->epoch) != a->epoch ||
           kv_is_planned(a->me, a->entry, kv_get(&a->entry->phase)); /* the previous round */
}

static kv_about kv_about_arrivals(const void *context)
{
    const kv_arrivals *a = (const kv_arrivals *)context;
    uint64_t in;
    int whom = kv_first_missing(a->me, a->entry, a->round, &in);
    return (kv_about){a->entry->number, a->round, a->entry->nbytes, whom, a->me->store};
}

/* Store the sum of a small key as the value. Always the same worker does this, because its cache holds the memory. 0:
 * the phase does not allow it. */
static int kv_store_sum(kv_self *me, kv_entry *e, uint64_t round, uint64_t in, const char *sum)
{
    uint64_t phase = kv_get(&e->phase), opening;
    if (kv_complete_round(phase) >= round)
        return 1;
    if (phase >> 16 != round - 1 || kv_step_of(phase) != KV_CLOSED || !(opening = kv_open_for_write(me, e, phase)))
        return 0;
    e->mask = in;
    memcpy(kv_at(me, e->value[1 - kv_current_of(phase)]), sum, e->nbytes);
    kv_end_round(me, e, opening, 1 - kv_current_of(phase));
    kv_end_work(me);
    return 1;
}

/* Complete the call's round of a small key that is only summed; no worker waits for the work of another. As soon as
 * all have arrived, each worker sums for itself, and the lowest rank in the round stores the sum. From then on the
 * other workers may fill their slots again, for round + 2: a worker that has not read them yet copies the stored
 * value. Without patience, all must arrive while this worker spins. Outcomes and blocking as `kv_bring_forward`. */
static int kv_sum_small(kv_self *me, kv_call *call, int patient)
{
    kv_entry *e = call->entry;
    kv_arrivals a = {me, e, call->round, 0, kv_get(&me->head->epoch)};
    int outcome = kv_wait_recorded(me, kv_have_arrived, kv_about_arrivals, &a, patient);
    if (outcome != KV_READY)
        return outcome;
    if (!a.in || !kv_replaces_by_sum(me, e) || !call->n_outs || kv_needs_python(me, e, call->round, a.in))
        return kv_bring_forward(me, call, patient);
    /* Another worker may have completed the round as an update, and the mode may have changed back to sums. */
    if (kv_get(&me->head->mode) && kv_complete_round(kv_get(&e->phase)) >= call->round)
        return kv_bring_forward(me, call, patient);
    kv_sources s;
    kv_enter_round(me, KV_SUMMING, e->number, call->round, e->nbytes);
    if (kv_collect_sources(me, call, call->round, a.in, &s) != KV_READY)
        return kv_bring_forward(me, call, patient);
    kv_sum_here(me, call, NULL, s.src, s.coded, s.k, call->outs, call->n_outs, 0, (ptrdiff_t)e->n);
    if (!kv_are_sources_intact(me, e, call->round, a.in))
        return kv_bring_forward(me, call, patient);
    call->delivered[0] = 1;
    if (me->rank == __builtin_ctzll(a.in) && !kv_store_sum(me, e, call->round, a.in, call->outs[0]))
        return kv_bring_forward(me, call, patient);
    return KV_READY;
}

/* Return the last round that this worker has pushed into; 0: none. */
static uint64_t kv_pushed_round(kv_self *me, const kv_entry *e)
{
    const kv_part *part = &kv_key_parts(me, e)[me->rank];
    uint64_t arrived = kv_get(&part->arrived);
    return arrived >= kv_get(&part->first) ? arrived : 0;
}

/* Return the first failed round, up to `round`, that waited for this worker and was not reported to it; `reported` has
 * the reported rounds, at the same places as `failed`. 0: there is none. */
static uint64_t kv_first_unreported(kv_self *me, const kv_entry *e, const uint64_t *reported, uint64_t round)
{
    uint64_t found = 0, first = kv_get(&kv_key_parts(me, e)[me->rank].first);
    for (int i = 0; i < KV_FAILURES; i++) {
        uint64_t failed = kv_get(&e->failed[i]);
        if (failed > reported[i] && failed >= first && failed <= round && (!found || failed < found))
            found = failed;
    }
    return found;
}

/* Return the first key from number `from` on with an incomplete round that this worker has pushed into; else `n`. */
static uint64_t kv_next_behind(kv_self *me, uint64_t from, uint64_t n)
{
    for (; from < n; from++) {
        const kv_entry *e = kv_entry_at(me, from);
        if (kv_pushed_round(me, e) > kv_complete_round(kv_get(&e->phase)))
            break;
    }
    return from;
}

/* Whether a round is incomplete, has all its parts, and has no opener that is present; `in` has the bits of the
 * workers in it. */
static int kv_is_unopened(kv_self *me, const kv_entry *e, uint64_t round, uint64_t *in)
{
    uint64_t phase = kv_get(&e->phase);
    if (kv_step_of(phase) != KV_CLOSED && kv_round_of(phase) == round &&
        kv_is_present(kv_get(&me->head->worker[kv_opener_of(phase)].state)))
        return 0;
    return round > kv_complete_round(phase) && kv_all_arrived(me, e, round, in);
}

/* Whether no present worker is changing the key's value: the phase is CLOSED, or OPENING by a dead worker. */
static int kv_is_idle(kv_self *me, const kv_entry *e)
{
    uint64_t phase = kv_get(&e->phase);
    if (kv_step_of(phase) == KV_OPENING)
        return !kv_is_present(kv_get(&me->head->worker[kv_opener_of(phase)].state));
    return kv_step_of(phase) == KV_CLOSED;
}

/* After a loss: put the value of an earlier round in use again. 0: it is not there, or the states of an optimizer are
 * ahead of it. */
static int kv_restore_round(kv_self *me, kv_entry *e, uint64_t round)
{
    uint64_t phase = kv_get(&e->phase), current = kv_current_of(phase);
    if (kv_step_of(phase) != KV_CLOSED || !kv_replaces_by_sum(me, e) || kv_get(&e->gpu_table) || kv_get(&e->of[1 - current]) != round)
        return 0;
    uint64_t version = kv_version_of(phase) + 1;
    return kv_swap(&e->phase, phase, kv_phase_word(kv_round_of(phase), kv_opener_of(phase), version, KV_CLOSED));
}

/* Return the bits of the workers that have left without joining and were not reported yet. */
static uint64_t kv_unreported_leavers(kv_self *me)
{
    uint64_t epoch = kv_get(&me->head->epoch);
    if (epoch == me->left_at)
        return me->left & ~me->left_reported;
    me->left_at = epoch;
    me->left = 0;
    kv_note_losses(me);
    for (int w = 0; w < me->size; w++) {
        const kv_worker *peer = &me->head->worker[w];
        if (kv_worker_state(me, w) == KV_LEFT && kv_get(&peer->joined) != kv_get(&peer->incarnation))
            me->left |= kv_rank_bit(w);
    }
    me->left_reported &= me->left;
    return me->left & ~me->left_reported;
}

/* Return those of the workers above that have pushed into the key, and are not in the complete round. */
static uint64_t kv_left_out(kv_self *me, const kv_entry *e, uint64_t round)
{
    const kv_part *part = kv_key_parts(me, e);
    uint64_t out = kv_unreported_leavers(me);
    for (int w = 0; out && w < me->size; w++) {
        uint64_t even = kv_get(&part[w].pushed[0]), odd = kv_get(&part[w].pushed[1]), last = even > odd ? even : odd;
        if (!last || last >= round)
            out &= ~kv_rank_bit(w);
    }
    return out;
}

/* Wait until the slot of this worker's next push is free: the push before the last used it, so the round of that push
 * must be complete. Blocks, and returns outcomes, as `kv_bring_forward` does. */
static int kv_wait_for_free_slot(kv_self *me, kv_entry *e)
{
    uint64_t arrived = kv_get(&kv_key_parts(me, e)[me->rank].arrived);
    if (arrived < 2 || kv_complete_round(kv_get(&e->phase)) + 1 >= arrived)
        return KV_READY;
    kv_call call = {.entry = e, .round = arrived - 1};
    return kv_advance(me, &call);
}

#endif
