/* The union of sorted lists of row ids, and the position of each row in each list. The functions do not block; their
 * callers pass valid arrays. */
#ifndef KV_MERGE_H
#define KV_MERGE_H

#include "isa.h"

/* Merge two lists. ids[s] has n[s] ascending unique ids. Writes the union to `out` (space for the sum of n) and to
 * map[s][u] the position of out[u] in list s, or -1. Without branches on the data, which the processor cannot
 * predict. */
static ptrdiff_t kv_merge2(const int64_t *const *ids, const ptrdiff_t *n, int64_t *out, int64_t *const *map)
{
    const int64_t *a = ids[0], *b = ids[1];
    ptrdiff_t i = 0, j = 0, u = 0;
    while (i < n[0] && j < n[1]) {
        int64_t x = a[i], y = b[j], in_a = x <= y, in_b = y <= x;
        out[u] = in_a ? x : y;
        map[0][u] = in_a ? i : -1;
        map[1][u] = in_b ? j : -1;
        i += in_a;
        j += in_b;
        u++;
    }
    for (; i < n[0]; i++, u++) {
        out[u] = a[i];
        map[0][u] = i;
        map[1][u] = -1;
    }
    for (; j < n[1]; j++, u++) {
        out[u] = b[j];
        map[0][u] = -1;
        map[1][u] = j;
    }
    return u;
}

/* As `kv_merge2`, for any number of lists; at[k] is scratch. A list at its end counts as holding the largest possible
 * id. */
static ptrdiff_t kv_merge(const int64_t *const *ids, const ptrdiff_t *n, int k, int64_t *out, int64_t *const *map,
                          ptrdiff_t *at)
{
    ptrdiff_t u = 0;
    if (k == 2)
        return kv_merge2(ids, n, out, map);
    memset(at, 0, (size_t)k * sizeof(*at));
    for (;;) {
        int64_t low = INT64_MAX;
        for (int s = 0; s < k; s++) {
            int64_t id = at[s] < n[s] ? ids[s][at[s]] : INT64_MAX;
            low = id < low ? id : low;
        }
        if (low == INT64_MAX)
            return u;
        out[u] = low;
        for (int s = 0; s < k; s++) {
            int64_t has = at[s] < n[s] && ids[s][at[s]] == low;
            map[s][u] = has ? at[s] : -1;
            at[s] += has;
        }
        u++;
    }
}

/* Find the positions of the sorted `wanted` ids in the sorted `have`, -1 if absent. The next id is usually near the
 * last: it is searched one by one, with predictable branches; then in steps that double, and between the last two. */
static void kv_locate(const int64_t *have, ptrdiff_t n_have, const int64_t *wanted, ptrdiff_t n, int64_t *position)
{
    ptrdiff_t low = 0; /* all ids before it are smaller */
    for (ptrdiff_t i = 0; i < n; i++) {
        ptrdiff_t step = 1, high, near = low + KV_NEAR_IDS < n_have ? low + KV_NEAR_IDS : n_have;
        while (low < near && have[low] < wanted[i])
            low++;
        for (; step <= n_have - low && have[low + step - 1] < wanted[i]; step *= 2)
            low += step;
        high = step <= n_have - low ? low + step - 1 : n_have;
        while (low < high) {
            ptrdiff_t middle = low + (high - low) / 2;
            if (have[middle] < wanted[i])
                low = middle + 1;
            else
                high = middle;
        }
        position[i] = low < n_have && have[low] == wanted[i] ? low : -1;
    }
}

/* Remove repetitions from ascending ids, in place; returns the count of the remaining ones. */
static ptrdiff_t kv_unique(int64_t *ids, ptrdiff_t n)
{
    ptrdiff_t kept = 0;
    int64_t last = -1;
    for (ptrdiff_t i = 0; i < n; i++) {
        int64_t id = ids[i];
        ids[kept] = id;
        kept += kept == 0 || id != last;
        last = id;
    }
    return kept;
}

/* Sort ids and remove repetitions, in place, by marks in a map of one bit for each of `rows` rows. Returns the count
 * of the remaining ids; -1: an id is out of range, and nothing has changed; -2: no memory. */
static ptrdiff_t kv_unique_by_map(int64_t *ids, ptrdiff_t n, int64_t rows)
{
    int64_t words = (rows + 63) / 64;
    uint64_t *map = (uint64_t *)calloc((size_t)words + 1, sizeof *map);
    ptrdiff_t kept = 0, outside = 0;
    if (!map)
        return -2;
    for (ptrdiff_t i = 0; i < n; i++)
        outside += (uint64_t)ids[i] >= (uint64_t)rows;
    for (ptrdiff_t i = 0; i < n && !outside; i++)
        map[ids[i] >> 6] |= (uint64_t)1 << (ids[i] & 63);
    for (int64_t w = 0; w < words && !outside; w++)
        for (uint64_t bits = map[w]; bits; bits &= bits - 1)
            ids[kept++] = w * 64 + __builtin_ctzll(bits);
    free(map);
    return outside ? -1 : kept;
}

#endif
