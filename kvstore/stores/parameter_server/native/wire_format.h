/* Requests and replies on the wire (transport/frames.py), with the numbers of protocol/messages.py.
 *
 * The first frame of a message is a head and its records; a small first payload may follow them. All numbers are
 * little-endian. */
#ifndef KP_WIRE_FORMAT_H
#define KP_WIRE_FORMAT_H

#include <stdint.h>

/* As messages.RecordKind, PayloadLocation, and the flags of a record. */
enum kp_kind {
    KP_INIT = 1, KP_ASSIGN, KP_PUSH, KP_PULL, KP_PUSHPULL, KP_PULL_ROWS, KP_FETCH_STATE, KP_PUT_STATE, KP_FORGET,
    KP_LAST_ROUND, KP_DONE = 20, KP_VALUE, KP_FAILED
};
enum kp_place { KP_NOWHERE, KP_FRAME, KP_SHARED };
enum { KP_SHARED_BYTES = 16 * 1024 /* the least of a value in shared memory; as payloads.SHARED_BYTES */ };
enum kp_flag { KP_BY_FRAME = 1, KP_PROBE, KP_IN_PLACE, KP_OF_ROUND, KP_PACKED };

/* As messages.WRITTEN: flag of a request in progress whose value has overwritten the pushed array. Never sent. */
#define KP_WRITTEN ((uint64_t)1 << 63)

/* As messages.Record. */
typedef struct __attribute__((packed)) {
    uint8_t kind;
    uint32_t slice;
    uint64_t sequence, round;
    uint32_t version;
    uint64_t clock;
    uint8_t coding;
    double threshold;
    int64_t rows;
    uint8_t place;
    uint32_t frame;
    uint64_t offset, nbytes, flags;
} kp_record;

enum { KP_DATA = 2, KP_INLINE = 1, KP_INLINE_BYTES = 32 * 1024, KP_MOST_RECORDS = 65535 };

/* A request is accepted if its number is at most KP_SPAN above `low`, up to which all have arrived; requests that wait for
 * their round are at most as far below it. As messages.SPAN. */
enum { KP_SPAN = 262144 };

typedef struct __attribute__((packed)) {
    char magic[4];
    uint16_t version;
    uint8_t kind, flags;
    uint64_t job;
    int32_t store, rank;
    uint64_t incarnation, epoch, received;
    uint32_t records;
} kp_head;

_Static_assert(sizeof(kp_head) == 52 && sizeof(kp_record) == 79, "as transport/frames.py packs them");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers are sent as they lie in memory");

/* Return the bytes of a request's payload in its message. */
static inline uint64_t kp_carried(const kp_record *record)
{
    return record->place == KP_FRAME ? record->nbytes : 0;
}

#endif
