/* Messages with faults, and ends of anything at any time, at a server's links: for the sanitizers.
 *
 *     links SEED COUNT
 *
 * Three workers send to one server over pairs of sockets; Python's part is played by `work_off`. Replies must be
 * for the worker that reads it, and well formed. Memory fails now and then. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

static int fails(void);

static void *try_malloc(size_t n) { return fails() ? NULL : malloc(n); }
static void *try_calloc(size_t n, size_t size) { return fails() ? NULL : calloc(n, size); }
static void *try_realloc(void *p, size_t n) { return fails() ? NULL : realloc(p, n); }
static int try_memalign(void **p, size_t to, size_t n) { return fails() ? 1 : posix_memalign(p, to, n); }

#include <pthread.h>
#include "job_chunks.h"

#define KP_GATHER_BYTES 4096 /* so most answers with rows are gathered when they are sent */
#define malloc try_malloc
#define calloc try_calloc
#define realloc try_realloc
#define posix_memalign try_memalign
#include "links.h"
#include "numbers.h"
#include "serve_streams.h"
#undef malloc
#undef calloc
#undef realloc
#undef posix_memalign

#ifndef SEGMENT_BYTES
#define SEGMENT_BYTES (1 << 16)
#define MANY 9000
#endif

enum { WORKERS = 3, SLICES = 7, TABLE = 6, ROWS = 64, FIRST = 3, COLUMNS = 128, SEGMENT = SEGMENT_BYTES, JOB = 77, VERSION = 3 };

static const struct { int dtype; int64_t n; } shapes[SLICES] = {
    {KV_F32, 8}, {KV_F32, 5000}, {KV_F64, 3}, {KV_F32, MANY}, {KV_F32, 0}, {KV_F32, 1},
    {KV_F32, 0}}; /* the last is a table */

typedef struct {
    kp_session session;
    kp_link link;
    kp_stream ours, theirs;
    char *segment;
    int open;
} worker;

static kp_effects effects;
static kp_sums sums;
static kp_members members;
static kp_slice slices[SLICES];
static kp_value values[SLICES];
static kp_counts counts[SLICES];
static char *moments[SLICES];
static kp_table rows;
static kp_slice *numbered[SLICES];
static kp_slices table = {numbered, SLICES};
static worker workers[WORKERS];
static kp_sender sender;
static int poll_set, threads = 1;
static pthread_t ours;
static uint64_t state, sent, handled, left_over, answered, ended, rounds_done, summed, updated, packed, rows_updated, rows_answered, rows_deferred;
static int failing;

static uint64_t any(uint64_t n) /* below n */
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (state >> 11) % n;
}

static int fails(void)
{
    return failing && pthread_equal(pthread_self(), ours) && any(300) == 0;
}

#define CHECK(what)                                                        \
    do {                                                                   \
        if (!(what)) {                                                     \
            fprintf(stderr, "line %d: %s is not so\n", __LINE__, #what);   \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

static void *got(void *memory)
{
    CHECK(memory);
    return memory;
}

static void release(void)
{
    kp_buffer *first = kp_take_released();
    while (first) {
        kp_buffer *following = first->next;
        free(first->owner);
        free(first);
        first = following;
    }
}

/* A buffer that refers to an object, as Python's: the object is memory of its own. */
static kp_buffer *object(size_t nbytes, char **at)
{
    int before = failing;
    failing = 0;
    *at = (char *)got(calloc(1, nbytes ? nbytes : 1));
    kp_buffer *made = (kp_buffer *)got(kp_buffer_of(*at));
    failing = before;
    return made;
}

static int run(kv_item *items, ptrdiff_t n, ptrdiff_t bytes, int most)
{
    summed += (uint64_t)n;
    for (ptrdiff_t i = 0; i < n; i++)
        updated += items[i].rule >= 0;
    return fails() ? -1 : kv_run_dense(items, n, bytes, most);
}

static void run_rows(const kv_rows *job, const kv_group *group, int most)
{
    rows_updated++;
    kv_run_rows(job, group, most);
}

/* ------------------------------------------------------------------------------------------- Python's part */

/* Show the table, and plan its updates; or leave both to Python. */
static void show(void)
{
    enum { MOST = WORKERS * ROWS };
    static int64_t ids[MOST], maps[WORKERS * MOST];
    static float all[ROWS * COLUMNS], kept[MOST * COLUMNS];
    kp_copy_deferred(&rows.deferred);
    rows = (kp_table){.dtype = KV_F32, .n = ROWS, .first = FIRST, .cols = COLUMNS, .row_bytes = sizeof(float) * COLUMNS,
                      .most_parts = any(16) ? WORKERS : 1, .capacity = any(16) ? MOST : ROWS, .kept_capacity = any(16) ? MOST : 9,
                      .ids = ids, .maps = maps, .kept = (char *)kept, .kept_after = -1};
    rows.at = any(16) ? (char *)all : NULL;
    rows.plan = (kp_plan){.rule = 0, .version = (uint32_t)any(3), .epoch = any(2), .p = {0.1, 0.01, 1, 10},
                          .counts = any(8) ? &counts[TABLE] : NULL};
}

static void furnish(int i)
{
    static _Atomic uint64_t locks[SLICES][2];
    kp_value *v = &values[i];
    v->dtype = shapes[i].dtype;
    v->n = shapes[i].n;
    v->nbytes = v->n * kv_itemsize[v->dtype];
    v->sums = 1;
    v->run = run;
    for (int room = 0; room < 2 && v->nbytes; room++) {
        kp_free_value_buffer(&v->buffers[room]);
        v->buffers[room].holder = object((size_t)v->nbytes, &v->buffers[room].at);
        if (v->nbytes >= KP_SHARED_BYTES)
            v->buffers[room].seqlock = &locks[i][room];
    }
}

/* Updates, as an optimizer has them planned; or sums. */
static void plan(int i)
{
    enum { SGD, SGD_MOMENTUM };
    kp_value *v = &values[i];
    v->sums = any(2) != 0;
    v->plan.counts = NULL;
    if (any(4) == 0)
        return;
    v->plan = (kp_plan){.rule = any(2) ? SGD : SGD_MOMENTUM, .version = (uint32_t)any(3), .epoch = any(2),
                        .p = {0.1, 0.01, 1, 10, 0.9}, .counts = &counts[i]};
    v->plan.n_states = v->plan.rule == SGD_MOMENTUM;
    v->plan.states[0] = moments[i];
    counts[i] = (kp_counts){1 + (int64_t)any(5), 3};
}

static void make_slice(int i)
{
    slices[i] = (kp_slice){.owner = &slices[i], .id = (uint32_t)i, .defined = 1, .ready = 1};
    slices[i].value = i != TABLE && any(8) ? &values[i] : NULL;
    slices[i].table = i == TABLE ? &rows : NULL;
    numbered[i] = &slices[i];
    furnish(i);
    plan(i);
    show();
}

static void answer_all(void)
{
    while (effects.touched) {
        kp_session *s = effects.touched;
        effects.touched = s->next;
        if (!kp_reply_session(s)) {
            kp_forget_answers(s);
            s->report = 0;
            s->reported = s->received;
        }
        s->touched = 0;
    }
    effects.last_touched = &effects.touched;
    release();
}

/* The machine's handling of the remaining requests. */
static void work_off(void)
{
    while (effects.touched || effects.jobs) {
        answer_all();
        kp_slice *job = effects.jobs;
        effects.jobs = NULL;
        effects.last_job = &effects.jobs;
        for (kp_slice *following; job; job = following) {
            following = job->next;
            rounds_done++;
            if (!kp_finish_round(job, &members, &effects)) {
                job->busy = KP_NOTHING;
                kp_complete_round(job);
            }
        }
    }
}

static void forget(int i)
{
    work_off();
    kp_close_slice(&slices[i]);
    for (int room = 0; room < 2; room++)
        kp_free_value_buffer(&values[i].buffers[room]);
    values[i].current = 0;
    numbered[i] = NULL;
    release();
    if (any(4))
        make_slice(i);
}

static void leave(kp_waiters *w, kp_session *s)
{
    int kept = 0;
    for (int i = 0; i < w->n; i++)
        if (w->all[i].session == s)
            kp_release(w->all[i].data);
        else
            w->all[kept++] = w->all[i];
    w->n = kept;
}

/* ------------------------------------------------------------------------------------------------- workers */

/* Ids, and rows in the same frame or in the next one. */
static void check_rows(const kp_part *part)
{
    const kp_buffer *of_rows = part->more ? part->more : part->data;
    uint64_t ids = 8 * (uint64_t)part->request.rows, nbytes = part->request.nbytes - ids;
    CHECK(part->at >= part->data->data && ids <= part->data->nbytes - (uint64_t)(part->at - part->data->data));
    CHECK(part->rows >= of_rows->data && nbytes <= of_rows->nbytes - (uint64_t)(part->rows - of_rows->data));
}

/* The sanitizers detect only reads, and not that the memory is another worker's. */
static void check_parts(void)
{
    for (int i = 0; i < SLICES; i++)
        for (int j = 0; j < slices[i].n_open; j++)
            for (int k = 0; k < slices[i].open[j].n; k++) {
                const kp_part *part = &slices[i].open[j].parts[k];
                const kp_buffer *data = part->data;
                if (part->at && part->rows)
                    check_rows(part);
                if (!part->at || part->rows)
                    continue;
                uint64_t room = data->owner ? SEGMENT : data->nbytes;
                const char *from = data->owner ? (const char *)data->owner : data->data;
                CHECK(part->at >= from && part->request.nbytes <= room);
                CHECK((uint64_t)(part->at - from) <= room - part->request.nbytes);
            }
}

static int take(void *context, kp_message *message)
{
    int all = kp_handle_message(context, message);
    check_parts();
    static const kp_deferred *last;
    rows_deferred += rows.deferred && rows.deferred != last;
    last = rows.deferred;
    CHECK(message->n && (!all || !effects.touched));
    handled += message->handled;
    return all;
}

static void make_link(worker *w)
{
    kp_link *l = &w->link;
    *l = (kp_link){.effects = &effects, .sums = &sums, .members = &members, .slices = &table, .session = &w->session,
                   .report = 1000};
    l->replier.members = &members;
    l->replier.slices = &table;
    l->replier.version = VERSION;
    l->replier.job = JOB;
    l->replier.reads_here = (int)any(2);
    l->inlet = (kp_inlet){l, take};
    l->segments = (kp_segment *)got(calloc(2, sizeof *l->segments));
    l->n_segments = 2; /* of which one is mapped */
    l->segments[1].holder = object(SEGMENT, &l->segments[1].at);
    l->segments[1].nbytes = SEGMENT;
}

static void open_stream(worker *w)
{
    int both[2], room = 8192, before = failing;
    failing = 0;
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both));
    setsockopt(both[0], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    CHECK(!kp_open_stream(&w->ours, both[0], 1 << 20, NULL) &&
          !kp_open_stream(&w->theirs, both[1], 1 << 28, NULL));
    CHECK(!kp_add_stream(&sender, &w->ours) && !kp_wait_for(poll_set, both[0], &w->ours));
    make_link(w);
    w->link.replier.outlet = (kp_outlet){&w->ours, kp_send_to};
    w->ours.inlet = &w->link.inlet;
    w->open = 1;
    failing = before;
}

static void close_stream(worker *w)
{
    if (!w->open)
        return;
    w->open = 0;
    kp_close_link(&w->link);
    epoll_ctl(poll_set, EPOLL_CTL_DEL, w->ours.fd, NULL);
    kp_remove_stream(&w->ours);
    kp_free_stream(&w->ours);
    kp_free_stream(&w->theirs);
    release();
}

static void attach(worker *w, int rank, uint64_t incarnation)
{
    w->session = (kp_session){.owner = w, .rank = rank, .incarnation = incarnation};
}

static void replace(worker *w)
{
    int rank = w->session.rank;
    uint64_t incarnation = w->session.incarnation;
    work_off();
    w->session.gone = 1;
    for (int i = 0; i < SLICES; i++) {
        leave(&slices[i].pulls, &w->session);
        leave(&slices[i].held, &w->session);
    }
    close_stream(w);
    kp_close_session(&w->session);
    attach(w, rank, incarnation + 1);
    open_stream(w);
}

/* Have rounds, or pushes that count by themselves; neither leaves anything in the other. */
static void turn_mode(void)
{
    work_off();
    for (int i = 0; i < SLICES; i++) {
        while (slices[i].n_open)
            kp_drop_open(&slices[i], &slices[i].open[0]);
        for (int j = 0; j < WORKERS; j++)
            leave(&slices[i].pulls, &workers[j].session);
        slices[i].busy = KP_NOTHING;
    }
    members.at_once = !members.at_once;
    members.usual = !members.at_once;
}

/* Replies must be for this worker, with numbers that fit its frames. */
static void check_answers(worker *w)
{
    int before = failing;
    failing = 0;
    kp_receive(&w->theirs, 0);
    kp_message *message = kp_take_messages(&w->theirs);
    while (message) {
        kp_message *following = message->next;
        kp_batch batch;
        CHECK(kp_read_batch(&batch, message, VERSION, JOB));
        CHECK(batch.head->rank == w->session.rank && batch.head->incarnation == w->session.incarnation);
        for (uint32_t i = 0; i < batch.head->records; i++) {
            kp_record r = batch.records[i];
            CHECK(r.kind == KP_DONE || r.kind == KP_VALUE);
            CHECK(!r.coding || kp_count_packed(r.coding, (uint64_t)shapes[r.slice].n, r.nbytes));
            packed += r.coding != 0;
            rows_answered += r.rows >= 0;
            if (r.rows >= 0) { /* ids and rows, each in a frame */
                kp_record of_rows = {.frame = r.frame + 1, .nbytes = r.nbytes - 8 * (uint64_t)r.rows};
                CHECK(r.slice == TABLE && r.rows && of_rows.nbytes == (uint64_t)r.rows * sizeof(float) * COLUMNS);
                r.nbytes = 8 * (uint64_t)r.rows;
                CHECK(kp_frame_of(&batch, &of_rows));
            }
            CHECK(r.place != KP_FRAME || kp_frame_of(&batch, &r));
        }
        answered++;
        kp_close_batch(&batch);
        kp_free_message(message);
        message = following;
    }
    failing = before;
}

/* ------------------------------------------------------------------------------------------------ messages */

static uint64_t limit(void)
{
    return limits[any(sizeof limits / sizeof *limits)];
}

typedef struct {
    uint32_t n;
    uint64_t sizes[8], room;
    char *bytes;
} draft;

static uint64_t used_bytes(const draft *d)
{
    uint64_t used = 0;
    for (uint32_t i = 0; i < d->n; i++)
        used += d->sizes[i];
    return used;
}

static void add_frame(draft *d, const void *data, uint64_t nbytes)
{
    uint64_t used = used_bytes(d);
    CHECK(used + nbytes <= d->room && d->n < 8);
    if (data)
        memcpy(d->bytes + used, data, nbytes);
    else
        memset(d->bytes + used, 7, nbytes);
    d->sizes[d->n++] = nbytes;
}

/* Fill in a request for rows; where there is no room for its frames, it asks for all. Bytes of its first frame. */
static uint64_t write_rows(kp_record *r, uint32_t frames, int inlined, uint64_t *more)
{
    uint64_t n = ROWS - any(any(3) ? 8 : ROWS), size = r->kind == KP_PUSH ? n * sizeof(float) * COLUMNS : 0;
    r->rows = (int64_t)n;
    r->place = KP_FRAME;
    r->nbytes = 8 * n + size;
    r->frame = frames + (uint32_t)inlined;
    *more = any(2) ? size : 0;
    return r->nbytes - *more;
}

static void write_batch(draft *d, worker *w)
{
    static char first[sizeof(kp_head) + 8 * sizeof(kp_record) + KP_INLINE_BYTES];
    kp_head head = {.magic = {'K', 'V', 'S', 'T'}, .version = VERSION, .kind = KP_DATA, .job = JOB,
                    .rank = w->session.rank, .incarnation = w->session.incarnation, .epoch = any(2)};
    uint32_t n = (uint32_t)any(8) + 1, frames = 0;
    uint64_t inlined = any(2) ? 64 : 0, large[3], ids[3] = {0};
    uint64_t sequence = w->session.duplicates.low;
    d->n = 0;
    for (uint32_t i = 0; i < n; i++) {
        int slice = any(10) ? (int)any(SLICES) : TABLE;
        const kp_slice *s = &slices[slice];
        const kp_open *open = kp_find_open(s, s->round + 1);
        uint64_t nbytes = (uint64_t)(shapes[slice].n * kv_itemsize[shapes[slice].dtype]);
        kp_record r = {.kind = (uint8_t)(KP_PUSH + any(3)), .slice = (uint32_t)slice, .sequence = ++sequence, .rows = -1,
                       .version = any(8) ? 0 : (uint32_t)any(4), .clock = any(20) | any(2) << KP_TIME_BITS};
        r.round = s->round + (r.kind != KP_PULL) + (open && kp_part_of(open, w->session.rank) >= 0);
        if (slice == TABLE && r.kind != KP_PULL && frames < 2) {
            r.kind = KP_PUSH;
            if (any(3) == 0) {
                r.kind = KP_PULL_ROWS;
                r.round = s->round + any(2);
            }
            ids[frames] = 1;
            large[frames++] = write_rows(&r, frames, !!inlined, &large[frames + 1]);
            frames += large[frames] > 0;
            memcpy(first + sizeof head + i * sizeof r, &r, sizeof r);
            continue;
        }
        if (r.kind != KP_PULL && shapes[slice].dtype == KV_F32 && (r.round % 2 || any(5) == 0)) {
            r.coding = (uint8_t)(1 + (any(20) ? r.round / 2 : any(99)) % (KV_N_CODES - 1)); /* mostly all parts of a round */
            r.threshold = 0.5;
            nbytes = (uint64_t)kv_encoded_bytes(r.coding, shapes[slice].n);
        }
        if (r.kind != KP_PULL) {
            r.nbytes = nbytes;
            r.place = KP_FRAME;
            if (any(3) == 0) {
                r.place = KP_SHARED;
                r.frame = 1;
                r.offset = any(100) * 8;
                r.flags = any(2) ? KP_IN_PLACE : 0;
            } else if (inlined && nbytes <= 64) {
                r.frame = 0;
            } else if (frames < 3) {
                r.frame = frames + !!inlined;
                large[frames++] = nbytes;
            } else {
                r.kind = KP_PULL;
                r.place = KP_NOWHERE;
                r.nbytes = 0;
            }
        }
        if (!r.flags && any(3))
            r.flags = KP_PACKED;
        memcpy(first + sizeof head + i * sizeof r, &r, sizeof r);
    }
    head.records = n;
    head.flags = inlined ? KP_INLINE : 0;
    memcpy(first, &head, sizeof head);
    memset(first + sizeof head + n * sizeof(kp_record), 1, inlined);
    add_frame(d, first, sizeof head + n * sizeof(kp_record) + inlined);
    for (uint32_t i = 0, slip = any(40) ? 0 : (uint32_t)any(ROWS); i < frames; i++) {
        int64_t *at = (int64_t *)(d->bytes + used_bytes(d));
        add_frame(d, NULL, large[i]);
        for (uint64_t j = 0; ids[i] && j < ROWS && 8 * j + 8 <= large[i]; j++) {
            int64_t id = FIRST + (int64_t)j + slip; /* beyond the table, now and then */
            memcpy(&at[j], &id, sizeof id);
        }
    }
}

static void spoil(draft *d)
{
    for (uint64_t faults = any(4); faults; faults--) {
        uint64_t size = d->sizes[0], number = limit(), what = any(9), f = any(sizeof fields / sizeof *fields);
        if (what == 0) {
            d->bytes[any(size)] ^= (char)(1 << any(8));
        } else if (what < 5 && size >= sizeof(kp_head) + sizeof(kp_record)) {
            uint64_t record = any((size - sizeof(kp_head)) / sizeof(kp_record));
            memcpy(d->bytes + sizeof(kp_head) + record * sizeof(kp_record) + fields[f].at, &number, fields[f].size);
        } else if (what == 5) {
            uint64_t at = any(size);
            memcpy(d->bytes + at, &number, size - at < 8 ? size - at : 8);
        } else if (what == 6 && d->n > 1) { /* its bytes are those of the frames, cut elsewhere */
            uint64_t moved = any(d->sizes[1] + 1);
            d->sizes[1] -= moved;
            d->sizes[0] += any(2) ? moved : 0;
        } else if (what == 7) {
            d->n = 1 + (uint32_t)any(d->n);
        } else if (what == 8 && d->n < 8) {
            d->sizes[d->n++] = 0;
        }
        if (!d->sizes[0])
            break;
    }
}

static const kp_observer nobody = {.counters = NULL};
static kp_serving serving = {.observer = &nobody};

static int push_out(worker *w, const void *data, size_t nbytes)
{
    const char *at = (const char *)data;
    while (nbytes && w->open) {
        ssize_t n = send(w->theirs.fd, at, nbytes, MSG_NOSIGNAL);
        if (n > 0) {
            at += n;
            nbytes -= (size_t)n;
        } else {
            serving.epoll = poll_set;
            kp_serve(&serving, 0);
            kp_stream **left = serving.left;
            for (int i = 0; i < serving.n_left; i++) {
                worker *one = &workers[0];
                while (&one->ours != left[i])
                    one++;
                kp_message *message = kp_take_messages(left[i]);
                if (!message && left[i]->end != KP_OPEN && left[i]->end != KP_BLOCKED) {
                    ended++;
                    close_stream(one);
                }
                while (message) {
                    kp_message *following = message->next;
                    left_over++;
                    kp_free_message(message);
                    message = following;
                }
            }
            work_off();
            if (n < 0 && errno != EAGAIN)
                return -1;
        }
    }
    return 0;
}

static void send_draft(worker *w, const draft *d)
{
    uint64_t total = 0, head[10];
    ((uint32_t *)head)[0] = KP_MAGIC;
    ((uint32_t *)head)[1] = d->n;
    for (uint32_t i = 0; i < d->n; i++)
        total += head[1 + i] = d->sizes[i];
    if (any(2000) == 0)
        head[any(1 + d->n)] = limit(); /* ends the stream, or makes it wait for data that never arrives */
    if (!push_out(w, head, 8 + 8 * d->n))
        push_out(w, d->bytes, total < d->room ? total : d->room);
    sent++;
}

static void serve(void)
{
    serving.epoll = poll_set;
    kp_serve(&serving, 0);
    int n = serving.n_left;
    kp_stream **left = serving.left;
    CHECK(n <= WORKERS);
    for (int i = 0; i < n; i++) {
        worker *w = &workers[0];
        while (&w->ours != left[i])
            w++;
        kp_message *message = kp_take_messages(left[i]);
        int over = !message && left[i]->end != KP_OPEN && left[i]->end != KP_BLOCKED;
        while (message) {
            kp_message *following = message->next;
            left_over++;
            kp_free_message(message);
            message = following;
        }
        if (over) {
            ended++;
            close_stream(w);
        }
    }
    work_off();
}

static void change(void)
{
    worker *w = &workers[any(WORKERS)];
    int i = (int)any(SLICES);
    switch (any(11)) {
    case 0:
        forget(i);
        break;
    case 1:
        replace(w);
        break;
    case 2:
        close_stream(w);
        break;
    case 3: /* the value is freed while it may be in flight */
        for (int room = 0; room < 2; room++)
            kp_free_value_buffer(&values[i].buffers[room]);
        values[i].current = 0;
        break;
    case 4:
        furnish(i);
        break;
    case 5:
        members.n_needed = 1 + (int)any(WORKERS);
        members.usual = any(10) != 0 && !members.at_once;
        break;
    case 6:
        slices[i].special = any(10) == 0;
        break;
    case 7:
        turn_mode();
        break;
    case 8:
    case 9:
        plan(i);
        show();
        break;
    default:
        for (i = 0; i < SLICES; i++)
            if (!numbered[i])
                make_slice(i);
    }
    release();
}

int main(int argc, char **argv)
{
    static int32_t needed[WORKERS] = {0, 1, 2};
    static draft d = {.room = 1 << 19};
    CHECK(argc == 3);
    ours = pthread_self();
    state = strtoull(argv[1], NULL, 10) * 2654435761u + 88172645463325252u;
    uint64_t count = strtoull(argv[2], NULL, 10);
    kv_run_init();
    kp_init_effects(&effects);
    sums.run = run;
    sums.run_rows = run_rows;
    sums.threads = &threads;
    members = (kp_members){1, 1, WORKERS, needed};
    d.bytes = (char *)got(malloc(d.room));
    memset(d.bytes, 0, d.room);
    CHECK(!kp_start_sender(&sender));
    poll_set = epoll_create1(0);
    for (int i = 0; i < SLICES; i++) {
        moments[i] = (char *)got(calloc((size_t)shapes[i].n + 1, sizeof(double)));
        make_slice(i);
    }
    for (int i = 0; i < WORKERS; i++) {
        attach(&workers[i], i, 100);
        open_stream(&workers[i]);
    }
    failing = 1;
    for (uint64_t i = 0; i < count; i++) {
        worker *w = &workers[any(WORKERS)];
        if (!w->open)
            open_stream(w);
        if (any(10))
            serve();
        write_batch(&d, w);
        if (any(2))
            spoil(&d);
        send_draft(w, &d);
        if (any(2))
            for (int j = 0; j < WORKERS; j++)
                if (workers[j].open)
                    check_answers(&workers[j]);
        if (any(50) == 0)
            change();
    }
    failing = 0;
    work_off();
    for (int i = 0; i < SLICES; i++)
        forget(i);
    for (int i = 0; i < SLICES; i++) {
        kp_close_slice(&slices[i]);
        for (int room = 0; room < 2; room++)
            kp_free_value_buffer(&values[i].buffers[room]);
        free(moments[i]);
    }
    for (int i = 0; i < WORKERS; i++) {
        close_stream(&workers[i]);
        kp_close_session(&workers[i].session);
    }
    kp_copy_deferred(&rows.deferred);
    kp_stop_sender(&sender, 1);
    close(poll_set);
    release();
    for (int i = 0; i < kp_own_pool.n; i++)
        free(kp_own_pool.free[i]);
    kp_free_sums(&sums);
    free(d.bytes);
    printf("{\"sent\": %llu, \"left\": %llu, \"handled\": %llu, \"answered\": %llu, \"ended\": %llu, \"rounds\": %llu, \"summed\": %llu, \"updated\": %llu, \"packed\": %llu, \"rows_updated\": %llu, \"rows_answered\": %llu, \"rows_deferred\": %llu}\n",
           (unsigned long long)sent, (unsigned long long)left_over, (unsigned long long)handled,
           (unsigned long long)answered,
           (unsigned long long)ended, (unsigned long long)rounds_done,
           (unsigned long long)summed, (unsigned long long)updated, (unsigned long long)packed,
           (unsigned long long)rows_updated, (unsigned long long)rows_answered,
           (unsigned long long)rows_deferred);
    return 0;
}
