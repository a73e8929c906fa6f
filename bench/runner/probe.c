/* The state of the machine: the latency between two cores, and the rate of memory reads. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

static double seconds_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void stay_on(int cpu)
{
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#else
    (void)cpu;
#endif
}

typedef struct {
    int cpu;
    double seconds, trips;
    _Alignas(64) atomic_long ball;
} game;

static void *partner(void *context)
{
    game *g = context;
    stay_on(g->cpu);
    for (long seen = 0, now; seen >= 0; seen = now) {
        while ((now = atomic_load_explicit(&g->ball, memory_order_acquire)) == seen)
            ;
        if (now < 0)
            break;
        if (now & 1)
            atomic_store_explicit(&g->ball, ++now, memory_order_release);
    }
    return NULL;
}

static void *server(void *context)
{
    game *g = ((game **)context)[0];
    stay_on(((game **)context)[1]->cpu);
    double start = seconds_now(), end = start;
    long ball = 0;
    while (end - start < g->seconds) {
        for (int i = 0; i < 1000; i++) {
            atomic_store_explicit(&g->ball, ball + 1, memory_order_release);
            while (atomic_load_explicit(&g->ball, memory_order_acquire) != ball + 2)
                ;
            ball += 2;
        }
        end = seconds_now();
    }
    atomic_store(&g->ball, -1);
    g->seconds = end - start;
    g->trips = (double)ball / 2;
    return NULL;
}

/* Return the mean nanoseconds of a round trip of a cache line from cpu a to cpu b. */
double round_trip(double seconds, int a, int b)
{
    game g = {.cpu = b, .seconds = seconds}, place = {.cpu = a};
    game *both[2] = {&g, &place};
    pthread_t threads[2];
    pthread_create(&threads[0], NULL, partner, &g);
    pthread_create(&threads[1], NULL, server, both);
    pthread_join(threads[1], NULL);
    pthread_join(threads[0], NULL);
    return g.seconds / g.trips * 1e9;
}

typedef struct {
    const float *a;
    ptrdiff_t n;
    int cpu;
    double seconds, bytes;
    float total;
} reader;

static void *read_on(void *context)
{
    reader *r = context;
    stay_on(r->cpu);
    double start = seconds_now(), end = start;
    typedef float vec __attribute__((vector_size(64), aligned(4), may_alias));
    vec s[4] = {{0}};
    while (end - start < r->seconds) {
        for (ptrdiff_t i = 0; i + 64 <= r->n; i += 64)
            for (int l = 0; l < 4; l++)
                s[l] += *(const vec *)(r->a + i + 16 * l);
        r->bytes += 4.0 * (double)r->n;
        end = seconds_now();
    }
    r->seconds = end - start;
    r->total = s[0][0] + s[1][0] + s[2][0] + s[3][0];
    return NULL;
}

/* Return the bytes that two threads read per second, each from its own half. */
double read_rate(const float *a, ptrdiff_t n, double seconds, int cpu_a, int cpu_b)
{
    reader r[2] = {{a, n / 2, cpu_a, seconds, 0, 0}, {a + n / 2, n / 2, cpu_b, seconds, 0, 0}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, read_on, &r[i]);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    return r[0].bytes / r[0].seconds + r[1].bytes / r[1].seconds;
}
