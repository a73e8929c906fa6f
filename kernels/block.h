/* A block is a few kilobytes of one key: it is summed, updated and copied out while it is in the first-level cache,
 * so that each array crosses the memory bus once. Included once per level. */

/* Copy a block past the cache: if the job does not fit the cache, a plain store would first read the line that it
 * overwrites.
 *
 * Only whole lines bypass the cache. The line in which a block begins or ends is left to the next block, which reads
 * the bytes before `from` again: they must still be there unless the block is the `first` of its span.
 */
static void LV(stream)(size_t bytes, char *to, const char *from, int first, int last)
{
#if KV_X86
    size_t before = (uintptr_t)to & (KV_LINE - 1), head = 0;
    if (before && first) {
        head = KV_LINE - before < bytes ? KV_LINE - before : bytes;
        memcpy(to, from, head);
    } else {
        to -= before;
        from -= before;
        bytes += before;
    }
    size_t i = head;
    for (; i + KV_LINE <= bytes; i += KV_LINE) {
#if KV_LEVEL >= 4
        _mm512_stream_ps((float *)(to + i), _mm512_loadu_ps((const float *)(from + i)));
#elif KV_LEVEL >= 3
        _mm256_stream_ps((float *)(to + i), _mm256_loadu_ps((const float *)(from + i)));
        _mm256_stream_ps((float *)(to + i + 32), _mm256_loadu_ps((const float *)(from + i + 32)));
#else
        _mm_stream_ps((float *)(to + i), _mm_loadu_ps((const float *)(from + i)));
        _mm_stream_ps((float *)(to + i + 16), _mm_loadu_ps((const float *)(from + i + 16)));
        _mm_stream_ps((float *)(to + i + 32), _mm_loadu_ps((const float *)(from + i + 32)));
        _mm_stream_ps((float *)(to + i + 48), _mm_loadu_ps((const float *)(from + i + 48)));
#endif
    }
    if (last)
        memcpy(to + i, from + i, bytes - i);
#else
    memcpy(to, from, bytes);
#endif
}

/* 16-bit floats: the sum is kept in float32 and rounded once. */
static void LV(sum_16bit)(int dtype, ptrdiff_t n, float *acc, const char *const *src, int k)
{
    float next[KV_BLOCK];
    LV(widen)(dtype, n, acc, src[0]);
    for (int j = 1; j < k; j++) {
        LV(widen)(dtype, n, next, src[j]);
        KV_SIMD
        for (ptrdiff_t i = 0; i < n; i++)
            acc[i] += next[i];
    }
}

static void LV(sum_block)(int dtype, ptrdiff_t n, char *to, const char *const *src, int k)
{
    switch (dtype) {
#define KV_NOT(tag, name, T)
#define KV_SUM(tag, name, T) \
    case KV_##tag: KV_PASTE(LV(sum), T)(n, (T *)to, (const T *const *)src, k); break;
        KV_DTYPES(KV_SUM, KV_NOT)
#undef KV_SUM
    default: {
        float acc[KV_BLOCK];
        LV(sum_16bit)(dtype, n, acc, src, k);
        LV(narrow)(dtype, n, to, acc);
    }
    }
}

/* Apply a rule in the arithmetic of the key: float64 as such, all other types as float32. `src` points to the block
 * in each source; `w`, `master` and `states` to the block in their arrays. */
static void LV(update_block)(int dtype, int rule, int k, ptrdiff_t n, ptrdiff_t at, char *w, char *master,
                             const char *const *src, char *const *states, int n_states, const double *p)
{
    _Alignas(KV_LINE) char sum[KV_BLOCK * sizeof(double)];
    const char *g = k == 1 ? src[0] : sum;
    if (k > 1)
        LV(sum_block)(dtype, n, sum, src, k);
    if (dtype == KV_F32) {
        LV(rules_f32)[rule](n, at, (float *)w, (const float *)g, (float *const *)states, p);
        return;
    }
    if (dtype == KV_F64) {
        LV(rules_f64)[rule](n, at, (double *)w, (const double *)g, (double *const *)states, p);
        return;
    }
    float grad[KV_BLOCK], weight[KV_BLOCK], state[KV_MAX_STATES][KV_BLOCK];
    float *wide[KV_MAX_STATES];
    const float *g32 = k > 0 ? grad : NULL;
    if (k > 0)
        LV(widen)(dtype, n, grad, g);
    if (master) {
        LV(rules_f32)[rule](n, at, (float *)master, g32, (float *const *)states, p);
        LV(narrow)(dtype, n, w, (const float *)master);
        return;
    }
    LV(widen)(dtype, n, weight, w);
    for (int j = 0; j < n_states; j++) {
        wide[j] = state[j];
        LV(widen)(dtype, n, wide[j], states[j]);
    }
    LV(rules_f32)[rule](n, at, weight, g32, wide, p);
    LV(narrow)(dtype, n, w, weight);
    for (int j = 0; j < n_states; j++)
        LV(narrow)(dtype, n, states[j], wide[j]);
}

static int LV(is_source)(const kv_item *it, const char *array)
{
    for (int j = 0; j < it->k; j++)
        if (it->src[j] == array)
            return 1;
    return 0;
}

/* A block: its place in the item, and whether its span begins or ends with it. */
typedef struct {
    ptrdiff_t at, n;
    size_t offset, bytes;
    int first, last;
} LV(place);

/* Write the block to the outs. Lines of an array that was just read are in the cache: for these a plain store is
 * best. */
static void LV(emit)(const kv_item *it, const LV(place) *b, const char *from)
{
    for (int j = 0; j < it->m; j++) {
        char *to = it->out[j] + b->offset;
        if (to == from)
            continue;
        if (it->stream && !LV(is_source)(it, it->out[j]))
            LV(stream)(b->bytes, to, from, b->first, b->last);
        else
            memcpy(to, from, b->bytes);
    }
}

/* Sum one block. `sum` holds a block, and before it the line that `stream` may read again. */
static void LV(reduce_item_block)(const kv_item *it, const LV(place) *b, const char *const *src, char *sum)
{
    const char *from = src[0];
    if (it->dst && (!it->stream || LV(is_source)(it, it->dst))) {
        LV(sum_block)(it->dtype, b->n, it->dst + b->offset, src, it->k);
        from = it->dst + b->offset;
    } else if (it->k > 1) {
        LV(sum_block)(it->dtype, b->n, sum, src, it->k);
        from = sum;
    }
    if (it->dst && it->dst + b->offset != from)
        LV(stream)(b->bytes, it->dst + b->offset, from, b->first, b->last);
    LV(emit)(it, b, from);
    if (from == sum && !b->last)
        memcpy(sum - KV_LINE, sum + b->bytes - KV_LINE, KV_LINE);
}

/* Copy a block of a state to its array in `kept`, past the cache if the job is larger than the cache. If the block
 * does not begin with a cache line, `stream` would read the bytes before it again, and these have been updated: then
 * the copy is a plain one. */
static void LV(keep_block)(const kv_item *it, const LV(place) *b, char *kept, const char *from, ptrdiff_t wide)
{
    char *to = kept + b->at * wide;
    size_t bytes = (size_t)(b->n * wide);
    if (it->stream && !((uintptr_t)to & (KV_LINE - 1)))
        LV(stream)(bytes, to, from, 1, 1);
    else
        memcpy(to, from, bytes);
}

static void LV(update_item_block)(const kv_item *it, const LV(place) *b, const char *const *src, int k)
{
    ptrdiff_t size = kv_itemsize[it->dtype], wide = it->master ? (ptrdiff_t)sizeof(float) : size;
    char *states[KV_MAX_STATES], *w = it->dst + b->offset;
    for (int j = 0; j < it->n_states; j++)
        states[j] = it->states[j] + b->at * wide;
    if (it->weight)
        memcpy(w, it->weight + b->offset, b->bytes);
    if (it->kept && it->master)
        LV(keep_block)(it, b, it->kept[0], it->master + b->at * wide, wide);
    for (int j = 0; it->kept && j < it->n_states; j++)
        LV(keep_block)(it, b, it->kept[j + (it->master != NULL)], states[j], wide);
    LV(update_block)(it->dtype, it->rule, k, b->n, b->at, w, it->master ? it->master + b->at * wide : NULL, src,
                     states, it->n_states, it->p);
    LV(emit)(it, b, w);
}

/* The decoded sources are summed first; the sum then counts as one plain source. */
static void LV(coded_item_block)(const kv_item *it, const LV(place) *b, char *sum)
{
    int direct = it->dst && it->rule < 0 && (!it->stream || LV(is_source)(it, it->dst));
    char *to = direct ? it->dst + b->offset : sum;
    const char *src = to;
    LV(decode_block)(it, b->at, b->n, (float *)to);
    if (it->rule >= 0) {
        LV(update_item_block)(it, b, &src, 1);
        return;
    }
    if (it->dst && !direct)
        LV(stream)(b->bytes, it->dst + b->offset, to, b->first, b->last);
    LV(emit)(it, b, to);
    if (to == sum && !b->last)
        memcpy(sum - KV_LINE, sum + b->bytes - KV_LINE, KV_LINE);
}

#if KV_X86
/* Find the factors of the sources of a coded item; 0 if a coding is more than a factor. */
static int LV(find_factors)(const kv_item *it, float *factor)
{
    for (int j = 0; j < it->k; j++) {
        const kv_coding *c = &it->coding[j];
        factor[j] = c->code == KV_PLAIN ? 1.0f : c->code == KV_DIVIDED ? kv_exact_inverse(c->threshold) : 0.0f;
        if (!factor[j])
            return 0;
    }
    return 1;
}

/* As `sum_past`, for sources that are multiplied by factors. */
static ptrdiff_t LV(products_past)(ptrdiff_t n, float *dst, const float *const *s, const float *factor, int k,
                                   float *const *out, int m)
{
    typedef KV_PASTE(LV(lanes), float) lanes;
    enum { WIDTH = KV_VECTOR / sizeof(float), STEP = 4 * WIDTH };
    ptrdiff_t i = 0;
    for (; i + STEP <= n; i += STEP) {
        lanes sum[4];
        for (int l = 0; l < 4; l++)
            sum[l] = *(const lanes *)(s[0] + i + l * WIDTH) * factor[0];
        for (int j = 1; j < k; j++)
            for (int l = 0; l < 4; l++)
                sum[l] += *(const lanes *)(s[j] + i + l * WIDTH) * factor[j];
        for (int l = 0; l < 4; l++)
            KV_STREAM_VECTOR(dst + i + l * WIDTH, sum[l]);
        for (int j = 0; j < m; j++)
            for (int l = 0; l < 4; l++)
                *(lanes *)(out[j] + i + l * WIDTH) = sum[l];
    }
    return i;
}
#endif

/* A sum with outs that are all among its sources is written from registers to memory, without a buffer. Returns the
 * end of the processed elements: `item_span` processes the others in blocks. */
static ptrdiff_t LV(in_place_span)(const kv_item *it, ptrdiff_t from, ptrdiff_t to)
{
#if KV_X86
    char *out[KV_MAX_GROUP];
    const char *src[KV_MAX_GROUP];
    float factor[KV_MAX_GROUP];
    ptrdiff_t size = kv_itemsize[it->dtype], at = from * size, n = to - from;
    if (it->rule >= 0 || !it->stream || !it->dst || it->k > KV_MAX_GROUP || it->m > KV_MAX_GROUP)
        return from;
    if (it->coding && !LV(find_factors)(it, factor))
        return from;
    for (int j = 0; j < it->m; j++) {
        if (!LV(is_source)(it, it->out[j]))
            return from;
        out[j] = it->out[j] + at;
    }
    for (int j = 0; j < it->k; j++)
        src[j] = it->src[j] + at;
    char *dst = it->dst + at;
    if ((uintptr_t)dst & (KV_LINE - 1) || LV(is_source)(it, it->dst))
        return from;
    if (it->coding)
        return from + LV(products_past)(n, (float *)dst, (const float *const *)src, factor, it->k, (float *const *)out, it->m);
    switch (it->dtype) {
#define KV_PAST(tag, name, T) \
    case KV_##tag:            \
        return from + KV_PASTE(LV(sum_past), T)(n, (T *)dst, (const T *const *)src, it->k, (T *const *)out, it->m);
        KV_DTYPES(KV_PAST, KV_NOT)
#undef KV_PAST
    }
#endif
    return from;
}

/* One source with one output is copied in one piece: many short copies to memory that is in no cache are slower. */
static int LV(copy_span)(const kv_item *it, ptrdiff_t from, ptrdiff_t to)
{
    if (it->k != 1 || it->rule >= 0 || it->coding || it->m + (it->dst != NULL) != 1)
        return 0;
    ptrdiff_t size = kv_itemsize[it->dtype];
    const char *source = it->src[0] + from * size;
    char *target = (it->dst ? it->dst : it->out[0]) + from * size;
    size_t bytes = (size_t)((to - from) * size);
    if (it->stream && target != source)
        LV(stream)(bytes, target, source, 1, 1);
    else if (target != source)
        memcpy(target, source, bytes);
    return 1;
}

/* Process elements `from` to `to` of an item, in blocks. Blocks for the time of the work. The pointers of the item
 * are valid and do not overlap in a way that `kv_independent` excludes; `from` is 0, or begins a chunk as
 * `kv_run_all` cuts them. */
static void LV(item_span)(const kv_item *it, ptrdiff_t from, ptrdiff_t to)
{
    if (LV(copy_span)(it, from, to))
        return;
    from = LV(in_place_span)(it, from, to);
    _Alignas(KV_LINE) char sum[KV_LINE + KV_BLOCK * sizeof(double)];
    const char *few[16];
    const char **src = it->k <= 16 ? few : (const char **)malloc((size_t)it->k * sizeof(char *));
    ptrdiff_t size = kv_itemsize[it->dtype], block = it->stream ? KV_STREAM_BLOCK : KV_BLOCK;
    for (ptrdiff_t at = from; at < to;) {
        /* The first block is a little shorter, so that the others begin with a cache line of the first out. */
        ptrdiff_t n = at < it->lead ? block - KV_LINE / size + it->lead : block;
        if (n > to - at)
            n = to - at;
        LV(place) b = {at, n, (size_t)(at * size), (size_t)(n * size), at == from, at + n == to};
        for (int j = 0; j < it->k; j++)
            src[j] = it->src[j] + b.offset;
        if (it->coding)
            LV(coded_item_block)(it, &b, sum + KV_LINE);
        else if (it->rule < 0)
            LV(reduce_item_block)(it, &b, src, sum + KV_LINE);
        else
            LV(update_item_block)(it, &b, src, it->k);
        at += n;
    }
    if (src != few)
        free(src);
}

static inline ptrdiff_t LV(source_row)(const kv_rows *job, int j, ptrdiff_t u)
{
    return job->map[j] ? (ptrdiff_t)job->map[j][u] : u;
}

/* Return how many of n ids continue the first: each one more than the id before it, or the same if `step` is 0. */
KV_INLINE ptrdiff_t LV(run)(const int64_t *ids, ptrdiff_t n, int64_t step)
{
    ptrdiff_t i = 1;
    if (n < 2 || ids[1] != ids[0] + step)
        return 1;
    for (; i + KV_RUN_IDS <= n; i += KV_RUN_IDS) { /* a fixed number at a time, without branches */
        int64_t wrong = 0, first = ids[0] + i * step;
        for (int64_t j = 0; j < KV_RUN_IDS; j++)
            wrong |= ids[i + j] ^ (first + (j & -step));
        if (wrong)
            break;
    }
    while (i < n && ids[i] == ids[0] + i * step)
        i++;
    return i;
}

/* Return how many rows from u on, before `to`, are consecutive in the table and in each source that has them: these
 * are processed as one row. */
static ptrdiff_t LV(rows_together)(const kv_rows *job, ptrdiff_t u, ptrdiff_t to)
{
    ptrdiff_t n = job->cols < KV_BLOCK ? to - u : 1;
    if (job->dst_row)
        n = LV(run)(job->dst_row + u, n, 1);
    for (int j = 0; j < job->k && n > 1; j++)
        if (job->map[j])
            n = job->map[j][u] >= 0 ? LV(run)(job->map[j] + u, n, 1) : LV(run)(job->map[j] + u, n, 0);
    return n;
}

/* Process one row, or a piece of a long row: sources without the row are left out of the sum. */
static void LV(row_piece)(const kv_rows *job, ptrdiff_t u, ptrdiff_t col, ptrdiff_t n, const char **have)
{
    ptrdiff_t size = kv_itemsize[job->dtype], wide = job->master ? (ptrdiff_t)sizeof(float) : size;
    ptrdiff_t at = (job->dst_row ? job->dst_row[u] : u) * job->cols + col;
    char *states[KV_MAX_STATES], *w = job->dst + at * size;
    int k = 0;
    for (int j = 0; j < job->k; j++)
        if (LV(source_row)(job, j, u) >= 0)
            have[k++] = job->src[j] + (LV(source_row)(job, j, u) * job->cols + col) * size;
    if (job->rule < 0) {
        if (k == 0)
            memset(w, 0, (size_t)(n * size));
        else if (k == 1)
            memcpy(w, have[0], (size_t)(n * size));
        else
            LV(sum_block)(job->dtype, n, w, have, k);
        return;
    }
    if (job->before) /* rarely read, and not soon: keep the cache for other data */
        LV(stream)((size_t)(n * size), job->before + (u * job->cols + col) * size, w, 1, 1);
    for (int j = 0; j < job->n_states; j++)
        states[j] = job->states[j] + at * wide;
    LV(update_block)(job->dtype, job->rule, k, n, at, w, job->master ? job->master + at * wide : NULL, have, states,
                     job->n_states, job->p);
}

/* Prefetch a row. Rows may be anywhere in a table, so the processor cannot predict the next one. */
static void LV(prefetch_row)(const char *table, ptrdiff_t row, ptrdiff_t bytes)
{
    const char *p = table + row * bytes;
    for (ptrdiff_t i = 0; i < bytes && i < KV_AHEAD_BYTES; i += KV_LINE)
        __builtin_prefetch(p + i);
}

static void LV(prefetch_rows)(const kv_rows *job, ptrdiff_t u)
{
    ptrdiff_t bytes = job->cols * kv_itemsize[job->dtype];
    for (int j = 0; j < job->k; j++)
        if (LV(source_row)(job, j, u) >= 0)
            LV(prefetch_row)(job->src[j], LV(source_row)(job, j, u), bytes);
    if (job->rule < 0)
        return;
    ptrdiff_t wide = job->master ? job->cols * (ptrdiff_t)sizeof(float) : bytes, row = job->dst_row ? job->dst_row[u] : u;
    LV(prefetch_row)(job->dst, row, bytes);
    if (job->master)
        LV(prefetch_row)(job->master, row, wide);
    for (int j = 0; j < job->n_states; j++)
        LV(prefetch_row)(job->states[j], row, wide);
}

static void LV(rows_span)(const kv_rows *job, ptrdiff_t from, ptrdiff_t to)
{
    const char *few[16];
    const char **have = job->k <= 16 ? few : (const char **)malloc((size_t)job->k * sizeof(char *));
    ptrdiff_t asked = from; /* rows before this are prefetched or processed */
    for (ptrdiff_t u = from, n; u < to; u += n) {
        n = LV(rows_together)(job, u, to);
        for (asked = asked < u + n ? u + n : asked; asked < to && asked <= u + n - 1 + KV_AHEAD_ROWS; asked++)
            LV(prefetch_rows)(job, asked);
        for (ptrdiff_t col = 0; col < n * job->cols; col += KV_BLOCK)
            LV(row_piece)(job, u, col, n * job->cols - col < KV_BLOCK ? n * job->cols - col : KV_BLOCK, have);
    }
    if (have != few)
        free(have);
}

static void LV(group_span)(const kv_group *job, ptrdiff_t from, ptrdiff_t to)
{
    for (ptrdiff_t u = from; u < to; u++) {
        ptrdiff_t row = job->dst_row ? job->dst_row[u] : u, at = row * job->cols;
        if (job->dtype == KV_F64)
            KV_PASTE(LV(row_group_adagrad), double)(job->cols, (double *)job->weight + at,
                                                    (const double *)job->grad + u * job->cols,
                                                    (double *)job->history + row, job->p);
        else
            KV_PASTE(LV(row_group_adagrad), float)(job->cols, (float *)job->weight + at,
                                                   (const float *)job->grad + u * job->cols,
                                                   (float *)job->history + row, job->p);
    }
}
#undef KV_NOT
