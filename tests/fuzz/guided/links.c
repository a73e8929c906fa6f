/* A server's links: three workers' bytes, as they arrive, while anything may end. A reply must be for
 * the worker that reads it, and well formed; memory fails now and then. The server is that of ../links.c. */
#include "input.h"
#define SEGMENT_BYTES 24576 /* as little as may be: it is made for each case */
#define MANY 33
#define main links_at_random
#include "../links.c"
#undef main

enum { CHANGED = N_COMING, N_EVENTS };

static fuzz_coming at_server[WORKERS], at_worker[WORKERS];

static fuzz_coming *fuzz_coming_at(int fd)
{
    int i = fd - FIRST_FD;
    MUST(i >= 0 && i < 2 * WORKERS);
    return i < WORKERS ? &at_server[i] : &at_worker[i - WORKERS];
}

static void gather(kp_deferred *rows, char *to)
{
    int before = failing;
    failing = 0;
    while (rows->left.n) {
        size_t nbytes;
        kp_buffer *some = (kp_buffer *)got(kp_gather_next(rows, &nbytes));
        memcpy(to, some->data, nbytes);
        to += nbytes;
        kp_release(some);
    }
    failing = before;
}

/* Answers are read at once: nothing of them is at the server then. */
static int answer(void *stream, const kp_piece *pieces, size_t n)
{
    worker *w = (worker *)stream;
    size_t nbytes = 0, at = 0;
    if (fails())
        return -1;
    for (size_t i = 0; i < n; i++)
        nbytes += pieces[i].nbytes;
    char *bytes = (char *)got(malloc(nbytes + !nbytes));
    for (size_t i = 0; i < n; at += pieces[i++].nbytes)
        if (pieces[i].rows)
            gather(pieces[i].rows, bytes + at);
        else
            memcpy(bytes + at, pieces[i].at, pieces[i].nbytes);
    at_worker[w - workers] = (fuzz_coming){(uint8_t *)bytes, 0, nbytes};
    check_answers(w);
    MUST(w->theirs.end == KP_BLOCKED && w->theirs.state == KP_HEAD && !w->theirs.got);
    free(bytes);
    kp_release_pieces((kp_piece *)pieces, n);
    return 0;
}

static void open_worker(worker *w)
{
    int i = (int)(w - workers), before = failing;
    failing = 0;
    MUST(!kp_open_stream(&w->ours, FIRST_FD + i, 1 << 20, NULL));
    MUST(!kp_open_stream(&w->theirs, FIRST_FD + WORKERS + i, 1 << 28, NULL));
    make_link(w);
    w->link.replier.outlet = (kp_outlet){w, answer};
    w->ours.inlet = &w->link.inlet;
    w->open = 1;
    failing = before;
}

static void close_worker(worker *w)
{
    if (!w->open)
        return;
    w->open = 0;
    kp_close_link(&w->link);
    kp_free_stream(&w->ours);
    kp_free_stream(&w->theirs);
    release();
}

static void replace_worker(worker *w)
{
    int32_t rank = w->session.rank;
    uint64_t incarnation = w->session.incarnation;
    work_off();
    w->session.gone = 1;
    for (int i = 0; i < SLICES; i++) {
        leave(&slices[i].pulls, &w->session);
        leave(&slices[i].held, &w->session);
    }
    close_worker(w);
    kp_close_session(&w->session);
    attach(w, rank, incarnation + 1);
    open_worker(w);
}

static void receive(worker *w, fuzz_coming coming)
{
    uint64_t nbytes = 0;
    if (!w->open)
        open_worker(w);
    at_server[w - workers] = coming;
    enum kp_outcome outcome = kp_receive(&w->ours, 1);
    kp_handle(&w->ours, outcome, &nbytes);
    for (kp_message *message = kp_take_messages(&w->ours), *following; message; message = following) {
        following = message->next;
        kp_free_message(message);
    }
    work_off();
    if (kp_is_at_end(outcome))
        close_worker(w);
}

/* As `change` of ../links.c, which draws it. */
static void change_by(const fuzz_event *event)
{
    int i = event->with % SLICES;
    worker *w = &workers[event->with % WORKERS];
    switch (event->number % 10) {
    case 0: forget(i); break;
    case 1: replace_worker(w); break;
    case 2: close_worker(w); break;
    case 3:
        for (int room = 0; room < 2; room++)
            kp_free_value_buffer(&values[i].buffers[room]);
        values[i].current = 0;
        break;
    case 4: furnish(i); break;
    case 5:
        members.n_needed = 1 + event->with % WORKERS;
        members.usual = event->with < 200 && !members.at_once;
        break;
    case 6: slices[i].special = event->with > 200; break;
    case 7: turn_mode(); break;
    case 8: plan(i); break;
    default:
        for (i = 0; i < SLICES; i++)
            if (!numbered[i])
                make_slice(i);
    }
    release();
}

static void begin(void)
{
    static int32_t needed[WORKERS] = {0, 1, 2};
    if (!kv_now) {
        kv_run_init();
        ours = pthread_self();
        sums.run = run;
        sums.run_rows = run_rows;
        sums.threads = &threads;
        for (int i = 0; i < SLICES; i++)
            moments[i] = (char *)got(calloc((size_t)shapes[i].n + 1, sizeof(double)));
    }
    kp_init_effects(&effects);
    members = (kp_members){1, 1, WORKERS, needed};
    for (int i = 0; i < SLICES; i++) {
        values[i] = (kp_value){0};
        make_slice(i);
    }
    for (int i = 0; i < WORKERS; i++) {
        attach(&workers[i], i, 100);
        open_worker(&workers[i]);
    }
}

static void end(void)
{
    failing = 0;
    work_off();
    for (int i = 0; i < SLICES; i++) {
        kp_close_slice(&slices[i]);
        for (int room = 0; room < 2; room++)
            kp_free_value_buffer(&values[i].buffers[room]);
        numbered[i] = NULL;
    }
    for (int i = 0; i < WORKERS; i++) {
        close_worker(&workers[i]);
        kp_close_session(&workers[i].session);
    }
    kp_copy_deferred(&rows.deferred);
    release();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    fuzz_event event;
    if (!fuzz_next(&in, &event))
        return 0;
    state = event.number + 88172645463325252u;
    begin();
    failing = event.what % 2;
    members.at_once = event.with % 4 == 3;
    members.usual = !members.at_once;
    while (fuzz_next(&in, &event)) {
        event.what %= N_EVENTS;
        if (event.what == CHANGED)
            change_by(&event);
        else
            receive(&workers[event.with % WORKERS], fuzz_come(&in, &event));
    }
    end();
    return 0;
}
