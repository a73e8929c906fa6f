/* The keys by name: a hash table with open addressing that holds entry numbers, and grows while other workers read
 * it.
 *
 * A new table is filled before it is published; an entry and its place in the table are written before the count of
 * keys. So a reader needs no lock, and does not see what a dying writer leaves incomplete. Old tables stay: all of
 * them together are no larger than the last. Functions that change the table need the region's lock.
 */
#ifndef KV_TABLE_H
#define KV_TABLE_H

#include "arena.h"

/* Return the hash of a key: of the bytes of a text, or of a number with `bytes` 0. */
static uint64_t kv_hash(const char *text, uint64_t bytes, int64_t number)
{
    uint64_t h = 0x9e3779b97f4a7c15ull ^ (uint64_t)number * 0xff51afd7ed558ccdull;
    for (uint64_t i = 0; i < bytes; i++)
        h = (h ^ (unsigned char)text[i]) * 0x100000001b3ull;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93ull;
    return h ^ h >> 29;
}

/* Return the entry of a number below the count of keys. */
static inline kv_entry *kv_entry_at(kv_self *me, uint64_t number)
{
    uint64_t block = me->head->blocks[number / KV_BLOCK_KEYS];
    return (kv_entry *)kv_at(me, block) + number % KV_BLOCK_KEYS;
}

static int kv_same_key(kv_self *me, const kv_entry *e, const char *text, uint64_t bytes, int64_t number, uint64_t hash)
{
    if (e->hash != hash || e->is_text != (text != NULL))
        return 0;
    if (!text)
        return e->int_key == number;
    return e->name_bytes == bytes && memcmp(kv_at(me, e->name), text, bytes) == 0;
}

/* Return the number of a key's entry plus one; 0: there is none. Entries beyond the count of keys are incomplete: a
 * worker is making them, or died then. */
static uint64_t kv_find_key(kv_self *me, const char *text, uint64_t bytes, int64_t number)
{
    uint64_t index = kv_get(&me->head->index), log = index & 63, hash = kv_hash(text, bytes, number);
    const _Atomic uint64_t *slot = (const _Atomic uint64_t *)kv_at(me, index & ~63ull);
    for (uint64_t i = hash, mask = (1ull << log) - 1;; i++) {
        uint64_t found = kv_get(&slot[i & mask]);
        if (!found)
            return 0;
        if (found <= kv_get(&me->head->n_keys) && kv_same_key(me, kv_entry_at(me, found - 1), text, bytes, number, hash))
            return found;
    }
}

static void kv_put_number(_Atomic uint64_t *slot, uint64_t log, uint64_t hash, uint64_t number)
{
    uint64_t mask = (1ull << log) - 1, i = hash;
    while (kv_get(&slot[i & mask]))
        i++;
    kv_put(&slot[i & mask], number + 1);
}

/* Replace the table by one of 2^`log` places. The caller holds the lock. -1: there is no memory, and nothing has
 * changed. */
static int kv_grow_table(kv_self *me, uint64_t log)
{
    uint64_t bytes = 8ull << log, offset = kv_allocate_locked(me, bytes);
    if (!offset)
        return -1;
    _Atomic uint64_t *slot = (_Atomic uint64_t *)kv_at(me, offset);
    memset((void *)slot, 0, bytes);
    uint64_t n = kv_get(&me->head->n_keys);
    for (uint64_t i = 0; i < n; i++)
        kv_put_number(slot, log, kv_entry_at(me, i)->hash, i);
    kv_put(&me->head->index, offset | log);
    return 0;
}

/* Return the next entry, empty. The caller holds the lock, and no other worker sees the entry before `kv_publish_entry`.
 * NULL: there is no memory, or there are too many keys; the count of keys is unchanged. */
static kv_entry *kv_new_entry(kv_self *me)
{
    kv_header *head = me->head;
    uint64_t n = kv_get(&head->n_keys), log = kv_get(&head->index) & 63;
    if (n / KV_BLOCK_KEYS >= KV_MAX_KEY_BLOCKS)
        return NULL;
    if (2 * (n + 1) > 1ull << log && kv_grow_table(me, log + 1))
        return NULL;
    if (!head->blocks[n / KV_BLOCK_KEYS]) {
        uint64_t block = kv_allocate_locked(me, KV_BLOCK_KEYS * sizeof(kv_entry));
        if (!block)
            return NULL;
        atomic_thread_fence(memory_order_release);
        head->blocks[n / KV_BLOCK_KEYS] = block;
    }
    kv_entry *e = kv_entry_at(me, n);
    memset((void *)e, 0, sizeof *e);
    e->number = n;
    e->rule = -1;
    e->guard = e->last_guard = KV_GUARD;
    return e;
}

/* Make a new entry visible, and wake workers that wait for keys. The caller holds the lock and has filled the entry. */
static void kv_publish_entry(kv_self *me, kv_entry *e)
{
    uint64_t index = kv_get(&me->head->index);
    kv_put_number((_Atomic uint64_t *)kv_at(me, index & ~63ull), index & 63, e->hash, e->number);
    kv_put(&me->head->n_keys, e->number + 1);
    kv_wake_all(me);
}

#endif
