"""Stores on servers to which each host pushes one sum: verbs use the memory of the host.

A sum is made in the order of the ranks within each host, then in the order of the hosts by their lowest
ranks. The pushes of the workers of a host are summed in its region (`region.py`), the opener of a round there
sends it to the servers (`carrier.py`), and all workers read the answer there. All other work is that of the
flat store.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ... import engine
from ...arrays.grouping import Group, Key
from ...arrays.sparse import RowSparseArray
from ...compression import Codec, Feedback
from ...errors import (
    ArrayError,
    FencedError,
    KeyNotFoundError,
    KVStoreError,
    PeerLostError,
)
from ...observe.native._observe import Counters
from ...optimizer import Optimizer, Updater
from ...settings.definitions import is_side
from ...settings.options import StoreConfig
from ..entry import Array
from ..outs import OutDeliveries
from ..parameter_server.protocol.failures import as_exception
from ..parameter_server.protocol.losses import host_is_gone
from ..parameter_server.protocol.messages import Failure, Slice
from ..parameter_server.worker.backend import DistBackend
from ..parameter_server.worker.client import WorkerClient
from ..parameter_server.worker.key_directory import DistKey
from ..parameter_server.worker.pulls import deliver_after
from ..parameter_server.worker.pushes import DensePushes, SparsePushes
from ..protocol import Backend, Kind
from ..shared.native import _shared as shm
from ..shared.native.registration import OtherProcesses, RegionPlace
from ..shared.undelivered import UndeliveredResults
from .carrier import HostCarrier
from .packing import HostFeedback
from .region import Handle, HostRegion
from .rows import cut_rows

if TYPE_CHECKING:
    from ...optimizer.states import StatesContent

log = logging.getLogger("kvstore.ps")

_F32 = np.dtype(np.float32)

Finish = Callable[[], None]


def by_hosts(config: StoreConfig, flat: DistBackend) -> Backend:
    """Return the store to which hosts push; or the flat one, if no host has workers that could sum first."""
    if not flat.synchronous:
        log.info(
            "hierarchy=%r: a store without rounds stays flat, each push counts by itself", config.hierarchy
        )
        return flat
    return HierarchyBackend(config, flat) if flat.client.member.seats else flat


class HostProcesses(OtherProcesses):
    """The workers of a host, by the scheduler's reports while no thread receives them."""

    def __init__(self, client: WorkerClient, ranks: list[int]) -> None:
        self._client, self._ranks, self.dead_after = client, ranks, client.dead_after

    def check(self) -> None:
        """Raise an error if the job is broken, or this worker is not in it."""
        self._client.driver.glance()
        self._client.driver.check_alive()
        if self._client.member.is_broken:
            raise self._client.lost_peer()

    def lost(self) -> set[int]:
        """Return the places of the workers that are not members."""
        view = self._client.member.view
        there = {one.rank for one in view.members} if view is not None else set(self._ranks)
        return {place for place, rank in enumerate(self._ranks) if rank not in there}

    def check_begun(self, begun: bool) -> None:
        """Raise an error if this worker has returned, and no worker of its host knows its rounds.

        The scheduler refuses it, too, once it knows of all these losses.
        """
        welcome = self._client.member.welcome
        if welcome is not None and welcome.returned and not begun:
            raise as_exception(host_is_gone(self._client.rank))


_ALL = (1 << 64) - 1  # a mask of all workers of the host


class HierarchyBackend(Backend):
    """See `kvstore.stores.protocol.Backend`; `flat` is the store without hosts."""

    begins_async = True
    waits_concurrently = True
    locks_keys = True
    can_compress = True
    has_quick_push_and_pull = True
    no_steps = "with hierarchy='host' each part of a key is carried by itself; use hierarchy='flat'"
    logger = "kvstore.ps"

    def __init__(self, config: StoreConfig, flat: DistBackend) -> None:
        self._config, self._flat, self._client = config, flat, flat.client
        self.rank, self.num_workers, self.local_rank = flat.rank, flat.num_workers, flat.local_rank
        seats = self._client.member.seats
        self._ranks = [rank for rank in sorted(seats) if seats[rank] == seats[self.rank]]
        self._parts: dict[Key, Slice] = {}
        self._slots: dict[Key, tuple[DistKey, list[Handle]]] = {}
        self._known = flat.directory.known
        #: Keys with a value in the host's memory that is as new as this worker can know.
        self._fresh: set[Key] = set()
        self._from_servers = UndeliveredResults()  # reads from servers, unknown to the region
        self._pid = os.getpid()
        self._lost = False  # a loss was reported to the caller
        self._carrier: HostCarrier | None = None
        try:
            others = HostProcesses(self._client, self._ranks)
            self._region = HostRegion(
                config,
                self._host_place(),
                self._ranks,
                self._check_membership,
                others,
                self._client.watch_scheduler,
            )
            self._client.before_leaving = partial(_declare_lost, weakref.ref(self._region))
            self._carrier = HostCarrier(self._client, self._region, self._parts, self._settings_at)
        except BaseException as error:
            self._leave_at_start(error)
            raise
        _stores.add(self)

    def _leave_at_start(self, error: BaseException) -> None:
        """Leave the job if the workers of the host have not met.

        Report a lost worker if that is the cause.
        """
        client = self._client
        try:
            raises = self._config.on_peer_loss == "raise"
            if type(error) is KVStoreError and raises and not client.has_failed:
                client.hear_of_loss()
                raise client.lost_peer() from error
        finally:
            self._flat.abandon()

    def _host_place(self) -> RegionPlace:
        """Return the place of this worker among the workers of its host."""
        return RegionPlace(*self._client.host_job, self._ranks.index(self.rank), len(self._ranks))

    def observe(self, counters: Counters) -> None:
        """Count the traffic with the servers; from now on their messages are received."""
        self._flat.observe(counters)
        if self._carrier is not None:
            self._carrier.start()

    def names(self) -> dict[int, str]:
        """Return the key of each slice."""
        return self._flat.names()

    def describe(self) -> str:
        """Describe servers and scheduler, and the workers that sum first with this worker."""
        together = ", ".join(map(str, self._ranks))
        return f"{self._flat.describe()}, workers {together} of this host sum first"

    def _check_membership(self) -> None:
        """Raise an error if waits in the host's memory must end."""
        client = self._client
        client.driver.check_alive()
        if client.member.is_broken:
            raise client.lost_peer()
        if self._carrier is not None:
            self._carrier.check()

    def _check_writing(self) -> None:
        """Raise an error unless this worker may push; after a loss the scheduler is asked, too."""
        if self._lost:
            self._client.hear_of_loss()
        self._noting_loss(self._check_membership)

    # -------------------------------------------------------------------------------------------- slices

    def _slice_handles(self, key: DistKey, first: bool = False) -> list[Handle]:
        """Return the keys of the slices in the host's memory, made if no worker of the host has made them.

        `first`: all workers of the host call this, and the lowest makes the keys.
        """
        known = self._slots.get(key.key)
        if known is not None and known[0] is key:
            return known[1]
        names = _slice_names(key)
        for part, name in zip(key.parts, names, strict=True):
            self._parts[name] = part
            self._region.rows.note_slice(name, key, part)
            if first and self._region.find(name) is None:
                self._region.wait_for(name)
            if self._region.find(name) is None:
                self._copy_from_servers([key])
        handles = [handle for name in names if (handle := self._region.find(name)) is not None]
        if (
            known is not None
            and known[1] != handles
            and self._carrier is not None
            and self._region.is_lowest()
        ):
            self._carrier.packing.move_residuals(
                known[1], handles
            )  # before this worker pushes: so before any sum
        self._slots[key.key] = key, handles
        return handles

    def _copy_from_servers(self, keys: list[DistKey]) -> None:
        """Copy the values of keys from the servers to the host's memory; tables stay on the servers."""
        for name in (name for key in keys if key.sparse for name in _slice_names(key)):
            self._region.add_table(name)
        keys = [key for key in keys if not key.sparse]
        values = self._flat.fetch_all([key.key for key in keys])
        for key, value in zip(keys, values, strict=True):
            flat = cast("Array", value).reshape(-1)
            for part, name in zip(key.parts, _slice_names(key), strict=True):
                self._region.add(name, flat[part.start : part.stop])

    def _cut_arrays(self, key: DistKey, handles: list[Handle], arrays: list[Array]) -> list[Group]:
        """Cut arrays of a key at its slices."""
        flat = [array.reshape(-1) for array in arrays]
        parts = zip(key.parts, handles, strict=True)
        return [(handle.key, [one[part.start : part.stop] for one in flat]) for part, handle in parts]

    # --------------------------------------------------------------------------------------------- verbs

    def init(self, groups: list[Group]) -> None:
        """Use the values of the lowest rank, and wait until servers and host have them."""
        self._check_writing()
        self._flat.init(groups)
        with contextlib.suppress(KeyNotFoundError):  # another worker has moved them: the push finds them
            keys = [self._flat.directory.find_or_raise(key) for key, values in groups if values]
            if self._region.is_lowest():
                self._copy_from_servers(
                    [key for key in keys if not all(map(self._region.find, _slice_names(key)))]
                )
            for key in keys:
                self._noting_loss(partial(self._slice_handles, key, first=True))

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        self._check_writing()
        self._region.complete_all_pushed()
        self._fresh.clear()
        self._flat.assign(groups)

    def discard(self, keys: list[Key]) -> None:
        """Let this process initialise the keys again; other workers may have them already."""
        self._flat.discard(keys)

    def push(self, groups: list[Group]) -> None:
        """Sum within the host; the last worker to arrive sends the sum."""
        self._start_push(groups, None)()

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Wait for the rounds that this worker has pushed into, and copy the values."""
        self._start_pull(groups, ignore_sparse, None)()

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Push, and receive the result."""
        self._start_pushpull(groups, outs, None)()

    def quick_pushpull(self, key: Key, value: Any, out: Any) -> bool | Finish:
        """Push and pull one small dense key with plain arrays."""
        found = self._quick_slot(key)
        return found and self._pushed_quickly(*found, value, value if out is None else out)

    def quick_push(self, key: Key, value: Any) -> bool | Finish:
        """As `quick_pushpull`, for a push."""
        found = self._quick_slot(key)
        return found and self._pushed_quickly(*found, value, None)

    def quick_pull(self, key: Key, out: Any) -> bool | Finish:
        """As `quick_pushpull`, for a pull."""
        found = out is not None and key in self._fresh and self._quick_slot(key)
        if not found or (call := shm.quick_call(found[1], found[0].like, None, out)) is None:
            return False
        return partial(self._finish_quickly, call, True)

    def _quick_slot(self, key: Key) -> tuple[DistKey, Handle] | Literal[False]:
        """Find a key of one slice; False: none, or the call may raise an error or ask the servers.

        Written in one piece, without properties: see `KVStore._run_quick`.
        """
        client, known = self._client, self._slots.get(key)
        driver, view = client.driver, client.member.view
        if known is None or known[0] is not self._known.get(key) or len(known[1]) != 1:
            return False
        if driver.closed or driver.failure is not None or self._carrier is None or self._carrier.error:
            return False
        waits = self._region.waits
        if self._lost or view is None or view.broken or client.joined or waits.joined or waits.rejoining:
            return False
        return known[0], known[1][0]

    def _can_push(self, key: DistKey) -> bool:
        """Return whether arrays of a key's type can be pushed, with this optimizer and this codec."""
        return self.feedback is None and (self.updater is None or key.dtype.kind not in "iu")

    def _pushed_quickly(self, key: DistKey, handle: Handle, value: Any, out: Any) -> bool | Finish:
        """Arrive; the returned function waits. False: nothing has happened."""
        before = handle.arrived
        if value is None or (key.dtype is not _F32 and not self._can_push(key)):
            return False
        if handle.complete + 1 < before:  # the stamp of the round before the last is not sent yet
            return False
        pushes, round = self._flat.pushes, before + 1
        shm.note_stamp(handle, round, pushes.next_stamps([key])[0])
        try:
            call = shm.quick_call(handle, key.like, value, out)
        finally:
            if handle.arrived > before:
                pushes.count_one(key)
                self._fresh.add(key.key)
        return call is not None and partial(self._finish_quickly, call, out is not None)

    def _finish_quickly(self, call: shm.Call, receives: bool) -> None:
        done = receives and call.finish()
        if not done and receives and call.opens and self._carrier is not None:
            done = self._carrier.carry_alone(call)
        if not done:
            self._noting_loss(partial(self._region.finish, call, receives))
        self._client.counters.end_rounds(call.handle.newly_complete())

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Finish:
        """Arrive in the host's memory at once; the returned function waits."""
        starts: dict[str, Callable[..., Finish]] = {
            "push": self._start_push,
            "pull": self._start_pull,
            "pushpull": self._start_pushpull,
            "row_sparse_pull": self._start_rows,
        }
        start = starts.get(verb)
        return super().begin(verb, arguments, priority) if start is None else start(*arguments, priority)

    def is_clear(self, verb: str, keys: list[Key]) -> bool:
        """Return whether a push of the keys has memory, and no result of them is still to be delivered."""
        if verb in ("push", "pushpull") and self._from_servers.has_any(keys):
            return False
        return self._region.is_clear(verb, self._region_keys(keys))

    def wait_for_free_slot(self, verb: str, keys: list[Key]) -> None:
        """Deliver results, and wait for rounds, that the next push of the keys would overwrite."""
        if verb in ("push", "pushpull"):
            self._from_servers.deliver_keys(keys)
        self._noting_loss(partial(self._region.wait_for_free_slot, verb, self._region_keys(keys)))

    def _region_keys(self, keys: list[Key]) -> list[Key]:
        """Return the keys of the region for keys that were used here."""
        return [handle.key for key in keys if key in self._slots for handle in self._slots[key][1]]

    def _start_push(self, groups: list[Group], priority: int | None) -> Finish:
        dense, sparse = self._check_groups(groups)
        cut = [
            one for key, values in dense for one in self._cut_arrays(key, self._slice_handles(key), values)
        ]
        cut += [one for key, rows in sparse for one in cut_rows(key, self._slice_handles(key), rows)]
        with self._note_arrivals([key for key, _ in dense], [key for key, _ in sparse]):
            return self._begin_in_region("push", (cut,), priority)

    def _start_pull(self, groups: list[Group], ignore_sparse: bool, priority: int | None) -> Finish:
        self._client.driver.check_alive()
        directory = self._flat.directory
        sparse = any(isinstance(out, RowSparseArray) for _, outs in groups for out in outs)
        near = [(key, outs) for key, outs in groups if key in self._fresh and not self._reads_apart and outs]
        if sparse or len(near) < len(groups):
            read = partial(self._pull_from_servers, groups, ignore_sparse)
            return (
                read if priority is None else self._from_servers.note_read([key for key, _ in groups], read)
            )
        later = OutDeliveries()
        wanted: list[tuple[DistKey, list[Array], list[Array]]] = [
            (key, [], self._flat.pulls.make_targets(key, outs, later))
            for key, outs in directory.in_order(near)
        ]
        later.defer_overlaps(wanted)
        cut = [
            one for key, _, outs in wanted for one in self._cut_arrays(key, self._slice_handles(key), outs)
        ]
        begun = self._begin_in_region("pull", (cut, ignore_sparse), priority)
        return deliver_after(partial(self._end_operation, begun, near), later, self._client)

    @property
    def _reads_apart(self) -> bool:
        """Return whether this worker's reads are no longer those of the host's rounds."""
        return self._lost or self._client.member.is_broken or self._client.joined

    def _pull_from_servers(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Read keys from the servers: other workers may have written them, or there was a loss."""
        read = [
            key
            for key, outs in groups
            if not (ignore_sparse and all(isinstance(out, RowSparseArray) for out in outs))
        ]
        self._complete_rounds(read)
        self._flat.pull(groups, ignore_sparse)

    def _complete_rounds(self, keys: list[Key] | None) -> None:
        """Complete the rounds that this worker has pushed into: of these keys, or of all."""
        if self._reads_apart:
            if self._lost and not self._client.joined:
                self._client.hear_of_loss()
        elif keys is None:
            self._noting_loss(self._region.complete_all_pushed)
        else:
            handles = [handle for key in keys if key in self._slots for handle in self._slots[key][1]]
            self._noting_loss(partial(self._region.complete_rounds, handles))
            self._count_rounds(keys)

    def _start_pushpull(self, groups: list[Group], outs: list[Group] | None, priority: int | None) -> Finish:
        dense, sparse = self._check_groups(groups)
        targets = dict(groups if outs is None else outs)
        if sparse or set(targets) != {key.key for key, _ in dense}:
            self._flat.pulls.check_outs(list(targets.items()))
            self._start_push(groups, priority)()
            return self._start_pull(
                [(key, arrays) for key, arrays in targets.items() if arrays], True, priority
            )
        later = OutDeliveries()
        wanted = [
            (key, values, self._flat.pulls.make_targets(key, targets[key.key], later))
            for key, values in dense
        ]
        later.defer_overlaps(wanted)
        pushed, filled = [], []
        for key, values, into in wanted:
            handles = self._slice_handles(key)
            pushed += self._cut_arrays(key, handles, values)
            filled += self._cut_arrays(key, handles, into)
        with self._note_arrivals([key for key, _ in dense]):
            begun = self._begin_in_region("pushpull", (pushed, filled), priority)
        return deliver_after(partial(self._end_operation, begun, groups), later, self._client)

    def _end_operation(self, finish: Finish, groups: list[Group]) -> None:
        """Finish an operation, and count its rounds, which are then complete."""
        finish()
        self._count_rounds([key for key, _ in groups])

    def _count_rounds(self, keys: Iterable[Key]) -> None:
        """Count the complete rounds of keys that this worker has pushed into."""
        handles = [handle for key in keys if key in self._slots for handle in self._slots[key][1]]
        self._client.counters.end_rounds(sum(handle.newly_complete() for handle in handles))

    def _check_groups(self, groups: list[Group]) -> tuple[DensePushes, SparsePushes]:
        """Check all pushed values before any change."""
        checked = self._flat.pushes.check_values(groups)
        self._check_writing()
        return checked

    @contextlib.contextmanager
    def _note_arrivals(self, dense: list[DistKey], rows: Sequence[DistKey] = ()) -> Iterator[None]:
        """Record the stamps of a push, and count it for the keys at which this worker has then arrived."""
        keys = [*dense, *rows]
        self._count_rounds([key.key for key in keys])
        before = [self._count_arrivals(key) for key in keys]
        for key, stamp in zip(keys, self._flat.pushes.stamps_of_call(dense, rows), strict=True):
            for handle in self._slice_handles(key):
                shm.note_stamp(handle, handle.arrived + 1, stamp)
        try:
            yield
        except BaseException as error:
            self._give_up_half(keys, sum(before), error)
            raise
        finally:
            pushed = [key for key, was in zip(keys, before, strict=True) if self._count_arrivals(key) > was]
            self._flat.pushes.count_push(pushed)
            self._fresh.update(key.key for key in pushed if not key.sparse)

    def _give_up_half(self, keys: list[DistKey], before: int, error: BaseException) -> None:
        """Leave the job if a push has reached some slices only: no worker may wait for the others."""
        arrived = sum(map(self._count_arrivals, keys)) - before
        if 0 < arrived < sum(len(self._slice_handles(key)) for key in keys) and not self._client.has_failed:
            self._client.give_up_half("a push", error)

    def _count_arrivals(self, key: DistKey) -> int:
        """Count this worker's arrivals at the slices of a key."""
        return sum(handle.arrived for handle in self._slice_handles(key))

    def _settings_at(self, handle: Handle, round: int) -> tuple[int, int]:
        """Return version and stamp of a round of this host; see `carrier.Settings`."""
        if is_side(handle.key):
            return 0, 0
        return shm.num_update(self._region.job), shm.stamp(handle, round, _ALL)

    def _begin_in_region(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Finish:
        """Begin an operation in the host's memory; the returned function waits."""
        return partial(
            self._noting_loss, self._noting_loss(partial(self._region.begin, verb, arguments, priority))
        )

    def _noting_loss(self, run: Callable[[], Any]) -> Any:
        """Run a wait in the host's memory; record that a loss is reported to the caller, perhaps its own."""
        try:
            return run()
        except PeerLostError as error:
            self._lost = True
            if (error.role, error.rank) == ("worker", self.rank):
                raise FencedError(f"worker {self.rank} was declared lost after a long silence") from error
            raise
        except FencedError as error:
            if self._region.is_fenced and not self._client.has_failed:  # its host was first: notify the job
                self._client.leave_as_lost(Failure("FencedError", str(error)))
            raise

    def _start_rows(
        self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]], priority: int | None
    ) -> Finish:
        read = partial(self.row_sparse_pull, wanted)
        return read if priority is None else self._from_servers.note_read([key for key, _ in wanted], read)

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Read rows from the servers, after the rounds that this worker has pushed into."""
        self._complete_rounds([key for key, _ in wanted])
        self._flat.row_sparse_pull(wanted)

    # ------------------------------------------------------------------------------------------- updates

    @property
    def updater(self) -> Updater | None:
        """The optimizer, if there is one; its states are on the servers."""
        return self._flat.updater

    @property
    def feedback(self) -> Feedback | None:
        """The codec, if sums of hosts are compressed; the residuals are the host's."""
        return self._flat.feedback

    def set_updater(self, updater: Any) -> None:
        """Return to plain sums; servers run no functions of a worker."""
        self._between_rounds(partial(self._flat.set_updater, updater))

    def set_compression(self, codec: Codec) -> None:
        """Pack the sums that this host sends; all of its workers set the same codec."""
        assert self._carrier is not None
        self._complete_rounds(None)
        self._carrier.packing.set(codec)
        self._flat.pushes.feedback = HostFeedback(codec)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer; the first worker installs it, and the others must pass an equal one."""
        self._between_rounds(partial(self._flat.set_optimizer, optimizer))

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer, from this worker's next push of each key on."""
        self._between_rounds(partial(self._flat.configure, changes))

    def _between_rounds(self, change: Callable[[], None]) -> None:
        """Change settings after the rounds that this worker has pushed into; carriers then use them."""
        self._check_writing()
        self._complete_rounds(None)
        change()
        shm.raise_num_update(self._region.job, self._flat.pushes.optimizer.version)

    def gather_states(self) -> Updater:
        """Fetch the optimizer's states from the servers."""
        self._complete_rounds(None)
        return self._flat.gather_states()

    def adopt_states(self, content: StatesContent) -> None:
        """Replace the optimizer's states, for all workers."""
        self._between_rounds(partial(self._flat.adopt_states, content))

    def follow_states(self, content: StatesContent) -> None:
        """Agree with the servers on the settings and the update counts that another worker has loaded."""
        self._between_rounds(partial(self._flat.follow_states, content))

    # ---------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """Return all keys in the order of their init."""
        return self._flat.keys()

    def view(self, key: Key) -> Array | RowSparseArray:
        """Raise an error: the servers have the value."""
        return self._flat.view(key)

    def fetch(self, key: Key) -> Array | RowSparseArray:
        """Pull the value of a key."""
        return self.fetch_all([key])[0]

    def fetch_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """Pull the values of all keys in one call."""
        self._complete_rounds(keys)
        return self._flat.fetch_all(keys)

    def kind(self, key: Key) -> Kind:
        """Return kind, type and shape of a key."""
        return self._flat.kind(key)

    def empty(self, key: Key) -> Array:
        """Return a new array in the host's memory, which a push does not copy."""
        found = self._flat.directory.find_or_raise(key)
        if found.sparse:
            raise ArrayError(f"key {key!r} is row-sparse; empty makes dense arrays")
        return self._region.new_memory(found.like)

    def key_templates(self) -> dict[Key, Array]:
        """Return for each key an array of its shape and type that needs no memory."""
        return self._flat.key_templates()

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Return the bytes of each key on each server."""
        return self._flat.placement()

    def num_dead_nodes(self, timeout: float) -> int:
        """Count the processes that are lost, or sent the scheduler no heartbeat for `timeout` seconds."""
        return self._flat.num_dead_nodes(timeout)

    # ------------------------------------------------------------------------------------------- the job

    def barrier(self) -> None:
        """Wait until every member has reached the barrier."""
        self._count_rounds(self._fresh)
        self._fresh.clear()
        self._check_writing()
        if self._client.joined:
            self._flat.barrier()
        else:
            newest = self._client.barrier_of_host(self._noting_loss(self._region.meet_at_barrier))
            self._flat.pushes.optimizer.learn_all(newest)
        shm.raise_num_update(self._region.job, self._flat.pushes.optimizer.version)

    def side(self) -> HierarchyBackend:
        """Return this store for side keys, which have separate names in the host's memory."""
        side = copy.copy(self)
        side._flat = self._flat.side()
        side._known, side._slots = side._flat.directory.known, {}
        side._fresh, side._from_servers = set(), UndeliveredResults()
        return side

    def expects(self, rank: int) -> bool:
        """Return the answer of the flat store."""
        return self._flat.expects(rank)

    def join(self) -> None:
        """Let rounds and barriers no longer wait for this worker."""
        self._check_writing()
        self._complete_rounds(None)
        if self._carrier is not None:
            self._carrier.hand_in_rest()
        self._region.stop_taking_part()
        self._flat.join()

    def command(self, head: int, body: str) -> None:
        """Send a command to every server, and wait until all have it."""
        self._flat.command(head, body)

    def abandon(self) -> None:
        """Leave the job as a lost worker."""
        self._leave_job(lost=True)

    def close(self) -> None:
        """Leave the job."""
        self._leave_job(lost=False)

    def _leave_job(self, lost: bool) -> None:
        if self not in _stores or os.getpid() != self._pid:
            return
        _stores.discard(self)
        assert self._carrier is not None
        lost, last = lost or self._region.is_fenced, False
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self._flat.abandon() if lost else self._flat.close(last))
            stack.callback(self._region.abandon if lost else self._region.close)
            try:
                self._carrier.stop(patiently=not lost)
                last = self._carrier.is_done
            except KVStoreError as error:
                log.error("worker %d, as its store is closed: %s", self.rank, error)


def _declare_lost(region: weakref.ref[HostRegion]) -> None:
    """Let the other workers of the host complete what this worker carries, if its region exists."""
    if (there := region()) is not None:
        there.declare_lost()


def _slice_names(key: DistKey) -> list[str]:
    return [f"{key.key}, slice {part.id}" for part in key.parts]


_stores: weakref.WeakSet[HierarchyBackend] = weakref.WeakSet()


def _leave_at_exit() -> None:
    """Leave all jobs while carrier threads exist; as a lost worker if this process failed."""
    engine.wait_for_all_stores()
    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    for store in list(_stores):
        store.abandon() if failed else store.close()


atexit.register(_leave_at_exit)
