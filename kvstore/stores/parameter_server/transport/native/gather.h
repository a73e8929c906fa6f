/* Rows of a table that are gathered while they are sent: what has been copied goes out, and is read by the peer, while the
 * next rows are copied. */
#ifndef KP_GATHER_H
#define KP_GATHER_H

#include "gathering.h"
#include "sender.h"

/* Whether all rows are of a table of so many. */
static int kp_is_within(const kp_gather *g, int64_t table_rows)
{
    int outside = 0;
    for (size_t i = 0; i < g->n; i++)
        outside |= (g->rows[i] < -1) | (g->rows[i] >= table_rows);
    return !outside;
}

/* Half of a message has gone: nothing goes any more. */
static void kp_stop_sending(kp_stream *s)
{
    pthread_mutex_lock(&s->lock);
    s->broken = 1;
    shutdown(s->fd, SHUT_RDWR); /* the owner finds its end */
    pthread_mutex_unlock(&s->lock);
}

/* Send the last frame of a message whose others are queued. 0; -1: the stream is at its end. */
static int kp_send_rows(kp_stream *s, const kp_gather *g)
{
    for (size_t from = 0, n; from < g->n; from += n) {
        kp_piece piece = {.owner = kp_gather_some(g, from, &n)};
        piece.at = piece.owner ? piece.owner->data : NULL;
        piece.nbytes = n * g->row_bytes;
        if (!piece.owner || kp_send(s, &piece, 1)) {
            kp_drop(piece.owner);
            kp_stop_sending(s);
            return -1;
        }
    }
    return 0;
}

#endif
