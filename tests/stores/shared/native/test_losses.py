"""What a worker notes of losses, with the greatest number of workers."""

from __future__ import annotations

import shlex
import subprocess
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[4]
FOLDERS = ("kvstore/stores/shared/native", "kvstore/observe/native", "kernels")

PROGRAM = """
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "spans.h"

int main(void)
{
    kv_header *head = (kv_header *)calloc(1, sizeof(kv_header));
    kv_counters *counters = (kv_counters *)calloc(1, sizeof(kv_counters));
    kv_self me = {.head = head, .size = KV_MAX_WORKERS, .counters = counters};
    int ranks[] = {KV_MAX_WORKERS - 1, 0, 31};
    for (int i = 0; i < 3; i++) {
        kv_set_bits(&head->lost, kv_bit(ranks[i]));
        kv_note_losses(&me);
        printf("%d ", (int)counters->losses);
    }
    kv_clear_bits(&head->lost, kv_bit(KV_MAX_WORKERS - 1));
    kv_note_losses(&me);
    printf("%d", (int)counters->losses);
    return 0;
}
"""


def test_the_loss_of_the_last_of_64_workers_is_one(tmp_path: Path) -> None:
    (tmp_path / "losses.c").write_text(PROGRAM)
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    where = [f"-I{ROOT / folder}" for folder in FOLDERS]
    command = [*compiler, "-std=gnu11", "-O1", "-w", *where, "losses.c", "-o", "losses", "-pthread"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    told = subprocess.run([tmp_path / "losses"], check=True, timeout=20, stdout=subprocess.PIPE)
    assert told.stdout == b"1 2 3 3"
