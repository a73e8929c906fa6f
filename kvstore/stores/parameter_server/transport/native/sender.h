/* A thread that sends what the sockets of streams did not accept at once, while the streams' owner computes.
 *
 * Order of locks: `kp_sender.lock`, then a stream's. Functions that acquire a stream's lock wait at most for one sendmsg of
 * KP_SEND_BYTES; none waits for the peer. */
#ifndef KP_SENDER_H
#define KP_SENDER_H

#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "stream.h"

enum { KP_MUCH_BYTES = 512 * 1024 }; /* of a message: a larger one takes longer to send than to wake another thread */

typedef struct kp_sender {
    int epoll, wake;
    int runs;
    pthread_t thread;
    pthread_mutex_t lock; /* for `streams`; acquired before that of a stream */
    kp_stream **streams;  /* by descriptor */
    int capacity;
} kp_sender;

/* Have the sender's thread continue when the socket has space; needs the stream's lock. 0; -1: it cannot wait. */
static int kp_await_writable(kp_sender *sender, kp_stream *s)
{
    struct epoll_event event = {.events = EPOLLOUT | EPOLLONESHOT, .data.fd = s->fd};
    if (s->waits)
        return 0;
    s->waits = epoll_ctl(sender->epoll, EPOLL_CTL_MOD, s->fd, &event) == 0;
    return s->waits ? 0 : -1;
}

static void kp_send_more(kp_sender *sender, int fd)
{
    pthread_mutex_lock(&sender->lock);
    kp_stream *s = fd < sender->capacity ? sender->streams[fd] : NULL;
    if (s)
        pthread_mutex_lock(&s->lock);
    pthread_mutex_unlock(&sender->lock);
    if (!s)
        return;
    s->waits = 0;
    kv_enter(s->observer.counters, KV_MOVING, kp_about_all(&s->observer));
    enum kp_outcome outcome = kp_flush(s, KP_SEND_BYTES);
    kv_leave();
    if (outcome != KP_CLOSED && kp_has_unsent(s))
        kp_await_writable(sender, s);
    pthread_mutex_unlock(&s->lock);
}

static void *kp_run_sender(void *context)
{
    kp_sender *sender = (kp_sender *)context;
    for (;;) {
        struct epoll_event event;
        int n = epoll_wait(sender->epoll, &event, 1, -1);
        if (n < 0 && errno != EINTR)
            return NULL;
        if (n == 1 && event.data.fd == sender->wake)
            return NULL;
        if (n == 1)
            kp_send_more(sender, event.data.fd);
    }
}

/* Start the thread; zeroes `sender`. 0, or -1 with errno; `kp_stop_sender` is needed in both cases. */
static int kp_start_sender(kp_sender *sender)
{
    sigset_t all, before;
    memset(sender, 0, sizeof *sender);
    pthread_mutex_init(&sender->lock, NULL);
    sender->epoll = epoll_create1(EPOLL_CLOEXEC);
    sender->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = sender->wake};
    if (sender->epoll < 0 || sender->wake < 0 || epoll_ctl(sender->epoll, EPOLL_CTL_ADD, sender->wake, &event))
        return -1;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the program's own threads */
    int failed = pthread_create(&sender->thread, NULL, kp_run_sender, sender);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    sender->runs = !failed;
    errno = failed;
    return failed ? -1 : 0;
}

/* End the thread, and wait for it; all streams are removed. `ours`: 0 in the child of a fork, which has no such thread. A
 * second call does nothing. */
static void kp_stop_sender(kp_sender *sender, int ours)
{
    uint64_t one = 1;
    if (sender->runs && ours && write(sender->wake, &one, sizeof one) == sizeof one)
        pthread_join(sender->thread, NULL);
    sender->runs = 0;
    if (sender->epoll >= 0)
        close(sender->epoll);
    if (sender->wake >= 0)
        close(sender->wake);
    sender->epoll = sender->wake = -1;
    free(sender->streams);
    sender->streams = NULL;
    sender->capacity = 0;
}

/* Register an open stream; it must be removed before it is freed. 0; -1: no memory or descriptor, and not registered. */
static int kp_add_stream(kp_sender *sender, kp_stream *s)
{
    struct epoll_event event = {.events = EPOLLONESHOT, .data.fd = s->fd}; /* a hang-up is reported once, not for ever */
    int failed = 0;
    pthread_mutex_lock(&sender->lock);
    if (s->fd >= sender->capacity) {
        int capacity = 2 * s->fd + 16;
        kp_stream **streams = (kp_stream **)realloc(sender->streams, (size_t)capacity * sizeof *streams);
        failed = !streams;
        if (streams) {
            memset(streams + sender->capacity, 0, (size_t)(capacity - sender->capacity) * sizeof *streams);
            sender->streams = streams;
            sender->capacity = capacity;
        }
    }
    failed = failed || epoll_ctl(sender->epoll, EPOLL_CTL_ADD, s->fd, &event);
    if (!failed) {
        sender->streams[s->fd] = s;
        s->sender = sender;
    }
    pthread_mutex_unlock(&sender->lock);
    return failed ? -1 : 0;
}

/* Unregister a stream; returns when the thread does not use it any more. A stream without sender: nothing to do. */
static void kp_remove_stream(kp_stream *s)
{
    kp_sender *sender = s->sender;
    if (!sender)
        return;
    pthread_mutex_lock(&sender->lock);
    if (s->fd < sender->capacity)
        sender->streams[s->fd] = NULL;
    epoll_ctl(sender->epoll, EPOLL_CTL_DEL, s->fd, NULL);
    pthread_mutex_unlock(&sender->lock);
    pthread_mutex_lock(&s->lock); /* it may be sending */
    pthread_mutex_unlock(&s->lock);
    s->sender = NULL;
}

/* Send what the socket accepts; the sender's thread sends the rest. Needs the stream's lock. A failure breaks the stream. */
static void kp_flush_or_wait(kp_stream *s)
{
    if (kp_flush(s, (size_t)-1) == KP_BLOCKED && (!s->sender || kp_await_writable(s->sender, s))) {
        s->broken = 1;
        shutdown(s->fd, SHUT_RDWR);
    }
}

#define KP_POLLING ((kp_stream *)1) /* in a inbox: its thread is polling, and can send a stream at once */

/* Pass a stream to its thread to be sent, if that thread is polling. 0: it is not. Needs the stream's lock. */
static int kp_pass_to_thread(kp_stream *s)
{
    kp_stream *looking = KP_POLLING;
    return s->inbox && atomic_compare_exchange_strong(s->inbox, &looking, s);
}

/* Return the epoll events of a stream for the thread that serves it. */
static struct epoll_event kp_events_of(const kp_stream *s, epoll_data_t data)
{
    return (struct epoll_event){EPOLLIN | (s->asked ? EPOLLOUT : 0), data};
}

static int kp_set_events(kp_stream *s)
{
    struct epoll_event event = kp_events_of(s, s->event);
    return epoll_ctl(s->epoll, EPOLL_CTL_MOD, s->fd, &event);
}

/* Request by epoll that the thread of a stream sends. 0: it cannot be requested. Needs the stream's lock. */
static int kp_request_send(kp_stream *s)
{
    s->asked = 1;
    s->asked = !kp_set_events(s);
    return s->asked;
}

/* Send what this thread was asked to send; acquires the stream's lock. Only by the thread that serves the stream. */
static void kp_send_requested(kp_stream *s)
{
    pthread_mutex_lock(&s->lock);
    if (s->asked) {
        s->asked = 0;
        kp_set_events(s);
        kv_enter(s->observer.counters, KV_MOVING, kp_about_all(&s->observer));
        kp_flush_or_wait(s);
        kv_leave();
    }
    pthread_mutex_unlock(&s->lock);
}

/* Leave the sending to the thread of a stream: many bytes always, so that several threads send at once, fewer only if it is
 * polling. 0: the caller sends. Needs the stream's lock. */
static int kp_thread_sends(kp_stream *s)
{
    return s->inbox && (s->unsent > KP_MUCH_BYTES ? kp_request_send(s) : kp_pass_to_thread(s));
}

/* As `kp_send`; with `others`, the thread of the stream may send it. */
static int kp_send_by(kp_stream *s, const kp_piece *pieces, size_t n, int others)
{
    pthread_mutex_lock(&s->lock);
    int waited = kp_has_unsent(s);
    int failed = s->broken || (s->cipher && s->cipher->pid != getpid()) || kp_queue_pieces(s, pieces, n);
    if (!failed && !waited && !(others && kp_thread_sends(s)))
        kp_flush_or_wait(s);
    pthread_mutex_unlock(&s->lock);
    return failed ? -1 : 0;
}

/* Queue a message and send what the socket accepts; acquires the stream's lock, does not wait for the peer. 0: the references
 * to the owners of all pieces belong to the stream, whose memory must not change until it is sent. -1: nothing is queued,
 * and the references remain the caller's: the stream is broken, or too much is queued. */
static int kp_send(kp_stream *s, const kp_piece *pieces, size_t n)
{
    return kp_send_by(s, pieces, n, 0);
}

/* `kp_outlet.send` of a stream; as `kp_send`. */
static int kp_send_to(void *stream, const kp_piece *pieces, size_t n)
{
    return kp_send_by((kp_stream *)stream, pieces, n, 1);
}

/* Return whether the peer has not read for so long that nothing more is queued. Acquires the stream's lock. */
static int kp_is_full(kp_stream *s)
{
    pthread_mutex_lock(&s->lock);
    int full = !s->broken && (s->unsent > s->most_unsent || s->n_pieces > KP_MOST_PIECES / 2);
    pthread_mutex_unlock(&s->lock);
    return full;
}

/* Return how many pieces can still be queued. Acquires the stream's lock. */
static size_t kp_free_pieces(kp_stream *s)
{
    pthread_mutex_lock(&s->lock);
    size_t n = KP_MOST_PIECES - s->n_pieces;
    pthread_mutex_unlock(&s->lock);
    return n;
}

/* Return whether all queued bytes are passed to the kernel, or the stream is broken. Acquires the stream's lock. */
static int kp_is_sent(kp_stream *s)
{
    kp_send_requested(s); /* the caller may be the thread of the stream, which does not serve it at this time */
    pthread_mutex_lock(&s->lock);
    int sent = !kp_has_unsent(s) || s->broken;
    pthread_mutex_unlock(&s->lock);
    return sent;
}

#endif
