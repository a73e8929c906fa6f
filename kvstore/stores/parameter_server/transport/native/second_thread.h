/* A second thread that serves streams of a server: parts of two workers are received, and their sums sent, at the same time.
 *
 * Each stream belongs to one of the two threads, and only that thread receives over it. A received message is handled by the
 * thread that holds the state lock, a mutex of the server's state. The first thread, Python's, holds it unless it is in
 * `kp_serve`: during that time Python may change all state. A message that the second thread cannot handle it passes to the
 * first one, and waits until Python has handled it.
 *
 * A sum, or rows, are sent by the thread of the receiving worker's stream if they are large, or if that thread is polling;
 * else by the thread that has computed them.
 *
 * Order of locks: the state lock, `kp_second.lock`, the lock of a stream. */
#ifndef KP_SECOND_THREAD_H
#define KP_SECOND_THREAD_H

#include <sched.h>
#include <semaphore.h>

#include "sender.h"

enum {
    KP_LOCK_TRIES = 50,                 /* to acquire the state lock, before a thread sleeps */
    KP_SERVER_POLLS = 50,          /* polls for events, before a thread sleeps */
    KP_SECOND_LEAST = 64 * 1024,   /* bytes of a message; smaller ones one thread handles faster than another one wakes */
    KP_IN_A_ROW = 8,               /* such messages before a stream moves to the second thread; smaller ones: back again */
    KP_ON_ONE_CPU = 4              /* large messages that both threads handle on one processor, before one thread moves */
};

typedef struct kp_second {
    pthread_t thread;
    int runs, first_epoll, epoll, wake, told; /* `wake` ends it; `told` is readable while it waits for Python */
    atomic_int stops;
    sem_t state_lock, resumes;
    kp_stream *left; /* its message is for Python; protected by the state lock */
    int is_left;     /* Python is handling it */
    pthread_mutex_t lock; /* for the next three; held while the second thread receives or sends */
    kp_stream **streams;  /* by descriptor */
    int capacity;
    kp_stream *at;               /* the stream it has received over; NULL: it was removed since */
    kp_stream *_Atomic inboxes[2]; /* of each thread: a stream to send, or KP_POLLING while the thread polls; see kp_pass_to_thread */
    atomic_int first_cpu; /* the processor of the first thread, since the second one has read it; -1: none */
    int together;         /* successive large messages that both threads have handled on one processor */
    kp_observer observer;
} kp_second;

/* Acquire the state lock; blocks. The caller does not hold it, nor any lock. */
static void kp_lock_state(kp_second *second)
{
    for (int i = 0; i < KP_LOCK_TRIES; i++) {
        if (!sem_trywait(&second->state_lock))
            return;
        sched_yield();
    }
    while (sem_wait(&second->state_lock))
        ;
}

/* Release the state lock; the caller holds it. */
static void kp_unlock_state(kp_second *second)
{
    sem_post(&second->state_lock);
}

static int kp_is_at_end(enum kp_outcome outcome)
{
    return outcome != KP_OPEN && outcome != KP_BLOCKED;
}

/* Handle the messages of a stream in C; needs the state lock. Sets `nbytes` to the largest one. 0: all are handled. */
static int kp_handle(kp_stream *s, enum kp_outcome outcome, uint64_t *nbytes)
{
    while (s->first && s->inlet && s->inlet->handle(s->inlet->context, s->first)) {
        kp_message *message = s->first;
        uint64_t size = 0;
        for (uint32_t i = 0; i < message->n; i++)
            size += message->frames[i]->nbytes;
        *nbytes = size > *nbytes ? size : *nbytes;
        s->first = message->next;
        kp_free_message(message);
    }
    if (s->first)
        return 1;
    s->last = &s->first;
    return kp_is_at_end(outcome);
}

/* --------------------------------------------------------------------------------------- the thread of a stream */

/* Have another thread poll a stream, which may serve it at once. Acquires the stream's lock. 0; -1: the stream stays. */
static int kp_move_stream(kp_stream *s, int to, epoll_data_t data)
{
    pthread_mutex_lock(&s->lock);
    struct epoll_event event = kp_events_of(s, data);
    int failed = epoll_ctl(to, EPOLL_CTL_ADD, s->fd, &event);
    if (!failed) {
        epoll_ctl(s->epoll, EPOLL_CTL_DEL, s->fd, NULL);
        s->epoll = to;
        s->event = data;
    }
    pthread_mutex_unlock(&s->lock);
    return failed;
}

/* Grow `streams` for a descriptor; needs `lock`. 0; -1: no memory. */
static int kp_grow_streams(kp_second *second, int fd)
{
    int capacity = 2 * fd + 16;
    if (fd < second->capacity)
        return 0;
    kp_stream **streams = (kp_stream **)realloc(second->streams, (size_t)capacity * sizeof *streams);
    if (!streams)
        return -1;
    memset(streams + second->capacity, 0, (size_t)(capacity - second->capacity) * sizeof *streams);
    second->streams = streams;
    second->capacity = capacity;
    return 0;
}

/* Return whether a stream belongs to the second thread; needs the state lock. */
static int kp_is_second(const kp_second *second, const kp_stream *s)
{
    return s->inbox == &second->inboxes[1];
}

/* Give a new stream to the first thread, which polls `epoll`; with `may_move` it may move to the second. Needs the state lock. */
static void kp_assign_to_first(kp_second *second, kp_stream *s, int epoll, int may_move)
{
    s->inbox = &second->inboxes[0];
    s->epoll = epoll;
    s->event = (epoll_data_t){.ptr = s};
    s->may_move = may_move;
}

/* Move a stream to the second thread, if there is memory; called by the first thread with the state lock. */
static void kp_move_to_second(kp_second *second, kp_stream *s)
{
    pthread_mutex_lock(&second->lock);
    s->in_a_row = 0;
    if (!kp_grow_streams(second, s->fd)) {
        second->streams[s->fd] = s;
        s->inbox = &second->inboxes[1];
        if (kp_move_stream(s, second->epoll, (epoll_data_t){.fd = s->fd})) {
            second->streams[s->fd] = NULL;
            s->inbox = &second->inboxes[0];
        }
    }
    pthread_mutex_unlock(&second->lock);
}

/* Move a stream to the first thread; called by the second thread with the state lock, which must not use the stream afterwards. */
static void kp_move_to_first(kp_second *second, kp_stream *s)
{
    int fd = s->fd;
    pthread_mutex_lock(&second->lock);
    s->in_a_row = 0;
    s->inbox = &second->inboxes[0];
    second->streams[fd] = NULL;
    if (kp_move_stream(s, second->first_epoll, (epoll_data_t){.ptr = s})) {
        second->streams[fd] = s;
        s->inbox = &second->inboxes[1];
    }
    pthread_mutex_unlock(&second->lock);
}

/* Remove a stream from the second thread; called by the first thread with the state lock. Blocks while that thread uses it. */
static void kp_remove_from_second(kp_second *second, kp_stream *s)
{
    kp_stream *handed = s;
    pthread_mutex_lock(&second->lock);
    atomic_compare_exchange_strong(&second->inboxes[1], &handed, KP_POLLING);
    second->streams[s->fd] = NULL;
    second->at = second->at == s ? NULL : second->at;
    epoll_ctl(second->epoll, EPOLL_CTL_DEL, s->fd, NULL);
    pthread_mutex_unlock(&second->lock);
    s->inbox = NULL;
}

/* Count large messages of a stream, and move it; by the first thread, with the state lock. Small ones may be pulls of sums. */
static void kp_choose_thread(kp_second *second, kp_stream *s, uint64_t nbytes)
{
    if (!s->may_move || nbytes < KP_SECOND_LEAST)
        return;
    s->in_a_row++;
    if (s->in_a_row == KP_IN_A_ROW)
        kp_move_to_second(second, s);
}

/* The same by the second thread, with the state lock; it must not use a stream that it has moved. */
static void kp_choose_thread_in_second(kp_second *second, kp_stream *s, uint64_t nbytes)
{
    s->in_a_row = nbytes < KP_SECOND_LEAST ? s->in_a_row + 1 : 0;
    if (s->in_a_row == KP_IN_A_ROW)
        kp_move_to_first(second, s);
}

/* --------------------------------------------------------------------------------------------------- waiting */
static void kp_send_passed(kp_stream *s)
{
    pthread_mutex_lock(&s->lock);
    kv_enter(s->observer.counters, KV_MOVING, kp_about_all(&s->observer));
    kp_flush_or_wait(s);
    kv_leave();
    pthread_mutex_unlock(&s->lock);
}

/* Poll for a short time, as epoll_wait without sleeping, and send a stream that another thread passes during this time. Needs
 * no lock; `lock` is `kp_second.lock`, for the second thread only. */
static int kp_poll_events(kp_stream *_Atomic *inbox, int epoll, struct epoll_event *events, int most, pthread_mutex_t *lock)
{
    int n = 0;
    atomic_store(inbox, KP_POLLING);
    for (int i = 0; i < KP_SERVER_POLLS && n <= 0 && atomic_load(inbox) == KP_POLLING; i++) {
        sched_yield();
        n = epoll_wait(epoll, events, most, 0);
    }
    if (lock)
        pthread_mutex_lock(lock);
    kp_stream *s = atomic_exchange(inbox, NULL);
    if (s != KP_POLLING)
        kp_send_passed(s);
    if (lock)
        pthread_mutex_unlock(lock);
    return n > 0 ? n : 0;
}

/* Return whether a sum, or another message, is likely to follow soon. */
static int kp_should_poll(uint64_t nbytes)
{
    return nbytes >= KP_SECOND_LEAST && nbytes <= KP_MUCH_BYTES;
}

/* --------------------------------------------------------------------------------------------------- the thread */

/* Receive over a stream; acquires `lock`. Returns the stream if there is a whole message or its end, else NULL. */
static kp_stream *kp_receive_second(kp_second *second, int fd, enum kp_outcome *outcome)
{
    pthread_mutex_lock(&second->lock);
    kp_stream *s = second->at = fd < second->capacity ? second->streams[fd] : NULL;
    if (s) {
        kv_enter(second->observer.counters, KV_MOVING, kp_about_all(&second->observer));
        *outcome = kp_receive(s, 1);
        if (!s->first && !kp_is_at_end(*outcome))
            s = NULL;
    }
    pthread_mutex_unlock(&second->lock);
    return s;
}

/* Pass a stream's message to Python; needs the state lock. 0: the first thread cannot be woken. */
static int kp_pass_to_python(kp_second *second, kp_stream *s)
{
    uint64_t one = 1;
    second->left = s;
    return write(second->told, &one, sizeof one) == sizeof one;
}

/* Send what another thread has requested. */
static void kp_send_second(kp_second *second, int fd)
{
    pthread_mutex_lock(&second->lock);
    kp_stream *s = fd < second->capacity ? second->streams[fd] : NULL;
    if (s)
        kp_send_requested(s);
    pthread_mutex_unlock(&second->lock);
}

/* Receive and handle messages; blocks until Python has handled one that C cannot. Returns bytes of the largest. */
static uint64_t kp_serve_second(kp_second *second, int fd)
{
    uint64_t nbytes = 0;
    enum kp_outcome outcome = KP_OPEN;
    kp_stream *s = kp_receive_second(second, fd, &outcome);
    int left = 0;
    if (s) {
        kp_lock_state(second);
        if (second->at && !second->stops) {
            left = kp_handle(s, outcome, &nbytes) && kp_pass_to_python(second, s);
            if (!left && nbytes)
                kp_choose_thread_in_second(second, s, nbytes);
        }
        kp_unlock_state(second);
    }
    kv_leave();
    while (left && sem_wait(&second->resumes))
        ;
    return nbytes;
}

/* Handle an event of a stream; as `kp_serve_second`. */
static uint64_t kp_serve_event_second(kp_second *second, const struct epoll_event *event)
{
    if (event->events & EPOLLOUT)
        kp_send_second(second, event->data.fd);
    return event->events & ~(uint32_t)EPOLLOUT ? kp_serve_second(second, event->data.fd) : 0;
}

/* Move this thread to another allowed processor, if there is one: the scheduler of Linux leaves a thread where it has run. */
static void kp_leave_cpu(int cpu)
{
    cpu_set_t all, others;
    if (sched_getaffinity(0, sizeof all, &all) || CPU_COUNT(&all) < 2)
        return;
    others = all;
    CPU_CLR(cpu, &others);
    if (!sched_setaffinity(0, sizeof others, &others))
        sched_setaffinity(0, sizeof all, &all);
}

/* After a message: if both threads handle large messages on one processor in turn, move to an idle one. */
static void kp_use_other_cpu(kp_second *second, uint64_t nbytes)
{
    if (nbytes <= KP_MUCH_BYTES)
        return;
    int cpu = sched_getcpu(), other = atomic_exchange(&second->first_cpu, -1);
    if (other >= 0)
        second->together = cpu == other ? second->together + 1 : 0;
    if (second->together < KP_ON_ONE_CPU)
        return;
    second->together = 0;
    kp_leave_cpu(cpu);
}

static void *kp_run_second(void *context)
{
    kp_second *second = (kp_second *)context;
    for (uint64_t nbytes = 0;;) {
        struct epoll_event event;
        int n = kp_should_poll(nbytes) ? kp_poll_events(&second->inboxes[1], second->epoll, &event, 1, &second->lock) : 0;
        n = n ? n : epoll_wait(second->epoll, &event, 1, -1);
        if ((n < 0 && errno != EINTR) || (n == 1 && event.data.fd == second->wake))
            return NULL;
        nbytes = n == 1 ? kp_serve_event_second(second, &event) : 0;
        kp_use_other_cpu(second, nbytes);
    }
}

static void kp_close_second(kp_second *second)
{
    int all[] = {second->epoll, second->wake, second->told};
    for (int i = 0; i < 3; i++)
        if (all[i] >= 0)
            close(all[i]);
    free(second->streams);
    second->streams = NULL;
}

static int kp_open_second(kp_second *second, int first_epoll, const kp_observer *observer)
{
    memset(second, 0, sizeof *second);
    second->observer = *observer;
    second->first_epoll = first_epoll;
    pthread_mutex_init(&second->lock, NULL);
    sem_init(&second->state_lock, 0, 0);
    sem_init(&second->resumes, 0, 0);
    second->epoll = epoll_create1(EPOLL_CLOEXEC);
    second->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    second->told = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event wake = {.events = EPOLLIN, .data.fd = second->wake}, told = {.events = EPOLLIN};
    atomic_store(&second->first_cpu, -1);
    return second->epoll < 0 || second->wake < 0 || second->told < 0 ||
           epoll_ctl(second->epoll, EPOLL_CTL_ADD, second->wake, &wake) ||
           epoll_ctl(first_epoll, EPOLL_CTL_ADD, second->told, &told);
}

/* Start the thread; the caller becomes the first thread, and holds the state lock. 0; -1: no thread, and nothing to stop. */
static int kp_start_second(kp_second *second, int first_epoll, const kp_observer *observer)
{
    int failed = kp_open_second(second, first_epoll, observer);
    if (!failed) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the program's own threads */
        failed = pthread_create(&second->thread, NULL, kp_run_second, second);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    second->runs = !failed;
    if (failed)
        kp_close_second(second);
    return failed ? -1 : 0;
}

/* End the thread, and wait for it; its streams must not be used by others. Called by the first thread with the state lock. `ours` as
 * in `kp_stop_sender`. A second call does nothing. */
static void kp_stop_second(kp_second *second, int ours)
{
    uint64_t one = 1;
    if (!second->runs)
        return;
    second->runs = 0;
    atomic_store(&second->stops, 1);
    if (ours && write(second->wake, &one, sizeof one) == sizeof one) {
        kp_unlock_state(second);
        sem_post(&second->resumes);
        pthread_join(second->thread, NULL);
    }
    kp_close_second(second);
}

#endif
