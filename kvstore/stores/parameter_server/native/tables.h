/* The rows of a row-sparse slice, if all of them are stored, in order, and rounds update some of them. */
#ifndef KP_TABLES_H
#define KP_TABLES_H

#include "gather_rows.h"
#include "values.h"

typedef struct {
    char *at; /* NULL: only Python knows the rows */
    int dtype;
    int64_t n, first; /* rows, and the id of the first one */
    ptrdiff_t cols;
    size_t row_bytes;
    kp_plan plan;
    /* Memory for a round of `most_parts` parts, with `capacity` rows in all. */
    int most_parts;
    int64_t capacity, kept_capacity;
    int64_t *ids, *maps; /* the updated rows; for each part, the index of its row for each of them */
    char *kept;          /* copies of these rows before the round; of rounds of several parts */
    /* Since Python has last read them: */
    int64_t kept_after, n_kept; /* the round after which the rows were as in `kept`, or -1: none; and their number */
    uint8_t has_kept, changed;
    kp_deferred *deferred; /* rows that are sent from here; they are copied before one changes */
} kp_table;

/* Return whether ids ascend strictly, and are all of rows of the table. */
static int kp_are_ids(const kp_table *t, const int64_t *ids, int64_t n)
{
    int wrong = n > 0 && (ids[0] < t->first || ids[n - 1] - t->first >= t->n);
    for (int64_t i = 1; i < n; i++)
        wrong |= ids[i] <= ids[i - 1];
    return !wrong;
}

#endif
