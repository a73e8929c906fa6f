"""The last whole round of a key, where its slices may differ by a round.

Slices differ after a loss, which ends rounds at once, and in reads of a worker that does not take part in the
rounds of others. Rounds are counted as the reading worker counts its pushes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

_CALLS = 4  # of each key; servers store values for fewer rounds


class PushCalls:
    """The last calls of this worker that have pushed into each key."""

    def __init__(self) -> None:
        self._last: dict[Hashable, deque[dict[Any, int]]] = {}

    def note_call(self, pushes: dict[Any, int]) -> None:
        """Record a call: the number of pushes into each of its keys, its own included."""
        for key in pushes:
            calls = self._last.get(key)
            if calls is None:
                calls = self._last[key] = deque(maxlen=_CALLS)
            calls.append(pushes)

    def pushed_together(self, keys: Sequence[Any]) -> list[Any]:
        """Return these keys, and all that were pushed in the same calls."""
        calls = (call for key in keys for call in self._last.get(key, ()))
        return list(dict.fromkeys([*keys, *(key for call in calls for key in call)]))

    def whole_round(self, key: Hashable, rounds: Mapping[Any, Sequence[int]]) -> int:
        """Return the last round of a key that is whole in all keys of its call.

        `rounds` are the last rounds of the slices of all those keys, on servers that are not lost.
        """
        last = min(rounds[key])
        calls: Sequence[dict[Any, int]] = self._last.get(key) or ()
        for call in reversed(calls):
            if all(min(rounds[one]) >= pushes for one, pushes in call.items() if rounds.get(one)):
                break  # later rounds were pushed by others, after this worker had joined
            last = min(last, call[key] - 1)
        return last


def slices_behind(rounds: Sequence[int]) -> list[int]:
    """Return the indexes of slices with a lower round than others."""
    last = max(rounds, default=0)
    return [at for at, round in enumerate(rounds) if round < last]
