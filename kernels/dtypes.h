/* The element types of the kernels, and their numbers. */
#ifndef KV_DTYPES_H
#define KV_DTYPES_H

#include <stdint.h>

/* The element types, each named once: PLAIN(tag, NumPy's name, C type) is summed in its C type, HALF(...) in float.
 *
 * Numbers follow the order here; the shared region contains them. Signed integers wrap like unsigned ones, bit for bit. */
#define KV_DTYPES(PLAIN, HALF)       \
    PLAIN(F32, float32, float)       \
    PLAIN(F64, float64, double)      \
    HALF(F16, float16, uint16_t)     \
    HALF(BF16, bfloat16, uint16_t)   \
    PLAIN(I8, int8, uint8_t)         \
    PLAIN(U8, uint8, uint8_t)        \
    PLAIN(I32, int32, uint32_t)      \
    PLAIN(I64, int64, uint64_t)

#define KV_NUMBER(tag, name, T) KV_##tag,
#define KV_SIZE(tag, name, T) sizeof(T),
enum kv_dtype { KV_DTYPES(KV_NUMBER, KV_NUMBER) KV_N_DTYPES };
static const int kv_itemsize[KV_N_DTYPES] = {KV_DTYPES(KV_SIZE, KV_SIZE)};
#undef KV_NUMBER
#undef KV_SIZE

#endif
