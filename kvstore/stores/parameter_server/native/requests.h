/* Requests as C has them, with the numbers of protocol/messages.py. */
#ifndef KP_REQUESTS_H
#define KP_REQUESTS_H

#include <stdint.h>

/* As messages.Kind, PayloadLocation, and PROBE. */
enum kp_kind {
    KP_INIT = 1, KP_ASSIGN, KP_PUSH, KP_PULL, KP_PUSHPULL, KP_PULL_ROWS, KP_FETCH_STATE, KP_PUT_STATE, KP_FORGET,
    KP_LAST_ROUND, KP_DONE = 20, KP_VALUE
};
enum kp_place { KP_NOWHERE, KP_FRAME };
enum kp_flag { KP_PROBE = 2 };

/* As messages.Record. */
typedef struct {
    uint8_t kind, coding, place;
    uint32_t slice, version, frame;
    uint64_t sequence, round, clock, offset, nbytes, flags;
    double threshold;
    int64_t rows;
} kp_record;

/* Bytes of a request's payload in its message. */
static inline uint64_t kp_carried(const kp_record *record)
{
    return record->place == KP_FRAME ? record->nbytes : 0;
}

#endif
