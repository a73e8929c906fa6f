"""Settings and update counts: what random programs see."""

from __future__ import annotations

from .mutant import PROGRAMS, SERVED_OPTIMIZER, SHARED_OPTIMIZER, WORKER_OPTIMIZER, Mutant


def _of(file: str, old: str, new: str, why: str) -> Mutant:
    return Mutant("settings", file, old, new, why, PROGRAMS)


SETTINGS = [
    _of(
        SHARED_OPTIMIZER,
        "            counts[handle.key] = handle.updates\n",
        "            counts[handle.key] = 1\n",
        "a key has always been updated once",
    ),
    _of(
        SHARED_OPTIMIZER,
        "            shm.raise_num_update(self._job, optimizer.num_update)\n",
        "",
        "the time of a schedule stands still",
    ),
    _of(
        SHARED_OPTIMIZER,
        "        self._set_counts(optimizer._index_update_count, optimizer.num_update)\n",
        "        shm.set_num_update(self._job, optimizer.num_update)\n",
        "a load forgets the counts",
    ),
    _of(
        SHARED_OPTIMIZER,
        "        self._amend_description("
        "lambda there: there._replace(now=changed_text(there.now, described)))\n",
        "",
        "a change stays with its worker",
    ),
    _of(
        SHARED_OPTIMIZER,
        "        if record is not None:\n            self.updater",
        "        if handle.key in self.updater.states:\n            self.updater",
        "a worker makes the state of a key that another has made",
    ),
    _of(
        SERVED_OPTIMIZER,
        "if (one.generation, one.text) == (ordinal, text)",
        "if one.generation == ordinal",
        "a change reaches no server",
    ),
    _of(
        SERVED_OPTIMIZER,
        "        if version >= self._versions[-1].version:\n",
        "        if True:\n",
        "rounds have the newest change, whichever their workers know",
    ),
    _of(
        SERVED_OPTIMIZER,
        "            return self.restart_counts(settings, 0, 0)\n",
        "            return self.restart_counts(settings, self.updates, self.num_update)\n",
        "counts continue with the next optimizer",
    ),
    _of(
        SERVED_OPTIMIZER,
        "max(optimizer.begin_num_update, time_at([stamp], settings.epoch))\n",
        "max(optimizer.begin_num_update, time_at([stamp], settings.epoch)) + 1\n",
        "a schedule begins one update later",
    ),
    _of(
        WORKER_OPTIMIZER,
        "UpdateClock(optimizer.begin_num_update, epoch=answer.epoch)\n",
        "UpdateClock(optimizer.begin_num_update, self.clock.counts, self.clock.time, answer.epoch)\n",
        "a schedule counts earlier pushes",
    ),
]
