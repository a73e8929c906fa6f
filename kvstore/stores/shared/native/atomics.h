/* The atomic operations on the shared region.
 *
 * KV_STEP precedes each of them: a test defines it to switch to another worker, so that the code of a job runs
 * through any number of interleavings (tests/stores/shared/native/interleave.c).
 */
#ifndef KV_ATOMICS_H
#define KV_ATOMICS_H

#include <stdatomic.h>
#include <stdint.h>

#ifndef KV_STEP
#define KV_STEP() ((void)0)
#endif

/* Load with acquire order, and store with release order. */
static inline uint64_t kv_get(const _Atomic uint64_t *word)
{
    KV_STEP();
    return atomic_load_explicit(word, memory_order_acquire);
}

static inline void kv_put(_Atomic uint64_t *word, uint64_t value)
{
    KV_STEP();
    atomic_store_explicit(word, value, memory_order_release);
}

/* Replace `expected` by `value`; return whether the word was `expected`. Sequentially consistent, as the next three,
 * which return the word as it was before. */
static inline int kv_swap(_Atomic uint64_t *word, uint64_t expected, uint64_t value)
{
    KV_STEP();
    return atomic_compare_exchange_strong(word, &expected, value);
}

static inline uint64_t kv_set_bits(_Atomic uint64_t *word, uint64_t bits)
{
    KV_STEP();
    return atomic_fetch_or(word, bits);
}

static inline uint64_t kv_clear_bits(_Atomic uint64_t *word, uint64_t bits)
{
    KV_STEP();
    return atomic_fetch_and(word, ~bits);
}

static inline uint64_t kv_add(_Atomic uint64_t *word, uint64_t more)
{
    KV_STEP();
    return atomic_fetch_add(word, more);
}

/* A full barrier: all stores before it are visible before any load after it. */
static inline void kv_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

/* Tell the processor that this thread spins. */
static inline void kv_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
