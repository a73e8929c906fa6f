/* All loops of one instruction-set level. levels.h defines LV(name), KV_LEVEL and KV_LEVEL_NAME and includes this
 * file, which undefines them. */

#include "half.h"

#if KV_X86
#if KV_LEVEL >= 4
#define KV_VECTOR 64
#define KV_STREAM_VECTOR(to, v) _mm512_stream_ps((float *)(to), (__m512)(v))
#elif KV_LEVEL >= 3
#define KV_VECTOR 32
#define KV_STREAM_VECTOR(to, v) _mm256_stream_ps((float *)(to), (__m256)(v))
#else
#define KV_VECTOR 16
#define KV_STREAM_VECTOR(to, v) _mm_stream_ps((float *)(to), (__m128)(v))
#endif
#endif

#define TN(name) KV_PASTE(LV(name), T)
#define T float
#include "sum.h"
#undef T
#define T double
#include "sum.h"
#undef T
#define T uint8_t
#include "sum.h"
#undef T
#define T uint32_t
#include "sum.h"
#undef T
#define T uint64_t
#include "sum.h"
#undef T
#undef TN

#define FN(name) KV_PASTE(LV(name), REAL)
#define REAL float
#define SQRT sqrtf
#define FABS fabsf
#include "rules.h"
#undef REAL
#undef SQRT
#undef FABS
#define REAL double
#define SQRT sqrt
#define FABS fabs
#include "rules.h"
#undef REAL
#undef SQRT
#undef FABS
#undef FN

#define KV_ROW(name, states, params) KV_PASTE(LV(rule_##name), float),
static const kv_rule_f32 LV(rules_f32)[] = {KV_RULES(KV_ROW)};
#undef KV_ROW
#define KV_ROW(name, states, params) KV_PASTE(LV(rule_##name), double),
static const kv_rule_f64 LV(rules_f64)[] = {KV_RULES(KV_ROW)};
#undef KV_ROW

#include "codecs.h"
#include "block.h"
#include "norms.h"

#undef KV_VECTOR
#undef KV_STREAM_VECTOR

static void LV(fence)(void)
{
#if KV_X86
    _mm_sfence();
#endif
}

static const kv_level LV(level) = {
    KV_LEVEL_NAME, LV(item_span), LV(rows_span), LV(group_span),
    LV(sumsq),     LV(lamb_norms), LV(cast),     LV(encode_span), LV(fence),
};

#undef LV
#undef KV_LEVEL
#undef KV_LEVEL_NAME
