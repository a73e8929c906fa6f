/* A second thread that serves streams of a server: two workers' parts are received, and their sums sent, at the same time.
 *
 * Each stream belongs to one of both threads, which alone receives over it. What has come is handled by the thread that has
 * the turn. The first thread, Python's, has it unless it is in `kp_serve`: all that messages change is Python's meanwhile.
 * What the second thread cannot handle it leaves to the first one, and waits until Python has done it.
 *
 * A sum, or rows, are sent by the thread of the worker's stream if they are large, or if that thread is looking for something
 * to do, and else by whoever has summed. */
#ifndef KP_SECOND_H
#define KP_SECOND_H

#include <sched.h>
#include <semaphore.h>

#include "sender.h"

enum {
    KP_TRIES = 50,                 /* for the turn, before a thread sleeps */
    KP_SERVER_LOOKS = 50,          /* for something to do, before it sleeps */
    KP_SECOND_LEAST = 64 * 1024,   /* bytes of a message: what is smaller, one thread serves before another one wakes */
    KP_IN_A_ROW = 8,               /* such messages before the second thread has a stream, or others before it has it no longer */
    KP_ON_ONE_CPU = 4              /* large messages served on one processor by both threads before one goes elsewhere */
};

typedef struct kp_second {
    pthread_t thread;
    int runs, first_epoll, epoll, wake, told; /* `wake` ends it; `told` is readable if it has left something */
    atomic_int stops;
    sem_t turn, resumes;
    kp_stream *left; /* to Python; under the turn */
    int is_left;     /* Python has been given it */
    pthread_mutex_t lock; /* for the next three; held while it receives or sends; taken after the turn */
    kp_stream **streams;  /* by descriptor */
    int room;
    kp_stream *at;               /* what it has received over; NULL: it was removed meanwhile */
    kp_stream *_Atomic hands[2]; /* of each thread, as `kp_hand_over` has it */
    atomic_int first_cpu; /* where the first thread has served since the second one has looked; -1: it has not */
    int together;         /* large messages that both have served on one processor, one after the other */
    kp_observer observer;
} kp_second;

static void kp_take_turn(kp_second *second)
{
    for (int i = 0; i < KP_TRIES; i++) {
        if (!sem_trywait(&second->turn))
            return;
        sched_yield();
    }
    while (sem_wait(&second->turn))
        ;
}

static void kp_give_turn(kp_second *second)
{
    sem_post(&second->turn);
}

static int kp_is_at_end(enum kp_outcome outcome)
{
    return outcome != KP_OPEN && outcome != KP_BLOCKED;
}

/* Handle what has come over a stream; `nbytes` of the largest message. 0: nothing of it is left to Python. */
static int kp_handle(kp_stream *s, enum kp_outcome outcome, uint64_t *nbytes)
{
    while (s->first && s->inlet && s->inlet->take(s->inlet->context, s->first)) {
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

/* ------------------------------------------------------------------------------------------- whose a stream is */

/* 0, or -1: the stream stays where it is. The other thread may be there at once, and send what it was asked to. */
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

/* Under the lock. 0, or -1: there is no memory. */
static int kp_make_stream_room(kp_second *second, int fd)
{
    int room = 2 * fd + 16;
    if (fd < second->room)
        return 0;
    kp_stream **streams = (kp_stream **)realloc(second->streams, (size_t)room * sizeof *streams);
    if (!streams)
        return -1;
    memset(streams + second->room, 0, (size_t)(room - second->room) * sizeof *streams);
    second->streams = streams;
    second->room = room;
    return 0;
}

static int kp_is_second(const kp_second *second, const kp_stream *s)
{
    return s->hand == &second->hands[1];
}

/* A stream is the first thread's, which waits for it with `epoll`, and may become the second one's. */
static void kp_take_in(kp_second *second, kp_stream *s, int epoll, int may_move)
{
    s->hand = &second->hands[0];
    s->epoll = epoll;
    s->event = (epoll_data_t){.ptr = s};
    s->may_move = may_move;
}

/* Have the second thread serve a stream; called by the first one, which has the turn. */
static void kp_give_second(kp_second *second, kp_stream *s)
{
    pthread_mutex_lock(&second->lock);
    s->in_a_row = 0;
    if (!kp_make_stream_room(second, s->fd)) {
        second->streams[s->fd] = s;
        s->hand = &second->hands[1];
        if (kp_move_stream(s, second->epoll, (epoll_data_t){.fd = s->fd})) {
            second->streams[s->fd] = NULL;
            s->hand = &second->hands[0];
        }
    }
    pthread_mutex_unlock(&second->lock);
}

/* Have the first thread serve a stream; called by the second one, which has the turn and does not use it after that. */
static void kp_give_first(kp_second *second, kp_stream *s)
{
    int fd = s->fd;
    pthread_mutex_lock(&second->lock);
    s->in_a_row = 0;
    s->hand = &second->hands[0];
    second->streams[fd] = NULL;
    if (kp_move_stream(s, second->first_epoll, (epoll_data_t){.ptr = s})) {
        second->streams[fd] = s;
        s->hand = &second->hands[1];
    }
    pthread_mutex_unlock(&second->lock);
}

/* Use a stream no longer; called by the first thread, which has the turn. */
static void kp_take_from_second(kp_second *second, kp_stream *s)
{
    kp_stream *handed = s;
    pthread_mutex_lock(&second->lock);
    atomic_compare_exchange_strong(&second->hands[1], &handed, KP_LOOKING);
    second->streams[s->fd] = NULL;
    second->at = second->at == s ? NULL : second->at;
    epoll_ctl(second->epoll, EPOLL_CTL_DEL, s->fd, NULL);
    pthread_mutex_unlock(&second->lock);
    s->hand = NULL;
}

/* After messages of at most so many bytes, by the first thread. Small ones may be requests for what the others brought. */
static void kp_choose_thread(kp_second *second, kp_stream *s, uint64_t nbytes)
{
    if (!s->may_move || nbytes < KP_SECOND_LEAST)
        return;
    s->in_a_row++;
    if (s->in_a_row == KP_IN_A_ROW)
        kp_give_second(second, s);
}

/* The same by the second thread, which does not use a stream that it has given away. */
static void kp_choose_thread_again(kp_second *second, kp_stream *s, uint64_t nbytes)
{
    s->in_a_row = nbytes < KP_SECOND_LEAST ? s->in_a_row + 1 : 0;
    if (s->in_a_row == KP_IN_A_ROW)
        kp_give_first(second, s);
}

/* ----------------------------------------------------------------------------------------------------- waiting */

static void kp_send_handed(kp_stream *s)
{
    pthread_mutex_lock(&s->lock);
    kv_enter(s->observer.counters, KV_MOVING, kp_about_all(&s->observer));
    kp_flush_or_wait(s);
    kv_leave();
    pthread_mutex_unlock(&s->lock);
}

/* As epoll_wait, without sleeping; and send what another thread hands over meanwhile. `lock` is for the second thread. */
static int kp_look(kp_stream *_Atomic *hand, int epoll, struct epoll_event *events, int most, pthread_mutex_t *lock)
{
    int n = 0;
    atomic_store(hand, KP_LOOKING);
    for (int i = 0; i < KP_SERVER_LOOKS && n <= 0 && atomic_load(hand) == KP_LOOKING; i++) {
        sched_yield();
        n = epoll_wait(epoll, events, most, 0);
    }
    if (lock)
        pthread_mutex_lock(lock);
    kp_stream *s = atomic_exchange(hand, NULL);
    if (s != KP_LOOKING)
        kp_send_handed(s);
    if (lock)
        pthread_mutex_unlock(lock);
    return n > 0 ? n : 0;
}

/* Whether a sum, or another message, is soon to follow. */
static int kp_looks_after(uint64_t nbytes)
{
    return nbytes >= KP_SECOND_LEAST && nbytes <= KP_MUCH_BYTES;
}

/* --------------------------------------------------------------------------------------------------- the thread */

/* Receive; the stream if something has come whole, or it is at its end. */
static kp_stream *kp_receive_second(kp_second *second, int fd, enum kp_outcome *outcome)
{
    pthread_mutex_lock(&second->lock);
    kp_stream *s = second->at = fd < second->room ? second->streams[fd] : NULL;
    if (s) {
        kv_enter(second->observer.counters, KV_MOVING, kp_about_all(&second->observer));
        *outcome = kp_receive(s, 1);
        if (!s->first && !kp_is_at_end(*outcome))
            s = NULL;
    }
    pthread_mutex_unlock(&second->lock);
    return s;
}

/* Leave a stream to Python; with the turn. 0: it cannot be told. */
static int kp_leave(kp_second *second, kp_stream *s)
{
    uint64_t one = 1;
    second->left = s;
    return write(second->told, &one, sizeof one) == sizeof one;
}

/* Send what another thread has asked for. */
static void kp_send_second(kp_second *second, int fd)
{
    pthread_mutex_lock(&second->lock);
    kp_stream *s = fd < second->room ? second->streams[fd] : NULL;
    if (s)
        kp_send_asked(s);
    pthread_mutex_unlock(&second->lock);
}

/* Receive and handle what has come; bytes of the largest message. */
static uint64_t kp_serve_second(kp_second *second, int fd)
{
    uint64_t nbytes = 0;
    enum kp_outcome outcome = KP_OPEN;
    kp_stream *s = kp_receive_second(second, fd, &outcome);
    int left = 0;
    if (s) {
        kp_take_turn(second);
        if (second->at && !second->stops) {
            left = kp_handle(s, outcome, &nbytes) && kp_leave(second, s);
            if (!left && nbytes)
                kp_choose_thread_again(second, s, nbytes);
        }
        kp_give_turn(second);
    }
    kv_leave();
    while (left && sem_wait(&second->resumes))
        ;
    return nbytes;
}

/* Do what an event of a stream asks for; as `kp_serve_second`. */
static uint64_t kp_serve_event_second(kp_second *second, const struct epoll_event *event)
{
    if (event->events & EPOLLOUT)
        kp_send_second(second, event->data.fd);
    return event->events & ~(uint32_t)EPOLLOUT ? kp_serve_second(second, event->data.fd) : 0;
}

/* Go to another processor that this thread may use, if there is one; the system leaves a thread where it has just run. */
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

/* After a message of so many bytes: where large ones are served by turns on one processor, another one is idle. */
static void kp_keep_apart(kp_second *second, uint64_t nbytes)
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
        int n = kp_looks_after(nbytes) ? kp_look(&second->hands[1], second->epoll, &event, 1, &second->lock) : 0;
        n = n ? n : epoll_wait(second->epoll, &event, 1, -1);
        if ((n < 0 && errno != EINTR) || (n == 1 && event.data.fd == second->wake))
            return NULL;
        nbytes = n == 1 ? kp_serve_event_second(second, &event) : 0;
        kp_keep_apart(second, nbytes);
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
    sem_init(&second->turn, 0, 0);
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

/* The caller is the first thread, and has the turn then. 0, or -1: there is no second thread. */
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

/* End it; its streams are used no longer. `ours`: as in `kp_stop_sender`. */
static void kp_stop_second(kp_second *second, int ours)
{
    uint64_t one = 1;
    if (!second->runs)
        return;
    second->runs = 0;
    atomic_store(&second->stops, 1);
    if (ours && write(second->wake, &one, sizeof one) == sizeof one) {
        kp_give_turn(second);
        sem_post(&second->resumes);
        pthread_join(second->thread, NULL);
    }
    kp_close_second(second);
}

#endif
