/* Rounds of the slices of one store on a server.
 *
 * `kp_request` handles a push, a pull or a pushpull if the request, its slice and the members need nothing special. If
 * not, it changes nothing, and server/slice_requests.py handles the request; it works on the same structs. `kp_effects`
 * collects the results of a step: answers by session, and slices whose next round is ready to be summed.
 *
 * The states of a slice and of a round, with the requests, messages and events that change them. docs/states_page.py
 * makes a page of this table, and tests/stores/parameter_server/test_transitions.py compares it with random jobs.
 *
 *   slice | new        | undefined  | INIT ASSIGN          | the request waits for the scheduler's `SlicesNotice`
 *   slice | new        | defined    | SlicesNotice         | the scheduler has placed it here
 *   slice | undefined  | defined    | SlicesNotice         | so; the requests that waited follow
 *   slice | defined    | writing    | INIT ASSIGN          | its first value is stored
 *   slice | writing    | ready      | JobsApplied          | the value is stored: pushes and pulls are accepted
 *   slice | writing    | defined    | JobsApplied          | the first value could not be stored
 *   slice | ready      | writing    | ASSIGN               | a value is loaded, between two rounds
 *   slice | ready      | sealed     | SEAL                 | its key moves to other slices: pushes are refused
 *   slice | sealed     | ready      | UNSEAL               | the key has not moved
 *   slice | sealed     | writing    | ASSIGN               | a value is loaded
 *   slice | writing    | sealed     | JobsApplied          | the value is stored, in a sealed slice
 *   slice | undefined  | gone       | InstallRequest       | its key or its store is dropped
 *   slice | defined    | gone       | InstallRequest       | so
 *   slice | writing    | gone       | InstallRequest       | so
 *   slice | ready      | gone       | FORGET InstallRequest | so, or a worker drops it after its key has moved
 *   slice | sealed     | gone       | FORGET InstallRequest | so
 *   round | empty      | collecting | PUSH PUSHPULL        | the first part is there: kp_open_round
 *   round | empty      | summing    | PUSH PUSHPULL        | so, and no other part is missing: kp_begin_round
 *   round | collecting | summing    | PUSH PUSHPULL        | the last part is there: kp_begin_round
 *   round | collecting | summing    | JobsApplied ViewNotice | the round before is complete, or a member is gone
 *   round | empty      | summing    | JobsApplied ViewNotice AttachRequest | parts were lost with a restarted server
 *   round | summing    | complete   | JobsApplied          | the sum is stored, or has failed: kp_finish_round
 *   round | empty      | complete   | JobsApplied ViewNotice AttachRequest | all parts were lost with a restarted server
 *   round | collecting | empty      | ViewNotice           | the store is broken, or the worker of the only part is lost
 *   round | summing    | empty      | JobsApplied          | the store is broken, and the sum was given up
 *
 * All functions need exclusive use of the store's state, as in links.h, and none blocks. Without memory they return -1 or
 * NULL, and have changed nothing, unless they say otherwise. */
#ifndef KP_ROUNDS_H
#define KP_ROUNDS_H

#include "sessions.h"
#include "tables.h"
#include "traffic.h"
#include "values.h"

enum { KP_OPEN_ROUNDS = 2 }; /* as slice_rounds.OPEN */
enum { KP_LATE_NS = 10 * 1000 * 1000, KP_MOST_LATE = 1024 };
enum kp_activity { KP_NOTHING, KP_ROUND }; /* as slice_rounds.SliceActivity, which has one more value */

/* The payload of a request. Rows: ids, and then the rows, in the same frame or in another. */
typedef struct {
    kp_buffer *data, *more;
    const char *at, *rows; /* their bytes; NULL: only Python can find them, or there are none */
} kp_payload;

/* One worker's part of a round. */
typedef struct {
    int32_t rank;
    kp_record request;
    kp_buffer *data, *more;
    const char *at, *rows; /* as `kp_payload` */
} kp_part;

/* A round that is not complete: its parts by rank. */
typedef struct {
    uint64_t number;
    uint64_t before, last; /* ns of the monotonic clock: arrival of the last two parts; 0: not known */
    int32_t last_rank;
    int n, capacity;
    kp_part *parts;
} kp_open;

/* A request that waits for a round. */
typedef struct {
    kp_session *session;
    kp_record request;
    kp_buffer *data;
} kp_waiter;

typedef struct {
    kp_waiter *all;
    int n, capacity;
} kp_waiters;

typedef struct kp_slice {
    void *owner; /* the Python object that contains this struct */
    int32_t store;
    uint32_t id;
    uint8_t defined, ready, kept, busy;
    uint8_t special; /* the slice has state that only Python knows */
    uint64_t round;  /* the last complete round */
    kp_value *value; /* NULL: only Python knows it */
    kp_table *table; /* instead of `value`, if the slice is row-sparse */
    kp_open *open;
    int n_open, open_capacity;
    kp_waiters pulls, held;
    uint64_t answered;     /* the last message with an answer that will read the value in place */
    struct kp_slice *next; /* in the list of slices to sum in this step */
} kp_slice;

/* The workers that rounds wait for. */
typedef struct {
    int usual; /* the store has rounds, and no member is lost, rejoins, or has left without `join` */
    uint64_t epoch; /* of the view with these members */
    int n_needed;
    int32_t *needed; /* ascending */
    int at_once;     /* the store has no rounds: each push is one by itself; no worker is lost or rejoins */
} kp_members;

/* A period in which rounds waited for one worker alone, each for more than KP_LATE_NS; overlapping ones are joined. */
typedef struct {
    uint64_t begin, end;     /* ns of the monotonic clock */
    uint64_t rounds;         /* number of rounds of slices */
    uint64_t longest, slice; /* ns of the round that waited longest, and the number of its slice */
    int32_t rank;
} kp_late;

typedef struct {
    kp_late *all; /* KP_MOST_LATE; NULL: not recorded. Periods beyond that number are omitted */
    size_t n;
    uint64_t rounds; /* completed rounds of several workers, late or not */
} kp_lates;

typedef struct {
    kp_session *touched, **last_touched;
    kp_slice *jobs, **last_job;
    kp_lates lates;
    uint64_t message; /* counts messages, and the answers that are sent in between */
    kp_observer observer;
    const struct kp_link *asked; /* the link of the last message */
    uint32_t open;               /* a slice with a round that waits for parts; a guess */
} kp_effects;

/* Initialise. */
static void kp_init_effects(kp_effects *e)
{
    *e = (kp_effects){0};
    e->last_touched = &e->touched;
    e->last_job = &e->jobs;
}

/* ------------------------------------------------------------------------------------------------- effects */

/* Put a session into the list of this step, once. */
static void kp_queue_session(kp_effects *e, kp_session *s)
{
    if (s->touched)
        return;
    s->touched = 1;
    s->next = NULL;
    *e->last_touched = s;
    e->last_touched = &s->next;
}

/* Answer one request; the reference to `detail` then belongs to the answer. Without memory the answer is lost, as a message
 * may be: the request waits no more, so that it is answered when the worker repeats it. */
static void kp_answer_request(kp_effects *e, kp_session *s, enum kp_kind kind, const kp_record *request,
                              uint64_t round, kp_buffer *detail)
{
    kp_erase_number(&s->waiting, request->sequence);
    if (!s->gone && s->n_answers == s->answers_capacity) {
        size_t capacity = s->answers_capacity ? 2 * s->answers_capacity : 16;
        kp_answer *answers = (kp_answer *)realloc(s->answers, capacity * sizeof *answers);
        if (answers) {
            s->answers = answers;
            s->answers_capacity = capacity;
        }
    }
    if (s->gone || s->n_answers == s->answers_capacity) {
        kp_release(detail);
        return;
    }
    kp_queue_session(e, s);
    s->answers[s->n_answers++] = (kp_answer){kind, *request, round, detail};
}

/* Append a slice to the list of slices to sum. */
static void kp_add_job(kp_effects *e, kp_slice *slice)
{
    slice->next = NULL;
    *e->last_job = slice;
    e->last_job = &slice->next;
}

/* --------------------------------------------------------------------------------------------------- parts */

/* Return an open round, or NULL. Valid until the next round is opened or dropped. */
static kp_open *kp_find_open(const kp_slice *slice, uint64_t number)
{
    for (int i = 0; i < slice->n_open; i++)
        if (slice->open[i].number == number)
            return &slice->open[i];
    return NULL;
}

/* Return an open round, which is created if it does not exist; NULL: no memory. */
static kp_open *kp_open_round(kp_slice *slice, uint64_t number)
{
    kp_open *found = kp_find_open(slice, number);
    if (found)
        return found;
    if (slice->n_open == slice->open_capacity) {
        int capacity = slice->open_capacity ? 2 * slice->open_capacity : 2;
        kp_open *open = (kp_open *)realloc(slice->open, (size_t)capacity * sizeof *open);
        if (!open)
            return NULL;
        memset(open + slice->open_capacity, 0, (size_t)(capacity - slice->open_capacity) * sizeof *open);
        slice->open = open;
        slice->open_capacity = capacity;
    }
    found = &slice->open[slice->n_open++];
    found->number = number;
    found->before = found->last = 0;
    found->n = 0;
    return found;
}

/* Return the index of a rank's part, or -1. */
static int kp_part_of(const kp_open *open, int32_t rank)
{
    for (int i = 0; i < open->n; i++)
        if (open->parts[i].rank == rank)
            return i;
    return -1;
}

/* Release the memory of a part. */
static void kp_release_part(const kp_part *part)
{
    kp_release(part->data);
    kp_release(part->more);
}

/* Insert a part by rank, with new references to its data. 0; -1: no memory. */
static int kp_insert_part(kp_open *open, int32_t rank, const kp_record *request, const kp_payload *p)
{
    if (open->n == open->capacity) {
        int capacity = open->capacity ? 2 * open->capacity : 2;
        kp_part *parts = (kp_part *)realloc(open->parts, (size_t)capacity * sizeof *parts);
        if (!parts)
            return -1;
        open->parts = parts;
        open->capacity = capacity;
    }
    int i = open->n++;
    for (; i > 0 && open->parts[i - 1].rank > rank; i--)
        open->parts[i] = open->parts[i - 1];
    open->parts[i] = (kp_part){rank, *request, kp_retain(p->data), kp_retain(p->more), p->at, p->rows};
    return 0;
}

/* Drop an open round and its parts; the next round uses its memory. */
static void kp_drop_open(kp_slice *slice, kp_open *open)
{
    for (int i = 0; i < open->n; i++)
        kp_release_part(&open->parts[i]);
    open->n = 0;
    kp_open *last = &slice->open[--slice->n_open], kept = *open;
    *open = *last;
    *last = kept;
}

/* Return the first rank that a round waits for; KV_NOBODY: none. Both lists ascend. */
static int32_t kp_first_missing(const kp_open *open, const kp_members *members)
{
    int at = 0;
    for (int i = 0; i < members->n_needed; i++) {
        while (at < open->n && open->parts[at].rank < members->needed[i])
            at++;
        if (at == open->n || open->parts[at].rank != members->needed[i])
            return members->needed[i];
    }
    return KV_NOBODY;
}

/* Return whether all parts of a round are there. */
static int kp_has_all_parts(const kp_open *open, const kp_members *members)
{
    return kp_first_missing(open, members) == KV_NOBODY;
}

static void kp_note_time(kp_effects *e, const kp_slice *slice, int32_t rank, const kp_record *r)
{
    kp_open *open = e->lates.all && kv_ring_here->now ? kp_find_open(slice, r->round) : NULL;
    if (open) {
        open->before = open->last;
        open->last = kv_ring_here->now();
        open->last_rank = rank;
    }
    if (!kv_is_timed(e->observer.counters))
        return;
    uint64_t number = kp_slice_number(slice->store, slice->id);
    kv_note(e->observer.counters, KV_EVENT_ARRIVED, (kv_about){number, r->round, r->nbytes, rank, e->observer.store});
    e->open = slice->id;
}

/* Record the arrival of a part, for times and timelines. */
static inline void kp_note_arrival(kp_effects *e, const kp_slice *slice, int32_t rank, const kp_record *r)
{
    if (e->lates.all || kv_is_timed(e->observer.counters))
        kp_note_time(e, slice, rank, r);
}

/* Return the period of a round that has waited: the last one, or a new one; NULL: no space. */
static kp_late *kp_find_late(kp_lates *lates, const kp_open *open)
{
    kp_late *one = lates->n ? &lates->all[lates->n - 1] : NULL;
    if (one && one->rank == open->last_rank && open->before < one->end)
        return one;
    if (lates->n == KP_MOST_LATE)
        return NULL;
    one = &lates->all[lates->n++];
    *one = (kp_late){.begin = open->before, .rank = open->last_rank};
    return one;
}

/* Record how long the next round of a slice, which is complete now, has waited for its last part. */
static void kp_note_wait(kp_effects *e, const kp_slice *slice)
{
    const kp_open *open = e->lates.all ? kp_find_open(slice, slice->round + 1) : NULL;
    if (!open || !open->before || open->number == 1) /* the first round does not count: workers start at different times */
        return;
    e->lates.rounds++;
    uint64_t ns = open->last - open->before;
    kp_late *one = ns > KP_LATE_NS ? kp_find_late(&e->lates, open) : NULL;
    if (!one)
        return;
    one->begin = open->before < one->begin ? open->before : one->begin;
    one->end = open->last > one->end ? open->last : one->end;
    one->rounds++;
    if (ns > one->longest) {
        one->longest = ns;
        one->slice = kp_slice_number(slice->store, slice->id);
    }
}

/* ------------------------------------------------------------------------------------------------- waiters */

/* Add a request that waits, with a new reference to its data. 0; -1: no memory. */
static int kp_add_waiter(kp_waiters *w, kp_session *session, const kp_record *request, kp_buffer *data)
{
    if (w->n == w->capacity) {
        int capacity = w->capacity ? 2 * w->capacity : 2;
        kp_waiter *all = (kp_waiter *)realloc(w->all, (size_t)capacity * sizeof *all);
        if (!all)
            return -1;
        w->all = all;
        w->capacity = capacity;
    }
    if (kp_insert_number(&session->waiting, request->sequence))
        return -1;
    w->all[w->n++] = (kp_waiter){session, *request, kp_retain(data)};
    return 0;
}

/* Remove all waiting requests; they stay in `waiting` of their sessions. */
static void kp_drop_waiters(kp_waiters *w)
{
    for (int i = 0; i < w->n; i++)
        kp_release(w->all[i].data);
    w->n = 0;
}

/* Release all memory of a slice, and zero it. */
static void kp_close_slice(kp_slice *slice)
{
    while (slice->n_open)
        kp_drop_open(slice, &slice->open[0]);
    for (int i = 0; i < slice->open_capacity; i++)
        free(slice->open[i].parts);
    free(slice->open);
    kp_drop_waiters(&slice->pulls);
    kp_drop_waiters(&slice->held);
    free(slice->pulls.all);
    free(slice->held.all);
    memset(slice, 0, sizeof *slice);
}

/* ------------------------------------------------------------------------------------------- usual requests */

/* Begin the slice's next round if it has all parts: it becomes busy, and a job. */
static void kp_begin_round(kp_slice *slice, const kp_members *members, kp_effects *e)
{
    if (slice->busy || !members->usual || !slice->ready)
        return;
    const kp_open *open = kp_find_open(slice, slice->round + 1);
    if (open && open->n && kp_has_all_parts(open, members)) { /* a round without parts has lacked memory for its first one */
        slice->busy = KP_ROUND;
        kp_add_job(e, slice);
    }
}

/* Return whether a push needs nothing special. */
static int kp_is_usual_push(const kp_slice *slice, const kp_session *session, const kp_record *r)
{
    uint64_t ahead = r->round - slice->round;
    if (r->round <= slice->round || ahead > KP_OPEN_ROUNDS || (ahead == 1 && slice->busy == KP_ROUND))
        return 0;
    const kp_open *open = kp_find_open(slice, r->round);
    return !open || kp_part_of(open, session->seat) < 0;
}

static int kp_push(kp_slice *slice, kp_session *session, const kp_members *members, const kp_record *r,
                   const kp_payload *payload, kp_effects *e)
{
    kp_open *open = kp_open_round(slice, r->round);
    if (!open || (r->kind == KP_PUSHPULL && kp_add_waiter(&slice->pulls, session, r, NULL)))
        return -1;
    if (kp_insert_part(open, session->seat, r, payload)) {
        if (r->kind == KP_PUSHPULL) {
            slice->pulls.n--;
            kp_erase_number(&session->waiting, r->sequence);
        }
        return -1;
    }
    kp_note_arrival(e, slice, session->seat, r);
    if (r->kind == KP_PUSH)
        kp_answer_request(e, session, KP_DONE, r, slice->round, NULL);
    if (r->round == slice->round + 1 && open->n >= members->n_needed)
        kp_begin_round(slice, members, e);
    return 0;
}

/* Answer a read, or let it wait. `ids`: of the requested rows; NULL: all elements. */
static int kp_pull(kp_slice *slice, kp_session *session, const kp_record *r, kp_buffer *ids, kp_effects *e)
{
    if (slice->busy || r->round > slice->round)
        return kp_add_waiter(&slice->pulls, session, r, ids);
    kp_answer_request(e, session, KP_VALUE, r, slice->round, kp_retain(ids));
    return 0;
}

/* Return whether a request is the next one of its worker, and of a slice that has a value and nothing special. */
static int kp_is_next_request(const kp_slice *slice, const kp_session *session, const kp_record *r)
{
    const kp_duplicates *d = &session->duplicates;
    return r->sequence == d->low + 1 && !d->above.count && r->flags != KP_PROBE && slice && slice->ready &&
           !slice->special && !slice->held.n;
}

/* Count a request that was handled. */
static void kp_note_request(kp_session *session, const kp_record *r)
{
    session->duplicates.low++;
    session->received += kp_carried(r);
}

/* Handle a usual request. 1: handled; 0: no change, because it needs something special, is a duplicate, or memory lacks. */
static int kp_request(kp_slice *slice, kp_session *session, const kp_members *members, const kp_record *r,
                      const kp_payload *payload, kp_effects *e)
{
    if (!members->usual || !kp_is_next_request(slice, session, r))
        return 0;
    if (r->kind == KP_PUSH || r->kind == KP_PUSHPULL) {
        if (!kp_is_usual_push(slice, session, r) || kp_push(slice, session, members, r, payload, e))
            return 0;
    } else if (r->kind == KP_PULL_ROWS) {
        if (!payload->data || kp_pull(slice, session, r, payload->data, e))
            return 0;
    } else if (r->kind != KP_PULL || kp_pull(slice, session, r, NULL, e)) {
        return 0;
    }
    kp_note_request(session, r);
    return 1;
}

/* Complete the next round, and drop its parts. */
static void kp_complete_round(kp_slice *slice)
{
    kp_open *open = kp_find_open(slice, ++slice->round);
    if (open)
        kp_drop_open(slice, open);
}

/* Answer the requests that waited for a round that is complete now; only of a slice that is not special. */
static void kp_answer_waiters(kp_slice *slice, kp_effects *e)
{
    kp_waiters *w = &slice->pulls;
    int left = 0;
    for (int i = 0; i < w->n; i++) {
        kp_waiter *one = &w->all[i];
        if (one->request.kind != KP_LAST_ROUND && one->request.round <= slice->round)
            kp_answer_request(e, one->session, KP_VALUE, &one->request, slice->round, one->data);
        else
            w->all[left++] = *one;
    }
    w->n = left;
}

/* Complete a round that was summed, and begin the next if it is ready. 0: no change; the slice needs something special. */
static int kp_finish_round(kp_slice *slice, const kp_members *members, kp_effects *e)
{
    if (slice->special || slice->held.n || slice->busy != KP_ROUND || !members->usual)
        return 0;
    slice->busy = KP_NOTHING;
    kp_count_rounds(&e->observer, 1);
    kp_note_wait(e, slice);
    kp_complete_round(slice);
    kp_answer_waiters(slice, e);
    kp_begin_round(slice, members, e);
    return 1;
}

#endif
