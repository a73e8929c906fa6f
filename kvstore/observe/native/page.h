#ifndef KV_PAGE_H
#define KV_PAGE_H

/* The counters of all stores of a process, in memory that other processes of the user can map.
 *
 * It is a memfd named KV_PAGE_NAME; readers find it in /proc/PID/fd. A forked child gets its own page at the same
 * address, and counts from 0. If there is no memfd, the page is private memory of the process. */

#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "activity.h"

#define KV_PAGE_NAME "kvstore-counters"
#define KV_PAGE_MAGIC "kvcount"
enum { KV_PAGE_VERSION = 1, KV_PLACES = 32 };

typedef struct {
    char magic[8];
    uint32_t version, process;
    uint64_t place_bytes, places;
    kv_counters stores[KV_PLACES];
} kv_page;

static kv_page *kv_page_here;
static int kv_page_fd = -1;

static uint64_t kv_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static _Thread_local uint32_t kv_this_thread;

static uint32_t kv_thread(void)
{
    if (!kv_this_thread)
        kv_this_thread = (uint32_t)syscall(SYS_gettid);
    return kv_this_thread;
}

static _Thread_local kv_activity kv_here;

static kv_activity *kv_this_activity(void)
{
    return &kv_here;
}

static kv_ring kv_own_ring = {.now = kv_now, .thread = kv_thread, .activity = kv_this_activity};

/* Numbers 0 to 2 are those of standard streams, also where they are closed: a line would be printed onto the page.
 * Blocks not. */
static int kv_above_standard(int fd)
{
    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    int above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    close(fd);
    return above;
}

static int kv_new_page_fd(void)
{
    int fd = kv_above_standard((int)syscall(SYS_memfd_create, KV_PAGE_NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (fd >= 0 && (ftruncate(fd, sizeof(kv_page)) || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL))) {
        close(fd);
        fd = -1;
    }
    return fd;
}

/* Map a new page, at an address or anywhere. NULL: there is no memory. */
static kv_page *kv_map_page(void *at)
{
    int fixed = at ? MAP_FIXED : 0;
    kv_page_fd = kv_new_page_fd();
    void *got = MAP_FAILED;
    if (kv_page_fd >= 0)
        got = mmap(at, sizeof(kv_page), PROT_READ | PROT_WRITE, MAP_SHARED | fixed, kv_page_fd, 0);
    if (got == MAP_FAILED)
        got = mmap(at, sizeof(kv_page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    if (got == MAP_FAILED)
        return NULL;
    kv_page *page = (kv_page *)got;
    memcpy(page->magic, KV_PAGE_MAGIC, sizeof page->magic);
    page->version = KV_PAGE_VERSION;
    page->process = (uint32_t)getpid();
    page->place_bytes = sizeof(kv_counters);
    page->places = KV_PLACES;
    return page;
}

/* The stores of the parent are this process's too, and count on in their places, from 0. */
static void kv_after_fork(void)
{
    uint64_t used[KV_PLACES];
    for (int i = 0; i < KV_PLACES; i++)
        used[i] = atomic_load(&kv_page_here->stores[i].used);
    if (kv_page_fd >= 0)
        close(kv_page_fd);
    kv_map_page(kv_page_here); /* where that fails, the parent's page is gone at least, or nothing has changed */
    for (int i = 0; i < KV_PLACES && kv_page_here->process == (uint32_t)getpid(); i++)
        kv_set_to(&kv_page_here->stores[i].used, used[i] ? KV_INHERITED : KV_FREE);
    atomic_store(&kv_own_ring.next, 0);
    kv_this_thread = 0;
    kv_here.begin = 0;
}

/* 0, or -1: there is no memory. */
static int kv_open_page(void)
{
    if (kv_page_here)
        return 0;
    kv_page_here = kv_map_page(NULL);
    return kv_page_here && !pthread_atfork(NULL, NULL, kv_after_fork) ? 0 : -1;
}

/* Take a free place; NULL: there is none. */
static kv_counters *kv_take_place(void)
{
    for (int i = 0; i < KV_PLACES; i++) {
        kv_counters *c = &kv_page_here->stores[i];
        uint64_t free_ = KV_FREE;
        if (!atomic_compare_exchange_strong(&c->used, &free_, KV_USED))
            continue;
        memset((char *)c + sizeof c->used, 0, sizeof *c - sizeof c->used);
        return c;
    }
    return NULL;
}

/* Record the last `size` events from now on; a power of two. 0, or -1: there is no memory. */
static int kv_start_ring(uint64_t size)
{
    if (kv_own_ring.size)
        return 0;
    void *got = mmap(NULL, size * sizeof(kv_event), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (got == MAP_FAILED)
        return -1;
    kv_own_ring.events = (kv_event *)got;
    kv_own_ring.size = size;
    return 0;
}

/* Copy events that are whole, the oldest first; return how many. `to` has room for all of the ring. */
static uint64_t kv_copy_events(kv_event *to)
{
    uint64_t end = atomic_load(&kv_own_ring.next), size = kv_own_ring.size, n = 0;
    for (uint64_t at = end > size ? end - size : 0; at < end; at++) {
        const kv_event *from = &kv_own_ring.events[at & (size - 1)];
        uint32_t mine = (uint32_t)(at + 1);
        if (*(const volatile uint32_t *)&from->written != mine)
            continue;
        atomic_thread_fence(memory_order_acquire);
        to[n] = *from;
        atomic_thread_fence(memory_order_acquire);
        n += *(const volatile uint32_t *)&from->written == mine;
    }
    return n;
}

#endif
