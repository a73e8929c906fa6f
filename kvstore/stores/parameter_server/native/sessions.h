/* The workers of a store at a server: which of their numbered requests have come, and what they are answered. */
#ifndef KP_SESSIONS_H
#define KP_SESSIONS_H

#include "buffers.h"
#include "requests.h"

enum { KP_WINDOW = 2 * KP_SPAN };

/* Numbers of which no two are KP_WINDOW apart. */
typedef struct {
    uint64_t *bits; /* made when first needed */
    uint32_t count;
} kp_numbers;

static inline int kp_has(const kp_numbers *set, uint64_t number)
{
    return set->count && set->bits[number % KP_WINDOW / 64] >> number % 64 & 1;
}

static int kp_insert(kp_numbers *set, uint64_t number)
{
    if (!set->bits && !(set->bits = (uint64_t *)calloc(KP_WINDOW / 64, 8)))
        return -1;
    if (!kp_has(set, number)) {
        set->bits[number % KP_WINDOW / 64] |= (uint64_t)1 << number % 64;
        set->count++;
    }
    return 0;
}

static void kp_erase(kp_numbers *set, uint64_t number)
{
    if (kp_has(set, number)) {
        set->bits[number % KP_WINDOW / 64] &= ~((uint64_t)1 << number % 64);
        set->count--;
    }
}

/* Which requests have come: all up to `low`, and those in `above`. */
typedef struct {
    uint64_t low;
    kp_numbers above;
} kp_duplicates;

static inline int kp_has_come(const kp_duplicates *d, uint64_t number)
{
    return number <= d->low || (number <= d->low + KP_SPAN && kp_has(&d->above, number));
}

/* Note a number that has not come, of at most `low` + KP_SPAN. 0, or -1 where there is no memory. */
static int kp_come(kp_duplicates *d, uint64_t number)
{
    if (number != d->low + 1)
        return kp_insert(&d->above, number);
    for (d->low++; kp_has(&d->above, d->low + 1); d->low++)
        kp_erase(&d->above, d->low + 1);
    return 0;
}

/* All numbers below `end` count as come. */
static void kp_skip(kp_duplicates *d, uint64_t end)
{
    for (; d->low + 1 < end && d->above.count; d->low++)
        kp_erase(&d->above, d->low + 1);
    if (d->low + 1 < end)
        d->low = end - 1;
    for (; kp_has(&d->above, d->low + 1); d->low++)
        kp_erase(&d->above, d->low + 1);
}

/* One request's answer, until the step is over. */
typedef struct {
    enum kp_kind kind;
    kp_record request;
    uint64_t round;
    kp_buffer *detail; /* of a Python object, or what the request carried; may be NULL */
} kp_answer;

typedef struct kp_session {
    void *owner; /* the Python object, which has it */
    int32_t store, rank;
    int32_t seat; /* for whom it pushes: for itself, or for its host */
    int of_host;  /* rounds may go on without this worker, by another of its host */
    uint64_t incarnation, epoch;
    int gone, report, touched;
    int overtaken; /* Python keeps requests that wait for others, and is to have these */
    uint64_t received, reported; /* bytes of its requests */
    kp_duplicates duplicates;
    kp_numbers waiting; /* sequences without an answer */
    kp_answer *answers;
    size_t n_answers, answers_room;
    const void *replier; /* how it is answered without Python, where that can be */
    struct kp_session *next; /* touched by the same step */
} kp_session;

static void kp_forget_answers(kp_session *s)
{
    for (size_t i = 0; i < s->n_answers; i++)
        kp_drop(s->answers[i].detail);
    s->n_answers = 0;
}

static void kp_close_session(kp_session *s)
{
    kp_forget_answers(s);
    free(s->answers);
    free(s->duplicates.above.bits);
    free(s->waiting.bits);
    memset(s, 0, sizeof *s);
}

#endif
