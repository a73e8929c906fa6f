"""Keys and their first values: brought to the servers by one worker, waited for by the others."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from ....arrays.grouping import Group, Key
from ....arrays.sparse import RowSparseArray
from ....devices.arrays import any_on_device
from ....errors import KVStoreError, TimeoutError
from ....waiting import WaitClock
from ...entry import Array, check_same, first_value
from ..protocol import messages as m
from ..protocol.messages import Kind
from .key_directory import DistKey, spec_of
from .operations import Request
from .pulls import Pulls
from .pushes import Pushes
from .request_builder import PushHeader

_LOOK_AGAIN = 0.02  # seconds until a worker looks again whether keys have been moved


class InitialValues:
    """Has keys placed on servers, and writes their values there."""

    def __init__(self, pushes: Pushes, pulls: Pulls) -> None:
        self._client, self._keys, self._slices = pushes.client, pushes.keys, pushes.slices
        self._optimizer, self._gpus, self._pulls = pushes.optimizer, pushes.gpus, pulls

    def init(self, groups: list[Group]) -> None:
        """Take the values of the lowest rank, and wait until all servers have them."""
        new = [(key, self._first_value(key, values)) for key, values in groups if values]
        self._client.check_writing()
        while missing := [(key, value) for key, value in new if not self._is_here(key, value)]:
            if self._client.member.is_initializer():
                self._create(missing)
            else:
                self._keys.wait_for(tuple(key for key, _ in missing))
        self._keys.initialised.update(key for key, _ in new)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        known = [(found, values[0]) for key, values in groups if (found := self._keys.find(key)) is not None]
        there = {found.key for found, _ in known}
        self.init([(key, values) for key, values in groups if key not in there])
        self._client.check_writing()
        self._client.perform([r for key, value in known for r in self._written(key, value)], "new values")
        self._keys.initialised.update(there)

    def _first_value(self, key: Key, values: list[Any]) -> Array | RowSparseArray:
        self._keys.check_kind(key)
        taken = key in self._keys.initialised
        if len(values) == 1 and not taken and any_on_device(values):
            values = [self._gpus.get().fetched(values[0], f"value of key {key!r}")]
        return first_value(key, values, taken)

    def _is_here(self, key: Key, value: Array | RowSparseArray) -> bool:
        """Whether a key has its value on the servers; it must be the same kind of key then."""
        known = self._keys.get(key)
        if known is None:
            return False
        self._check_same(known, value)
        return True

    def _check_same(self, key: DistKey, value: Array | RowSparseArray) -> None:
        check_same(key, key.sparse, value, "in this job", self._client.rank)

    def _create(self, new: list[tuple[Key, Array | RowSparseArray]], whole: bool = False) -> None:
        """Have keys placed, each on one server if `whole`, and bring their values to the servers."""
        whole = whole or self._optimizer.wants_whole_keys
        specs = tuple(spec_of(key, value, whole) for key, value in new)
        try:
            entries = self._client.request(partial(m.CreateKeys, keys=specs), "the placement of keys").entries
            made = [DistKey(entry) for entry in entries]
            self._fill(made, dict(new))
        except (KVStoreError, MemoryError) as error:
            self._tell_others(tuple(key for key, _ in new), error)
            raise
        self._keys.add(made)

    def _fill(self, made: list[DistKey], values: dict[Key, Array | RowSparseArray]) -> None:
        for key in made:
            self._check_same(key, values[key.key])
        # ASSIGN: an initializer that died on the way may have left some of the values.
        fresh = [key for key in made if not key.entry.ready]
        requests = [request for key in fresh for request in self._written(key, values[key.key])]
        self._client.perform(requests, "the first values of keys")
        if fresh:
            keys = tuple(key.key for key in fresh)
            self._client.request(partial(m.Ready, keys=keys), "the first values of keys")

    def _tell_others(self, keys: tuple[Key, ...], error: Exception) -> None:
        """Have workers that wait for first values raise what this one does; of a loss all know anyway."""
        name = type(error).__name__ if isinstance(error, KVStoreError) else KVStoreError.__name__
        rank, why = self._client.rank, str(error) or "it has too little memory"
        text = f"worker {rank} cannot store the first value of {_named(keys)}: {why}"
        with contextlib.suppress(KVStoreError):
            drop = partial(m.Drop, keys=keys, error=m.Failure(name, text))
            self._client.request(drop, "an init that has failed")

    def _written(self, key: DistKey, value: Array | RowSparseArray) -> Iterable[Request]:
        head = PushHeader(Kind.ASSIGN)
        if isinstance(value, RowSparseArray):
            return self._slices.rows(key, [value], head)
        return self._slices.dense(key, [value], head, None)

    def make_whole(self, timeout: float) -> None:
        """Bring each key to one server, for a rule that must see whole tensors; all workers come here."""
        spread = [key for key in self._keys.all() if key.is_spread]
        if not spread:
            return
        self._client.check_writing()
        names = tuple(key.key for key in spread)
        if self._client.member.is_initializer():
            values = list(zip(names, self._pulls.fetch_all(list(names)), strict=True))
            self._client.request(partial(m.Drop, keys=names), "keys to be moved")
            self._keys.drop(names)
            self._create(values, whole=True)
            return
        clock = WaitClock(timeout)
        while any(key.is_spread for key in spread):
            if clock.over:
                raise TimeoutError(
                    f"worker {self._client.rank} has waited {timeout:g} s for the lowest rank to set the "
                    "optimizer, too: its rule needs whole keys, and that worker moves them"
                )
            clock.read()
            self._keys.drop(names)
            self._keys.wait_for(names)
            spread = [self._keys.find_or_raise(name) for name in names]
            time.sleep(_LOOK_AGAIN)


def _named(keys: tuple[Key, ...]) -> str:
    return f"key {keys[0]!r}" if len(keys) == 1 else f"{len(keys)} keys"
