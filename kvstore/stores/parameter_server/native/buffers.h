/* Counted references to memory, or to Python objects, which C code releases without the interpreter's lock.
 *
 * All functions may be called by any thread, without the interpreter's lock, and none blocks. The last `kp_release` frees
 * memory, but puts a Python object on a list. A thread that holds the interpreter's lock removes the list
 * (`kp_take_released`), and releases the objects. */
#ifndef KP_BUFFERS_H
#define KP_BUFFERS_H

#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

enum {
    KP_ALIGNED = 64,
    KP_POOLED = 32,              /* free buffers in the pool */
    KP_POOLED_LEAST = 64 * 1024, /* bytes: malloc maps larger ones anew each time, page by page */
    KP_POOLED_BYTES = 32 << 20   /* of all buffers in the pool */
};

struct kp_pool;

typedef struct kp_buffer {
    atomic_int references;
    char *data; /* behind the struct; NULL: in the owner */
    size_t nbytes, capacity;
    void *owner;            /* a Python object, to which the buffer has one reference; or NULL */
    struct kp_buffer *next; /* in the list of dropped buffers */
    struct kp_pool *pool;   /* that of the extension module that allocated it */
} kp_buffer;

static kp_buffer *_Atomic kp_released;

/* Return a buffer for a Python object; one reference then belongs to the buffer. NULL: no memory,
 * and the reference is still the caller's. */
static kp_buffer *kp_buffer_of(void *owner)
{
    kp_buffer *made = (kp_buffer *)calloc(1, sizeof *made);
    if (!made)
        return NULL;
    atomic_init(&made->references, 1);
    made->owner = owner;
    return made;
}

/* Free buffers, to be used again for about the same size. Protected by the spin lock `held`. */
typedef struct kp_pool {
    atomic_flag held;
    int n;
    size_t nbytes;
    kp_buffer *free[KP_POOLED];
} kp_pool;

static kp_pool kp_own_pool = {.held = ATOMIC_FLAG_INIT};

static void kp_lock_pool(kp_pool *pool)
{
    while (atomic_flag_test_and_set_explicit(&pool->held, memory_order_acquire))
        ;
}

static void kp_unlock_pool(kp_pool *pool)
{
    atomic_flag_clear_explicit(&pool->held, memory_order_release);
}

/* Return a free buffer of about that size; NULL: none. */
static kp_buffer *kp_find_pooled(size_t nbytes)
{
    kp_pool *pool = &kp_own_pool;
    kp_buffer *found = NULL;
    kp_lock_pool(pool);
    for (int i = pool->n - 1; i >= 0 && !found; i--)
        if (pool->free[i]->capacity >= nbytes && pool->free[i]->capacity / 2 <= nbytes) {
            found = pool->free[i];
            pool->free[i] = pool->free[--pool->n];
            pool->nbytes -= found->capacity;
        }
    kp_unlock_pool(pool);
    return found;
}

/* Put a buffer without references into its pool. 0: the pool is full, and the caller frees it. */
static int kp_put_in_pool(kp_buffer *buffer)
{
    kp_pool *pool = buffer->pool;
    kp_lock_pool(pool);
    int kept = pool->n < KP_POOLED && pool->nbytes + buffer->capacity <= KP_POOLED_BYTES;
    if (kept) {
        pool->free[pool->n++] = buffer;
        pool->nbytes += buffer->capacity;
    }
    kp_unlock_pool(pool);
    return kept;
}

/* Allocate `nbytes` of aligned memory, of any content, with one reference. NULL: no memory. */
static kp_buffer *kp_new_buffer(size_t nbytes)
{
    void *memory = nbytes >= KP_POOLED_LEAST ? kp_find_pooled(nbytes) : NULL;
    size_t capacity = memory ? ((kp_buffer *)memory)->capacity : nbytes;
    if (!memory && (nbytes > PTRDIFF_MAX - KP_ALIGNED || posix_memalign(&memory, KP_ALIGNED, KP_ALIGNED + nbytes)))
        return NULL;
    kp_buffer *made = (kp_buffer *)memory;
    *made = (kp_buffer){.data = (char *)memory + KP_ALIGNED, .nbytes = nbytes, .capacity = capacity, .pool = &kp_own_pool};
    atomic_init(&made->references, 1);
    return made;
}

_Static_assert(sizeof(kp_buffer) <= KP_ALIGNED, "the struct has the first bytes of its memory");

/* Add a reference; NULL is allowed. */
static inline kp_buffer *kp_retain(kp_buffer *buffer)
{
    if (buffer)
        atomic_fetch_add_explicit(&buffer->references, 1, memory_order_relaxed);
    return buffer;
}

/* Release a reference; NULL is allowed. */
static void kp_release(kp_buffer *buffer)
{
    if (!buffer || atomic_fetch_sub_explicit(&buffer->references, 1, memory_order_acq_rel) != 1)
        return;
    if (!buffer->owner) {
        if (buffer->capacity < KP_POOLED_LEAST || !kp_put_in_pool(buffer))
            free(buffer);
        return;
    }
    buffer->next = atomic_load(&kp_released);
    while (!atomic_compare_exchange_weak(&kp_released, &buffer->next, buffer))
        ;
}

/* Remove and return the list of dropped buffers with owners. The caller holds the interpreter's lock, releases the objects,
 * and frees the structs. */
static kp_buffer *kp_take_released(void)
{
    if (!atomic_load_explicit(&kp_released, memory_order_relaxed))
        return NULL;
    return atomic_exchange(&kp_released, NULL);
}

#endif
