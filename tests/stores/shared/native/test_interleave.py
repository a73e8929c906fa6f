"""The protocol of the shared region under seeded interleavings: see interleave.c."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pace
import paths
import pytest
from nightly import nightly_unless

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
HEADERS = ROOT / "kvstore" / "stores" / "shared" / "native"
OBSERVE = ROOT / "kvstore" / "observe" / "native"

# The cases in which every worker's kind of work must occur, in the ordinary run.
KINDS = (
    *(
        "rounds",
        "updates",
        "deaths",
        "returns",
        "peer_reads",
        "in_place",
        "overwrites",
        "joins",
        "lost",
        "failed",
        "calls",
        "updates_in_place",
        "reads",
        "again",
        "held",
        "stops",
        "fenced",
        "ended",
        "interrupted",
    ),
)

# One line of a header, and what to put in its place; each breaks the protocol, and must be noticed.
MUTANTS = {
    "a chunk without a log": (
        "chunks.h",
        "kv_put(&log->entry, (uint64_t)((char *)call->entry - me->base));",
        "",
    ),
    "a torn block is not restored": ("summing.h", "    kv_restore_block(me, log, &h);\n", ""),
    "the log is dropped before the chunk is done": (
        "summing.h",
        "kv_put(&log->changing, end);",
        "kv_put(&log->changing, 0);",
    ),
    "rounds wait for a worker that rejoined later": ("arrivals.h", "&& kv_get(&part[w].first) <= round", ""),
    "a source of the other round": (
        "arrivals.h",
        "part->source[round & 1] = source;",
        "part->source[~round & 1] = source;",
    ),
    "a round closes before its chunks are done": (
        "round.h",
        "    if (outcome == KV_READY && kv_all_done(me, e, round))\n",
        "    if (outcome == KV_READY)\n",
    ),
    "two take one chunk": (
        "chunks.h",
        "kv_swap(word, now, kv_chunk_word(round, me->rank, KV_CLAIMED));",
        "(kv_put(word, kv_chunk_word(round, me->rank, KV_CLAIMED)), 1);",
    ),
    "a round is opened with a part of a call": (
        "arrivals.h",
        "part->call[parity] <= kv_get(&me->head->worker[w].whole);",
        "1;",
    ),
    "a push does not make way": ("round.h", "if (arrived < 2 || ", "if (1 || "),
    "a slot filled anew is not noticed": (
        "round.h",
        "if (!kv_are_sources_intact(me, e, call->round, a.in))",
        "if (0)",
    ),
    "a worker that dies within a chunk has its result where its part was": (
        "arrivals.h",
        "if (call->outs[j] < end && from < call->outs[j] + call->entry->nbytes)",
        "if (0)",
    ),
    "a sum in place is made twice": ("chunks.h", "!kv_may_overwrite_sources(me, e, round)", "1"),
    "who is stopped within a chunk has its result where others read its part": (
        "chunks.h",
        "(kv_worker_state(me, w) == KV_LOST && kv_kind_of(&part[w], parity) == KV_PRIVATE)",
        "0",
    ),
    "a reader is content with anything": ("reading.h", "return calm;", "return 1;"),
    "a reader takes no notice of an update in place": (
        "reading.h",
        "return undo ? *(const uint64_t *)kv_at(me, undo) : 0;",
        "return 0;",
    ),
    "a reader takes what may be finished after a loss for its own": (
        "reading.h",
        "kv_get(&mine->pushed[round & 1]) < round;",
        "1;",
    ),
    "a reader holds a key for ever": (
        "reading.h",
        "            kv_release_key(me, e, now, 0);",
        "            ;",
    ),
    "an opener is not taken over": (
        "round.h",
        "return opener != me->rank && !kv_is_present(kv_get(&me->head->worker[opener].state));",
        "return 0;",
    ),
    "a push ends before it is pushed": (
        "arrivals.h",
        "    kv_put(&part->pushed[round & 1], round);\n",
        "    kv_put(&part->pushed[round & 1], round - 1);\n",
    ),
    "the last worker to arrive wakes no other": (
        "arrivals.h",
        "if (asleep && round && kv_all_arrived(me, e, round, &in))",
        "if (0)",
    ),
    "who is stopped at work may go on": ("members.h", "if (kv_is_at_work(seen))", "if (0)"),
    "the lost begin to work": (
        "members.h",
        "            return 0;\n    } while (!kv_swap(&me->worker->state, now, now + KV_ONE_WORK));",
        "            break;\n    } while (!kv_swap(&me->worker->state, now, now + KV_ONE_WORK));",
    ),
    "the opener of a round is not at work": (
        "round.h",
        "    if (!kv_begin_work(me))\n        return 0;\n    if (!kv_swap(&e->phase, phase, opening)) {",
        "    if (!kv_swap(&e->phase, phase, opening)) {",
    ),
    "who holds the lock is not at work": (
        "members.h",
        "    if (!kv_begin_work(me))\n        return 0;\n    if (kv_swap(&me->head->lock",
        "    if (kv_swap(&me->head->lock",
    ),
    "an arriving worker is not at work": (
        "arrivals.h",
        "    if (!kv_begin_work(me))\n        return 0;\n    kv_put(&part",
        "    kv_put(&part",
    ),
    "a worker on chunks is not at work": (
        "round.h",
        "    if (!kv_begin_work(me))\n        return KV_FENCED;\n    kv_process_chunks",
        "    kv_process_chunks",
    ),
    "the dead stay members": ("members.h", "    kv_drop_departed(me);\n", ""),
    "the lock of the dead stays": (
        "members.h",
        "if (holder && kv_worker_state(me, w) != KV_LOST &&",
        "if (holder &&",
    ),
    "the lock of who has left stays": ("members.h", "        kv_release_lock_of(me, w, now);\n", ""),
    "a round whose opener was interrupted is carried out by nobody": (
        "round.h",
        "        else if (kv_is_planned(me, e, phase))\n            outcome = KV_PLAN;\n",
        "",
    ),
    "a reader waits for a worker that can carry out a dead one's round": (
        "reading.h",
        "reading->tries >= KV_READ_TRIES || kv_is_abandoned(me, e, phase)",
        "reading->tries >= KV_READ_TRIES",
    ),
    "who leaves after a loss is not waited for": ("members.h", "if (*lost && !me->go_on)", "if (0)"),
    "who comes back leaves its chunks": (
        "region.h",
        "        kv_end_earlier_process(me, kv_entry_at(me, i));\n",
        "        ;\n",
    ),
    "a rejoined worker counts as lost": (
        "region.h",
        "kv_put(&w->state, kv_state_word(me, KV_COMING));",
        "kv_put(&w->state, kv_state_word(me, KV_LOST));",
    ),
    "a rejoined worker pushes again": ("region.h", "kv_put(&part[me->rank].arrived, latest);", ""),
}
#: First seed and number of seeds of the rare cases; else the first 20,000.
SEEDS = {
    "a reader waits for a worker that can carry out a dead one's round": (230_000, 5_000),
}
#: At least one of each header; the other seeds at night.
EVERY_TIME = {
    "a chunk without a log",
    "a torn block is not restored",
    "a worker that dies within a chunk has its result where its part was",
    "a reader is content with anything",
    "a reader takes no notice of an update in place",
    "a worker stopped at work may continue",
    "the dead stay members",
    "the lock of the dead stays",
    "a rejoined worker pushes again",
}


def build(folder: Path, headers: Path, *flags: str) -> Path:
    program = folder / "interleave"
    command = [
        *paths.c_compiler(),
        *(
            "-std=gnu11",
            "-DKV_CHECKED",
            *flags,
            *(f"-I{folder}" for folder in (headers, OBSERVE, ROOT / "kernels")),
        ),
        str(HERE / "interleave.c"),
        *("-o", str(program), "-pthread"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return program


def interleave(program: Path, first: int, count: int) -> subprocess.CompletedProcess[str]:
    command = [str(program), str(first), str(count)]
    return subprocess.run(command, capture_output=True, text=True, timeout=pace.seconds(1000), check=False)


def counted(program: Path, first: int, count: int) -> dict[str, Any]:
    """Run so many seeds, none of which may show a violation; return the number of each case."""
    ended = interleave(program, first, count)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(json.loads(ended.stdout))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("interleave"), HEADERS, "-O2")


def test_the_protocol_holds(program: Path) -> None:
    seen = counted(program, 0, 20_000)
    assert seen["runs"] == 20_000
    assert {kind: seen[kind] > 50 for kind in KINDS} == dict.fromkeys(KINDS, True)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_protocol_holds_through_a_million_interleavings(program: Path) -> None:
    counted(program, 1_000_000, 2_000_000)


def test_the_table_of_a_key_lists_exactly_the_changes_of_its_phase(program: Path) -> None:
    steps = ("CLOSED", "OPENING", "OPEN")
    seen = {
        ("key", f"{steps[before]} r{'+1' * (before > 0)}", f"{steps[after]} r{'+1' * next_}", function)
        for before, after, next_, function in counted(program, 0, 2_000)["changes"]
    }
    rows = runpy.run_path(str(ROOT / "docs/states_page.py"))["rows_of_header"](HEADERS / "round.h")
    assert seen == {(row.subject, row.before, row.after, cause) for row in rows for cause in row.causes}


def test_nothing_undefined(tmp_path: Path) -> None:
    try:
        checked = build(tmp_path, HEADERS, "-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all")
    except AssertionError:
        pytest.skip("the compiler has no sanitizer")
    counted(checked, 20_000, 2_000)


def test_a_seed_is_one_interleaving(program: Path) -> None:
    assert counted(program, 77, 300) == counted(program, 77, 300)


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_broken_is_there_once(name: str) -> None:
    file, text, instead = MUTANTS[name]
    assert (HEADERS / file).read_text().count(text) == 1
    assert text != instead


@pytest.mark.parametrize("name", nightly_unless(lambda name: name in EVERY_TIME, MUTANTS))
def test_what_is_broken_is_noticed(tmp_path: Path, name: str) -> None:
    file, text, instead = MUTANTS[name]
    headers = tmp_path / "memory"
    headers.mkdir()
    for header in HEADERS.glob("*.h"):
        shutil.copy(header, headers)
    (headers / file).write_text((headers / file).read_text().replace(text, instead))
    ended = interleave(build(tmp_path, headers, "-O0", "-w"), *SEEDS.get(name, (0, 20_000)))
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "again, step by step" in ended.stdout
