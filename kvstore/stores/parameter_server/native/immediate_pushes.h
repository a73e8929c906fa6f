/* Requests of a store without rounds: each push replaces or updates the value by itself, and is answered then.
 *
 * As in rounds.h: one thread at a time; no function blocks, except for the kernels in `kp_request_at_once`. */
#ifndef KP_IMMEDIATE_PUSHES_H
#define KP_IMMEDIATE_PUSHES_H

#include "replies.h"
#include "sums.h"

/* Send the answers that read the value as it is now, before it changes. 0: Python has to send one first. */
static int kp_answer_readers(const kp_slice *slice, kp_effects *e)
{
    if (slice->answered != e->message)
        return 1;
    kp_reply_all(e);
    e->message++;
    return !e->touched;
}

/* Return memory for the value after a push, to be sent while other pushes change it; NULL: not needed, or no memory. */
static kp_buffer *kp_answer_memory(const kp_session *session, const kp_value *v, const kp_record *r)
{
    const kp_replier *replier = (const kp_replier *)session->replier;
    if (r->kind != KP_PUSHPULL || v->nbytes <= KP_COPIED_BYTES || kp_is_shared(replier, v, r))
        return NULL;
    return kp_new_buffer((size_t)v->nbytes);
}

static void kp_answer_value(kp_slice *slice, kp_session *session, const kp_record *r, kp_buffer *own, kp_effects *e)
{
    if (!own)
        slice->answered = e->message;
    kp_answer_request(e, session, KP_VALUE, r, slice->round, own);
}

/* Do the round of one part. 0; -1: nothing is done. With 0, `own` may have a copy of the new value. */
static int kp_run_single_part(kp_sums *sums, kp_slice *slice, const kp_open *open, int is_out, kp_buffer **own,
                        const kp_session *session)
{
    const kp_part *part = &open->parts[0];
    kp_clear_sums(sums);
    if (!kp_can_sum(slice, open) || kp_add_sum(sums, slice, open))
        return -1;
    *own = is_out ? NULL : kp_answer_memory(session, slice->value, &part->request);
    if (!(*own && kp_add_out(sums, (*own)->data)) && !kp_run_sums(sums))
        return 0;
    kp_release(*own);
    return -1;
}

/* Do a push. 0; -1: no change, and Python has to. */
static int kp_push_at_once(kp_sums *sums, kp_slice *slice, kp_session *session, const kp_record *r,
                           const kp_payload *payload, kp_effects *e)
{
    kp_open *open = slice->n_open || !kp_answer_readers(slice, e) ? NULL : kp_open_round(slice, slice->round + 1);
    kp_buffer *own = NULL;
    kp_record request = *r;
    if (!open)
        return -1;
    int failed = kp_insert_part(open, session->rank, r, payload), is_out = !failed && kp_overwrites_part(sums, &open->parts[0]);
    if (failed || kp_run_single_part(sums, slice, open, is_out, &own, session)) {
        kp_drop_open(slice, open);
        return -1;
    }
    kp_note_arrival(e, slice, session->rank, r);
    kp_complete_round(slice);
    kp_count_rounds(&e->observer, 1);
    if (is_out)
        request.flags = KP_WRITTEN;
    if (r->kind == KP_PUSHPULL)
        kp_answer_value(slice, session, &request, own, e);
    else
        kp_answer_request(e, session, KP_DONE, &request, slice->round, NULL);
    return 0;
}

/* As `kp_request`, for a store without rounds; the kernels sum or update at once. */
static int kp_request_at_once(kp_sums *sums, kp_slice *slice, kp_session *session, const kp_record *r,
                              const kp_payload *payload, kp_effects *e)
{
    if (!kp_is_next_request(slice, session, r) || slice->busy)
        return 0;
    if (r->kind == KP_PULL)
        kp_answer_value(slice, session, r, NULL, e);
    else if ((r->kind != KP_PUSH && r->kind != KP_PUSHPULL) || kp_push_at_once(sums, slice, session, r, payload, e))
        return 0;
    kp_note_request(session, r);
    return 1;
}

#endif
