"""The state of other workers as a worker sees it, in C: with the most workers, and after its own stop."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pace
import pytest

PROGRAM = """
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include "region.h"

static kv_header head;
static kv_counters counters;
static kv_self me = {.size = KV_MAX_WORKERS, .counters = &counters};

static void losses(void)
{
    int ranks[] = {KV_MAX_WORKERS - 1, 0, 31};
    for (int i = 0; i < 3; i++) {
        kv_set_bits(&head.lost, kv_rank_bit(ranks[i]));
        kv_note_losses(&me);
        printf("%d ", (int)counters.losses);
    }
    kv_clear_bits(&head.lost, kv_rank_bit(KV_MAX_WORKERS - 1));
    kv_note_losses(&me);
    printf("%d\\n", (int)counters.losses);
}

static void wakes(void)
{
    kv_wake(&me, kv_rank_bit(KV_MAX_WORKERS - 1) | kv_rank_bit(2));
    for (int w = 0; w < KV_MAX_WORKERS; w++)
        if (head.worker[w].futex)
            printf("%d:%d ", w, (int)head.worker[w].futex);
    printf("\\n");
}

/* A time, in thousandths of what counts as a loss. */
static uint64_t at(uint64_t thousandths)
{
    return me.silence / 1000 * thousandths;
}

/* Whether worker 1 is lost at a time. */
static int lost(uint64_t thousandths)
{
    return kv_is_silent(&me, 1, at(thousandths)) && !kv_was_stopped(&me, at(thousandths));
}

static void stands_still(void)
{
    head.worker[0].beat = at(200);
    for (int then = 200; then <= 1400; then += 50)
        kv_write_heartbeat(&me, at(then)); /* of worker 1 there is none */
    head.worker[1].beat = at(200);
    printf("%d ", lost(1180));
    printf("%d ", lost(1220));
    head.worker[1].beat = at(1400);
    kv_write_heartbeat(&me, at(1400));
    printf("%d ", lost(4000)); /* nobody has beaten since */
    kv_write_heartbeat(&me, at(4002));
    printf("%d ", lost(4003)); /* this worker has */
    for (int then = 4052; then <= 5200; then += 50)
        kv_write_heartbeat(&me, at(then));
    printf("%d\\n", lost(5200)); /* and the other one still has not */
}

int main(int n, char **names)
{
    me.head = &head;
    me.worker = &head.worker[0];
    if (!strcmp(names[1], "losses"))
        losses();
    else if (!strcmp(names[1], "wakes"))
        wakes();
    else {
        me.silence = strtoull(names[1], NULL, 10) * KV_MILLISECOND;
        stands_still();
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(build_c: Callable[[str, str], Path]) -> Path:
    return build_c("judging", PROGRAM)


def told(program: Path, what: str) -> list[str]:
    ended = subprocess.run([program, what], check=True, timeout=pace.seconds(20), stdout=subprocess.PIPE)
    return ended.stdout.decode().split()


def test_the_loss_of_the_last_of_64_workers_is_one(program: Path) -> None:
    assert told(program, "losses") == ["1", "2", "3", "3"]


def test_the_last_of_64_workers_is_woken_like_others(program: Path) -> None:
    assert told(program, "wakes") == ["2:1", "63:1"]


@pytest.mark.parametrize("dead_after", [1, 500, 5000, 60_000, 10**12])
def test_a_worker_that_was_stopped_judges_none_before_their_next_heartbeat(
    program: Path, dead_after: int
) -> None:
    assert told(program, str(dead_after)) == ["0", "1", "0", "0", "1"]
