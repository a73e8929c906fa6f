/* Allocation in the region: from its top, or from a list of freed pieces. All functions here need the region's lock,
 * except `kv_lock_region` and `kv_allocate`, which acquire it.
 *
 * Every list and every count changes with one store: if the holder of the lock dies, at worst one piece is lost.
 */
#ifndef KV_ARENA_H
#define KV_ARENA_H

#include <fcntl.h>
#include <sys/mman.h>

#include "wait.h"

#define KV_PAGE 4096ull
#define KV_GROWTH (8ull << 20)

/* Arrays that are used together should begin at different offsets within a page, because a load waits for a store to
 * the same offset of another page (kvstore/arrays/pages.py). The caller of an allocation passes its purpose. */
enum kv_colour { KV_VALUE_COLOUR, KV_STATE_COLOUR = 2, KV_SOURCE_COLOUR = 4, KV_COLOURS = 16 };

static uint64_t kv_offset_in_page(int colour)
{
    static const unsigned char place[KV_COLOURS] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    return 256ull * place[colour % KV_COLOURS];
}

/* A condition for `kv_wait`: no worker holds the lock. */
static int kv_lock_free(void *context)
{
    kv_self *me = (kv_self *)context;
    return kv_get(&me->head->lock) == 0;
}

/* Acquire the region's lock. Blocks as `kv_wait` does. KV_READY: the caller holds the lock. KV_TICK: not yet, also
 * after a loss, because the holder may be alive. KV_FENCED: this worker is fenced. The lock of a dead holder is
 * free. */
static int kv_lock_region(kv_self *me)
{
    while (!kv_try_lock(me)) {
        if (kv_is_fenced(me, kv_get(&me->worker->state)))
            return KV_FENCED;
        int outcome = kv_wait(me, kv_lock_free, me);
        if (outcome != KV_READY)
            return outcome == KV_PEER_LOST ? KV_TICK : outcome;
    }
    return KV_READY;
}

/* Return the size class of an allocation, and the rounded size. Each doubling has four classes: at most a quarter is
 * wasted. */
static int kv_size_class(uint64_t bytes, uint64_t *rounded)
{
    if (bytes < 256) {
        *rounded = (bytes + 63) & ~63ull;
        if (*rounded == 0)
            *rounded = 64;
        return (int)(*rounded / 64) - 1;
    }
    int log = 63 - __builtin_clzll(bytes);
    uint64_t quarter = 1ull << (log - 2), steps = (bytes + quarter - 1) / quarter; /* 4 to 8 */
    *rounded = steps * quarter;
    return (log - 8) * 4 + (int)(steps - 4) + 4;
}

/* Return the free memory of the machine or cgroup, in bytes: to reserve more would wake the kernel's OOM killer
 * instead of failing. Reads files; a file that cannot be read sets no limit. */
static uint64_t kv_available_memory(void)
{
    unsigned long long kilobytes = ~0ull >> 10;
    char line[128];
    FILE *file = fopen("/proc/meminfo", "re");
    if (file) {
        while (fgets(line, sizeof line, file))
            if (sscanf(line, "MemAvailable: %llu", &kilobytes) == 1)
                break;
        fclose(file);
    }
    uint64_t left = kilobytes << 10;
    unsigned long long limit, used;
    FILE *most = fopen("/sys/fs/cgroup/memory.max", "re"), *now = fopen("/sys/fs/cgroup/memory.current", "re");
    if (most && now && fscanf(most, "%llu", &limit) == 1 && fscanf(now, "%llu", &used) == 1)
        left = used >= limit ? 0 : limit - used < left ? limit - used : left;
    if (most)
        fclose(most);
    if (now)
        fclose(now);
    return left;
}

/* Reserve memory for the first `bytes` of the region, so that a write there cannot fail. The caller holds the lock.
 * Blocks while the system reserves pages. -1: there is no memory, and nothing has changed. */
static int kv_reserve(kv_self *me, uint64_t bytes)
{
    uint64_t have = kv_get(&me->head->reserved);
    if (bytes <= have)
        return 0;
    uint64_t step = have / 8 > KV_GROWTH ? have / 8 : KV_GROWTH;
    uint64_t want = bytes + (step < (256ull << 20) ? step : (256ull << 20));
    uint64_t left = kv_available_memory();
    if (want - have > left / 2)
        want = (bytes + KV_PAGE - 1) & ~(KV_PAGE - 1);
    want = (want + KV_PAGE - 1) & ~(KV_PAGE - 1);
    uint64_t window = kv_get(&me->head->window);
    if (want > window)
        want = window;
    if (bytes > want || want - have > left)
        return -1;
    int failed;
    pthread_mutex_lock(&me->busy); /* no thread closes the descriptor concurrently */
    do
        failed = posix_fallocate(me->fd, (off_t)have, (off_t)(want - have));
    while (failed == EINTR);
    pthread_mutex_unlock(&me->busy);
    if (failed)
        return -1;
    kv_put(&me->head->reserved, want);
    return 0;
}

/* Allocate memory of the region and return its offset. The caller holds the lock. May block while the system reserves
 * pages. 0: there is no memory, and nothing has changed. */
static uint64_t kv_allocate_coloured(kv_self *me, uint64_t bytes, int colour)
{
    kv_header *head = me->head;
    uint64_t rounded, offset;
    int class = kv_size_class(bytes, &rounded);
    if (class >= KV_SIZE_CLASSES)
        return 0;
    if (head->free[class]) {
        offset = head->free[class];
        head->free[class] = *(uint64_t *)kv_at(me, offset);
        return offset;
    }
    uint64_t top = kv_get(&head->top);
    offset = rounded < KV_PAGE ? top : (top + KV_PAGE - 1) & ~(KV_PAGE - 1);
    if (rounded >= 16 * KV_PAGE)
        offset += kv_offset_in_page(colour);
    if (rounded > me->window || kv_reserve(me, offset + rounded))
        return 0;
    kv_put(&head->top, offset + rounded);
    kv_fence();
    if (offset + rounded > kv_get(&head->window)) { /* a worker that has registered since cannot map this */
        kv_put(&head->top, top);
        return 0;
    }
    return offset;
}

/* As `kv_allocate_coloured`, for memory that may begin anywhere in a page. */
static uint64_t kv_allocate_locked(kv_self *me, uint64_t bytes)
{
    return kv_allocate_coloured(me, bytes, 0);
}

/* Free memory that was allocated with the same size. The caller holds the lock. Does not block. */
static void kv_free_locked(kv_self *me, uint64_t offset, uint64_t bytes)
{
    uint64_t rounded;
    int class = kv_size_class(bytes, &rounded);
    *(uint64_t *)kv_at(me, offset) = me->head->free[class];
    atomic_thread_fence(memory_order_release);
    me->head->free[class] = offset;
}

/* Allocate memory without holding the lock. Blocks as `kv_lock_region` does. KV_READY: `offset` is set; else KV_TICK,
 * KV_FENCED or KV_NO_MEMORY, and nothing has changed. */
static int kv_allocate(kv_self *me, uint64_t bytes, int colour, uint64_t *offset)
{
    int outcome = kv_lock_region(me);
    if (outcome != KV_READY)
        return outcome;
    *offset = kv_allocate_coloured(me, bytes, colour);
    kv_unlock_region(me);
    return *offset ? KV_READY : KV_NO_MEMORY;
}

#endif
