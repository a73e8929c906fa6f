/* Pushes into slices of one server, pulls of them, or both at once, and pushes and pulls of rows: requests are written, and
 * replies read, without the interpreter.
 *
 * What goes over the stream is what transport/frames.py says, byte by byte. Only a reply that is as expected is taken: each
 * of its records answers a part of this exchange, or of the one before, that has no answer yet: a push by a word, others by
 * a value of the right size, in a frame or in the server's shared memory, by the packed parts whose sum it is, or by the ids and
 * rows that were asked for. Any other message is left to the usual way, and
 * so are all after it. Nothing is written before the whole head of a reply is checked. */
#ifndef KP_EXCHANGE_H
#define KP_EXCHANGE_H

#include <math.h>
#include <poll.h>
#include <sched.h>
#include <time.h>

#include "packed.h"
#include "requests.h"
#include "sender.h"

enum {
    KP_COPIED_BYTES = 32 * 1024, /* frames up to this size are copied behind the head */
    KP_PACKED_BYTES = 16 * 1024, /* payloads up to this size share a frame */
    KP_PACKED_ALIGNED = 64,
    KP_MOST_OF_BATCH = 4096, /* records of a request */
    KP_SMALL_BYTES = 512 * 1024, /* of an exchange whose answer comes soon */
    KP_LOOKS = 400,             /* before a wait for it sleeps, at most: some 0.3 ms */
    KP_FEW_LOOKS = 4,           /* and at least */
    KP_SOON_NS = 300000,        /* a sleep that was shorter should have been looks */
    KP_WINDOW_BYTES = 4 << 20,  /* without an answer: parts that wait for others should stay in a cache */
    KP_WIDER_NS = 2000000,      /* without a word until more may go: an update may need all parts of a key at once */
    KP_PAGE = 4096           /* bytes to which a seqlock belongs, as shared_buffers has it */
};

/* A slice, and where its elements are. */
typedef struct {
    uint32_t slice, key;    /* `key`: which of the arrays it is a part of */
    uint64_t start, nbytes; /* within the array */
    uint64_t carried;       /* bytes of what is pushed, in the request's message */
    uint64_t clock, pushed, complete; /* rounds, as the server counts: of this push, and the last that is complete */
    const char *from;
    char *into;
    int64_t rows;           /* of a table; -1: elements of an array */
    const char *ids;        /* of these rows */
    uint64_t ids_bytes;
    int is_shared, in_place; /* it is pushed in shared memory; and the sum may be written there */
    uint32_t segment;
    uint64_t offset;
    uint32_t seen; /* in which reply */
    int answered;
} kp_part;

/* A segment of the server's memory, which begins with a seqlock for each page. */
typedef struct {
    const char *at;
    uint64_t nbytes;
} kp_mapped;

typedef struct kp_exchange {
    kp_head head;
    uint8_t kind; /* KP_PUSHPULL, KP_PUSH, KP_PULL or KP_PULL_ROWS */
    uint64_t batch_bytes, frame_limit, credit;
    uint64_t report; /* bytes that the server may have taken in without a word of it */
    uint64_t window; /* bytes without an answer, there or back */
    int is_held;     /* no answer had come when all was sent, beyond the usual window */
    unsigned looks;  /* before a wait sleeps */
    uint32_t n;
    kp_part *parts;
    kp_mapped *segments;
    uint32_t n_segments;
    kp_run run;
    const int *threads;
    /* Of one call. */
    struct kp_exchange *before; /* goes over the same stream, and was sent before this one; may be NULL */
    uint32_t version;
    uint8_t coding; /* of all that is pushed */
    double threshold;
    uint64_t first;        /* its sequence; the others follow */
    uint32_t next;         /* part that is sent next */
    uint64_t flying;       /* as kp_traffic, of what was sent and is not answered */
    uint32_t left, replies;
    uint64_t gone, back;      /* bytes of requests that were sent, and of those that are answered */
    uint64_t base;            /* bytes that were sent before, as the server counts them */
    uint64_t received;        /* as the server counts bytes */
    kp_buffer *owner;         /* of all values */
    kp_observer observer;
    int32_t whom; /* the server, as in kv_counters */
} kp_exchange;

/* ------------------------------------------------------------------------------------------------ what goes */

/* Whether answers may be packed: of a pull, and where what is pushed is. */
static int kp_takes_packed(const kp_exchange *x)
{
    return x->kind == KP_PULL || (x->kind == KP_PUSHPULL && x->coding);
}

/* Bytes that a part has on the way, there or back. */
static uint64_t kp_traffic(const kp_exchange *x, const kp_part *part)
{
    uint64_t back = part->is_shared || x->kind == KP_PUSH ? 0 : part->nbytes;
    return part->carried > back ? part->carried : back;
}

/* The end of the batch that begins with a part. */
static uint32_t kp_batch_end(const kp_exchange *x, uint32_t from)
{
    uint64_t nbytes = kp_traffic(x, &x->parts[from]);
    uint32_t to = from + 1;
    for (; to < x->n && to - from < KP_MOST_OF_BATCH; to++) {
        nbytes += kp_traffic(x, &x->parts[to]);
        if (nbytes > x->batch_bytes)
            break;
    }
    return to;
}

static size_t kp_packed_size(uint64_t nbytes)
{
    return (size_t)(nbytes + KP_PACKED_ALIGNED - 1) / KP_PACKED_ALIGNED * KP_PACKED_ALIGNED;
}

/* Bytes of the ids that go before the rows of a part, in a frame of their own where they are not packed. */
static uint64_t kp_ids_before(const kp_exchange *x, const kp_part *part)
{
    return x->kind == KP_PUSH ? part->ids_bytes : 0;
}

static void kp_measure_payload(uint64_t nbytes, size_t *room, size_t *pieces)
{
    if (nbytes <= KP_COPIED_BYTES)
        *room += kp_packed_size(nbytes);
    else
        *pieces += 2;
}

/* How much there is to write for a batch at most: bytes that are copied, and pieces. */
static void kp_measure(const kp_exchange *x, uint32_t from, uint32_t to, size_t *room, size_t *pieces)
{
    *room += 8 + sizeof(kp_head) + 16; /* with the sizes of two frames: the head, and what is packed */
    for (uint32_t i = from; i < to; i++) {
        uint64_t ids = kp_ids_before(x, &x->parts[i]);
        *room += 16 + sizeof(kp_record);
        kp_measure_payload(ids, room, pieces);
        kp_measure_payload(x->parts[i].carried - ids, room, pieces);
    }
}

typedef struct {
    kp_buffer *copied, *owner; /* `owner`: of the value */
    char *begin, *end;         /* copied, and in no piece yet */
    kp_piece *pieces;
    size_t n;
} kp_writer;

static void kp_write(kp_writer *w, const void *data, size_t nbytes)
{
    memcpy(w->end, data, nbytes);
    w->end += nbytes;
}

static void kp_end_piece(kp_writer *w)
{
    if (w->end > w->begin)
        w->pieces[w->n++] = (kp_piece){w->begin, (size_t)(w->end - w->begin), kp_keep(w->copied)};
    w->begin = w->end;
}

static void kp_write_large(kp_writer *w, const char *data, uint64_t nbytes)
{
    if (nbytes <= KP_COPIED_BYTES) {
        kp_write(w, data, (size_t)nbytes);
        return;
    }
    kp_end_piece(w);
    w->pieces[w->n++] = (kp_piece){data, (size_t)nbytes, kp_keep(w->owner)};
}

static void kp_write_payload(kp_writer *w, const kp_exchange *x, const kp_part *part)
{
    uint64_t ids = kp_ids_before(x, part);
    if (ids)
        kp_write_large(w, part->ids, ids);
    kp_write_large(w, part->from, part->carried - ids);
}

static int kp_is_packed(const kp_part *part)
{
    return part->carried && part->carried <= KP_PACKED_BYTES;
}

static int kp_has_frame(const kp_part *part)
{
    return part->carried > KP_PACKED_BYTES;
}

static uint32_t kp_count_frames(const kp_exchange *x, const kp_part *part)
{
    return !kp_has_frame(part) ? 0 : kp_ids_before(x, part) ? 2 : 1;
}

/* Bytes of the first frame of a part that has one. */
static uint64_t kp_first_size(const kp_exchange *x, const kp_part *part)
{
    uint64_t ids = kp_ids_before(x, part);
    return ids ? ids : part->carried;
}

static void kp_write_packed(kp_writer *w, const kp_exchange *x, uint32_t from, uint32_t to)
{
    for (uint32_t i = from; i < to; i++) {
        size_t nbytes = (size_t)x->parts[i].carried;
        if (!kp_is_packed(&x->parts[i]))
            continue;
        kp_write_payload(w, x, &x->parts[i]);
        memset(w->end, 0, kp_packed_size(nbytes) - nbytes);
        w->end += kp_packed_size(nbytes) - nbytes;
    }
}

static kp_record kp_request_of(const kp_exchange *x, uint32_t at, uint32_t *frame, uint64_t *packed)
{
    const kp_part *part = &x->parts[at];
    kp_record record = {.kind = x->kind, .slice = part->slice, .sequence = x->first + at, .round = part->pushed,
                        .version = x->version, .clock = part->clock, .coding = x->coding, .threshold = x->threshold,
                        .rows = part->rows, .place = part->carried ? KP_FRAME : KP_NOWHERE, .nbytes = part->carried};
    if (part->is_shared) {
        record.place = KP_SHARED;
        record.nbytes = part->nbytes;
        record.frame = part->segment;
        record.offset = part->offset;
        record.flags = part->in_place ? KP_IN_PLACE : 0;
    } else if (kp_is_packed(part)) {
        record.offset = *packed;
        *packed += kp_packed_size(part->carried);
    } else if (part->carried) {
        record.frame = *frame;
        *frame += kp_count_frames(x, part);
    }
    if (kp_takes_packed(x))
        record.flags = KP_PACKED;
    return record;
}

/* The sizes of a part's frames; of the first one not if it is `inlined`. */
static void kp_write_sizes(kp_writer *w, const kp_exchange *x, const kp_part *part, int inlined)
{
    uint64_t ids = kp_ids_before(x, part), rest = part->carried - ids;
    if (ids && !inlined)
        kp_write(w, &ids, sizeof ids);
    if (ids || !inlined)
        kp_write(w, &rest, sizeof rest);
}

/* One message. Its payloads: what is packed, in one frame, and each of the others in one of its own, or its ids and its rows each in one. */
static void kp_write_batch(kp_writer *w, const kp_exchange *x, uint32_t from, uint32_t to)
{
    uint64_t packed = 0, size;
    uint32_t others = 0, at_first = to;
    int packs = 0;
    for (uint32_t i = from; i < to; i++)
        if (kp_is_packed(&x->parts[i])) {
            packed += kp_packed_size(x->parts[i].carried);
            packs = 1;
        } else if (kp_has_frame(&x->parts[i])) {
            others += kp_count_frames(x, &x->parts[i]);
            at_first = at_first == to ? i : at_first;
        }
    uint64_t first = packs ? packed : others ? kp_first_size(x, &x->parts[at_first]) : 0;
    int is_inline = first > 0 && first <= KP_INLINE_BYTES;
    uint32_t head[2] = {KP_MAGIC, 1 + others + (uint32_t)packs - (uint32_t)is_inline};
    kp_write(w, head, sizeof head);
    size = sizeof(kp_head) + (to - from) * sizeof(kp_record) + (is_inline ? first : 0);
    kp_write(w, &size, sizeof size);
    if (packs && !is_inline)
        kp_write(w, &packed, sizeof packed);
    for (uint32_t i = from; i < to; i++)
        if (kp_has_frame(&x->parts[i]))
            kp_write_sizes(w, x, &x->parts[i], is_inline && !packs && i == at_first);

    kp_head begins = x->head;
    begins.flags = is_inline ? KP_INLINE : 0;
    begins.records = to - from;
    kp_write(w, &begins, sizeof begins);
    uint32_t frame = (uint32_t)packs;
    uint64_t offset = 0;
    for (uint32_t i = from; i < to; i++) {
        kp_record record = kp_request_of(x, i, &frame, &offset);
        kp_write(w, &record, sizeof record);
    }
    if (packs)
        kp_write_packed(w, x, from, to);
    for (uint32_t i = from; i < to; i++)
        if (kp_has_frame(&x->parts[i]))
            kp_write_payload(w, x, &x->parts[i]);
}

static void kp_count_parts(const kp_exchange *x, uint32_t from, uint32_t to)
{
    kp_moved moved = {0};
    for (uint32_t i = from; i < to; i++) {
        moved.carried += x->parts[i].carried;
        moved.shared += x->parts[i].is_shared ? x->parts[i].nbytes : 0;
    }
    kp_count_sent(&x->observer, KV_BY_STREAM, &moved);
    kv_note_bytes(x->observer.counters, moved.carried);
}

/* Send parts `next` to `end`, in batches. 0; -1: nothing was queued, or there is no memory. */
static int kp_send_parts(kp_stream *s, kp_exchange *x, uint32_t end)
{
    size_t room = 0, n_pieces = 1;
    for (uint32_t from = x->next, to; from < end; from = to) {
        to = kp_batch_end(x, from);
        kp_measure(x, from, to, &room, &n_pieces);
    }
    kp_writer w = {.copied = kp_new_buffer(room), .owner = x->owner};
    w.pieces = (kp_piece *)malloc(n_pieces * sizeof *w.pieces);
    int failed = !w.copied || !w.pieces;
    if (!failed) {
        w.begin = w.end = w.copied->data;
        for (uint32_t from = x->next, to; from < end; from = to) {
            to = kp_batch_end(x, from);
            kp_write_batch(&w, x, from, to);
        }
        kp_end_piece(&w);
        failed = kp_send(s, w.pieces, w.n);
        if (failed)
            kp_drop_pieces(w.pieces, w.n);
    }
    kp_drop(w.copied);
    free(w.pieces);
    if (!failed) {
        kp_count_parts(x, x->next, end);
        x->next = end;
    }
    return failed ? -1 : 0;
}

/* Bytes of requests that may be on their way to the server still. */
static uint64_t kp_outstanding(const kp_exchange *x)
{
    const kp_exchange *before = x->before;
    uint64_t gone = x->gone + (before ? before->gone : 0), back = x->back + (before ? before->back : 0);
    uint64_t base = before ? before->base : x->base, told = x->received > base ? x->received - base : 0;
    uint64_t there = told > back ? told : back;
    return gone > there ? gone - there : 0;
}

/* Send as much as credit and window allow. 0; -1: the stream is at its end, or there is no memory. */
static int kp_send_allowed(kp_stream *s, kp_exchange *x)
{
    uint32_t end = x->next;
    uint64_t flying = x->flying + (x->before ? x->before->flying : 0), out = kp_outstanding(x), gone = x->gone;
    while (end < x->n) {
        uint32_t to = kp_batch_end(x, end);
        uint64_t nbytes = 0, carried = 0;
        for (uint32_t i = end; i < to; i++) {
            nbytes += kp_traffic(x, &x->parts[i]);
            carried += x->parts[i].carried;
        }
        int goes = end > x->next || out >= x->report; /* fewer bytes may all have come without a word */
        if ((flying && flying + nbytes > x->window) || (goes && out + carried > x->credit))
            break;
        flying += nbytes;
        out += carried;
        gone += carried;
        end = to;
    }
    if (end == x->next)
        return 0;
    if (kp_send_parts(s, x, end))
        return -1;
    x->flying = flying - (x->before ? x->before->flying : 0);
    x->gone = gone;
    x->is_held = end == x->n && x->left == x->n && x->window > KP_WINDOW_BYTES;
    return 0;
}

/* Enter the phase in which bytes of an exchange are moved. */
static void kp_enter_moving(const kp_exchange *x)
{
    const kp_part *one = x->n == 1 ? &x->parts[0] : NULL;
    kv_about about = {one ? one->slice : KV_NO_SLICE, one ? one->pushed : 0, 0, x->whom, x->observer.store};
    kv_enter(x->observer.counters, KV_MOVING, about);
}

/* Begin to send an exchange; as `kp_send_allowed`. */
static int kp_send_first(kp_stream *s, kp_exchange *x)
{
    kp_enter_moving(x);
    int failed = kp_send_allowed(s, x);
    kv_leave();
    return failed;
}

static int kp_is_held_back(const kp_exchange *x)
{
    return x->next < x->n;
}

/* Let more go, since nothing comes. 0; -1: as above. */
static int kp_send_wider(kp_stream *s, kp_exchange *x)
{
    if (!kp_is_held_back(x))
        return 0;
    if (x->window <= UINT64_MAX / 4)
        x->window *= 2;
    kp_enter_moving(x);
    return kp_send_allowed(s, x);
}

/* ------------------------------------------------------------------------------------------------ what comes */

/* A reply: all sizes of its frames are known, and the first frame is there. */
typedef struct {
    const kp_message *message;
    const uint64_t *sizes; /* NULL: those of the message's frames */
    uint32_t frames;
    const kp_head *head;
    const char *records, *payload; /* `payload`: what follows the records, if that `is_inline` */
    int is_inline;
} kp_reply;

static uint64_t kp_frame_size(const kp_reply *r, uint32_t frame)
{
    return r->sizes ? r->sizes[frame] : r->message->frames[frame]->nbytes;
}

static kp_record kp_record_of(const kp_reply *r, uint32_t at)
{
    kp_record record;
    memcpy(&record, r->records + at * sizeof record, sizeof record);
    return record;
}

/* The exchange of which a record answers a part; NULL: none. */
static kp_exchange *kp_asked(kp_exchange *x, const kp_record *record)
{
    while (x && record->sequence - x->first >= x->next)
        x = x->before;
    return x;
}

/* Number of parts that have no answer. */
static uint32_t kp_left(const kp_exchange *x)
{
    return x->left + (x->before ? x->before->left : 0);
}

/* The part that a record answers; NULL: it is something else. */
static kp_part *kp_part_of(kp_exchange *x, const kp_record *record)
{
    x = kp_asked(x, record);
    if (!x)
        return NULL;
    kp_part *part = &x->parts[record->sequence - x->first];
    int64_t rows = x->kind == KP_PULL_ROWS ? part->rows : -1;
    int usual = record->kind == (x->kind == KP_PUSH ? KP_DONE : KP_VALUE) && record->rows == rows &&
                (!record->coding || kp_takes_packed(x)) && isfinite(record->threshold);
    return usual && record->slice == part->slice && !part->answered ? part : NULL;
}

static const _Atomic uint64_t *kp_seqlock(const kp_mapped *segment, uint64_t offset)
{
    return (const _Atomic uint64_t *)segment->at + offset / KP_PAGE;
}

/* Where a value lies in the server's memory, which stands as it was told; NULL: out of reach, or it has changed. */
static const char *kp_shared_value(const kp_exchange *x, const kp_record *record)
{
    const kp_mapped *segment = record->frame < x->n_segments ? &x->segments[record->frame] : NULL;
    if (!segment || !segment->at || record->offset > segment->nbytes || record->nbytes > segment->nbytes - record->offset)
        return NULL;
    if (record->flags % 2 || atomic_load(kp_seqlock(segment, record->offset)) != record->flags)
        return NULL;
    return segment->at + record->offset;
}

/* Of how many packed parts a record's value is the sum; 0: it is none. */
static int kp_parts_of_sum(const kp_record *record, const kp_part *part)
{
    return (part->nbytes | (uintptr_t)part->into) % 4 ? 0 : kp_count_packed(record->coding, part->nbytes / 4, record->nbytes);
}

/* Bytes of a frame that follow a record's offset, or 0. `frame` is that of the record, or one after it. */
static uint64_t kp_payload_left(const kp_reply *r, const kp_record *record, uint64_t frame)
{
    if (frame >= r->frames - !r->is_inline)
        return 0;
    uint64_t there = kp_frame_size(r, (uint32_t)frame + !r->is_inline), offset = frame == record->frame ? record->offset : 0;
    if (r->is_inline && !frame)
        there -= (uint64_t)(r->payload - r->message->frames[0]->data);
    return offset <= there ? there - offset : 0;
}

/* Whether a value is the ids and the rows of a part, together or in two frames. */
static int kp_has_rows(const kp_reply *r, const kp_record *record, const kp_part *part)
{
    uint64_t nbytes = part->ids_bytes + part->nbytes, there = kp_payload_left(r, record, record->frame);
    if (record->place != KP_FRAME || record->coding || record->nbytes != nbytes)
        return 0;
    return there >= nbytes || (there == part->ids_bytes && !record->offset &&
                               kp_payload_left(r, record, (uint64_t)record->frame + 1) == part->nbytes);
}

/* Whether a record's value, if it has to have one, can be had. */
static int kp_is_there(const kp_exchange *x, const kp_reply *r, const kp_record *record, const kp_part *part)
{
    if (record->kind == KP_DONE)
        return record->place == KP_NOWHERE && !record->flags;
    if (record->rows >= 0)
        return kp_has_rows(r, record, part);
    if (record->place == KP_NOWHERE)
        return record->flags == KP_IN_PLACE && part->in_place && !record->coding;
    if (record->coding ? !kp_parts_of_sum(record, part) : record->nbytes != part->nbytes)
        return 0;
    if (record->place == KP_SHARED && !record->coding)
        return kp_shared_value(x, record) != NULL;
    uint64_t there = kp_payload_left(r, record, record->frame);
    return record->place == KP_FRAME && there && record->nbytes <= there;
}

/* Whether a reply is as expected. `r` has message, sizes, frames; the rest is filled in. */
static int kp_is_expected(kp_exchange *x, kp_reply *r)
{
    const kp_buffer *first = r->message->frames[0];
    const kp_head *head = r->head = (const kp_head *)first->data, *own = &x->head;
    if (first->nbytes < sizeof *head)
        return 0;
    if (memcmp(head->magic, own->magic, sizeof head->magic) || head->version != own->version ||
        head->kind != own->kind || head->job != own->job || head->store != own->store || head->rank != own->rank ||
        head->incarnation != own->incarnation)
        return 0;
    if (head->records > KP_MOST_RECORDS || r->frames - 1 > 2 * head->records + 1)
        return 0;
    size_t end = sizeof *head + head->records * sizeof(kp_record);
    r->records = first->data + sizeof *head;
    r->payload = first->data + end;
    r->is_inline = head->flags == KP_INLINE;
    if (r->is_inline ? first->nbytes <= end || first->nbytes > end + KP_INLINE_BYTES : first->nbytes != end)
        return 0;
    if (!r->is_inline && head->flags)
        return 0;
    for (uint32_t i = 1; i < r->frames; i++)
        if (kp_frame_size(r, i) > x->frame_limit)
            return 0;
    x->replies++;
    for (uint32_t i = 0; i < head->records; i++) {
        kp_record record = kp_record_of(r, i);
        kp_part *part = kp_part_of(x, &record);
        if (!part || part->seen == x->replies || !kp_is_there(x, r, &record, part))
            return 0;
        part->seen = x->replies;
    }
    return 1;
}

/* Where a record's value is; NULL: it is in its place. */
static const char *kp_value_at(const kp_exchange *x, const kp_reply *r, const kp_record *record)
{
    if (record->place == KP_NOWHERE)
        return NULL;
    if (record->place == KP_SHARED)
        return kp_shared_value(x, record);
    const char *frame = r->is_inline && !record->frame ? r->payload : r->message->frames[record->frame + !r->is_inline]->data;
    return frame + record->offset;
}

/* Whether the ids of a value are those that were asked for; they have come. */
static int kp_has_ids(const kp_exchange *x, const kp_reply *r, const kp_record *record, const kp_part *part)
{
    return record->rows < 0 || !memcmp(kp_value_at(x, r, record), part->ids, part->ids_bytes);
}

static int kp_all_have_ids(kp_exchange *x, const kp_reply *r)
{
    for (uint32_t i = 0; i < r->head->records; i++) {
        kp_record record = kp_record_of(r, i);
        if (!kp_has_ids(x, r, &record, kp_part_of(x, &record)))
            return 0;
    }
    return 1;
}

/* Where the rows of a value are, which follow its ids. */
static const char *kp_rows_at(const kp_exchange *x, const kp_reply *r, const kp_record *record, const kp_part *part)
{
    if (kp_payload_left(r, record, record->frame) > part->ids_bytes)
        return kp_value_at(x, r, record) + part->ids_bytes;
    return r->message->frames[record->frame + 1 + !r->is_inline]->data;
}

/* Copy values out of the server's memory. 0: one has changed meanwhile, or there is no memory. */
static int kp_copy_shared(kp_exchange *x, const kp_reply *r)
{
    uint32_t n = 0, used = 0;
    for (uint32_t i = 0; i < r->head->records; i++)
        n += kp_record_of(r, i).place == KP_SHARED;
    if (!n)
        return 1;
    kv_item *items = (kv_item *)calloc(n, sizeof *items);
    char **pointers = (char **)malloc(2 * (size_t)n * sizeof *pointers);
    ptrdiff_t nbytes = 0;
    int good = items && pointers;
    for (uint32_t i = 0; good && i < r->head->records; i++) {
        kp_record record = kp_record_of(r, i);
        if (record.place != KP_SHARED)
            continue;
        const char *value = kp_value_at(x, r, &record);
        kp_part *part = kp_part_of(x, &record);
        good = value != NULL;
        pointers[2 * used] = (char *)value;
        pointers[2 * used + 1] = part->into;
        items[used] = (kv_item){.dtype = KV_U8, .rule = -1, .k = 1, .m = 1, .n = (ptrdiff_t)part->nbytes,
                                .src = pointers + 2 * used, .out = pointers + 2 * used + 1};
        nbytes += 2 * (ptrdiff_t)part->nbytes;
        used++;
    }
    good = good && !x->run(items, used, nbytes, *x->threads);
    for (uint32_t i = 0; good && i < r->head->records; i++) {
        kp_record record = kp_record_of(r, i);
        good = record.place != KP_SHARED || kp_shared_value(x, &record) != NULL;
    }
    free(items);
    free(pointers);
    return good;
}

/* Sums of packed parts. */
typedef struct {
    kv_item *items;
    char **from;
    kv_coding *codings;
    uint32_t n, used;
    ptrdiff_t nbytes;
} kp_unpacking;

static void kp_add_unpacking(kp_unpacking *u, const kp_record *record, const kp_part *part, const char *value)
{
    int k = kp_parts_of_sum(record, part);
    uint64_t each = record->nbytes / (uint64_t)k;
    u->items[u->n++] = (kv_item){.dtype = KV_F32, .rule = -1, .k = k, .n = (ptrdiff_t)(part->nbytes / 4), .dst = part->into,
                                 .src = u->from + u->used, .coding = u->codings + u->used};
    for (int i = 0; i < k; i++) {
        u->codings[u->used] = kp_coding_of(record->coding, record->threshold);
        u->from[u->used++] = (char *)value + (uint64_t)i * each;
    }
    u->nbytes += (ptrdiff_t)(part->nbytes + record->nbytes);
}

/* Write the sums of what came packed. 0: there is no memory. */
static int kp_unpack(kp_exchange *x, const kp_reply *r)
{
    kp_unpacking u = {0};
    for (uint32_t i = 0; i < r->head->records; i++)
        u.n += kp_record_of(r, i).coding != 0;
    if (!u.n)
        return 1;
    u.items = (kv_item *)calloc(u.n, sizeof *u.items);
    u.from = (char **)malloc((size_t)u.n * KP_MOST_PACKED * sizeof *u.from);
    u.codings = (kv_coding *)malloc((size_t)u.n * KP_MOST_PACKED * sizeof *u.codings);
    int good = u.items && u.from && u.codings;
    u.n = 0;
    for (uint32_t i = 0; good && i < r->head->records; i++) {
        kp_record record = kp_record_of(r, i);
        if (record.coding)
            kp_add_unpacking(&u, &record, kp_part_of(x, &record), kp_value_at(x, r, &record));
    }
    good = good && !x->run(u.items, u.n, u.nbytes, *x->threads);
    free(u.items);
    free(u.from);
    free(u.codings);
    return good;
}

/* Take a whole reply. 0: it is not as expected, and no part of it is answered. */
static int kp_take_reply(kp_exchange *x, const kp_message *message)
{
    kp_reply r = {.message = message, .frames = message->n};
    kp_moved moved = {0};
    if (!kp_is_expected(x, &r) || !kp_all_have_ids(x, &r) || !kp_copy_shared(x, &r) || !kp_unpack(x, &r))
        return 0;
    for (uint32_t i = 0; i < r.head->records; i++) {
        kp_record record = kp_record_of(&r, i);
        kp_part *part = kp_part_of(x, &record);
        const char *value = record.place == KP_FRAME && !record.coding ? kp_value_at(x, &r, &record) : NULL;
        if (value && record.rows >= 0)
            value = kp_rows_at(x, &r, &record, part);
        if (value && value != part->into)
            memmove(part->into, value, (size_t)part->nbytes);
        part->complete = record.round;
        part->answered = 1;
        kp_exchange *asked = kp_asked(x, &record);
        asked->flying -= kp_traffic(asked, part);
        asked->back += part->carried;
        asked->left--;
        moved.carried += record.place == KP_FRAME ? record.nbytes : 0;
        moved.shared += record.kind == KP_VALUE && record.place != KP_FRAME ? part->nbytes : 0;
    }
    kp_count_received(&x->observer, KV_BY_STREAM, &moved);
    kv_note_bytes(x->observer.counters, moved.carried + moved.shared);
    x->received = r.head->received > x->received ? r.head->received : x->received;
    return 1;
}

/* Whether frame `s->at`, which is about to come, is all that a record has for its part: a value, or the rows after its ids. */
static int kp_is_whole(const kp_exchange *x, const kp_reply *r, const kp_record *record, const kp_part *part, uint32_t frame)
{
    uint64_t first = (uint64_t)record->frame + !r->is_inline;
    if (record->place != KP_FRAME || record->coding || record->offset)
        return 0;
    if (record->rows < 0)
        return first == frame && record->nbytes == r->sizes[frame];
    return first + 1 == frame && kp_payload_left(r, record, record->frame) == part->ids_bytes && kp_has_ids(x, r, record, part);
}

/* Memory of a frame that is about to come: where it belongs, if it is the whole value of a part. */
static kp_buffer *kp_place(kp_stream *s)
{
    kp_exchange *x = (kp_exchange *)s->placer;
    kp_buffer *made = NULL;
    kp_reply r = {.message = s->coming, .sizes = s->sizes, .frames = s->head[1]};
    uint32_t frame = s->at;
    if (!frame || s->sizes[frame] < KP_DIRECT_BYTES || !kp_is_expected(x, &r))
        return kp_new_buffer((size_t)s->sizes[frame]);
    for (uint32_t i = 0; i < r.head->records && !made; i++) {
        kp_record record = kp_record_of(&r, i);
        const kp_part *part = kp_part_of(x, &record);
        if (!kp_is_whole(x, &r, &record, part, frame))
            continue;
        if (part->into == part->from) /* it may have to be sent again */
            break;
        if (!(made = kp_new_buffer(0)))
            return NULL;
        made->data = part->into;
        made->nbytes = (size_t)part->nbytes;
    }
    return made ? made : kp_new_buffer((size_t)s->sizes[frame]);
}

/* Let the message that comes have memory of its own: this call ends before it is whole. 0, or -1: there is none. */
static int kp_unplace(kp_stream *s)
{
    s->place = NULL;
    for (uint32_t i = 0; s->coming && i < s->coming->n; i++) {
        kp_buffer *placed = s->coming->frames[i];
        if (placed->room >= placed->nbytes)
            continue;
        kp_buffer *own = kp_new_buffer(placed->nbytes);
        if (!own)
            return -1;
        memcpy(own->data, placed->data, i == s->at ? (size_t)s->got : placed->nbytes);
        s->coming->frames[i] = own;
        kp_drop(placed);
    }
    return 0;
}

/* Parse what has been received, and take replies; from one on that is not as expected, messages are left in the list. */
static enum kp_outcome kp_parse_replies(kp_exchange *x, kp_stream *s)
{
    enum kp_outcome outcome = KP_OPEN;
    while (outcome == KP_OPEN) {
        outcome = kp_parse_more(s);
        if (!s->first)
            continue;
        if (!kp_left(x) || !kp_take_reply(x, s->first))
            return kp_unplace(s) ? KP_NO_MEMORY : kp_parse(s);
        kp_free_message(kp_take_messages(s));
    }
    return outcome;
}

/* An exchange, and the stream that it goes over. */
typedef struct {
    kp_exchange *exchange;
    kp_stream *stream;
} kp_way;

/* Receive what is there. 0: something has come that is no reply, or the stream is at its end. */
static int kp_receive_some_replies(kp_exchange *x, kp_stream *s)
{
    for (uint64_t done = 0; done < KP_ENOUGH && kp_left(x);) {
        ssize_t got = kp_fill(s);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        s->end = got > 0 ? kp_parse_replies(x, s) : got < 0 && errno == EBADMSG ? KP_FOREIGN : KP_CLOSED;
        if (s->end != KP_BLOCKED || s->first || (x->next < x->n && kp_send_allowed(s, x)))
            return 0;
        done += (uint64_t)got;
    }
    return 1;
}

static int kp_receive_replies(kp_way *way)
{
    kp_enter_moving(way->exchange);
    int goes_on = kp_receive_some_replies(way->exchange, way->stream);
    kp_choose_wakes(way->stream);
    return goes_on;
}

static int64_t kp_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Milliseconds from `now` to `end`, no less than it takes. */
static int kp_ms_until(int64_t end, int64_t now)
{
    int64_t left = (end - now + 999999) / 1000000;
    return left <= 0 ? 0 : left < 1000000 ? (int)left : 1000000;
}

/* Whether its answer comes so soon that it costs more to sleep, and be woken, than to look again. */
static int kp_is_small(const kp_exchange *x)
{
    uint64_t nbytes = 0;
    for (uint32_t i = 0; i < x->n && nbytes <= KP_SMALL_BYTES; i++)
        nbytes += x->parts[i].nbytes;
    return nbytes <= KP_SMALL_BYTES;
}

/* As poll; before it sleeps it looks some more times, and lets others have the processor in between.
 *
 * `looks` becomes what would have been of use: more where the sleep was short, fewer where it was long, as it is where more
 * processes wait than there are cores. NULL: none. */
static int kp_poll(struct pollfd *waits, nfds_t n, int64_t end, unsigned *looks)
{
    for (unsigned i = 0; looks && i < *looks; i++) {
        int got = poll(waits, n, 0);
        if (got)
            return got;
        sched_yield();
    }
    int64_t slept = kp_clock_ns();
    int got = poll(waits, n, kp_ms_until(end, slept));
    if (looks) {
        unsigned wanted = kp_clock_ns() - slept < KP_SOON_NS ? 2 * *looks : *looks / 2;
        *looks = wanted > KP_LOOKS ? KP_LOOKS : wanted < KP_FEW_LOOKS ? KP_FEW_LOOKS : wanted;
    }
    return got;
}

static uint32_t kp_all_left(const kp_way *ways, size_t n)
{
    uint32_t left = 0;
    for (size_t i = 0; i < n; i++)
        left += kp_left(ways[i].exchange);
    return left;
}

static int kp_any_held_back(const kp_way *ways, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (kp_is_held_back(ways[i].exchange))
            return 1;
    return 0;
}

static kv_about kp_about_first(const kp_exchange *x)
{
    for (uint32_t i = 0; x->left && i < x->n; i++)
        if (!x->parts[i].answered)
            return (kv_about){x->parts[i].slice, x->parts[i].pushed, 0, x->whom, x->observer.store};
    return x->before ? kp_about_first(x->before) : kp_about_all(&x->observer);
}

/* Begin a wait that is timed, unless something is there; about the first part that has no answer. As poll. */
static int kp_begin_wait(const kp_way *ways, size_t n_ways, struct pollfd *waits, nfds_t n)
{
    size_t i = 0;
    int got = poll(waits, n, 0);
    while (i + 1 < n_ways && !kp_left(ways[i].exchange))
        i++;
    if (!got)
        kv_enter(ways[i].exchange->observer.counters, KV_WAITING, kp_about_first(ways[i].exchange));
    return got;
}

/* Wait once. 1: something has come; 0: go on; -1: the end, or something failed. */
static int kp_await_some(kp_way *ways, size_t n_ways, struct pollfd *waits, nfds_t n, int64_t end, unsigned *looks)
{
    int64_t wider = kp_any_held_back(ways, n_ways) ? kp_clock_ns() + KP_WIDER_NS : end;
    int64_t until = wider < end ? wider : end;
    int got = n_ways && kv_is_timed(ways[0].exchange->observer.counters) ? kp_begin_wait(ways, n_ways, waits, n) : 0;
    got = got ? got : kp_poll(waits, n, until, looks);
    if (got || until == end)
        return got > 0 ? 1 : -1;
    for (size_t i = 0; i < n_ways; i++)
        if (kp_send_wider(ways[i].stream, ways[i].exchange))
            return -1;
    return 0;
}

/* Wait for replies until all have come, something else has, `end` is over, or a signal or another descriptor ends it.
 *
 * `end` is in seconds of the monotonic clock; the first descriptors are those of the ways. */
static void kp_await_replies(kp_way *ways, size_t n_ways, struct pollfd *waits, nfds_t n, double end)
{
    int goes_on = 1;
    for (size_t i = 0; i < n_ways; i++) {
        ways[i].stream->place = kp_place;
        ways[i].stream->placer = ways[i].exchange;
    }
    unsigned *looks = n_ways == 1 && kp_is_small(ways[0].exchange) ? &ways[0].exchange->looks : NULL;
    int64_t end_ns = end < 9e9 ? (int64_t)(end * 1e9) : INT64_MAX;
    while (goes_on && kp_all_left(ways, n_ways)) {
        int some = kp_await_some(ways, n_ways, waits, n, end_ns, looks);
        if (some < 0)
            break;
        if (!some)
            continue;
        goes_on = 0;
        for (size_t i = 0; i < n_ways; i++)
            if (waits[i].revents) {
                goes_on = kp_receive_replies(&ways[i]);
                if (!goes_on)
                    break;
            }
    }
    kv_leave_work(); /* whoever waits on goes on with this wait */
    for (size_t i = 0; i < n_ways; i++)
        if (kp_unplace(ways[i].stream) && ways[i].stream->end < KP_CLOSED)
            ways[i].stream->end = KP_NO_MEMORY;
}

#endif
