"""Rounds in shared memory."""

from __future__ import annotations

from .mutant import ARRIVALS, CHUNKS, PROCESSES, ROUND, Mutant

SHARED = f"{PROCESSES} shared"
INTERLEAVED = "tests/stores/shared/native/test_interleave.py::test_the_protocol_holds"

PHASES = [
    Mutant(
        "phases",
        ARRIVALS,
        "            arrived |= kv_rank_bit(w);\n        } else if",
        "            arrived |= kv_rank_bit(w & ~1);\n        } else if",
        "the arrived workers are mistaken",
        SHARED,
    ),
    Mutant(
        "phases",
        ARRIVALS,
        "members & kv_rank_bit(w) && kv_get(&part[w].first) <= round)",
        "0)",
        "a round waits for no worker",
        SHARED,
    ),
    Mutant(
        "phases",
        ARRIVALS,
        ">= round) {\n            if (members & kv_rank_bit(w) && !kv_is_call_complete",
        ">= round - 1) {\n            if (members & kv_rank_bit(w) && !kv_is_call_complete",
        "a push two rounds ago counts",
        SHARED,
    ),
    Mutant(
        "phases",
        ARRIVALS,
        "return kv_version_of(phase) & 1; }",
        "return 0; }",
        "the value in use is never changed",
        SHARED,
    ),
    Mutant(
        "phases",
        ARRIVALS,
        "kv_round_of(phase) : kv_round_of(phase) - 1;",
        "kv_round_of(phase) : kv_round_of(phase);",
        "an open round counts as complete",
        SHARED,
    ),
    Mutant(
        "phases",
        ARRIVALS,
        "    uint64_t round = atomic_load_explicit(&part->arrived, memory_order_relaxed) + 1;",
        "    uint64_t round = atomic_load_explicit(&part->arrived, memory_order_relaxed) + 2;",
        "a push skips a round",
        SHARED,
    ),
    Mutant(
        "phases",
        ARRIVALS,
        "    part->source[round & 1] = source;\n",
        "    part->source[1] = source;\n",
        "sources of two rounds are mixed up",
        SHARED,
    ),
    Mutant(
        "phases",
        ROUND,
        "    if (arrived < 2 || kv_complete_round(kv_get(&e->phase)) + 1 >= arrived)\n",
        "    if (1)\n",
        "a third push does not wait",
        SHARED,
    ),
    Mutant(
        "phases",
        CHUNKS,
        "return now >> 16 < round && kv_swap",
        "return now >> 16 <= round && kv_swap",
        "a chunk is done twice",
        INTERLEAVED,
    ),
    Mutant(
        "phases",
        CHUNKS,
        "if (word >> 16 != round || (word & 0xff) != KV_DONE)\n            return 0;",
        "if (word >> 16 != round)\n            return 0;",
        "a round ends while a chunk is being done",
        INTERLEAVED,
    ),
    Mutant(
        "phases",
        ARRIVALS,
        "        if (in >> w & 1 && kv_get(&part[w].filling) > round + 1)\n            return 0;",
        "        (void)w, (void)part, (void)in;",
        "a slot that is filled anew is summed",
        INTERLEAVED,
    ),
    Mutant(
        "phases",
        ARRIVALS,
        "return !(part->kind[parity] & KV_OF_CALL) || part",
        "return 1 || part",
        "a call is in some of its rounds only",
        INTERLEAVED,
    ),
    Mutant(
        "phases",
        ROUND,
        "uint64_t version = kv_version_of(phase) + (current != kv_current_of(phase));",
        "uint64_t version = kv_version_of(phase);",
        "a sum is not put in use",
        SHARED,
    ),
    Mutant(
        "phases",
        CHUNKS,
        "        if (word >> 16 != round || (word & 0xff) != KV_CLAIMED || kv_worker_state",
        "        if (word >> 16 != round || (word & 0xff) == KV_CLAIMED || kv_worker_state",
        "a chunk of a dead worker is left",
        INTERLEAVED,
    ),
]
