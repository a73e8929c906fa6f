/* The limit of gradient compression by the memory of this machine, with the loops and stores of the local limit.
 *
 * Each verb has two kinds: the full work, without branches, as the compiler vectorises it; and its bytes alone: the
 * same arrays are read and written with almost no arithmetic. The caller tries all, and uses the best for each case.
 */
#include "../local/limit.c"

enum { QUANTISE, DEQUANTISE, PUSH, PULL };
enum { FETCH = BLOCKS }; /* ordinary stores, with prefetched lines */
enum { GROUP = 64, FAR_ELEMENTS = 1024 };

/* `bits` of an element when packed. `table` has the values of the elements of each byte. */
typedef struct {
    ptrdiff_t n;
    int bits, k;
    float threshold;
    const float *g[MAX_VALUES];
    float *r[MAX_VALUES];
    uint8_t *packed;
    const float *table;
    float *sum, *out[MAX_VALUES];
} task;

/* Encode one group: return the signs of the sent elements, and store the residual. */
static inline void feel(const float *restrict g, float *restrict r, int8_t *restrict sign, ptrdiff_t n, int bits, float t)
{
    if (bits == 2)
        for (ptrdiff_t i = 0; i < n; i++) {
            float s = r[i] + g[i];
            int up = (s >= t) - (s <= -t);
            r[i] = s - (float)up * t;
            sign[i] = (int8_t)up;
        }
    else
        for (ptrdiff_t i = 0; i < n; i++) {
            float s = r[i] + g[i];
            int up = s > t ? 1 : -1;
            r[i] = s - (float)up;
            sign[i] = (int8_t)up;
        }
}

/* Pack the signs of a whole group into bytes, the first sign in the highest bits. */
static inline void pack(const int8_t *restrict sign, uint8_t *restrict to, int bits)
{
    if (bits == 2)
        for (int b = 0; b < GROUP / 4; b++) {
            uint8_t code[4];
            uint32_t word;
            for (int i = 0; i < 4; i++)
                code[i] = (uint8_t)((sign[4 * b + i] != 0) * 2 + (sign[4 * b + i] > 0));
            memcpy(&word, code, 4);
            to[b] = (uint8_t)((word * 0x40100401u) >> 24);
        }
    else
        for (int b = 0; b < GROUP / 8; b++) {
            uint8_t code[8];
            uint64_t word;
            for (int i = 0; i < 8; i++)
                code[i] = sign[8 * b + i] > 0;
            memcpy(&word, code, 8);
            to[b] = (uint8_t)((word * 0x8040201008040201u) >> 56);
        }
}

static void quantise(const task *p, ptrdiff_t from, ptrdiff_t end, const int bits)
{
    _Alignas(64) int8_t sign[GROUP];
    const float *g = p->g[0];
    float *r = p->r[0];
    ptrdiff_t at = from;
    for (; at + GROUP <= end; at += GROUP) {
        feel(g + at, r + at, sign, GROUP, bits, p->threshold);
        pack(sign, p->packed + at * bits / 8, bits);
    }
    if (at < end) {
        uint8_t rest[GROUP / 4];
        memset(sign, 0, sizeof sign);
        feel(g + at, r + at, sign, end - at, bits, p->threshold);
        pack(sign, rest, bits);
        memcpy(p->packed + at * bits / 8, rest, (size_t)((end - at) * bits + 31) / 32 * 4);
    }
}

static void dequantise(const task *p, ptrdiff_t from, ptrdiff_t end, const int bits)
{
    const ptrdiff_t in_byte = 8 / bits;
    ptrdiff_t at = from;
    for (; at + in_byte <= end; at += in_byte) {
        const float *row = p->table + p->packed[at / in_byte] * in_byte;
        for (ptrdiff_t i = 0; i < in_byte; i++)
            p->sum[at + i] += row[i];
    }
    for (; at < end; at++)
        p->sum[at] += p->table[p->packed[at / in_byte] * in_byte + at % in_byte];
}

/* Sum the sent elements over the values. */
static void push(const task *p, ptrdiff_t from, ptrdiff_t end, int how)
{
    _Alignas(64) int8_t sign[BLOCK];
    _Alignas(64) float sum[BLOCK];
    const float unit = p->bits == 2 ? p->threshold : 1;
    for (ptrdiff_t at = from; at < end; at += BLOCK) {
        ptrdiff_t n = end - at < BLOCK ? end - at : BLOCK;
        for (int j = 0; j < p->k; j++) {
            feel(p->g[j] + at, p->r[j] + at, sign, n, p->bits, p->threshold);
            for (ptrdiff_t i = 0; i < n; i++)
                sum[i] = (j ? sum[i] : 0) + (float)sign[i] * unit;
        }
        if (how == STREAM)
            copy_past(p->sum + at, sum, n);
        else
            memcpy(p->sum + at, sum, (size_t)n * sizeof *sum);
    }
}

static void pull(const task *p, ptrdiff_t from, ptrdiff_t end, int how)
{
    for (int j = 0; j < p->k; j++)
        if (how == STREAM)
            copy_past(p->out[j] + from, p->sum + from, end - from);
        else
            memcpy(p->out[j] + from, p->sum + from, (size_t)(end - from) * sizeof(float));
}

static inline void fetch(const float *p, int to_write)
{
    for (int line = 0; line < GROUP; line += LANES)
        if (to_write)
            __builtin_prefetch(p + line, 1);
        else
            __builtin_prefetch(p + line, 0);
}

/* Residuals grow as a random walk: they stay finite. */
static void quantise_bytes(const task *p, ptrdiff_t from, ptrdiff_t end, int how)
{
    const float *g = p->g[0];
    float *r = p->r[0];
    for (ptrdiff_t at = from; at + GROUP <= end; at += GROUP) {
        vec s[4];
        if (how == FETCH && at + FAR_ELEMENTS + GROUP <= end) {
            fetch(g + at + FAR_ELEMENTS, 0);
            fetch(r + at + FAR_ELEMENTS, 1);
        }
        for (int l = 0; l < 4; l++)
            *(vec *)(r + at + l * LANES) = s[l] = *(const vec *)(g + at + l * LANES) + *(vec *)(r + at + l * LANES);
        memcpy(p->packed + at * p->bits / 8, &s[0], (size_t)(GROUP * p->bits / 8));
    }
}

static void dequantise_bytes(const task *p, ptrdiff_t from, ptrdiff_t end, int how)
{
    for (ptrdiff_t at = from; at + GROUP <= end; at += GROUP) {
        vec v = 1e-6f * p->packed[at * p->bits / 8] - (vec){0};
        if (how == FETCH && at + FAR_ELEMENTS + GROUP <= end)
            fetch(p->sum + at + FAR_ELEMENTS, 1);
        for (int l = 0; l < 4; l++)
            *(vec *)(p->sum + at + l * LANES) += v;
    }
}

static void push_bytes(const task *p, ptrdiff_t from, ptrdiff_t end, int how)
{
    ptrdiff_t at = from;
    for (; at + LANES <= end; at += LANES) {
        vec sum = {0};
        for (int j = 0; j < p->k; j++)
            sum += *(vec *)(p->r[j] + at) += *(const vec *)(p->g[j] + at);
        if (how == STREAM)
            stream(p->sum + at, sum);
        else
            *(vec *)(p->sum + at) = sum;
    }
}

static void do_part(const task *p, ptrdiff_t from, ptrdiff_t end, int verb, int work, int how)
{
    switch (verb) {
    case QUANTISE:
        if (!work)
            quantise_bytes(p, from, end, how);
        else if (p->bits == 2)
            quantise(p, from, end, 2);
        else
            quantise(p, from, end, 1);
        break;
    case DEQUANTISE:
        if (!work)
            dequantise_bytes(p, from, end, how);
        else if (p->bits == 2)
            dequantise(p, from, end, 2);
        else
            dequantise(p, from, end, 1);
        break;
    case PUSH:
        if (work)
            push(p, from, end, how);
        else
            push_bytes(p, from, end, how);
        break;
    default:
        pull(p, from, end, how);
    }
    if (how == STREAM)
        fence();
}

/* One call. `sum` is aligned to 64 bytes. With `fixed` the threads' shares are fixed; otherwise threads
 * claim chunks in turn. */
void compression_run(const task *p, int verb, int work, int how, int threads, int fixed)
{
    ptrdiff_t chunks = (p->n + CHUNK - 1) / CHUNK;
    omp_set_schedule(fixed ? omp_sched_static : omp_sched_dynamic, fixed ? 0 : 1);
#pragma omp parallel for num_threads(threads) schedule(runtime)
    for (ptrdiff_t c = 0; c < chunks; c++) {
        ptrdiff_t end = (c + 1) * CHUNK;
        do_part(p, c * CHUNK, end < p->n ? end : p->n, verb, work, how);
    }
}
