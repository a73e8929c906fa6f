/* Gradient codecs on float32. Included once for the list, then once per level (LV names it).
 *
 *   pack     gradient + residual -> packed; the residual keeps the part that was not sent
 *   unpack   packed -> decoded, written or added
 *   pass     both at once, without the packed form
 *
 * Two bits (docs/reference of MXNet's 2-bit compression, bit for bit): with x = residual + gradient, x >= t sends +t
 * (code 11), x <= -t sends -t (10), all else 0 (00; 01 is not used and decodes to 0). Element 4 b + i of a block lies
 * in byte b at bits 7 - 2 i and 6 - 2 i. One bit: x > t sends +1 (bit 1), else -1; element 8 b + i is bit 7 - i of
 * byte b. Padding up to whole 32-bit words is zero. NaN sends 0 (one bit: -1) and stays in the residual.
 *
 * Gradients are unpredictable by nature: no loop branches on them. `pass` is exact where pack and unpack are, because
 * x - 0 is x.
 */

#ifndef KV_CODECS
/* The codecs, each named once: X(tag, name, bits of an element, whether the part that is not sent stays in a
 * residual).
 *
 * Numbers follow the order here, from 1. They are valid within one process, or one job; names are stored and sent.
 */
#define KV_CODECS(X)          \
    X(TWO_BIT, two_bit, 2, 1) \
    X(ONE_BIT, one_bit, 1, 1) \
    X(HALF, half, 16, 0)      \
    X(BFLOAT, bfloat, 16, 0)

#define KV_NUMBER(tag, name, bits, residual) KV_##tag,
#define KV_BITS_OF(tag, name, bits, residual) bits,
/* KV_DIVIDED: plain numbers that are divided by the number in the place of the threshold. */
enum kv_code { KV_PLAIN, KV_CODECS(KV_NUMBER) KV_N_CODES, KV_DIVIDED = KV_N_CODES };
static const int kv_code_bits[KV_N_CODES] = {32, KV_CODECS(KV_BITS_OF)};
#undef KV_NUMBER
#undef KV_BITS_OF
#endif

#ifdef LV

#ifndef KV_SPREAD
/* Return a factor that gives the same bits as the division: one exists for powers of two; else 0. */
static inline float kv_exact_inverse(float divisor)
{
    int power;
    return frexpf(divisor, &power) == 0.5f ? 1.0f / divisor : 0.0f;
}

/* Spread a mask of 8 elements over their two bytes: bit i is moved to the lower bit of element i. */
#define KV_SPREAD(b)                                                                                     \
    (uint16_t)(((b)&1) << 6 | ((b)&2) << 3 | ((b)&4) | ((b)&8) >> 3 | ((b)&16) << 10 | ((b)&32) << 7 | \
               ((b)&64) << 4 | ((b)&128) << 1)
#define KV_SPREAD_4(b) KV_SPREAD(b), KV_SPREAD((b) + 1), KV_SPREAD((b) + 2), KV_SPREAD((b) + 3)
#define KV_SPREAD_16(b) KV_SPREAD_4(b), KV_SPREAD_4((b) + 4), KV_SPREAD_4((b) + 8), KV_SPREAD_4((b) + 12)
#define KV_SPREAD_64(b) KV_SPREAD_16(b), KV_SPREAD_16((b) + 16), KV_SPREAD_16((b) + 32), KV_SPREAD_16((b) + 48)
static const uint16_t kv_spread[256] = {KV_SPREAD_64(0), KV_SPREAD_64(64), KV_SPREAD_64(128), KV_SPREAD_64(192)};
#endif

/* -------------------------------------------------------------------------------- vectors of this level */

#if KV_X86
#if KV_LEVEL >= 4
#define KV_W 16
#define KV_F __m512
#define KV_M __mmask16
#define KV_MM(name) _mm512_##name
#define KV_GE(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ)
#define KV_GT(a, b) _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)
#define KV_ONLY(m, x) _mm512_maskz_mov_ps(m, x)
#define KV_PICK(m, a, b) _mm512_mask_blend_ps(m, b, a)
#define KV_BITS(m) ((uint64_t)(m))
#elif KV_LEVEL >= 3
#define KV_W 8
#define KV_F __m256
#define KV_M __m256
#define KV_MM(name) _mm256_##name
#define KV_GE(a, b) _mm256_cmp_ps(a, b, _CMP_GE_OQ)
#define KV_GT(a, b) _mm256_cmp_ps(a, b, _CMP_GT_OQ)
#define KV_ONLY(m, x) _mm256_and_ps(m, x)
#define KV_PICK(m, a, b) _mm256_blendv_ps(b, a, m)
#define KV_BITS(m) ((uint64_t)(unsigned)_mm256_movemask_ps(m))
#else
#define KV_W 4
#define KV_F __m128
#define KV_M __m128
#define KV_MM(name) _mm_##name
#define KV_GE(a, b) _mm_cmpge_ps(a, b)
#define KV_GT(a, b) _mm_cmpgt_ps(a, b)
#define KV_ONLY(m, x) _mm_and_ps(m, x)
#define KV_PICK(m, a, b) _mm_or_ps(_mm_and_ps(m, a), _mm_andnot_ps(m, b))
#define KV_BITS(m) ((uint64_t)(unsigned)_mm_movemask_ps(m))
#endif
#define KV_LOAD(p) KV_MM(loadu_ps)(p)
#define KV_STORE(p, x) KV_MM(storeu_ps)(p, x)
#define KV_ALL(x) KV_MM(set1_ps)(x)
#define KV_ADD(a, b) KV_MM(add_ps)(a, b)
#define KV_SUB(a, b) KV_MM(sub_ps)(a, b)
#endif

/* --------------------------------------------------------------------------------------------- two bits */

KV_INLINE unsigned LV(two_bit_one)(float g, float *r, float t)
{
    float x = *r + g;
    int up = x >= t, down = x <= -t;
    *r = x - (up ? t : down ? -t : 0.0f);
    return (unsigned)((up | down) << 1 | up);
}

/* Pack into bytes of 4 elements each; elements that are missing in the last one count as 0. */
static void LV(two_bit_tail)(ptrdiff_t n, const float *g, float *r, uint8_t *to, float t)
{
    for (ptrdiff_t i = 0; i < n; i += 4) {
        unsigned byte = 0;
        for (ptrdiff_t j = i; j < i + 4 && j < n; j++)
            byte |= LV(two_bit_one)(g[j], &r[j], t) << (6 - 2 * (j - i));
        to[i / 4] = (uint8_t)byte;
    }
}

#if KV_X86
/* Interleave the masks of 64 elements into their 16 bytes. */
KV_INLINE void LV(two_bit_put)(uint8_t *to, uint64_t sent, uint64_t up)
{
#if KV_LEVEL >= 4
    for (int turn = 0; turn < 2; turn++) { /* the first element of a byte has its top bits: reverse each four */
        uint64_t *m = turn ? &up : &sent;
        *m = (*m >> 1 & 0x5555555555555555u) | (*m & 0x5555555555555555u) << 1;
        *m = (*m >> 2 & 0x3333333333333333u) | (*m & 0x3333333333333333u) << 2;
    }
    uint64_t words[2] = {
        _pdep_u64(sent & 0xffffffffu, 0xaaaaaaaaaaaaaaaau) | _pdep_u64(up & 0xffffffffu, 0x5555555555555555u),
        _pdep_u64(sent >> 32, 0xaaaaaaaaaaaaaaaau) | _pdep_u64(up >> 32, 0x5555555555555555u),
    };
    memcpy(to, words, sizeof words);
#else
    for (int b = 0; b < 8; b++) { /* a pdep needs hundreds of cycles on some processors of the lower levels */
        uint16_t pair = (uint16_t)(kv_spread[sent >> 8 * b & 0xff] << 1 | kv_spread[up >> 8 * b & 0xff]);
        memcpy(to + 2 * b, &pair, sizeof pair);
    }
#endif
}
#endif

static void LV(two_bit_pack)(ptrdiff_t n, const float *restrict g, float *restrict r, uint8_t *restrict to, float t)
{
    ptrdiff_t i = 0;
#if KV_X86
    const KV_F high = KV_ALL(t), low = KV_ALL(-t);
    for (; i + 64 <= n; i += 64) {
        uint64_t up = 0, down = 0;
        for (int v = 0; v < 64; v += KV_W) {
            KV_F x = KV_ADD(KV_LOAD(r + i + v), KV_LOAD(g + i + v));
            KV_M p = KV_GE(x, high), m = KV_GE(low, x);
            KV_STORE(r + i + v, KV_SUB(KV_SUB(x, KV_ONLY(p, high)), KV_ONLY(m, low)));
            up |= KV_BITS(p) << v;
            down |= KV_BITS(m) << v;
        }
        LV(two_bit_put)(to + i / 4, up | down, up);
    }
#else
    for (; i + 64 <= n; i += 64) { /* codes as bytes first; a product combines the four codes of a byte */
        uint8_t code[64];
        uint32_t four[16];
        KV_SIMD
        for (int j = 0; j < 64; j++) {
            float x = r[i + j] + g[i + j];
            uint8_t up = x >= t, down = x <= -t;
            r[i + j] = x - (up ? t : down ? -t : 0.0f);
            code[j] = (uint8_t)((up | down) << 1 | up);
        }
        memcpy(four, code, sizeof four);
        KV_SIMD
        for (int b = 0; b < 16; b++)
            to[i / 4 + b] = (uint8_t)(four[b] * 0x40100401u >> 24);
    }
#endif
    LV(two_bit_tail)(n - i, g + i, r + i, to + i / 4, t);
}

KV_INLINE float LV(two_bit_value)(unsigned code, float t)
{
    return code == 3 ? t : code == 2 ? -t : 0.0f;
}

static void LV(two_bit_unpack)(ptrdiff_t n, float *restrict to, const uint8_t *restrict from, float t, int add)
{
    ptrdiff_t i = 0;
#if KV_X86 && KV_LEVEL >= 3
    /* The two bits of an element select one of four values in every lane. */
    const __m128 four = _mm_setr_ps(0.0f, 0.0f, -t, t);
#if KV_LEVEL >= 4
    const __m512 values = _mm512_broadcast_f32x4(four);
    const __m512i shift = _mm512_setr_epi32(6, 4, 2, 0, 14, 12, 10, 8, 22, 20, 18, 16, 30, 28, 26, 24);
#else
    const __m256 values = _mm256_broadcast_ps(&four);
    const __m256i shift = _mm256_setr_epi32(6, 4, 2, 0, 14, 12, 10, 8);
#endif
    for (; i + 16 <= n; i += 16) {
        uint32_t word;
        memcpy(&word, from + i / 4, sizeof word);
        for (int v = 0; v < 16; v += KV_W) {
#if KV_LEVEL >= 4
            KV_F x = _mm512_permutevar_ps(values, _mm512_srlv_epi32(_mm512_set1_epi32((int)word), shift));
#else
            KV_F x = _mm256_permutevar_ps(values, _mm256_srlv_epi32(_mm256_set1_epi32((int)(word >> 2 * v)), shift));
#endif
            KV_STORE(to + i + v, add ? KV_ADD(KV_LOAD(to + i + v), x) : x);
        }
    }
#endif
    for (; i < n; i++) {
        float x = LV(two_bit_value)(from[i / 4] >> (6 - 2 * (i & 3)) & 3u, t);
        to[i] = add ? to[i] + x : x;
    }
}

static void LV(two_bit_pass)(ptrdiff_t n, float *restrict to, const float *restrict g, float *restrict r, float t, int add)
{
    ptrdiff_t i = 0;
#if KV_X86
    const KV_F high = KV_ALL(t), low = KV_ALL(-t);
    for (; i + KV_W <= n; i += KV_W) {
        KV_F x = KV_ADD(KV_LOAD(r + i), KV_LOAD(g + i));
        KV_F up = KV_ONLY(KV_GE(x, high), high), down = KV_ONLY(KV_GE(low, x), low), sent = KV_ADD(up, down);
        KV_STORE(r + i, KV_SUB(x, sent));
        KV_STORE(to + i, add ? KV_ADD(KV_LOAD(to + i), sent) : sent);
    }
#endif
    for (; i < n; i++) {
        float sent = LV(two_bit_value)(LV(two_bit_one)(g[i], &r[i], t), t);
        to[i] = add ? to[i] + sent : sent;
    }
}

/* ---------------------------------------------------------------------------------------------- one bit */

KV_INLINE unsigned LV(one_bit_one)(float g, float *r, float t)
{
    float x = *r + g;
    int up = x > t;
    *r = up ? x - 1.0f : x + 1.0f;
    return (unsigned)up;
}

static void LV(one_bit_pack)(ptrdiff_t n, const float *restrict g, float *restrict r, uint8_t *restrict to, float t)
{
    ptrdiff_t i = 0;
#if KV_X86
    const KV_F high = KV_ALL(t), one = KV_ALL(1.0f), minus = KV_ALL(-1.0f);
    for (; i + 64 <= n; i += 64) {
        uint64_t up = 0;
        for (int v = 0; v < 64; v += KV_W) {
            KV_F x = KV_ADD(KV_LOAD(r + i + v), KV_LOAD(g + i + v));
            KV_M p = KV_GT(x, high);
            KV_STORE(r + i + v, KV_SUB(x, KV_PICK(p, one, minus)));
            up |= KV_BITS(p) << v;
        }
        up = (up >> 1 & 0x5555555555555555u) | (up & 0x5555555555555555u) << 1; /* first element in the top bit */
        up = (up >> 2 & 0x3333333333333333u) | (up & 0x3333333333333333u) << 2;
        up = (up >> 4 & 0x0f0f0f0f0f0f0f0fu) | (up & 0x0f0f0f0f0f0f0f0fu) << 4;
        memcpy(to + i / 8, &up, sizeof up);
    }
#endif
    for (; i < n; i += 8) {
        unsigned byte = 0;
        for (ptrdiff_t j = i; j < i + 8 && j < n; j++)
            byte |= LV(one_bit_one)(g[j], &r[j], t) << (7 - (j - i));
        to[i / 8] = (uint8_t)byte;
    }
}

static void LV(one_bit_unpack)(ptrdiff_t n, float *restrict to, const uint8_t *restrict from, int add)
{
    ptrdiff_t i = 0;
#if KV_X86 && KV_LEVEL >= 3
    /* Move an element's bit to the sign, and invert it: 1 means +1. */
#if KV_LEVEL >= 4
    const __m512i places = _mm512_setr_epi32(24, 25, 26, 27, 28, 29, 30, 31, 16, 17, 18, 19, 20, 21, 22, 23);
    const __m512i top = _mm512_set1_epi32((int)0x80000000u), less = _mm512_set1_epi32((int)0xbf800000u);
    for (; i + 16 <= n; i += 16) {
        uint16_t pair;
        memcpy(&pair, from + i / 8, sizeof pair);
        __m512i bits = _mm512_sllv_epi32(_mm512_set1_epi32(pair), places);
        __m512 x = _mm512_castsi512_ps(_mm512_xor_si512(_mm512_and_si512(bits, top), less));
        _mm512_storeu_ps(to + i, add ? _mm512_add_ps(_mm512_loadu_ps(to + i), x) : x);
    }
#endif
    const __m256i shift = _mm256_setr_epi32(24, 25, 26, 27, 28, 29, 30, 31);
    const __m256i sign = _mm256_set1_epi32((int)0x80000000u), minus = _mm256_set1_epi32((int)0xbf800000u);
    for (; i + 8 <= n; i += 8) {
        __m256i bits = _mm256_sllv_epi32(_mm256_set1_epi32(from[i / 8]), shift);
        __m256 x = _mm256_castsi256_ps(_mm256_xor_si256(_mm256_and_si256(bits, sign), minus));
        _mm256_storeu_ps(to + i, add ? _mm256_add_ps(_mm256_loadu_ps(to + i), x) : x);
    }
#endif
    for (; i < n; i++) {
        float x = from[i / 8] >> (7 - (i & 7)) & 1u ? 1.0f : -1.0f;
        to[i] = add ? to[i] + x : x;
    }
}

static void LV(one_bit_pass)(ptrdiff_t n, float *restrict to, const float *restrict g, float *restrict r, float t, int add)
{
    ptrdiff_t i = 0;
#if KV_X86
    const KV_F high = KV_ALL(t), one = KV_ALL(1.0f), minus = KV_ALL(-1.0f);
    for (; i + KV_W <= n; i += KV_W) {
        KV_F x = KV_ADD(KV_LOAD(r + i), KV_LOAD(g + i)), sent = KV_PICK(KV_GT(x, high), one, minus);
        KV_STORE(r + i, KV_SUB(x, sent));
        KV_STORE(to + i, add ? KV_ADD(KV_LOAD(to + i), sent) : sent);
    }
#endif
    for (; i < n; i++) {
        float sent = LV(one_bit_one)(g[i], &r[i], t) ? 1.0f : -1.0f;
        to[i] = add ? to[i] + sent : sent;
    }
}

#undef KV_W
#undef KV_F
#undef KV_M
#undef KV_LOAD
#undef KV_STORE
#undef KV_ALL
#undef KV_ADD
#undef KV_SUB
#undef KV_GE
#undef KV_GT
#undef KV_ONLY
#undef KV_PICK
#undef KV_BITS
#undef KV_MM

/* ------------------------------------------------------------------------------------- blocks of a call */

static void LV(add_block)(ptrdiff_t n, float *restrict to, const float *restrict from)
{
    KV_SIMD
    for (ptrdiff_t i = 0; i < n; i++)
        to[i] += from[i];
}

static void LV(divide_block)(ptrdiff_t n, float *to, const float *from, float divisor, int add)
{
    float inverse = kv_exact_inverse(divisor);
    if (!inverse) {
        KV_SIMD
        for (ptrdiff_t i = 0; i < n; i++)
            to[i] = add ? to[i] + from[i] / divisor : from[i] / divisor;
    } else {
        KV_SIMD
        for (ptrdiff_t i = 0; i < n; i++)
            to[i] = add ? to[i] + from[i] * inverse : from[i] * inverse;
    }
}

/* Decode one source, at most a block of it, and write it to `to` or add it there. */
static void LV(decode_source)(const kv_coding *c, const char *src, ptrdiff_t at, ptrdiff_t n, float *to, int add)
{
    const float *g = (const float *)src + at;
    const uint8_t *packed = (const uint8_t *)src;
    float wide[KV_BLOCK];
    uint16_t narrow[KV_BLOCK];
    int dtype = c->code == KV_HALF ? KV_F16 : KV_BF16;
    switch (c->code) {
    case KV_TWO_BIT:
        if (c->packed)
            LV(two_bit_unpack)(n, to, packed + at / 4, c->threshold, add);
        else
            LV(two_bit_pass)(n, to, g, c->residual + at, c->threshold, add);
        break;
    case KV_ONE_BIT:
        if (c->packed)
            LV(one_bit_unpack)(n, to, packed + at / 8, add);
        else
            LV(one_bit_pass)(n, to, g, c->residual + at, c->threshold, add);
        break;
    case KV_HALF:
    case KV_BFLOAT:
        if (!c->packed)
            LV(narrow)(dtype, n, narrow, g);
        LV(widen)(dtype, n, add ? wide : to, c->packed ? (const void *)(packed + 2 * at) : narrow);
        if (add)
            LV(add_block)(n, to, wide);
        break;
    case KV_DIVIDED:
        LV(divide_block)(n, to, g, c->threshold, add);
        break;
    default:
        if (add)
            LV(add_block)(n, to, g);
        else if (to != g)
            memcpy(to, g, (size_t)n * sizeof *to);
    }
}

/* Sum the decoded sources of a coded item, from left to right. */
static void LV(decode_block)(const kv_item *it, ptrdiff_t at, ptrdiff_t n, float *to)
{
    for (int j = 0; j < it->k; j++)
        LV(decode_source)(&it->coding[j], it->src[j], at, n, to, j > 0);
}

/* Pack elements from..to of the sum of gradients. `from` is a multiple of KV_BLOCK. Blocks for the time of the work;
 * the arrays of the job are valid. */
static void LV(encode_span)(const kv_encoding *job, ptrdiff_t from, ptrdiff_t to)
{
    float sum[KV_BLOCK];
    for (ptrdiff_t at = from, n; at < to; at += n) {
        n = to - at < KV_BLOCK ? to - at : KV_BLOCK;
        const float *g = (const float *)job->src[0] + at;
        if (job->k > 1) {
            memcpy(sum, g, (size_t)n * sizeof *sum);
            for (int j = 1; j < job->k; j++)
                LV(add_block)(n, sum, (const float *)job->src[j] + at);
            g = sum;
        }
        switch (job->code) {
        case KV_TWO_BIT: LV(two_bit_pack)(n, g, job->residual + at, job->to + at / 4, job->threshold); break;
        case KV_ONE_BIT: LV(one_bit_pack)(n, g, job->residual + at, job->to + at / 8, job->threshold); break;
        case KV_HALF: LV(narrow)(KV_F16, n, job->to + 2 * at, g); break;
        case KV_BFLOAT: LV(narrow)(KV_BF16, n, job->to + 2 * at, g); break;
        default: memcpy(job->to + 4 * at, g, (size_t)n * sizeof *g);
        }
    }
}

#endif
