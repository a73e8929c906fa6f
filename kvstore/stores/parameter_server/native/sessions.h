/* The workers of a store at a server: the numbers of their requests that have arrived, and their answers.
 *
 * Fencing, of workers that were replaced or are no members, is in server/store_machine.py. All functions need exclusive use
 * of the store's state, and none blocks. */
#ifndef KP_SESSIONS_H
#define KP_SESSIONS_H

#include "buffers.h"
#include "wire_format.h"

enum { KP_WINDOW = 2 * KP_SPAN };

/* A set of numbers that are less than KP_WINDOW apart. */
typedef struct {
    uint64_t *bits; /* made when first needed */
    uint32_t count;
} kp_numbers;

/* Return whether a number is in the set. */
static inline int kp_has_number(const kp_numbers *set, uint64_t number)
{
    return set->count && set->bits[number % KP_WINDOW / 64] >> number % 64 & 1;
}

/* Insert a number. 0; -1: no memory. */
static int kp_insert_number(kp_numbers *set, uint64_t number)
{
    if (!set->bits && !(set->bits = (uint64_t *)calloc(KP_WINDOW / 64, 8)))
        return -1;
    if (!kp_has_number(set, number)) {
        set->bits[number % KP_WINDOW / 64] |= (uint64_t)1 << number % 64;
        set->count++;
    }
    return 0;
}

/* Remove a number, if it is in the set. */
static void kp_erase_number(kp_numbers *set, uint64_t number)
{
    if (kp_has_number(set, number)) {
        set->bits[number % KP_WINDOW / 64] &= ~((uint64_t)1 << number % 64);
        set->count--;
    }
}

/* The duplicate filter: all numbers up to `low` have arrived, and those in `above`. */
typedef struct {
    uint64_t low;
    kp_numbers above;
} kp_duplicates;

/* Return whether a number has arrived. */
static inline int kp_has_arrived(const kp_duplicates *d, uint64_t number)
{
    return number <= d->low || (number <= d->low + KP_SPAN && kp_has_number(&d->above, number));
}

/* Add a number that has not arrived, at most `low` + KP_SPAN. 0; -1: no memory. */
static int kp_mark_arrived(kp_duplicates *d, uint64_t number)
{
    if (number != d->low + 1)
        return kp_insert_number(&d->above, number);
    for (d->low++; kp_has_number(&d->above, d->low + 1); d->low++)
        kp_erase_number(&d->above, d->low + 1);
    return 0;
}

/* Count all numbers below `end` as arrived. */
static void kp_skip_to(kp_duplicates *d, uint64_t end)
{
    for (; d->low + 1 < end && d->above.count; d->low++)
        kp_erase_number(&d->above, d->low + 1);
    if (d->low + 1 < end)
        d->low = end - 1;
    for (; kp_has_number(&d->above, d->low + 1); d->low++)
        kp_erase_number(&d->above, d->low + 1);
}

/* One request's answer, until the end of the step. */
typedef struct {
    enum kp_kind kind;
    kp_record request;
    uint64_t round;
    kp_buffer *detail; /* of a Python object, or the payload of the request; may be NULL */
} kp_answer;

typedef struct kp_session {
    void *owner; /* the Python object that contains this struct */
    int32_t store, rank;
    int32_t seat; /* the rank under which its parts count: its own, or that of its host */
    int of_host;  /* another worker of its host may push in its place: rounds may proceed without this worker */
    uint64_t incarnation, epoch;
    int gone, report, touched;
    int overtaken; /* Python has stored later requests, which wait for earlier ones: requests are handled there */
    uint64_t received, reported; /* bytes of its requests */
    kp_duplicates duplicates;
    kp_numbers waiting; /* sequences of unanswered requests */
    kp_answer *answers;
    size_t n_answers, answers_capacity;
    const void *replier; /* how it is answered in C; NULL: it is not */
    struct kp_session *next; /* in the list of sessions that this step has touched */
} kp_session;

/* Drop the answers of this step. */
static void kp_forget_answers(kp_session *s)
{
    for (size_t i = 0; i < s->n_answers; i++)
        kp_release(s->answers[i].detail);
    s->n_answers = 0;
}

/* Release all memory of a session, and zero it. */
static void kp_close_session(kp_session *s)
{
    kp_forget_answers(s);
    free(s->answers);
    free(s->duplicates.above.bits);
    free(s->waiting.bits);
    memset(s, 0, sizeof *s);
}

#endif
