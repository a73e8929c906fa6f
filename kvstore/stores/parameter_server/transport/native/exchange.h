/* Pushes into slices of one server, pulls of them, or both at once, and pushes and pulls of rows: requests are written, and
 * replies read, without the interpreter.
 *
 * What goes over the stream is what transport/frames.py says, byte by byte. Only a reply that is as expected is taken: each
 * of its records answers a part of this exchange, or of one before, that has no answer yet: a push by a word, others by
 * a value of the right size, in a frame or in the server's shared memory, by the packed parts whose sum it is, or by the ids and
 * rows that were asked for. Any other message is left to the usual way, and so are all after it. Nothing is written before the
 * whole head of a reply is checked. */
#ifndef KP_EXCHANGE_H
#define KP_EXCHANGE_H

#include <poll.h>
#include <sched.h>
#include <time.h>

#include "exchange_replies.h"

/* The last exchange over a stream, and what is waited for. */
typedef struct {
    kp_exchange *exchange;
    kp_stream *stream;
    const kp_exchange *until; /* what is waited for: this, or one before it; NULL: nothing of this stream */
} kp_way;

/* Receive what is there. 0: something has come that is no reply, or the stream is at its end. */
static int kp_receive_some_replies(kp_exchange *x, kp_stream *s)
{
    for (uint64_t done = 0; done < KP_ENOUGH && kp_left(x);) {
        ssize_t got = kp_read_socket(s);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            break;
        s->end = got > 0 ? kp_parse_replies(x, s) : got < 0 && errno == EBADMSG ? KP_FOREIGN : KP_CLOSED;
        if (s->end != KP_BLOCKED || s->first || (kp_is_held_back(x) && kp_send_allowed(s, x)))
            return 0;
        done += (uint64_t)got;
    }
    return 1;
}

static int kp_receive_replies(kp_way *way)
{
    kp_enter_moving(way->exchange);
    int goes_on = kp_receive_some_replies(way->exchange, way->stream);
    kp_choose_wakes(way->stream);
    return goes_on;
}

static int64_t kp_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Milliseconds from `now` to `end`, no less than it takes. */
static int kp_ms_until(int64_t end, int64_t now)
{
    int64_t left = (end - now + 999999) / 1000000;
    return left <= 0 ? 0 : left < 1000000 ? (int)left : 1000000;
}

/* How often to look for its answer before it costs less to sleep, and be woken; 0: it takes long anyway. */
static unsigned kp_most_looks(const kp_exchange *x)
{
    uint64_t nbytes = 0;
    for (uint32_t i = 0; i < x->n && nbytes <= KP_SMALL_BYTES; i++)
        nbytes += x->parts[i].nbytes;
    if (nbytes > KP_SMALL_BYTES)
        return 0;
    return kp_has_more_traffic(x, KP_TRAFFIC_BYTES) ? KP_TRAFFIC_LOOKS : KP_LOOKS;
}

/* As poll; `looking`, if it is not NULL, looks some more times before it sleeps, and lets others have the processor in between.
 *
 * How often becomes what would have been of use: more where the sleep was short, fewer where it was long, as it is where more
 * processes wait than there are cores. */
static int kp_poll(struct pollfd *waits, nfds_t n, int64_t end, kp_exchange *looking)
{
    for (unsigned i = 0; looking && i < looking->looks && i < looking->most_looks; i++) {
        int got = poll(waits, n, 0);
        if (got)
            return got;
        sched_yield();
    }
    int64_t slept = kp_clock_ns();
    int got = poll(waits, n, kp_ms_until(end, slept));
    if (looking) {
        unsigned wanted = kp_clock_ns() - slept < KP_SOON_NS ? 2 * looking->looks : looking->looks / 2;
        looking->looks = wanted > KP_LOOKS ? KP_LOOKS : wanted < KP_FEW_LOOKS ? KP_FEW_LOOKS : wanted;
    }
    return got;
}

static uint32_t kp_all_left(const kp_way *ways, size_t n, int alone)
{
    uint32_t left = 0;
    for (size_t i = 0; i < n; i++)
        if (ways[i].until)
            left += alone ? ways[i].until->left : kp_left(ways[i].until);
    return left;
}

/* Nanoseconds without a word after which more may go; INT64_MAX: nothing is held back. */
static int64_t kp_patience(const kp_way *ways, size_t n)
{
    int64_t least = INT64_MAX;
    for (size_t i = 0; i < n; i++) {
        int64_t one = ways[i].stream->is_near ? KP_NEAR_WIDER_NS : KP_WIDER_NS;
        if (kp_is_held_back(ways[i].exchange) && one < least)
            least = one;
    }
    return least;
}

static kv_about kp_about_first(const kp_exchange *x)
{
    for (uint32_t i = 0; x->left && i < x->n; i++)
        if (!x->parts[i].answered)
            return (kv_about){x->parts[i].slice, x->parts[i].pushed, 0, x->whom, x->observer.store};
    return x->before ? kp_about_first(x->before) : kp_about_all(&x->observer);
}

/* Begin a wait that is timed, unless something is there; about the first part that has no answer. As poll. */
static int kp_begin_wait(const kp_way *ways, size_t n_ways, struct pollfd *waits, nfds_t n)
{
    size_t i = 0;
    int got = poll(waits, n, 0);
    while (i + 1 < n_ways && !kp_left(ways[i].exchange))
        i++;
    if (!got)
        kv_enter(ways[i].exchange->observer.counters, KV_WAITING, kp_about_first(ways[i].exchange));
    return got;
}

/* Wait once. 1: something has come; 0: go on; -1: the end, or something failed. */
static int kp_await_some(kp_way *ways, size_t n_ways, struct pollfd *waits, nfds_t n, int64_t end, kp_exchange *looking)
{
    int64_t patience = kp_patience(ways, n_ways);
    int64_t wider = patience < INT64_MAX ? kp_clock_ns() + patience : end;
    int64_t until = wider < end ? wider : end;
    int got = n_ways && kv_is_timed(ways[0].exchange->observer.counters) ? kp_begin_wait(ways, n_ways, waits, n) : 0;
    got = got ? got : kp_poll(waits, n, until, looking);
    if (got || until == end)
        return got > 0 ? 1 : -1;
    for (size_t i = 0; i < n_ways; i++)
        if (kp_send_wider(ways[i].stream, ways[i].exchange))
            return -1;
    return 0;
}

/* Wait for replies until all have come, something else has, `end` is over, or a signal or another descriptor ends it.
 *
 * `end` is in seconds of the monotonic clock; the first descriptors are those of the ways. `alone`: for replies to what
 * is waited for, and not to what was sent before it. */
static void kp_await_replies(kp_way *ways, size_t n_ways, int alone, struct pollfd *waits, nfds_t n, double end)
{
    int goes_on = 1;
    for (size_t i = 0; i < n_ways; i++) {
        ways[i].stream->place = kp_place;
        ways[i].stream->placer = ways[i].exchange;
    }
    kp_exchange *looking = n_ways == 1 ? ways[0].exchange : NULL;
    if (looking)
        looking->most_looks = kp_most_looks(looking);
    int64_t end_ns = end < 9e9 ? (int64_t)(end * 1e9) : INT64_MAX;
    while (goes_on && kp_all_left(ways, n_ways, alone)) {
        int some = kp_await_some(ways, n_ways, waits, n, end_ns, looking);
        if (some < 0)
            break;
        if (!some)
            continue;
        goes_on = 0;
        for (size_t i = 0; i < n_ways; i++)
            if (waits[i].revents) {
                goes_on = kp_receive_replies(&ways[i]);
                if (!goes_on)
                    break;
            }
    }
    kv_leave_work(); /* whoever waits on goes on with this wait */
    for (size_t i = 0; i < n_ways; i++)
        if (kp_unplace(ways[i].stream) && ways[i].stream->end < KP_CLOSED)
            ways[i].stream->end = KP_NO_MEMORY;
}

#endif
