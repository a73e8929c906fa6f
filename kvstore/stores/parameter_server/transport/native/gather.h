/* Rows of a table that are gathered while they are sent: what has been copied goes out, and is read by the peer, while the
 * next rows are copied. */
#ifndef KP_GATHER_H
#define KP_GATHER_H

#include "sender.h"

enum {
    KP_GATHER_BYTES = 256 * 1024, /* copied at a time, which stays in the cache until the socket takes it */
    KP_GATHER_AHEAD = 8           /* rows lie anywhere: the processor is told of so many before they are copied */
};

typedef struct {
    const char *table;
    size_t row_bytes;
    const int64_t *rows; /* -1: a row of zeros */
    size_t n;
} kp_gather;

/* Whether all rows are of a table of so many. */
static int kp_is_within(const kp_gather *g, int64_t table_rows)
{
    int outside = 0;
    for (size_t i = 0; i < g->n; i++)
        outside |= (g->rows[i] < -1) | (g->rows[i] >= table_rows);
    return !outside;
}

static void kp_copy_rows(const kp_gather *g, size_t from, size_t to, char *into)
{
    for (size_t i = from; i < to; i++, into += g->row_bytes) {
        int64_t ahead = i + KP_GATHER_AHEAD < to ? g->rows[i + KP_GATHER_AHEAD] : -1;
        for (size_t at = 0; ahead >= 0 && at < g->row_bytes && at < 2048; at += KP_ALIGNED)
            __builtin_prefetch(g->table + (size_t)ahead * g->row_bytes + at);
        if (g->rows[i] < 0)
            memset(into, 0, g->row_bytes);
        else
            memcpy(into, g->table + (size_t)g->rows[i] * g->row_bytes, g->row_bytes);
    }
}

/* Send the last frame of a message whose others are queued. 0; -1: the stream is at its end. */
static int kp_send_rows(kp_stream *s, const kp_gather *g)
{
    size_t step = g->row_bytes < KP_GATHER_BYTES ? KP_GATHER_BYTES / g->row_bytes : 1;
    for (size_t from = 0; from < g->n; from += step) {
        size_t to = g->n - from < step ? g->n : from + step;
        kp_piece piece = {.nbytes = (to - from) * g->row_bytes, .owner = kp_new_buffer((to - from) * g->row_bytes)};
        int failed = !piece.owner;
        if (!failed) {
            kp_copy_rows(g, from, to, piece.owner->data);
            piece.at = piece.owner->data;
            failed = kp_send(s, &piece, 1);
        }
        if (failed) { /* half of a message has gone: nothing may follow it */
            kp_drop(piece.owner);
            pthread_mutex_lock(&s->lock);
            s->broken = 1;
            shutdown(s->fd, SHUT_RDWR);
            pthread_mutex_unlock(&s->lock);
            return -1;
        }
    }
    return 0;
}

#endif
