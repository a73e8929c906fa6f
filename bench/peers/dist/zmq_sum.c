/* The limit of a parameter server by libzmq: a ROUTER receives the parts of each slice, sums them and sends the sum to all.
 *
 * pyzmq's wheel has libzmq, but no zmq.h: this file declares the functions of its stable ABI that it calls. The loader
 * finds the symbols in the libzmq that pyzmq has loaded before. */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    _Alignas(void *) unsigned char opaque[64];
} zmq_msg_t;

enum { ZMQ_SNDMORE = 2 };

int zmq_msg_init(zmq_msg_t *m);
int zmq_msg_init_size(zmq_msg_t *m, size_t n);
int zmq_msg_init_data(zmq_msg_t *m, void *data, size_t n, void (*release)(void *, void *), void *hint);
int zmq_msg_move(zmq_msg_t *to, zmq_msg_t *from);
int zmq_msg_copy(zmq_msg_t *to, zmq_msg_t *from);
int zmq_msg_recv(zmq_msg_t *m, void *socket, int flags);
int zmq_msg_send(zmq_msg_t *m, void *socket, int flags);
int zmq_msg_close(zmq_msg_t *m);
int zmq_msg_more(const zmq_msg_t *m);
void *zmq_msg_data(zmq_msg_t *m);
size_t zmq_msg_size(const zmq_msg_t *m);

enum {
    MAX_WORKERS = 64,
    SLOTS = 64,       /* most slices of a worker in flight */
    COPIED = 64 << 10 /* smaller slices are copied into their message: that is cheaper than to share them */
};

typedef struct {
    uint32_t rank, slice;
} header;

typedef float loose __attribute__((aligned(1))); /* libzmq does not align small payloads */

/* ------------------------------------------------------------------------------------------------ frames */

static int received(zmq_msg_t *m, void *socket)
{
    zmq_msg_init(m);
    while (zmq_msg_recv(m, socket, 0) < 0)
        if (errno != EINTR)
            return -1;
    return 0;
}

static int sent(zmq_msg_t *m, void *socket, int flags)
{
    while (zmq_msg_send(m, socket, flags) < 0)
        if (errno != EINTR) {
            zmq_msg_close(m);
            return -1;
        }
    return 0;
}

static int sent_copy(const void *data, size_t n, void *socket, int flags)
{
    zmq_msg_t m;
    if (zmq_msg_init_size(&m, n))
        return -1;
    memcpy(zmq_msg_data(&m), data, n);
    return sent(&m, socket, flags);
}

static int received_header(header *h, void *socket)
{
    zmq_msg_t m;
    if (received(&m, socket))
        return -1;
    int whole = zmq_msg_size(&m) == sizeof *h && zmq_msg_more(&m);
    if (whole)
        memcpy(h, zmq_msg_data(&m), sizeof *h);
    zmq_msg_close(&m);
    return whole ? 0 : -1;
}

/* ------------------------------------------------------------------------------------------------ server */

typedef struct {
    zmq_msg_t parts[MAX_WORKERS]; /* by rank */
    int come;
} slot;

static int add(zmq_msg_t *total, zmq_msg_t *part)
{
    loose *sum = zmq_msg_data(total);
    const loose *more = zmq_msg_data(part);
    size_t n = zmq_msg_size(total);
    if (zmq_msg_size(part) != n)
        return -1;
    for (size_t i = 0; i < n / sizeof *sum; i++)
        sum[i] += more[i];
    return 0;
}

/* Sum in rank order into the first part, and send this message to all workers. */
static int answer(void *router, slot *s, uint32_t slice, zmq_msg_t *names, int workers)
{
    for (int rank = 1; rank < workers; rank++)
        if (add(&s->parts[0], &s->parts[rank]))
            return -1;
    for (int rank = 0; rank < workers; rank++) {
        zmq_msg_t shared;
        header h = {(uint32_t)rank, slice};
        zmq_msg_init(&shared);
        if (zmq_msg_copy(&shared, &s->parts[0]) ||
            sent_copy(zmq_msg_data(&names[rank]), zmq_msg_size(&names[rank]), router, ZMQ_SNDMORE) ||
            sent_copy(&h, sizeof h, router, ZMQ_SNDMORE) || sent(&shared, router, 0))
            return -1;
    }
    for (int rank = 0; rank < workers; rank++)
        zmq_msg_close(&s->parts[rank]);
    s->come = 0;
    return 0;
}

/* Serve until an error: the process ends with the worker that started it. A slot is free when a worker sends its next
 * slice, as no worker is more than SLOTS slices ahead of the slices that all workers have sent. */
int zmq_sum_serve(void *router, int workers)
{
    static slot slots[SLOTS];
    static zmq_msg_t names[MAX_WORKERS];
    if (workers < 1 || workers > MAX_WORKERS)
        return -1;
    for (int rank = 0; rank < workers; rank++)
        zmq_msg_init(&names[rank]);
    for (;;) {
        zmq_msg_t name;
        header h;
        if (received(&name, router) || received_header(&h, router) || h.rank >= (uint32_t)workers)
            return -1;
        slot *s = &slots[h.slice % SLOTS];
        if (zmq_msg_move(&names[h.rank], &name) || received(&s->parts[h.rank], router))
            return -1;
        if (++s->come == workers && answer(router, s, h.slice, names, workers))
            return -1;
    }
}

/* ------------------------------------------------------------------------------------------------ worker */

typedef struct {
    void *const *sockets; /* one for each server; slices are sent to them in turn */
    int servers;
    uint32_t rank;
    char *source, *target;
    int64_t n, slice;
} trip;

static size_t size_of(const trip *t, int64_t i)
{
    int64_t left = t->n - i * t->slice;
    return (size_t)(left < t->slice ? left : t->slice);
}

/* A large slice is sent without a copy: it does not change until its sum has arrived. */
static int send_slice(const trip *t, int64_t i)
{
    void *socket = t->sockets[i % t->servers];
    char *data = t->source + i * t->slice;
    size_t n = size_of(t, i);
    header h = {t->rank, (uint32_t)i};
    zmq_msg_t m;
    if (sent_copy(&h, sizeof h, socket, ZMQ_SNDMORE))
        return -1;
    if (n < COPIED)
        return sent_copy(data, n, socket, 0);
    return zmq_msg_init_data(&m, data, n, NULL, NULL) ? -1 : sent(&m, socket, 0);
}

/* The sums of one server arrive in the order of the slices. */
static int receive_slice(const trip *t, int64_t i)
{
    void *socket = t->sockets[i % t->servers];
    header h;
    zmq_msg_t m;
    if (received_header(&h, socket) || received(&m, socket))
        return -1;
    int right = h.rank == t->rank && h.slice == (uint32_t)i && zmq_msg_size(&m) == size_of(t, i);
    if (right)
        memcpy(t->target + i * t->slice, zmq_msg_data(&m), size_of(t, i));
    zmq_msg_close(&m);
    return right ? 0 : -1;
}

/* Send n bytes and receive their sum over all workers, with at most `window` slices in flight; return 0 on success. */
int zmq_sum_trip(void *const *sockets, int servers, int rank, char *source, char *target, int64_t n, int64_t slice,
                 int window)
{
    trip t = {sockets, servers, (uint32_t)rank, source, target, n, slice};
    int64_t slices = (n + slice - 1) / slice, next = 0;
    if (servers < 1 || window < 1 || window > SLOTS)
        return -1;
    for (int64_t got = 0; got < slices; got++) {
        for (; next < slices && next - got < window; next++)
            if (send_slice(&t, next))
                return -1;
        if (receive_slice(&t, got))
            return -1;
    }
    return 0;
}
