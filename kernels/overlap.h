/* Whether the items of a call can run concurrently and in any order.
 *
 * They can unless a written array overlaps another array that is read or written. One overlap does no harm: the
 * identical array within one item, that is an in-place sum, or an out that is given twice.
 */
#ifndef KV_OVERLAP_H
#define KV_OVERLAP_H

#include "job.h"

typedef struct {
    uintptr_t start, end;
    ptrdiff_t item;
    int write;
} kv_extent;

/* Order extents by their start. Among equal starts, writes come first: then every other extent is compared with
 * them. */
static int kv_by_start(const void *a, const void *b)
{
    const kv_extent *x = (const kv_extent *)a, *y = (const kv_extent *)b;
    return x->start != y->start ? (x->start > y->start) - (x->start < y->start) : y->write - x->write;
}

/* Sort extents. A call of one key has few extents, for which insertion is faster than qsort. */
static void kv_sort_extents(kv_extent *e, ptrdiff_t n)
{
    if (n > 32) {
        qsort(e, (size_t)n, sizeof *e, kv_by_start);
        return;
    }
    for (ptrdiff_t i = 1; i < n; i++) {
        kv_extent moved = e[i];
        ptrdiff_t j = i;
        for (; j > 0 && kv_by_start(&e[j - 1], &moved) > 0; j--)
            e[j] = e[j - 1];
        e[j] = moved;
    }
}

/* Whether extents of different items clash; e is sorted. Compares each extent with the longest-reaching write and
 * read before it. */
static int kv_extents_clash(const kv_extent *e, ptrdiff_t n)
{
    kv_extent write = {0, 0, -1, 1}, read = {0, 0, -1, 0};
    for (ptrdiff_t i = 0; i < n; i++) {
        const kv_extent *x = &e[i];
        if (x->start < write.end && !(x->item == write.item && x->start == write.start))
            return 1;
        if (x->write && x->start < read.end && !(x->item == read.item && x->start == read.start))
            return 1;
        kv_extent *longest = x->write ? &write : &read;
        if (x->end >= longest->end) {
            int shared = x->start < longest->end && (x->item != longest->item || x->start != longest->start);
            *longest = *x;
            if (shared)
                longest->item = -1; /* several readers: no writer can be the same array as all of them */
        }
    }
    return 0;
}

/* Append the extent of an array. The caller has allocated the place. */
static void kv_add_extent(kv_extent **at, const char *array, ptrdiff_t bytes, ptrdiff_t item, int write)
{
    uintptr_t start = (uintptr_t)array;
    if (array && bytes)
        *(*at)++ = (kv_extent){start, start + (uintptr_t)bytes, item, write};
}

/* Return the bytes of source number j of an item. */
static ptrdiff_t kv_source_bytes(const kv_item *it, int j)
{
    if (it->coding && it->coding[j].packed)
        return kv_encoded_bytes(it->coding[j].code, it->n);
    return it->n * kv_itemsize[it->dtype];
}

/* Whether items are independent: 1: yes, 0: no, -1: no memory. Masters, states and residuals belong to the store and
 * are never passed to callers. */
static int kv_independent(const kv_item *items, ptrdiff_t n)
{
    kv_extent few[32], *extents = few;
    ptrdiff_t most = 0;
    for (ptrdiff_t i = 0; i < n; i++)
        most += items[i].k + items[i].m + 2;
    if (most > 32 && !(extents = (kv_extent *)malloc((size_t)most * sizeof *extents)))
        return -1;
    kv_extent *end = extents;
    for (ptrdiff_t i = 0; i < n; i++) {
        const kv_item *it = &items[i];
        ptrdiff_t bytes = it->n * kv_itemsize[it->dtype];
        for (int j = 0; j < it->k; j++)
            kv_add_extent(&end, it->src[j], kv_source_bytes(it, j), i, 0);
        for (int j = 0; j < it->m; j++)
            kv_add_extent(&end, it->out[j], bytes, i, 1);
        kv_add_extent(&end, it->dst, bytes, i, 1);
        kv_add_extent(&end, it->rule < 0 ? NULL : it->weight, bytes, i, 0);
    }
    kv_sort_extents(extents, end - extents);
    int clash = kv_extents_clash(extents, end - extents);
    if (extents != few)
        free(extents);
    return !clash;
}

#endif
