/* Waits for the streams of a server, and has messages handled without Python where somebody does. */
#ifndef KP_SERVE_H
#define KP_SERVE_H

#include <time.h>

#include "sender.h"

enum { KP_EVENTS = 64 };

static int64_t kp_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Wait for a stream, or with NULL for a descriptor of another kind. 0, or -1 with errno. */
static int kp_wait_for(int epoll, int descriptor, kp_stream *stream)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = stream};
    return epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event);
}

/* Receive what has come over a stream. 0: nothing of it is left to Python. */
static int kp_serve_stream(kp_stream *s)
{
    enum kp_outcome outcome = kp_receive(s);
    while (s->first && s->inlet && s->inlet->take(s->inlet->context, s->first)) {
        kp_message *message = s->first;
        s->first = message->next;
        kp_free_message(message);
    }
    if (s->first)
        return 1;
    s->last = &s->first;
    return outcome != KP_OPEN && outcome != KP_BLOCKED;
}

/* As epoll_wait. Where times are taken it looks first: a wait begins if nothing is there. */
static int kp_await_events(int epoll, struct epoll_event *events, int64_t nanoseconds, const kp_observer *observer,
                           const kp_waits *waits)
{
    int ms = nanoseconds > 0 ? (int)((nanoseconds + 999999) / 1000000) : 0;
    if (ms && kv_is_timed(observer->counters)) {
        int n = epoll_wait(epoll, events, KP_EVENTS, 0);
        if (n)
            return n;
        kv_enter(observer->counters, KV_WAITING, waits ? waits->about(waits->context) : kp_about_all(observer));
    }
    return epoll_wait(epoll, events, KP_EVENTS, ms);
}

/* Serve the streams of events; those that have something for Python, and their number. `others`: there was something else. */
static int kp_serve_events(const struct epoll_event *events, int n, kp_stream **left, const kp_observer *observer, int *others)
{
    int n_left = 0;
    for (int i = 0; i < n; i++) {
        kp_stream *s = (kp_stream *)events[i].data.ptr;
        if (!s) {
            *others = 1;
            continue;
        }
        kv_enter(observer->counters, KV_MOVING, kp_about_all(observer));
        if (kp_serve_stream(s))
            left[n_left++] = s;
    }
    return n_left;
}

/* Serve streams for so many nanoseconds at most, or until there is something for Python: the streams that have it, and
 * their number; or 0 with a descriptor that is no stream, or a signal. */
static int kp_serve(int epoll, int64_t nanoseconds, kp_stream **left, const kp_observer *observer, const kp_waits *waits)
{
    int64_t end = kp_now() + nanoseconds;
    for (;;) {
        struct epoll_event events[KP_EVENTS];
        int64_t rest = end - kp_now();
        int n = kp_await_events(epoll, events, rest, observer, waits), others = n <= 0;
        int n_left = kp_serve_events(events, n, left, observer, &others);
        if (n_left || others || rest <= 0) { /* there may be something to serve all the time */
            kv_leave_work();
            return n_left;
        }
    }
}

#endif
