"""The reads of one worker: its arrays are checked, filled while slices arrive, and converted at the end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from ....arrays.grouping import Group, Key
from ....arrays.sparse import RowSparseArray, trusted_rows
from ....devices.arrays import device_of
from ....kernels import cpu
from ....observe.counters import MOVING
from ...entry import Array, check_shape, dense_out, not_row_sparse, row_ids, sparse_outs
from ...outs import OutDeliveries, host_outs
from ..protocol.messages import RecordKind
from ..transport.native._streams import ExpectedRows
from .client import WorkerClient
from .gpu_on_demand import GpuOnDemand
from .key_directory import DistKey, KeyDirectory
from .operations import Finish, PartRequest
from .reads import ConsistentReads
from .replies import CollectRows, CollectTable, FillOuts
from .request_builder import read_requests, row_requests
from .shared_payloads import SharedPayloads

log = logging.getLogger("kvstore.dist")


class PullOperations:
    """Reads values, and has them written to their destinations.

    `reads` are those of a worker that does not take part in rounds; None where there are no rounds.
    """

    def __init__(
        self,
        client: WorkerClient,
        keys: KeyDirectory,
        memory: SharedPayloads,
        gpus: GpuOnDemand,
        reads: ConsistentReads | None,
    ) -> None:
        self._client, self._keys, self._memory = client, keys, memory
        self._gpus, self._reads = gpus, reads
        self._warned: set[Key] = set()

    def start_pull(self, groups: list[Group], ignore_sparse: bool, priority: int = 0) -> Finish:
        """Request the values after all earlier pushes; the returned function receives them."""
        later = OutDeliveries()
        wanted: list[tuple[DistKey, list[Array]]] = []
        requests: list[PartRequest] = []
        for key, outs in self._keys.in_order(groups):
            dense = [out for out in outs if not isinstance(out, RowSparseArray)]
            sparse = (
                sparse_outs(key, key.sparse, outs, ignore_sparse, self._warned, log)
                if len(dense) < len(outs)
                else []
            )
            if key.sparse and (dense or sparse):
                requests += self._table_requests(key, dense, sparse, later)
            elif dense:
                wanted.append((key, self.make_targets(key, dense, later)))
        later.defer_overlaps((key, [], outs) for key, outs in wanted)
        for key, outs in wanted:
            requests += read_requests(key, RecordKind.PULL, FillOuts(key, outs, self._memory))
        return self.start_read(requests, "a pull", priority, later)

    def start_rows(
        self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]], priority: int = 0
    ) -> Finish:
        """Request rows; the returned function receives them."""
        asked: list[tuple[DistKey, CollectRows]] = []
        for name, pairs in wanted:
            key = self._keys.find_or_raise(name)
            if not key.sparse:
                raise not_row_sparse(name)
            for out, ids in pairs:
                check_shape(key, out, "out")
                asked.append((key, CollectRows(key, out, row_ids(key, ids))))
        later = OutDeliveries()
        requests: list[PartRequest] = []
        expected: list[tuple[int, ExpectedRows]] = []
        direct = len(asked) == 1 or cpu.independent([([], [rows.block]) for _, rows in asked])
        for key, rows in asked:
            rows.begin(direct)
            for one in row_requests(key, rows.ids, rows):
                requests.append(one)
                if (there := rows.expected_rows(one.part, one.record.rows)) is not None:
                    expected.append((one.server, there))
            later.add(key.key, rows.deliver)
        return self._read_rows(requests, expected, priority, later)

    def _read_rows(
        self,
        requests: list[PartRequest],
        expected: list[tuple[int, ExpectedRows]],
        priority: int,
        later: OutDeliveries,
    ) -> Finish:
        """Read rows; expected rows that arrive over a stream are received at their destination."""
        if not expected:
            return self.start_read(requests, "a row_sparse_pull", priority, later)
        driver = self._client.driver
        placed = driver.expect(expected)
        try:
            finish = self.start_read(requests, "a row_sparse_pull", priority, later)
        except BaseException:
            driver.expect_no_more(placed)
            raise

        def finish_placed() -> None:
            try:
                finish()
            finally:
                driver.expect_no_more(placed)

        return finish_placed

    def fetch_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """Pull keys into new arrays, all in one call."""
        outs = [_empty_like(self._keys.find_or_raise(key)) for key in keys]
        self.start_pull([(key, [out]) for key, out in zip(keys, outs, strict=True)], ignore_sparse=False)()
        return outs

    def start_read(
        self, requests: list[PartRequest], what: str, priority: int = 0, later: OutDeliveries | None = None
    ) -> Finish:
        """Start a read; where there are rounds, each key is of one round."""
        if self._reads is None or self._client.in_step:
            finish: Finish = partial(self._client.finish, self._client.submit(requests, priority), what)
        else:
            finish = self._reads.start_reads(requests, what, priority)
        return finish if later is None else deliver_after(finish, later, self._client)

    def _table_requests(
        self, key: DistKey, dense: list[Any], sparse: list[RowSparseArray], later: OutDeliveries
    ) -> Iterable[PartRequest]:
        found = [dense_out(key, out) for out in dense]
        table = CollectTable(key, [array for array, _ in found], sparse)
        later.add(key.key, table.deliver)
        for _, deliver in found:
            if deliver is not None:
                later.add(key.key, deliver)
        return read_requests(key, RecordKind.PULL, table)

    # ------------------------------------------------------------------------------------------------- outs

    def make_writer(self, key: DistKey, pushed: list[Array], outs: list[Array]) -> FillOuts:
        """Return the writer of a pushpull's value to its outs."""
        in_place = len(outs) == len(pushed) == 1 and outs[0] is pushed[0]
        return FillOuts(key, outs, self._memory, in_place)

    def make_targets(self, key: DistKey, outs: list[Any], later: OutDeliveries) -> list[Array]:
        """Return arrays that a dense key's value is written to while it arrives."""
        if cpu.first_misfit(outs, key.like, True) < 0:
            return list(outs)
        direct, on_gpu = host_outs(key, outs, later)
        for out in on_gpu:
            later.add(key.key, partial(_send_filled, self._gpus.get_transfer().make_target(key, out), direct))
        if key.key in later and not direct:
            direct.append(np.empty(key.shape, key.dtype))
        return direct

    def check_outs(self, groups: list[Group]) -> None:
        """Check, before a push, that the pull after it will be valid."""
        for name, outs in groups:
            key = self._keys.find_or_raise(name)
            for out in outs:
                if device_of(out) is not None:
                    self._gpus.get_transfer().make_target(key, out)
                elif not isinstance(out, RowSparseArray):
                    dense_out(key, out)


def _empty_like(key: DistKey) -> Array | RowSparseArray:
    if not key.sparse:
        return np.empty(key.shape, key.dtype)
    rows = np.empty((0, *key.shape[1:]), key.dtype)
    return trusted_rows(rows, np.empty(0, np.int64), key.shape)


def deliver_after(finish: Finish, later: OutDeliveries, client: WorkerClient) -> Finish:
    """Return a function that ends an operation, and then converts values to other types and devices."""
    return partial(_finish_and_deliver, finish, later, client)


def _finish_and_deliver(finish: Finish, later: OutDeliveries, client: WorkerClient) -> None:
    finish()
    with client.counters.during(MOVING):
        later.deliver()


def _send_filled(send: Callable[[Array], None], filled: list[Array]) -> None:
    send(filled[0])
