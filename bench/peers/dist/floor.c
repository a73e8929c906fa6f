/* The limit of loopback sockets: a process receives bytes and sends them back as they arrive. */
#include "move_all.h"
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { MAX_SERVERS = 16 };
/* Send, then receive; both in turn in one thread; a thread that sends; send until `window` bytes are in flight, then
 * receive; send all, and receive after a request to each server. */
enum { IN_TURN, POLLING, THREAD, WINDOW, TWO_CALLS };

/* Store the received bytes, acknowledge them, and send them back on request. */
static void keep(int fd, char *memory, size_t n)
{
    char word = 0;
    memset(memory, 1, n);
    while (!move_all(fd, memory, n, 0) && !move_all(fd, &word, 1, 1) && !move_all(fd, &word, 1, 0))
        if (move_all(fd, memory, n, 1))
            return;
}

/* The first eight bytes of a connection are the size of the server's block; or, if negative, of the bytes to store. */
static void *echo(void *line)
{
    int fd = (int)(intptr_t)line;
    int64_t block = 0;
    char *memory = NULL;
    if (recv(fd, &block, sizeof block, MSG_WAITALL) == sizeof block && block)
        memory = malloc((size_t)llabs(block));
    if (memory && block < 0)
        keep(fd, memory, (size_t)-block);
    while (memory && block > 0) {
        ssize_t piece = recv(fd, memory, (size_t)block, 0);
        if (piece < 0 && errno == EINTR)
            continue;
        if (piece <= 0 || move_all(fd, memory, (size_t)piece, 1))
            break;
    }
    free(memory);
    close(fd);
    return NULL;
}

/* Serve each connection in its own thread, until the listener is closed. */
int floor_serve(int listener)
{
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        pthread_t thread;
        if (fd < 0 && errno == EINTR)
            continue;
        if (fd < 0)
            return errno;
        int one = 1;
        setsockopt(fd, 6 /* IPPROTO_TCP */, 1 /* TCP_NODELAY */, &one, sizeof one);
        if (pthread_create(&thread, NULL, echo, (void *)(intptr_t)fd))
            return -1;
        pthread_detach(thread);
    }
}

typedef struct {
    const int *fds;
    int servers;
    const char *source;
    char *target;
    int64_t n, block, window;
    int hot; /* only the first block of the arrays is read and written, again and again */
} trip;

typedef struct {
    int64_t start, end, at;
} share;

/* The cut is between two numbers. */
static int64_t cut(const trip *t, int s)
{
    return s == t->servers ? t->n : t->n * s / t->servers / 4 * 4;
}

static void split(const trip *t, share *shares)
{
    for (int s = 0; s < t->servers; s++) {
        shares[s].start = shares[s].at = cut(t, s);
        shares[s].end = cut(t, s + 1);
    }
}

static size_t next_piece(const trip *t, const share *s)
{
    int64_t left = s->end - s->at, room = t->block - (s->at - s->start) % t->block;
    return (size_t)(left < room ? left : room);
}

static int64_t place(const trip *t, const share *s)
{
    return t->hot ? (s->at - s->start) % t->block : s->at;
}

/* Return the bytes moved; 0 if the socket is not ready; -1 on an error. */
static ssize_t moved(ssize_t result)
{
    if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
        return 0;
    return result <= 0 ? -1 : result;
}

static ssize_t send_piece(const trip *t, int s, share *out, int flags)
{
    ssize_t done = moved(send(t->fds[s], t->source + place(t, out), next_piece(t, out), flags | MSG_NOSIGNAL));
    out->at += done > 0 ? done : 0;
    return done;
}

static ssize_t receive_piece(const trip *t, int s, share *in, int flags)
{
    ssize_t done = moved(recv(t->fds[s], t->target + place(t, in), next_piece(t, in), flags));
    in->at += done > 0 ? done : 0;
    return done;
}

/* Move one block of each server in turn, so that all servers have work. */
static void *send_all(void *argument)
{
    const trip *t = argument;
    share out[MAX_SERVERS];
    split(t, out);
    for (int left = t->servers; left;) {
        left = 0;
        for (int s = 0; s < t->servers; s++) {
            if (out[s].at == out[s].end)
                continue;
            if (move_all(t->fds[s], (char *)t->source + place(t, &out[s]), next_piece(t, &out[s]), 1))
                return (void *)-1;
            out[s].at += (int64_t)next_piece(t, &out[s]);
            left += out[s].at < out[s].end;
        }
    }
    return NULL;
}

static int receive_all(const trip *t)
{
    share in[MAX_SERVERS];
    struct pollfd polled[MAX_SERVERS];
    split(t, in);
    for (;;) {
        int waiting = 0, last = 0;
        for (int s = 0; s < t->servers; s++) {
            int open = in[s].at < in[s].end;
            polled[s] = (struct pollfd){open ? t->fds[s] : -1, POLLIN, 0};
            if (open)
                waiting++, last = s;
        }
        if (!waiting)
            return 0;
        if (waiting == 1) { /* no poll is needed */
            if (receive_piece(t, last, &in[last], 0) < 0)
                return -1;
            continue;
        }
        poll(polled, (nfds_t)t->servers, -1);
        for (int s = 0; s < t->servers; s++)
            if (polled[s].revents && receive_piece(t, s, &in[s], MSG_DONTWAIT) < 0)
                return -1;
    }
}

static int by_turns(const trip *t)
{
    share out[MAX_SERVERS], in[MAX_SERVERS];
    struct pollfd polled[MAX_SERVERS];
    split(t, out);
    split(t, in);
    for (;;) {
        int waiting = 0;
        for (int s = 0; s < t->servers; s++) {
            short events = (short)((out[s].at < out[s].end ? POLLOUT : 0) | (in[s].at < in[s].end ? POLLIN : 0));
            polled[s] = (struct pollfd){events ? t->fds[s] : -1, events, 0};
            waiting += events != 0;
        }
        if (!waiting)
            return 0;
        poll(polled, (nfds_t)t->servers, -1);
        for (int s = 0; s < t->servers; s++) {
            if (polled[s].revents & (POLLERR | POLLHUP | POLLNVAL))
                return -1;
            if ((polled[s].revents & POLLIN) && receive_piece(t, s, &in[s], MSG_DONTWAIT) < 0)
                return -1;
            if ((polled[s].revents & POLLOUT) && send_piece(t, s, &out[s], MSG_DONTWAIT) < 0)
                return -1;
        }
    }
}

/* Without a poll: the bytes in flight fit into the buffers of the connections. */
static int in_windows(const trip *t)
{
    share out[MAX_SERVERS], in[MAX_SERVERS];
    split(t, out);
    split(t, in);
    for (int left = t->servers; left;) {
        for (int s = 0; s < t->servers; s++)
            while (out[s].at < out[s].end && out[s].at - in[s].at < t->window) {
                size_t n = next_piece(t, &out[s]);
                if (move_all(t->fds[s], (char *)t->source + out[s].at, n, 1))
                    return -1;
                out[s].at += (int64_t)n;
            }
        left = 0;
        for (int s = 0; s < t->servers; s++) {
            if (in[s].at < in[s].end && receive_piece(t, s, &in[s], MSG_WAITALL) < 0)
                return -1;
            left += in[s].at < in[s].end;
        }
    }
    return 0;
}

static int in_two_calls(trip *t)
{
    char word = 0;
    if (send_all(t))
        return -1;
    for (int s = 0; s < t->servers; s++)
        if (move_all(t->fds[s], &word, 1, 0))
            return -1;
    for (int s = 0; s < t->servers; s++)
        if (move_all(t->fds[s], &word, 1, 1))
            return -1;
    return receive_all(t);
}

/* Send n bytes, spread over the servers, and receive as many; return 0 on success. */
int floor_trip(const int *fds, int servers, const char *source, char *target, int64_t n, int64_t block, int64_t window,
               int way, int hot)
{
    trip t = {fds, servers, source, target, n, block, window, hot};
    if (servers < 1 || servers > MAX_SERVERS)
        return -1;
    if (way == POLLING)
        return by_turns(&t);
    if (way == WINDOW)
        return in_windows(&t);
    if (way == TWO_CALLS)
        return in_two_calls(&t);
    if (way == IN_TURN)
        return send_all(&t) ? -1 : receive_all(&t);
    pthread_t thread;
    if (pthread_create(&thread, NULL, send_all, &t))
        return -1;
    int failed = receive_all(&t);
    void *result = NULL;
    pthread_join(thread, &result);
    return failed || result ? -1 : 0;
}

/* The update of a server with an optimizer. */
void floor_sgd_momentum(float *restrict w, float *restrict v, const float *restrict g, int64_t n, float lr, float mu, float wd)
{
    for (int64_t i = 0; i < n; i++) {
        v[i] = mu * v[i] - lr * (g[i] + wd * w[i]);
        w[i] += v[i];
    }
}

void floor_sgd(float *restrict w, const float *restrict g, int64_t n, float lr)
{
    for (int64_t i = 0; i < n; i++)
        w[i] -= lr * g[i];
}

/* The update of the rows of a table that a worker pushed, without the read of the rows for the reply. */
void floor_sgd_rows(float *restrict table, const int64_t *restrict ids, const float *restrict g, int64_t rows, int64_t width, float lr)
{
    for (int64_t row = 0; row < rows; row++)
        floor_sgd(table + ids[row] * width, g + row * width, width, lr);
}
