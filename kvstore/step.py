"""A step: its pushes are sent as one call when its block ends, so that all of them count, or none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .arrays.grouping import Group, Key
from .errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from .store import KVStore
    from .stores.protocol import Backend


class StepCalls:
    """The pushes of one thread in a step, and the pulls of their results. The arrays stay the caller's."""

    def __init__(self) -> None:
        self._values: dict[Key, list[Any]] = {}
        #: Keys whose result was requested by `pushpull`.
        self._outs: dict[Key, list[Any]] = {}
        self._reads: list[Callable[[KVStore], None]] = []
        #: Output arrays that are filled after the pushes. They are checked first, because that pull must not
        #: fail.
        self._pulled: list[Group] = []

    def push(self, groups: list[Group], outs: list[Group] | None = None) -> None:
        """Record a push, with the output arrays for its results if there are any."""
        twice = [key for key, _ in groups if key in self._values]
        if twice:
            raise ConfigError(
                f"key {twice[0]!r} is pushed twice in one step, but a step is one round of each key: push a "
                "list of arrays, which are summed, or use two steps"
            )
        self._values.update(groups)
        self._outs.update(outs or ())

    def has_any(self, groups: list[Group]) -> bool:
        """Return whether one of these keys was pushed in the step."""
        return any(key in self._values for key, _ in groups)

    def read(self, verb: str, *arguments: Any, **options: Any) -> None:
        """Record a call that reads a pushed key."""
        self._reads.append(partial(_call_store, verb, arguments, options))

    def pull(self, outs: list[Group], *arguments: Any) -> None:
        """Record a pull of pushed keys into these arrays."""
        self._pulled.extend(outs)
        self.read("pull", *arguments)

    def send(self, store: KVStore) -> None:
        """Call the store: one pushpull if `pushpull` requested all results, else a push and a pull."""
        store._run_after([], store._backend.prepare_step)
        at_once = bool(self._values) and self._values.keys() == self._outs.keys()
        later = self._pulled if at_once else [*self._outs.items(), *self._pulled]
        if later:
            store._run_after([], _check_outs, store._backend, later)
        if at_once:
            in_place = all(self._outs[key] is values for key, values in self._values.items())
            store.pushpull(*_key_lists(self._values), out=None if in_place else list(self._outs.values()))
        elif self._values:
            store.push(*_key_lists(self._values))
            store._run_after([], store._backend.settle_pushes)
            if self._outs:
                store.pull(*_key_lists(self._outs))
        for read in self._reads:
            read(store)


def _key_lists(groups: dict[Key, list[Any]]) -> tuple[list[Key], list[Any]]:
    return list(groups), list(groups.values())


def _call_store(verb: str, arguments: tuple[Any, ...], options: dict[str, Any], store: KVStore) -> None:
    getattr(store, verb)(*arguments, **options)


def _check_outs(backend: Backend, outs: list[Group]) -> None:
    """Raise the errors of a pull into these arrays, before the push."""
    from .stores import outs as arrays  # each store has imported it; `import kvstore` must not

    arrays.check_outs(backend.kind, outs)


def refuse_async(async_op: bool) -> None:
    """Raise for an asynchronous call in a step."""
    if async_op:
        raise ConfigError(
            "calls in `with store.step()` are made when the block ends, so there is nothing to wait for "
            "before: leave async_op out"
        )


def check_whole_steps(reason: str, name: str) -> None:
    """Raise for a store in which the pushes of one call can count separately."""
    if reason:
        raise CapabilityError(f"store {name!r} has no whole steps: {reason}")
