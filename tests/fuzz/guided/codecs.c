/* Packed payloads: every level of the kernels reads the bytes that belong to them, and makes the same of them. */
#include "input.h"
#undef read
#undef close
#include "job_chunks.h"
#include "packed_sum.h"

enum { MOST = 1500, SOURCES = 3 };

static fuzz_coming *fuzz_coming_at(int fd) { return NULL; }

typedef struct __attribute__((packed)) {
    uint8_t code, k;
    uint16_t n;
    float threshold;
    uint64_t nbytes;
} question;

static int is_same(const float *a, const float *b, ptrdiff_t n)
{
    for (ptrdiff_t i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) && (a[i] == a[i] || b[i] == b[i])) /* which NaN is the level's own */
            return 0;
    return 1;
}

static void unpack(const question *q, char **from, float *to)
{
    kv_coding codings[SOURCES];
    for (int i = 0; i < q->k; i++)
        codings[i] = kp_coding_of(q->code, q->threshold);
    kv_item item = {.dtype = KV_F32, .rule = -1, .k = q->k, .n = q->n, .dst = (char *)to, .src = from, .coding = codings};
    MUST(!kv_run_dense(&item, 1, 0, 1));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static int levels;
    fuzz_input in = {data, size};
    question q;
    char *from[SOURCES];
    float *to[2];
    if (!levels) {
        kv_run_init();
        levels = kv_usable_levels();
    }
    if (!fuzz_take(&in, &q, sizeof q))
        return 0;
    int parts = kp_count_packed(q.code, q.n ? q.n : q.nbytes, q.nbytes);
    MUST(parts <= KP_MOST_PACKED && (!parts || (q.code < KV_N_CODES && q.code)));
    q.code %= KV_N_CODES;
    q.k = 1 + q.k % SOURCES;
    q.n %= MOST;
    size_t nbytes = (size_t)kv_encoded_bytes(q.code, q.n);
    for (int i = 0; i < q.k; i++) {
        fuzz_coming coming = {in.at, 0, nbytes < in.left ? nbytes : in.left};
        from[i] = (char *)calloc(1, nbytes + !nbytes);
        in.left -= coming.left;
        in.at += coming.left;
        fuzz_give(&coming, from[i], coming.left);
    }
    for (int i = 0; i < 2; i++)
        to[i] = (float *)calloc(q.n + 1u, sizeof(float));
    for (int level = 0; level < levels; level++) {
        kv_now = kv_all_levels[level];
        unpack(&q, from, to[level > 0]);
        MUST(is_same(to[0], to[level > 0], q.n));
    }
    for (int i = 0; i < q.k; i++)
        free(from[i]);
    free(to[0]);
    free(to[1]);
    return 0;
}
