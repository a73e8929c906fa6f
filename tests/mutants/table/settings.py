"""Settings and update counts: what random programs see."""

from __future__ import annotations

from .mutant import PROGRAMS, SERVED_OPTIMIZER, SHARED_OPTIMIZER, Mutant


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
        "            handle.updates = optimizer._index_update_count.get(handle.key, 0)\n",
        "",
        "a load forgets the counts",
    ),
    _of(
        SHARED_OPTIMIZER,
        "            if text != there.now:\n",
        "            if text == there.now:\n",
        "a change stays with its worker",
    ),
    _of(
        SHARED_OPTIMIZER,
        "            self.updater.states = states\n",
        "            self.updater.states = {}\n",
        "a change of another worker takes states away",
    ),
    _of(
        SERVED_OPTIMIZER,
        "    return last._replace(version=version, optimizer=optimizer, text=text)\n",
        "    return last._replace(version=version)\n",
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
        "            self.updates = self.num_update = 0\n",
        "            pass\n",
        "counts go on with the next optimizer",
    ),
    _of(
        SERVED_OPTIMIZER,
        "        optimizer.num_update = settings.base + clock\n",
        "        optimizer.num_update = settings.base + clock + 1\n",
        "a schedule begins one update later",
    ),
    _of(
        SERVED_OPTIMIZER,
        "        base = optimizer.begin_num_update - clock\n",
        "        base = optimizer.begin_num_update\n",
        "a schedule counts what was pushed before it",
    ),
]
