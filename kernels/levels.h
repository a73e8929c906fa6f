/* The levels of this build, widest last, and the widest one that this processor can run. */
#ifndef KV_LEVELS_H
#define KV_LEVELS_H

#include "job.h"

#define LV(name) KV_PASTE(name, v1)
#define KV_LEVEL 1
#define KV_LEVEL_NAME "baseline"
#include "level.h"

#if KV_X86

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx,avx2,bmi,bmi2,f16c,fma,lzcnt,movbe"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx,avx2,bmi,bmi2,f16c,fma,lzcnt,movbe")
#endif
#define LV(name) KV_PASTE(name, v3)
#define KV_LEVEL 3
#define KV_LEVEL_NAME "x86-64-v3"
#include "level.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx,avx2,bmi,bmi2,f16c,fma,lzcnt,movbe,avx512f,avx512bw,avx512cd,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx,avx2,bmi,bmi2,f16c,fma,lzcnt,movbe,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define LV(name) KV_PASTE(name, v4)
#define KV_LEVEL 4
#define KV_LEVEL_NAME "x86-64-v4"
#include "level.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

static const kv_level *const kv_all_levels[] = {&level_v1, &level_v3, &level_v4};

/* Clang has no name for F16C; every processor with AVX2 and FMA has it. */
#if defined(__clang__)
#define KV_HAS_F16C 1
#else
#define KV_HAS_F16C __builtin_cpu_supports("f16c")
#endif

/* Return how many of the levels, from the first on, this processor can run. */
static int kv_usable_levels(void)
{
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
          __builtin_cpu_supports("bmi2") && KV_HAS_F16C))
        return 1;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vl")
               ? 3
               : 2;
}

#else

static const kv_level *const kv_all_levels[] = {&level_v1};
static int kv_usable_levels(void) { return 1; }

#endif

#endif
