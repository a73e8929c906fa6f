/* Rounds of rows of a table: parts are merged by their ids, and their sums update the rows in place.
 *
 * As in sums.h: exclusive use of the slice; blocks only for the kernels. */
#ifndef KP_ROW_ROUNDS_H
#define KP_ROW_ROUNDS_H

#include "merge.h" /* of the kernels */
#include "sums.h"

enum { KP_MOST_ROW_PARTS = 64 };

static const int64_t *kp_part_ids(const kp_part *part)
{
    return (const int64_t *)part->at;
}

/* Return whether a part fits the table. */
static int kp_fits_table(const kp_table *t, const kp_part *part)
{
    const kp_record *r = &part->request;
    if (!part->at || !part->rows || r->coding || r->rows < 0 || r->rows > t->capacity || r->version > t->plan.version ||
        r->clock >= KP_MOST_CLOCK || r->nbytes != (uint64_t)r->rows * (8 + t->row_bytes))
        return 0;
    return (uintptr_t)part->at % 8 == 0 && (uintptr_t)part->rows % (size_t)kv_itemsize[t->dtype] == 0 &&
           kp_are_ids(t, kp_part_ids(part), r->rows);
}

/* Return whether the next round can be done here: its memory is there only after Python has done one of that size. */
static int kp_can_update_rows(const kp_slice *slice, const kp_open *open)
{
    const kp_table *t = slice->table;
    int64_t rows = 0;
    if (!t->at || !t->plan.counts || open->n > t->most_parts || slice->special || slice->held.n)
        return 0;
    for (int i = 0; i < open->n; i++) {
        if (!kp_fits_table(t, &open->parts[i]))
            return 0;
        rows += open->parts[i].request.rows;
    }
    return rows > 0 && rows <= t->capacity && (open->n == 1 || rows <= t->kept_capacity);
}

/* Merge the rows of all parts to `t->ids`, relative to the first row of the table. Returns their number. */
static ptrdiff_t kp_merge_parts(const kp_table *t, const kp_open *open, const int64_t **maps, char **rows)
{
    const int64_t *ids[KP_MOST_ROW_PARTS];
    ptrdiff_t counts[KP_MOST_ROW_PARTS], at[KP_MOST_ROW_PARTS];
    for (int i = 0; i < open->n; i++) {
        ids[i] = kp_part_ids(&open->parts[i]);
        counts[i] = (ptrdiff_t)open->parts[i].request.rows;
        rows[i] = (char *)open->parts[i].rows;
        maps[i] = t->maps + i * t->capacity;
    }
    ptrdiff_t n = kv_merge(ids, counts, open->n, t->ids, (int64_t *const *)maps, at);
    for (ptrdiff_t u = 0; t->first && u < n; u++)
        t->ids[u] -= t->first;
    return n;
}

static void kp_enter_rows(const kp_sums *sums, const kp_slice *slice, uint64_t nbytes)
{
    kv_about about = {kp_slice_number(slice->store, slice->id), slice->round + 1, nbytes, KV_NOBODY, sums->observer.store};
    kv_enter(sums->observer.counters, KV_UPDATING, about);
}

/* Do the next round of a slice, for which `kp_can_update_rows` holds; cannot fail. */
static void kp_update_rows(const kp_sums *sums, const kp_slice *slice, const kp_open *open)
{
    kp_table *t = slice->table;
    kp_copy_deferred(&t->deferred);
    const int64_t *maps[KP_MOST_ROW_PARTS];
    char *rows[KP_MOST_ROW_PARTS];
    kv_activity before = kv_doing();
    kv_rows job = {.dtype = t->dtype, .rule = t->plan.rule, .k = open->n, .n_states = t->plan.n_states, .cols = t->cols,
                   .n_rows = kp_merge_parts(t, open, maps, rows), .src = rows, .map = maps, .dst_row = t->ids,
                   .dst = t->at, .before = open->n > 1 ? t->kept : NULL, .p = t->plan.p};
    memcpy(job.states, t->plan.states, sizeof job.states);
    if (kv_is_timed(sums->observer.counters))
        kp_enter_rows(sums, slice, (uint64_t)job.n_rows * t->row_bytes);
    sums->run_rows(&job, NULL, *sums->threads);
    kv_go_back(&before);
    kp_count_update(&t->plan, open);
    t->kept_after = job.before ? (int64_t)slice->round : -1;
    t->n_kept = job.before ? job.n_rows : 0;
    t->has_kept = t->changed = 1;
}

#endif
