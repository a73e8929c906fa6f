/* Waits for the streams of a server, and has messages handled in C where an inlet can. */
#ifndef KP_SERVE_STREAMS_H
#define KP_SERVE_STREAMS_H

#include <time.h>

#include "second_thread.h"

enum { KP_EVENTS = 64 };

static int64_t kp_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Add a stream to an epoll set, or with NULL a descriptor of another kind. 0, or -1 with errno. */
static int kp_wait_for(int epoll, int descriptor, kp_stream *stream)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = stream};
    return epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event);
}

/* Return the workers that a server waits for, for a timeline. Acquires the state lock. */
static kv_about kp_about_awaited(kp_second *second, const kp_observer *observer, const kp_waits *waits)
{
    if (!waits)
        return kp_about_all(observer);
    if (second)
        kp_lock_state(second);
    kv_about about = waits->about(waits->context);
    if (second)
        kp_unlock_state(second);
    return about;
}

/* As epoll_wait. Where times are recorded it polls first: a wait is recorded only if there is no event. */
static int kp_await_events(int epoll, struct epoll_event *events, int64_t nanoseconds, const kp_observer *observer,
                           const kp_waits *waits, kp_second *second)
{
    int ms = nanoseconds > 0 ? (int)((nanoseconds + 999999) / 1000000) : 0;
    if (ms && kv_is_timed(observer->counters)) {
        int n = epoll_wait(epoll, events, KP_EVENTS, 0);
        if (n)
            return n;
        kv_enter(observer->counters, KV_WAITING, kp_about_awaited(second, observer, waits));
    }
    return epoll_wait(epoll, events, KP_EVENTS, ms);
}

/* The state of one `kp_serve`: its arguments, and the streams with messages for Python. */
typedef struct {
    int epoll;
    kp_second *second; /* NULL: there is one thread */
    const kp_observer *observer;
    const kp_waits *waits;
    kp_stream *left[KP_EVENTS + 1];
    int n_left;
    int others;      /* there was an event that is not of a stream */
    uint64_t nbytes; /* of the largest message that was just handled */
} kp_serving;

static void kp_handle_event(kp_serving *serving, kp_stream *s, enum kp_outcome outcome)
{
    uint64_t nbytes = 0;
    if (kp_handle(s, outcome, &nbytes))
        serving->left[serving->n_left++] = s;
    else if (serving->second)
        kp_choose_thread(serving->second, s, nbytes);
    serving->nbytes = nbytes > serving->nbytes ? nbytes : serving->nbytes;
}

/* Receive and handle messages of a stream; called without the state lock, returns with it. */
static void kp_serve_event(kp_serving *serving, kp_stream *s)
{
    kv_enter(serving->observer->counters, KV_MOVING, kp_about_all(serving->observer));
    enum kp_outcome outcome = kp_receive(s, 1);
    if (serving->second) {
        atomic_store(&serving->second->first_cpu, sched_getcpu());
        kp_lock_state(serving->second);
    }
    kp_handle_event(serving, s, outcome);
}

/* Handle an event of a stream; called without the state lock. Returns whether this thread holds it afterwards. */
static int kp_serve_stream(kp_serving *serving, kp_stream *s, uint32_t events)
{
    if (events & EPOLLOUT)
        kp_send_requested(s);
    if (!(events & ~(uint32_t)EPOLLOUT))
        return 0;
    kp_serve_event(serving, s);
    return serving->second != NULL;
}

/* Handle the events of streams; called without the state lock, returns with it. */
static void kp_serve_events(kp_serving *serving, const struct epoll_event *events, int n)
{
    int has_lock = 0;
    serving->others = n <= 0;
    serving->nbytes = 0;
    for (int i = 0; i < n; i++) {
        kp_stream *s = (kp_stream *)events[i].data.ptr;
        serving->others |= !s;
        if (!s)
            continue;
        if (has_lock)
            kp_unlock_state(serving->second);
        has_lock = kp_serve_stream(serving, s, events[i].events);
    }
    if (serving->second && !has_lock)
        kp_lock_state(serving->second);
}

/* Get the stream that the second thread has passed to Python; needs the state lock. */
static void kp_collect_left(kp_serving *serving)
{
    kp_second *second = serving->second;
    uint64_t count;
    if (!second || !second->left)
        return;
    serving->left[serving->n_left++] = second->left;
    second->left = NULL;
    second->is_left = 1;
    serving->others |= read(second->told, &count, sizeof count) > 0;
}

/* Let the second thread continue, after Python has handled its message. */
static void kp_resume_second(kp_second *second)
{
    if (!second || !second->is_left)
        return;
    second->is_left = 0;
    sem_post(&second->resumes);
}

/* Wait once for events, as epoll_wait. Called with the state lock, returns without it. */
static int kp_await_work(kp_serving *serving, struct epoll_event *events, int64_t nanoseconds)
{
    kp_second *second = serving->second;
    int n = 0;
    if (second) {
        kp_unlock_state(second);
        if (kp_should_poll(serving->nbytes))
            n = kp_poll_events(&second->inboxes[0], serving->epoll, events, KP_EVENTS, NULL);
    }
    return n ? n : kp_await_events(serving->epoll, events, nanoseconds, serving->observer, serving->waits, second);
}

/* Serve streams until there is work for Python, at most `nanoseconds`: then `left` has the streams with messages for Python,
 * or at their end; or another descriptor is readable; or a signal has arrived. Called without the GIL by the first thread,
 * with the state lock; blocks; returns with the state lock. The streams must stay open, and only this thread may add or remove some. */
static void kp_serve(kp_serving *serving, int64_t nanoseconds)
{
    int64_t end = kp_now() + nanoseconds;
    serving->n_left = 0;
    serving->nbytes = 0;
    kp_resume_second(serving->second);
    for (;;) {
        struct epoll_event events[KP_EVENTS];
        int64_t rest = end - kp_now();
        kp_serve_events(serving, events, kp_await_work(serving, events, rest));
        kp_collect_left(serving);
        if (serving->n_left || serving->others || rest <= 0) { /* the time limit holds even if events never cease */
            kv_leave_work();
            return;
        }
    }
}

#endif
