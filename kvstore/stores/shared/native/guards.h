/* Checks that header, entries and texts of the region are not overwritten: a write to a wrong address destroys their
 * guards. All functions here only read, and do not block.
 *
 * Builds with KVSTORE_CHECKED=1 check header and entry with each round; `kvstore doctor` checks the whole region of a
 * running job.
 */
#ifndef KV_GUARDS_H
#define KV_GUARDS_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "table.h"
#include "texts.h"

enum kv_damage { KV_NOT_CHECKED, KV_INTACT, KV_DAMAGED_HEADER, KV_DAMAGED_ENTRY, KV_DAMAGED_TEXT };

/* Whether another version of kvstore has made the region, or its founder has not finished it. */
static int kv_is_foreign(const kv_header *head)
{
    uint64_t magic = kv_get((const _Atomic uint64_t *)&head->magic), came = 0;
    for (int w = 0; w < KV_MAX_WORKERS && !magic; w++)
        came |= kv_get(&head->worker[w].incarnation);
    return magic == KV_MAGIC ? head->version != KV_LAYOUT_VERSION || head->size != sizeof(kv_header) : !magic && !came;
}

static int kv_is_header_whole(const kv_header *head)
{
    return kv_get((const _Atomic uint64_t *)&head->magic) == KV_MAGIC && head->guard == KV_GUARD &&
           head->last_guard == KV_GUARD;
}

static int kv_is_entry_whole(const kv_entry *e)
{
    return e->guard == KV_GUARD && e->last_guard == KV_GUARD;
}

/* Whether the word names a text or none; the text may be freed concurrently. */
static int kv_names_text(const kv_self *me, const _Atomic uint64_t *word)
{
    uint64_t offset = kv_get(word);
    return !offset || kv_is_text(me, offset) || kv_get(word) != offset;
}

static enum kv_damage kv_damage_of_entry(const kv_self *me, const kv_entry *e)
{
    int whole = kv_names_text(me, &e->record);
    if (!kv_is_entry_whole(e))
        return KV_DAMAGED_ENTRY;
    for (int i = 0; i < KV_FAILURES; i++)
        whole = whole && kv_names_text(me, &e->why[i]);
    return whole ? KV_INTACT : KV_DAMAGED_TEXT;
}

static enum kv_damage kv_damage_of_entries(kv_self *me)
{
    enum kv_damage harm = kv_names_text(me, &me->head->settings) ? KV_INTACT : KV_DAMAGED_TEXT;
    uint64_t n = kv_get(&me->head->n_keys);
    for (uint64_t i = 0; i < n && harm == KV_INTACT; i++) {
        if (!kv_is_given(me, me->head->blocks[i / KV_BLOCK_KEYS], KV_BLOCK_KEYS * sizeof(kv_entry)))
            return KV_DAMAGED_HEADER;
        harm = kv_damage_of_entry(me, kv_entry_at(me, i));
    }
    return harm;
}

static int kv_map_readonly(kv_self *me, int fd, uint64_t bytes)
{
    void *base = mmap(NULL, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
    me->base = base == MAP_FAILED ? NULL : (char *)base;
    me->head = (kv_header *)me->base;
    return me->base ? 0 : -1;
}

/* Check the region of a job in which this process does not take part. Needs a readable descriptor, and maps it
 * read-only. KV_NOT_CHECKED: another version has made it, or it cannot be mapped. */
static enum kv_damage kv_find_damage(int fd)
{
    struct stat file;
    kv_self me = {.fd = fd};
    if (fstat(fd, &file) || (uint64_t)file.st_size < KV_HEADER_BYTES || kv_map_readonly(&me, fd, KV_HEADER_BYTES))
        return KV_NOT_CHECKED;
    enum kv_damage harm = kv_is_header_whole(me.head) ? KV_INTACT : KV_DAMAGED_HEADER;
    harm = kv_is_foreign(me.head) ? KV_NOT_CHECKED : harm;
    uint64_t window = kv_get(&me.head->window);
    munmap(me.base, KV_HEADER_BYTES);
    if (harm != KV_INTACT)
        return harm;
    if (kv_map_readonly(&me, fd, window))
        return KV_NOT_CHECKED;
    harm = kv_damage_of_entries(&me);
    munmap(me.base, window);
    return harm;
}

/* In builds with KVSTORE_CHECKED=1: end the process if the guards of header or entry are destroyed. */
#ifdef KV_CHECKED
static void kv_check_guards(const kv_self *me, const kv_entry *e)
{
    if (kv_is_header_whole(me->head) && kv_is_entry_whole(e))
        return;
    fprintf(stderr, "kvstore: worker %d: header or entry of the shared region is overwritten\n", me->rank);
    abort();
}
#else
static inline void kv_check_guards(const kv_self *me, const kv_entry *e)
{
    (void)me;
    (void)e;
}
#endif

#endif
