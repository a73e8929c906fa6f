/* The average of the gradients of two workers of one host, in C: no store, no keys, no detection of losses.
 *
 * Block by block; each worker owns one half of each block. In one step a worker copies the other worker's half of block k
 * to shared memory, averages its own half of block k - 1, and copies the average of block k - 2 back. So each number is
 * read from memory once and written once; all other accesses are in caches. */
#include "../group/gate.h"
#include <stddef.h>
#include <string.h>

enum { SLOTS = 3 };

typedef struct {
    gate *gate;
    int rank;
    ptrdiff_t tensors, numbers, block; /* number of arrays; of all their numbers; of the numbers of a block */
    float *const *arrays;
    const ptrdiff_t *ends; /* end of each array, in numbers from the beginning of the first array */
    float *shared;         /* SLOTS halves of blocks for each worker */
} pair;

enum act { GIVE, AVERAGE, TAKE };

static void act_on(enum act act, float *restrict mine, float *restrict shared, ptrdiff_t n)
{
    if (act == GIVE)
        memcpy(shared, mine, (size_t)n * sizeof *mine);
    else if (act == TAKE)
        memcpy(mine, shared, (size_t)n * sizeof *mine);
    else
        for (ptrdiff_t i = 0; i < n; i++)
            mine[i] = shared[i] = 0.5f * mine[i] + 0.5f * shared[i];
}

/* Process the numbers from..end of all arrays as one array; *at is an array that does not begin after `from`. */
static void walk(const pair *p, enum act act, ptrdiff_t *at, ptrdiff_t from, ptrdiff_t end, float *shared)
{
    while (from < end) {
        while (p->ends[*at] <= from)
            ++*at;
        ptrdiff_t begin = *at ? p->ends[*at - 1] : 0, until = p->ends[*at] < end ? p->ends[*at] : end;
        act_on(act, p->arrays[*at] + (from - begin), shared, until - from);
        shared += until - from;
        from = until;
    }
}

static void act_on_half(const pair *p, enum act act, ptrdiff_t *at, ptrdiff_t k)
{
    ptrdiff_t from = k * p->block, left = p->numbers - from, n = left < p->block ? left : p->block;
    int owner = act == AVERAGE ? p->rank : !p->rank, giver = act == AVERAGE ? !p->rank : p->rank;
    ptrdiff_t middle = from + (n + 1) / 2;
    float *shared = p->shared + (giver * SLOTS + k % SLOTS) * (p->block / 2);
    if (owner)
        walk(p, act, at, middle, from + n, shared);
    else
        walk(p, act, at, from, middle, shared);
}

/* Replace the numbers of both workers by their mean; return 0 on success. */
int pair_average(const pair *p)
{
    ptrdiff_t blocks = (p->numbers + p->block - 1) / p->block, at[3] = {0};
    for (ptrdiff_t k = 0; k < blocks + 2; k++) {
        if (k > 1)
            act_on_half(p, TAKE, &at[TAKE], k - 2);
        if (k > 0 && k <= blocks)
            act_on_half(p, AVERAGE, &at[AVERAGE], k - 1);
        if (k < blocks)
            act_on_half(p, GIVE, &at[GIVE], k);
        if (k <= blocks && gate_pass(p->gate, 2))
            return -1;
    }
    return 0;
}
