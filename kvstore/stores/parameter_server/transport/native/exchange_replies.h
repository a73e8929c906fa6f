/* The replies to an exchange: each is checked as a whole, and then its values are put where they belong. */
#ifndef KP_EXCHANGE_REPLIES_H
#define KP_EXCHANGE_REPLIES_H

#include <math.h>

#include "exchange_requests.h"

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
    kp_reply r = {.message = s->incoming, .sizes = s->sizes, .frames = s->head[1]};
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
    for (uint32_t i = 0; s->incoming && i < s->incoming->n; i++) {
        kp_buffer *placed = s->incoming->frames[i];
        if (placed->capacity >= placed->nbytes)
            continue;
        kp_buffer *own = kp_new_buffer(placed->nbytes);
        if (!own)
            return -1;
        memcpy(own->data, placed->data, i == s->at ? (size_t)s->got : placed->nbytes);
        s->incoming->frames[i] = own;
        kp_release(placed);
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

#endif
