/* The least work of a worker in a step of hosts that sum first: it copies its array to memory that its host shares, sums
 * its share of the arrays there, sends and receives the bytes of this share that must cross, and copies the result out.
 *
 * No worker waits for another worker: it sums and copies private memory of the same size as the shared memory. */
#include "move_all.h"
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>

enum { MAX_EACH = 64 };

typedef struct {
    const int *fds; /* connections to the other hosts */
    int others, each; /* other hosts; workers of a host */
    const float *source;
    float *shared, *sum, *back, *target;
    int64_t n, block; /* numbers of the array, and of one block */
} step;

static int64_t size_of(const step *s, int64_t at)
{
    return s->n - at < s->block ? s->n - at : s->block;
}

/* This worker's share of a block, and the piece of this share of each host. */
static int64_t share_of(const step *s, int64_t at)
{
    return size_of(s, at) / s->each;
}

static int64_t piece_of(const step *s, int64_t at)
{
    return share_of(s, at) / (s->others + 1);
}

/* Sum one array for each worker of the host; parts of the shared array stand for them. */
static void add_up(const step *s, int64_t at)
{
    int64_t count = share_of(s, at), start = at / s->each, apart = s->n / s->each;
    float *restrict sum = s->sum + start;
    memcpy(sum, s->shared + start, (size_t)count * sizeof *sum);
    for (int j = 1; j < s->each; j++) {
        const float *restrict more = s->shared + j * apart + start;
        for (int64_t i = 0; i < count; i++)
            sum[i] += more[i];
    }
}

static int move_pieces(const step *s, int64_t at, float *memory, int sends)
{
    int64_t piece = piece_of(s, at);
    for (int o = 0; o < s->others; o++)
        if (move_all(s->fds[o], (char *)(memory + at / s->each + o * piece), (size_t)piece * sizeof *memory, sends))
            return -1;
    return 0;
}

static void *send_all(void *argument)
{
    const step *s = argument;
    for (int64_t at = 0; at < s->n; at += s->block) {
        memcpy(s->shared + at, s->source + at, (size_t)size_of(s, at) * sizeof *s->source);
        add_up(s, at);
        if (move_pieces(s, at, s->sum, 1))
            return (void *)-1;
    }
    return NULL;
}

static int receive_all(const step *s)
{
    for (int64_t at = 0; at < s->n; at += s->block) {
        if (move_pieces(s, at, s->back, 0))
            return -1;
        memcpy(s->target + at, s->shared + at, (size_t)size_of(s, at) * sizeof *s->target);
    }
    return 0;
}

/* Do one step; with `threads` send in one thread and receive in another. Return 0 on success. */
int crossing_step(const int *fds, int others, int each, const float *source, float *shared, float *sum, float *back,
                  float *target, int64_t n, int64_t block, int threads)
{
    step s = {fds, others, each, source, shared, sum, back, target, n, block};
    pthread_t thread;
    void *failed = NULL;
    if (others < 1 || each < 1 || each > MAX_EACH || block < 1)
        return -1;
    if (!threads)
        return send_all(&s) || receive_all(&s) ? -1 : 0;
    if (pthread_create(&thread, NULL, send_all, &s))
        return -1;
    int broken = receive_all(&s);
    pthread_join(thread, &failed);
    return broken || failed ? -1 : 0;
}
