"""Which round of a key is whole, where its slices may be a round apart.

They are apart after a loss, which ends rounds wherever they are, and for who reads while the rounds of others
go on. Rounds are counted as the reading worker counts its pushes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

_CALLS = 4  # of each key; servers keep values for less long


class PushCalls:
    """The last calls of this worker that pushed into each key."""

    def __init__(self) -> None:
        self._last: dict[Hashable, deque[dict[Any, int]]] = {}

    def note(self, pushes: dict[Any, int]) -> None:
        """Note a call: how often each of its keys has been pushed, with this time."""
        for key in pushes:
            calls = self._last.get(key)
            if calls is None:
                calls = self._last[key] = deque(maxlen=_CALLS)
            calls.append(pushes)

    def together(self, keys: Sequence[Any]) -> list[Any]:
        """Return these keys, and all that were pushed in one call with one of them."""
        calls = (call for key in keys for call in self._last.get(key, ()))
        return list(dict.fromkeys([*keys, *(key for call in calls for key in call)]))

    def whole(self, key: Hashable, rounds: Mapping[Any, Sequence[int]]) -> int:
        """Return the last round of a key that is whole in all keys of its call.

        `rounds` are the last rounds of the slices of all those keys, as far as their servers are there.
        """
        last = min(rounds[key])
        calls: Sequence[dict[Any, int]] = self._last.get(key) or ()
        for call in reversed(calls):
            if all(min(rounds[one]) >= pushes for one, pushes in call.items() if rounds.get(one)):
                break  # what is later was pushed by others, when this worker had joined
            last = min(last, call[key] - 1)
        return last


def behind(rounds: Sequence[int]) -> list[int]:
    """Return which of the slices of a key are behind the others."""
    last = max(rounds, default=0)
    return [at for at, round in enumerate(rounds) if round < last]
