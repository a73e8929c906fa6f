/* Rows that a worker waits for, in messages of all kinds: only a frame of theirs is received where they belong, and rows
 * are only gathered from within a table. */
#include "input.h"
#include "expected_rows.h"
#include "send_rows.h"

enum { N = 3, LIMIT = 1 << 16, TABLE = 5 };

static const size_t n_rows[N] = {2, 4096, 3}, row_bytes[N] = {8192, 4, 7000};
static fuzz_coming coming;

static fuzz_coming *fuzz_coming_at(int fd) { return &coming; }

static void expect(kp_expected *x, kp_expected *before, uint32_t slice)
{
    static int64_t all_ids[N][4096];
    int64_t *ids = all_ids[slice];
    if (!ids[1]) {
        for (size_t i = 0; i < n_rows[slice]; i++)
            ids[i] = slice == 1 ? 0x0101010101010101 : (int64_t)i; /* as an event of FILLED brings them */
    }
    *x = (kp_expected){.next = before, .slice = slice, .ids = (char *)ids, .n = n_rows[slice],
                       .ids_bytes = n_rows[slice] * sizeof *ids, .nbytes = n_rows[slice] * row_bytes[slice]};
    x->into = (char *)malloc(x->nbytes);
}

static void gather(fuzz_input *in)
{
    static char table[TABLE * 9];
    int64_t rows[8];
    size_t n = in->left / sizeof *rows < 8 ? in->left / sizeof *rows : 8;
    fuzz_take(in, rows, n * sizeof *rows);
    kp_gather g = {.table = table, .row_bytes = 9, .rows = rows, .n = n};
    if (!kp_is_within(&g, TABLE))
        return;
    char *into = (char *)malloc(n * 9 + !n);
    kp_copy_rows(&g, 0, n, into);
    free(into);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    fuzz_input in = {data, size};
    fuzz_event event;
    kp_stream s;
    kp_expected all[N], *first = &all[N - 1];
    for (uint32_t i = 0; i < N; i++)
        expect(&all[i], i ? &all[i - 1] : NULL, i);
    MUST(!kp_open_stream(&s, FIRST_FD, LIMIT, NULL));
    s.place = kp_place_rows;
    s.placer = &first;
    while (fuzz_next(&in, &event)) {
        if (event.what % (N_COMING + 1) == N_COMING) {
            gather(&in);
            continue;
        }
        event.what %= N_COMING + 1;
        coming = fuzz_come(&in, &event);
        enum kp_outcome outcome = kp_receive(&s, 0);
        for (kp_message *message = kp_take_messages(&s), *following; message; message = following) {
            following = message->next;
            kp_free_message(message);
        }
        if (outcome != KP_BLOCKED && outcome != KP_OPEN)
            break;
    }
    kp_free_stream(&s);
    for (int i = 0; i < N; i++)
        free(all[i].into);
    return 0;
}
