"""In C: a worker that leaves, or gives up, does so when its other threads have ended their calls."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pace
import pytest

PROGRAM = """
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include "region.h"

enum { REGION = 4 << 20 };

static kv_self me = {.window = REGION, .size = 2, .fd = -1, .go_on = 1};
static int locks; /* whether the other thread holds the region's lock */
static _Atomic int begun, may_end;
static int was_here = 1;

static void *works(void *unused)
{
    locks ? kv_try_lock(&me) : kv_begin_work(&me);
    begun = 1;
    for (int i = 0; i < 20 || !may_end; i++) { /* 20 ms: longer than it takes to go */
        usleep(1000);
        was_here = was_here && kv_worker_state(&me, 0) == KV_ALIVE;
    }
    locks ? kv_unlock_region(&me) : kv_end_work(&me);
    return NULL;
}

int main(int n, char **arguments)
{
    pthread_t other;
    me.base = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    me.head = (kv_header *)me.base;
    me.worker = &me.head->worker[0];
    me.incarnation = me.worker->incarnation = 1;
    me.worker->state = kv_state_word(&me, KV_ALIVE);
    pthread_mutex_init(&me.busy, NULL);
    kv_create_region(&me, REGION);
    locks = atoi(arguments[1]);
    may_end = atoi(arguments[2]);
    enum kv_worker_state last = atoi(arguments[3]) ? KV_LOST : KV_LEFT;
    pthread_create(&other, NULL, works, NULL);
    while (!begun)
        usleep(100);
    kv_deregister(&me, last);
    int gone = kv_worker_state(&me, 0) == last;
    may_end = 1;
    pthread_join(other, NULL);
    printf("%d %d\\n", gone, was_here);
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(build_c: Callable[[str, str], Path]) -> Path:
    return build_c("leaving", PROGRAM)


def goes(program: Path, *arguments: int) -> list[bool]:
    """Whether it is gone, and whether the other thread was a worker's that is here, all the time."""
    ended = subprocess.run(
        [program, *map(str, arguments)], check=True, timeout=pace.seconds(20), stdout=subprocess.PIPE
    )
    return [text == b"1" for text in ended.stdout.split()]


@pytest.mark.parametrize("lost", [0, 1], ids=["left", "lost"])
@pytest.mark.parametrize("locks", [0, 1], ids=["at work", "with the lock"])
def test_it_waits_for_another_thread(program: Path, locks: int, lost: int) -> None:
    assert goes(program, locks, 1, lost) == [True, True]


def test_it_does_not_wait_for_ever(program: Path) -> None:
    assert goes(program, 0, 0, 1) == [True, False]


STOPPED = """
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include "region.h"

enum { REGION = 4 << 20 };

/* Worker 1 is stopped as it leaves, with the region's lock. */
int main(int n, char **arguments)
{
    static kv_self me = {.window = REGION, .size = 2, .fd = -1, .go_on = 1, .silence = 50 * KV_MILLISECOND};
    me.base = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    me.head = (kv_header *)me.base;
    pthread_mutex_init(&me.busy, NULL);
    memset(me.pidfd, 0xff, sizeof me.pidfd);
    kv_create_region(&me, REGION);
    pid_t child = fork();
    me.rank = child == 0;
    if (!child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* where the program is ended at its deadline */
        kv_register(&me);
        kv_set_state(&me, KV_LEFT);
        kv_try_lock(&me);
        raise(SIGSTOP);
        _exit(0);
    }
    waitpid(child, NULL, WUNTRACED);
    kv_register(&me);
    int held = me.head->lock != 0;
    for (int i = 0; i < 200 && me.head->lock; i++) {
        kv_write_heartbeat(&me, kv_now_ns());
        kv_detect_losses(&me);
        usleep(5000);
    }
    int status;
    kill(child, SIGCONT);
    waitpid(child, &status, 0);
    printf("%d %d %d\\n", held, me.head->lock == 0, WIFSIGNALED(status));
    return 0;
}
"""


def test_a_worker_stopped_with_the_lock_as_it_leaves_is_ended(build_c: Callable[[str, str], Path]) -> None:
    """No other worker could have it: the others waited to their deadlines."""
    assert goes(build_c("stopped", STOPPED)) == [True, True, True]
