/* What a worker exchanges with one server: the parts of its arrays, and how far each of them is. */
#ifndef KP_EXCHANGE_PARTS_H
#define KP_EXCHANGE_PARTS_H

#include "packed_sum.h"
#include "wire_format.h"
#include "sender.h"

enum {
    KP_COPIED_BYTES = 32 * 1024, /* frames up to this size are copied behind the head */
    KP_PACKED_BYTES = 16 * 1024, /* payloads up to this size share a frame */
    KP_PACKED_ALIGNED = 64,
    KP_MOST_OF_BATCH = 4096, /* records of a request */
    KP_SMALL_BYTES = 512 * 1024, /* of an exchange whose answer comes soon */
    KP_LOOKS = 400,             /* before a wait for it sleeps, at most: some 0.3 ms */
    KP_TRAFFIC_BYTES = 64 * 1024, /* on the way: who moves more needs the processors for longer, */
    KP_TRAFFIC_LOOKS = 20,      /* so that a wait for it looks no more than so often */
    KP_FEW_LOOKS = 4,           /* and at least */
    KP_SOON_NS = 300000,        /* a sleep that was shorter should have been looks */
    KP_WINDOW_BYTES = 4 << 20,  /* without an answer: parts that wait for others should stay in a cache */
    KP_NEAR_WINDOW_BYTES = 2 << 20, /* within a host: both ends share its caches */
    KP_TURNS_WINDOW_BYTES = 3 << 19, /* and where workers take turns: one large part */
    KP_LONG_PULL_BYTES = 4 << 20, /* of a pull alone: of more than that the server has another part to send at once */
    KP_WIDER_NS = 2000000,      /* without a word until more may go: an update may need all parts of a key at once */
    KP_NEAR_WIDER_NS = 10000000, /* within a host, whose cores the server may have to wait for */
    KP_FEW_WIDE = 8,         /* calls that begin with such a window before the usual one is tried again, at first */
    KP_MANY_WIDE = 1024,     /* and in the end */
    KP_PAGE = 4096           /* bytes to which a seqlock belongs, as shared_buffers has it */
};

/* A slice, and where its elements are. */
typedef struct {
    uint32_t slice, key;    /* `key`: which of the arrays it is a part of */
    uint64_t start, nbytes; /* within the array */
    uint64_t carried;       /* bytes of what is pushed, in the request's message */
    uint64_t clock, pushed, complete; /* rounds, as the server counts: of this push, and the last that is complete */
    const char *from;
    char *into;
    int64_t rows;           /* of a table; -1: elements of an array */
    const char *ids;        /* of these rows */
    uint64_t ids_bytes;
    int is_shared, in_place; /* it is pushed in shared memory; and the sum may be written there */
    uint32_t segment;
    uint64_t offset;
    uint32_t seen; /* in which reply */
    int answered;
} kp_part;

/* A segment of the server's memory, which begins with a seqlock for each page. */
typedef struct {
    const char *at;
    uint64_t nbytes;
} kp_mapped;

typedef struct kp_exchange {
    kp_head head;
    uint8_t kind; /* KP_PUSHPULL, KP_PUSH, KP_PULL or KP_PULL_ROWS */
    uint64_t batch_bytes, frame_limit, credit;
    uint64_t report; /* bytes that the server may have taken in without a word of it */
    uint64_t window; /* bytes without an answer, there or back */
    int is_wide;     /* this call began with the window of the last one */
    uint32_t wide;   /* calls that are to begin so */
    uint32_t wider;  /* how many there are the next time */
    unsigned looks, most_looks; /* before a wait sleeps */
    uint32_t n;
    kp_part *parts;
    kp_mapped *segments;
    uint32_t n_segments;
    kp_run run;
    const int *threads;
    /* Of one call. */
    struct kp_exchange *before; /* goes over the same stream, and is sent before this one; may be NULL */
    uint32_t version;
    uint8_t coding; /* of all that is pushed */
    double threshold;
    uint64_t first;        /* its sequence; the others follow */
    uint32_t next;         /* part that is sent next */
    uint32_t oldest;       /* all parts before it are answered */
    uint64_t flying;       /* as kp_traffic, of what was sent and is not answered */
    uint32_t left, replies;
    uint64_t gone, back;      /* bytes of requests that were sent, and of those that are answered */
    uint64_t base;            /* bytes that were sent before, as the server counts them */
    uint64_t received;        /* as the server counts bytes */
    kp_buffer *owner;         /* of all values */
    kp_observer observer;
    int32_t whom; /* the server, as in kv_counters */
} kp_exchange;

/* Number of parts that have no answer, of an exchange and of those before it. */
static uint32_t kp_left(const kp_exchange *x)
{
    return x->left + (x->before ? kp_left(x->before) : 0);
}

#endif
