"""Losses, rejoined workers, and the pushes of the dead."""

from __future__ import annotations

from .mutant import MEMBERS, SESSIONS, STORE, Mutant

FENCING = [
    Mutant(
        "fencing",
        MEMBERS,
        "frozenset(map(self.seat, waited_for))",
        "frozenset(list(map(self.seat, waited_for))[:1])",
        "rounds wait for one",
    ),
    Mutant(
        "fencing",
        MEMBERS,
        "- set(view.resting) - self.rejoining",
        "- self.rejoining",
        "a joined worker is waited for",
    ),
    Mutant(
        "fencing",
        MEMBERS,
        "- set(view.resting) - self.rejoining",
        "- set(view.resting)",
        "a rejoined worker is waited for at once",
    ),
    Mutant(
        "fencing",
        MEMBERS,
        "return self.without_members(dead | replaced, replaced)",
        "return set()",
        "parts of the dead stay",
    ),
    Mutant(
        "fencing",
        MEMBERS,
        "usual = self.broken is None and not waits",
        "usual = not waits",
        "usual requests after a loss",
    ),
    Mutant(
        "fencing",
        MEMBERS,
        "max(after.get(rounds.id, 0), rounds.base())",
        "after.get(rounds.id, 0)",
        "a join point in the past",
    ),
    Mutant(
        "fencing",
        MEMBERS,
        "            rounds.lose({rank}, last)",
        "            pass",
        "a push of the earlier process stays",
        "tests/stores/parameter_server/server/test_machine.py::test_a_push_of_a_worker_that_has_left_is_in_no_round_of_its_successor",
    ),
    Mutant(
        "fencing",
        MEMBERS,
        "                rounds.pass_over(rank, last)",
        "                pass",
        "rounds wait for a worker that enters later",
    ),
    Mutant("fencing", MEMBERS, "view.begin >= 0", "False", "no join point is collected"),
    Mutant(
        "fencing",
        STORE,
        "        if members.incarnations.get(rank) != attach.incarnation:",
        "        if False:",
        "a process that is no member is admitted",
        "tests/stores/parameter_server/server/test_machine.py::test_an_old_process_is_fenced",
    ),
    Mutant(
        "fencing",
        STORE,
        "            self.requests.leave(self.sessions.close_session(rank))",
        "            self.requests.leave(self.sessions.by_rank[rank])",
        "a lost worker keeps its session",
    ),
    Mutant(
        "fencing", STORE, "            rounds.lose(lost_parts)", "            pass", "parts of the lost count"
    ),
    Mutant(
        "fencing",
        STORE,
        "            members.break_off(failure)",
        "            pass",
        "a loss breaks nothing",
    ),
    Mutant(
        "fencing",
        STORE,
        "            self.requests.fail_waiting(failure)",
        "            pass",
        "a waiting worker is not notified of a loss",
        "tests/stores/parameter_server/server/test_machine.py::test_a_broken_store_reads_and_does_not_write",
    ),
    Mutant(
        "fencing",
        STORE,
        "        if view.epoch <= members.epoch:\n            return\n",
        "",
        "an old view is taken",
        "tests/stores/parameter_server/server/test_machine.py::test_an_older_view_changes_nothing",
    ),
    Mutant(
        "fencing",
        STORE,
        "        if attach.epoch > members.epoch:",
        "        if False:",
        "an attach before its view",
    ),
    Mutant(
        "fencing",
        STORE,
        "        self.requests.advance_all()\n        for peer, attach",
        "        for peer, attach",
        "rounds that wait for the lost only stay open",
    ),
    Mutant(
        "fencing",
        STORE,
        "            members.set_join_point(view.begun",
        "            (lambda *_: None)(view.begun",
        "no join point is set",
    ),
    Mutant(
        "fencing",
        SESSIONS,
        "session.epoch >= epoch for",
        "True for",
        "a join point before all have reached it",
    ),
]
