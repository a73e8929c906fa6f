/* Copies of rows of a table into contiguous memory. */
#ifndef KP_GATHER_ROWS_H
#define KP_GATHER_ROWS_H

#include <pthread.h>
#include <string.h>

#include "buffers.h"

#ifndef KP_GATHER_BYTES /* tests have less */
#define KP_GATHER_BYTES (256 * 1024) /* copied at once: they stay in the cache until the socket accepts them */
#endif
enum { KP_GATHER_AHEAD = 8 }; /* rows to prefetch before they are copied, because they lie anywhere */

typedef struct {
    const char *table;
    size_t row_bytes;
    const int64_t *rows; /* -1: a row of zeros */
    int64_t first;       /* subtracted from each of `rows` */
    size_t n;
} kp_gather;

/* Return how many rows are copied at once. */
static inline size_t kp_gather_step(const kp_gather *g)
{
    return g->row_bytes < KP_GATHER_BYTES ? KP_GATHER_BYTES / g->row_bytes : 1;
}

/* Copy rows `from` to `to`; `into` has space for them, and all row numbers are valid. */
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

/* Copy rows from `from` on, `*n` of them, to new memory, which belongs to the caller. NULL: no memory. */
static kp_buffer *kp_gather_some(const kp_gather *g, size_t from, size_t *n)
{
    size_t step = kp_gather_step(g);
    *n = g->n - from < step ? g->n - from : step;
    kp_buffer *made = kp_new_buffer(*n * g->row_bytes);
    if (made)
        kp_copy_rows(g, from, from + *n, made->data);
    return made;
}

/* Rows that are gathered when a socket accepts them, by the thread that sends them. Before the table changes, its owner has
 * the remaining rows copied. */
typedef struct kp_deferred {
    atomic_int references; /* of the piece that is sent, and of the table's list */
    pthread_mutex_t lock;  /* for the next three */
    kp_gather left;        /* rows to gather; `n` is 0: all are gathered */
    kp_buffer *copied;     /* a copy of these; NULL: they are in the table */
    int failed;            /* there was no memory to copy them: sending fails */
    kp_buffer *ids;        /* a reference to the memory of `left.rows` */
    struct kp_deferred *next; /* of the same table */
} kp_deferred;

/* Release a reference; by any thread. */
static void kp_release_deferred(kp_deferred *d)
{
    if (atomic_fetch_sub_explicit(&d->references, 1, memory_order_acq_rel) != 1)
        return;
    kp_release(d->copied);
    kp_release(d->ids);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

/* Add rows to a table's list `all`; the list has one reference, the caller one. By the server's thread; NULL: no memory. */
static kp_deferred *kp_defer(kp_deferred **all, const kp_gather *g, kp_buffer *ids)
{
    kp_deferred *made = (kp_deferred *)malloc(sizeof *made);
    if (!made)
        return NULL;
    *made = (kp_deferred){.left = *g, .ids = kp_retain(ids), .next = *all};
    atomic_init(&made->references, 2);
    pthread_mutex_init(&made->lock, NULL);
    *all = made;
    return made;
}

/* Gather the next rows, `*nbytes` of them, to memory that belongs to the caller; by the thread that sends. Blocks only while
 * the table's owner copies them. NULL: no memory, now or when they had to be copied. */
static kp_buffer *kp_gather_next(kp_deferred *d, size_t *nbytes)
{
    pthread_mutex_lock(&d->lock);
    size_t n = d->left.n;
    kp_buffer *made = d->copied;
    d->copied = NULL;
    if (!made && !d->failed)
        made = kp_gather_some(&d->left, 0, &n);
    if (made) {
        d->left.rows += n;
        d->left.n -= n;
    }
    *nbytes = n * d->left.row_bytes;
    pthread_mutex_unlock(&d->lock);
    return made;
}

/* Copy the rows that are not sent yet, as they are now. */
static void kp_copy_left(kp_deferred *d)
{
    pthread_mutex_lock(&d->lock);
    if (d->left.n && !d->copied && !d->failed && atomic_load_explicit(&d->references, memory_order_relaxed) > 1) {
        d->copied = kp_new_buffer(d->left.n * d->left.row_bytes);
        d->failed = !d->copied;
        if (d->copied)
            kp_copy_rows(&d->left, 0, d->left.n, d->copied->data);
    }
    pthread_mutex_unlock(&d->lock);
}

/* Remove the rows of a table that are sent from its list. By the server's thread. */
static void kp_forget_sent(kp_deferred **all)
{
    while (*all) {
        kp_deferred *d = *all;
        if (atomic_load_explicit(&d->references, memory_order_acquire) > 1) {
            all = &d->next;
            continue;
        }
        *all = d->next;
        kp_release_deferred(d);
    }
}

/* Copy all rows that are still to be sent, before the table changes or is freed; empties the list. By the server's thread.
 * Without memory, sending these rows fails later, and breaks their stream. */
static void kp_copy_deferred(kp_deferred **all)
{
    while (*all) {
        kp_deferred *d = *all;
        *all = d->next;
        kp_copy_left(d);
        kp_release_deferred(d);
    }
}

#endif
