"""Repeated messages, and messages out of order."""

from __future__ import annotations

from .mutant import C_ROUNDS, C_SESSIONS, REQUESTS, STORE, Mutant

DUPLICATES = [
    Mutant(
        "duplicates",
        STORE,
        "        if session.has_come(sequence):",
        "        if False:",
        "a repeated request is done again",
    ),
    Mutant(
        "duplicates",
        REQUESTS,
        "        if session.waits(sequence):\n            self._effects.report(session)\n        elif",
        "        if",
        "a repeat of a waiting request is answered",
    ),
    Mutant(
        "duplicates",
        REQUESTS,
        "            self._pull(session, rounds, record, frames if kind != _PUSHPULL else ())",
        "            self.handle(session, record, frames)",
        "a repeated pushpull pushes again",
    ),
    Mutant(
        "duplicates",
        REQUESTS,
        "            self._pull(session, rounds, record, frames if kind != _PUSHPULL else ())",
        "            pass",
        "a lost answer with a value is not sent again",
    ),
    Mutant(
        "duplicates",
        STORE,
        "        elif session.take(sequence):",
        "        elif session.take(sequence) or True:",
        "a request far ahead is accepted",
        "tests/stores/parameter_server/server/test_machine.py::test_a_request_too_far_ahead_is_not_taken",
    ),
    Mutant(
        "duplicates",
        C_SESSIONS,
        "return number <= d->low || (number",
        "return number < d->low || (number",
        "the last request is applied twice",
    ),
    Mutant(
        "duplicates",
        C_SESSIONS,
        "kp_has_number(&d->above, number));\n}",
        "0);\n}",
        "a request out of order is applied twice",
    ),
    Mutant(
        "duplicates",
        C_SESSIONS,
        "    for (d->low++; kp_has_number",
        "    for (d->low += 2; kp_has_number",
        "a request that never arrived counts as received",
    ),
    Mutant(
        "duplicates",
        C_ROUNDS,
        "return r->sequence == d->low + 1 && !d->above.count",
        "return 1",
        "any request is the next",
    ),
    Mutant("duplicates", C_ROUNDS, "    session->duplicates.low++;\n", "", "usual requests are not noted"),
    Mutant(
        "duplicates",
        C_ROUNDS,
        "    return !open || kp_part_of(open, session->seat) < 0;",
        "    return 1;",
        "a worker is twice in a round",
        "tests/stores/parameter_server/native/test_rounds.py::test_what_needs_more_is_left_to_python_and_changes_nothing",
    ),
    Mutant(
        "duplicates",
        STORE,
        "return not (members.sync or members.restarted) and sequence > session.low + 1",
        "return False",
        "a push that has overtaken others is applied at once",
        "tests/stores/parameter_server/server/test_machine.py::test_an_async_push_waits_for_one_that_it_has_overtaken",
    ),
]
