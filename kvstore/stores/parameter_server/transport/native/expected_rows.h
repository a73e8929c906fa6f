/* Receives rows at their destination: the stream gives a frame of rows the memory of the waiting worker, if the slice and
 * the ids in front of it are those of an expected read. Of two equal reads only one can be expected: the reply to the other
 * may be of a later round. The complete reply is checked like any other.
 *
 * All functions belong to the thread that receives, and none blocks. */
#ifndef KP_EXPECTED_ROWS_H
#define KP_EXPECTED_ROWS_H

#include "wire_format.h"
#include "stream.h"

typedef struct kp_expected {
    struct kp_expected *next;
    uint32_t slice;
    const char *ids;
    char *into;
    uint64_t n, ids_bytes, nbytes; /* number of rows, bytes of their ids, bytes of the rows */
    int arrived;
} kp_expected;

/* Return whether equal rows are already expected, by ids and slice: a reply does not identify its request. */
static int kp_has_equal(const kp_expected *first, const kp_expected *rows)
{
    for (; first; first = first->next)
        if (first->slice == rows->slice && first->n == rows->n && !memcmp(first->ids, rows->ids, rows->ids_bytes))
            return 1;
    return 0;
}

/* Return whether a record describes these rows, and they are frame `at` of the incoming message, behind their ids. `behind`:
 * the bytes after the records. */
static int kp_record_matches(const kp_expected *x, const kp_stream *s, const kp_record *record, const char *behind, size_t behind_bytes)
{
    uint64_t ids_at = (uint64_t)record->frame + !behind_bytes;
    if (record->kind != KP_VALUE || record->place != KP_FRAME || record->offset || ids_at + 1 != s->at)
        return 0;
    if (x->arrived || record->slice != x->slice || record->rows != (int64_t)x->n || record->nbytes != x->ids_bytes + x->nbytes ||
        s->sizes[s->at] != x->nbytes)
        return 0;
    const char *ids = ids_at ? s->incoming->frames[ids_at]->data : behind;
    return (ids_at ? s->sizes[ids_at] : behind_bytes) == x->ids_bytes && !memcmp(ids, x->ids, x->ids_bytes);
}

/* Return the expected rows that are frame `at` of the incoming message; NULL: none. */
static kp_expected *kp_find_expected(const kp_stream *s)
{
    const kp_buffer *first = s->incoming->frames[0];
    const kp_head *head = (const kp_head *)first->data;
    if (first->nbytes < sizeof *head || head->kind != KP_DATA || head->records > KP_MOST_RECORDS)
        return NULL;
    size_t end = sizeof *head + head->records * sizeof(kp_record);
    if (first->nbytes < end)
        return NULL;
    for (uint32_t i = 0; i < head->records; i++) {
        const kp_record *record = (const kp_record *)(first->data + sizeof *head) + i;
        for (kp_expected *x = *(kp_expected **)s->placer; x; x = x->next)
            if (kp_record_matches(x, s, record, first->data + end, first->nbytes - end))
                return x;
    }
    return NULL;
}

/* Return memory for the next frame; the callback `kp_stream.place`. NULL: no memory. */
static kp_buffer *kp_place_rows(kp_stream *s)
{
    size_t nbytes = (size_t)s->sizes[s->at];
    kp_expected *found = s->at && nbytes >= KP_DIRECT_BYTES ? kp_find_expected(s) : NULL;
    kp_buffer *made = kp_new_buffer(found ? 0 : nbytes);
    if (made && found) {
        made->data = found->into;
        made->nbytes = nbytes;
        found->arrived = 1;
    }
    return made;
}

#endif
