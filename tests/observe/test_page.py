"""The content of a process's page of counters, as other processes read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pace

from kvstore.observe.native._observe import PAGE_NAME, Counters, job_id, read_own, read_page

SECRET = "a name that lets others in"


def own_page() -> Path:
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    (page,) = [path for path in links if PAGE_NAME in os.readlink(path)]
    return page


def test_the_name_of_a_job_is_told_by_a_hash() -> None:
    counters = Counters("local", SECRET, 0, 1)
    assert counters.read()["job"] == job_id(SECRET)
    assert job_id(SECRET) == job_id(SECRET) != job_id("another")
    assert job_id("") == ""
    assert SECRET.encode() not in own_page().read_bytes()
    counters.describe("shared", "", 1, 2)
    assert counters.read()["job"] == ""


def test_a_process_reads_its_own_page_as_others_do() -> None:
    counters = Counters("local", "a job", 3, 4)
    counters.count(1)
    counters.move(1, 10, 20)
    (mine,) = [one for one in read_own() if one["rank"] == 3]
    assert {name: value for name, value in mine.items() if name != "place"} == counters.read()
    descriptor = os.open(own_page(), os.O_RDONLY)
    try:
        process, stores = read_page(descriptor) or (0, [])
        assert process == os.getpid() and mine in stores
    finally:
        os.close(descriptor)


TIMED = """
from kvstore.observe.native._observe import Counters, take_times
before = Counters("local", "", 0, 1)
assert not before.timed
take_times()
after = Counters("local", "", 0, 1)
assert before.timed and after.timed
take_times(0)
assert not before.timed and not after.timed and not Counters("local", "", 0, 1).timed
"""


def test_times_are_taken_in_all_stores_of_a_process_and_in_those_to_come() -> None:
    subprocess.run([sys.executable, "-c", TIMED], check=True, timeout=pace.seconds(60))
