/* Sums over a chunk, and casts. Included once per level.
 *
 * A sum has 16 lanes at every width of the vectors, so that every level gives the same bits.
 */

#define KV_LANES 16

#define KV_SUMSQ(name, type)                                                          \
    static double LV(name)(const type *a, ptrdiff_t n)                                \
    {                                                                                 \
        double lane[KV_LANES] = {0}, sum = 0;                                         \
        ptrdiff_t i = 0;                                                              \
        for (; i + KV_LANES <= n; i += KV_LANES)                                      \
            for (int j = 0; j < KV_LANES; j++)                                        \
                lane[j] += (double)a[i + j] * (double)a[i + j];                       \
        for (int j = 0; i < n; i++, j++)                                              \
            lane[j] += (double)a[i] * (double)a[i];                                   \
        for (int j = 0; j < KV_LANES; j++)                                            \
            sum += lane[j];                                                           \
        return sum;                                                                   \
    }
KV_SUMSQ(sumsq_f32, float)
KV_SUMSQ(sumsq_f64, double)
#undef KV_SUMSQ

static double LV(sumsq)(int dtype, const char *a, ptrdiff_t n)
{
    if (dtype == KV_F32)
        return LV(sumsq_f32)((const float *)a, n);
    if (dtype == KV_F64)
        return LV(sumsq_f64)((const double *)a, n);
    double sum = 0;
    float wide[KV_BLOCK];
    for (ptrdiff_t i = 0; i < n; i += KV_BLOCK) {
        ptrdiff_t count = n - i < KV_BLOCK ? n - i : KV_BLOCK;
        LV(widen)(dtype, count, wide, a + 2 * i);
        sum += LV(sumsq_f32)(wide, count);
    }
    return sum;
}

static void LV(lamb_norms)(int dtype, ptrdiff_t n, const char *w, const char *m, const char *v, const double *p,
                           double *sums)
{
    if (dtype == KV_F64)
        KV_PASTE(LV(block_lamb_norms), double)(n, (const double *)w, (const double *)m, (const double *)v, p, sums,
                                               sums + 1);
    else
        KV_PASTE(LV(block_lamb_norms), float)(n, (const float *)w, (const float *)m, (const float *)v, p, sums,
                                              sums + 1);
}

/* Cast between float16, bfloat16 and float32; n is at most KV_BLOCK. */
static void LV(cast)(int to_dtype, char *to, int from_dtype, const char *from, ptrdiff_t n)
{
    float middle[KV_BLOCK];
    const float *single = (const float *)from;
    if (from_dtype != KV_F32) {
        LV(widen)(from_dtype, n, middle, from);
        single = middle;
    }
    if (to_dtype == KV_F32)
        memcpy(to, single, (size_t)n * sizeof(float));
    else
        LV(narrow)(to_dtype, n, to, single);
}
#undef KV_LANES
