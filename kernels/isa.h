/* Instruction-set levels: one source is compiled for x86-64, x86-64-v3 (AVX2) and x86-64-v4 (AVX-512).
 *
 * level.h is included once per level between KV_TARGET_BEGIN and KV_TARGET_END. On other processors there is one
 * level, the compiler's default; and so it is with KV_ONE_LEVEL, for analysis.
 */
#ifndef KV_ISA_H
#define KV_ISA_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(KV_ONE_LEVEL) && defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define KV_X86 1
#include <immintrin.h>
#else
#define KV_X86 0
#endif

/* The iterations of a loop never overlap in memory: this tells the compiler. */
#if defined(__clang__)
#define KV_SIMD _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define KV_SIMD _Pragma("GCC ivdep")
#else
#define KV_SIMD
#endif

#define KV_INLINE static inline __attribute__((always_inline, unused))

#define KV_PASTE2(a, b) a##_##b
#define KV_PASTE(a, b) KV_PASTE2(a, b)

enum {
    KV_MAX_GROUP = 8,    /* values summed in one pass over a block */
    KV_BLOCK = 512,        /* elements: all arrays of a block share the first-level cache (docs/decisions/0003) */
    KV_STREAM_BLOCK = 256, /* the same for arrays that are not cached: shorter blocks keep more memory pages open */
    KV_MAX_STATES = 4,
    KV_MAX_PARAMS = 16,
    KV_LINE = 64,        /* bytes of a cache line */
    KV_RUN_IDS = 64,     /* row ids that are compared at a time */
    KV_NEAR_IDS = 32,    /* row ids that are compared one by one */
    KV_AHEAD_ROWS = 6,   /* rows of a table that are prefetched */
    KV_AHEAD_BYTES = 1024
};

#endif
