/* The limit of a parameter server by loopback sockets: it receives a block of each worker, sends the sum to all, and keeps it.
 *
 * A group of connections, one for each worker, sends the same number of bytes in each trip, divided into the same blocks:
 * only payload is sent. The workers' side is that of floor.c. */
#define _GNU_SOURCE
#include "move_all.h"
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_WORKERS = 64, SLOTS = 4 /* most blocks of a worker on the server */ };
/* One thread with epoll; a thread for each connection, on the core of its worker; such threads and two calls: all parts
 * first, then the sums on request. */
enum { BY_EVENT, BY_THREADS, IN_TWO_CALLS };

/* The first bytes of a connection. */
typedef struct {
    int64_t group, rank, way, block, n;
} hello;

typedef struct {
    int64_t b;   /* number of the block, over all trips */
    size_t done; /* moved bytes of the block */
} place;

typedef struct group {
    struct group *next;
    hello as;
    int workers, come, epoll;
    int fds[MAX_WORKERS];
    float *parts[MAX_WORKERS]; /* SLOTS blocks each */
    float *sums[2];            /* of this trip and of the previous trip, which a pull could still read */
    place in[MAX_WORKERS], out[MAX_WORKERS];
    unsigned wanted[MAX_WORKERS]; /* events */
    atomic_uint arrived[SLOTS], ready; /* ready: summed blocks */
} group;

typedef struct {
    group *g;
    int rank;
} member;

static size_t size_of(const group *g, int64_t b)
{
    int64_t blocks = (g->as.n + g->as.block - 1) / g->as.block;
    int64_t left = g->as.n - b % blocks * g->as.block;
    return (size_t)(left < g->as.block ? left : g->as.block);
}

static float *part(const group *g, int rank, int64_t b)
{
    return g->parts[rank] + b % SLOTS * (g->as.block / (int64_t)sizeof(float));
}

static float *sum_of(const group *g, int64_t b)
{
    int64_t blocks = (g->as.n + g->as.block - 1) / g->as.block;
    return g->sums[b / blocks % 2] + b % blocks * (g->as.block / (int64_t)sizeof(float));
}

static void add(float *restrict sum, const float *restrict one, const float *restrict two, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum[i] = one[i] + two[i];
}

static void add_more(float *restrict sum, const float *restrict more, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += more[i];
}

/* Sum in rank order. */
static void sum_block(const group *g, int64_t b)
{
    size_t n = size_of(g, b) / sizeof(float);
    if (g->workers == 1)
        memcpy(sum_of(g, b), part(g, 0, b), n * sizeof(float));
    else
        add(sum_of(g, b), part(g, 0, b), part(g, 1, b), n);
    for (int rank = 2; rank < g->workers; rank++)
        add_more(sum_of(g, b), part(g, rank, b), n);
}

/* -------------------------------------------------------------------------------------------------- epoll */

/* Move bytes until the socket is not ready, up to the end of block `until`; return -1 if it is closed. */
static int advance(group *g, int rank, place *p, int64_t until, int sends)
{
    while (p->b < until) {
        char *at = (char *)(sends ? sum_of(g, p->b) : part(g, rank, p->b)) + p->done;
        size_t left = size_of(g, p->b) - p->done;
        ssize_t piece = sends ? send(g->fds[rank], at, left, MSG_DONTWAIT | MSG_NOSIGNAL)
                              : recv(g->fds[rank], at, left, MSG_DONTWAIT);
        if (piece < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        if (piece <= 0)
            return -1;
        p->done += (size_t)piece;
        if (p->done == size_of(g, p->b))
            *p = (place){p->b + 1, 0};
        else if (!sends)
            return 0; /* no more bytes now */
    }
    return 0;
}

static int64_t least(const group *g, const place *places)
{
    int64_t found = places[0].b;
    for (int rank = 1; rank < g->workers; rank++)
        found = places[rank].b < found ? places[rank].b : found;
    return found;
}

static int wait_for(group *g, int rank, int64_t free)
{
    unsigned events = (g->in[rank].b < free ? EPOLLIN : 0) | (g->out[rank].b < g->ready ? EPOLLOUT : 0);
    struct epoll_event e = {.events = events, .data.u32 = (uint32_t)rank};
    if (events == g->wanted[rank])
        return 0;
    g->wanted[rank] = events;
    return epoll_ctl(g->epoll, EPOLL_CTL_MOD, g->fds[rank], &e);
}

/* After bytes have arrived: sum complete blocks, send them, then request the events of the next ones. */
static int answer(group *g)
{
    for (; g->ready < least(g, g->in); g->ready++)
        sum_block(g, g->ready);
    for (int rank = 0; rank < g->workers; rank++)
        if (advance(g, rank, &g->out[rank], g->ready, 1))
            return -1;
    int64_t free = least(g, g->out) + SLOTS;
    for (int rank = 0; rank < g->workers; rank++)
        if (wait_for(g, rank, free))
            return -1;
    return 0;
}

static void by_event(group *g)
{
    struct epoll_event events[MAX_WORKERS];
    g->epoll = epoll_create1(0);
    for (int rank = 0; rank < g->workers; rank++) {
        struct epoll_event e = {.events = g->wanted[rank] = EPOLLIN, .data.u32 = (uint32_t)rank};
        epoll_ctl(g->epoll, EPOLL_CTL_ADD, g->fds[rank], &e);
    }
    for (;;) {
        int n = epoll_wait(g->epoll, events, g->workers, -1);
        for (int i = 0; i < n; i++) {
            int rank = (int)events[i].data.u32;
            if (events[i].events & (EPOLLERR | EPOLLHUP))
                return;
            if ((events[i].events & EPOLLIN) && advance(g, rank, &g->in[rank], least(g, g->out) + SLOTS, 0))
                return;
        }
        if (answer(g))
            return;
    }
}

/* ------------------------------------------------------------------------------------ a thread a connection */

/* The thread with the last part of a block sums it. */
static void arrive(group *g, int64_t b)
{
    if (atomic_fetch_add(&g->arrived[b % SLOTS], 1) + 1 < (unsigned)g->workers)
        return;
    atomic_store(&g->arrived[b % SLOTS], 0);
    sum_block(g, b);
    atomic_store(&g->ready, (unsigned)b + 1);
    syscall(SYS_futex, &g->ready, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

static void await(group *g, int64_t b)
{
    for (unsigned ready; (int)((ready = atomic_load(&g->ready)) - (unsigned)b) <= 0;)
        syscall(SYS_futex, &g->ready, FUTEX_WAIT_PRIVATE, ready, 0, 0, 0);
}

/* Pin the thread to core `rank` modulo the number of cores. */
static int bind_to_core(int rank)
{
    cpu_set_t all, one;
    int cpu = -1;
    if (sched_getaffinity(getpid(), sizeof all, &all))
        return -1;
    for (int left = rank % CPU_COUNT(&all); left >= 0; left -= CPU_ISSET(cpu, &all) != 0)
        cpu++;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    return sched_setaffinity(0, sizeof one, &one);
}

/* Receive a block before the sum of the previous block is sent. */
static void *one_connection(void *argument)
{
    member *m = argument;
    group *g = m->g;
    int64_t blocks = (g->as.n + g->as.block - 1) / g->as.block;
    bind_to_core(m->rank);
    for (int64_t b = 0;; b++) {
        int last = (b + 1) % blocks == 0, first = b % blocks == 0;
        if (move_all(g->fds[m->rank], part(g, m->rank, b), size_of(g, b), 0))
            return NULL;
        arrive(g, b);
        for (int64_t sent = first ? b : b - 1; sent < b + last; sent++) {
            await(g, sent);
            if (move_all(g->fds[m->rank], sum_of(g, sent), size_of(g, sent), 1))
                return NULL;
        }
    }
}

static void *one_in_two_calls(void *argument)
{
    member *m = argument;
    group *g = m->g;
    int64_t blocks = (g->as.n + g->as.block - 1) / g->as.block, b = 0;
    int fd = g->fds[m->rank];
    bind_to_core(m->rank);
    for (char word = 0;; b += blocks) {
        for (int64_t in = b; in < b + blocks; in++) {
            await(g, in - SLOTS);
            if (move_all(fd, part(g, m->rank, in), size_of(g, in), 0))
                return NULL;
            arrive(g, in);
        }
        if (move_all(fd, &word, 1, 1) || move_all(fd, &word, 1, 0))
            return NULL;
        for (int64_t out = b; out < b + blocks; out++) {
            await(g, out);
            if (move_all(fd, sum_of(g, out), size_of(g, out), 1))
                return NULL;
        }
    }
}

static void by_threads(group *g)
{
    void *(*serve_one)(void *) = g->as.way == IN_TWO_CALLS ? one_in_two_calls : one_connection;
    pthread_t threads[MAX_WORKERS];
    member members[MAX_WORKERS];
    for (int rank = 0; rank < g->workers; rank++) {
        members[rank] = (member){g, rank};
        if (pthread_create(&threads[rank], NULL, serve_one, &members[rank]))
            abort();
    }
    for (int rank = 0; rank < g->workers; rank++)
        pthread_join(threads[rank], NULL);
}

/* -------------------------------------------------------------------------------------------------- groups */

static float *written(size_t bytes)
{
    float *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    return memset(memory, 1, bytes);
}

/* All groups of a process use the same memory, as one is active at a time; a smaller buffer can still be in use. */
static void give_sums(group *g)
{
    static float *sums[2];
    static int64_t room;
    if (g->as.n > room) {
        room = g->as.n;
        for (int i = 0; i < 2; i++)
            sums[i] = written((size_t)room);
    }
    memcpy(g->sums, sums, sizeof sums);
}

static void *serve(void *argument)
{
    group *g = argument;
    for (int rank = 0; rank < g->workers; rank++)
        g->parts[rank] = written(SLOTS * (size_t)g->as.block);
    (g->as.way == BY_EVENT ? by_event : by_threads)(g);
    for (int rank = 0; rank < g->workers; rank++) {
        shutdown(g->fds[rank], SHUT_RDWR);
        close(g->fds[rank]);
        free(g->parts[rank]);
    }
    if (g->epoll)
        close(g->epoll);
    free(g);
    return NULL;
}

static group *join(group **groups, const hello *h, int workers)
{
    group **at = groups;
    while (*at && (*at)->as.group != h->group)
        at = &(*at)->next;
    if (!*at && (*at = calloc(1, sizeof **at))) {
        (*at)->as = *h;
        (*at)->workers = workers;
    }
    return *at;
}

/* Serve each group in its own thread, until the listener is closed. */
int socket_sum_serve(int listener, int workers)
{
    group *groups = NULL;
    while (workers <= MAX_WORKERS) {
        hello h;
        int one = 1, fd = accept(listener, NULL, NULL);
        if (fd < 0 && errno == EINTR)
            continue;
        if (fd < 0)
            return errno;
        setsockopt(fd, 6 /* IPPROTO_TCP */, 1 /* TCP_NODELAY */, &one, sizeof one);
        if (recv(fd, &h, sizeof h, MSG_WAITALL) != sizeof h || h.rank < 0 || h.rank >= workers || h.block <= 0)
            return -1;
        group *g = join(&groups, &h, workers);
        if (!g)
            return -1;
        g->fds[h.rank] = fd;
        if (++g->come < workers)
            continue;
        pthread_t thread;
        group **at = &groups;
        while (*at != g)
            at = &(*at)->next;
        *at = g->next;
        give_sums(g);
        if (pthread_create(&thread, NULL, serve, g))
            return -1;
        pthread_detach(thread);
    }
    return -1;
}
