"""Requests that read a slice: answered when its value is the one that they want, or will change no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ..protocol.messages import KIND, ROUND, SEQUENCE, Kind, Record
from .round_members import RoundMembers
from .sessions import StepEffects, WorkerSession
from .slice_rounds import SliceRounds

_DONE, _VALUE, _LAST_ROUND = Kind.DONE, Kind.VALUE, Kind.LAST_ROUND


class SliceReads:
    """Pulls of one store's slices."""

    def __init__(self, members: RoundMembers) -> None:
        self._members = members

    def pull(
        self,
        session: WorkerSession,
        rounds: SliceRounds,
        record: Record,
        frames: Sequence[Any],
        effects: StepEffects,
    ) -> None:
        """Answer now, or note that the request waits."""
        broken = self._members.broken
        if broken is not None and not self.readable(rounds, record):
            # whoever knows of the loss asks for whatever there is
            effects.fail(session, record, rounds.round, broken)
        elif rounds.busy or not self.readable(rounds, record):
            session.waiting.add(record[SEQUENCE])
            rounds.pulls.append((session, record, frames))
        else:
            self.answer(session, rounds, record, frames, effects)

    def readable(self, rounds: SliceRounds, record: Record) -> bool:
        """Whether the round that a request wants is complete."""
        if record[KIND] == _LAST_ROUND:
            return self._members.broken is not None
        return record[ROUND] <= rounds.round or not self._members.sync

    def answer(
        self,
        session: WorkerSession,
        rounds: SliceRounds,
        record: Record,
        frames: Sequence[Any],
        effects: StepEffects,
    ) -> None:
        """Answer with the value, the last round, or a failure that the worker has to be told of."""
        if record[KIND] == _LAST_ROUND:
            effects.answer(session, _DONE, record, rounds.round)
        elif not rounds.failures or not _tell_failure(session, rounds, record, effects):
            effects.answer(session, _VALUE, record, rounds.round, frames)


def _tell_failure(session: WorkerSession, rounds: SliceRounds, record: Record, effects: StepEffects) -> bool:
    """Answer that a round failed, of each once to each worker that pushed into it; then it may read."""
    told = rounds.tell(session.rank, record[ROUND]) if record[KIND] != Kind.FETCH_STATE else None
    if told is None:
        return False
    number, failure = told
    if number < record[ROUND]:
        failure = msgspec.structs.replace(failure, text=f"{failure.text}; that was in round {number}")
    effects.fail(session, record, rounds.round, failure)
    return True
