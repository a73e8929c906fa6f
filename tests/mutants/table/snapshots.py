"""A restarted server."""

from __future__ import annotations

from .mutant import MEMBERS, REQUESTS, SESSIONS, STORE, Mutant

SNAPSHOTS = [
    Mutant(
        "snapshots",
        STORE,
        "[[one.id, one.round] for one",
        "[[one.id, max(0, one.round - 1)] for one",
        "a snapshot contains an older round",
    ),
    Mutant(
        "snapshots",
        STORE,
        "sessions = () if self.members.sync else self.sessions.by_rank.values()",
        "sessions = ()",
        "received requests are not in the snapshot",
    ),
    Mutant(
        "snapshots",
        STORE,
        "rounds.ready, rounds.kept, rounds.round = True, True, round_",
        "rounds.ready, rounds.kept, rounds.round = True, True, 0",
        "rounds begin anew",
    ),
    Mutant(
        "snapshots",
        SESSIONS,
        "            if incarnation == attach.incarnation:",
        "            if False:",
        "a snapshot's window is not taken up",
    ),
    Mutant(
        "snapshots",
        MEMBERS,
        "                    rounds.pass_over(seat, max(round_, rounds.skip.get(seat, 0)))",
        "                    pass",
        "rounds wait for lost parts",
    ),
    Mutant(
        "snapshots",
        MEMBERS,
        "if self.returning is None or not self.incarnations.keys() <= self.returning.keys():",
        "if self.returning is None:",
        "a restarted server waits for one worker",
    ),
    Mutant(
        "snapshots",
        STORE,
        "rounds.ready, rounds.kept, rounds.round = True, True, round_",
        "rounds.ready, rounds.kept, rounds.round = True, True, round_ + 1",
        "rounds begin one later",
    ),
    Mutant(
        "snapshots",
        REQUESTS,
        "elif valued and not rounds.kept and self._effects.unsaved is not None:",
        "elif False:",
        "a first value is there before it is in a snapshot",
    ),
    Mutant(
        "snapshots",
        REQUESTS,
        "if ahead <= 0 or (ahead == 1 and rounds.busy == _ROUND):",
        "if ahead == 1 and rounds.busy == _ROUND:",
        "a repeated push after its round is refused",
    ),
    Mutant(
        "snapshots",
        MEMBERS,
        "if rounds is not None and round_ > rounds.round:",
        "if rounds is not None and round_ > rounds.round + 1:",
        "one lost round is waited for",
    ),
]
