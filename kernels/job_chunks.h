/* The division of a call into chunks for the helper threads.
 *
 * The functions kv_run_* block until the job is done. Any thread may call them, without the interpreter's lock; the
 * pointers of a job are valid, and have the sizes that the job states.
 */
#ifndef KV_JOB_CHUNKS_H
#define KV_JOB_CHUNKS_H

#include <unistd.h>

#include "levels.h"
#include "merge.h"
#include "overlap.h"
#include "helper_threads.h"

enum {
    KV_CHUNK_BYTES = 128 * 1024,
    KV_SERIAL_BYTES = 192 * 1024,
    KV_SHARE_OF_CACHE = 4 << 20 /* of a core; docs/decisions/0003 has the measurements */
};

static const kv_level *kv_now; /* the level in use */
static ptrdiff_t kv_stream_bytes;

/* Return the number of processors that this process may use. */
static int kv_cpus(void)
{
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return CPU_COUNT(&set);
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int)n : 1;
}

/* Return the bytes from which on a job of `threads` threads does not stay in the cache. The shares of their cores
 * count, not the whole cache: other cores use theirs, for other processes or, in a virtual machine, for other
 * machines. */
static ptrdiff_t kv_cache_bytes(int threads)
{
    long l3 = -1;
#if defined(_SC_LEVEL3_CACHE_SIZE)
    l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    ptrdiff_t share = (ptrdiff_t)threads * KV_SHARE_OF_CACHE;
    ptrdiff_t usual = (ptrdiff_t)32 << 20; /* servers report the sum over core complexes; one core sees its own */
    ptrdiff_t most = share < usual ? share : usual;
    return l3 > 0 && l3 < most ? (ptrdiff_t)l3 : most;
}

/* Set the level in use and the size of the cache; the module calls this once, when it is loaded. */
static void kv_run_init(void)
{
    kv_now = kv_all_levels[kv_usable_levels() - 1];
    kv_stream_bytes = kv_cache_bytes(kv_cpus());
}

static inline ptrdiff_t kv_chunk_elements(int dtype)
{
    return KV_CHUNK_BYTES / kv_itemsize[dtype];
}

/* Dense items: all chunks of an item but the first begin with a cache line of the written array (the first out; the
 * caller's arrays are mostly aligned alike). */
typedef struct {
    kv_item *items;
    ptrdiff_t n;
} kv_dense_job;

static void kv_dense_task(void *context, ptrdiff_t chunk)
{
    const kv_dense_job *job = (const kv_dense_job *)context;
    ptrdiff_t low = 0, high = job->n - 1;
    while (low < high) {
        ptrdiff_t middle = (low + high + 1) / 2;
        if (job->items[middle].first_chunk <= chunk)
            low = middle;
        else
            high = middle - 1;
    }
    const kv_item *it = &job->items[low];
    ptrdiff_t size = kv_chunk_elements(it->dtype), c = chunk - it->first_chunk;
    ptrdiff_t from = c ? it->lead + c * size : 0, to = it->lead + (c + 1) * size;
    kv_now->item_span(it, from, to < it->n ? to : it->n);
    if (it->stream)
        kv_now->fence();
}

/* Return the array that should begin with a cache line: the first that is written and not read. */
static const char *kv_anchor(const kv_item *it)
{
    for (int i = 0; i < it->m; i++) {
        int j = 0;
        while (j < it->k && it->src[j] != it->out[i])
            j++;
        if (j == it->k)
            return it->out[i];
    }
    return it->dst ? it->dst : it->out[0];
}

/* Run items that are independent of each other. */
static void kv_run_all(kv_item *items, ptrdiff_t n, ptrdiff_t bytes, int threads)
{
    ptrdiff_t chunks = 0;
    for (ptrdiff_t i = 0; i < n; i++) {
        kv_item *it = &items[i];
        ptrdiff_t size = kv_itemsize[it->dtype];
        it->stream = bytes >= kv_stream_bytes;
        /* Packed sources are cut at whole bytes and words, wherever the outs begin. */
        it->lead = it->coding ? 0 : (ptrdiff_t)(-(uintptr_t)kv_anchor(it) & (KV_LINE - 1)) / size;
        it->first_chunk = chunks;
        ptrdiff_t rest = it->n - it->lead, chunk = kv_chunk_elements(it->dtype);
        chunks += rest > 0 ? (rest + chunk - 1) / chunk : it->n > 0;
    }
    kv_dense_job job = {items, n};
    if (bytes < KV_SERIAL_BYTES)
        threads = 1;
    kv_parallel(kv_dense_task, &job, chunks, threads);
}

/* Run items that overlap one after the other: first all sums and updates, then all outs, as a push and a pull would. */
static void kv_run_in_order(kv_item *items, ptrdiff_t n, ptrdiff_t bytes, int threads)
{
    for (ptrdiff_t i = 0; i < n; i++) {
        kv_item push = items[i];
        push.m = 0;
        if (push.dst)
            kv_run_all(&push, 1, bytes, threads);
    }
    for (ptrdiff_t i = 0; i < n; i++)
        for (int j = 0; j < items[i].m; j++) {
            kv_item pull = items[i];
            pull.rule = -1;
            pull.n_states = 0;
            pull.m = 1;
            pull.out = &items[i].out[j];
            pull.dst = NULL;
            if (items[i].dst) {
                pull.k = 1;
                pull.src = &items[i].dst;
                pull.coding = NULL;
            }
            kv_run_all(&pull, 1, bytes, threads);
        }
}

/* Run dense items. -1: there is no memory for the check of overlaps, and nothing has changed. */
static int kv_run_dense(kv_item *items, ptrdiff_t n, ptrdiff_t bytes, int threads)
{
    int independent = kv_independent(items, n);
    if (independent < 0)
        return -1;
    if (independent)
        kv_run_all(items, n, bytes, threads);
    else
        kv_run_in_order(items, n, bytes, threads);
    return 0;
}

/* Packing */
static void kv_encode_task(void *context, ptrdiff_t chunk)
{
    const kv_encoding *job = (const kv_encoding *)context;
    ptrdiff_t step = kv_chunk_elements(KV_F32), end = (chunk + 1) * step;
    kv_now->encode_span(job, chunk * step, end < job->n ? end : job->n);
}

/* Pack a sum of gradients. Cannot fail. */
static void kv_run_encode(kv_encoding *job, int threads)
{
    ptrdiff_t step = kv_chunk_elements(KV_F32), whole = kv_encoded_bytes(job->code, job->n);
    if (whole >= 4 && job->code != KV_PLAIN)
        memset(job->to + (whole - 1) / 4 * 4, 0, (size_t)(whole - (whole - 1) / 4 * 4)); /* the padding */
    kv_parallel(kv_encode_task, job, (job->n + step - 1) / step,
                job->n * 4 * (job->k + 1) < KV_SERIAL_BYTES ? 1 : threads);
}

/* Rows */
typedef struct {
    const kv_rows *rows;
    const kv_group *group;
    ptrdiff_t n, step;
} kv_rows_job;

static void kv_rows_task(void *context, ptrdiff_t chunk)
{
    const kv_rows_job *job = (const kv_rows_job *)context;
    ptrdiff_t from = chunk * job->step, to = from + job->step;
    if (job->group)
        kv_now->group_span(job->group, from, to < job->n ? to : job->n);
    else
        kv_now->rows_span(job->rows, from, to < job->n ? to : job->n);
    if (job->rows && job->rows->before)
        kv_now->fence();
}

/* Sum or update rows, or update groups; one of the two jobs is NULL. The ids are in range. Cannot fail. */
static void kv_run_rows(const kv_rows *rows, const kv_group *group, int threads)
{
    int dtype = rows ? rows->dtype : group->dtype;
    ptrdiff_t n = rows ? rows->n_rows : group->n_rows;
    ptrdiff_t row_bytes = (rows ? rows->cols : group->cols) * kv_itemsize[dtype];
    ptrdiff_t step = row_bytes > 0 ? KV_CHUNK_BYTES / row_bytes : n;
    kv_rows_job job = {rows, group, n, step > 0 ? step : 1};
    if (n * row_bytes < KV_SERIAL_BYTES)
        threads = 1;
    kv_parallel(kv_rows_task, &job, (n + job.step - 1) / job.step, threads);
}

/* Sums: every chunk writes its own pair, and the pairs are added in order. */
typedef struct {
    int dtype;
    ptrdiff_t n;
    const char *w, *m, *v; /* m NULL: plain sum of squares of w */
    const double *p;
    double *pairs;
} kv_norm_job;

static void kv_norm_task(void *context, ptrdiff_t chunk)
{
    const kv_norm_job *job = (const kv_norm_job *)context;
    ptrdiff_t size = kv_itemsize[job->dtype], step = kv_chunk_elements(job->dtype), from = chunk * step;
    ptrdiff_t n = job->n - from < step ? job->n - from : step;
    double *pair = job->pairs + 2 * chunk;
    pair[0] = pair[1] = 0;
    if (job->m)
        kv_now->lamb_norms(job->dtype, n, job->w + from * size, job->m + from * size, job->v + from * size, job->p, pair);
    else
        pair[0] = kv_now->sumsq(job->dtype, job->w + from * size, n);
}

/* Compute sums of squares. -1: there is no memory; `sums` is then 0. */
static int kv_run_norm(kv_norm_job *job, double *sums, int threads)
{
    ptrdiff_t step = kv_chunk_elements(job->dtype), chunks = (job->n + step - 1) / step;
    sums[0] = sums[1] = 0;
    job->pairs = (double *)malloc((size_t)(chunks ? chunks : 1) * 2 * sizeof(double));
    if (!job->pairs)
        return -1;
    kv_parallel(kv_norm_task, job, chunks, job->n * kv_itemsize[job->dtype] < KV_SERIAL_BYTES ? 1 : threads);
    for (ptrdiff_t c = 0; c < chunks; c++) {
        sums[0] += job->pairs[2 * c];
        sums[1] += job->pairs[2 * c + 1];
    }
    free(job->pairs);
    return 0;
}

/* Casts between 16-bit floats and float32. */
typedef struct {
    int to_dtype, from_dtype;
    char *to;
    const char *from;
    ptrdiff_t n;
} kv_cast_job;

static void kv_cast_task(void *context, ptrdiff_t chunk)
{
    const kv_cast_job *job = (const kv_cast_job *)context;
    ptrdiff_t step = KV_CHUNK_BYTES / 4, end = (chunk + 1) * step < job->n ? (chunk + 1) * step : job->n;
    for (ptrdiff_t i = chunk * step; i < end; i += KV_BLOCK)
        kv_now->cast(job->to_dtype, job->to + i * kv_itemsize[job->to_dtype], job->from_dtype,
                     job->from + i * kv_itemsize[job->from_dtype], end - i < KV_BLOCK ? end - i : KV_BLOCK);
}

/* Cast an array. Cannot fail. */
static void kv_run_cast(kv_cast_job *job, int threads)
{
    ptrdiff_t step = KV_CHUNK_BYTES / 4;
    kv_parallel(kv_cast_task, job, (job->n + step - 1) / step, job->n * 4 < KV_SERIAL_BYTES ? 1 : threads);
}

#endif
