/* The requests of an exchange: batches are written, and sent as far as the credit and the window allow. */
#ifndef KP_EXCHANGE_REQUESTS_H
#define KP_EXCHANGE_REQUESTS_H

#include "exchange_parts.h"

/* Whether answers may be packed: of a pull, and where what is pushed is. */
static int kp_takes_packed(const kp_exchange *x)
{
    return x->kind == KP_PULL || (x->kind == KP_PUSHPULL && x->coding && x->coding != KV_DIVIDED);
}

/* Whether the value that answers a part is read where the server has it. */
static int kp_is_read_there(const kp_exchange *x, const kp_part *part)
{
    return part->is_shared || (x->kind == KP_PULL && x->n_segments && part->nbytes >= KP_SHARED_BYTES);
}

/* Bytes that a part has on the way, there or back. */
static uint64_t kp_traffic(const kp_exchange *x, const kp_part *part)
{
    uint64_t back = x->kind == KP_PUSH || kp_is_read_there(x, part) ? 0 : part->nbytes;
    return part->carried > back ? part->carried : back;
}

/* Whether an exchange has more than so many bytes on the way, there or back. */
static int kp_has_more_traffic(const kp_exchange *x, uint64_t most)
{
    uint64_t nbytes = 0;
    for (uint32_t i = 0; i < x->n && nbytes <= most; i++)
        nbytes += kp_traffic(x, &x->parts[i]);
    return nbytes > most;
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
        w->pieces[w->n++] = (kp_piece){w->begin, (size_t)(w->end - w->begin), kp_retain(w->copied)};
    w->begin = w->end;
}

static void kp_write_large(kp_writer *w, const char *data, uint64_t nbytes)
{
    if (nbytes <= KP_COPIED_BYTES) {
        kp_write(w, data, (size_t)nbytes);
        return;
    }
    kp_end_piece(w);
    w->pieces[w->n++] = (kp_piece){data, (size_t)nbytes, kp_retain(w->owner)};
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
            kp_release_pieces(w.pieces, w.n);
    }
    kp_release(w.copied);
    free(w.pieces);
    if (!failed) {
        kp_count_parts(x, x->next, end);
        x->next = end;
    }
    return failed ? -1 : 0;
}

/* What is on the way of an exchange and of those before it. */
typedef struct {
    uint64_t flying, outstanding; /* bytes there or back; of requests that may not have come to the server yet */
} kp_under_way;

static kp_under_way kp_look_under_way(const kp_exchange *x)
{
    uint64_t gone = 0, back = 0, flying = 0, base = 0, received = x->received;
    for (; x; x = x->before) {
        gone += x->gone;
        back += x->back;
        flying += x->flying;
        base = x->base; /* of the first */
    }
    uint64_t told = received > base ? received - base : 0, there = told > back ? told : back;
    return (kp_under_way){flying, gone > there ? gone - there : 0};
}

static int kp_is_long_pull(const kp_exchange *x)
{
    return x->kind == KP_PULL && kp_has_more_traffic(x, KP_LONG_PULL_BYTES);
}

static uint64_t kp_usual_window(const kp_stream *s, const kp_exchange *x)
{
    if (!s->is_near)
        return KP_WINDOW_BYTES;
    return s->limits_in_flight && !kp_is_long_pull(x) ? KP_TURNS_WINDOW_BYTES : KP_NEAR_WINDOW_BYTES;
}

/* All was sent before an answer came, beyond the usual window: let the next calls send as much at once.
 *
 * The server needs all parts at a time, or another worker was late. So the usual window is tried again, and less often
 * each time that it has not been enough. */
static void kp_begin_wide(kp_exchange *x)
{
    x->wide = x->wider ? x->wider : KP_FEW_WIDE;
    x->wider = x->wide < KP_MANY_WIDE ? 2 * x->wide : KP_MANY_WIDE;
}

/* Choose the window with which a call begins. */
static void kp_choose_window(const kp_stream *s, kp_exchange *x)
{
    if (x->wide) {
        x->wide--;
        x->is_wide = 1;
        return;
    }
    if (!x->is_wide) /* the last call needed no more than the usual one */
        x->wider = 0;
    x->is_wide = 0;
    x->window = kp_usual_window(s, x);
}

static int kp_is_held_back(const kp_exchange *x)
{
    return x->next < x->n || (x->before && kp_is_held_back(x->before));
}

/* The number of the first request without an answer, of an exchange and those before it. */
static uint64_t kp_oldest(kp_exchange *x)
{
    if (x->before && kp_left(x->before))
        return kp_oldest(x->before);
    while (x->oldest < x->n && x->parts[x->oldest].answered)
        x->oldest++;
    return x->first + x->oldest;
}

/* Pieces of a batch at most, beside what is copied: each value, and its ids, with a piece of copies before it. */
static size_t kp_most_pieces(const kp_exchange *x, uint32_t from, uint32_t to)
{
    size_t n = 0;
    for (uint32_t i = from; i < to; i++)
        n += x->parts[i].carried > KP_COPIED_BYTES ? 4 : 0;
    return n;
}

/* Send as much of one exchange as credit and window allow, beside all that is under way. 0; -1: as below. */
static int kp_send_some(kp_stream *s, kp_exchange *x, kp_under_way all)
{
    uint32_t end = x->next;
    uint64_t flying = all.flying, out = all.outstanding, gone = x->gone, span = kp_oldest(x) + KP_SPAN;
    size_t pieces = 1, room = kp_free_pieces(s);
    while (end < x->n) {
        uint32_t to = kp_batch_end(x, end);
        uint64_t nbytes = 0, carried = 0;
        for (uint32_t i = end; i < to; i++) {
            nbytes += kp_traffic(x, &x->parts[i]);
            carried += x->parts[i].carried;
        }
        pieces += kp_most_pieces(x, end, to);
        if (x->first + to > span || pieces > room)
            break;
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
    x->flying += flying - all.flying;
    x->gone = gone;
    if (!x->is_wide && end == x->n && x->left == x->n && x->window > kp_usual_window(s, x))
        kp_begin_wide(x);
    return 0;
}

/* Send, in order, what `last` and those before it have left. 0; -1: the stream is at its end, or there is no memory. */
static int kp_send_in_order(kp_stream *s, kp_exchange *x, const kp_exchange *last)
{
    if (x->before && kp_send_in_order(s, x->before, last))
        return -1;
    if (x->before && kp_is_held_back(x->before))
        return 0;
    return kp_send_some(s, x, kp_look_under_way(last));
}

static int kp_send_allowed(kp_stream *s, kp_exchange *x)
{
    return kp_send_in_order(s, x, x);
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
    kp_choose_window(s, x);
    kp_enter_moving(x);
    int failed = kp_send_allowed(s, x);
    kv_leave();
    return failed;
}

/* Let more go, since nothing comes. 0; -1: as above. */
static int kp_send_wider(kp_stream *s, kp_exchange *x)
{
    if (!kp_is_held_back(x))
        return 0;
    kp_exchange *held = x;
    while (held->before && kp_is_held_back(held->before))
        held = held->before;
    if (held->window <= UINT64_MAX / 4)
        held->window *= 2;
    kp_enter_moving(x);
    return kp_send_allowed(s, x);
}

#endif
