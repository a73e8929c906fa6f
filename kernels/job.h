/* The jobs of the kernels, as plain structs; _cpu.pyx fills them, and the functions of a level process them. */
#ifndef KV_JOB_H
#define KV_JOB_H

#include "dtypes.h"
#include "isa.h"
#include "codecs.h" /* the list of codecs */

/* Rules update n elements in place; the first is number `at` of its tensor. */
typedef void (*kv_rule_f32)(ptrdiff_t n, ptrdiff_t at, float *w, const float *g, float *const *s, const double *p);
typedef void (*kv_rule_f64)(ptrdiff_t n, ptrdiff_t at, double *w, const double *g, double *const *s, const double *p);

/* A coded source. `packed`: it is the output of an encoder. Else it is a gradient that counts as its decoded value;
 * the rest is added to the residual, if the code has one. */
typedef struct {
    int code, packed;
    float threshold;
    float *residual;
} kv_coding;

/* Return the bytes of n packed elements: whole bytes, or whole 32-bit words if an element has less than a byte. */
static inline ptrdiff_t kv_encoded_bytes(int code, ptrdiff_t n)
{
    const int bits = kv_code_bits[code];
    return bits < 8 ? (n / 32 * bits + (n % 32 * bits + 31) / 32) * 4 : n * (bits / 8);
}

/* One key of a dense call: dst = sum(src), or dst = rule(dst, sum(src)); then every out = dst. */
typedef struct {
    int dtype;               /* of src, dst and out */
    int rule;                /* -1: no rule, dst is the sum */
    int k, m;                /* counts of sources and outs */
    int n_states;
    int stream;              /* the job is larger than the cache: write past it */
    ptrdiff_t n;             /* elements */
    char *dst;               /* may be NULL for a sum without a rule */
    const char *weight;      /* the weight before the update if it is not in dst; NULL: it is in dst */
    char *master;            /* float32 weight behind a 16-bit dst, or NULL */
    char **src, **out;
    const kv_coding *coding; /* by source, of float32 items; NULL: all are plain */
    char *states[KV_MAX_STATES];
    char *const *kept;       /* receive the previous master and states, in this order; NULL: not needed */
    const double *p;
    ptrdiff_t lead;          /* elements before the first cache line of the first out (or dst) */
    ptrdiff_t first_chunk;
} kv_item;

/* Rows of a table: row u of the job is the sum of row map[s][u] of each source s that has it (-1: it does not). A map
 * that is NULL means row u itself. */
typedef struct {
    int dtype, rule, k, n_states;
    ptrdiff_t cols, n_rows;
    char **src;
    const int64_t **map;
    const int64_t *dst_row;  /* row of dst for row u; NULL: u itself */
    char *dst, *master;
    char *before;            /* of an update: receives the previous row u; or NULL */
    char *states[KV_MAX_STATES];
    const double *p;
} kv_rows;

/* GroupAdaGrad keeps one number for each row. */
typedef struct {
    int dtype;
    ptrdiff_t cols, n_rows;
    const char *grad;
    const int64_t *dst_row;
    char *weight, *history;
    const double *p;
} kv_group;

/* A sum of gradients to be packed. `to` has whole 32-bit words, and the last one is padded with zeros. */
typedef struct {
    int code, k;
    float threshold;
    ptrdiff_t n;
    char **src;
    float *residual;
    uint8_t *to;
} kv_encoding;

/* The functions of one instruction-set level. */
typedef struct {
    const char *name;
    void (*item_span)(const kv_item *it, ptrdiff_t from, ptrdiff_t to);
    void (*rows_span)(const kv_rows *job, ptrdiff_t from, ptrdiff_t to);
    void (*group_span)(const kv_group *job, ptrdiff_t from, ptrdiff_t to);
    double (*sumsq)(int dtype, const char *a, ptrdiff_t n);
    void (*lamb_norms)(int dtype, ptrdiff_t n, const char *w, const char *m, const char *v, const double *p, double *sums);
    void (*cast)(int to_dtype, char *to, int from_dtype, const char *from, ptrdiff_t n);
    void (*encode_span)(const kv_encoding *job, ptrdiff_t from, ptrdiff_t to);
    void (*fence)(void);
} kv_level;

#endif
