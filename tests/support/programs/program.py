"""A program: calls of workers, and the lines of Python that they are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from .crews import Script

Key = int | str


class Call(NamedTuple):
    """One line, with KEYS for its keys and WITHOUT for workers that have joined.

    `by` is the worker that makes the call; None: all that have not joined. In the last call of a worker
    `joins` is set; a smaller stage has the lines that are `kept`, too. A line with `holds` applies from the
    next push of its worker on.
    """

    text: str
    keys: tuple[Key, ...] = ()
    by: int | None = None
    joins: bool = False
    kept: bool = False
    holds: bool = False

    def line(self, joined: list[int]) -> str:
        """Return the line, if these have joined."""
        without = f", without={joined}" if joined else ""
        text = self.text.replace("KEYS", repr(list(self.keys))).replace("WITHOUT", without)
        if self.by is not None:
            return f"if rank == {self.by}: {text}"
        guard = " and ".join(f"rank != {rank}" for rank in joined)
        return f"if {guard}: {text}" if joined else text


#: Calls between which no worker waits; if single workers make some of them, a barrier or a push follows.
Stage = tuple[Call, ...]
BARRIER = Call("store.barrier()")


def _without(key: Key, stage: Stage) -> Iterator[Call]:
    for call in stage:
        keys = tuple(one for one in call.keys if one != key)
        if keys or not call.keys:
            yield call._replace(keys=keys)


class Program(NamedTuple):
    """Stages of all workers, and at their end a look at everything."""

    workers: int
    dtype: str
    stages: tuple[Stage, ...]

    def without(self, key: Key) -> Program:
        """Return the program without a key."""
        return self._replace(stages=tuple(tuple(_without(key, stage)) for stage in self.stages))

    def script(self) -> Script:
        """Return the program as lines."""
        return Script(self.workers, self.dtype, tuple(self._lines()))

    def _lines(self) -> Iterator[str]:
        joined: list[int] = []
        stages = (*self.stages, *self._end())
        for stage, after in pairwise((*stages, ())):
            for call in stage:
                if call.by is not None and (call.by in joined or call.by >= self.workers):
                    continue
                yield call.line(joined)
                joined += [call.by] if call.joins and call.by is not None else []
            alone = [call for call in stage if call.by is not None and not call.text.startswith("time.")]
            if alone and not (all(call.holds for call in alone) and any("g(" in one.text for one in after)):
                yield BARRIER.line(joined)

    def _end(self) -> Iterator[Stage]:
        keys = dict.fromkeys(
            key for stage in self.stages for call in stage if "first(" in call.text for key in call.keys
        )
        yield (Call("store.wait()"),)
        if keys:
            yield (Call("store.pull(KEYS, out=out(KEYS))", tuple(keys)), BARRIER)
        yield (Call("note(store.save_optimizer_states, 0, dump_optimizer=True)"),)
