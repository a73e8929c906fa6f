/* The sum of a round as the packed parts of which it is the sum.
 *
 * Parts that a codec packs to one or two bits an element are smaller than their sum: the server stores the parts, and sends
 * all of them to each reader of the sum, which needs no arithmetic and loses nothing. The reader adds the parts up in the
 * same order, by the same kernels. Functions need exclusive use of the value; none blocks. */
#ifndef KP_PACKED_SUM_H
#define KP_PACKED_SUM_H

#include "buffers.h"
#include "job.h" /* of the kernels */

enum { KP_MOST_PACKED = 16 }; /* parts that together are less than half of their sum, with one bit or more an element */

/* As kv_run_dense of the kernels. */
typedef int (*kp_run)(kv_item *items, ptrdiff_t n, ptrdiff_t bytes, int threads);

typedef struct {
    kp_buffer *data; /* a reference to the unchanging memory of `at` */
    const char *at;
} kp_packed_part;

typedef struct {
    int n, capacity;
    uint8_t coding; /* of all */
    double threshold;
    ptrdiff_t nbytes; /* of each */
    kp_packed_part parts[];
} kp_packed;

/* Return a record's code in the form of the kernels. */
static inline kv_coding kp_coding_of(uint8_t coding, double threshold)
{
    return (kv_coding){.code = coding, .packed = coding < KV_N_CODES, .threshold = (float)threshold};
}

/* Return whether the sum of parts with this code may stay packed. */
static inline int kp_is_narrow(uint8_t coding)
{
    return coding && coding < KV_N_CODES && kv_code_bits[coding] < 8;
}

/* Return the number of parts of a packed sum of `size` elements in `nbytes`; 0: it is not a packed sum. */
static inline int kp_count_packed(uint8_t coding, uint64_t size, uint64_t nbytes)
{
    if (!kp_is_narrow(coding) || !size || size > (uint64_t)PTRDIFF_MAX / 2)
        return 0;
    uint64_t each = (uint64_t)kv_encoded_bytes(coding, (ptrdiff_t)size), n = nbytes / each;
    return n * each == nbytes && n <= KP_MOST_PACKED ? (int)n : 0;
}

/* Release all parts; the memory of the struct stays. */
static inline void kp_release_parts(kp_packed *packed)
{
    for (int i = 0; i < packed->n; i++)
        kp_release(packed->parts[i].data);
    packed->n = 0;
}

/* Release all parts, and free the struct; NULL is allowed. */
static inline void kp_free_packed(kp_packed *packed)
{
    if (packed)
        kp_release_parts(packed);
    free(packed);
}

/* Return memory for `n` parts: `old` without its parts, or new. NULL: no memory, and `old` is unchanged. */
static inline kp_packed *kp_packed_memory(kp_packed *old, int n)
{
    kp_packed *made = old;
    if (!old || old->capacity < n) {
        made = (kp_packed *)calloc(1, sizeof *made + (size_t)n * sizeof *made->parts);
        if (!made)
            return NULL;
        made->capacity = n;
        kp_free_packed(old);
    } else
        kp_release_parts(old);
    return made;
}

#endif
