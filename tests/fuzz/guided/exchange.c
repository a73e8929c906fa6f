/* Replies to a worker's exchange, also of rows: an unexpected reply writes nothing, an expected one its own value
 * only. */
#include "input.h"
#include <pthread.h>
#include "job_chunks.h"
#include "exchange.h"

enum { N = 4, ROWS = 4, PAGES = 8, JOB = 77, VERSION = 3 };

typedef struct __attribute__((packed)) {
    uint8_t kind, coding, flags, mask;
} question;

enum { SHARED = 1, IN_PLACE = 2, SAME = 4, SEGMENT = 8, BEFORE = 16, CHANGES = 32, FAILS = 64 };

static const uint64_t sizes[N] = {32, 20000, 4, 16400};
static const int one_thread = 1;
static fuzz_coming coming;
static question asked;
static char *segment;

static fuzz_coming *fuzz_coming_at(int fd) { return &coming; }

/* The server writes at the same time, or there is no memory. */
static int run(kv_item *items, ptrdiff_t n, ptrdiff_t bytes, int threads)
{
    if (asked.flags & FAILS)
        return -1;
    if (asked.flags & CHANGES && segment)
        ((uint64_t *)segment)[1] += 2;
    return kv_run_dense(items, n, bytes, threads);
}

/* Rows are asked for by their ids, all 0. */
static void make_rows(kp_part *part)
{
    part->rows = ROWS;
    part->ids_bytes = part->carried = 8 * ROWS;
    part->ids = part->from = (char *)calloc(ROWS, 8);
    part->into = (char *)malloc(part->nbytes);
}

static void make_part(kp_part *part, uint32_t i)
{
    *part = (kp_part){.slice = i, .nbytes = sizes[i], .clock = 1, .pushed = 1, .complete = 0, .rows = -1};
    if (asked.kind == KP_PULL_ROWS) {
        make_rows(part);
        return;
    }
    part->from = (char *)calloc(1, sizes[i]);
    part->into = asked.flags & SAME ? (char *)part->from : (char *)malloc(sizes[i]);
    part->is_shared = asked.flags & SHARED && asked.mask >> i & 1 && asked.kind != KP_PULL;
    part->in_place = part->is_shared && asked.flags & IN_PLACE;
    if (!part->is_shared && asked.kind != KP_PULL)
        part->carried = (uint64_t)kv_encoded_bytes(asked.coding, (ptrdiff_t)sizes[i] / 4);
}

static void make(kp_exchange *x, kp_exchange *before, kp_mapped *segments)
{
    *x = (kp_exchange){.head = {.magic = {'K', 'V', 'S', 'T'}, .version = VERSION, .kind = KP_DATA, .job = JOB,
                                .incarnation = 100},
                       .kind = asked.kind, .batch_bytes = 30000, .frame_limit = 1 << 16, .credit = 1 << 20,
                       .report = 1 << 16, .window = before ? 1 << 15 : UINT64_MAX, .looks = KP_FEW_LOOKS, .n = N,
                       .segments = segments, .n_segments = segment ? 2 : 0, .run = run, .threads = &one_thread,
                       .before = before, .version = 1, .coding = asked.coding, .threshold = 0.5,
                       .first = before ? 1 + N : 1, .left = N};
    x->parts = (kp_part *)calloc(N, sizeof *x->parts);
    for (uint32_t i = 0; i < N; i++)
        make_part(&x->parts[i], i);
}

static void forget_parts(kp_exchange *x)
{
    for (uint32_t i = 0; i < N; i++) {
        free((char *)x->parts[i].from);
        if (x->parts[i].into != x->parts[i].from)
            free(x->parts[i].into);
    }
    free(x->parts);
}

static void check(const kp_exchange *x)
{
    uint32_t answered = 0;
    uint64_t flying = 0;
    for (uint32_t i = 0; i < N; i++) {
        answered += x->parts[i].answered;
        flying += i < x->next && !x->parts[i].answered ? kp_traffic(x, &x->parts[i]) : 0;
    }
    MUST(answered + x->left == N && flying == x->flying);
}

static void drop_messages(kp_stream *s)
{
    for (kp_message *message = kp_take_messages(s), *following; message; message = following) {
        following = message->next;
        kp_free_message(message);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t kinds[] = {KP_PUSHPULL, KP_PUSH, KP_PULL, KP_PULL_ROWS};
    fuzz_input in = {data, size};
    fuzz_event event = {0};
    kp_stream s;
    kp_exchange all[2], *x = &all[0];
    if (!kv_now)
        kv_run_init();
    if (!fuzz_take(&in, &asked, sizeof asked))
        return 0;
    asked.kind = kinds[asked.kind % 4];
    asked.coding = asked.kind == KP_PULL || asked.kind == KP_PULL_ROWS ? 0 : asked.coding % KV_N_CODES;
    segment = asked.flags & SEGMENT ? (char *)aligned_alloc(KP_PAGE, PAGES * KP_PAGE) : NULL;
    kp_mapped segments[2] = {{NULL, 0}, {segment, PAGES * KP_PAGE}};
    if (segment)
        memset(segment, 0, PAGES * KP_PAGE);
    MUST(!kp_open_stream(&s, FIRST_FD, 1 << 16, NULL));
    make(&all[0], NULL, segments);
    MUST(!kp_send_first(&s, &all[0]));
    if (asked.flags & BEFORE) {
        make(&all[1], &all[0], segments);
        x = &all[1];
        MUST(!kp_send_first(&s, x));
    }
    s.place = kp_place;
    s.placer = x;
    kp_way way = {x, &s};
    int goes_on = 1;
    while (goes_on && kp_left(x) && fuzz_next(&in, &event)) {
        event.what %= N_COMING + 2;
        if (event.what == N_COMING) {
            MUST(!kp_send_wider(&s, x));
        } else if (event.what < N_COMING) {
            coming = fuzz_come(&in, &event);
            goes_on = kp_receive_replies(&way);
        } else if (segment)
            ((uint64_t *)segment)[event.with % PAGES] = event.number;
    }
    check(&all[0]);
    if (x != &all[0])
        check(x);
    MUST(!kp_unplace(&s));
    drop_messages(&s);
    for (int i = 0; i <= (x != &all[0]); i++) /* from now on replies are written nowhere else */
        forget_parts(&all[i]);
    while (s.end < KP_CLOSED && fuzz_next(&in, &event)) {
        event.what %= N_COMING;
        coming = fuzz_come(&in, &event);
        kp_receive(&s, 0);
        drop_messages(&s);
    }
    kp_free_stream(&s);
    free(segment);
    return 0;
}
