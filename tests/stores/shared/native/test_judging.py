"""What a worker sees of others, in C: with the most workers, and after it stood still itself."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from pathlib import Path

import pace
import pytest

ROOT = Path(__file__).parents[4]
FOLDERS = ("kvstore/stores/shared/native", "kvstore/observe/native", "kernels")

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
        kv_set_bits(&head.lost, kv_bit(ranks[i]));
        kv_note_losses(&me);
        printf("%d ", (int)counters.losses);
    }
    kv_clear_bits(&head.lost, kv_bit(KV_MAX_WORKERS - 1));
    kv_note_losses(&me);
    printf("%d\\n", (int)counters.losses);
}

static void wakes(void)
{
    kv_wake(&me, kv_bit(KV_MAX_WORKERS - 1) | kv_bit(2));
    for (int w = 0; w < KV_MAX_WORKERS; w++)
        if (head.worker[w].futex)
            printf("%d:%d ", w, (int)head.worker[w].futex);
    printf("\\n");
}

/* Whether worker 1 is lost at a time, after so many seconds. */
static int lost(uint64_t ms)
{
    uint64_t now = ms * KV_MILLISECOND;
    return kv_silent(&me, 1, now) && !kv_stood_still(&me, now);
}

static void stands_still(void)
{
    for (int ms = 0; ms <= 6000; ms += KV_BEAT)
        kv_beat(&me, (1000 + ms) * KV_MILLISECOND); /* of worker 1 there is none */
    head.worker[1].beat = 1000 * KV_MILLISECOND;
    printf("%d ", lost(5900));
    printf("%d ", lost(6100));
    head.worker[1].beat = 7000 * KV_MILLISECOND;
    kv_beat(&me, 7000 * KV_MILLISECOND);
    printf("%d ", lost(20000)); /* nobody has beaten since */
    kv_beat(&me, 20010 * KV_MILLISECOND);
    printf("%d ", lost(20011)); /* this worker has */
    for (int ms = 20260; ms <= 26000; ms += KV_BEAT)
        kv_beat(&me, ms * KV_MILLISECOND);
    printf("%d\\n", lost(26000)); /* and the other one still has not */
}

int main(int n, char **names)
{
    me.head = &head;
    head.worker[0].beat = 1000 * KV_MILLISECOND;
    me.worker = &head.worker[0];
    if (!strcmp(names[1], "losses"))
        losses();
    else if (!strcmp(names[1], "wakes"))
        wakes();
    else
        stands_still();
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judging")
    (folder / "judging.c").write_text(PROGRAM)
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    where = [f"-I{ROOT / name}" for name in FOLDERS]
    command = [*compiler, "-std=gnu11", "-O1", "-w", *where, "judging.c", "-o", "judging", "-pthread"]
    subprocess.run(command, cwd=folder, check=True, timeout=pace.seconds(60))
    return folder / "judging"


def told(program: Path, what: str) -> list[str]:
    ended = subprocess.run([program, what], check=True, timeout=pace.seconds(20), stdout=subprocess.PIPE)
    return ended.stdout.decode().split()


def test_the_loss_of_the_last_of_64_workers_is_one(program: Path) -> None:
    assert told(program, "losses") == ["1", "2", "3", "3"]


def test_the_last_of_64_workers_is_woken_like_others(program: Path) -> None:
    assert told(program, "wakes") == ["2:1", "63:1"]


def test_who_stood_still_judges_nobody_before_others_can_have_beaten(program: Path) -> None:
    assert told(program, "stands still") == ["0", "1", "0", "0", "1"]
