"""In C: a worker that dies between any two writes has changed keys and settings wholly, or not at all."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pace
import pytest

PROGRAM = """
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

static jmp_buf death;
static int steps_left; /* of worker 1; 0: it lives */

static void step(void)
{
    if (steps_left && --steps_left == 0)
        longjmp(death, 1);
}
#define KV_STEP() step()
#include "region.h"

enum { REGION = 4 << 20 };

static kv_self me[2];

static void make_world(void)
{
    static char *region;
    if (!region)
        region = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(region, 0, REGION);
    for (int w = 0; w < 2; w++) {
        me[w] = (kv_self){.base = region, .window = REGION, .rank = w, .size = 2, .fd = -1};
        me[w].head = (kv_header *)region;
        me[w].worker = &me[w].head->worker[w];
        me[w].incarnation = me[w].worker->incarnation = 1;
        me[w].worker->state = kv_state_word(&me[w], KV_ALIVE);
    }
    kv_create_region(&me[0], REGION);
}

static void wrong(const char *what, uint64_t number)
{
    printf("wrong: %s %d\\n", what, (int)number);
    exit(0);
}

/* As Keys.add. */
static void add(kv_self *self, int64_t name)
{
    kv_lock_region(self);
    if (!kv_find_key(self, NULL, 0, name)) {
        kv_entry *e = kv_new_entry(self);
        e->int_key = name;
        e->hash = kv_hash(NULL, 0, name);
        kv_publish_entry(self, e);
    }
    kv_unlock_region(self);
}

static void check_keys(void)
{
    for (uint64_t i = 0; i < me[0].head->n_keys; i++)
        if (kv_find_key(&me[0], NULL, 0, kv_entry_at(&me[0], i)->int_key) != i + 1)
            wrong("it is listed, and its name is another's or nobody's: key", i);
}

static void check_settings(const char *one, const char *other, uint64_t before)
{
    kv_lock_region(&me[0]);
    uint64_t at = me[0].head->settings, bytes = kv_text_bytes(&me[0], at);
    const char *found = kv_text_start(&me[0], at);
    int is_new = bytes == strlen(other) && !memcmp(found, other, bytes);
    if (!is_new && (bytes != strlen(one) || memcmp(found, one, bytes)))
        wrong("settings of bytes", bytes);
    if (is_new && me[0].head->settings_version == before)
        wrong("new settings under the old version", before);
    kv_unlock_region(&me[0]);
}

static void set(kv_self *self, const char *text)
{
    kv_lock_region(self);
    kv_set_settings(self, text, strlen(text));
    kv_unlock_region(self);
}

/* Worker 1 makes a key after `n` others, or changes settings, and dies after so many steps; 0: it lived. */
static int dies(int after, int n, const char *one, const char *other)
{
    make_world();
    for (int i = 0; i < n; i++)
        add(&me[0], i);
    set(&me[0], one);
    uint64_t before = me[0].head->settings_version;
    int died = setjmp(death);
    if (!died) {
        steps_left = after;
        n ? add(&me[1], n) : set(&me[1], other);
    }
    int lived = steps_left > 0;
    steps_left = 0;
    kv_mark_lost(&me[0], 1, me[1].worker->state);
    check_keys();
    check_settings(one, other, before);
    for (int i = n; n && i < n + 3; i++)
        add(&me[0], i);
    check_keys();
    if (n && me[0].head->n_keys != (uint64_t)n + 3)
        wrong("number of keys", me[0].head->n_keys);
    set(&me[0], "last");
    check_settings("last", "last", before);
    return !lived;
}

int main(int n, char **arguments)
{
    int steps = 1;
    while (dies(steps, atoi(arguments[1]), arguments[2], arguments[3]))
        steps++;
    printf("whole %d\\n", steps);
    return 0;
}
"""


@pytest.fixture(scope="module")
def program(build_c: Callable[[str, str], Path]) -> Path:
    return build_c("half_done", PROGRAM)


def told(program: Path, *arguments: str) -> tuple[str, int]:
    ended = subprocess.run(
        [program, *arguments], check=True, timeout=pace.seconds(20), stdout=subprocess.PIPE
    )
    text, _, number = ended.stdout.decode().strip().rpartition(" ")
    return text, int(number)


@pytest.mark.parametrize("before", [1, 2, 127, 128, 1023, 1024], ids=str)
def test_a_worker_that_dies_over_a_key_has_made_it_or_not(program: Path, before: int) -> None:
    """Also where the table grows, or a block of entries begins."""
    text, steps = told(program, str(before), "one", "other")
    assert text == "whole" and steps > 6


@pytest.mark.parametrize(("one", "other"), [("short", "much longer"), ("much longer", "short"), ("", "one")])
def test_a_worker_that_dies_over_settings_has_changed_them_or_not(
    program: Path, one: str, other: str
) -> None:
    text, steps = told(program, "0", one, other)
    assert text == "whole" and steps > 6
