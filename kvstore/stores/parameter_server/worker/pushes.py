"""What one worker pushes: checked before anything changes, counted, and sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from ....arrays.grouping import Group
from ....arrays.sparse import RowSparseArray
from ....compression import Feedback
from ....devices.arrays import any_on_device
from ....kernels import cpu
from ....observe.counters import MOVING
from ...entry import Array, dense_source, row_source, sparse_source
from ...update import check_floating
from ..protocol.messages import Kind
from ..protocol.payloads import SHARED_BYTES
from .client import Client
from .consistent_rounds import PushCalls
from .gpu_on_demand import GpuOnDemand
from .key_directory import DistKey, KeyDirectory
from .operations import Finish, Request
from .optimizer import WorkerOptimizer
from .replies import FillOuts
from .request_builder import PushHeader, RequestBuilder

DensePushes = list[tuple[DistKey, list[Array]]]
SparsePushes = list[tuple[DistKey, list[RowSparseArray]]]

_OPEN = 2  # rounds of a key into which a worker may have pushed and which are not complete


class Pushes:
    """Checks and sends the pushes of one worker; the optimizer's version goes with every push."""

    def __init__(
        self,
        client: Client,
        keys: KeyDirectory,
        slices: RequestBuilder,
        optimizer: WorkerOptimizer,
        gpus: GpuOnDemand,
    ) -> None:
        self.client, self.keys, self.slices = client, keys, slices
        self.optimizer, self.gpus = optimizer, gpus
        #: Codec and residuals, where pushes are packed.
        self.feedback: Feedback | None = None
        #: The highest number of pushes into any key; the schedule's time.
        self.clock = 0
        #: What was pushed together.
        self.calls = PushCalls()

    def start(self, groups: list[Group], priority: int = 0) -> Finish:
        """Send; what is left to do is to see it accepted."""
        dense, sparse = self.checked(groups)
        self.client.check_writing()
        operation = self.client.submit(self._requests(dense, sparse), priority)
        return partial(self.client.finish, operation, "a push")

    def start_plain(self, groups: list[Group]) -> Finish:
        """Send; small pushes are waited for by nobody, unless it is a third one that has to wait."""
        dense, sparse = self.checked(groups)
        self.client.check_writing()
        small = not sparse and sum(key.nbytes for key, _ in dense) < SHARED_BYTES
        if small:  # nobody waits until it has been sent
            dense = [(key, [value.copy() for value in values]) for key, values in dense]
        operation = self.client.submit(self._requests(dense, sparse))
        if small and self.are_few_open(key for key, _ in dense):
            self.client.let_go(operation)
            return _nothing
        return partial(self.client.finish, operation, "a push")

    def pushpull_requests(self, fills: Sequence[tuple[DistKey, list[Array], FillOuts]]) -> list[Request]:
        """Make the requests of a pushpull of dense keys, which `checked` has passed."""
        self.client.check_writing()
        requests = [r for key, values, outs in fills for r in self._dense(key, values, Kind.PUSHPULL, outs)]
        self.calls.note({key.key: key.pushes for key, _, _ in fills})
        return requests

    def are_few_open(self, keys: Iterable[DistKey]) -> bool:
        """Whether servers take these pushes at once, as far as is known."""
        return all(key.pushes - self.client.complete(key.parts) <= _OPEN for key in keys)

    def counted(self, keys: Sequence[DistKey]) -> list[int]:
        """Count a push of dense keys, which is sent another way; return the clock of each."""
        clocks, clock = [], self.clock
        for key in keys:
            key.pushes = pushes = key.pushes + 1
            clock = max(clock, pushes)
            clocks.append(clock)
        self.clock = clock
        self.calls.note({key.key: key.pushes for key in keys})
        return clocks

    def _requests(self, dense: DensePushes, sparse: SparsePushes) -> list[Request]:
        requests = [r for key, values in dense for r in self._dense(key, values, Kind.PUSH, None)]
        for key, rows in sparse:
            requests += self.slices.rows(key, rows, self._header(key, Kind.PUSH))
        self.calls.note({key.key: key.pushes for key, _ in (*dense, *sparse)})
        return requests

    def _dense(
        self, key: DistKey, values: list[Array], kind: Kind, outs: FillOuts | None
    ) -> Iterable[Request]:
        head = self._header(key, kind)
        if self.feedback is not None:
            return self.slices.packed(key, values, head, outs, self.feedback)
        return self.slices.dense(key, values, head, outs)

    def _header(self, key: DistKey, kind: Kind) -> PushHeader:
        """Count a push."""
        key.pushes += 1
        self.clock = max(self.clock, key.pushes)
        return PushHeader(kind, self.optimizer.version, self.clock)

    # ----------------------------------------------------------------------------------------------- checks

    def checked(self, groups: list[Group]) -> tuple[DensePushes, SparsePushes]:
        """Check everything that is pushed, before anything changes."""
        dense: DensePushes = []
        sparse: SparsePushes = []
        for key, values in self.keys.in_order(groups):
            check_floating(key, self.optimizer.updater)
            if not values:
                continue
            if key.sparse or all(isinstance(value, RowSparseArray) for value in values):
                self._check_rows(key, values, dense, sparse)
            elif cpu.first_misfit(values, key.like) < 0:
                dense.append((key, values))
            elif any_on_device(values):
                with self.client.counters.during(MOVING):
                    dense.append((key, [self.gpus.get().total(key, values)]))
            else:
                dense.append((key, [dense_source(key, value) for value in values]))
        if self.feedback is not None:
            for key, arrays in dense:
                self.feedback.check(key.key, arrays, key.dtype)
            for key, rows in sparse:
                self.feedback.check(key.key, rows, key.dtype)
        return dense, sparse

    def _check_rows(self, key: DistKey, values: list[Any], dense: DensePushes, sparse: SparsePushes) -> None:
        """Check what is pushed to a table, or rows that are pushed to a dense key."""
        if key.sparse:
            sparse.append((key, [row_source(key, value) for value in values]))
        elif key.cut_by_rows and self.feedback is None:  # a lazy rule leaves the other rows alone
            sparse.append((key, [sparse_source(key, value) for value in values]))
        else:
            dense.append((key, [dense_source(key, value) for value in values]))


def _nothing() -> None:
    """Nothing is left to do."""
