"""Keys and their first values: one worker writes them to the servers, the other workers wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from ....arrays.grouping import Group, Key
from ....arrays.sparse import RowSparseArray
from ....devices.arrays import any_on_device
from ....errors import KVStoreError
from ....optimizer import Optimizer
from ...entry import Array, check_same, first_value
from ..protocol import messages as m
from ..protocol.messages import RecordKind
from ..protocol.optimizer_states import needs_whole_keys
from .key_directory import DistKey, spec_of
from .operations import PartRequest
from .pulls import PullOperations
from .pushes import PushOperations
from .request_builder import PushHeader, slice_requests


class InitialValues:
    """Requests the placement of keys on servers, and writes their values."""

    def __init__(self, pushes: PushOperations, pulls: PullOperations) -> None:
        self._client, self._keys, self._slices = pushes.client, pushes.keys, pushes.slices
        self._optimizer, self._gpus, self._pulls = pushes.optimizer, pushes.gpus, pulls

    def init(self, groups: list[Group]) -> None:
        """Use the values of the lowest rank, and wait until all servers have them."""
        new = [(key, self._first_value(key, values)) for key, values in groups if values]
        self._client.check_writing()
        while missing := [(key, value) for key, value in new if not self._is_here(key, value)]:
            if self._client.member.is_initializer():
                self._create_keys(missing)
            else:
                self._keys.wait_for(tuple(key for key, _ in missing))
        self._keys.initialised.update(key for key, _ in new)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        known = [(found, values[0]) for key, values in groups if (found := self._keys.find(key)) is not None]
        there = {found.key for found, _ in known}
        self.init([(key, values) for key, values in groups if key not in there])
        self._client.check_writing()
        self._client.perform(
            [r for key, value in known for r in self._write_requests(key, value)], "new values"
        )
        self._keys.initialised.update(there)

    def _first_value(self, key: Key, values: list[Any]) -> Array | RowSparseArray:
        self._keys.check_kind(key)
        taken = key in self._keys.initialised
        if len(values) == 1 and not taken and any_on_device(values):
            values = [self._gpus.get_transfer().fetch_array(values[0], f"value of key {key!r}")]
        return first_value(key, values, taken)

    def _is_here(self, key: Key, value: Array | RowSparseArray) -> bool:
        """Return whether a key has its value on the servers; raise if it is another kind of key."""
        known = self._keys.get(key)
        if known is None:
            return False
        self._check_same(known, value)
        return True

    def _check_same(self, key: DistKey, value: Array | RowSparseArray) -> None:
        check_same(key, key.sparse, value, "in this job", self._client.rank)

    def _create_keys(self, new: list[tuple[Key, Array | RowSparseArray]]) -> None:
        """Request the placement of keys, each on one server if the rule needs it, and write their values."""
        whole = needs_whole_keys(self._optimizer.optimizer)
        specs = tuple(spec_of(key, value, whole) for key, value in new)
        try:
            entries = self._client.request_scheduler(
                partial(m.CreateKeysRequest, keys=specs), "the placement of keys"
            ).entries
            made = [DistKey(entry) for entry in entries]
            self._write_first_values(made, dict(new))
        except (KVStoreError, MemoryError) as error:
            self._tell_others(tuple(key for key, _ in new), error)
            raise
        self._keys.add_keys(made)

    def _write_first_values(self, made: list[DistKey], values: dict[Key, Array | RowSparseArray]) -> None:
        for key in made:
            self._check_same(key, values[key.key])
        # ASSIGN: an initializer that was lost may have written some of the values.
        fresh = [key for key in made if not key.entry.ready]
        requests = [request for key in fresh for request in self._write_requests(key, values[key.key])]
        self._client.perform(requests, "the first values of keys")
        if fresh:
            keys = tuple(key.key for key in fresh)
            self._client.request_scheduler(partial(m.KeysReadyRequest, keys=keys), "the first values of keys")

    def _tell_others(self, keys: tuple[Key, ...], error: Exception) -> None:
        """Have workers that wait for first values raise this error; a loss they know anyway."""
        name = type(error).__name__ if isinstance(error, KVStoreError) else KVStoreError.__name__
        rank, why = self._client.rank, str(error) or "it has too little memory"
        text = f"worker {rank} cannot store the first value of {_key_text(keys)}: {why}"
        with suppress(KVStoreError):
            drop = partial(m.DropKeysRequest, keys=keys, error=m.Failure(name, text))
            self._client.request_scheduler(drop, "an init that has failed")

    def _write_requests(self, key: DistKey, value: Array | RowSparseArray) -> Iterable[PartRequest]:
        head = PushHeader(RecordKind.ASSIGN)
        if isinstance(value, RowSparseArray):
            return self._slices.row_requests(key, [value], head)
        return self._slices.dense_requests(key, [value], head, None)

    def make_whole(self, optimizer: Optimizer) -> None:
        """Move each key to one server if its update needs all of it; all workers set this optimizer.

        The lowest rank writes the values there. Workers that have not reached this call yet read the keys in
        their old slices.
        """
        self._client.finish_released()
        keys = self._keys.all_keys()
        spread = [key for key in keys if key.is_spread and needs_whole_keys(optimizer, key.sparse)]
        if not spread:
            return
        self._client.check_writing()
        specs = tuple(msgspec.structs.replace(key.entry.spec, whole=True) for key in spread)
        what = (
            "the lowest rank to set the optimizer, too: its rule needs whole keys, and that worker moves them"
        )
        made = [
            DistKey(entry)
            for entry in self._client.request_scheduler(
                partial(m.CreateKeysRequest, keys=specs), what
            ).entries
        ]
        if coming := [key for key in made if not key.entry.ready]:
            self._move_keys(coming)
        self._keys.add_keys(made)

    def _move_keys(self, keys: list[DistKey]) -> None:
        """Write values of keys to their new slices, or report to waiting workers why they stay."""
        names = tuple(key.key for key in keys)
        try:
            values = self._read_and_seal(list(names))
            requests = [
                r for key, value in zip(keys, values, strict=True) for r in self._write_requests(key, value)
            ]
            self._client.perform(requests, "values of keys that move to one server")
        except KVStoreError as error:
            failure = m.Failure(type(error).__name__, f"worker {self._client.rank} cannot move keys: {error}")
            with suppress(KVStoreError):
                self._request_old_slices(names, RecordKind.UNSEAL)
                self._client.request_scheduler(
                    partial(m.KeysReadyRequest, keys=names, error=failure), "keys to stay"
                )
            raise
        self._client.request_scheduler(
            partial(m.KeysReadyRequest, keys=names), "keys to be moved to one server"
        )

    def _read_and_seal(self, names: list[Key]) -> list[Array | RowSparseArray]:
        """Read keys after the rounds that this worker has pushed into, and seal them against pushes."""
        self._pulls.fetch_all(names)  # the rounds are then complete
        self._request_old_slices(names, RecordKind.SEAL)
        return self._pulls.fetch_all(names)

    def _request_old_slices(self, names: Sequence[Key], kind: RecordKind) -> None:
        keys = [self._keys.find_or_raise(name) for name in names]
        self._client.perform([r for key in keys for r in slice_requests(key, kind)], "keys to be moved")


def _key_text(keys: tuple[Key, ...]) -> str:
    return f"key {keys[0]!r}" if len(keys) == 1 else f"{len(keys)} keys"
