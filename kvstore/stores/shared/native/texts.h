/* Texts of the region: a block of a guard, the length and the bytes, so that one word says where a text is and how long. */
#ifndef KV_TEXTS_H
#define KV_TEXTS_H

#include "arena.h"

typedef struct {
    uint64_t guard, bytes;
} kv_text_head;

static inline uint64_t kv_text_bytes(const kv_self *me, uint64_t offset)
{
    return ((const kv_text_head *)kv_at(me, offset))->bytes;
}

static inline char *kv_text(const kv_self *me, uint64_t offset)
{
    return (char *)kv_at(me, offset + sizeof(kv_text_head));
}

/* Whether a text lies there, as it was written. */
static inline int kv_is_text(const kv_self *me, uint64_t offset)
{
    return kv_is_given(me, offset, sizeof(kv_text_head)) &&
           ((const kv_text_head *)kv_at(me, offset))->guard == KV_GUARD &&
           kv_is_given(me, offset + sizeof(kv_text_head), kv_text_bytes(me, offset));
}

/* The bytes that a text takes. */
static inline uint64_t kv_text_size(uint64_t bytes)
{
    return sizeof(kv_text_head) + bytes;
}

/* 0: there is no memory. The lock is held. */
static uint64_t kv_new_text(kv_self *me, const char *text, uint64_t bytes)
{
    uint64_t offset = kv_take_locked(me, kv_text_size(bytes));
    if (offset) {
        *(kv_text_head *)kv_at(me, offset) = (kv_text_head){KV_GUARD, bytes};
        memcpy(kv_text(me, offset), text, bytes);
    }
    return offset;
}

/* Put down why a round came to nothing, where there is memory for it. The lock is held. */
static void kv_set_why(kv_self *me, kv_entry *e, uint64_t round, const char *text, uint64_t bytes)
{
    _Atomic uint64_t *why = &e->why[round % KV_FAILURES];
    uint64_t old = kv_get(why), offset = kv_new_text(me, text, bytes);
    kv_put(why, offset);
    if (old)
        kv_give_locked(me, old, kv_text_size(kv_text_bytes(me, old)));
}

/* Change the settings; -1: there is no memory. The lock is held. The version comes first: who sees it waits for the
 * lock, and should this worker die, all find the same text. */
static int kv_set_settings(kv_self *me, const char *text, uint64_t bytes)
{
    uint64_t old = kv_get(&me->head->settings), offset = kv_new_text(me, text, bytes);
    if (!offset)
        return -1;
    kv_add(&me->head->settings_version, 1);
    kv_put(&me->head->settings, offset);
    if (old)
        kv_give_locked(me, old, kv_text_size(kv_text_bytes(me, old)));
    return 0;
}

#endif
