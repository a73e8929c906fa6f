"""Stores of a process that records a timeline: each call of a method is an event."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import signature
from typing import Any

from .arrays.grouping import Group, bytes_of
from .observe.counters import CALLS
from .observe.events import CALL
from .observe.native._observe import Counters, now
from .observe.timeline.labels import number_of
from .plan import Plan
from .store import KVStore


class _RecordedCall:
    """One call as an event, from the start of the context to its end."""

    __slots__ = ("_begin", "_call", "_counters", "_label", "_nbytes")

    def __init__(self, counters: Counters, verb: str, key: Any, nbytes: int) -> None:
        self._label = number_of(key)
        self._counters, self._call, self._nbytes = counters, CALLS.index(verb), nbytes
        self._begin = now()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._counters.record(CALL, self._begin, now(), self._call, self._label, self._nbytes)


class RecordedPlan(Plan):
    """A plan whose calls are recorded."""

    def __call__(self) -> None:
        """See `Plan.__call__`."""
        values = [values for _, values in self._groups]
        with _RecordedCall(
            self._store._counters, "pushpull", [key for key, _ in self._groups], bytes_of(values)
        ):
            super().__call__()


class RecordedKVStore(KVStore):
    """A `KVStore` whose calls are recorded; an asynchronous call lasts until its operation ends."""

    _plan = RecordedPlan

    def _recorded_method(self, verb: str, key: Any, values: Any) -> _RecordedCall:
        return _RecordedCall(self._counters, verb, key, bytes_of(values))

    def _counted_end(self, verb: str, groups: list[Group]) -> Callable[[Callable[[], Any]], Any]:
        recorded = self._recorded_method(verb, [key for key, _ in groups], [values for _, values in groups])

        def end(run: Callable[[], Any]) -> Any:
            with recorded:
                return self._end_operation(verb, run)

        return end


def _recorded_method(name: str, verb: str, values: str) -> Callable[..., Any]:
    """Make the method `name` of a recorded store.

    An event has the size of the argument `values` in bytes. `_counted_end` records an asynchronous call.
    """
    method: Callable[..., Any] = getattr(KVStore, name)
    places = {argument: place for place, argument in enumerate(signature(method).parameters)}

    @functools.wraps(method)
    def call(*args: Any, **named: Any) -> Any:
        def given(argument: str) -> Any:
            place = places.get(argument, len(args))
            return args[place] if place < len(args) else named.get(argument)

        if given("async_op"):
            return method(*args, **named)
        key = given("key")
        with args[0]._recorded_method(verb, () if key is None else key, given(values)):
            return method(*args, **named)

    return call


# By method: the verb of its event, and the argument whose bytes are counted.
for _name, _event in {
    "init": ("init", "value"),
    "broadcast": ("init", "value"),
    "push": ("push", "value"),
    "pull": ("pull", "out"),
    "pushpull": ("pushpull", "value"),
    "row_sparse_pull": ("row_sparse_pull", ""),
    "barrier": ("barrier", ""),
}.items():
    setattr(RecordedKVStore, _name, _recorded_method(_name, *_event))
