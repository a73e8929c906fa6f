"""Reads of keys on servers, each of one round: also after a loss, and during rounds of other workers.

A worker that takes part in rounds reads the result of its own last push, which is the same round in all
slices. After a loss the slices keep their rounds, and a key is read after the last round that is whole in all
keys of the same push; servers store values for one more round for this purpose. A worker that has joined, or
has not begun, reads while rounds proceed, and requests slices again whose round is behind that of others.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from ....arrays.grouping import Key
from ....errors import KVStoreError, TimeoutError
from ..protocol.messages import OF_ROUND, Record, RecordKind
from .client import WorkerClient
from .consistent_rounds import PushCalls, slices_behind
from .key_directory import DistKey, KeyDirectory
from .operations import Finish, PartRequest, PendingOperation


class ConsistentReads:
    """Starts and finishes reads of one worker; slices have `timeout` seconds to reach one round.

    `calls` are the pushes of this worker, by call.
    """

    def __init__(self, client: WorkerClient, keys: KeyDirectory, calls: PushCalls, timeout: float) -> None:
        self._client, self._keys, self._timeout = client, keys, timeout
        self._calls = calls
        #: After a loss: the last round of each slice, which does not change.
        self._last: dict[int, int] = {}

    def start_reads(self, requests: list[PartRequest], what: str, priority: int) -> Finish:
        """Send; the returned function waits.

        Raises PeerLostError where, after a loss, a key has no whole round that its servers have stored; and,
        if no error has reported the loss to the caller, where a push of this worker into a key had no effect.
        """
        broken = self._client.member.is_broken
        if broken:
            requests = self._as_of_whole(requests)
        operation = self._client.submit(requests, priority)

        def finish() -> None:
            if broken:
                self._finish_past(requests, operation, what)
            else:
                self._finish_together(requests, operation, what)

        return finish

    # ------------------------------------------------------------------------------------------ after a loss

    def _as_of_whole(self, requests: list[PartRequest]) -> list[PartRequest]:
        homes = self._keys.keys_by_slice()
        keys = list({homes[one.part.id].key: None for one in requests})
        self._learn_rounds(self._calls.pushed_together(keys))
        rounds = {key.key: self._known_rounds(key) for key in self._keys}
        whole = {key: self._calls.whole_round(key, rounds) for key in keys if rounds[key]}
        if not self._client.told_of_loss and any(self._is_ahead(key, last) for key, last in whole.items()):
            raise self._client.lost_peer()
        return [self._of_round(one, homes[one.part.id], whole) for one in requests]

    def _is_ahead(self, name: Key, last: int) -> bool:
        """Return whether this worker has pushed into a later round of a key."""
        key = self._keys.get(name)
        return key is not None and key.pushes > last

    def _learn_rounds(self, names: Iterable[Key]) -> None:
        """Request the last rounds of slices, except on servers that are lost."""
        lost = self._client.member.lost_servers()
        keys = [key for name in names if (key := self._keys.get(name)) is not None]
        new = [p for key in keys for p in key.parts if p.id not in self._last and p.server not in lost]
        ask = [
            PartRequest(part.server, Record(RecordKind.LAST_ROUND, part.id, 0), (), None, part)
            for part in new
        ]
        self._client.perform(ask, "the last rounds of keys")
        self._last.update({part.id: self._client.complete_pushes([part]) for part in new})

    def _known_rounds(self, key: DistKey) -> list[int]:
        return [self._last[part.id] for part in key.parts if part.id in self._last]

    def _of_round(self, request: PartRequest, key: DistKey, whole: Mapping[Key, int]) -> PartRequest:
        """Request a slice as it was after the whole round."""
        last, wanted = self._last.get(request.part.id), whole.get(key.key)
        if last is None or wanted is None or last == wanted:
            return request
        if last != wanted + 1:
            raise self._rounds_differ(key, wanted, request.record.kind)
        return request._replace(record=request.record._replace(round=wanted, flags=OF_ROUND))

    def _finish_past(self, requests: list[PartRequest], operation: PendingOperation, what: str) -> None:
        try:
            self._client.finish(operation, what)
        except KVStoreError as error:
            if type(error) is not KVStoreError or not any(one.record.flags == OF_ROUND for one in requests):
                raise
            past = next(one for one in requests if one.record.flags == OF_ROUND)
            key = self._keys.keys_by_slice()[past.part.id]
            raise self._rounds_differ(key, past.record.round, past.record.kind) from error

    def _rounds_differ(self, key: DistKey, wanted: int, kind: RecordKind) -> KVStoreError:
        what = "optimizer states" if kind == RecordKind.FETCH_STATE else "value"
        rounds = ", ".join(map(str, sorted(set(self._known_rounds(key)))))
        return self._client.lost_peer(
            f"the {what} of key {key.key!r} cannot be read: its slices are of round {rounds}, the last round "
            f"that is whole is {wanted}, and servers have kept no {what} of that; start the job again from "
            "what was saved last"
        )

    # ------------------------------------------------------------------------------- during other rounds

    def _finish_together(self, requests: list[PartRequest], operation: PendingOperation, what: str) -> None:
        """Wait, and repeat requests of slices that are behind, until the slices of each key agree."""
        end = time.monotonic() + self._timeout
        self._client.finish(operation, what)
        homes = self._keys.keys_by_slice()
        rounds: dict[int, int] = {}
        asked = requests
        while True:
            came = {asked[at].part.id: round for at, round in operation.rounds.items()}
            rounds.update(came)
            asked = self._requests_behind(requests, rounds, homes)
            if not asked:
                return
            if time.monotonic() > end:
                raise self._never_together(asked[0], rounds, homes)
            operation = self._client.submit(asked)
            try:
                self._client.finish(operation, what)
            except TimeoutError as error:
                raise self._never_together(asked[0], rounds, homes) from error

    def _requests_behind(
        self, requests: list[PartRequest], rounds: Mapping[int, int], homes: Mapping[int, DistKey]
    ) -> list[PartRequest]:
        by_key: dict[Key, list[PartRequest]] = {}
        for one in requests:
            if one.part.id in rounds:
                by_key.setdefault(homes[one.part.id].key, []).append(one)
        found: list[PartRequest] = []
        for group in by_key.values():
            there = [self._client.round_of(one.part, rounds[one.part.id]) for one in group]
            last = max(there)
            found += [
                group[at]._replace(record=group[at].record._replace(round=last))
                for at in slices_behind(there)
            ]
        return found

    def _never_together(
        self, request: PartRequest, rounds: Mapping[int, int], homes: Mapping[int, DistKey]
    ) -> TimeoutError:
        key = homes[request.part.id]
        there = sorted({rounds[part.id] for part in key.parts if part.id in rounds})
        return TimeoutError(
            f"key {key.key!r} could not be read for {self._timeout:g} s: its slices are of rounds "
            f"{', '.join(map(str, there))}, and did not reach the same round while other workers pushed; "
            "read it when they are done"
        )
