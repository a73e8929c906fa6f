"""The pushes of one worker: checked before anything changes, counted, and sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ....arrays.grouping import Group
from ....arrays.sparse import RowSparseArray
from ....compression import Feedback
from ....devices.arrays import any_on_device
from ....kernels import cpu
from ....observe.counters import CONVERTING, MOVING
from ...entry import Array, dense_source, row_source, sparse_source
from ...update import check_floating
from ..protocol.messages import RecordKind
from ..protocol.payload_bytes import SHARED_BYTES
from .client import WorkerClient
from .consistent_rounds import PushCalls
from .gpu_on_demand import GpuOnDemand
from .key_directory import DistKey, KeyDirectory
from .operations import Finish, PartRequest, PendingOperation
from .optimizer import WorkerOptimizer
from .replies import FillOuts
from .request_builder import PushHeader, RequestBuilder

#: A dense key, its pushed values, and the writer of its new value, if that is requested.
DensePart = tuple[DistKey, list[Array], FillOuts | None]
DensePushes = list[tuple[DistKey, list[Array]]]
SparsePushes = list[tuple[DistKey, list[RowSparseArray]]]

_OPEN = 2  # incomplete rounds of a key into which a worker may push


class PushOperations:
    """Checks and sends the pushes of one worker; every push has the optimizer's version."""

    def __init__(
        self,
        client: WorkerClient,
        keys: KeyDirectory,
        slices: RequestBuilder,
        optimizer: WorkerOptimizer,
        gpus: GpuOnDemand,
    ) -> None:
        self.client, self.keys, self.slices = client, keys, slices
        self.optimizer, self.gpus = optimizer, gpus
        #: Codec and residuals, where pushes are packed.
        self.feedback: Feedback | None = None
        #: The number of calls that have pushed.
        self.made = 0
        #: Which keys were pushed in one call.
        self.calls = PushCalls()

    def start_push(self, groups: list[Group], priority: int = 0) -> Finish:
        """Send; the returned function waits until it is accepted."""
        dense, sparse = self.check_values(groups)
        self.client.check_writing()
        operation = self._send_call(RecordKind.PUSH, _without_outs(dense), sparse, priority)
        return partial(self.client.finish, operation, "a push")

    def start_plain(self, groups: list[Group]) -> Finish:
        """Send; no caller waits for small pushes, unless the third one into a key has to wait."""
        dense, sparse = self.check_values(groups)
        self.client.check_writing()
        small = not sparse and sum(key.nbytes for key, _ in dense) < SHARED_BYTES
        if small:  # copied, because the caller does not wait until they are sent
            dense = [(key, [value.copy() for value in values]) for key, values in dense]
        operation = self._send_call(RecordKind.PUSH, _without_outs(dense), sparse)
        if small and self.are_few_open(key for key, _ in dense):
            self.client.release_operation(operation)
            return _nothing
        return partial(self.client.finish, operation, "a push")

    def start_pushpull(
        self, fills: Sequence[DensePart], priority: int = 0, divisor: int = 1
    ) -> PendingOperation:
        """Send a pushpull of dense keys, as `check_values` returned them; values are divided on servers."""
        self.client.check_writing()
        return self._send_call(RecordKind.PUSHPULL, fills, [], priority, divisor)

    def are_few_open(self, keys: Iterable[DistKey]) -> bool:
        """Return whether servers accept these pushes at once, as far as this worker knows."""
        return all(key.pushes - self.client.complete_pushes(key.parts) <= _OPEN for key in keys)

    @property
    def call_place(self) -> int:
        """The number of calls of all workers together that this worker has made."""
        return self.made + self.client.barriers

    def next_stamps(self, keys: Iterable[DistKey]) -> list[int]:
        """Return the stamp of the next push of each key, if they are pushed in one call."""
        return self.optimizer.clock.stamps(key.key for key in keys)

    def stamps_of_call(self, dense: Sequence[DistKey], rows: Sequence[DistKey]) -> list[int]:
        """Return the stamps of a push of keys, some with rows.

        Dense keys precede tables. The order depends on the keys alone, since two workers may push an array
        and rows to the same key.
        """
        keys = [*dense, *rows]
        if not rows or len(keys) == 1:
            return self.next_stamps(keys)
        order = sorted(range(len(keys)), key=lambda at: (keys[at].sparse, keys[at].order))
        stamps = dict(zip(order, self.next_stamps(keys[at] for at in order), strict=True))
        return [stamps[at] for at in range(len(keys))]

    def count_push(self, keys: Sequence[DistKey]) -> None:
        """Count a push of keys; when it is sent, or nothing can prevent that any more."""
        if not keys:  # the push was refused
            return
        pushes: dict[Any, int] = {}
        for key in keys:
            pushes[key.key] = key.pushes = key.pushes + 1
            self.optimizer.clock.count_push(key.key)
        self.made += 1
        self.calls.note_call(pushes)

    def count_one(self, key: DistKey) -> None:
        """As `count_push`, of one key alone, in fewer steps: see `KVStore._run_quick`."""
        key.pushes += 1
        self.optimizer.clock.count_push(key.key)
        self.made += 1
        self.calls.note_call({key.key: key.pushes})

    def _send_call(
        self,
        kind: RecordKind,
        dense: Sequence[DensePart],
        sparse: SparsePushes,
        priority: int = 0,
        divisor: int = 1,
    ) -> PendingOperation:
        """Send a call, which counts once nothing can prevent its sending; before, nothing changes."""
        of_arrays, of_rows = [key for key, _, _ in dense], [key for key, _ in sparse]
        version = self.optimizer.version
        heads = iter([PushHeader(kind, version, stamp) for stamp in self.stamps_of_call(of_arrays, of_rows)])
        then: list[Callable[[], None]] = []
        requests: list[PartRequest] = []
        for key, values, outs in dense:
            if self.feedback is None:
                requests += self.slices.dense_requests(key, values, next(heads), outs, divisor)
            else:
                requests += self.slices.packed_requests(key, values, next(heads), outs, self.feedback, then)
        for key, rows in sparse:
            requests += self.slices.row_requests(key, rows, next(heads))
        return self.client.submit(requests, priority, partial(self._sent, [*of_arrays, *of_rows], then))

    def _sent(self, keys: list[DistKey], then: list[Callable[[], None]]) -> None:
        if then:
            with self.client.counters.during(CONVERTING):
                for pack in then:
                    pack()
        self.count_push(keys)

    # ----------------------------------------------------------------------------------------------- checks

    def check_values(self, groups: list[Group]) -> tuple[DensePushes, SparsePushes]:
        """Check all values of a push, before anything changes."""
        dense: DensePushes = []
        sparse: SparsePushes = []
        optimizer = self.optimizer.optimizer
        for key, values in self.keys.in_order(groups):
            check_floating(key, optimizer)
            if not values:
                continue
            if key.sparse or all(isinstance(value, RowSparseArray) for value in values):
                self._check_rows(key, values, dense, sparse)
            elif cpu.first_misfit(values, key.like) < 0:
                dense.append((key, values))
            elif any_on_device(values):
                with self.client.counters.during(MOVING):
                    dense.append((key, [self.gpus.get_transfer().fetch_sum(key, values)]))
            else:
                dense.append((key, [dense_source(key, value) for value in values]))
        if self.feedback is not None:
            for key, arrays in dense:
                self.feedback.check(key.key, arrays, key.dtype)
            for key, rows in sparse:
                self.feedback.check(key.key, rows, key.dtype)
        return dense, sparse

    def _check_rows(self, key: DistKey, values: list[Any], dense: DensePushes, sparse: SparsePushes) -> None:
        """Check the values of a table, or rows for a dense key."""
        if key.sparse:
            sparse.append((key, [row_source(key, value) for value in values]))
        elif key.takes_rows and self.feedback is None:  # a lazy rule does not change the other rows
            sparse.append((key, [sparse_source(key, value) for value in values]))
        else:
            dense.append((key, [dense_source(key, value) for value in values]))


def _without_outs(dense: DensePushes) -> list[DensePart]:
    return [(key, values, None) for key, values in dense]


def _nothing() -> None:
    """Do nothing: the operation was released."""
