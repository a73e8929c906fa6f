"""Small changes of the code that break a promise: file, old text, new text, and what it breaks."""

from __future__ import annotations

from typing import NamedTuple

SERVER = "kvstore/stores/parameter_server/server/"
SCHEDULER = "kvstore/stores/parameter_server/scheduler/"
WORKER = "kvstore/stores/parameter_server/worker/"
NATIVE = "kvstore/stores/parameter_server/native/"
SHARED = "kvstore/stores/shared/native/"
REQUESTS, ROUNDS = SERVER + "slice_requests.py", SERVER + "slice_rounds.py"
MEMBERS = SERVER + "round_members.py"
STORE, SESSIONS = SERVER + "store_machine.py", SERVER + "sessions.py"
C_ROUNDS, C_SESSIONS, PHASES = NATIVE + "rounds.h", NATIVE + "sessions.h", SHARED + "round.h"
READS = WORKER + "consistent_rounds.py"


class Mutant(NamedTuple):
    """One change; what it touches is the group."""

    group: str
    file: str
    old: str
    new: str
    why: str


MUTANTS = [
    Mutant(*row)
    for row in (
        # rounds, where something is special
        (
            "rounds",
            ROUNDS,
            "and self.skip.get(rank, 0) < round)",
            "and self.skip.get(rank, 0) <= round)",
            "a skipped rank is waited for",
        ),
        ("rounds", ROUNDS, "there = set(self.ranks(round))\n", "there = set(needed)\n", "nobody is missing"),
        (
            "rounds",
            ROUNDS,
            "            self.complete()\n        return None",
            "            return None\n        return None",
            "lost rounds are not passed over",
        ),
        ("rounds", ROUNDS, "last > self.round}", "last > self.round + 1}", "a skip ends too early"),
        (
            "rounds",
            ROUNDS,
            "            if self.missing(self.round + 1, needed):",
            "            if len(self.missing(self.round + 1, needed)) > 1:",
            "a round does not wait for the last one",
        ),
        (
            "rounds",
            ROUNDS,
            "                self.drop_parts(number, ranks)",
            "                pass",
            "parts of the lost stay",
        ),
        (
            "rounds",
            ROUNDS,
            "number > after and not",
            "number > after + 1 and not",
            "a part of the lost stays",
        ),
        (
            "rounds",
            REQUESTS,
            "        if ahead == 1:\n            self._advance(rounds)",
            "        if ahead == 2:\n            self._advance(rounds)",
            "a round is not begun",
        ),
        (
            "rounds",
            REQUESTS,
            "record[ROUND] <= rounds.round or not",
            "record[ROUND] <= rounds.round + 1 or not",
            "a read does not wait",
        ),
        (
            "rounds",
            REQUESTS,
            "        elif rounds.busy or not self._readable(rounds, record):",
            "        elif not self._readable(rounds, record):",
            "a read while it is written",
        ),
        (
            "rounds",
            REQUESTS,
            "            self._settle(rounds)\n            self._advance(rounds)\n\n    def given_up",
            "            self._advance(rounds)\n\n    def given_up",
            "nobody is answered after a round",
        ),
        (
            "rounds",
            REQUESTS,
            "            if self._readable(rounds, one[1]):",
            "            if True:",
            "whoever waits is answered by any round",
        ),
        (
            "rounds",
            REQUESTS,
            "if members.collecting_join_point and self",
            "if False and self",
            "rounds go on while a join point is sought",
        ),
        (
            "rounds",
            REQUESTS,
            "            if record.round <= rounds.round + OPEN:",
            "            if False:",
            "a push that waits is never answered",
        ),
        # members, losses, and who comes back
        (
            "fencing",
            MEMBERS,
            "frozenset(map(self.seat, waited_for))",
            "frozenset(list(map(self.seat, waited_for))[:1])",
            "rounds wait for one",
        ),
        (
            "fencing",
            MEMBERS,
            "- set(view.resting) - self.rejoining",
            "- self.rejoining",
            "who has joined is waited for",
        ),
        (
            "fencing",
            MEMBERS,
            "- set(view.resting) - self.rejoining",
            "- set(view.resting)",
            "who comes back is waited for at once",
        ),
        (
            "fencing",
            MEMBERS,
            "return self.without_members(dead | replaced, replaced)",
            "return set()",
            "parts of the dead stay",
        ),
        (
            "fencing",
            MEMBERS,
            "usual = self.broken is None and not waits",
            "usual = not waits",
            "usual requests after a loss",
        ),
        (
            "fencing",
            MEMBERS,
            "max(after.get(rounds.id, 0), rounds.base())",
            "after.get(rounds.id, 0)",
            "a join point in the past",
        ),
        (
            "fencing",
            MEMBERS,
            "            rounds.lose({rank}, last)",
            "            pass",
            "what the one before pushed stays",
        ),
        (
            "fencing",
            MEMBERS,
            "                rounds.pass_over(rank, last)",
            "                pass",
            "rounds wait for who comes later",
        ),
        ("fencing", MEMBERS, "view.begin >= 0", "False", "nobody collects a join point"),
        (
            "fencing",
            STORE,
            "        if members.incarnations.get(rank) != attach.incarnation:",
            "        if False:",
            "who is no member is let in",
        ),
        (
            "fencing",
            STORE,
            "            self.requests.leave(self.sessions.close(rank))",
            "            self.requests.leave(self.sessions.by_rank[rank])",
            "who is gone keeps its session",
        ),
        (
            "fencing",
            STORE,
            "            rounds.lose(lost_parts)",
            "            pass",
            "parts of the lost count",
        ),
        (
            "fencing",
            STORE,
            "            members.break_off(failure)",
            "            pass",
            "a loss breaks nothing",
        ),
        (
            "fencing",
            STORE,
            "            self.requests.fail_waiting(failure)",
            "            pass",
            "who waits is not told of a loss",
        ),
        (
            "fencing",
            STORE,
            "        if view.epoch <= members.epoch:\n            return\n",
            "",
            "an old view is taken",
        ),
        (
            "fencing",
            STORE,
            "        if attach.epoch > members.epoch:",
            "        if False:",
            "an attach before its view",
        ),
        (
            "fencing",
            STORE,
            "        self.requests.advance_all()\n        for peer, attach",
            "        for peer, attach",
            "rounds that wait for the lost only stay open",
        ),
        (
            "fencing",
            STORE,
            "            members.set_join_point(view.begun",
            "            (lambda *_: None)(view.begun",
            "no join point is set",
        ),
        (
            "fencing",
            SESSIONS,
            "session.epoch >= epoch for",
            "True for",
            "a join point before all have reached it",
        ),
        # the filter of duplicates
        (
            "duplicates",
            STORE,
            "        if session.has_come(sequence):",
            "        if False:",
            "a repeated request is done again",
        ),
        (
            "duplicates",
            REQUESTS,
            "        if session.waits(sequence):\n            self._effects.report(session)\n        elif",
            "        if",
            "a repeat of what waits is answered",
        ),
        (
            "duplicates",
            REQUESTS,
            "            self._pull(session, rounds, record, frames if kind != _PUSHPULL else ())",
            "            self.handle(session, record, frames)",
            "a repeated pushpull pushes again",
        ),
        (
            "duplicates",
            REQUESTS,
            "        elif kind == _PUSH or kind in WRITES:\n            self._effects.answer",
            "        elif kind == _PUSH:\n            self.handle(session, record, frames)\n"
            "        elif kind in WRITES:\n            self._effects.answer",
            "a repeated push is pushed again",
        ),
        (
            "duplicates",
            STORE,
            "        elif session.take(sequence):",
            "        elif session.take(sequence) or True:",
            "what is far ahead is taken",
        ),
        (
            "duplicates",
            C_SESSIONS,
            "return number <= d->low || (number",
            "return number < d->low || (number",
            "the last request comes twice",
        ),
        (
            "duplicates",
            C_SESSIONS,
            "kp_has(&d->above, number));\n}",
            "0);\n}",
            "what came out of order comes twice",
        ),
        (
            "duplicates",
            C_SESSIONS,
            "    for (d->low++; kp_has",
            "    for (d->low += 2; kp_has",
            "a request that never came counts as come",
        ),
        (
            "duplicates",
            C_ROUNDS,
            "return r->sequence == d->low + 1 && !d->above.count",
            "return 1",
            "any request is the next",
        ),
        ("duplicates", C_ROUNDS, "    session->duplicates.low++;\n", "", "usual requests are not noted"),
        (
            "duplicates",
            C_ROUNDS,
            "    return !open || kp_part_of(open, session->seat) < 0;",
            "    return 1;",
            "a worker is twice in a round",
        ),
        # rounds, on the usual way
        (
            "rounds",
            C_ROUNDS,
            "    return kp_first_missing(open, members) == KV_NOBODY;",
            "    return 1;",
            "a round waits for nobody",
        ),
        (
            "rounds",
            C_ROUNDS,
            "i < members->n_needed; i++",
            "i < members->n_needed - 1; i++",
            "a round does not wait for the last rank",
        ),
        (
            "rounds",
            C_ROUNDS,
            "if (slice->busy || r->round > slice->round)\n",
            "if (slice->busy)\n",
            "a read does not wait",
        ),
        (
            "rounds",
            C_ROUNDS,
            "one->request.round <= slice->round)",
            "one->request.round <= slice->round + 1)",
            "a read that waits is answered too early",
        ),
        ("rounds", C_ROUNDS, "    w->n = left;\n", "", "who waited waits on"),
        (
            "rounds",
            C_ROUNDS,
            "    if (slice->busy || !members->usual || !slice->ready)\n        return;",
            "    if (slice->busy || !slice->ready)\n        return;",
            "rounds go on after a loss",
        ),
        (
            "rounds",
            C_ROUNDS,
            "    if (!members->usual || !kp_is_next",
            "    if (!kp_is_next",
            "usual requests after a loss",
        ),
        (
            "rounds",
            C_ROUNDS,
            "    if (open)\n        kp_drop_open(slice, open);\n}",
            "}",
            "parts of a round stay",
        ),
        (
            "rounds",
            C_ROUNDS,
            "            w->all[left++] = *one;",
            "            left += 0;",
            "who waits for a later round is forgotten",
        ),
        (
            "rounds",
            C_ROUNDS,
            "|| (ahead == 1 && slice->busy == KP_ROUND))",
            ")",
            "a part comes to a round that is summed",
        ),
        # snapshots
        (
            "snapshots",
            STORE,
            "[[one.id, one.round] for one",
            "[[one.id, one.round - 1] for one",
            "a snapshot tells an older round",
        ),
        (
            "snapshots",
            STORE,
            "sessions = () if self.members.sync else self.sessions.by_rank.values()",
            "sessions = ()",
            "what had come is not in the snapshot",
        ),
        (
            "snapshots",
            STORE,
            "        self.members.await_all()\n",
            "",
            "a server that came back waits for nobody",
        ),
        (
            "snapshots",
            STORE,
            "rounds.ready, rounds.kept, rounds.round = True, True, round_",
            "rounds.ready, rounds.kept, rounds.round = True, True, 0",
            "rounds begin anew",
        ),
        (
            "snapshots",
            SESSIONS,
            "            if incarnation == attach.incarnation:",
            "            if False:",
            "a snapshot's window is not taken up",
        ),
        (
            "snapshots",
            MEMBERS,
            "                    rounds.pass_over(seat, max(round_, rounds.skip.get(seat, 0)))",
            "                    pass",
            "rounds wait for what is lost",
        ),
        # reads of one round
        (
            "reads",
            READS,
            "        last = min(rounds[key])\n",
            "        last = max(rounds[key])\n",
            "the last round need not be whole",
        ),
        (
            "reads",
            READS,
            "            if all(min(rounds[one]) >= pushes",
            "            if all(max(rounds[one]) >= pushes",
            "a round is taken for whole that is not",
        ),
        (
            "reads",
            READS,
            "            if all(min(rounds[one]) >= pushes for",
            "            if any(min(rounds[one]) >= pushes for",
            "one key of a call is enough",
        ),
        ("reads", READS, "if round < last]", "if False]", "no slice is behind"),
        # shared phases
        (
            "phases",
            PHASES,
            "            arrived |= kv_bit(w);\n        } else if",
            "            arrived |= kv_bit(w & ~1);\n        } else if",
            "who has arrived is mistaken",
        ),
        (
            "phases",
            PHASES,
            "members & kv_bit(w) && kv_get(&part[w].first) <= round)",
            "0)",
            "a round waits for nobody",
        ),
        (
            "phases",
            PHASES,
            ">= round) {\n            if (members & kv_bit(w) && !kv_whole",
            ">= round - 1) {\n            if (members & kv_bit(w) && !kv_whole",
            "a push two rounds ago counts",
        ),
        (
            "phases",
            PHASES,
            "return kv_version_of(phase) & 1; }",
            "return 0; }",
            "the value in use is never changed",
        ),
        (
            "phases",
            PHASES,
            "kv_round_of(phase) : kv_round_of(phase) - 1;",
            "kv_round_of(phase) : kv_round_of(phase);",
            "an open round counts as complete",
        ),
        (
            "phases",
            PHASES,
            "    uint64_t round = atomic_load_explicit(&part->arrived, memory_order_relaxed) + 1, in;",
            "    uint64_t round = atomic_load_explicit(&part->arrived, memory_order_relaxed) + 2, in;",
            "a push skips a round",
        ),
        (
            "phases",
            PHASES,
            "    part->source[round & 1] = source;\n",
            "    part->source[1] = source;\n",
            "sources of two rounds are mixed up",
        ),
    )
]

#: Mutants that no history has caught so far, and why, as far as that is known.
SURVIVORS = {
    "parts of the lost stay": "the round of a loss may have them; that there is one more was not seen",
    "a part of the lost stays": "the same",
    "parts of the dead stay": "the same",
    "parts of the lost count": "the same",
    "what the one before pushed stays": "the same",
    "a read while it is written": "the simulator changes values in one step",
    "usual requests after a loss": "a worker that knows of a loss pushes no more",
    "who is no member is let in": "its own scheduler has told it before",
    "who waits is not told of a loss": "the scheduler tells the worker",
    "an old view is taken": "views come in order",
    "what is far ahead is taken": "no job has 65,536 requests under way",
    "what had come is not in the snapshot": "not known: takes a lost answer, a snapshot, a death and a read",
    "a snapshot's window is not taken up": "the same",
    "a server that came back waits for nobody": "such histories are judged by what is lost alone",
    "the last round need not be whole": "the calls that are remembered decide before it",
    "who waited waits on": "a worker drops an answer that comes again",
    "a worker is twice in a round": "requests that come again are filtered before",
    "rounds go on after a loss": "not known; with jobs of real processes it was not tried",
}
