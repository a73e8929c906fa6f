/* Messages of several frames: those that came in, and those that are to go out. */
#ifndef KP_MESSAGES_H
#define KP_MESSAGES_H

#include <string.h>

#include "activity.h"
#include "gathering.h"

#define KP_MAGIC 0x5453564bu /* "KVST", before each message on a stream */

/* A message that has come. */
typedef struct kp_message {
    struct kp_message *next;
    uint32_t n;
    uint32_t handled; /* records that have been handled, from the first */
    kp_buffer *frames[];
} kp_message;

/* Bytes that are to be sent: those of `owner`, which stay as they are as long as there is a reference to it, or of `rows`. */
typedef struct {
    const char *at;
    size_t nbytes;
    kp_buffer *owner;
    kp_deferred *rows; /* NULL, or these are in place of `at` and `owner` */
} kp_piece;

static void kp_drop_piece(const kp_piece *piece)
{
    kp_drop(piece->owner);
    if (piece->rows)
        kp_drop_deferred(piece->rows);
}

static void kp_free_message(kp_message *message)
{
    for (uint32_t i = 0; message && i < message->n; i++)
        kp_drop(message->frames[i]);
    free(message);
}

static void kp_drop_pieces(kp_piece *pieces, size_t n)
{
    for (size_t i = 0; i < n; i++)
        kp_drop_piece(&pieces[i]);
}

/* Where messages to one peer go. `send` queues all pieces, and takes the references to their owners, or returns -1. */
typedef struct {
    void *stream; /* NULL: there is none any more */
    int (*send)(void *stream, const kp_piece *pieces, size_t n);
} kp_outlet;

/* What whoever waits for messages waits for. */
typedef struct {
    void *context;
    kv_about (*about)(void *context);
} kp_waits;

/* Who handles messages without Python. `take` returns 0 where something is left to Python: records after those that
 * were `handled`, or what these came to. */
typedef struct {
    void *context;
    int (*take)(void *context, kp_message *message);
} kp_inlet;

#endif
