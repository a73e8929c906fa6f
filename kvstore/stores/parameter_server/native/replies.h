/* Writes and sends the replies that need no Python, in the format of transport/frames.py.
 *
 * All functions need exclusive use of the server's state, as in links.h; none blocks, because an outlet only queues. */
#ifndef KP_REPLIES_H
#define KP_REPLIES_H

#include "messages.h"
#include "rounds.h"

enum {
    KP_REPLY_RECORDS = 4096,
    KP_REPLY_BYTES = 1 << 20, /* of values in a message, as loop._REPLY_BYTES; a larger value has its own message */
    KP_COPIED_BYTES = 16 * 1024, /* values up to this size share a frame, as frames.SMALL */
    KP_TOGETHER = 64, /* alignment of each value in it, as in frames.pack */
    KP_MOST_BYTES = 256 << 20 /* of a frame, as frames.MessageLimits */
};

/* The slices of a store by their numbers. */
typedef struct {
    kp_slice **all;
    uint32_t n;
} kp_slices;

/* Return a slice, or NULL. */
static inline kp_slice *kp_slice_of(const kp_slices *slices, uint32_t number)
{
    return number < slices->n ? slices->all[number] : NULL;
}

/* Data to answer one worker. */
typedef struct kp_replier {
    kp_outlet outlet;
    uint16_t version;
    uint64_t job;
    const kp_members *members;
    const kp_slices *slices;
    int reads_here; /* the worker maps this process's memory */
    const kp_observer *observer;
} kp_replier;

/* A message that is being written: its first frame, the small values, and all pieces. */
typedef struct {
    kp_buffer *text; /* sizes, head and records, and the small values if they are inlined */
    char *records, *together;
    uint64_t n_together; /* bytes */
    kp_piece *pieces;
    size_t n_pieces;
} kp_writing;

/* Return whether a value that is sent to a worker cannot change before its arrival: no round proceeds without this worker. */
static int kp_is_steady(const kp_members *members, int32_t rank)
{
    for (int i = 0; i < members->n_needed && members->needed[i] <= rank; i++)
        if (members->needed[i] == rank)
            return members->usual;
    return 0;
}

static const kp_value *kp_value_of(const kp_replier *replier, const kp_answer *answer)
{
    const kp_slice *slice = kp_slice_of(replier->slices, answer->request.slice);
    return slice ? slice->value : NULL;
}

static int kp_answers_rows(const kp_answer *a)
{
    return a->kind == KP_VALUE && a->request.kind == KP_PULL_ROWS;
}

static const int64_t *kp_wanted_ids(const kp_answer *a)
{
    return (const int64_t *)(a->detail->data + a->request.offset);
}

/* Return whether an answer has rows of a table, in their own frames. */
static int kp_has_rows(const kp_replier *replier, const kp_answer *a)
{
    const kp_slice *slice = kp_slice_of(replier->slices, a->request.slice);
    const kp_table *t = slice ? slice->table : NULL;
    int64_t n = a->request.rows;
    if (!t || !t->at || a->request.flags == KP_OF_ROUND || !a->detail || !a->detail->data || n <= 0 || n > t->n)
        return 0;
    uint64_t nbytes = (uint64_t)n * t->row_bytes;
    return nbytes > KP_COPIED_BYTES && nbytes <= KP_MOST_BYTES && (uintptr_t)kp_wanted_ids(a) % 8 == 0 &&
           kp_are_ids(t, kp_wanted_ids(a), n);
}

/* Return whether an answer needs no Python. */
static int kp_is_plain(const kp_replier *replier, const kp_answer *a)
{
    if (a->kind == KP_DONE)
        return 1;
    if (kp_answers_rows(a))
        return kp_has_rows(replier, a);
    const kp_value *v = kp_value_of(replier, a);
    if (a->kind != KP_VALUE || !v || !v->buffers[v->current].at || v->nbytes <= 0 || v->nbytes > KP_MOST_BYTES)
        return 0;
    return a->request.flags != KP_OF_ROUND &&
           (a->request.kind == KP_PULL || a->request.kind == KP_PUSHPULL);
}

/* Return whether the worker reads the value in shared memory. */
static int kp_is_shared(const kp_replier *replier, const kp_value *v, const kp_record *request)
{
    return replier->reads_here && request->flags != KP_BY_FRAME && v->buffers[v->current].seqlock &&
           v->nbytes >= KP_SHARED_BYTES;
}

/* Return an answer's own copy of the value, if it has one; a pushpull has no other detail. */
static kp_buffer *kp_own_value(const kp_answer *a)
{
    return a->request.kind == KP_PUSHPULL && a->detail && a->detail->data ? a->detail : NULL;
}

/* Return the parts that are sent in place of their sum; NULL: the sum is sent. */
static const kp_packed *kp_packed_of(const kp_value *v, const kp_answer *a)
{
    const kp_packed *packed = v->buffers[v->current].packed;
    return a->request.flags == KP_PACKED && packed && packed->n && !kp_own_value(a) ? packed : NULL;
}

/* Compute the value of a plain answer if it is packed, and is to be read. 0: no memory for it. */
static int kp_make_readable(const kp_replier *replier, const kp_answer *a)
{
    if (a->kind != KP_VALUE || a->request.kind == KP_PULL_ROWS || a->request.flags == KP_WRITTEN || kp_own_value(a))
        return 1;
    kp_value *v = kp_slice_of(replier->slices, a->request.slice)->value;
    return kp_packed_of(v, a) || !kp_unpack_sum(v, &v->buffers[v->current]);
}

/* Write the record of an answer. Returns the bytes of value that the message carries for it. */
static uint64_t kp_write_record(const kp_replier *replier, const kp_answer *a, kp_record *r)
{
    *r = (kp_record){.kind = (uint8_t)a->kind, .slice = a->request.slice, .sequence = a->request.sequence,
                     .round = a->round, .rows = -1};
    if (a->kind != KP_VALUE)
        return 0;
    if (a->request.flags == KP_WRITTEN) {
        r->flags = KP_IN_PLACE;
        return 0;
    }
    const kp_value *v = kp_value_of(replier, a);
    const kp_value_buffer *buffer = &v->buffers[v->current];
    const kp_packed *packed = kp_packed_of(v, a);
    r->nbytes = (uint64_t)v->nbytes;
    if (packed) {
        r->coding = packed->coding;
        r->threshold = packed->threshold;
        r->nbytes = (uint64_t)(packed->n * packed->nbytes);
    } else if (kp_is_shared(replier, v, &a->request)) {
        r->place = KP_SHARED;
        r->frame = buffer->segment;
        r->offset = buffer->offset;
        r->flags = *buffer->seqlock;
        return 0;
    }
    r->place = KP_FRAME;
    return r->nbytes;
}

static uint64_t kp_round_up(uint64_t nbytes)
{
    return (nbytes + KP_TOGETHER - 1) / KP_TOGETHER * KP_TOGETHER;
}

/* Return the bytes of small values; set the number of larger values, and the most pieces that they have. */
static uint64_t kp_measure(const kp_replier *replier, const kp_answer *answers, size_t n, size_t *larger, size_t *pieces)
{
    uint64_t together = 0;
    *larger = *pieces = 0;
    for (size_t i = 0; i < n; i++) {
        kp_record r;
        uint64_t nbytes = kp_write_record(replier, &answers[i], &r);
        if (nbytes > KP_COPIED_BYTES) {
            ++*larger;
            *pieces += r.coding ? KP_MOST_PACKED : 1;
        } else {
            together += kp_round_up(nbytes);
        }
    }
    return together;
}

/* Set a piece to a large value in its memory, or to a copy of it. 0; -1: no memory. */
static int kp_add_value(const kp_value *v, const kp_answer *a, int steady, kp_piece *piece)
{
    const kp_value_buffer *buffer = &v->buffers[v->current];
    kp_buffer *own = kp_own_value(a);
    if (own) {
        *piece = (kp_piece){own->data, (size_t)v->nbytes, kp_retain(own)};
        return 0;
    }
    *piece = (kp_piece){buffer->at, (size_t)v->nbytes};
    if (steady) {
        piece->owner = kp_retain(buffer->holder);
        return 0;
    }
    piece->owner = kp_new_buffer((size_t)v->nbytes);
    if (!piece->owner)
        return -1;
    memcpy(piece->owner->data, buffer->at, (size_t)v->nbytes);
    piece->at = piece->owner->data;
    return 0;
}

/* Set pieces to the parts of a packed value, in one frame. Returns their number. */
static size_t kp_add_packed(const kp_packed *packed, kp_piece *pieces)
{
    for (int i = 0; i < packed->n; i++)
        pieces[i] = (kp_piece){packed->parts[i].at, (size_t)packed->nbytes, kp_retain(packed->parts[i].data)};
    return (size_t)packed->n;
}

/* Copy a small value, or its packed parts. */
static void kp_copy_value(const kp_value *v, const kp_packed *packed, char *to)
{
    if (!packed)
        memcpy(to, v->buffers[v->current].at, (size_t)v->nbytes);
    for (int i = 0; packed && i < packed->n; i++)
        memcpy(to + i * packed->nbytes, packed->parts[i].at, (size_t)packed->nbytes);
}

/* Return the head of a message with answers of a session. */
static kp_head kp_head_of(const kp_replier *replier, const kp_session *session, size_t n)
{
    return (kp_head){.magic = {'K', 'V', 'S', 'T'}, .version = replier->version, .kind = KP_DATA, .job = replier->job,
                     .store = session->store, .rank = session->rank, .incarnation = session->incarnation,
                     .received = session->received, .records = (uint32_t)n};
}

/* Send one message of plain answers. 0; -1: it cannot be sent. */
static int kp_send_answers(const kp_replier *replier, const kp_session *session, const kp_answer *answers, size_t n)
{
    size_t larger, most, used = 0, large = 0;
    uint64_t together = kp_measure(replier, answers, n, &larger, &most);
    int inlined = together && together <= KP_INLINE_BYTES;
    uint32_t frames = (uint32_t)(1 + (together && !inlined) + larger);
    size_t sizes = 8 + 8 * (size_t)frames, first = sizeof(kp_head) + n * sizeof(kp_record);
    kp_buffer *text = kp_new_buffer(sizes + first + (size_t)together);
    kp_piece *pieces = (kp_piece *)calloc(1 + most, sizeof *pieces);
    if (!text || !pieces) {
        kp_release(text);
        free(pieces);
        return -1;
    }
    uint64_t *size = (uint64_t *)text->data;
    ((uint32_t *)size)[0] = KP_MAGIC;
    ((uint32_t *)size)[1] = frames;
    size[1] = first + (inlined ? together : 0);
    if (together && !inlined)
        size[2] = together;
    kp_head head = kp_head_of(replier, session, n);
    head.flags = inlined ? KP_INLINE : 0;
    memcpy(text->data + sizes, &head, sizeof head);
    char *record = text->data + sizes + sizeof head, *behind = text->data + sizes + first, *to = behind;
    memset(behind, 0, (size_t)together);
    pieces[used++] = (kp_piece){text->data, text->nbytes, text};
    int steady = !session->of_host && kp_is_steady(replier->members, session->rank), failed = 0;
    kp_moved moved = {0};
    for (size_t i = 0; i < n && !failed; i++, record += sizeof(kp_record)) {
        kp_record r;
        uint64_t nbytes = kp_write_record(replier, &answers[i], &r);
        const kp_value *v = nbytes ? kp_value_of(replier, &answers[i]) : NULL;
        const kp_packed *packed = v ? kp_packed_of(v, &answers[i]) : NULL;
        if (nbytes > KP_COPIED_BYTES) {
            r.frame = (uint32_t)(large + !!together);
            size[frames - larger + ++large] = nbytes;
            if (packed)
                used += kp_add_packed(packed, &pieces[used]);
            else
                failed = kp_add_value(v, &answers[i], steady, &pieces[used++]);
        } else if (nbytes) {
            r.offset = (uint64_t)(to - behind);
            kp_copy_value(v, packed, to);
            to += kp_round_up(nbytes);
        }
        memcpy(record, &r, sizeof r);
        kp_add_record_bytes(&moved, &r);
        if (r.flags == KP_IN_PLACE && r.place == KP_NOWHERE)
            moved.shared += answers[i].request.nbytes;
    }
    failed = failed || replier->outlet.send(replier->outlet.stream, pieces, used);
    if (failed)
        kp_release_pieces(pieces, used);
    else if (replier->observer)
        kp_count_sent(replier->observer, KV_BY_STREAM, &moved);
    free(pieces);
    return failed ? -1 : 0;
}

/* Write the message of one answer with rows, without the rows. NULL: no memory. */
static kp_buffer *kp_begin_rows(const kp_replier *replier, const kp_session *session, const kp_answer *a,
                                const kp_gather *g, kp_record *r)
{
    kp_buffer *text = kp_new_buffer(8 + 3 * 8 + sizeof(kp_head) + sizeof *r);
    if (!text)
        return NULL;
    uint64_t *size = (uint64_t *)text->data, ids = 8 * (uint64_t)g->n, rows = (uint64_t)g->n * g->row_bytes;
    kp_head head = kp_head_of(replier, session, 1);
    *r = (kp_record){.kind = KP_VALUE, .slice = a->request.slice, .sequence = a->request.sequence, .round = a->round,
                     .rows = (int64_t)g->n, .place = KP_FRAME, .nbytes = ids + rows};
    ((uint32_t *)size)[0] = KP_MAGIC;
    ((uint32_t *)size)[1] = 3;
    size[1] = sizeof head + sizeof *r;
    size[2] = ids;
    size[3] = rows;
    memcpy(&size[4], &head, sizeof head);
    memcpy((char *)&size[4] + sizeof head, r, sizeof *r);
    return text;
}

/* Set a piece to the rows of an answer: few are gathered now, many while they are sent. 0; -1: no memory. */
static int kp_add_rows(kp_table *t, const kp_gather *g, kp_buffer *ids, kp_piece *piece)
{
    size_t n;
    *piece = (kp_piece){.nbytes = g->n * g->row_bytes};
    if (g->n <= kp_gather_step(g)) {
        piece->owner = kp_gather_some(g, 0, &n);
        piece->at = piece->owner ? piece->owner->data : NULL;
        return piece->owner ? 0 : -1;
    }
    kp_forget_sent(&t->deferred);
    piece->rows = kp_defer(&t->deferred, g, ids);
    return piece->rows ? 0 : -1;
}

/* Send a message of one answer with rows. As `kp_send_answers`. */
static int kp_send_rows_of(const kp_replier *replier, const kp_session *session, const kp_answer *a)
{
    kp_table *t = kp_slice_of(replier->slices, a->request.slice)->table;
    kp_gather g = {t->at, t->row_bytes, kp_wanted_ids(a), t->first, (size_t)a->request.rows};
    kp_record r;
    kp_moved moved = {0};
    kp_buffer *text = kp_begin_rows(replier, session, a, &g, &r);
    if (!text)
        return -1;
    kp_piece pieces[] = {{text->data, text->nbytes, text}, {(const char *)g.rows, 8 * g.n, kp_retain(a->detail)}, {0}};
    if (kp_add_rows(t, &g, a->detail, &pieces[2]) || replier->outlet.send(replier->outlet.stream, pieces, 3)) {
        kp_release_pieces(pieces, 3);
        return -1;
    }
    kp_add_record_bytes(&moved, &r);
    if (replier->observer)
        kp_count_sent(replier->observer, KV_BY_STREAM, &moved);
    return 0;
}

/* Return how many of the first answers are sent in one message. */
static size_t kp_count_for_message(const kp_replier *replier, const kp_answer *answers, size_t n)
{
    uint64_t nbytes = 0;
    for (size_t i = 0; i < n && i < KP_REPLY_RECORDS; i++) {
        if (kp_answers_rows(&answers[i]))
            return i ? i : 1; /* in a message of its own */
        kp_record r;
        uint64_t one = kp_write_record(replier, &answers[i], &r);
        if (nbytes && nbytes + one > KP_REPLY_BYTES)
            return i;
        nbytes += one;
    }
    return n < KP_REPLY_RECORDS ? n : KP_REPLY_RECORDS;
}

/* Answer a session over its stream, if all answers are plain. 0: Python has to; nothing is sent. 1: the answers are gone, even
 * if the stream failed: the worker repeats its requests. */
static int kp_reply_session(kp_session *session)
{
    const kp_replier *replier = (const kp_replier *)session->replier;
    if (!replier || !replier->outlet.stream)
        return 0;
    for (size_t i = 0; i < session->n_answers; i++)
        if (!kp_is_plain(replier, &session->answers[i]) || !kp_make_readable(replier, &session->answers[i]))
            return 0;
    size_t from = 0, n;
    do { /* an answer that cannot be sent is lost: the worker repeats the request */
        const kp_answer *first = from ? &session->answers[from] : session->answers; /* NULL: only an acknowledgement */
        int is_rows = session->n_answers && kp_answers_rows(first);
        n = kp_count_for_message(replier, first, session->n_answers - from);
        if (is_rows ? kp_send_rows_of(replier, session, first) : kp_send_answers(replier, session, first, n))
            break;
        from += n;
    } while (from < session->n_answers);
    kp_forget_answers(session);
    session->report = 0;
    session->reported = session->received;
    return 1;
}

/* Answer the sessions that a step has touched; sessions that need Python stay in the list. */
static void kp_reply_all(kp_effects *e)
{
    kp_session *s = e->touched, *left = NULL, **last = &left;
    for (kp_session *following; s; s = following) {
        following = s->next;
        if (s->touched == 1 && kp_reply_session(s)) {
            s->touched = 0;
            continue;
        }
        s->next = NULL;
        *last = s;
        last = &s->next;
    }
    e->touched = left;
    e->last_touched = left ? last : &e->touched;
}

#endif
