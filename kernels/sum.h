/* k-way sums of one element type. Template: included for each T, with TN(name) decorating names.
 *
 * acc = ((s0 + s1) + s2) + ..., or with `carry` acc = ((acc + s0) + s1) + ...: always left to right, so the bits
 * depend on the order of the values only. acc may be one of the sources.
 */

#define KV_S1 s[0][i]
#define KV_S2 (KV_S1 + s[1][i])
#define KV_S3 (KV_S2 + s[2][i])
#define KV_S4 (KV_S3 + s[3][i])
#define KV_S5 (KV_S4 + s[4][i])
#define KV_S6 (KV_S5 + s[5][i])
#define KV_S7 (KV_S6 + s[6][i])
#define KV_S8 (KV_S7 + s[7][i])
#define KV_SUM_LOOP(EXPR)                                  \
    KV_SIMD                                                \
    for (ptrdiff_t i = 0; i < n; i++)                      \
        acc[i] = (T)(EXPR);                                \
    break;

static void TN(sum_first)(ptrdiff_t n, T *acc, const T *const *src, int k)
{
    const T *s[KV_MAX_GROUP];
    for (int j = 0; j < k; j++)
        s[j] = src[j];
    switch (k) {
    case 1: KV_SUM_LOOP(KV_S1)
    case 2: KV_SUM_LOOP(KV_S2)
    case 3: KV_SUM_LOOP(KV_S3)
    case 4: KV_SUM_LOOP(KV_S4)
    case 5: KV_SUM_LOOP(KV_S5)
    case 6: KV_SUM_LOOP(KV_S6)
    case 7: KV_SUM_LOOP(KV_S7)
    case 8: KV_SUM_LOOP(KV_S8)
    }
}

static void TN(sum)(ptrdiff_t n, T *acc, const T *const *src, int k)
{
    const T *group[KV_MAX_GROUP];
    TN(sum_first)(n, acc, src, k < KV_MAX_GROUP ? k : KV_MAX_GROUP);
    for (int done = KV_MAX_GROUP; done < k; done += KV_MAX_GROUP - 1) {
        int more = k - done < KV_MAX_GROUP - 1 ? k - done : KV_MAX_GROUP - 1;
        group[0] = acc;
        for (int j = 0; j < more; j++)
            group[j + 1] = src[done + j];
        TN(sum_first)(n, acc, group, more + 1);
    }
}

#if KV_X86
/* The same sum, held in registers and written from there: past the cache to dst, which begins with a cache line, and
 * to every out; these are in the cache because each out is a source too. Returns how many elements it has processed. */
typedef T TN(lanes) __attribute__((vector_size(KV_VECTOR), aligned(1), may_alias));

KV_INLINE ptrdiff_t TN(sum_step)(ptrdiff_t n, T *dst, const T *const *s, const int k, T *const *out, int m)
{
    enum { WIDTH = KV_VECTOR / sizeof(T), STEP = 4 * WIDTH };
    ptrdiff_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        TN(lanes) sum[4];
        for (int l = 0; l < 4; l++)
            sum[l] = *(const TN(lanes) *)(s[0] + i + l * WIDTH);
        for (int j = 1; j < k; j++)
            for (int l = 0; l < 4; l++)
                sum[l] += *(const TN(lanes) *)(s[j] + i + l * WIDTH);
        for (int l = 0; l < 4; l++)
            KV_STREAM_VECTOR(dst + i + l * WIDTH, sum[l]);
        for (int j = 0; j < m; j++)
            for (int l = 0; l < 4; l++)
                *(TN(lanes) *)(out[j] + i + l * WIDTH) = sum[l];
    }
    return i;
}

static ptrdiff_t TN(sum_past)(ptrdiff_t n, T *dst, const T *const *src, int k, T *const *out, int m)
{
    switch (k) {
    case 1: return TN(sum_step)(n, dst, src, 1, out, m);
    case 2: return TN(sum_step)(n, dst, src, 2, out, m);
    case 3: return TN(sum_step)(n, dst, src, 3, out, m);
    case 4: return TN(sum_step)(n, dst, src, 4, out, m);
    case 5: return TN(sum_step)(n, dst, src, 5, out, m);
    case 6: return TN(sum_step)(n, dst, src, 6, out, m);
    case 7: return TN(sum_step)(n, dst, src, 7, out, m);
    case 8: return TN(sum_step)(n, dst, src, 8, out, m);
    default: return 0;
    }
}
#endif

#undef KV_S1
#undef KV_S2
#undef KV_S3
#undef KV_S4
#undef KV_S5
#undef KV_S6
#undef KV_S7
#undef KV_S8
#undef KV_SUM_LOOP
