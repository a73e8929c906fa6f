/* Texts of the region: each has a guard, its length and its bytes, so that a single word names the place and the
 * length. */
#ifndef KV_TEXTS_H
#define KV_TEXTS_H

#include "arena.h"

typedef struct {
    uint64_t guard, bytes;
} kv_text_head;

/* Return the length of a text. Needs an offset for which `kv_is_text` holds. */
static inline uint64_t kv_text_bytes(const kv_self *me, uint64_t offset)
{
    return ((const kv_text_head *)kv_at(me, offset))->bytes;
}

/* Return the bytes of a text, without a terminating zero. Needs an offset for which `kv_is_text` holds. */
static inline char *kv_text_start(const kv_self *me, uint64_t offset)
{
    return (char *)kv_at(me, offset + sizeof(kv_text_head));
}

/* Whether the offset names a text with an intact guard. */
static inline int kv_is_text(const kv_self *me, uint64_t offset)
{
    return kv_is_given(me, offset, sizeof(kv_text_head)) &&
           ((const kv_text_head *)kv_at(me, offset))->guard == KV_GUARD &&
           kv_is_given(me, offset + sizeof(kv_text_head), kv_text_bytes(me, offset));
}

/* Return the bytes of memory that a text needs. */
static inline uint64_t kv_text_size(uint64_t bytes)
{
    return sizeof(kv_text_head) + bytes;
}

/* Write a text and return its offset. The caller holds the lock. 0: there is no memory. */
static uint64_t kv_new_text(kv_self *me, const char *text, uint64_t bytes)
{
    uint64_t offset = kv_allocate_locked(me, kv_text_size(bytes));
    if (offset) {
        *(kv_text_head *)kv_at(me, offset) = (kv_text_head){KV_GUARD, bytes};
        memcpy(kv_text_start(me, offset), text, bytes);
    }
    return offset;
}

/* Record the cause of a failed round, if there is memory for it. The caller holds the lock. */
static void kv_set_why(kv_self *me, kv_entry *e, uint64_t round, const char *text, uint64_t bytes)
{
    _Atomic uint64_t *why = &e->why[round % KV_FAILURES];
    uint64_t old = kv_get(why), offset = kv_new_text(me, text, bytes);
    kv_put(why, offset);
    if (old)
        kv_free_locked(me, old, kv_text_size(kv_text_bytes(me, old)));
}

/* Replace the settings. The caller holds the lock. -1: there is no memory, and nothing has changed. The version
 * changes first: a worker that sees it waits for the lock, and if this worker dies in between, all workers read the
 * same text. */
static int kv_set_settings(kv_self *me, const char *text, uint64_t bytes)
{
    uint64_t old = kv_get(&me->head->settings), offset = kv_new_text(me, text, bytes);
    if (!offset)
        return -1;
    kv_add(&me->head->settings_version, 1);
    kv_put(&me->head->settings, offset);
    if (old)
        kv_free_locked(me, old, kv_text_size(kv_text_bytes(me, old)));
    return 0;
}

#endif
