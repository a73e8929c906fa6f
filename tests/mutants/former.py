"""Faults that were mended: changes that take the mending out, and seeds with which buggify finds them."""

from __future__ import annotations

from typing import NamedTuple

PS = "kvstore/stores/parameter_server/"
SERVER, SCHEDULER, WORKER = PS + "server/", PS + "scheduler/", PS + "worker/"
MACHINE = WORKER + "state_machine/"


class Former(NamedTuple):
    """One mended fault: the commit of the mending, the change that takes it out, and which job finds it."""

    commit: str
    fault: str
    file: str
    old: str
    new: str
    kind: str = ""  # of simulated jobs, or a test of real ones
    seeds: tuple[int, ...] = ()
    why_not: str = ""  # it is not found, as far as that is known


FORMER = [
    Former(
        "8209f62",
        "a worker that enters a store whose others were refused starts it alone",
        SCHEDULER + "stores.py",
        "            outgoing.refuse(peer, failure)\n        store.members.clear()\n",
        "            outgoing.refuse(peer, failure)\n",
        "worker back",
        (820, 962),
    ),
    Former(
        "4abc7a5",
        "the waiting pull of a lost worker gets the failed round of its successor",
        SERVER + "store_machine.py",
        "self.requests.leave(self.sessions.close_session(rank))",
        "self.sessions.close_session(rank)",
        why_not="reports of a failed round are in no history",
    ),
    Former(
        "0ffafac",
        "a worker lost after it had left a store that raises rejoins it",
        SCHEDULER + "stores.py",
        "lost = [process.rank] if store.started else self._assignment.ranks_in_state(ProcessState.LOST)",
        "lost = self._assignment.ranks_in_state(ProcessState.LOST)",
        why_not="not known; no job of 1,900 had such a worker",
    ),
    Former(
        "9faab8d",
        "a new worker says where it is before it knows its rounds",
        MACHINE + "machine.py",
        "if any(link.join_epoch < self.member.join_epoch for link in self._servers.all()):",
        "if False:",
        why_not="a join point that is wrong makes rounds that are shifted alike for all",
    ),
    Former(
        "20aa1d9",
        "a worker begins in rounds for which its predecessor has left parts",
        SERVER + "round_members.py",
        "            rounds.lose({rank}, last)  #",
        "            #",
        why_not="not known; what a predecessor leaves is dropped at a second place since then",
    ),
    Former(
        "094a4fa",
        "rounds that are lost with a server wait where all others rest",
        SERVER + "slice_rounds.py",
        "while self.skip or len(",
        "while (self.skip and needed) or len(",
        why_not="not known; no job of 1,700 had such rounds",
    ),
    Former(
        "a4c629f",
        "a push in an epoch that a server does not know yet is accepted at once",
        SERVER + "machine.py",
        "        if batch.epoch > store.members.epoch:",
        "        if False:",
        "worker back",
        (154, 293),
    ),
    Former(
        "2ba327f",
        "a worker that rejoins in the others' pass waits for them, and they for it",
        SERVER + "round_members.py",
        "- set(view.resting) - self.rejoining",
        "- set(view.resting)",
        "worker back",
        (0, 16),
    ),
    Former(
        "c59966d",
        "a request that waits counts as answered in a snapshot",
        SERVER + "store_machine.py",
        "*one.answered()]",
        "one.low, sorted(one.above)]",
        "server back",
        (35, 125),
    ),
    Former(
        "64b6001",
        "a worker hands pushes to a server further ahead of the rounds than it takes",
        MACHINE + "request_table.py",
        "self._flying.get(slice_, 0) >= _PUSHED\n",
        "False\n",
        why_not="no job has 32 pushes of a slice under way",
    ),
    Former(
        "d8cc87b",
        "a failed round is not reported to a worker that has pushed again since",
        SERVER + "slice_rounds.py",
        "if number <= round and rank in untold:",
        "if number == round and rank in untold:",
        why_not="reports of a failed round are in no history",
    ),
    Former(
        "572f119",
        "a scheduler that stood still declares all processes lost",
        SCHEDULER + "machine.py",
        "            self._detector.discount_pause(now - self._stepped)\n",
        "",
        why_not="a scheduler that was stopped explains each loss, as the checker knows no more of it",
    ),
    Former(
        "572f119",
        "a scheduler that stood still says of a dead worker's rank that it is taken",
        SCHEDULER + "machine.py",
        "            self._admission.discount_pause(now - self._stepped)\n",
        "",
        why_not="a refused process has entered no store, and so has no history",
    ),
    Former(
        "72a65e9",
        "a scheduler that is busy is taken for lost",
        MACHINE + "machine.py",
        "            self._scheduler.silence.note_heartbeat(now)\n        elif type(message) is m.Rel",
        "            pass\n        elif type(message) is m.Rel",
        "busy",
        (8, 9),
    ),
    Former(
        "72a65e9",
        "a scheduler that is busy is taken for lost by servers",
        SERVER + "machine.py",
        "            self._silence.note_heartbeat(now)\n        elif kind is Rel",
        "            pass\n        elif kind is Rel",
        "busy",
        (12, 17),
    ),
    Former(
        "72a65e9",
        "a process that stood still takes the scheduler for lost",
        PS + "protocol/silence.py",
        "            self.note_heartbeat(now)\n            self.stopped",
        "            self.stopped",
        "stop",
        (8, 78),
    ),
    Former(
        "72a65e9",
        "a sign of life that has come and is not read yet counts for nothing",
        PS + "protocol/silence.py",
        "return now - self._doubted >= self._dead_after / 5",
        "return True",
        why_not="the simulator hands messages over at once: none has come and is not read",
    ),
    Former(
        "ccabace",
        "a scheduler that was started again ends before farewells were answered",
        SCHEDULER + "shutdown.py",
        "if self._resumed is not None and outgoing.now - self._resumed <= patience:",
        "if False:",
        why_not="not known; no job of 1,600 ended so",
    ),
    Former(
        "72a65e9",
        "after a loss keys of one call are read from two rounds",
        WORKER + "consistent_rounds.py",
        "self._last.get(key) or ()\n        for",
        "()\n        for",
        "worker",
        (288, 975),
    ),
    Former(
        "72a65e9",
        "a joined worker reads slices of two rounds",
        WORKER + "consistent_rounds.py",
        "if round < last]",
        "if False]",
        "calm",
        (6, 74),
    ),
    Former(
        "3512e43",
        "bytes of requests that were given up hold up all later ones",
        MACHINE + "request_table.py",
        "        self._answered += sum(request.size for request in self._open.values())\n",
        "",
        "worker",
        (515, 537),
    ),
    Former(
        "538417c",
        "a value is there before it is in a snapshot",
        SERVER + "slice_requests.py",
        "elif valued and not rounds.kept and self._effects.unsaved is not None:",
        "elif False:",
        "server back",
        (1, 4),
    ),
    Former(
        "bbd3667",
        "a worker that leaves after a restart was not in the round that the restart lost",
        SERVER + "slice_rounds.py",
        "max([self.round, self.skip.get(rank, 0), *there])",
        "max([self.round, *there])",
        why_not="only a warning in the log names a wrong round",
    ),
    Former(
        "7ce4b40",
        "a restarted scheduler counts its absence as silence of all",
        SCHEDULER + "machine.py",
        "        self._detector.restart_silences(outgoing.now)\n",
        "",
        why_not="its clock continues where the journal ended, so the pause is forgiven a second time",
    ),
    Former(
        "ca90844",
        "parts of a later round are mixed into a value that is still being sent",
        MACHINE + "request_table.py",
        "            or min(self._reads.get(slice_, ()), default=round_) < round_\n",
        "",
        why_not="not known; in 74 jobs no worker left a value unread for two rounds of all others",
    ),
    Former(
        "6eeb168",
        "a value that is read in the background is of a later round in a shared store",
        "kvstore/stores/shared/undelivered.py",
        "            for read in self._reads.get(key, ()):",
        "            for read in ():",
        "test_what_may_happen_at_any_time_changes_nothing[shared-{}]",
        (1, 3, 4, 5),
    ),
    Former(
        "3e03e0c",
        "a pull after a loss that was heard of in between says nothing of the push before it",
        WORKER + "reads.py",
        "if not self._client.told_of_loss and any(",
        "if False and any(",
        why_not="not known; in 60 jobs with a kill no worker heard of it between its push and its pull",
    ),
    Former(
        "86c019d",
        "a worker declared dead reads rounds that continued without it",
        "kvstore/stores/shared/waiting.py",
        "        if self._job.check_membership() == shm.FENCED:",
        "        if False:",
        why_not="the copy is checked once more since then: 88f38db",
    ),
    Former(
        "88f38db",
        "a read under way in a process that is taken for dead is of a round without it",
        "kvstore/stores/shared/native/rounds.pxi",
        "        if outcome == KV_READY and kv_check_membership(me) == KV_FENCED:\n"
        "            return KV_FENCED",
        "        if False:\n            return KV_FENCED",
        "test_losses_among_delays[hierarchy-stopped-{}]",
        (2, 5, 9, 10),
    ),
]
