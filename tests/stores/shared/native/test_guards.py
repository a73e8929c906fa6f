"""In C: no address of a plan, a source or an undo block is used unless its memory is given out."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pace
import pytest

import kvstore as kv

BuildC = Callable[[str, str], Path]

PROGRAM = """
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include "reading.h"
#include "region.h"

enum { REGION = 4 << 20, N = 5000 };

static kv_self me;

static kv_entry *make_world(void)
{
    char *region = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    me = (kv_self){.base = region, .window = REGION, .size = 1, .fd = -1};
    me.head = (kv_header *)region;
    me.worker = &me.head->worker[0];
    me.incarnation = me.worker->incarnation = 1;
    me.worker->state = kv_state_word(&me, KV_ALIVE);
    kv_create_region(&me, REGION);
    kv_entry *e = kv_new_entry(&me);
    e->n = N;
    e->nbytes = 4 * N;
    e->dtype = 2;
    e->chunks = 1;
    e->mask = 1;
    e->parts = kv_allocate_locked(&me, sizeof(kv_part));
    memset(kv_at(&me, e->parts), 0, sizeof(kv_part));
    for (int i = 0; i < 2; i++) {
        e->value[i] = kv_allocate_locked(&me, e->nbytes);
        kv_key_parts(&me, e)[0].source[i] = kv_allocate_locked(&me, e->nbytes);
        kv_key_parts(&me, e)[0].pushed[i] = 2 - i;
    }
    e->n_states = 1;
    e->states[0] = kv_allocate_locked(&me, 8 * N);
    me.worker->log.scratch = kv_allocate_locked(&me, KV_LOG_ARRAYS * (KV_LOG_ELEMENTS * 8 + 1088) + 4096);
    return e;
}

static void check(const char *what, int right)
{
    if (!right)
        printf("%s\\n", what);
}

int main(int argc, char **argv)
{
    kv_entry *e = make_world();
    kv_call call = {.entry = e, .round = 1};
    kv_homes homes;
    kv_sources sources;
    const uint64_t wrong[] = {0, 8, KV_HEADER_BYTES - 8, kv_get(&me.head->top) - 8, REGION, ~0ull - 8};
    check("what is right is refused", kv_find_homes(&me, e, 0, &homes) == KV_READY);
    check("a source is refused", kv_collect_sources(&me, &call, 1, 1, &sources) == KV_READY);
    if (argc > 1) { /* overwritten: a checked build ends */
        me.head->members = me.head->guard = 0;
        kv_end_round(&me, e, kv_get(&e->phase), 0);
        return 0;
    }
    char *before = malloc(REGION);
    memcpy(before, me.base, REGION);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        uint64_t state = e->states[0], value = e->value[0], source = kv_key_parts(&me, e)[0].source[1];
        e->states[0] = wrong[i];
        check("a state", kv_update_chunk(&me, &call, &me.worker->log, 0, N) == KV_UNREADABLE);
        e->states[0] = state;
        if (wrong[i]) {
            e->master = wrong[i];
            check("a float32 copy", kv_update_chunk(&me, &call, &me.worker->log, 0, N) == KV_UNREADABLE);
            e->master = 0;
        }
        e->value[0] = wrong[i];
        check("a weight", kv_update_chunk(&me, &call, &me.worker->log, 0, N) == KV_UNREADABLE);
        check("a sum", kv_sum_chunk(&me, &call, 1, 1, 1, 0, N) == KV_UNREADABLE);
        e->value[0] = value;
        kv_key_parts(&me, e)[0].source[1] = wrong[i];
        check("a source", kv_collect_sources(&me, &call, 1, 1, &sources) == KV_UNREADABLE);
        kv_key_parts(&me, e)[0].source[1] = source;
    }
    check("something was written", memcmp(before, me.base, REGION) == 0);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        uint64_t at = kv_allocate_locked(&me, 80), *block = kv_at(&me, at);
        memset(block, 0xff, 80);
        block[0] = block[1] = 1; /* of round 1, one piece: two rows of 16 bytes */
        block[2] = wrong[i], block[3] = 16, block[4] = 2, block[5] = 0;
        e->undo = at;
        memcpy(before, me.base, KV_HEADER_BYTES);
        kv_undo(&me, e, 1);
        check("an undo block wrote to the header", memcmp(before, me.base, KV_HEADER_BYTES) == 0);
    }
    return 0;
}
"""


def test_addresses_outside_are_refused_and_nothing_is_written(build_c: BuildC) -> None:
    program = build_c("guards", PROGRAM)
    ended = subprocess.run([program], capture_output=True, text=True, timeout=pace.seconds(60), check=True)
    assert ended.stdout == ""


@pytest.mark.parametrize("checked", [False, True])
def test_a_checked_build_ends_where_the_header_is_overwritten(build_c: BuildC, checked: bool) -> None:
    program = build_c("overwritten", ("#define KV_CHECKED\n" if checked else "") + PROGRAM)
    ended = subprocess.run([program, "overwrite"], capture_output=True, timeout=pace.seconds(60), check=False)
    assert ended.returncode == (-signal.SIGABRT if checked else 0)
    assert (b"overwritten" in ended.stderr) == checked


def test_an_array_elsewhere_is_no_state_of_a_plan() -> None:
    with kv.create("shared") as store:
        store.init("a", np.ones(3, np.float32))
        job = store._backend._job  # type: ignore[attr-defined]
        there = store.empty("a")
        assert job.place_of(there) == job.offset_of(there) > 0
        with pytest.raises(kv.errors.KVStoreError, match="not in the job's shared region"):
            job.place_of(np.ones(3))
        handle = store._backend._keys.find("a")  # type: ignore[attr-defined]
        for offset in (0, -8, 1 << 60, os.sysconf("SC_PAGE_SIZE")):
            with pytest.raises(MemoryError):
                handle.region_array(offset, (3,), np.dtype(np.float32))
