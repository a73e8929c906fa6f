/* Counted references to Python objects, which C code drops without the interpreter's lock.
 *
 * The last `kp_drop` puts an object on a list. Whoever holds the lock takes the list (`kp_take_dropped`), and releases
 * the objects. */
#ifndef KP_BUFFERS_H
#define KP_BUFFERS_H

#include <stdatomic.h>
#include <stdlib.h>

typedef struct kp_buffer {
    atomic_int references;
    void *owner;            /* the object; the buffer has one reference to it */
    struct kp_buffer *next; /* in the list of dropped ones */
} kp_buffer;

static kp_buffer *_Atomic kp_dropped;

/* NULL: there is no memory. */
static kp_buffer *kp_buffer_of(void *owner)
{
    kp_buffer *made = (kp_buffer *)malloc(sizeof *made);
    if (!made)
        return NULL;
    atomic_init(&made->references, 1);
    made->owner = owner;
    made->next = NULL;
    return made;
}

static inline kp_buffer *kp_keep(kp_buffer *buffer)
{
    if (buffer)
        atomic_fetch_add_explicit(&buffer->references, 1, memory_order_relaxed);
    return buffer;
}

static void kp_drop(kp_buffer *buffer)
{
    if (!buffer || atomic_fetch_sub_explicit(&buffer->references, 1, memory_order_acq_rel) != 1)
        return;
    buffer->next = atomic_load(&kp_dropped);
    while (!atomic_compare_exchange_weak(&kp_dropped, &buffer->next, buffer))
        ;
}

/* All that was dropped, as a list; the caller releases the objects, and frees the structs. */
static kp_buffer *kp_take_dropped(void)
{
    if (!atomic_load_explicit(&kp_dropped, memory_order_relaxed))
        return NULL;
    return atomic_exchange(&kp_dropped, NULL);
}

#endif
