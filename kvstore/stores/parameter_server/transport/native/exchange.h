/* A push of one key and the wait for its value: requests are written, and replies checked, without the interpreter.
 *
 * What goes over the stream is what transport/frames.py says, byte by byte; its numbers are little-endian. Only a reply
 * that is as expected is taken: all of its records, if there are any, are values of this exchange that have not come yet,
 * in frames, of the right size. Any other message is left to the usual way, and so are all after it. Nothing is written before the whole
 * head of a reply is checked. */
#ifndef KP_EXCHANGE_H
#define KP_EXCHANGE_H

#include <math.h>
#include <poll.h>
#include <time.h>

#include "sender.h"

enum {
    KP_DATA = 2,
    KP_INLINE = 1,
    KP_INLINE_BYTES = 32 * 1024,
    KP_COPIED_BYTES = 32 * 1024,  /* frames up to this size are copied behind the head */
    KP_PACKED_BYTES = 16 * 1024,  /* payloads up to this size share a frame */
    KP_PACKED_ALIGNED = 64,
    KP_MOST_OF_BATCH = 4096, /* records of a request */
    KP_MOST_RECORDS = 65535, /* of a reply */
    KP_PUSHPULL = 5,
    KP_VALUE = 21,
    KP_FRAME = 1
};

typedef struct __attribute__((packed)) {
    uint32_t magic;
    uint16_t version;
    uint8_t kind, flags;
    uint64_t job;
    int32_t store, rank;
    uint64_t incarnation, epoch, received;
    uint32_t count;
} kp_head;

typedef struct __attribute__((packed)) {
    uint8_t kind;
    uint32_t slice;
    uint64_t sequence, round;
    uint32_t version;
    uint64_t clock;
    uint8_t coding;
    double threshold;
    int64_t rows;
    uint8_t place;
    uint32_t frame;
    uint64_t offset, nbytes, flags;
} kp_record;

_Static_assert(sizeof(kp_head) == 52 && sizeof(kp_record) == 79, "as transport/frames.py has them");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers go as they are");

/* A slice of the key. */
typedef struct {
    uint32_t slice;
    uint64_t start, nbytes; /* of the value */
    uint64_t pushed, complete; /* rounds, as the server counts: of this push, and the last that is complete */
    uint32_t seen;             /* in which reply */
    int answered;
} kp_part;

typedef struct {
    kp_head head;
    uint64_t batch_bytes, frame_limit;
    uint32_t n;
    kp_part *parts;
    size_t room, n_pieces; /* at most: copied bytes, and pieces */
    /* Of one call. */
    const char *value;
    char *into;
    int apart; /* `into` must not be written to before a reply is whole */
    uint32_t version;
    uint64_t clock, first; /* `first`: its sequence; the others follow */
    uint32_t left, replies;
    uint64_t received; /* as the server counts bytes */
} kp_exchange;

/* ------------------------------------------------------------------------------------------------ what goes */

/* The end of the batch that begins with a part. */
static uint32_t kp_batch_end(const kp_exchange *x, uint32_t from)
{
    uint64_t nbytes = x->parts[from].nbytes;
    uint32_t to = from + 1;
    for (; to < x->n && to - from < KP_MOST_OF_BATCH && nbytes + x->parts[to].nbytes <= x->batch_bytes; to++)
        nbytes += x->parts[to].nbytes;
    return to;
}

static size_t kp_packed_size(uint64_t nbytes)
{
    return (size_t)(nbytes + KP_PACKED_ALIGNED - 1) / KP_PACKED_ALIGNED * KP_PACKED_ALIGNED;
}

/* Parts are set: compute how much there is to write at most. */
static void kp_measure(kp_exchange *x)
{
    x->room = 0;
    x->n_pieces = 1;
    for (uint32_t from = 0, to; from < x->n; from = to) {
        to = kp_batch_end(x, from);
        x->room += 8 + sizeof(kp_head) + 16; /* with the sizes of two frames: the head, and what is packed */
        for (uint32_t i = from; i < to; i++) {
            int copied = x->parts[i].nbytes <= KP_COPIED_BYTES;
            x->room += 8 + sizeof(kp_record) + (copied ? kp_packed_size(x->parts[i].nbytes) : 0);
            x->n_pieces += copied ? 0 : 2;
        }
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

static void kp_write_packed(kp_writer *w, const kp_exchange *x, uint32_t from, uint32_t to)
{
    for (uint32_t i = from; i < to; i++) {
        size_t nbytes = (size_t)x->parts[i].nbytes;
        if (nbytes > KP_PACKED_BYTES)
            continue;
        kp_write(w, x->value + x->parts[i].start, nbytes);
        memset(w->end, 0, kp_packed_size(nbytes) - nbytes);
        w->end += kp_packed_size(nbytes) - nbytes;
    }
}

/* One message. Its payloads: what is packed, in one frame, and each of the others in one of its own. */
static void kp_write_batch(kp_writer *w, const kp_exchange *x, uint32_t from, uint32_t to)
{
    uint64_t packed = 0, size;
    uint32_t others = 0, at_first = to;
    for (uint32_t i = from; i < to; i++)
        if (x->parts[i].nbytes <= KP_PACKED_BYTES) {
            packed += kp_packed_size(x->parts[i].nbytes);
        } else {
            others++;
            at_first = at_first == to ? i : at_first;
        }
    int packs = others < to - from;
    uint64_t first = packs ? packed : x->parts[at_first].nbytes;
    int is_inline = first > 0 && first <= KP_INLINE_BYTES;
    uint32_t head[2] = {KP_MAGIC, 1 + others + (uint32_t)packs - (uint32_t)is_inline};
    kp_write(w, head, sizeof head);
    size = sizeof(kp_head) + (to - from) * sizeof(kp_record) + (is_inline ? first : 0);
    kp_write(w, &size, sizeof size);
    if (packs && !is_inline)
        kp_write(w, &packed, sizeof packed);
    for (uint32_t i = from; i < to; i++)
        if (x->parts[i].nbytes > KP_PACKED_BYTES && (packs || i != at_first || !is_inline))
            kp_write(w, &x->parts[i].nbytes, sizeof size);

    kp_head begins = x->head;
    begins.flags = is_inline ? KP_INLINE : 0;
    begins.count = to - from;
    kp_write(w, &begins, sizeof begins);
    uint32_t frame = (uint32_t)packs;
    uint64_t offset = 0;
    for (uint32_t i = from; i < to; i++) {
        const kp_part *part = &x->parts[i];
        int is_packed = part->nbytes <= KP_PACKED_BYTES;
        kp_record record = {
            .kind = KP_PUSHPULL, .slice = part->slice, .sequence = x->first + i, .round = part->pushed,
            .version = x->version, .clock = x->clock, .rows = -1, .place = KP_FRAME,
            .frame = is_packed ? 0 : frame, .offset = is_packed ? offset : 0, .nbytes = part->nbytes,
        };
        kp_write(w, &record, sizeof record);
        frame += !is_packed;
        offset += is_packed ? kp_packed_size(part->nbytes) : 0;
    }
    if (packs)
        kp_write_packed(w, x, from, to);
    for (uint32_t i = from; i < to; i++)
        if (x->parts[i].nbytes > KP_PACKED_BYTES)
            kp_write_large(w, x->value + x->parts[i].start, x->parts[i].nbytes);
}

/* Send the requests; `owner` has the value. 0; -1: nothing was queued, or there is no memory. */
static int kp_send_exchange(kp_stream *s, kp_exchange *x, kp_buffer *owner)
{
    kp_writer w = {.copied = kp_new_buffer(x->room), .owner = owner};
    w.pieces = (kp_piece *)malloc((x->n_pieces) * sizeof *w.pieces);
    int failed = !w.copied || !w.pieces;
    if (!failed) {
        w.begin = w.end = w.copied->data;
        for (uint32_t from = 0, to; from < x->n; from = to) {
            to = kp_batch_end(x, from);
            kp_write_batch(&w, x, from, to);
        }
        kp_end_piece(&w);
        failed = kp_send(s, w.pieces, w.n);
        for (size_t i = 0; failed && i < w.n; i++)
            kp_drop(w.pieces[i].owner);
    }
    kp_drop(w.copied);
    free(w.pieces);
    return failed ? -1 : 0;
}

/* ------------------------------------------------------------------------------------------------ what comes */

/* A reply: all sizes of its frames are known, and the first frame is there. */
typedef struct {
    const kp_message *message;
    const uint64_t *sizes; /* NULL: those of the message's frames */
    uint32_t frames;
    const kp_head *head;
    const char *records;
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

/* The part that a record is the value of; NULL: it is something else. */
static kp_part *kp_part_of(const kp_exchange *x, const kp_record *record)
{
    uint64_t at = record->sequence - x->first;
    if (at >= x->n)
        return NULL;
    kp_part *part = &x->parts[at];
    int usual = record->kind == KP_VALUE && record->place == KP_FRAME && record->rows == -1 && !record->coding;
    int fits = record->slice == part->slice && record->nbytes == part->nbytes && isfinite(record->threshold);
    return usual && fits && !part->answered ? part : NULL;
}

/* Whether a reply is as expected. `r` has message, sizes, frames; the rest is filled in. */
static int kp_is_expected(kp_exchange *x, kp_reply *r)
{
    const kp_buffer *first = r->message->frames[0];
    const kp_head *head = r->head = (const kp_head *)first->data, *own = &x->head;
    if (first->nbytes < sizeof *head)
        return 0;
    if (head->magic != own->magic || head->version != own->version || head->kind != own->kind ||
        head->job != own->job || head->store != own->store || head->rank != own->rank ||
        head->incarnation != own->incarnation)
        return 0;
    if (head->count > KP_MOST_RECORDS || r->frames - 1 > 2 * head->count + 1)
        return 0;
    size_t end = sizeof *head + head->count * sizeof(kp_record);
    r->records = first->data + sizeof *head;
    r->is_inline = head->flags == KP_INLINE;
    if (r->is_inline ? first->nbytes <= end || first->nbytes > end + KP_INLINE_BYTES : first->nbytes != end)
        return 0;
    if (!r->is_inline && head->flags)
        return 0;
    for (uint32_t i = 1; i < r->frames; i++)
        if (kp_frame_size(r, i) > x->frame_limit)
            return 0;
    x->replies++;
    for (uint32_t i = 0; i < head->count; i++) {
        kp_record record = kp_record_of(r, i);
        kp_part *part = kp_part_of(x, &record);
        if (!part || part->seen == x->replies || record.frame >= r->frames - !r->is_inline)
            return 0;
        part->seen = x->replies;
        int is_first = r->is_inline && !record.frame;
        uint64_t there = is_first ? first->nbytes - end : kp_frame_size(r, record.frame + !r->is_inline);
        if (record.offset > there || record.nbytes > there - record.offset)
            return 0;
    }
    return 1;
}

/* Take a whole reply. 0: it is not as expected, and nothing has happened. */
static int kp_take_reply(kp_exchange *x, const kp_message *message)
{
    kp_reply r = {.message = message, .frames = message->n};
    if (!kp_is_expected(x, &r))
        return 0;
    for (uint32_t i = 0; i < r.head->count; i++) {
        kp_record record = kp_record_of(&r, i);
        kp_part *part = kp_part_of(x, &record);
        int is_first = r.is_inline && !record.frame;
        const char *payload = is_first ? r.records + r.head->count * sizeof record
                                       : message->frames[record.frame + !r.is_inline]->data;
        if (payload + record.offset != x->into + part->start)
            memmove(x->into + part->start, payload + record.offset, (size_t)part->nbytes);
        part->complete = record.round;
        part->answered = 1;
        x->left--;
    }
    x->received = r.head->received > x->received ? r.head->received : x->received;
    return 1;
}

/* Memory of a frame that is about to come: where it belongs, if it is the whole value of a part. */
static kp_buffer *kp_place(kp_stream *s)
{
    kp_exchange *x = (kp_exchange *)s->placer;
    kp_buffer *made = NULL;
    kp_reply r = {.message = s->coming, .sizes = s->sizes, .frames = s->head[1]};
    uint32_t frame = s->at;
    if (!frame || x->apart || s->sizes[frame] < KP_DIRECT_BYTES || !kp_is_expected(x, &r))
        return kp_new_buffer((size_t)s->sizes[frame]);
    for (uint32_t i = 0; i < r.head->count && !made; i++) {
        kp_record record = kp_record_of(&r, i);
        if (record.frame + !r.is_inline == frame && !record.offset && record.nbytes == s->sizes[frame]) {
            if (!(made = kp_new_buffer(0)))
                return NULL;
            made->data = x->into + kp_part_of(x, &record)->start;
            made->nbytes = (size_t)record.nbytes;
        }
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
        if (!x->left || !kp_take_reply(x, s->first))
            return kp_unplace(s) ? KP_NO_MEMORY : kp_parse(s);
        kp_free_message(kp_take_messages(s));
    }
    return outcome;
}

static int kp_ms_until(double end)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    double left = (end - (double)now.tv_sec) * 1e3 - (double)now.tv_nsec * 1e-6;
    return left <= 0 ? 0 : left < 1e6 ? (int)left + 1 : (int)1e6;
}

/* Wait for replies until all have come, something else has, `end` is over, or a signal or another descriptor ends it.
 *
 * `end` is in seconds of the monotonic clock; the first descriptor is the stream's. KP_CLOSED and above: the stream is
 * at its end. */
static enum kp_outcome kp_await_replies(kp_exchange *x, kp_stream *s, struct pollfd *waits, nfds_t n, double end)
{
    enum kp_outcome outcome = KP_BLOCKED;
    s->place = kp_place;
    s->placer = x;
    while (outcome == KP_BLOCKED && x->left && !s->first) {
        if (poll(waits, n, kp_ms_until(end)) <= 0 || !waits[0].revents)
            break;
        ssize_t got = kp_fill(s);
        if (got > 0)
            outcome = kp_parse_replies(x, s);
        else if (!got || (errno != EINTR && errno != EAGAIN && errno != EWOULDBLOCK))
            outcome = KP_CLOSED;
    }
    if (kp_unplace(s) && outcome < KP_CLOSED)
        outcome = KP_NO_MEMORY;
    return outcome;
}

#endif
