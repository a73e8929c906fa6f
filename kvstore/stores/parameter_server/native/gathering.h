/* Rows of a table, copied one behind the other. */
#ifndef KP_GATHERING_H
#define KP_GATHERING_H

#include <string.h>

#include "buffers.h"

enum {
    KP_GATHER_BYTES = 256 * 1024, /* copied at a time, which stays in the cache until the socket takes it */
    KP_GATHER_AHEAD = 8           /* rows lie anywhere: the processor is told of so many before they are copied */
};

typedef struct {
    const char *table;
    size_t row_bytes;
    const int64_t *rows; /* -1: a row of zeros */
    int64_t first;       /* what is taken off each of `rows` */
    size_t n;
} kp_gather;

/* How many rows are copied at a time. */
static inline size_t kp_gather_step(const kp_gather *g)
{
    return g->row_bytes < KP_GATHER_BYTES ? KP_GATHER_BYTES / g->row_bytes : 1;
}

static void kp_copy_rows(const kp_gather *g, size_t from, size_t to, char *into)
{
    for (size_t i = from; i < to; i++, into += g->row_bytes) {
        int64_t ahead = i + KP_GATHER_AHEAD < to ? g->rows[i + KP_GATHER_AHEAD] : -1;
        for (size_t at = 0; ahead >= 0 && at < g->row_bytes && at < 2048; at += KP_ALIGNED)
            __builtin_prefetch(g->table + (size_t)(ahead - g->first) * g->row_bytes + at);
        if (g->rows[i] < 0)
            memset(into, 0, g->row_bytes);
        else
            memcpy(into, g->table + (size_t)(g->rows[i] - g->first) * g->row_bytes, g->row_bytes);
    }
}

/* Copy the rows from `from` on, as many as go at a time, to memory of their own; NULL: there is none. */
static kp_buffer *kp_gather_some(const kp_gather *g, size_t from, size_t *n)
{
    size_t step = kp_gather_step(g);
    *n = g->n - from < step ? g->n - from : step;
    kp_buffer *made = kp_new_buffer(*n * g->row_bytes);
    if (made)
        kp_copy_rows(g, from, from + *n, made->data);
    return made;
}

#endif
