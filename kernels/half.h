/* float16 and bfloat16 <-> float32, blocks at a time. Included once per level (LV names it).
 *
 * Rounding is to nearest even; NaN stays NaN. Without F16C the bits are moved by integer arithmetic
 * (the layouts are IEEE 754-2008 binary16 and the upper half of binary32).
 */

KV_INLINE float LV(half_to_float)(uint16_t h)
{
    /* Shift exponent and mantissa into place; a multiplication by 2^112 corrects the bias and normalises denormals. */
    union { uint32_t u; float f; } v, magic = {(254u - 15u) << 23};
    v.u = (uint32_t)(h & 0x7fffu) << 13;
    v.f *= magic.f;
    uint32_t quiet = h & 0x03ffu ? 0x00400000u : 0u;
    uint32_t special = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u | (uint32_t)(h & 0x03ffu) << 13 | quiet : 0u;
    v.u = special ? special : v.u;
    v.u |= (uint32_t)(h & 0x8000u) << 16;
    return v.f;
}

KV_INLINE uint16_t LV(float_to_half)(float f)
{
    union { float f; uint32_t u; } v = {f}, denorm = {.u = ((127u - 15u) + (23u - 10u) + 1u) << 23};
    uint32_t sign = v.u & 0x80000000u;
    v.u ^= sign;
    uint32_t special = v.u > 0x7f800000u ? 0x7e00u | ((v.u >> 13) & 0x3ffu) : 0x7c00u;
    /* Denormal result: let the float adder round at the right bit. */
    union { float f; uint32_t u; } small = {v.f + denorm.f};
    uint32_t low = small.u - denorm.u;
    uint32_t odd = (v.u >> 13) & 1u;
    uint32_t normal = (v.u + ((uint32_t)(15 - 127) << 23) + 0xfffu + odd) >> 13;
    uint32_t bits = v.u >= (127u + 16u) << 23 ? special : v.u < 113u << 23 ? low : normal;
    return (uint16_t)(bits | sign >> 16);
}

KV_INLINE float LV(bfloat_to_float)(uint16_t b)
{
    union { uint32_t u; float f; } v = {(uint32_t)b << 16};
    return v.f;
}

KV_INLINE uint16_t LV(float_to_bfloat)(float f)
{
    union { float f; uint32_t u; } v = {f};
    uint32_t rounded = (v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16;
    return (uint16_t)((v.u & 0x7fffffffu) > 0x7f800000u ? v.u >> 16 | 0x40u : rounded);
}

static void LV(load_half)(ptrdiff_t n, float *restrict to, const uint16_t *restrict from)
{
    ptrdiff_t i = 0;
#if KV_LEVEL >= 3
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < n; i++)
        to[i] = LV(half_to_float)(from[i]);
}

static void LV(store_half)(ptrdiff_t n, uint16_t *restrict to, const float *restrict from)
{
    ptrdiff_t i = 0;
#if KV_LEVEL >= 3
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
    for (; i < n; i++)
        to[i] = LV(float_to_half)(from[i]);
}

static void LV(load_bfloat)(ptrdiff_t n, float *restrict to, const uint16_t *restrict from)
{
    KV_SIMD
    for (ptrdiff_t i = 0; i < n; i++)
        to[i] = LV(bfloat_to_float)(from[i]);
}

static void LV(store_bfloat)(ptrdiff_t n, uint16_t *restrict to, const float *restrict from)
{
    KV_SIMD
    for (ptrdiff_t i = 0; i < n; i++)
        to[i] = LV(float_to_bfloat)(from[i]);
}

/* Convert 16-bit floats of either type to float32. */
KV_INLINE void LV(widen)(int dtype, ptrdiff_t n, float *to, const void *from)
{
    if (dtype == KV_F16)
        LV(load_half)(n, to, (const uint16_t *)from);
    else
        LV(load_bfloat)(n, to, (const uint16_t *)from);
}

KV_INLINE void LV(narrow)(int dtype, ptrdiff_t n, void *to, const float *from)
{
    if (dtype == KV_F16)
        LV(store_half)(n, (uint16_t *)to, from);
    else
        LV(store_bfloat)(n, (uint16_t *)to, from);
}
