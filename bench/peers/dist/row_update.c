/* The limit of a server of a row-sparse table, by loopback sockets and memory: it receives the rows of all workers, updates
 * the table in place by their sum in rank order, and sends each worker the rows that it requests.
 *
 * A trip has parts, each of them a range of the table: the counts of a worker's pushed and requested rows, the ids of the
 * pushed rows, these rows, and the ids of the requested rows; the reply is the requested rows. */
#define _GNU_SOURCE
#include "move_all.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

enum { MAX_WORKERS = 16, MAX_PARTS = 16, AHEAD = 8, SLICE = 512 /* rows */, WAKE = 1 << 20 };
enum { ONE_THREAD, BY_THREADS }; /* one thread for all connections, or one for each */

/* The first bytes of a connection. */
typedef struct {
    int64_t group, rank, way, most; /* `most`: the most rows of a part */
} hello;

typedef struct {
    int64_t pushed, pulled; /* rows of a part */
} counts;

typedef struct {
    float *at;
    int64_t rows, width;
    float rate;
} table;

typedef struct {
    int fd;
    counts n;
    int64_t *ids, *wanted;
    float *rows, *answer;
} line;

typedef struct group {
    struct group *next;
    hello as;
    const table *of;
    int workers, come;
    line lines[MAX_WORKERS];
    pthread_barrier_t together;
} group;

typedef struct {
    group *g;
    int rank;
} member;

static int receive(int fd, void *to, size_t n)
{
    return move_all(fd, (char *)to, n, 0);
}

static int send_all(int fd, const void *from, size_t n)
{
    return move_all(fd, (char *)from, n, 1);
}

static int receive_part(const group *g, line *l)
{
    if (receive(l->fd, &l->n, sizeof l->n) || l->n.pushed < 0 || l->n.pulled < 0)
        return -1;
    if (l->n.pushed > g->as.most || l->n.pulled > g->as.most)
        return -1;
    return receive(l->fd, l->ids, (size_t)l->n.pushed * sizeof *l->ids) ||
           receive(l->fd, l->rows, (size_t)(l->n.pushed * g->of->width) * sizeof *l->rows) ||
           receive(l->fd, l->wanted, (size_t)l->n.pulled * sizeof *l->wanted);
}

static void fetch(const table *t, int64_t id)
{
    for (int64_t i = 0; id >= 0 && id < t->rows && i < t->width; i += 16)
        __builtin_prefetch(t->at + id * t->width + i);
}

/* Return the first index whose id is not smaller. */
static int64_t find(const int64_t *ids, int64_t n, int64_t id)
{
    int64_t low = 0;
    while (low < n) {
        int64_t middle = low + (n - low) / 2;
        if (ids[middle] < id)
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

/* Update one row, pushed by `k` workers: SGD by the sum. */
static void update_row(const table *t, int64_t id, const float *const *have, int k)
{
    float *restrict w = t->at + id * t->width;
    if (k == 1) {
        for (int64_t i = 0; i < t->width; i++)
            w[i] -= t->rate * have[0][i];
        return;
    }
    for (int64_t i = 0; i < t->width; i++) {
        float sum = have[0][i];
        for (int j = 1; j < k; j++)
            sum += have[j][i];
        w[i] -= t->rate * sum;
    }
}

/* Update the rows whose ids are in [from, to). */
static void update(const group *g, int64_t from, int64_t to)
{
    const table *t = g->of;
    int64_t at[MAX_WORKERS], end[MAX_WORKERS];
    for (int r = 0; r < g->workers; r++) {
        at[r] = find(g->lines[r].ids, g->lines[r].n.pushed, from);
        end[r] = find(g->lines[r].ids, g->lines[r].n.pushed, to);
    }
    for (;;) {
        const float *have[MAX_WORKERS];
        int64_t id = INT64_MAX;
        int k = 0;
        for (int r = 0; r < g->workers; r++)
            if (at[r] < end[r] && g->lines[r].ids[at[r]] < id)
                id = g->lines[r].ids[at[r]];
        if (id < 0 || id >= t->rows)
            return;
        for (int r = 0; r < g->workers; r++) {
            const line *l = &g->lines[r];
            if (at[r] == end[r] || l->ids[at[r]] != id)
                continue;
            have[k++] = l->rows + at[r]++ * t->width;
            if (at[r] + AHEAD < end[r])
                fetch(t, l->ids[at[r] + AHEAD]);
        }
        update_row(t, id, have, k);
    }
}

/* Send slices that stay in a cache until the socket has copied them. */
static int answer_part(const group *g, line *l)
{
    const table *t = g->of;
    for (int64_t from = 0; from < l->n.pulled; from += SLICE) {
        int64_t to = from + SLICE < l->n.pulled ? from + SLICE : l->n.pulled;
        for (int64_t i = from; i < to; i++) {
            if (l->wanted[i] < 0 || l->wanted[i] >= t->rows)
                return -1;
            if (i + AHEAD < to)
                fetch(t, l->wanted[i + AHEAD]);
            memcpy(l->answer + (i - from) * t->width, t->at + l->wanted[i] * t->width, (size_t)t->width * sizeof(float));
        }
        if (send_all(l->fd, l->answer, (size_t)((to - from) * t->width) * sizeof(float)))
            return -1;
    }
    return 0;
}

static void *one_thread(group *g)
{
    for (;;) {
        for (int r = 0; r < g->workers; r++)
            if (receive_part(g, &g->lines[r]))
                return NULL;
        update(g, 0, g->of->rows);
        for (int r = 0; r < g->workers; r++)
            if (answer_part(g, &g->lines[r]))
                return NULL;
    }
}

/* Return a share of the rows of a part: the middle of the first worker's ids divides them evenly enough. */
static void update_share(const group *g, int rank)
{
    const line *first = &g->lines[0];
    int64_t n = first->n.pushed, w = g->workers;
    int64_t from = rank && n ? first->ids[n * rank / w] : 0, to = rank + 1 < w && n ? first->ids[n * (rank + 1) / w] : g->of->rows;
    if (n || !rank)
        update(g, from, to);
}

/* After a connection is closed the other threads wait until the process ends. */
static void *one_connection(void *argument)
{
    const member *m = argument;
    group *g = m->g;
    line *l = &g->lines[m->rank];
    for (;;) {
        if (receive_part(g, l))
            return NULL;
        pthread_barrier_wait(&g->together);
        update_share(g, m->rank);
        pthread_barrier_wait(&g->together);
        if (answer_part(g, l))
            return NULL;
    }
}

static void *memory_of(int64_t n, size_t size)
{
    size_t page = 2 << 20, bytes = ((size_t)n * size + page - 1) / page * page;
    void *found = aligned_alloc(page, bytes ? bytes : page);
    if (!found)
        abort();
    madvise(found, bytes, MADV_HUGEPAGE);
    memset(found, 1, bytes);
    return found;
}

static void *serve(void *argument)
{
    group *g = argument;
    pthread_t threads[MAX_WORKERS];
    member members[MAX_WORKERS];
    pthread_barrier_init(&g->together, NULL, (unsigned)g->workers);
    for (int r = 0; r < g->workers; r++) {
        line *l = &g->lines[r];
        l->ids = memory_of(g->as.most, sizeof *l->ids);
        l->wanted = memory_of(g->as.most, sizeof *l->wanted);
        l->rows = memory_of(g->as.most * g->of->width, sizeof(float));
        l->answer = memory_of(SLICE * g->of->width, sizeof(float));
    }
    if (g->as.way == ONE_THREAD)
        return one_thread(g);
    for (int r = 0; r < g->workers; r++) {
        members[r] = (member){g, r};
        if (pthread_create(&threads[r], NULL, one_connection, &members[r]))
            abort();
    }
    for (int r = 0; r < g->workers; r++)
        pthread_join(threads[r], NULL);
    return NULL;
}

/* Serve each group of connections in its own thread, until the listener is closed. All threads update one table. */
int row_update_serve(int listener, int workers, float *rows, int64_t n, int64_t width, float rate)
{
    static table own;
    group *groups = NULL;
    own = (table){memory_of(n * width, sizeof(float)), n, width, rate};
    memcpy(own.at, rows, (size_t)(n * width) * sizeof(float));
    while (workers <= MAX_WORKERS) {
        hello h;
        int one = 1, fd = accept(listener, NULL, NULL);
        if (fd < 0 && errno == EINTR)
            continue;
        if (fd < 0)
            return errno;
        setsockopt(fd, 6 /* IPPROTO_TCP */, 1 /* TCP_NODELAY */, &one, sizeof one);
        if (receive(fd, &h, sizeof h) || h.rank < 0 || h.rank >= workers || h.most < 0)
            return -1;
        group *g = groups;
        while (g && g->as.group != h.group)
            g = g->next;
        if (!g && (g = calloc(1, sizeof *g))) {
            *g = (group){.next = groups, .as = h, .of = &own, .workers = workers};
            groups = g;
        }
        if (!g)
            return -1;
        g->lines[h.rank].fd = fd;
        pthread_t thread;
        if (++g->come == workers && pthread_create(&thread, NULL, serve, g))
            return -1;
    }
    return -1;
}

/* ----------------------------------------------------------------------------------------------- a worker */

typedef struct {
    counts n[MAX_PARTS];
    struct iovec io[4 * MAX_PARTS];
    int at, end; /* of `io` */
} request;

static void put(request *q, const void *data, size_t n)
{
    if (n)
        q->io[q->end++] = (struct iovec){(void *)data, n};
}

/* Divide ids and rows into parts of the table. */
static void cut(request *q, int parts, int64_t table_rows, const int64_t *ids, int64_t n, const float *rows,
                int64_t width, const int64_t *wanted, int64_t n_wanted)
{
    int64_t low = 0, low_wanted = 0;
    for (int p = 0; p < parts; p++) {
        int64_t edge = table_rows * (p + 1) / parts, high = find(ids, n, edge), high_wanted = find(wanted, n_wanted, edge);
        q->n[p] = (counts){high - low, high_wanted - low_wanted};
        put(q, &q->n[p], sizeof q->n[p]);
        put(q, ids + low, (size_t)(high - low) * sizeof *ids);
        put(q, rows + low * width, (size_t)((high - low) * width) * sizeof *rows);
        put(q, wanted + low_wanted, (size_t)(high_wanted - low_wanted) * sizeof *wanted);
        low = high;
        low_wanted = high_wanted;
    }
}

/* Return 0, or -1 if the connection is closed. */
static int send_some(int fd, request *q)
{
    struct msghdr message = {.msg_iov = q->io + q->at, .msg_iovlen = (size_t)(q->end - q->at)};
    ssize_t sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    while (q->at < q->end && (size_t)sent >= q->io[q->at].iov_len)
        sent -= (ssize_t)q->io[q->at++].iov_len;
    if (q->at < q->end)
        q->io[q->at] = (struct iovec){(char *)q->io[q->at].iov_base + sent, q->io[q->at].iov_len - (size_t)sent};
    return 0;
}

/* Receive the available bytes, and wake up only for many more, as kvstore does. Return 0 or -1, as above. */
static int receive_some(int fd, char *out, size_t all, size_t *done)
{
    ssize_t piece = recv(fd, out + *done, all - *done, MSG_DONTWAIT);
    if (piece < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -1;
    *done += (size_t)piece;
    size_t left = all - *done;
    int low = left > WAKE ? WAKE : left ? (int)left : 1;
    return piece ? setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low) : -1;
}

/* Push rows, and pull those of `wanted` into `out`; both lists of ids ascend. Return 0 on success. */
int row_update_trip(int fd, int parts, int64_t table_rows, int64_t width, const int64_t *ids, int64_t n,
                    const float *rows, const int64_t *wanted, int64_t n_wanted, float *out)
{
    request q = {0};
    size_t done = 0, all = (size_t)(n_wanted * width) * sizeof *out;
    if (parts < 1 || parts > MAX_PARTS)
        return -1;
    cut(&q, parts, table_rows, ids, n, rows, width, wanted, n_wanted);
    while (q.at < q.end || done < all) {
        short events = (short)((q.at < q.end ? POLLOUT : 0) | (done < all ? POLLIN : 0));
        struct pollfd polled = {fd, events, 0};
        poll(&polled, 1, -1);
        if (polled.revents & (POLLERR | POLLHUP | POLLNVAL) || ((polled.revents & POLLOUT) && send_some(fd, &q)))
            return -1;
        if ((polled.revents & POLLIN) && receive_some(fd, (char *)out, all, &done))
            return -1;
    }
    return 0;
}
