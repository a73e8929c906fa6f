"""In C: a thread that wakes the sleepers wakes those of its own process, too."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pace

# Sleeps have no end here, where else one of 20 ms would hide that no thread was woken.
PROGRAM = """
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static long without_end(long number, ...)
{
    va_list more;
    va_start(more, number);
    void *at = va_arg(more, void *);
    int what = va_arg(more, int);
    uint32_t value = va_arg(more, uint32_t);
    va_end(more);
    return number == SYS_futex ? syscall(number, at, what, value, NULL, NULL, 0) : -1;
}

#define syscall without_end
#include "wait.h"

static kv_self me = {.size = 2, .fd = -1, .go_on = 1, .blind = 1};
static _Atomic int come;

static int has_come(void *unused)
{
    return come;
}

static void *waits(void *unused)
{
    return (void *)(long)kv_wait(&me, has_come, NULL);
}

int main(void)
{
    pthread_t other;
    void *outcome;
    me.head = calloc(1, sizeof *me.head);
    me.worker = &me.head->worker[0];
    me.worker->state = 1ull << 32 | KV_ALIVE;
    me.incarnation = me.worker->incarnation = 1;
    pthread_mutex_init(&me.busy, NULL);
    pthread_create(&other, NULL, waits, NULL);
    while (!me.head->asleep)
        usleep(100);
    usleep(10000);
    come = 1;
    kv_wake_all(&me);
    pthread_join(other, &outcome);
    return (int)(long)outcome; /* KV_READY */
}
"""


def test_another_thread_of_the_process_is_woken(build_c: Callable[[str, str], Path]) -> None:
    subprocess.run([build_c("waking", PROGRAM)], check=True, timeout=pace.seconds(20))
