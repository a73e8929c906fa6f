/* Rows that a worker waits for, received where they belong: a frame that is about to come is given that memory if it is
 * theirs, by the slice and the ids that come before it. So of equal requests only one can have its rows expected: those of
 * another may be of a later round. The reply is checked as any other once it is whole. */
#ifndef KP_EXPECTED_H
#define KP_EXPECTED_H

#include "requests.h"
#include "stream.h"

typedef struct kp_expected {
    struct kp_expected *next;
    uint32_t slice;
    const char *ids;
    char *into;
    uint64_t n, ids_bytes, nbytes; /* rows, bytes of their ids, and of themselves */
    int came;
} kp_expected;

/* Whether equal rows are expected already, by ids and slice: an answer does not tell which of the two it is. */
static int kp_has_equal(const kp_expected *first, const kp_expected *rows)
{
    for (; first; first = first->next)
        if (first->slice == rows->slice && first->n == rows->n && !memcmp(first->ids, rows->ids, rows->ids_bytes))
            return 1;
    return 0;
}

/* Whether a record is of these rows, and they are frame `at` of the message that comes, behind their ids. `behind`: what
 * follows the records. */
static int kp_is_of(const kp_expected *x, const kp_stream *s, const kp_record *record, const char *behind, size_t behind_bytes)
{
    uint64_t ids_at = (uint64_t)record->frame + !behind_bytes;
    if (record->kind != KP_VALUE || record->place != KP_FRAME || record->offset || ids_at + 1 != s->at)
        return 0;
    if (x->came || record->slice != x->slice || record->rows != (int64_t)x->n || record->nbytes != x->ids_bytes + x->nbytes ||
        s->sizes[s->at] != x->nbytes)
        return 0;
    const char *ids = ids_at ? s->coming->frames[ids_at]->data : behind;
    return (ids_at ? s->sizes[ids_at] : behind_bytes) == x->ids_bytes && !memcmp(ids, x->ids, x->ids_bytes);
}

/* The rows that frame `at` of the message that comes has; NULL: none of them. */
static kp_expected *kp_find_expected(const kp_stream *s)
{
    const kp_buffer *first = s->coming->frames[0];
    const kp_head *head = (const kp_head *)first->data;
    if (first->nbytes < sizeof *head || head->kind != KP_DATA || head->records > KP_MOST_RECORDS)
        return NULL;
    size_t end = sizeof *head + head->records * sizeof(kp_record);
    if (first->nbytes < end)
        return NULL;
    for (uint32_t i = 0; i < head->records; i++) {
        const kp_record *record = (const kp_record *)(first->data + sizeof *head) + i;
        for (kp_expected *x = *(kp_expected **)s->placer; x; x = x->next)
            if (kp_is_of(x, s, record, first->data + end, first->nbytes - end))
                return x;
    }
    return NULL;
}

/* Memory of a frame that is about to come, as `kp_stream.place` has it. */
static kp_buffer *kp_place_rows(kp_stream *s)
{
    size_t nbytes = (size_t)s->sizes[s->at];
    kp_expected *found = s->at && nbytes >= KP_DIRECT_BYTES ? kp_find_expected(s) : NULL;
    kp_buffer *made = kp_new_buffer(found ? 0 : nbytes);
    if (made && found) {
        made->data = found->into;
        made->nbytes = nbytes;
        found->came = 1;
    }
    return made;
}

#endif
