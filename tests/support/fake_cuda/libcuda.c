/* A CUDA driver without a GPU: device memory is memory of the process, and a launch calls back into Python.
 *
 * Built as libcuda.so.1 and found through LD_LIBRARY_PATH, so that the real cuda.core and cuda.bindings run on it.
 * It has several devices, contexts and their stack, streams, events, memory of all kinds with its bounds, pools, peer
 * access, and libraries with kernels. A mistake of a caller is an error, or shows in the counts.
 *
 * Streams run work at once or, with FAKE_CUDA_LAZY=1, only when the caller waits for it: then work that a
 * caller forgot to wait for has not happened when it looks.
 *
 * FAKE_CUDA_DEVICES  number of devices (1)        FAKE_CUDA_PEERS  whether they reach each other's memory (1)
 * FAKE_CUDA_CC       compute capability (90)      FAKE_CUDA_BYTES  memory of each device (1 GiB)
 * FAKE_CUDA_IPC      whether memory can be exported to other processes (1)
 * FAKE_CUDA_TRACE    name each call on stderr
 *
 * Exported memory becomes a memfd where it lies, which other processes open through /proc. The end of the file lists
 * the processes that have it open: to free it before all have closed it, or while work is to touch it, breaks all work
 * that follows.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int result;
typedef uint64_t u64;

enum {
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    MAP_FAILED_ = 205,
    ALREADY_MAPPED = 208,
    PEER_ENABLED = 704,
    REGISTERED_ALREADY = 712,
    NOT_REGISTERED = 713,
    PEER_NOT_ENABLED = 705,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    NOT_SUPPORTED = 801,
};
enum { MOST_DEVICES = 16, MOST_PARAMS = 8, MOST_CALLS = 512 };
enum { HOST = 1, DEVICE = 2 };

static int setting(const char *name, int fallback)
{
    const char *text = getenv(name);
    return text && *text ? atoi(text) : fallback;
}

/* ------------------------------------------------------------------------------------------- calls and failures */

static struct call {
    char name[64];
    long count;
    int fail_with, fail_after;
} calls[MOST_CALLS];
static int n_calls;
static pthread_mutex_t lock;
__attribute__((constructor)) static void begin(void)
{
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_settype(&kind, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&lock, &kind);
}

static struct call *call_of(const char *name)
{
    for (int i = 0; i < n_calls; i++)
        if (!strcmp(calls[i].name, name))
            return &calls[i];
    if (n_calls == MOST_CALLS)
        abort();
    snprintf(calls[n_calls].name, sizeof calls[0].name, "%s", name);
    return &calls[n_calls++];
}

static int enter(const char *name)
{
    pthread_mutex_lock(&lock);
    struct call *call = call_of(name);
    call->count++;
    int error = call->fail_with && call->fail_after-- <= 0 ? call->fail_with : 0;
    if (error)
        call->fail_with = 0;
    pthread_mutex_unlock(&lock);
    if (setting("FAKE_CUDA_TRACE", 0))
        fprintf(stderr, "[cuda] %s\n", name);
    return error;
}
#define ENTER                          \
    do {                               \
        int error_ = enter(__func__);  \
        if (error_)                    \
            return error_;             \
    } while (0)

long fake_calls(const char *name) { return call_of(name)->count; }
/* Let a call fail once, after so many that do not. */
void fake_fail(const char *name, int error, int after)
{
    struct call *call = call_of(name);
    call->fail_with = error;
    call->fail_after = after;
}

/* ------------------------------------------------------------------------------------------------------- memory */

typedef struct block {
    struct block *next;
    u64 at;
    size_t bytes;
    int kind, device, registered;
    int plain;          /* made by cuMemAlloc, so that it can be exported */
    struct share *share; /* exported, or opened */
    int opened, fd;
} block;
static block *blocks;
static size_t live_bytes[MOST_DEVICES], live_host;
static long live_blocks, live_registered, live_opened, live_exported;
static int failed; /* an error of the work is returned by each later call */

/* The last page of exported memory: processes that have it open. */
typedef struct share {
    size_t bytes;
    int opened_by[64];
} share;
enum { PAGE = 4096 };
static size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

/* Whether a process lives: one that was killed and has not been reaped does not. */
static int lives(int pid)
{
    char path[64], state = 'X';
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "r");
    if (!file)
        return 0;
    if (fscanf(file, "%*d (%*[^)]) %c", &state) != 1)
        state = 'X';
    fclose(file);
    return state != 'Z' && state != 'X';
}

static int is_open_elsewhere(const share *s)
{
    for (int i = 0; i < 64; i++)
        if (s->opened_by[i] && s->opened_by[i] != getpid() && lives(s->opened_by[i]))
            return 1;
    return 0;
}

static void note_opener(share *s, int old, int new)
{
    for (int i = 0; i < 64; i++) {
        int expected = old;
        if (__atomic_compare_exchange_n(&s->opened_by[i], &expected, new, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return;
    }
    abort();
}

static void stop_sharing(struct block *b);

static block *block_of(u64 at, size_t bytes)
{
    for (block *b = blocks; b; b = b->next)
        if (at >= b->at && at - b->at <= b->bytes && bytes <= b->bytes - (at - b->at))
            return b;
    return NULL;
}

static int devices(void) { return setting("FAKE_CUDA_DEVICES", 1); }
static size_t device_bytes(void) { return (size_t)setting("FAKE_CUDA_BYTES", 1 << 30); }

static result allocate(u64 *at, size_t bytes, int kind, int device)
{
    void *memory = NULL;
    if (bytes == 0)
        return INVALID_VALUE;
    if (kind == DEVICE && live_bytes[device] + bytes > device_bytes())
        return OUT_OF_MEMORY;
    if (posix_memalign(&memory, PAGE, whole_pages(bytes)))
        return OUT_OF_MEMORY;
    memset(memory, 0xA5, bytes); /* poison: a NaN, or nonsense */
    block *b = calloc(1, sizeof *b);
    *b = (block){.at = (u64)memory, .bytes = bytes, .kind = kind, .device = device};
    pthread_mutex_lock(&lock);
    b->next = blocks;
    blocks = b;
    live_blocks++;
    *(kind == DEVICE ? &live_bytes[device] : &live_host) += bytes;
    pthread_mutex_unlock(&lock);
    *at = (u64)memory;
    return 0;
}

static result release(u64 at, int kind)
{
    pthread_mutex_lock(&lock);
    for (block **p = &blocks; *p; p = &(*p)->next)
        if ((*p)->at == at && (*p)->kind == kind && !(*p)->registered && !(*p)->opened) {
            block *b = *p;
            *p = b->next;
            if (b->share)
                stop_sharing(b);
            live_blocks--;
            *(kind == DEVICE ? &live_bytes[b->device] : &live_host) -= b->bytes;
            pthread_mutex_unlock(&lock);
            memset((void *)at, 0xDB, b->bytes); /* a later read returns this poison */
            free((void *)at);
            free(b);
            return 0;
        }
    pthread_mutex_unlock(&lock);
    return INVALID_VALUE;
}

long fake_live_blocks(void) { return live_blocks; }
size_t fake_live_bytes(int device) { return live_bytes[device]; }
size_t fake_live_host_bytes(void) { return live_host; }
/* Which device's memory an address lies in; -1 for pinned memory, -2 for any other. */
int fake_owner(u64 at)
{
    block *b = block_of(at, 1);
    return !b ? -2 : b->kind == HOST ? -1 : b->device;
}

/* ------------------------------------------------------------------------------------------------------ contexts */

typedef struct {
    int device, retained;
    unsigned peers;
} context;
static context contexts[MOST_DEVICES];
enum { STACK = 32 };
static __thread context *stack[STACK];
static __thread int depth;

static context *current(void) { return depth ? stack[depth - 1] : NULL; }
static int device_now(void) { return current() ? current()->device : 0; }
static result set_current(context *c)
{
    if (depth)
        stack[depth - 1] = c;
    else if (c)
        stack[depth++] = c;
    if (depth && !stack[depth - 1])
        depth--;
    return 0;
}

/* ------------------------------------------------------------------------------------------------------- streams */

typedef struct kernel {
    char name[512];
    int n_params;
} kernel;

typedef struct op {
    struct op *next;
    enum { COPY, FILL, FILL16, FILL32, LAUNCH, WAIT, MARK, FREE, CALL } what;
    u64 to, from;
    size_t bytes;
    unsigned value;
    void *staged;
    const kernel *function;
    unsigned grid, block;
    u64 params[MOST_PARAMS];
    struct stream *other;
    long other_turn;
    void (*host)(void *);
    void *data;
} op;

typedef struct stream {
    struct stream *next;
    int device, nonblocking, alive;
    op *first, **last;
    long issued, done;
} stream;

typedef struct {
    stream *on;
    long turn;
    int alive;
} event;

static stream *streams;
static stream defaults[MOST_DEVICES];
static long live_streams, live_events, launches;

typedef void (*launcher)(const char *name, unsigned grid, unsigned block, const u64 *params, int device);
typedef int (*counter)(const char *name);
static launcher launched;
static counter parameters;
void fake_callbacks(launcher on_launch, counter count_parameters)
{
    launched = on_launch;
    parameters = count_parameters;
}
void fake_break(int error) { failed = error; }
long fake_launches(void) { return launches; }
long fake_live_streams(void) { return live_streams; }
long fake_live_events(void) { return live_events; }

static int lazy(void) { return setting("FAKE_CUDA_LAZY", 0); }

static stream *stream_of(u64 handle)
{
    if (handle <= 2) { /* the default streams of the current context */
        stream *s = &defaults[device_now()];
        s->device = device_now();
        if (!s->last)
            s->last = &s->first;
        return s;
    }
    return (stream *)handle;
}

static void run_until(stream *s, long turn);

static void perform(stream *s, op *o)
{
    switch (o->what) {
    case COPY: memmove((void *)o->to, o->staged ? o->staged : (void *)o->from, o->bytes); break;
    case FILL: memset((void *)o->to, (int)o->value, o->bytes); break;
    case FILL16:
        for (size_t i = 0; i < o->bytes; i++)
            ((uint16_t *)o->to)[i] = (uint16_t)o->value;
        break;
    case FILL32:
        for (size_t i = 0; i < o->bytes; i++)
            ((uint32_t *)o->to)[i] = o->value;
        break;
    case LAUNCH:
        if (launched)
            launched(o->function->name, o->grid, o->block, o->params, s->device);
        break;
    case WAIT: run_until(o->other, o->other_turn); break;
    case FREE: release(o->to, DEVICE); break;
    case CALL: o->host(o->data); break;
    case MARK: break;
    }
}

static void run_until(stream *s, long turn)
{
    pthread_mutex_lock(&lock);
    while (s->first && s->done < turn) {
        op *o = s->first;
        s->first = o->next;
        if (!s->first)
            s->last = &s->first;
        perform(s, o);
        s->done++;
        free(o->staged);
        free(o);
    }
    pthread_mutex_unlock(&lock);
}

static void run_all(stream *s) { run_until(s, s->issued); }

static void run_device(int device, int nonblocking_too)
{
    for (stream *s = streams; s; s = s->next)
        if (s->device == device && (nonblocking_too || !s->nonblocking))
            run_all(s);
    if (defaults[device].last)
        run_all(&defaults[device]);
}

/* Whether a copy that has not been made yet reads or writes a block. */
static int awaited(const block *b)
{
    for (stream *s = streams; s; s = s->next)
        for (op *o = s->first; o; o = o->next)
            if (o->what == COPY && ((o->to - b->at < b->bytes) || (!o->staged && o->from - b->at < b->bytes)))
                return 1;
    return 0;
}

static result issue(u64 handle, op o)
{
    if (failed)
        return failed;
    stream *s = stream_of(handle);
    op *kept = malloc(sizeof *kept);
    *kept = o;
    kept->next = NULL;
    pthread_mutex_lock(&lock);
    if (!s->last)
        s->last = &s->first;
    *s->last = kept;
    s->last = &kept->next;
    s->issued++;
    pthread_mutex_unlock(&lock);
    if (handle <= 2)
        run_device(s->device, 0);
    else if (!lazy())
        run_all(s);
    return failed;
}

/* A copy whose pageable end cannot wait behaves as in a real driver: the source is read now, the target is written on
 * return. Both ranges must lie within one block, or in memory that the driver did not allocate. */
static result copy(u64 to, u64 from, size_t bytes, u64 handle, int blocking)
{
    block *target = block_of(to, bytes), *source = block_of(from, bytes);
    op o = {.what = COPY, .to = to, .from = from, .bytes = bytes};
    if (!bytes)
        return 0;
    if ((!target && block_of(to, 1)) || (!source && block_of(from, 1)) || (!target && !source))
        return INVALID_VALUE; /* runs over the end of a block; or no end of it is the device's */
    if (!source && !blocking) {
        o.staged = malloc(bytes);
        memcpy(o.staged, (void *)from, bytes);
    }
    result error = issue(handle, o);
    if (!error && (blocking || !target))
        run_all(stream_of(handle));
    return error;
}

/* --------------------------------------------------------------------------------------------- devices, contexts */

result cuInit(unsigned flags) { (void)flags; ENTER; return 0; }
result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
result cuDeviceGetCount(int *n) { ENTER; *n = devices(); return 0; }
result cuDeviceGet(int *device, int ordinal)
{
    ENTER;
    if (ordinal < 0 || ordinal >= devices())
        return INVALID_DEVICE;
    *device = ordinal;
    return 0;
}
result cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "fake %d", device); return 0; }
result cuDeviceGetUuid(void *uuid, int device) { memset(uuid, 7 + device, 16); return 0; }
result cuDeviceGetUuid_v2(void *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
result cuDeviceTotalMem_v2(size_t *bytes, int device) { (void)device; *bytes = device_bytes(); return 0; }
result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    int cc = setting("FAKE_CUDA_CC", 90);
    if (device < 0 || device >= devices())
        return INVALID_DEVICE;
    switch (attribute) {
    case 75: *value = cc / 10; break;
    case 76: *value = cc % 10; break;
    case 1: case 2: case 3: *value = 1024; break;
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;
    case 6: case 7: *value = 65535; break;
    case 8: *value = 48 << 10; break;
    case 10: *value = 32; break;
    case 16: *value = 132; break;
    case 39: *value = 2048; break;
    default: *value = 1;
    }
    return 0;
}
result cuDevicePrimaryCtxRetain(context **c, int device)
{
    ENTER;
    *c = &contexts[device];
    (*c)->device = device;
    (*c)->retained++;
    return 0;
}
result cuDevicePrimaryCtxRelease_v2(int device) { ENTER; contexts[device].retained--; return 0; }
result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = contexts[device].retained > 0;
    return 0;
}
result cuCtxGetCurrent(context **c) { *c = current(); return 0; }
result cuCtxSetCurrent(context *c) { ENTER; return set_current(c); }
result cuCtxPushCurrent_v2(context *c)
{
    ENTER;
    if (depth == STACK)
        return INVALID_VALUE;
    stack[depth++] = c;
    return 0;
}
result cuCtxPopCurrent_v2(context **c)
{
    ENTER;
    if (!depth)
        return INVALID_CONTEXT;
    depth--;
    if (c)
        *c = stack[depth];
    return 0;
}
result cuCtxGetDevice(int *device)
{
    if (!current())
        return INVALID_CONTEXT;
    *device = device_now();
    return 0;
}
result cuCtxGetDevice_v2(int *device, context *c) { *device = c ? c->device : device_now(); return 0; }
result cuCtxSynchronize(void) { ENTER; run_device(device_now(), 1); return failed; }
result cuCtxSynchronize_v2(context *c) { ENTER; run_device(c ? c->device : device_now(), 1); return failed; }
result cuCtxGetApiVersion(context *c, unsigned *version) { (void)c; *version = 13000; return 0; }
result cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
result cuDeviceCanAccessPeer(int *can, int device, int peer)
{
    ENTER;
    *can = device != peer && setting("FAKE_CUDA_PEERS", 1);
    return 0;
}
result cuCtxEnablePeerAccess(context *peer, unsigned flags)
{
    ENTER;
    (void)flags;
    if (!current())
        return INVALID_CONTEXT;
    if (!setting("FAKE_CUDA_PEERS", 1))
        return 217;
    if (current()->peers >> peer->device & 1)
        return PEER_ENABLED;
    current()->peers |= 1u << peer->device;
    return 0;
}
result cuCtxDisablePeerAccess(context *peer)
{
    ENTER;
    if (!current() || !(current()->peers >> peer->device & 1))
        return PEER_NOT_ENABLED;
    current()->peers &= ~(1u << peer->device);
    return 0;
}
int fake_reaches(int device, int peer) { return device == peer || (contexts[device].peers >> peer & 1); }

/* -------------------------------------------------------------------------------------------------------- memory */

result cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    *total = device_bytes();
    *free_bytes = *total - live_bytes[device_now()];
    return 0;
}
result cuMemAlloc_v2(u64 *at, size_t bytes)
{
    ENTER;
    if (!current())
        return INVALID_CONTEXT;
    result error = allocate(at, bytes, DEVICE, device_now());
    if (!error)
        block_of(*at, bytes)->plain = 1;
    return error;
}
result cuMemFree_v2(u64 at)
{
    ENTER;
    if (!at)
        return 0;
    block *b = block_of(at, 1);
    if (b)
        run_device(b->device, 1);
    if (b && b->share && is_open_elsewhere(b->share))
        return failed = ILLEGAL_ADDRESS; /* the real one leaves open what happens */
    return release(at, DEVICE);
}
result cuMemAllocAsync(u64 *at, size_t bytes, u64 handle)
{
    ENTER;
    return allocate(at, bytes, DEVICE, stream_of(handle)->device);
}
result cuMemFreeAsync(u64 at, u64 handle)
{
    ENTER;
    block *b = block_of(at, 1);
    return !b || b->at != at ? INVALID_VALUE : issue(handle, (op){.what = FREE, .to = at});
}
result cuMemHostAlloc(void **at, size_t bytes, unsigned flags)
{
    ENTER;
    (void)flags;
    return allocate((u64 *)at, bytes, HOST, -1);
}
result cuMemAllocHost_v2(void **at, size_t bytes) { return cuMemHostAlloc(at, bytes, 0); }
result cuMemFreeHost(void *at) { ENTER; return release((u64)at, HOST); }
/* Whole pages, each of them once. */
result cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags)
{
    ENTER;
    (void)flags;
    if (!bytes || ((u64)at | bytes) & 4095)
        return INVALID_VALUE;
    for (block *b = blocks; b; b = b->next)
        if (b->registered && (u64)at < b->at + b->bytes && b->at < (u64)at + bytes)
            return REGISTERED_ALREADY;
    block *b = calloc(1, sizeof *b);
    pthread_mutex_lock(&lock);
    *b = (block){.next = blocks, .at = (u64)at, .bytes = bytes, .kind = HOST, .device = -1, .registered = 1};
    blocks = b;
    live_registered++;
    pthread_mutex_unlock(&lock);
    return 0;
}
/* Work that is still to read or write the memory would find it gone: that is an error of the work. */
result cuMemHostUnregister(void *at)
{
    ENTER;
    pthread_mutex_lock(&lock);
    for (block **p = &blocks; *p; p = &(*p)->next)
        if ((*p)->at == (u64)at && (*p)->registered) {
            block *b = *p;
            if (awaited(b))
                failed = ILLEGAL_ADDRESS;
            *p = b->next;
            live_registered--;
            free(b);
            pthread_mutex_unlock(&lock);
            return failed;
        }
    pthread_mutex_unlock(&lock);
    return NOT_REGISTERED;
}
long fake_live_registered(void) { return live_registered; }
result cuMemHostGetDevicePointer_v2(u64 *at, void *host, unsigned flags) { (void)flags; *at = (u64)host; return 0; }
result cuMemGetAddressRange_v2(u64 *base, size_t *bytes, u64 at)
{
    block *b = block_of(at, 1);
    if (!b)
        return NOT_FOUND;
    if (base)
        *base = b->at;
    if (bytes)
        *bytes = b->bytes;
    return 0;
}
result cuMemcpyHtoD_v2(u64 to, const void *from, size_t n) { ENTER; return copy(to, (u64)from, n, 0, 1); }
result cuMemcpyDtoH_v2(void *to, u64 from, size_t n) { ENTER; return copy((u64)to, from, n, 0, 1); }
result cuMemcpyDtoD_v2(u64 to, u64 from, size_t n) { ENTER; return copy(to, from, n, 0, 0); }
result cuMemcpy(u64 to, u64 from, size_t n) { ENTER; return copy(to, from, n, 0, 1); }
result cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t n, u64 s) { ENTER; return copy(to, (u64)from, n, s, 0); }
result cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t n, u64 s) { ENTER; return copy((u64)to, from, n, s, 0); }
result cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t n, u64 s) { ENTER; return copy(to, from, n, s, 0); }
result cuMemcpyAsync(u64 to, u64 from, size_t n, u64 s) { ENTER; return copy(to, from, n, s, 0); }
result cuMemcpyPeerAsync(u64 to, context *a, u64 from, context *b, size_t n, u64 s)
{
    ENTER;
    (void)a, (void)b;
    return copy(to, from, n, s, 0);
}
static result fill(u64 to, unsigned value, size_t n, size_t size, int what, u64 handle)
{
    if (!block_of(to, n * size))
        return INVALID_VALUE;
    return issue(handle, (op){.what = what, .to = to, .value = value, .bytes = n});
}
result cuMemsetD8_v2(u64 to, unsigned char v, size_t n) { ENTER; return fill(to, v, n, 1, FILL, 0); }
result cuMemsetD8Async(u64 to, unsigned char v, size_t n, u64 s) { ENTER; return fill(to, v, n, 1, FILL, s); }
result cuMemsetD16Async(u64 to, unsigned short v, size_t n, u64 s) { ENTER; return fill(to, v, n, 2, FILL16, s); }
result cuMemsetD32_v2(u64 to, unsigned v, size_t n) { ENTER; return fill(to, v, n, 4, FILL32, 0); }
result cuMemsetD32Async(u64 to, unsigned v, size_t n, u64 s) { ENTER; return fill(to, v, n, 4, FILL32, s); }
result cuPointerGetAttribute(void *data, int attribute, u64 at)
{
    block *b = block_of(at, 1);
    if (!b && attribute != 8)
        return INVALID_VALUE;
    switch (attribute) {
    case 1: *(context **)data = b->kind == DEVICE ? &contexts[b->device] : NULL; break;
    case 2: *(unsigned *)data = (unsigned)b->kind; break;
    case 8: *(unsigned *)data = 0; break; /* managed */
    case 9: *(int *)data = b->kind == DEVICE ? b->device : -2; break;
    case 11: *(u64 *)data = b->at; break;
    case 12: *(size_t *)data = b->bytes; break;
    default: *(u64 *)data = at;
    }
    return 0;
}
result cuPointerGetAttributes(unsigned n, const int *attributes, void **data, u64 at)
{
    ENTER;
    for (unsigned i = 0; i < n; i++)
        if (block_of(at, 1))
            cuPointerGetAttribute(data[i], attributes[i], at);
        else if (attributes[i] == 2 || attributes[i] == 8)
            *(unsigned *)data[i] = 0;
        else if (attributes[i] == 9)
            *(int *)data[i] = -2;
        else
            *(u64 *)data[i] = 0;
    return 0;
}

/* ---------------------------------------------------------------------------------------- memory between processes */

typedef struct {
    u64 magic;
    int pid, fd;
    u64 inode, bytes;
    char rest[32];
} ipc_handle;
enum { IPC_MAGIC = 0x1bc };

/* Put a file with the same content in the place of memory. */
static result share_block(block *b)
{
    size_t bytes = whole_pages(b->bytes);
    int fd = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)(bytes + PAGE)) || pwrite(fd, (void *)b->at, bytes, 0) != (ssize_t)bytes)
        return OUT_OF_MEMORY;
    share *s = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)bytes);
    if (s == MAP_FAILED ||
        mmap((void *)b->at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        return MAP_FAILED_;
    s->bytes = b->bytes;
    b->share = s;
    b->fd = fd;
    live_exported++;
    return 0;
}

/* Memory of the heap again: other processes keep their mappings. */
static void stop_sharing(block *b)
{
    munmap(b->share, PAGE);
    mmap((void *)b->at, whole_pages(b->bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    close(b->fd);
    b->share = NULL;
    live_exported--;
}

result cuIpcGetMemHandle(ipc_handle *handle, u64 at)
{
    ENTER;
    struct stat found;
    block *b = block_of(at, 1);
    if (!setting("FAKE_CUDA_IPC", 1))
        return NOT_SUPPORTED;
    if (!current())
        return INVALID_CONTEXT;
    if (!b || b->at != at || !b->plain || b->opened)
        return INVALID_VALUE;
    run_device(b->device, 1); /* queued work must run before the memory is exchanged */
    pthread_mutex_lock(&lock);
    result error = b->share ? 0 : share_block(b);
    pthread_mutex_unlock(&lock);
    if (error || fstat(b->fd, &found))
        return error ? error : MAP_FAILED_;
    memset(handle, 0, sizeof *handle);
    *handle = (ipc_handle){.magic = IPC_MAGIC, .pid = getpid(), .fd = b->fd, .inode = found.st_ino, .bytes = b->bytes};
    return 0;
}

result cuIpcOpenMemHandle_v2(u64 *at, ipc_handle handle, unsigned flags)
{
    ENTER;
    char path[64];
    struct stat found;
    size_t bytes = whole_pages(handle.bytes);
    if (!setting("FAKE_CUDA_IPC", 1))
        return NOT_SUPPORTED;
    if (!current() || handle.pid == getpid())
        return INVALID_CONTEXT;
    if (handle.magic != IPC_MAGIC || flags != 1)
        return INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return MAP_FAILED_;
    if (fstat(fd, &found) || found.st_ino != handle.inode) {
        close(fd);
        return INVALID_HANDLE;
    }
    for (block *b = blocks; b; b = b->next)
        if (b->opened && b->registered == 0 && b->fd == (int)handle.inode) {
            close(fd);
            return ALREADY_MAPPED; /* some drivers count instead */
        }
    char *memory = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (memory == MAP_FAILED)
        return MAP_FAILED_;
    block *b = calloc(1, sizeof *b);
    *b = (block){.at = (u64)memory, .bytes = handle.bytes, .kind = DEVICE, .device = device_now(), .opened = 1,
                 .share = (share *)(memory + bytes), .fd = (int)handle.inode};
    pthread_mutex_lock(&lock);
    note_opener(b->share, 0, getpid());
    b->next = blocks;
    blocks = b;
    live_opened++;
    pthread_mutex_unlock(&lock);
    *at = b->at;
    return 0;
}

result cuIpcCloseMemHandle(u64 at)
{
    ENTER;
    pthread_mutex_lock(&lock);
    for (block **p = &blocks; *p; p = &(*p)->next)
        if ((*p)->at == at && (*p)->opened) {
            block *b = *p;
            *p = b->next;
            pthread_mutex_unlock(&lock);
            run_device(b->device, 1);
            note_opener(b->share, getpid(), 0);
            munmap((void *)at, whole_pages(b->bytes) + PAGE);
            free(b);
            live_opened--;
            return failed;
        }
    pthread_mutex_unlock(&lock);
    return INVALID_VALUE;
}
long fake_live_opened(void) { return live_opened; }
long fake_live_exported(void) { return live_exported; }

/* Pools give their memory back at once. A pool's handle is its device's number behind a tag. */
enum { POOL = 0x70010000 };
result cuDeviceGetDefaultMemPool(u64 *pool, int device) { ENTER; *pool = POOL + device; return 0; }
result cuDeviceGetMemPool(u64 *pool, int device) { ENTER; *pool = POOL + device; return 0; }
result cuDeviceSetMemPool(int device, u64 pool) { ENTER; (void)device, (void)pool; return 0; }
result cuMemGetDefaultMemPool(u64 *pool, const int *location, int kind)
{
    ENTER;
    (void)kind;
    *pool = POOL + location[1];
    return 0;
}
result cuMemGetMemPool(u64 *pool, const int *location, int kind) { return cuMemGetDefaultMemPool(pool, location, kind); }
result cuMemPoolCreate(u64 *pool, const int *properties)
{
    ENTER;
    *pool = POOL + properties[3]; /* allocType, handleTypes, location.type, location.id */
    return 0;
}
result cuMemPoolDestroy(u64 pool) { ENTER; (void)pool; return 0; }
result cuMemPoolTrimTo(u64 pool, size_t bytes) { (void)pool, (void)bytes; return 0; }
result cuMemPoolSetAttribute(u64 pool, int attribute, void *value) { (void)pool, (void)attribute, (void)value; return 0; }
result cuMemPoolGetAttribute(u64 pool, int attribute, void *value)
{
    (void)pool;
    if (attribute <= 3)
        *(int *)value = 1;
    else
        *(u64 *)value = 0;
    return 0;
}
result cuMemPoolSetAccess(u64 pool, const void *access, size_t n) { ENTER; (void)pool, (void)access, (void)n; return 0; }
result cuMemPoolGetAccess(unsigned *flags, u64 pool, const void *location) { (void)pool, (void)location; *flags = 3; return 0; }
result cuMemAllocFromPoolAsync(u64 *at, size_t bytes, u64 pool, u64 handle)
{
    ENTER;
    (void)handle;
    return allocate(at, bytes, DEVICE, (int)(pool - POOL));
}

/* ------------------------------------------------------------------------------------------------ streams, events */

result cuStreamCreateWithPriority(stream **made, unsigned flags, int priority)
{
    ENTER;
    (void)priority;
    stream *s = calloc(1, sizeof *s);
    *s = (stream){.next = streams, .device = device_now(), .nonblocking = flags & 1, .alive = 1};
    s->last = &s->first;
    streams = *made = s;
    live_streams++;
    return 0;
}
result cuStreamCreate(stream **made, unsigned flags) { return cuStreamCreateWithPriority(made, flags, 0); }
result cuStreamDestroy_v2(stream *s)
{
    ENTER;
    run_all(s);
    if (!s->alive)
        return INVALID_HANDLE;
    s->alive = 0; /* its memory stays: an event may still name it */
    live_streams--;
    return 0;
}
result cuStreamSynchronize(u64 handle) { ENTER; run_all(stream_of(handle)); return failed; }
result cuStreamQuery(u64 handle)
{
    ENTER;
    stream *s = stream_of(handle);
    int busy = s->first != NULL;
    run_until(s, s->done + 1); /* each question finds it further on */
    return failed ? failed : busy ? NOT_READY : 0;
}
result cuStreamWaitEvent(u64 handle, event *e, unsigned flags)
{
    ENTER;
    (void)flags;
    return e->on ? issue(handle, (op){.what = WAIT, .other = e->on, .other_turn = e->turn}) : 0;
}
result cuStreamGetCtx(u64 handle, context **c) { *c = &contexts[stream_of(handle)->device]; return 0; }
result cuStreamGetCtx_v2(u64 handle, context **c, u64 *green)
{
    if (green)
        *green = 0;
    return cuStreamGetCtx(handle, c);
}
result cuStreamGetDevice(u64 handle, int *device) { *device = stream_of(handle)->device; return 0; }
result cuStreamGetFlags(u64 handle, unsigned *flags) { *flags = (unsigned)stream_of(handle)->nonblocking; return 0; }
result cuStreamGetPriority(u64 handle, int *priority) { (void)handle; *priority = 0; return 0; }
result cuStreamGetId(u64 handle, u64 *id) { *id = handle; return 0; }
result cuStreamIsCapturing(u64 handle, int *status) { (void)handle; *status = 0; return 0; }
result cuLaunchHostFunc(u64 handle, void (*function)(void *), void *data)
{
    ENTER;
    return issue(handle, (op){.what = CALL, .host = function, .data = data});
}
result cuEventCreate(event **made, unsigned flags)
{
    ENTER;
    (void)flags;
    *made = calloc(1, sizeof **made);
    (*made)->alive = 1;
    live_events++;
    return 0;
}
result cuEventDestroy_v2(event *e)
{
    ENTER;
    if (!e->alive)
        return INVALID_HANDLE;
    e->alive = 0;
    live_events--;
    return 0;
}
result cuEventRecord(event *e, u64 handle)
{
    ENTER;
    e->on = stream_of(handle);
    result error = issue(handle, (op){.what = MARK});
    e->turn = e->on->issued;
    return error;
}
result cuEventRecordWithFlags(event *e, u64 handle, unsigned flags) { (void)flags; return cuEventRecord(e, handle); }
result cuEventSynchronize(event *e)
{
    ENTER;
    if (e->on)
        run_until(e->on, e->turn);
    return failed;
}
result cuEventQuery(event *e)
{
    ENTER;
    if (!e->on || e->on->done >= e->turn)
        return failed;
    run_until(e->on, e->on->done + 1);
    return NOT_READY;
}
result cuEventElapsedTime_v2(float *milliseconds, event *a, event *b)
{
    if (!a->on || !b->on || a->on->done < a->turn || b->on->done < b->turn)
        return NOT_READY;
    *milliseconds = 1;
    return 0;
}
result cuEventElapsedTime(float *milliseconds, event *a, event *b) { return cuEventElapsedTime_v2(milliseconds, a, b); }

/* ------------------------------------------------------------------------------------------- libraries, launches */

result cuLibraryLoadData(u64 *library, const void *code, void *a, void *b, unsigned n, void *c, void *d, unsigned m)
{
    static u64 made = 0x5000000;
    ENTER;
    (void)code, (void)a, (void)b, (void)n, (void)c, (void)d, (void)m;
    *library = made += 16;
    return 0;
}
result cuLibraryUnload(u64 library) { ENTER; (void)library; return 0; }
result cuLibraryGetKernel(kernel **found, u64 library, const char *name)
{
    ENTER;
    (void)library;
    int n = parameters ? parameters(name) : -1;
    if (n < 0 || n > MOST_PARAMS)
        return NOT_FOUND;
    *found = calloc(1, sizeof **found);
    snprintf((*found)->name, sizeof (*found)->name, "%s", name);
    (*found)->n_params = n;
    return 0;
}
result cuLibraryGetModule(u64 *module, u64 library) { *module = library; return 0; }
result cuKernelGetFunction(kernel **function, kernel *k) { *function = k; return 0; }
result cuKernelGetLibrary(u64 *library, kernel *k) { (void)k; *library = 0x5000010; return 0; }
result cuKernelGetAttribute(int *value, int attribute, kernel *k, int device)
{
    (void)k, (void)device;
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0;
    return 0;
}
result cuKernelGetParamInfo(kernel *k, size_t i, size_t *offset, size_t *size)
{
    if (i >= (size_t)k->n_params)
        return INVALID_VALUE;
    if (offset)
        *offset = 8 * i;
    if (size)
        *size = i ? 4 : 8;
    return 0;
}
result cuFuncGetAttribute(int *value, int attribute, kernel *k) { return cuKernelGetAttribute(value, attribute, k, 0); }
static result launch(kernel *k, unsigned grid, unsigned threads, u64 handle, void **params)
{
    op o = {.what = LAUNCH, .function = k, .grid = grid, .block = threads};
    if (!grid || !threads || threads > 1024 || !current() || stream_of(handle)->device != device_now())
        return INVALID_VALUE;
    for (int i = 0; i < k->n_params; i++)
        memcpy(&o.params[i], params[i], i ? 4 : 8);
    launches++;
    return issue(handle, o);
}
result cuLaunchKernel(kernel *k, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, u64 handle, void **params, void **extra)
{
    ENTER;
    (void)shared, (void)extra;
    return gy == 1 && gz == 1 && by == 1 && bz == 1 ? launch(k, gx, bx, handle, params) : INVALID_VALUE;
}
result cuLaunchKernelEx(const unsigned *config, kernel *k, void **params, void **extra)
{
    ENTER; /* gridDim x y z, blockDim x y z, sharedMemBytes, then the stream */
    (void)extra;
    u64 handle;
    memcpy(&handle, config + 8, sizeof handle);
    return launch(k, config[0], config[3], handle, params);
}

/* ---------------------------------------------------------------------------------------------- errors, entry points */

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {MAP_FAILED_, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {REGISTERED_ALREADY, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part of it is registered already"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "it is not registered"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {PEER_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {PEER_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};
static result say(int code, const char **text, int name)
{
    *text = name ? "CUDA_ERROR_UNKNOWN" : "an error of the fake driver";
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code)
            *text = name ? errors[i].name : errors[i].text;
    return 0;
}
result cuGetErrorName(int code, const char **text) { return say(code, text, 1); }
result cuGetErrorString(int code, const char **text) { return say(code, text, 0); }

static result missing(void) { enter("missing"); return NOT_SUPPORTED; }

result cuGetProcAddress_v2(const char *symbol, void **found, int version, u64 flags, int *status)
{
    static void *self;
    char name[256];
    (void)version, (void)flags;
    if (!self) {
        Dl_info here;
        dladdr((void *)cuInit, &here);
        self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    const char *endings[] = {"_v2", ""};
    *found = NULL;
    for (int i = 0; i < 2 && !*found; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, endings[i]);
        *found = dlsym(self, name);
    }
    if (!*found) {
        if (setting("FAKE_CUDA_TRACE", 0))
            fprintf(stderr, "[cuda] %s is missing\n", symbol);
        *found = (void *)missing;
    }
    if (status)
        *status = 0;
    return 0;
}
result cuGetProcAddress(const char *symbol, void **found, int version, u64 flags)
{
    return cuGetProcAddress_v2(symbol, found, version, flags, NULL);
}
result cuGetExportTable(const void **table, const void *id) { (void)id; *table = NULL; return INVALID_VALUE; }
