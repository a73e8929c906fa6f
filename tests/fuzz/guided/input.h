/* The input of a fuzzer, as a socket delivers it: events of four bytes, {what, with, number}, and after those of BYTES
 * so many bytes of the input. Descriptors from FIRST_FD on are no sockets; they deliver the input. */
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "numbers.h"

enum { BYTES, FILLED, N_COMING, FIRST_FD = 1 << 20 };

/* A check that stays where asserts are left out. */
#define MUST(what)                                                       \
    do {                                                                 \
        if (!(what)) {                                                   \
            fprintf(stderr, "line %d: %s is not so\n", __LINE__, #what); \
            abort();                                                     \
        }                                                                \
    } while (0)

typedef struct {
    const uint8_t *at;
    size_t left;
} fuzz_input;

typedef struct {
    uint8_t what, with;
    uint16_t number;
} fuzz_event;

/* What can be received now: `left` bytes at `at`, or of value `with`. */
typedef struct {
    const uint8_t *at;
    uint8_t with;
    size_t left;
} fuzz_coming;

static int fuzz_take(fuzz_input *in, void *to, size_t n)
{
    if (in->left < n)
        return 0;
    memcpy(to, in->at, n);
    in->at += n;
    in->left -= n;
    return 1;
}

static int fuzz_next(fuzz_input *in, fuzz_event *event)
{
    return fuzz_take(in, event, sizeof *event);
}

/* What an event of BYTES or FILLED brings. */
static fuzz_coming fuzz_come(fuzz_input *in, const fuzz_event *event)
{
    fuzz_coming coming = {.with = event->with, .left = event->number};
    if (event->what == FILLED)
        return coming;
    coming.at = in->at;
    coming.left = coming.left < in->left ? coming.left : in->left;
    in->at += coming.left;
    in->left -= coming.left;
    return coming;
}

static fuzz_coming *fuzz_coming_at(int fd); /* of the target: the data at a descriptor */

static size_t fuzz_give(fuzz_coming *coming, void *to, size_t room)
{
    size_t n = coming->left < room ? coming->left : room;
    if (coming->at) {
        memcpy(to, coming->at, n);
        coming->at += n;
    } else
        memset(to, coming->with, n);
    coming->left -= n;
    return n;
}

static ssize_t fuzz_readv(int fd, const struct iovec *io, int n)
{
    fuzz_coming *coming = fuzz_coming_at(fd);
    size_t done = 0;
    for (int i = 0; i < n && coming->left; i++)
        done += fuzz_give(coming, io[i].iov_base, io[i].iov_len);
    if (!done)
        errno = EAGAIN;
    return done ? (ssize_t)done : -1;
}

static ssize_t fuzz_read(int fd, void *to, size_t room)
{
    struct iovec io = {to, room};
    return fuzz_readv(fd, &io, 1);
}

/* The socket takes all. */
static ssize_t fuzz_sendmsg(int fd, const struct msghdr *message, int flags)
{
    ssize_t done = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++)
        done += (ssize_t)message->msg_iov[i].iov_len;
    return done;
}

static int fuzz_no_call(void) { return 0; }

#define readv(fd, io, n) fuzz_readv(fd, io, n)
#define read(fd, to, room) fuzz_read(fd, to, room)
#define sendmsg(fd, message, flags) fuzz_sendmsg(fd, message, flags)
#define setsockopt(fd, level, name, value, size) fuzz_no_call()
#define shutdown(fd, how) fuzz_no_call()
#define close(fd) fuzz_no_call()

/* ----------------------------------------------------------------------------------------------- mutations */

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t most);

enum { HEAD_BYTES = 52, RECORD_BYTES = 79, JOB_AT = 8, RECORDS_AT = 48 };

/* The next head of a batch, from `at` on; `size` if there is none. */
static size_t fuzz_head(const uint8_t *data, size_t size, size_t at)
{
    for (; at + HEAD_BYTES + RECORD_BYTES <= size; at++)
        if (!memcmp(data + at, "KVST", 4) && data[at + 6] == 2 && data[at + JOB_AT] == 77)
            return at;
    return size;
}

/* Mostly anything; else one number of one record, or two records in another order. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t most, unsigned seed)
{
    uint64_t chance = seed * 0x9e3779b97f4a7c15u + 1;
    size_t heads = 0, chosen = size;
    for (size_t at = fuzz_head(data, size, 0); seed % 2 && at < size; at = fuzz_head(data, size, at + 1))
        if ((chance >> 32) % ++heads == 0)
            chosen = at;
    if (chosen == size)
        return LLVMFuzzerMutate(data, size, most);
    uint32_t n;
    memcpy(&n, data + chosen + RECORDS_AT, sizeof n);
    size_t there = (size - chosen - HEAD_BYTES) / RECORD_BYTES;
    there = n && n < there ? n : there;
    uint8_t *record = data + chosen + HEAD_BYTES + (chance >> 8) % there * RECORD_BYTES;
    size_t f = (chance >> 16) % (sizeof fields / sizeof *fields);
    uint64_t number = limits[(chance >> 24) % (sizeof limits / sizeof *limits)];
    if (chance >> 40 & 1)
        number = (chance >> 41) % 25;
    memcpy(record + fields[f].at, &number, fields[f].size);
    return size;
}

#endif
