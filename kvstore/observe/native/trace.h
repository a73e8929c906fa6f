#ifndef KV_TRACE_H
#define KV_TRACE_H

/* Events as text: the objects of a trace in Chrome's format. */

#include <inttypes.h>
#include <stdio.h>

#include "events.h"

enum { KV_EVENT_TEXT = 512 }; /* bytes: more than the longest text has, with the most digits of each number */

static const char *const kv_kind_names[KV_EVENT_KINDS] = {
    "waiting", "moving", "summing", "updating", "converting", "call", "arrived", "lost", "back", "step", "bucket",
};

/* Write an event as an object of a trace, after a comma if it is not the first; return the length of the text.
 * Times are in microseconds since `origin`; a field that says nothing is left out. The kind of the event must be
 * one of kv_event_kind. It does not block. */
static int kv_event_text(char *to, const kv_event *e, uint64_t origin, uint32_t process, int comma)
{
    uint64_t at = e->begin - origin, ns = e->end - e->begin;
    int n = sprintf(to, "%s{\"ph\":\"X\",\"pid\":%u,\"tid\":%u,\"name\":\"%s\",\"ts\":%" PRIu64 ".%03u"
                    ",\"dur\":%" PRIu64 ".%03u,\"args\":{", comma ? ",\n" : "", process, e->thread,
                    kv_kind_names[e->kind], at / 1000, (unsigned)(at % 1000), ns / 1000, (unsigned)(ns % 1000));
    int first = n;
    if (e->store)
        n += sprintf(to + n, ",\"store\":%u", e->store);
    if (e->slice != KV_NO_SLICE)
        n += sprintf(to + n, ",\"slice\":%" PRIu64, e->slice);
    if (e->round)
        n += sprintf(to + n, ",\"round\":%" PRIu64, e->round);
    if (e->nbytes)
        n += sprintf(to + n, ",\"bytes\":%" PRIu64, e->nbytes);
    if (e->whom != KV_NOBODY)
        n += sprintf(to + n, ",\"whom\":%d", e->whom);
    if (n > first)
        to[first] = ' '; /* no comma before the first field */
    return n + sprintf(to + n, "}}");
}

#endif
