/* Several threads that call the kernels at once, and helpers that come, go and are forked away: for ThreadSanitizer.
 *
 *     helpers CALLS
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "job_chunks.h"

enum { CALLERS = 3, ELEMENTS = 100000 };

static int calls;

static void sum(float *to, const float *a, const float *b, int threads)
{
    char *sources[] = {(char *)a, (char *)b};
    kv_item item = {.dtype = KV_F32, .rule = -1, .k = 2, .n = ELEMENTS, .dst = (char *)to, .src = sources};
    if (kv_run_dense(&item, 1, 3 * ELEMENTS * (ptrdiff_t)sizeof *to, threads))
        abort();
    for (int i = 0; i < ELEMENTS; i++)
        if (to[i] != a[i] + b[i])
            abort();
}

static void *caller(void *number)
{
    float *all = (float *)malloc(3 * ELEMENTS * sizeof *all);
    for (int call = 0; call < calls; call++) {
        for (int i = 0; i < 2 * ELEMENTS; i++)
            all[i] = (float)(i % 1000 + call);
        sum(all + 2 * ELEMENTS, all, all + ELEMENTS, 2 + (call + (int)(intptr_t)number) % 3);
    }
    free(all);
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t threads[CALLERS];
    if (argc != 2)
        return 2;
    calls = atoi(argv[1]);
    kv_run_init();
    for (intptr_t i = 0; i < CALLERS; i++)
        if (pthread_create(&threads[i], NULL, caller, (void *)i))
            return 2;
    for (int i = 0; i < CALLERS; i++)
        pthread_join(threads[i], NULL);
    pid_t child = fork();
    if (!child) {
        calls = 3;
        caller(NULL);
        _exit(0);
    }
    int status;
    return child < 0 || waitpid(child, &status, 0) != child || status;
}
