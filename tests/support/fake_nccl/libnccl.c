/* NCCL without GPUs, over the CUDA driver of tests/fake_cuda: device memory is memory of the process.
 *
 * Built as libnccl.so.2, so that the real nccl4py runs on it. Communicators of one process (ncclCommInitAll) put their
 * work on the streams that they are given: a collective runs when all of its streams have reached it, and later work
 * on any of them waits for it. Those of several processes (ncclCommInitRank) meet in a file, and their
 * collectives run inside of ncclGroupEnd.
 *
 * What NCCL leaves undefined is an error here: ranks of one process that call something else, memory of another device
 * or beyond its end, a collective of several ranks outside of a group. Ranks of several processes that do not call the
 * same wait, as NCCL's do, until a rank aborts.
 *
 * FAKE_NCCL_FOLDER    where several processes meet, in place of /dev/shm
 * FAKE_NCCL_REMOTE=1  the death of a peer is an error, as over sockets; otherwise it is not noticed, as over shared
 * memory
 * FAKE_NCCL_TRACE=1   name each collective on stderr
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { OK, CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR };
enum { I8, U8, I32, U32, I64, U64, F16, F32, F64, BF16, N_TYPES };
enum { SUM, PROD, MAX };
enum { ALL_REDUCE, REDUCE, BROADCAST };
enum { MOST_RANKS = 16, MOST_OPS = 4096, SLOT = 1 << 18, LOG = 1 << 16, MOST_NAMES = 64 };
static const char *KINDS[] = {"all_reduce", "reduce", "broadcast"};
static const char *TYPES[] = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
                              "bfloat16"};
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

typedef struct {
    char bytes[128];
} unique_id;

typedef struct {
    int kind, type, op, root;
    size_t count;
} shape;

/* The shared data of the processes of a communicator. */
typedef struct {
    int joined, arrived, turn, left;
    int pids[MOST_RANKS];
    shape calls[MOST_RANKS];
    char slots[MOST_RANKS][SLOT];
} meeting;

typedef struct comm {
    int rank, size, device, team; /* team: the number of the ncclCommInitAll call that made it */
    meeting *with;
    volatile int aborted, async;
    int dead;
} comm;

typedef struct {
    shape what;
    const void *send;
    void *recv;
    comm *on;
    void *stream;
} op;

static __thread op queue[MOST_OPS];
static __thread int queued, depth, failed_inside;
static __thread char last[512];
static char history[LOG];
static size_t written;
static int teams, live;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --------------------------------------------------------------------------------------- counts, failures, history */

static struct {
    char name[32];
    long count;
    int fail_with, fail_after;
} names[MOST_NAMES];
static int n_names;

static int name_of(const char *name)
{
    for (int i = 0; i < n_names; i++)
        if (!strcmp(names[i].name, name))
            return i;
    if (n_names == MOST_NAMES)
        abort();
    snprintf(names[n_names].name, sizeof names[0].name, "%s", name);
    return n_names++;
}

static int enter(const char *name)
{
    pthread_mutex_lock(&lock);
    int i = name_of(name);
    names[i].count++;
    int error = names[i].fail_with && names[i].fail_after-- <= 0 ? names[i].fail_with : 0;
    if (error)
        names[i].fail_with = 0;
    pthread_mutex_unlock(&lock);
    if (error)
        snprintf(last, sizeof last, "%s was told to fail", name);
    return error;
}
#define ENTER                          \
    do {                               \
        int error_ = enter(__func__);  \
        if (error_)                    \
            return error_;             \
    } while (0)

long fake_calls(const char *name) { return names[name_of(name)].count; }
void fake_fail(const char *name, int error, int after)
{
    int i = name_of(name);
    names[i].fail_with = error;
    names[i].fail_after = after;
}
int fake_live(void) { return live; }
const char *fake_history(void) { return history; }
void fake_forget(void)
{
    memset(history, 0, written);
    written = 0;
    for (int i = 0; i < n_names; i++)
        names[i].count = names[i].fail_with = 0;
}

static void note(const char *text)
{
    if (written + strlen(text) + 1 < LOG)
        written += (size_t)sprintf(history + written, "%s", text);
    if (getenv("FAKE_NCCL_TRACE"))
        fprintf(stderr, "[nccl] %s", text);
}

static int refuse(int error, const char *format, const char *one, const char *other)
{
    snprintf(last, sizeof last, format, one, other);
    return error;
}

static const char *told(const shape *s, char *text)
{
    sprintf(text, "%s %s %zu op %d root %d", KINDS[s->kind], TYPES[s->type], s->count, s->op, s->root);
    return text;
}

/* ------------------------------------------------------------------------------------------------------- arithmetic */

static float of_bf16(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

static uint16_t to_bf16(float value)
{
    uint32_t word;
    memcpy(&word, &value, 4);
    if (value != value)
        return (uint16_t)(word >> 16 | 0x40);
    return (uint16_t)((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

#define REDUCE_AS(type)                                        \
    for (size_t i = 0; i < n; i++) {                           \
        type a = ((type *)into)[i], b = ((const type *)from)[i]; \
        ((type *)into)[i] = op == MAX ? (b > a ? b : a) : (type)(a + b); \
    }                                                          \
    break

/* Half floats are rounded after each step, as NCCL's rings do. */
static void reduce(void *into, const void *from, size_t n, int type, int op)
{
    switch (type) {
    case I8: REDUCE_AS(uint8_t); /* sums wrap around */
    case U8: REDUCE_AS(uint8_t);
    case I32: case U32:
        for (size_t i = 0; i < n; i++) {
            int32_t a = ((int32_t *)into)[i], b = ((const int32_t *)from)[i];
            ((int32_t *)into)[i] = op == MAX ? (b > a ? b : a) : (int32_t)((uint32_t)a + (uint32_t)b);
        }
        break;
    case I64: case U64:
        for (size_t i = 0; i < n; i++) {
            int64_t a = ((int64_t *)into)[i], b = ((const int64_t *)from)[i];
            ((int64_t *)into)[i] = op == MAX ? (b > a ? b : a) : (int64_t)((uint64_t)a + (uint64_t)b);
        }
        break;
    case F32: REDUCE_AS(float);
    case F64: REDUCE_AS(double);
    case F16: REDUCE_AS(_Float16);
    case BF16:
        for (size_t i = 0; i < n; i++)
            ((uint16_t *)into)[i] = to_bf16(of_bf16(((uint16_t *)into)[i]) + of_bf16(((const uint16_t *)from)[i]));
        break;
    }
}

/* ------------------------------------------------------------------------------------------------------- the driver */

static void *cuda(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    void *found = library ? dlsym(library, name) : NULL;
    if (!found) {
        fprintf(stderr, "[nccl] the CUDA driver of the tests must be loaded before: no %s\n", name);
        abort();
    }
    return found;
}
#define CUDA(name, ...) ((int (*)())cuda(#name))(__VA_ARGS__)

static void push_device(int device)
{
    void *context;
    CUDA(cuDevicePrimaryCtxRetain, &context, device);
    CUDA(cuCtxPushCurrent_v2, context);
}

static void pop_device(int device)
{
    void *context;
    CUDA(cuCtxPopCurrent_v2, &context);
    CUDA(cuDevicePrimaryCtxRelease_v2, device);
}

static int lies_on(const void *at, size_t bytes, int device)
{
    int (*owner)(uint64_t) = (int (*)(uint64_t))cuda("fake_owner");
    return !bytes || (owner((uint64_t)at) == device && owner((uint64_t)at + bytes - 1) == device);
}

/* -------------------------------------------------------------------------------- collectives of one process */

typedef struct {
    int ranks;
    op ops[MOST_RANKS]; /* by rank */
} collective;

static void perform(void *data)
{
    collective *c = data;
    const shape *what = &c->ops[0].what;
    size_t bytes = what->count * SIZES[what->type];
    char *total = malloc(bytes + 1);
    memcpy(total, c->ops[what->kind == BROADCAST ? what->root : 0].send, bytes);
    for (int r = 1; what->kind != BROADCAST && r < c->ranks; r++)
        reduce(total, c->ops[r].send, what->count, what->type, what->op);
    for (int r = 0; r < c->ranks; r++)
        if (what->kind != REDUCE || r == what->root)
            memcpy(c->ops[r].recv, total, bytes);
    free(total);
    free(c);
}

/* The first stream runs the collective when all streams have reached it; all other streams wait. */
static int put_on_streams(collective *c)
{
    void *event;
    for (int r = c->ranks - 1; r >= 0; r--) {
        op *o = &c->ops[r];
        push_device(o->on->device);
        if (r) {
            CUDA(cuEventCreate, &event, 2);
            CUDA(cuEventRecord, event, o->stream);
        }
        pop_device(o->on->device);
        if (r) {
            push_device(c->ops[0].on->device);
            CUDA(cuStreamWaitEvent, c->ops[0].stream, event, 0);
            CUDA(cuEventDestroy_v2, event);
            pop_device(c->ops[0].on->device);
        }
    }
    op first = c->ops[0], others[MOST_RANKS];
    int ranks = c->ranks;
    memcpy(others, c->ops, sizeof others);
    push_device(first.on->device);
    int error = CUDA(cuLaunchHostFunc, first.stream, perform, c);
    CUDA(cuEventCreate, &event, 2);
    CUDA(cuEventRecord, event, first.stream);
    pop_device(first.on->device);
    for (int r = 1; r < ranks; r++) {
        push_device(others[r].on->device);
        CUDA(cuStreamWaitEvent, others[r].stream, event, 0);
        pop_device(others[r].on->device);
    }
    push_device(first.on->device);
    CUDA(cuEventDestroy_v2, event);
    pop_device(first.on->device);
    return error ? refuse(CUDA_ERROR, "the CUDA driver failed%s%s", "", "") : OK;
}

/* The n-th call of each rank of a team belong together. */
static int run_team(int team, int size)
{
    char text[2][128], line[256];
    for (int turn = 0;; turn++) {
        collective *c = calloc(1, sizeof *c);
        int found = 0;
        for (int r = 0; r < size; r++) {
            int seen = 0;
            for (int i = 0; i < queued; i++)
                if (queue[i].on->team == team && queue[i].on->rank == r && seen++ == turn) {
                    c->ops[r] = queue[i];
                    found++;
                }
        }
        if (!found) {
            free(c);
            return OK;
        }
        if (found < size) {
            free(c);
            return refuse(INVALID_USAGE, "not all ranks of the communicator call in this group%s%s", "", "");
        }
        for (int r = 1; r < size; r++)
            if (memcmp(&c->ops[r].what, &c->ops[0].what, sizeof(shape))) {
                told(&c->ops[0].what, text[0]), told(&c->ops[r].what, text[1]);
                free(c);
                return refuse(INVALID_USAGE, "ranks call different things: %s, and %s", text[0], text[1]);
            }
        snprintf(line, sizeof line, "%s of %d\n", told(&c->ops[0].what, text[0]), size);
        note(line);
        c->ranks = size;
        int error = put_on_streams(c);
        if (error)
            return error;
    }
}

/* -------------------------------------------------------------------------- collectives of several processes */

static int gone(int pid)
{
    char path[64], state = 'X';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (file) {
        if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
            state = 'X';
        fclose(file);
    }
    return state == 'Z' || state == 'X';
}

/* Wait for all ranks, or for an abort by another rank. */
static int meet(comm *c)
{
    meeting *m = c->with;
    int turn = __atomic_load_n(&m->turn, __ATOMIC_SEQ_CST);
    if (__atomic_add_fetch(&m->arrived, 1, __ATOMIC_SEQ_CST) == c->size) {
        __atomic_store_n(&m->arrived, 0, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&m->turn, 1, __ATOMIC_SEQ_CST);
        return OK;
    }
    const char *remote = getenv("FAKE_NCCL_REMOTE");
    for (long look = 0; __atomic_load_n(&m->turn, __ATOMIC_SEQ_CST) == turn; look++) {
        if (c->aborted)
            return refuse(INTERNAL_ERROR, "aborted%s%s", "", "");
        if (remote && *remote == '1' && look % 256 == 255)
            for (int r = 0; r < c->size; r++)
                if (gone(m->pids[r])) {
                    c->async = REMOTE_ERROR;
                    return refuse(REMOTE_ERROR, "a peer has closed its connection%s%s", "", "");
                }
        usleep(look < 64 ? 20 : 500);
    }
    return OK;
}

static int run_across(op *o)
{
    comm *c = o->on;
    meeting *m = c->with;
    char text[2][128];
    push_device(c->device);
    int error = CUDA(cuStreamSynchronize, o->stream);
    pop_device(c->device);
    if (error)
        return refuse(CUDA_ERROR, "the CUDA driver failed%s%s", "", "");
    snprintf(text[1], sizeof text[1], "%s\n", told(&o->what, text[0]));
    note(text[1]);
    memcpy(&m->calls[c->rank], &o->what, sizeof(shape));
    if ((error = meet(c)))
        return error;
    int other = -1;
    for (int r = 0; r < c->size; r++)
        if (memcmp(&m->calls[r], &o->what, sizeof(shape)))
            other = r;
    if (other >= 0) { /* NCCL would wait for ever, or worse */
        fprintf(stderr, "[nccl] rank %d calls %s, and rank %d %s\n", c->rank, told(&o->what, text[0]), other,
                told(&m->calls[other], text[1]));
        while (!c->aborted)
            usleep(1000);
        return refuse(INTERNAL_ERROR, "aborted%s%s", "", "");
    }
    size_t bytes = o->what.count * SIZES[o->what.type];
    char *total = malloc(SLOT);
    for (size_t start = 0; !error && start < bytes; start += SLOT) {
        size_t n = bytes - start < SLOT ? bytes - start : SLOT;
        memcpy(m->slots[c->rank], (const char *)o->send + start, n);
        if ((error = meet(c)))
            break;
        memcpy(total, m->slots[o->what.kind == BROADCAST ? o->what.root : 0], n);
        for (int r = 1; o->what.kind != BROADCAST && r < c->size; r++)
            reduce(total, m->slots[r], n / SIZES[o->what.type], o->what.type, o->what.op);
        if (o->what.kind != REDUCE || c->rank == o->what.root)
            memcpy((char *)o->recv + start, total, n);
        error = meet(c); /* all have read */
    }
    free(total);
    return error ? error : meet(c);
}

/* ------------------------------------------------------------------------------------------------------------ calls */

int ncclGroupStart(void)
{
    ENTER;
    depth++;
    return OK;
}

int ncclGroupEnd(void)
{
    int error = enter(__func__);
    if (depth == 0)
        return refuse(INVALID_USAGE, "a group ends that has not begun%s%s", "", "");
    if (--depth)
        return error;
    if (!error)
        error = failed_inside;
    for (int i = 0; !error && i < queued; i++) {
        comm *c = queue[i].on;
        if (c->with) {
            error = run_across(&queue[i]);
            continue;
        }
        int first = 1;
        for (int j = 0; j < i; j++)
            first = first && queue[j].on->team != c->team;
        if (first)
            error = run_team(c->team, c->size);
    }
    queued = failed_inside = 0;
    return error;
}

static int call(int kind, const void *send, void *recv, size_t count, int type, int op_, int root, comm *on,
                void *stream)
{
    int error = OK;
    if (!on || on->dead)
        error = refuse(INVALID_ARGUMENT, "no such communicator%s%s", "", "");
    else if (type < 0 || type >= N_TYPES || root < 0 || root >= on->size || (op_ != SUM && op_ != MAX))
        error = refuse(INVALID_ARGUMENT, "%s: a type, root or operation that is not%s", KINDS[kind], "");
    else if (!lies_on(recv, count * SIZES[type], on->device) || !lies_on(send, count * SIZES[type], on->device))
        error = refuse(INVALID_ARGUMENT, "%s: memory that is not, or not all, of the communicator's device%s",
                       KINDS[kind], "");
    else if (on->aborted || on->async)
        error = refuse(INVALID_USAGE, "the communicator is broken%s%s", "", "");
    else if (!depth && !on->with && on->size > 1)
        error = refuse(INVALID_USAGE, "%s of several devices outside of a group: it would wait for ever%s",
                       KINDS[kind], "");
    else if (queued == MOST_OPS)
        abort();
    if (error) {
        failed_inside = depth ? error : 0;
        return error;
    }
    op o = {.send = send, .recv = recv, .on = on, .stream = stream};
    memset(&o.what, 0, sizeof o.what);
    o.what.kind = kind, o.what.type = type, o.what.op = op_, o.what.root = root, o.what.count = count;
    queue[queued++] = o;
    if (depth)
        return OK;
    depth = 1;
    return ncclGroupEnd();
}

int ncclAllReduce(const void *send, void *recv, size_t n, int type, int op_, comm *on, void *stream)
{
    ENTER;
    return call(ALL_REDUCE, send, recv, n, type, op_, 0, on, stream);
}

int ncclReduce(const void *send, void *recv, size_t n, int type, int op_, int root, comm *on, void *stream)
{
    ENTER;
    return call(REDUCE, send, recv, n, type, op_, root, on, stream);
}

int ncclBroadcast(const void *send, void *recv, size_t n, int type, int root, comm *on, void *stream)
{
    ENTER;
    return call(BROADCAST, send, recv, n, type, SUM, root, on, stream);
}

int ncclGetVersion(int *version)
{
    *version = 23203;
    return OK;
}

const char *ncclGetErrorString(int error)
{
    static const char *texts[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error",
                                  "invalid argument", "invalid usage", "remote process exited or there was a network error"};
    return error >= 0 && error <= REMOTE_ERROR ? texts[error] : "unknown result code";
}

const char *ncclGetLastError(comm *c)
{
    (void)c;
    return last;
}

int ncclGetUniqueId(unique_id *id)
{
    ENTER;
    const char *folder = getenv("FAKE_NCCL_FOLDER");
    int number = __atomic_add_fetch(&teams, 1, __ATOMIC_SEQ_CST);
    memset(id, 0, sizeof *id);
    if (snprintf(id->bytes, sizeof id->bytes, "%s/fake-nccl-%d-%d", folder ? folder : "/dev/shm", getpid(), number) >=
        (int)sizeof id->bytes)
        return refuse(SYSTEM_ERROR, "FAKE_NCCL_FOLDER is too long%s%s", "", "");
    return OK;
}

static comm *new_comm(int rank, int size, int device, int team)
{
    comm *made = calloc(1, sizeof *made);
    made->rank = rank, made->size = size, made->device = device, made->team = team;
    __atomic_add_fetch(&live, 1, __ATOMIC_SEQ_CST);
    return made;
}

int ncclCommInitAll(comm **made, int n, const int *devices)
{
    ENTER;
    int count = 0, team = __atomic_add_fetch(&teams, 1, __ATOMIC_SEQ_CST);
    CUDA(cuDeviceGetCount, &count);
    for (int i = 0; i < n; i++) {
        if (devices[i] < 0 || devices[i] >= count)
            return refuse(INVALID_ARGUMENT, "no such device%s%s", "", "");
        for (int j = 0; j < i; j++)
            if (devices[i] == devices[j])
                return refuse(INVALID_USAGE, "a device stands twice%s%s", "", "");
    }
    for (int i = 0; i < n; i++)
        made[i] = new_comm(i, n, devices[i], team);
    return OK;
}

int ncclCommInitRank(comm **made, int size, unique_id id, int rank)
{
    ENTER;
    int device = 0;
    if (rank < 0 || rank >= size || size > MOST_RANKS || !strstr(id.bytes, "/fake-nccl-"))
        return refuse(INVALID_ARGUMENT, "a rank or an id that is not%s%s", "", "");
    if (CUDA(cuCtxGetDevice, &device))
        return refuse(CUDA_ERROR, "there is no current device%s%s", "", "");
    int fd = open(id.bytes, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(meeting)))
        return refuse(SYSTEM_ERROR, "cannot open the place to meet%s%s", "", "");
    meeting *m = mmap(NULL, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    comm *c = new_comm(rank, size, device, 0);
    c->with = m;
    m->pids[rank] = getpid();
    __atomic_add_fetch(&m->joined, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&m->joined, __ATOMIC_SEQ_CST) < size)
        usleep(200);
    unlink(id.bytes);
    *made = c;
    return OK;
}

int ncclCommDestroy(comm *c)
{
    ENTER;
    if (c->dead)
        return refuse(INVALID_ARGUMENT, "destroyed twice%s%s", "", "");
    c->dead = 1; /* stays, so that use after the end is seen */
    __atomic_sub_fetch(&live, 1, __ATOMIC_SEQ_CST);
    return OK;
}

int ncclCommAbort(comm *c)
{
    ENTER;
    c->aborted = 1;
    if (!c->dead) {
        c->dead = 1;
        __atomic_sub_fetch(&live, 1, __ATOMIC_SEQ_CST);
    }
    return OK;
}

int ncclCommGetAsyncError(comm *c, int *error)
{
    ENTER;
    *error = c->async;
    return OK;
}

int ncclCommCount(comm *c, int *n)
{
    *n = c->size;
    return OK;
}

int ncclCommUserRank(comm *c, int *rank)
{
    *rank = c->rank;
    return OK;
}

int ncclCommCuDevice(comm *c, int *device)
{
    *device = c->device;
    return OK;
}
