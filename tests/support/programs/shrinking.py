"""The smallest program that still shows a difference, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterator

from .crews import Crews, Found
from .program import Program, Stage

#: How often a smaller program is played before it counts as one that shows nothing.
_TRIES = 3
#: The parts that a call may do without.
_DETAILS = (", values=2", ", values=3", ', rows="all"', ', rows="some"', ", dump_optimizer=True")


def shrunk(crews: Crews, program: Program, found: Found, tries: int = _TRIES) -> tuple[Program, Found]:
    """Remove the lines of a program that its difference does not need."""

    def shows(smaller: Program) -> Found | None:
        for _ in range(tries):
            if (still := crews.differs(smaller.script(), found.store)) is not None:
                return still
        return None

    done = False
    while not done:
        done = True
        for smaller in _smaller(program):
            if (still := shows(smaller)) is not None:
                program, found, done = smaller, still, False
                break
    return program, found


def _smaller(program: Program) -> Iterator[Program]:
    """Yield programs with less, those with much less first."""
    stages = program.stages
    size = len(stages)
    while size := size // 2:
        for start in range(len(stages) - size, -1, -size):
            yield program._replace(stages=stages[:start] + stages[start + size :])
    if program.workers > 2:
        yield program._replace(workers=program.workers - 1)
    for key in {key: 0 for stage in stages for call in stage for key in call.keys}:
        yield program.without(key)
    for at, stage in enumerate(stages):
        for other in _smaller_stages(stage):
            yield program._replace(stages=(*stages[:at], other, *stages[at + 1 :]))
    if program.dtype != "float32":
        yield program._replace(dtype="float32")


def _smaller_stages(stage: Stage) -> Iterator[Stage]:
    for at, call in enumerate(stage):
        if len(stage) > 1 and not call.kept:
            yield stage[:at] + stage[at + 1 :]
        if len(call.keys) > 1:
            for key in range(len(call.keys)):
                fewer = call._replace(keys=call.keys[:key] + call.keys[key + 1 :])
                yield (*stage[:at], fewer, *stage[at + 1 :])
        for text in _plainer(call.text):
            yield (*stage[:at], call._replace(text=text), *stage[at + 1 :])


def _plainer(text: str) -> Iterator[str]:
    for detail in _DETAILS:
        if detail in text:
            yield text.replace(detail, "")
    if text.startswith("later("):
        verb, rest = text.removeprefix("later(").split(", ", 1)
        yield f"{verb}({rest}"
