/* Messages of several frames, received and to be sent; the interfaces between streams and the server's state. */
#ifndef KP_MESSAGES_H
#define KP_MESSAGES_H

#include <string.h>

#include "activity.h"
#include "gather_rows.h"

#define KP_MAGIC 0x5453564bu /* "KVST", before each message on a stream */

/* A received message; it has references to its frames. */
typedef struct kp_message {
    struct kp_message *next;
    uint32_t n;
    uint32_t handled; /* records that are handled, from the first */
    kp_buffer *frames[];
} kp_message;

/* Bytes to be sent: of `owner`, unchanged as long as there is a reference to it, or of `rows`. */
typedef struct {
    const char *at;
    size_t nbytes;
    kp_buffer *owner;
    kp_deferred *rows; /* NULL, or used in place of `at` and `owner` */
} kp_piece;

/* Release the references of a piece. */
static void kp_release_piece(const kp_piece *piece)
{
    kp_release(piece->owner);
    if (piece->rows)
        kp_release_deferred(piece->rows);
}

/* Free a message and its references to frames; NULL is allowed. */
static void kp_free_message(kp_message *message)
{
    for (uint32_t i = 0; message && i < message->n; i++)
        kp_release(message->frames[i]);
    free(message);
}

/* Release the references of `n` pieces; the array belongs to the caller. */
static void kp_release_pieces(kp_piece *pieces, size_t n)
{
    for (size_t i = 0; i < n; i++)
        kp_release_piece(&pieces[i]);
}

/* Sends messages to one peer. `send` queues all pieces, and then has the references to their owners; or returns -1, and the
 * references remain the caller's. It does not wait for the peer. */
typedef struct {
    void *stream; /* NULL: it is closed */
    int (*send)(void *stream, const kp_piece *pieces, size_t n);
} kp_outlet;

/* Returns what a server waits for, for a timeline. */
typedef struct {
    void *context;
    kv_about (*about)(void *context);
} kp_waits;

/* Handles messages without Python. `handle` returns 0 where Python has to continue: with the records after the first
 * `handled`, or with answers and jobs of these. */
typedef struct {
    void *context;
    int (*handle)(void *context, kp_message *message);
} kp_inlet;

#endif
