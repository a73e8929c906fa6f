/* A worker's stream at a server: usual requests are handled, summed and answered here, without Python.
 *
 * `kp_handle_message` stops at the first record that is not usual. Answers and jobs that need Python stay in `effects`. Python's state
 * machine works on the same structs, before or after. All functions need exclusive use of the server's state: the state lock of
 * second_thread.h, or the first thread outside of `kp_serve`. */
#ifndef KP_LINKS_H
#define KP_LINKS_H

#include "immediate_pushes.h"
#include "read_batch.h"
#include "row_rounds.h"

enum { KP_WAITS_READ = 64 }; /* slices that `kp_about_wait` reads */

/* A segment of another process's memory. */
typedef struct {
    kp_buffer *holder; /* NULL: it is not mapped */
    char *at;
    uint64_t nbytes;
} kp_segment;

typedef struct kp_link {
    kp_inlet inlet;
    kp_replier replier;
    kp_effects *effects;
    kp_sums *sums;
    const kp_members *members;
    const kp_slices *slices;
    kp_session *session;
    uint64_t report; /* bytes of requests after which the worker is sent an acknowledgement */
    kp_segment *segments;
    uint32_t n_segments;
} kp_link;

/* --------------------------------------------------------------------------------------------------- rounds */

/* Sum the rounds that are ready, as far as the kernels can; the others stay in the list. Returns how many were summed. */
static size_t kp_sum_rounds(kp_link *link)
{
    kp_effects *e = link->effects;
    kp_sums *sums = link->sums;
    kp_slice *job = e->jobs;
    e->jobs = NULL;
    e->last_job = &e->jobs;
    size_t applied = 0;
    kp_clear_sums(sums);
    for (kp_slice *following; job; job = following) {
        following = job->next;
        const kp_open *open = kp_find_open(job, job->round + 1);
        if (open && job->table && link->members->usual && kp_can_update_rows(job, open)) {
            kp_update_rows(sums, job, open);
            if (kp_finish_round(job, link->members, e))
                applied++;
            else
                kp_add_job(e, job);
        } else if (!open || !kp_can_sum(job, open)) {
            kp_add_job(e, job);
        } else if (kp_may_stay_packed(job->value, open) && !kp_keep_packed(job, open)) {
            if (kp_finish_round(job, link->members, e))
                applied++;
            else
                kp_add_job(e, job);
        } else if (kp_add_sum(sums, job, open)) {
            kp_add_job(e, job);
        }
    }
    int failed = sums->n && kp_run_sums(sums);
    for (size_t i = 0; i < sums->n; i++)
        if (!failed && kp_finish_round(sums->slices[i], link->members, e))
            applied++;
        else
            kp_add_job(e, sums->slices[i]);
    return applied;
}

/* Answer, then sum, in the order of Python: a sum may change the value of an answer. Work for Python stops the loop. */
static void kp_reply_and_sum(kp_link *link)
{
    kp_effects *e = link->effects;
    do
        kp_reply_all(e);
    while (e->jobs && !e->touched && kp_sum_rounds(link));
}

/* ------------------------------------------------------------------------------------------------- requests */

static int kp_is_finite(double number)
{
    return number - number == 0;
}

/* Find ids, and rows behind them if there are any. 0: Python has to. */
static int kp_find_rows(const kp_batch *batch, kp_record *r, kp_payload *p)
{
    kp_record ids = *r;
    ids.nbytes = 8 * (uint64_t)r->rows;
    if (r->place != KP_FRAME || r->rows > INT64_MAX / 8 || r->nbytes < ids.nbytes || !(p->data = kp_frame_of(batch, &ids)))
        return 0;
    p->at = p->data->data + r->offset;
    if (r->nbytes <= p->data->nbytes - r->offset) {
        p->rows = p->at + ids.nbytes;
    } else {
        kp_record rows = {.frame = r->frame + 1, .nbytes = r->nbytes - ids.nbytes};
        if (p->data->nbytes != r->offset + ids.nbytes || !rows.frame || !(p->more = kp_frame_of(batch, &rows)))
            return 0;
        p->rows = p->more->data;
    }
    r->frame = 0; /* Python gets only these frames */
    return 1;
}

/* Find a request's payload. 0: Python has to. */
static int kp_find_payload(const kp_link *link, const kp_batch *batch, kp_record *r, kp_payload *p)
{
    *p = (kp_payload){0};
    if (r->rows != -1)
        return r->rows >= 0 && (r->kind == KP_PUSH || r->kind == KP_PULL_ROWS) && kp_find_rows(batch, r, p);
    if (r->place == KP_NOWHERE)
        return 1;
    if (r->place == KP_FRAME) {
        kp_buffer *frame = kp_frame_of(batch, r);
        if (!frame)
            return 0;
        p->data = frame;
        p->at = frame->data + r->offset;
        r->frame = 0; /* Python gets only that frame */
        return 1;
    }
    const kp_segment *segment = r->place == KP_SHARED && r->frame < link->n_segments ? &link->segments[r->frame] : NULL;
    if (!segment || !segment->holder || r->offset > segment->nbytes || r->nbytes > segment->nbytes - r->offset)
        return 0;
    p->data = segment->holder;
    p->at = segment->at + r->offset;
    return 1;
}

static int kp_take_record(kp_link *link, const kp_batch *batch, const kp_record *record)
{
    kp_record r = *record;
    kp_payload payload;
    if (!kp_is_finite(r.threshold) || !kp_find_payload(link, batch, &r, &payload))
        return 0;
    kp_slice *slice = kp_slice_of(link->slices, r.slice);
    if (link->members->at_once)
        return r.rows == -1 && kp_request_at_once(link->sums, slice, link->session, &r, &payload, link->effects);
    return kp_request(slice, link->session, link->members, &r, &payload, link->effects);
}

static int kp_is_usual(const kp_link *link, const kp_head *head)
{
    const kp_session *s = link->session;
    if (link->effects->jobs || link->effects->touched)
        return 0; /* Python's answers come first: they read values as they are now */
    return head->store == s->store && head->rank == s->rank && head->incarnation == s->incarnation && !s->gone &&
           !s->overtaken && head->epoch <= link->members->epoch && (link->members->usual || link->members->at_once);
}

/* Handle a message of a stream; the `handle` of an inlet. `message->handled` records are done. Blocks only for the kernels.
 * 0: there are records, jobs or answers for Python. The message belongs to the caller. */
static int kp_handle_message(void *context, kp_message *message)
{
    kp_link *link = (kp_link *)context;
    kp_session *session = link->session;
    kp_batch batch;
    if (!kp_read_batch(&batch, message, link->replier.version, link->replier.job) || !kp_is_usual(link, batch.head)) {
        kp_close_batch(&batch);
        return 0;
    }
    uint32_t n = batch.head->records;
    kp_moved moved = {0};
    session->replier = &link->replier;
    link->effects->message++;
    if (batch.head->epoch > session->epoch)
        session->epoch = batch.head->epoch;
    link->effects->asked = link;
    while (message->handled < n && kp_take_record(link, &batch, &batch.records[message->handled]))
        kp_add_record_bytes(&moved, &batch.records[message->handled++]);
    kp_count_received(&link->effects->observer, KV_BY_STREAM, &moved);
    kv_note_bytes(link->effects->observer.counters, moved.carried);
    kp_close_batch(&batch);
    kp_reply_and_sum(link);
    if (session->received - session->reported >= link->report) {
        session->report = 1;
        kp_queue_session(link->effects, session);
        kp_reply_all(link->effects);
    }
    return message->handled == n && !link->effects->jobs && !link->effects->touched;
}

/* ---------------------------------------------------------------------------------------------------- waits */

/* Return the rank that the next round of a slice waits for; KV_NOBODY: the round has no parts, or waits for no rank. */
static int32_t kp_awaited(const kp_link *link, uint32_t number)
{
    const kp_slice *slice = kp_slice_of(link->slices, number);
    const kp_open *open = slice && !slice->busy ? kp_find_open(slice, slice->round + 1) : NULL;
    return open && open->n ? kp_first_missing(open, link->members) : KV_NOBODY;
}

/* Return what an idle server waits for, as `kp_waits`: a missing part of a round of which other parts are there.
 *
 * Slices are pushed in about the order of their numbers: it is the slice of the last part, or one soon after it. */
static kv_about kp_about_wait(void *effects)
{
    kp_effects *e = (kp_effects *)effects;
    const kp_link *link = e->asked;
    for (uint32_t i = 0; link && link->slices->n && i < KP_WAITS_READ; i++) {
        uint32_t number = (uint32_t)(((uint64_t)e->open + i) % link->slices->n);
        int32_t whom = kp_awaited(link, number);
        if (whom != KV_NOBODY) {
            e->open = number;
            const kp_slice *slice = kp_slice_of(link->slices, number);
            return (kv_about){kp_slice_number(slice->store, number), slice->round + 1, 0, whom, e->observer.store};
        }
    }
    return kp_about_all(&e->observer);
}

static void kp_unmap(kp_link *link)
{
    for (uint32_t i = 0; i < link->n_segments; i++)
        kp_release(link->segments[i].holder);
    free(link->segments);
    link->segments = NULL;
    link->n_segments = 0;
}

/* Separate a link from its stream, which is closed, and from its session, and unmap its segments. A second call is allowed. */
static void kp_close_link(kp_link *link)
{
    link->replier.outlet = (kp_outlet){0};
    if (link->effects && link->effects->asked == link)
        link->effects->asked = NULL;
    if (link->session && link->session->replier == &link->replier)
        link->session->replier = NULL;
    kp_unmap(link);
}

#endif
