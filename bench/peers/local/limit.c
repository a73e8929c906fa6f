/* The limit by the memory of this machine: the traffic of each case in C with OpenMP, and nothing else.
 *
 * Built by the bench with `cc -O3 -march=native -fopenmp`. float32. The caller tries each `how` and each number
 * of threads, and uses the best for each case.
 */
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Ordinary stores; streaming stores; streaming stores, block by block through a buffer in the first-level cache. */
enum { NORMAL, STREAM, BLOCKS };
enum { PLAIN, SGD_MOMENTUM, ADAM };
enum { MAX_VALUES = 16, CHUNK = 32 * 1024, BLOCK = 1024, LANES = 16, STEP = 4 * LANES };

typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));

/* One key. Stores to the first `streamed` outs may be streaming; the other outs are sources, and in the cache. */
typedef struct {
    ptrdiff_t n;
    int k, m, streamed;
    const float *src[MAX_VALUES];
    float *out[MAX_VALUES + 1];
    float *w, *s1, *s2;
} item;

/* For Adam lr is the corrected rate of the step. */
typedef struct {
    float lr, mu, wd, beta1, beta2, eps;
} params;

static inline void stream(float *p, vec v)
{
#if defined(__AVX512F__)
    _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
    _mm256_stream_ps(p, _mm256_loadu_ps((float *)&v));
    _mm256_stream_ps(p + 8, _mm256_loadu_ps((float *)&v + 8));
#else
    *(vec *)p = v;
#endif
}

static inline void fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static inline ptrdiff_t to_line(const float *p)
{
    return (ptrdiff_t)((-(uintptr_t)p & 63) / sizeof(float));
}

static void sum_scalar(const item *it, ptrdiff_t i, ptrdiff_t end)
{
    for (; i < end; i++) {
        float s = it->src[0][i];
        for (int j = 1; j < it->k; j++)
            s += it->src[j][i];
        for (int j = 0; j < it->m; j++)
            it->out[j][i] = s;
    }
}

/* outs = sum of sources, from registers; `past`: streaming stores to the outs that allow them. */
static inline __attribute__((always_inline)) void sum_k(const item *it, ptrdiff_t i, ptrdiff_t end, const int k, const int past)
{
    const float *s[MAX_VALUES];
    for (int j = 0; j < k; j++)
        s[j] = it->src[j];
    for (; i + STEP <= end; i += STEP) {
        vec sum[4];
        for (int l = 0; l < 4; l++)
            sum[l] = *(const vec *)(s[0] + i + l * LANES);
        for (int j = 1; j < k; j++)
            for (int l = 0; l < 4; l++)
                sum[l] += *(const vec *)(s[j] + i + l * LANES);
        int j = 0;
        for (; past && j < it->streamed; j++)
            for (int l = 0; l < 4; l++)
                stream(it->out[j] + i + l * LANES, sum[l]);
        for (; j < it->m; j++)
            for (int l = 0; l < 4; l++)
                *(vec *)(it->out[j] + i + l * LANES) = sum[l];
    }
    sum_scalar(it, i, end);
}

static void sum_any(const item *it, ptrdiff_t from, ptrdiff_t end, int past)
{
    ptrdiff_t head = from + to_line(it->out[0] + from);
    if (head > end)
        head = end;
    sum_scalar(it, from, head);
#define SUM(K) case K: if (past) sum_k(it, head, end, K, 1); else sum_k(it, head, end, K, 0); break;
    switch (it->k) {
        SUM(1) SUM(2) SUM(4) SUM(8)
    default: sum_scalar(it, head, end);
    }
#undef SUM
}

static void copy_past(float *to, const float *from, ptrdiff_t n)
{
    ptrdiff_t head = to_line(to), i;
    if (head > n)
        head = n;
    memcpy(to, from, (size_t)head * sizeof *to);
    for (i = head; i + LANES <= n; i += LANES)
        stream(to + i, *(const vec *)(from + i));
    memcpy(to + i, from + i, (size_t)(n - i) * sizeof *to);
}

static void hand_out(const item *it, ptrdiff_t at, ptrdiff_t n, const float *from, int past)
{
    for (int j = 0; j < it->m; j++)
        if (past && j < it->streamed)
            copy_past(it->out[j] + at, from, n);
        else
            memcpy(it->out[j] + at, from, (size_t)n * sizeof *from);
}

static const float *block_sum(const item *it, ptrdiff_t at, ptrdiff_t n, float *sum)
{
    if (it->k == 1)
        return it->src[0] + at;
    item part = *it;
    part.m = 1;
    part.out[0] = sum - at;
    sum_any(&part, at, at + n, 0);
    return sum;
}

static void rule_momentum(ptrdiff_t n, float *restrict w, float *restrict v, const float *restrict g, const params *p)
{
    const float lr = p->lr, mu = p->mu, wd = p->wd;
    for (ptrdiff_t i = 0; i < n; i++) {
        v[i] = mu * v[i] - lr * (g[i] + wd * w[i]);
        w[i] += v[i];
    }
}

static void rule_adam(ptrdiff_t n, float *restrict w, float *restrict m, float *restrict v, const float *restrict g,
                      const params *p)
{
    const float lr = p->lr, wd = p->wd, b1 = p->beta1, b2 = p->beta2, eps = p->eps;
    for (ptrdiff_t i = 0; i < n; i++) {
        float d = g[i] + wd * w[i];
        m[i] = b1 * m[i] + (1 - b1) * d;
        v[i] = b2 * v[i] + (1 - b2) * d * d;
        w[i] -= lr * m[i] / (sqrtf(v[i]) + eps);
    }
}

static void by_blocks(const item *it, ptrdiff_t from, ptrdiff_t end, int update, int past, const params *p)
{
    _Alignas(64) float sum[BLOCK];
    for (ptrdiff_t at = from; at < end; at += BLOCK) {
        ptrdiff_t n = end - at < BLOCK ? end - at : BLOCK;
        const float *g = block_sum(it, at, n, sum);
        if (update == SGD_MOMENTUM)
            rule_momentum(n, it->w + at, it->s1 + at, g, p);
        else if (update == ADAM)
            rule_adam(n, it->w + at, it->s1 + at, it->s2 + at, g, p);
        hand_out(it, at, n, update == PLAIN ? g : it->w + at, past);
    }
}

/* Registers can be streamed directly to outs with the same offset in a cache line. */
static int reach_together(const item *it)
{
    for (int j = 1; j < it->streamed; j++)
        if (to_line(it->out[j]) != to_line(it->out[0]))
            return 0;
    return 1;
}

static void do_chunk(const item *it, ptrdiff_t chunk, int update, int how, const params *p)
{
    const float *anchor = it->m ? it->out[0] : it->w;
    ptrdiff_t lead = to_line(anchor), from = chunk ? lead + chunk * CHUNK : 0, end = lead + (chunk + 1) * CHUNK;
    if (end > it->n)
        end = it->n;
    if (from >= end)
        return;
    if (update != PLAIN || how == BLOCKS || (how == STREAM && !reach_together(it)))
        by_blocks(it, from, end, update, how != NORMAL, p);
    else
        sum_any(it, from, end, how == STREAM);
    if (how != NORMAL)
        fence();
}

typedef struct {
    int item;
    ptrdiff_t chunk;
} piece;

static ptrdiff_t cut(const item *items, int n_items, piece *pieces)
{
    ptrdiff_t count = 0;
    for (int i = 0; i < n_items; i++)
        for (ptrdiff_t c = 0; c * CHUNK < items[i].n; c++) {
            if (pieces)
                pieces[count] = (piece){i, c};
            count++;
        }
    return count;
}

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Return the corrected learning rate of step t. */
static params at_step(const params *p, int update, int t)
{
    params q = *p;
    if (update == ADAM)
        q.lr = (float)(p->lr * sqrt(1 - pow(p->beta2, t)) / (1 - pow(p->beta1, t)));
    return q;
}

/* Measure the seconds of each of `repeats` calls; `step` is the number of the first call. With `fixed` the threads'
 * shares are fixed; otherwise threads claim chunks in turn. */
void limit_run(const item *items, int n_items, int update, int how, int threads, int fixed, const params *p, int step,
               int repeats, double *seconds)
{
    ptrdiff_t n = cut(items, n_items, NULL);
    piece pieces[n > 0 ? n : 1];
    cut(items, n_items, pieces);
    omp_set_schedule(fixed ? omp_sched_static : omp_sched_dynamic, fixed ? 0 : 1);
    for (int r = 0; r < repeats; r++) {
        double start = seconds_now();
        params q = at_step(p, update, step + r);
        if (threads < 2)
            for (ptrdiff_t c = 0; c < n; c++)
                do_chunk(&items[pieces[c].item], pieces[c].chunk, update, how, &q);
        else {
#pragma omp parallel for num_threads(threads) schedule(runtime)
            for (ptrdiff_t c = 0; c < n; c++)
                do_chunk(&items[pieces[c].item], pieces[c].chunk, update, how, &q);
        }
        seconds[r] = seconds_now() - start;
    }
}

/* Bare passes. */
enum { READ, WRITE, COPY, SCALE };

static float pass(int kind, float *a, const float *b, ptrdiff_t n, int past)
{
    const vec one = 1.0f - (vec){0}; /* not zeros: some machines write zeros three times as fast */
    vec s[4] = {one, one, one, one};
    float total = 0;
    for (ptrdiff_t i = 0; i + STEP <= n; i += STEP)
        for (int l = 0; l < 4; l++) {
            float *to = a + i + l * LANES;
            const vec *from = (const vec *)(kind == COPY ? b + i + l * LANES : to);
            if (kind == READ)
                s[l] += *from;
            else if (kind == SCALE)
                *(vec *)to = -*from;
            else if (past)
                stream(to, kind == COPY ? *from : s[l]);
            else
                *(vec *)to = kind == COPY ? *from : s[l];
        }
    for (int l = 0; l < LANES; l++)
        total += s[0][l] + s[1][l] + s[2][l] + s[3][l];
    return total;
}

/* a is aligned to 64 bytes. */
float limit_stream(int kind, float *a, const float *b, ptrdiff_t n, int past, int threads, int repeats, double *seconds)
{
    float total = 0;
    for (int r = 0; r < repeats; r++) {
        double start = seconds_now();
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
        for (ptrdiff_t c = 0; c < n / CHUNK; c++)
            total += pass(kind, a + c * CHUNK, b + c * CHUNK, CHUNK, past);
        fence();
        seconds[r] = seconds_now() - start;
    }
    return total;
}
