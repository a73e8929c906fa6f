/* Sends rows of a table while they are gathered: the first rows are sent, and read by the peer, while the next rows are
 * copied. */
#ifndef KP_SEND_ROWS_H
#define KP_SEND_ROWS_H

#include "gather_rows.h"
#include "sender.h"

/* Return whether all row numbers are below `table_rows`; -1 is a row of zeros. Reads g->rows. */
static int kp_is_within(const kp_gather *g, int64_t table_rows)
{
    int outside = 0;
    for (size_t i = 0; i < g->n; i++)
        outside |= (g->rows[i] < -1) | (g->rows[i] >= table_rows);
    return !outside;
}

/* Close a stream for sending after a part of a message: the rest must not follow. Acquires the stream's lock. */
static void kp_stop_sending(kp_stream *s)
{
    pthread_mutex_lock(&s->lock);
    s->broken = 1;
    shutdown(s->fd, SHUT_RDWR); /* the receiving thread sees the end */
    pthread_mutex_unlock(&s->lock);
}

/* Send the last frame of a message after its other frames are queued; the table must not change before it returns. Acquires
 * the stream's lock; does not wait for the socket. 0; -1: the stream is broken, and closed for sending. */
static int kp_send_rows(kp_stream *s, const kp_gather *g)
{
    for (size_t from = 0, n; from < g->n; from += n) {
        kp_piece piece = {.owner = kp_gather_some(g, from, &n)};
        piece.at = piece.owner ? piece.owner->data : NULL;
        piece.nbytes = n * g->row_bytes;
        if (!piece.owner || kp_send(s, &piece, 1)) {
            kp_release(piece.owner);
            kp_stop_sending(s);
            return -1;
        }
    }
    return 0;
}

#endif
