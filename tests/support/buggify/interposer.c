/* Seeded faults and delays at calls into the C library, for processes of tests; loaded by LD_PRELOAD.
 *
 * Nothing happens before `buggify_begin`. From then on each call of a wrapped function is a point: what
 * happens is a function of the seed, the process, the point, and how often the point was passed, as in
 * points.py. The interposer does only what the kernel itself may do: transfers end early on streams only, EINTR
 * is returned only where a call would have waited, EAGAIN only where a descriptor does not wait.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { BG_DELAYS = 1, BG_SHORT = 2, BG_INTERRUPTS = 4, BG_AGAIN = 8, BG_SPACE = 16, BG_DISK = 32 };

/* The points, and of each how many calls of 1024 something happens to, where it is on. */
#define POINTS(X)                                                                                     \
    X(delay_send, BG_DELAYS, 60) X(delay_recv, BG_DELAYS, 60) X(delay_wait, BG_DELAYS, 60)            \
    X(delay_futex, BG_DELAYS, 60) X(delay_clock, BG_DELAYS, 4)           \
    X(delay_peek, BG_DELAYS, 60) X(delay_file, BG_DELAYS, 200)                                        \
    X(short_send, BG_SHORT, 200) X(short_recv, BG_SHORT, 200) X(short_file, BG_SHORT, 200)            \
    X(intr_send, BG_INTERRUPTS, 60) X(intr_recv, BG_INTERRUPTS, 60) X(intr_wait, BG_INTERRUPTS, 60)   \
    X(intr_sleep, BG_INTERRUPTS, 60) X(intr_futex, BG_INTERRUPTS, 60)                                 \
    X(wake_futex, BG_INTERRUPTS, 60)                                                                  \
    X(again_send, BG_AGAIN, 150) X(again_recv, BG_AGAIN, 100)                                           \
    X(space_mmap, BG_SPACE, 40) X(space_memfd, BG_SPACE, 120) X(space_allocate, BG_SPACE, 120)        \
    X(disk_write, BG_DISK, 120) X(disk_sync, BG_DISK, 120) X(disk_rename, BG_DISK, 120)               \
    X(disk_open, BG_DISK, 60)

enum {
#define X(name, kind, chance) P_##name,
    POINTS(X)
#undef X
        N_POINTS
};

static struct {
    const char *name;
    unsigned kind, chance;
    int on;
    uint64_t key;
    atomic_ullong passed, fired;
} points[N_POINTS] = {
#define X(name, kind, chance) {#name, kind, chance, 0, 0, 0, 0},
    POINTS(X)
#undef X
};
static atomic_int active, budget; /* budget: errors that may still happen */

static uint64_t mixed(uint64_t value)
{
    value += 0x9E3779B97F4A7C15u;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
    value = (value ^ value >> 27) * 0x94D049BB133111EBu;
    return value ^ value >> 31;
}

static uint32_t crc32_of(const char *text)
{
    uint32_t crc = ~0u;
    for (; *text; text++) {
        crc ^= (unsigned char)*text;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (0xEDB88320u & -(crc & 1));
    }
    return ~crc;
}

/* Begin; `kinds` are those of the enumeration, and `errors` how many of the last two may happen. */
void buggify_begin(uint64_t seed, const char *process, unsigned kinds, int errors)
{
    uint64_t key = mixed(mixed(seed) ^ crc32_of(process));
    for (int at = 0; at < N_POINTS; at++) {
        points[at].key = mixed(key ^ crc32_of(points[at].name));
        points[at].on = points[at].kind & kinds && !(mixed(points[at].key) >> 63);
        points[at].passed = points[at].fired = 0;
    }
    budget = errors;
    active = 1;
}

void buggify_end(void) { active = 0; }

/* How often something has happened at a point; -1: there is none of this name. */
long long buggify_fired(const char *name)
{
    for (int at = 0; at < N_POINTS; at++)
        if (!strcmp(points[at].name, name))
            return (long long)points[at].fired;
    return -1;
}

/* Return 0, or where something is to happen a number that says what. */
static uint64_t hit(int at)
{
    if (!active || !points[at].on)
        return 0;
    uint64_t value = mixed(points[at].key ^ (++points[at].passed));
    if (value >> 54 >= points[at].chance)
        return 0;
    if (points[at].kind & (BG_SPACE | BG_DISK) && budget-- <= 0) {
        budget = 0;
        return 0;
    }
    points[at].fired++;
    return value << 10 >> 9 | 1;
}

#define REAL(name)                                                                                    \
    static __typeof__(&name) real;                                                                    \
    if (!real)                                                                                        \
    real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static void sleep_for(uint64_t microseconds)
{
    struct timespec time = {(time_t)(microseconds / 1000000), (long)(microseconds % 1000000) * 1000};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &time, NULL);
}

/* Half of the delays only let another thread run first; some are long. */
static void delay(int at)
{
    int saved = errno;
    uint64_t value = hit(at);
    if (!value)
        return;
    if (value >> 1 & 1)
        sched_yield();
    else
        sleep_for((value >> 2 & 15) ? (value >> 8) % 1000 : (value >> 8) % 20000);
    errno = saved;
}

static int fails(int at, int error)
{
    if (!hit(at))
        return 0;
    errno = error;
    return 1;
}

static int is_stream(int fd)
{
    int type = 0;
    socklen_t size = sizeof(type);
    return !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_STREAM;
}

static int waits(int fd, int flags) { return !(flags & MSG_DONTWAIT) && !(fcntl(fd, F_GETFL) & O_NONBLOCK); }

static int waits_on_futex(long operation)
{
    int command = (int)operation & FUTEX_CMD_MASK;
    return command == FUTEX_WAIT || command == FUTEX_WAIT_BITSET;
}

/* A file opened for appending is a log or a record of a test; the first three may be files of the test, too. */
static int is_plain(int fd)
{
    struct stat found;
    return fd > 2 && !fstat(fd, &found) && S_ISREG(found.st_mode) && !(fcntl(fd, F_GETFL) & O_APPEND);
}

/* Return how much of a transfer to do. */
static size_t part(int at, int fd, size_t size)
{
    uint64_t value;
    if (size < 2 || !active || !points[at].on || !is_stream(fd) || !(value = hit(at)))
        return size;
    return 1 + (value >> 1) % (size - 1);
}

/* Calls that fail for some time on a stream whose buffer is full, or empty. */
static atomic_int stalled[2][1024];

static int stalls(int at, int fd)
{
    atomic_int *left = &stalled[at == P_again_send][fd & 1023];
    uint64_t value;
    if (*left > 0) {
        --*left;
    } else {
        if (!(value = hit(at)))
            return 0;
        *left = (value >> 1 & 1) ? (int)(value >> 2 & 63) : 0;
    }
    errno = EAGAIN;
    return 1;
}

/* Whether a transfer fails as one may that does not wait, or that waits. */
static int held(int interrupt, int again, int fd, int flags)
{
    if (!active || !is_stream(fd))
        return 0;
    return waits(fd, flags) ? fails(interrupt, EINTR) : stalls(again, fd);
}

/* Shorten buffers to so many bytes; their copy lies in `cut`. */
static size_t shortened(const struct iovec *all, size_t n, struct iovec *cut, size_t left)
{
    size_t used = 0;
    for (; used < n && left; used++) {
        cut[used] = all[used];
        if (cut[used].iov_len > left)
            cut[used].iov_len = left;
        left -= cut[used].iov_len;
    }
    return used;
}

static size_t bytes_of(const struct iovec *all, size_t n)
{
    size_t size = 0;
    for (size_t at = 0; at < n; at++)
        size += all[at].iov_len;
    return size;
}

/* ------------------------------------------------------------------------------------------- transfers */

ssize_t send(int fd, const void *data, size_t size, int flags)
{
    REAL(send);
    delay(P_delay_send);
    return held(P_intr_send, P_again_send, fd, flags) ? -1 : real(fd, data, part(P_short_send, fd, size), flags);
}

ssize_t recv(int fd, void *data, size_t size, int flags)
{
    REAL(recv);
    delay(P_delay_recv);
    if (held(P_intr_recv, P_again_recv, fd, flags))
        return -1;
    return real(fd, data, flags & MSG_WAITALL ? size : part(P_short_recv, fd, size), flags);
}

#define MOST 64 /* buffers of one call that is shortened */

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    REAL(sendmsg);
    struct iovec cut[MOST];
    struct msghdr less = *message;
    size_t n = message->msg_iovlen, size = bytes_of(message->msg_iov, n);
    delay(P_delay_send);
    if (held(P_intr_send, P_again_send, fd, flags))
        return -1;
    if (n <= MOST && !message->msg_controllen) {
        less.msg_iov = cut;
        less.msg_iovlen = shortened(message->msg_iov, n, cut, part(P_short_send, fd, size));
    }
    return real(fd, &less, flags);
}

ssize_t readv(int fd, const struct iovec *all, int n)
{
    REAL(readv);
    struct iovec cut[MOST];
    delay(P_delay_recv);
    if (held(P_intr_recv, P_again_recv, fd, 0))
        return -1;
    if (n > MOST)
        return real(fd, all, n);
    return real(fd, cut, (int)shortened(all, (size_t)n, cut, part(P_short_recv, fd, bytes_of(all, (size_t)n))));
}

ssize_t read(int fd, void *data, size_t size)
{
    REAL(read);
    delay(P_delay_recv);
    return held(P_intr_recv, P_again_recv, fd, 0) ? -1 : real(fd, data, part(P_short_recv, fd, size));
}

ssize_t write(int fd, const void *data, size_t size)
{
    REAL(write);
    if (active && is_plain(fd)) {
        uint64_t value;
        delay(P_delay_file);
        if (fails(P_disk_write, ENOSPC))
            return -1;
        if (size > 1 && (value = hit(P_short_file)))
            size = 1 + (value >> 1) % (size - 1);
        return real(fd, data, size);
    }
    delay(P_delay_send);
    return held(P_intr_send, P_again_send, fd, 0) ? -1 : real(fd, data, part(P_short_send, fd, size));
}

/* ----------------------------------------------------------------------------------------------- waits */

int poll(struct pollfd *all, nfds_t n, int timeout)
{
    REAL(poll);
    if (timeout && fails(P_intr_wait, EINTR))
        return -1;
    int found = real(all, n, timeout);
    delay(P_delay_wait);
    return found;
}

int epoll_wait(int fd, struct epoll_event *all, int n, int timeout)
{
    REAL(epoll_wait);
    if (timeout && fails(P_intr_wait, EINTR))
        return -1;
    int found = real(fd, all, n, timeout);
    delay(P_delay_wait);
    return found;
}

int nanosleep(const struct timespec *time, struct timespec *left)
{
    REAL(nanosleep);
    if (fails(P_intr_sleep, EINTR)) {
        if (left)
            *left = *time;
        return -1;
    }
    return real(time, left);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left)
{
    REAL(clock_nanosleep);
    if (hit(P_intr_sleep)) {
        if (left && !(flags & TIMER_ABSTIME))
            *left = *time;
        return EINTR;
    }
    return real(clock, flags, time, left);
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    REAL(clock_gettime);
    int result = real(clock, time);
    delay(P_delay_clock);
    return result;
}

int sched_yield(void)
{
    delay(P_delay_clock);
    return (int)syscall(SYS_sched_yield);
}

ssize_t process_vm_readv(
    pid_t pid, const struct iovec *to, unsigned long n, const struct iovec *from, unsigned long m, unsigned long flags)
{
    REAL(process_vm_readv);
    delay(P_delay_peek);
    ssize_t result = real(pid, to, n, from, m, flags);
    delay(P_delay_peek);
    return result;
}

long syscall(long number, ...)
{
    static long (*real)(long, ...);
    va_list rest;
    long a[6];
    if (!real)
        real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_start(rest, number);
    for (int at = 0; at < 6; at++)
        a[at] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_futex) {
        int waiting = waits_on_futex(a[1]);
        delay(P_delay_futex);
        if (waiting && fails(P_intr_futex, EINTR))
            return -1;
        if (waiting && hit(P_wake_futex))
            return 0; /* a spurious wake-up */
    }
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* ------------------------------------------------------------------------------------- memory and files */

#define LARGE (1 << 16) /* smaller mappings are those of the interpreter and of threads */

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
    REAL(mmap);
    if (size >= LARGE && (fd >= 0 || flags & MAP_ANONYMOUS) && !(flags & MAP_FIXED) && fails(P_space_mmap, ENOMEM))
        return MAP_FAILED;
    return real(at, size, protection, flags, fd, offset);
}

int memfd_create(const char *name, unsigned flags)
{
    REAL(memfd_create);
    return fails(P_space_memfd, ENOMEM) ? -1 : real(name, flags);
}

int ftruncate(int fd, off_t size)
{
    REAL(ftruncate);
    return size && fails(P_space_allocate, ENOSPC) ? -1 : real(fd, size);
}

int posix_fallocate(int fd, off_t offset, off_t size)
{
    REAL(posix_fallocate);
    return hit(P_space_allocate) ? ENOSPC : real(fd, offset, size);
}

int fsync(int fd)
{
    REAL(fsync);
    delay(P_delay_file);
    return fails(P_disk_sync, EIO) ? -1 : real(fd);
}

int rename(const char *from, const char *to)
{
    REAL(rename);
    delay(P_delay_file);
    return fails(P_disk_rename, EIO) ? -1 : real(from, to);
}

int open(const char *path, int flags, ...)
{
    static int (*real)(const char *, int, ...);
    va_list rest;
    if (!real)
        real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open");
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    if (flags & O_CREAT && !(flags & O_APPEND) && fails(P_disk_open, ENOSPC))
        return -1;
    return real(path, flags, mode);
}

/* The names of these functions in programs that are built for large files. */
#define ALSO(name) extern __typeof__(name) name##64 __attribute__((alias(#name)))
ALSO(mmap);
ALSO(ftruncate);
ALSO(posix_fallocate);
ALSO(open);
