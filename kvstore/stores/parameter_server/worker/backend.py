"""The stores on parameter servers, in a worker: verbs become requests about slices.

`server/slice_rounds.py` defines rounds and their waits, `driver.py` sends requests. A push returns when the
servers have received it, which is before the round is complete, or when all of it is copied; so the caller
may change its arrays after the call.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ....arrays.element_types import name_of
from ....arrays.grouping import Group, Key
from ....arrays.sparse import RowSparseArray
from ....compression import Codec, Feedback
from ....errors import ArrayError, CapabilityError, ConfigError
from ....kernels import cpu
from ....observe.native._observe import Counters
from ....optimizer import Optimizer, Updater
from ....settings.definitions import USUAL_SLICE_BYTES
from ....settings.hosts import host_identity
from ....settings.options import StoreConfig, slice_threshold
from ...entry import Array
from ...outs import OutDeliveries
from ...protocol import Backend
from ...protocol import Kind as Storage
from ..protocol import messages as m
from ..protocol.messages import RecordKind
from ..protocol.optimizer_states import join_states, needs_whole_keys
from .client import WorkerClient
from .gpu_on_demand import GpuOnDemand
from .initial_values import InitialValues
from .key_directory import KeyDirectory
from .operations import Finish
from .optimizer import WorkerOptimizer
from .pulls import PullOperations, deliver_after
from .pushes import PushOperations
from .quick_calls import QuickCalls
from .quick_rows import QuickRowCalls, sole
from .reads import ConsistentReads
from .replies import CollectStates
from .request_builder import RequestBuilder, read_requests, state_requests
from .shared_payloads import SharedPayloads

if TYPE_CHECKING:
    from ....optimizer.states import StatesContent


_CHAINED = {"push": RecordKind.PUSH, "pushpull": RecordKind.PUSHPULL}


class DistBackend(Backend):
    """See `kvstore.stores.protocol.Backend`."""

    begins_async = True
    waits_concurrently = True
    can_compress = True
    logger = "kvstore.ps"
    quick_lists = has_quick_push_and_pull = has_quick_row_sparse_pull = True
    #: Whether pushes count in rounds, or each by itself as it arrives.
    synchronous = True
    #: Whether asynchronous calls are sent one after the other.
    chains = starts_quick_sums = True

    @staticmethod
    def usual_slice_bytes() -> int:
        """Return the default size of slices: smaller ones cost more messages, larger ones page faults."""
        return USUAL_SLICE_BYTES

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.no_steps = _no_steps(config, self.synchronous)
        host = host_identity() if self.synchronous and config.hierarchy != "flat" else ""
        client = WorkerClient(config, self.synchronous, config.slice_bytes or self.usual_slice_bytes(), host)
        self.rank, self.num_workers, self.local_rank = client.rank, client.size, client.local_rank
        self._client = client
        self._memory = SharedPayloads(client, self.synchronous)
        self._gpus = GpuOnDemand(config)
        self._use(KeyDirectory(client))
        client.driver.name_of = self._keys.name_of
        if config.threads:
            cpu.set_threads(config.threads)
        elif self.num_workers > 1:
            cpu.set_threads(max(1, len(os.sched_getaffinity(0)) // client.local_size))

    def _use(self, keys: KeyDirectory) -> None:
        """Use these keys, with no optimizer and no codec."""
        client, config = self._client, self.config
        self._keys, self._optimizer = keys, WorkerOptimizer(client)
        self._slices = slices = RequestBuilder(self._memory)
        self._pushes = PushOperations(client, keys, slices, self._optimizer, self._gpus)
        reads = ConsistentReads(client, keys, self._pushes.calls, config.timeout)
        self._pulls = PullOperations(
            client, keys, self._memory, self._gpus, reads if self.synchronous else None
        )
        self._quick = QuickCalls(client, keys, self._pushes, self._pulls, slices, self._memory)
        self._quick_rows = QuickRowCalls(client, keys, self._quick)
        self._values = InitialValues(self._pushes, self._pulls)

    @property
    def client(self) -> WorkerClient:
        """The connection to servers and scheduler."""
        return self._client

    @property
    def directory(self) -> KeyDirectory:
        """The keys of the store."""
        return self._keys

    @property
    def pushes(self) -> PushOperations:
        """Checks, counts and sends pushes."""
        return self._pushes

    @property
    def pulls(self) -> PullOperations:
        """Reads values."""
        return self._pulls

    def observe(self, counters: Counters) -> None:
        """Count values that are sent and received."""
        self._client.observe(counters)
        self._client.driver.compare_clocks()
        self._quick.counters = counters

    def names(self) -> dict[int, str]:
        """Return a name for the key of each slice, with its part where a key is divided."""
        return self._keys.slice_names()

    def describe(self) -> str:
        """Return the addresses of servers and scheduler, and whether connections are encrypted."""
        return self._client.describe()

    # ------------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Use the values of the lowest rank, and wait until all servers have them."""
        self._values.init(groups)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        self._values.assign(groups)

    def discard(self, keys: list[Key]) -> None:
        """Let this process initialise the keys again; other workers may already have them."""
        self._keys.initialised.difference_update(keys)
        if self.feedback is not None:
            for key in keys:
                self.feedback.discard(key)

    def push(self, groups: list[Group]) -> None:
        """Send, and wait until the servers have received it."""
        self._pushes.start_plain(groups)()

    def prepare_step(self) -> None:
        """Have servers store the optimizer's states of one more round, as they do with values."""
        self._optimizer.keep_states(self._pushes.call_place)

    def settle_pushes(self) -> None:
        """Wait until the servers have received all pushes."""
        self._client.finish_released()

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Wait for the rounds that this worker has pushed into, and receive."""
        self._pulls.start_pull(groups, ignore_sparse)()

    def pushpull(self, groups: list[Group], outs: list[Group] | None, divisor: int = 1) -> None:
        """Push, and receive the results of the rounds."""
        self._start_pushpull(groups, outs, divisor)()

    def can_divide(self, values: Iterable[Any]) -> bool:
        """Return whether servers can divide these values in their sums: plain ones, of float32."""
        return self.feedback is None and all(
            type(value) is np.ndarray and value.dtype == np.float32 for value in values
        )

    def quick_pushpull(self, key: Any, value: Any, out: Any) -> bool | Finish:
        """Dense keys with plain arrays; a compiled codec may pack them."""
        return self._quick.pushpull(key, value, out)

    def start_quick_sum(self, keys: list[Any], values: Any, outs: Any, divisor: int) -> Finish | None:
        """As `quick_pushpull`, behind earlier calls that are in progress."""
        return self._quick.start_sum(keys, values, outs, divisor)

    def quick_push(self, key: Any, value: Any) -> bool | Finish:
        """As `quick_pushpull`; rows of a table are possible, too."""
        rows = sole(value)
        if isinstance(rows, RowSparseArray):
            return self._quick_rows.push(key, rows)
        return self._quick.push(key, value)

    def quick_pull(self, key: Any, out: Any) -> bool | Finish:
        """As `quick_pushpull`."""
        return self._quick.pull(key, out)

    def give_up_quick(self, error: BaseException) -> None:
        """Stop reading and writing the caller's arrays."""
        if (call := self._client.driver.abandoned) is not None:
            self._client.give_up_call(call, error)

    def quick_row_sparse_pull(self, key: Any, out: Any, ids: Any) -> bool | Finish:
        """Pull rows of one table to one out, with the ids in one array of integers."""
        return self._quick_rows.pull(key, sole(out), sole(ids))

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Pull rows."""
        self._pulls.start_rows(wanted)()

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Finish:
        """Send at once; the returned function waits."""
        if verb == "push" and priority is None:
            return self._pushes.start_plain(*arguments)
        if priority is not None and verb in _CHAINED and self.chains:
            groups, outs, *divisor = arguments if verb == "pushpull" else (*arguments, None)
            quick = self._quick.start(_CHAINED[verb], groups, outs, priority, *divisor)
            if callable(quick):
                return quick
        starts: dict[str, Callable[..., Finish]] = {
            "push": self._pushes.start_push,
            "pull": self._pulls.start_pull,
            "pushpull": self._start_pushpull,
            "row_sparse_pull": self._pulls.start_rows,
        }
        return starts[verb](*arguments, priority=priority or 0)

    def _start_pushpull(
        self, groups: list[Group], outs: list[Group] | None, divisor: int = 1, priority: int = 0
    ) -> Finish:
        """Send; the returned function receives."""
        dense, sparse = self._pushes.check_values(groups)
        targets = dict(groups if outs is None else outs)
        apart = bool(sparse) or set(targets) != {key for key, values in groups if values}
        if divisor > 1 and (apart or self.feedback is not None):  # a codec was set since `can_divide`
            with np.errstate(all="ignore"):
                quotients = [(key, [value / divisor for value in values]) for key, values in groups]
            return self._start_pushpull(quotients, list(targets.items()), 1, priority)
        if apart:
            self._pulls.check_outs(list(targets.items()))
            self._pushes.start_push(groups, priority)()
            rest = [(key, arrays) for key, arrays in targets.items() if arrays]
            return self._pulls.start_pull(rest, True, priority)
        later = OutDeliveries()
        wanted = [
            (key, values, self._pulls.make_targets(key, targets[key.key], later)) for key, values in dense
        ]
        later.defer_overlaps(wanted)
        fills = [(key, values, self._pulls.make_writer(key, values, outs)) for key, values, outs in wanted]
        operation = self._pushes.start_pushpull(fills, priority, divisor)
        return deliver_after(partial(self._client.finish, operation, "a pushpull"), later, self._client)

    # ---------------------------------------------------------------------------------------------- updates

    @property
    def updater(self) -> Updater | None:
        """The optimizer, if there is one; its states are on the servers."""
        return self._optimizer.updater

    @property
    def feedback(self) -> Feedback | None:
        """Codec and residuals, where gradients are compressed."""
        return self._pushes.feedback

    def set_updater(self, updater: Any) -> None:
        """Return to plain sums; servers run no functions of a worker."""
        if isinstance(updater, Updater):
            self.set_optimizer(updater.optimizer)
        elif updater is None:
            self._optimizer.remove_optimizer(self._pushes.call_place)
        else:
            raise CapabilityError(
                "servers run no functions of workers: set an optimizer; or register a rule of your own by "
                "kvstore.optimizer.register, import it on the servers (`kvstore run --import`), and set that"
            )

    def set_compression(self, codec: Codec) -> None:
        """Pack this worker's pushes; each worker sets its own codec, and has its own residuals."""
        threshold = codec.config().get("threshold", 0.0)
        if isinstance(threshold, float) and not math.isfinite(threshold):
            raise ConfigError(
                f"the threshold of {codec.name!r} is {threshold} in float32: no server accepts it"
            )
        self._pushes.feedback = Feedback(codec).follow(self._pushes.feedback)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Set an optimizer; the first worker's call installs it, and other workers must set the same one."""
        if needs_whole_keys(optimizer):
            self._values.make_whole(optimizer)
        self._optimizer.install_optimizer(optimizer, self._pushes.call_place)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer, from this worker's next push of each key on."""
        self._optimizer.change_settings(changes, self._pushes.call_place)

    def gather_states(self) -> Updater:
        """Fetch the optimizer's states from the servers."""
        assert self.updater is not None
        keys, states = self._keys.all_keys(), CollectStates()
        requests = [r for key in keys for r in read_requests(key, RecordKind.FETCH_STATE, states)]
        self._pulls.start_read(requests, "states")()
        return join_states([key.entry for key in keys], states.found, self.updater.optimizer)

    def adopt_states(self, content: StatesContent) -> None:
        """Set the optimizer's states on all servers; one worker's call is valid for all."""
        self._client.check_writing()
        keys = self._keys.all_keys()
        states = self._optimizer.load_states(content, keys, self.key_templates(), self._pushes.call_place)
        ordinal = self._optimizer.ordinal
        self._client.perform([r for key in keys for r in state_requests(key, states, ordinal)], "states")

    def follow_states(self, content: StatesContent) -> None:
        """Read from the servers the settings and the time that another worker has set."""
        self._optimizer.load_states(content, [], {}, self._pushes.call_place)

    # ------------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """Return all keys in the order of their init; of a closed store, the keys that are known here."""
        return [key.key for key in (self._keys if self._client.is_closed else self._keys.all_keys())]

    def view(self, key: Key) -> Array | RowSparseArray:
        """Raise: the value is on servers."""
        self._keys.find_or_raise(key)
        raise NotImplementedError("values are on servers: pull them; only stores in this machine have views")

    def fetch(self, key: Key) -> Array | RowSparseArray:
        """Pull."""
        return self._pulls.fetch_all([key])[0]

    def fetch_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """Pull all in one call."""
        return self._pulls.fetch_all(keys)

    def kind(self, key: Key) -> Storage:
        """Return type and shape of a key; raises after this worker has left the job, as `keys` does."""
        self._client.driver.check_alive()
        found = self._keys.find_or_raise(key)
        return "row-sparse" if found.sparse else "dense", name_of(found.dtype), found.shape

    def empty(self, key: Key) -> Array:
        """Return a new array; in memory that servers on this machine read, if possible."""
        found = self._keys.find_or_raise(key)
        if found.sparse:
            raise ArrayError(f"key {key!r} is row-sparse; empty makes dense arrays")
        return self._memory.empty_array(found.shape, found.dtype)

    def key_templates(self) -> dict[Key, Array]:
        """Return for each key an array of its shape and type that uses no memory."""
        return {key.key: key.like for key in self._keys}

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Return the bytes of each key on each server; of a table, with all its rows."""
        found = {}
        for key in self._keys.all_keys():
            sums: dict[int, int] = {}
            for part in key.parts:
                sums[part.server] = sums.get(part.server, 0) + key.part_bytes(part)
            found[key.key] = [(f"server {server}", nbytes) for server, nbytes in sorted(sums.items())]
        return found

    def num_dead_nodes(self, timeout: float) -> int:
        """Count the processes that are lost, or that the scheduler has not heard for `timeout` seconds."""
        return self._client.num_lost(timeout)

    # ---------------------------------------------------------------------------------------------- the job

    def barrier(self) -> None:
        """Wait until every member has reached this barrier."""
        self._optimizer.learn_all(self._client.barrier())

    def side(self) -> DistBackend:
        """Return the same store for side keys: version 0 of the settings is that of no optimizer."""
        side, name_of = copy.copy(self), self._keys.name_of
        side._use(KeyDirectory(self._client, sides=True))
        self._client.driver.name_of = partial(_named, side._keys, name_of)
        return side

    def expects(self, rank: int) -> bool:
        """Return whether a worker is a member that has not joined, to the scheduler's present knowledge."""
        self._client.num_lost(math.inf)  # all earlier views have arrived when this is answered
        view = self._client.member.view
        if view is None or view.broken:
            return False
        return rank in {one.rank for one in view.members} - set(view.resting)

    def join(self) -> None:
        """Let rounds and barriers proceed without this worker."""
        self._client.join()

    def command(self, head: int, body: str) -> None:
        """Send a command to every server, and wait until all have received it."""
        self._client.request_scheduler(partial(m.CommandRequest, head=head, body=body), f"command {head}")

    def abandon(self) -> None:
        """Leave the job as a lost worker."""
        self._client.close(lost=True)

    def close(self, last: bool = False) -> None:
        """Leave the job; `last`: as the last worker of a host."""
        self._client.close(last=last)
        self._memory.close()
        self._gpus.close()


class AsyncDistBackend(DistBackend):
    """The same without rounds: each push is applied as it arrives."""

    synchronous = chains = starts_quick_sums = False

    def can_divide(self, values: Iterable[Any]) -> bool:
        """Return False: there are no rounds."""
        return False

    def side(self) -> DistBackend:
        """Raise CapabilityError."""
        raise CapabilityError(
            "a store without rounds ('dist_async') sums nothing over its workers: create a 'dist_sync' store "
            "beside it, on all workers, and call it there"
        )


class P3Backend(DistBackend):
    """The same with slices as small as those of MXNet's P3, so that urgent ones overtake sooner."""

    chains = starts_quick_sums = False

    @staticmethod
    def usual_slice_bytes() -> int:
        """Return the size of MXNet's P3, in elements of four bytes."""
        return 4 * slice_threshold()


def _named(sides: KeyDirectory, name_of: Callable[[int], str], slice_: int) -> str:
    """Return the key of a slice, where there are side keys."""
    return sides.name_of(slice_) if slice_ in sides.keys_by_slice() else name_of(slice_)


def _no_steps(config: StoreConfig, synchronous: bool) -> str:
    """Return the reason why there are no whole steps, or ""."""
    if not synchronous:
        return "each push takes effect by itself when it arrives; use 'dist_sync'"
    if config.on_peer_loss == "continue":
        return (
            "with on_peer_loss='continue' servers proceed with the parts that a lost worker has sent, which "
            "can be some keys of its step; use on_peer_loss='raise' and a checkpoint"
        )
    return ""
