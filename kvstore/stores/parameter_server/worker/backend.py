"""The store on parameter servers, as a worker has it: verbs become requests about slices.

What a round is, and who keeps whom waiting, is said in `server/slice_rounds.py`; how requests travel, in
`driver.py`. A push returns when the servers have taken it in, which is before the round is
complete, or when all of it is copied; so no array of the caller is needed after the call.
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
from ...outs import Later
from ...protocol import Backend
from ...protocol import Kind as Storage
from ..protocol import messages as m
from ..protocol.messages import Kind
from ..protocol.optimizer_states import needs_whole_keys
from .client import Client
from .gpu_on_demand import GpuOnDemand
from .initial_values import InitialValues
from .key_directory import KeyDirectory
from .operations import Finish
from .optimizer import WorkerOptimizer
from .pulls import Pulls, delivering
from .pushes import Pushes
from .quick_calls import QuickCalls
from .quick_rows import QuickRowCalls, sole
from .reads import ConsistentReads
from .replies import CollectStates
from .request_builder import RequestBuilder, read_requests, state_requests
from .shared_payloads import SharedPayloads

if TYPE_CHECKING:
    from ....optimizer.states import Content


_CHAINED = {"push": Kind.PUSH, "pushpull": Kind.PUSHPULL}


class DistBackend(Backend):
    """See `kvstore.stores.protocol.Backend`."""

    begins_async = True
    waits_concurrently = True
    can_compress = True
    logger = "kvstore.ps"
    quick_lists = has_quick_push_and_pull = has_quick_row_sparse_pull = True
    #: Whether pushes count in rounds, or each as it comes.
    synchronous = True
    #: Whether asynchronous calls go out one behind the other.
    chains = starts_quick_sums = True

    @staticmethod
    def usual_slice_bytes() -> int:
        """Size of slices where nobody has said one: below, messages cost more; above, page faults do."""
        return USUAL_SLICE_BYTES

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.no_steps = _no_steps(config, self.synchronous)
        host = host_identity() if self.synchronous and config.hierarchy != "flat" else ""
        client = Client(config, self.synchronous, config.slice_bytes or self.usual_slice_bytes(), host)
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
        """Serve these keys, which no optimizer and no codec has been set for."""
        client, config = self._client, self.config
        self._keys, self._optimizer = keys, WorkerOptimizer(client)
        self._slices = slices = RequestBuilder(self._memory)
        self._pushes = Pushes(client, keys, slices, self._optimizer, self._gpus)
        reads = ConsistentReads(client, keys, self._pushes.calls, config.timeout)
        self._pulls = Pulls(client, keys, self._memory, self._gpus, reads if self.synchronous else None)
        self._quick = QuickCalls(client, keys, self._pushes, self._pulls, slices, self._memory)
        self._quick_rows = QuickRowCalls(client, keys, self._quick)
        self._values = InitialValues(self._pushes, self._pulls)

    @property
    def client(self) -> Client:
        """The way to servers and scheduler."""
        return self._client

    @property
    def directory(self) -> KeyDirectory:
        """The keys of the store."""
        return self._keys

    @property
    def pushes(self) -> Pushes:
        """What checks and counts what is pushed."""
        return self._pushes

    @property
    def pulls(self) -> Pulls:
        """What reads."""
        return self._pulls

    def learn(self, newest: m.Answer) -> None:
        """Note the settings that all workers have come to at a barrier."""
        self._optimizer.learn_all(newest)

    @property
    def settings_version(self) -> int:
        """The version of the optimizer's settings that goes with this worker's pushes."""
        return self._optimizer.version

    def observe(self, counters: Counters) -> None:
        """Count what goes and comes."""
        self._client.observe(counters)
        self._client.driver.compare_clocks()
        self._quick.counters = counters

    def names(self) -> dict[int, str]:
        """Name the key of each slice, with its part where a key is cut."""
        return self._keys.names()

    def describe(self) -> str:
        """Name servers and scheduler, and what can be read on the way to them."""
        return self._client.describe()

    # ------------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Take the values of the lowest rank, and wait until all servers have them."""
        self._values.init(groups)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        self._values.assign(groups)

    def discard(self, keys: list[Key]) -> None:
        """Let the keys be initialised again by this process; the others may have them already."""
        self._keys.initialised.difference_update(keys)
        if self.feedback is not None:
            for key in keys:
                self.feedback.discard(key)

    def push(self, groups: list[Group]) -> None:
        """Send, and wait until the servers have it."""
        self._pushes.start_plain(groups)()

    def prepare_step(self) -> None:
        """Have servers keep the optimizer's states of one round more, as they do with values."""
        self._optimizer.keep_states(self._pushes.place)

    def settle_pushes(self) -> None:
        """Wait until the servers have what was pushed."""
        self._client.settle()

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Wait for the rounds that this worker has pushed into, and receive."""
        self._pulls.start(groups, ignore_sparse)()

    def pushpull(self, groups: list[Group], outs: list[Group] | None, divisor: int = 1) -> None:
        """Send, and receive what becomes of it."""
        self._start_pushpull(groups, outs, divisor)()

    def can_divide(self, values: Iterable[Any]) -> bool:
        """Whether servers sum these values divided: plain ones, of the type that kernels divide."""
        return self.feedback is None and all(
            type(value) is np.ndarray and value.dtype == np.float32 for value in values
        )

    def quick_pushpull(self, key: Any, value: Any, out: Any) -> bool | Finish:
        """Dense keys with plain arrays; a compiled codec may pack them."""
        return self._quick.pushpull(key, value, out)

    def start_quick_sum(self, keys: list[Any], values: Any, outs: Any, divisor: int) -> Finish | None:
        """As `quick_pushpull`, behind other calls that were started."""
        return self._quick.start_sum(keys, values, outs, divisor)

    def quick_push(self, key: Any, value: Any) -> bool | Finish:
        """As `quick_pushpull`; or rows of a table."""
        rows = sole(value)
        if isinstance(rows, RowSparseArray):
            return self._quick_rows.push(key, rows)
        return self._quick.push(key, value)

    def quick_pull(self, key: Any, out: Any) -> bool | Finish:
        """As `quick_pushpull`."""
        return self._quick.pull(key, out)

    def give_up_quick(self, error: BaseException) -> None:
        """Read and write the caller's arrays no more."""
        if (call := self._client.driver.abandoned) is not None:
            self._client.give_up_call(call, error)

    def quick_row_sparse_pull(self, key: Any, out: Any, ids: Any) -> bool | Finish:
        """One table, one out, and its ids in one array of integers."""
        return self._quick_rows.pull(key, sole(out), sole(ids))

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Gather rows."""
        self._pulls.start_rows(wanted)()

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Finish:
        """Send at once; what is left is to wait."""
        if verb == "push" and priority is None:
            return self._pushes.start_plain(*arguments)
        if priority is not None and verb in _CHAINED and self.chains:
            groups, outs, *divisor = arguments if verb == "pushpull" else (*arguments, None)
            quick = self._quick.start(_CHAINED[verb], groups, outs, priority, *divisor)
            if callable(quick):
                return quick
        starts: dict[str, Callable[..., Finish]] = {
            "push": self._pushes.start,
            "pull": self._pulls.start,
            "pushpull": self._start_pushpull,
            "row_sparse_pull": self._pulls.start_rows,
        }
        return starts[verb](*arguments, priority=priority or 0)

    def _start_pushpull(
        self, groups: list[Group], outs: list[Group] | None, divisor: int = 1, priority: int = 0
    ) -> Finish:
        """Send; what is left to do is to receive."""
        dense, sparse = self._pushes.checked(groups)
        targets = dict(groups if outs is None else outs)
        apart = bool(sparse) or set(targets) != {key for key, values in groups if values}
        if divisor > 1 and (apart or self.feedback is not None):  # a codec was set meanwhile
            with np.errstate(all="ignore"):
                quotients = [(key, [value / divisor for value in values]) for key, values in groups]
            return self._start_pushpull(quotients, list(targets.items()), 1, priority)
        if apart:
            self._pulls.check_outs(list(targets.items()))
            self._pushes.start(groups, priority)()
            rest = [(key, arrays) for key, arrays in targets.items() if arrays]
            return self._pulls.start(rest, True, priority)
        later = Later()
        wanted = [(key, values, self._pulls.targets(key, targets[key.key], later)) for key, values in dense]
        later.keep_apart(wanted)
        fills = [(key, values, self._pulls.fill(key, values, outs)) for key, values, outs in wanted]
        operation = self._pushes.start_pushpull(fills, priority, divisor)
        return delivering(partial(self._client.finish, operation, "a pushpull"), later, self._client)

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
        """Go back to plain sums; servers run no functions of a worker."""
        if isinstance(updater, Updater):
            self.set_optimizer(updater.optimizer)
        elif updater is None:
            self._optimizer.unset(self._pushes.place)
        else:
            raise CapabilityError(
                "servers take no functions from workers: set an optimizer; or register a rule of your own by "
                "kvstore.optimizer.register, import it on the servers (`kvstore run --import`), and set that"
            )

    def set_compression(self, codec: Codec) -> None:
        """Pack what this worker pushes; each worker says so for itself, and has residuals of its own."""
        threshold = codec.config().get("threshold", 0.0)
        if isinstance(threshold, float) and not math.isfinite(threshold):
            raise ConfigError(
                f"the threshold of {codec.name!r} is {threshold} in float32: no server takes it"
            )
        self._pushes.feedback = Feedback(codec).follow(self._pushes.feedback)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer; the first worker that says so installs it, the others must mean the same."""
        if needs_whole_keys(optimizer):
            self._values.make_whole(optimizer)
        self._optimizer.install(optimizer, self._pushes.place)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer, from this worker's next push of each key on."""
        self._optimizer.change(lambda optimizer: optimizer.configure(**changes), changes, self._pushes.place)

    def set_learning_rate(self, lr: float) -> None:
        """Change the rate; see `configure`."""
        self._optimizer.change(
            lambda optimizer: optimizer.set_learning_rate(lr), ["learning_rate"], self._pushes.place
        )

    def gather_states(self) -> Updater:
        """Bring the optimizer's states from the servers."""
        states = CollectStates(self._keys.all())
        requests = [r for key in states.keys for r in read_requests(key, Kind.FETCH_STATE, states)]
        self._pulls.read(requests, "states")()
        return self._optimizer.joined(states)

    def adopt_states(self, content: Content) -> None:
        """Take over the optimizer's states; what one worker adopts holds for all."""
        self._client.check_writing()
        keys = self._keys.all()
        states = self._optimizer.adopt(content, keys, self.key_templates(), self._pushes.place)
        ordinal = self._optimizer.ordinal
        self._client.perform([r for key in keys for r in state_requests(key, states, ordinal)], "states")

    def follow_states(self, content: Content) -> None:
        """Agree with the servers on the settings and the time that another worker has adopted."""
        self._optimizer.adopt(content, [], {}, self._pushes.place)

    # ------------------------------------------------------------------------------------------- inspection

    def keys(self) -> list[Key]:
        """All keys in the order of their init; of a closed store, those that are known here."""
        return [key.key for key in (self._keys if self._client.closed else self._keys.all())]

    def view(self, key: Key) -> Array | RowSparseArray:
        """Servers have the value."""
        self._keys.find_or_raise(key)
        raise NotImplementedError("values are on servers: pull them; only a store in reach has views")

    def fetch(self, key: Key) -> Array | RowSparseArray:
        """Pull."""
        return self._pulls.fetch_all([key])[0]

    def fetch_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """Pull all together."""
        return self._pulls.fetch_all(keys)

    def kind(self, key: Key) -> Storage:
        """As the key was made; not of a job that this worker is out of, as with `keys`."""
        self._client.driver.check_alive()
        found = self._keys.find_or_raise(key)
        return "row-sparse" if found.sparse else "dense", name_of(found.dtype), found.shape

    def empty(self, key: Key) -> Array:
        """Return a new array; in memory that servers on this machine read, if there are any."""
        found = self._keys.find_or_raise(key)
        if found.sparse:
            raise ArrayError(f"key {key!r} is row-sparse; empty makes dense arrays")
        return self._memory.empty(found.shape, found.dtype)

    def key_templates(self) -> dict[Key, Array]:
        """For each key an array of its shape and type that takes no memory."""
        return {key.key: key.like for key in self._keys}

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Bytes of each key on each server; of a table, with all its rows."""
        found = {}
        for key in self._keys.all():
            sums: dict[int, int] = {}
            for part in key.parts:
                sums[part.server] = sums.get(part.server, 0) + key.part_bytes(part)
            found[key.key] = [(f"server {server}", nbytes) for server, nbytes in sorted(sums.items())]
        return found

    def num_dead_nodes(self, timeout: float) -> int:
        """Count the processes that are lost, or that the scheduler has not heard of for so long."""
        return self._client.num_lost(timeout)

    # ---------------------------------------------------------------------------------------------- the job

    def barrier(self) -> None:
        """Wait until every member has come here."""
        self._optimizer.learn_all(self._client.barrier())

    def side(self) -> DistBackend:
        """Return the same store for side keys: version 0 of the settings is that of no optimizer."""
        side, name_of = copy.copy(self), self._keys.name_of
        side._use(KeyDirectory(self._client, sides=True))
        self._client.driver.name_of = partial(_named, side._keys, name_of)
        return side

    def expects(self, rank: int) -> bool:
        """Return whether a worker is a member that has not joined: what the scheduler knows now."""
        self._client.num_lost(math.inf)  # behind its answer no view is missing
        view = self._client.member.view
        if view is None or view.broken:
            return False
        return rank in {one.rank for one in view.members} - set(view.resting)

    def join(self) -> None:
        """Let rounds and barriers no longer wait for this worker."""
        self._client.join()

    def command(self, head: int, body: str) -> None:
        """Hand a command to every server, and wait until all have it."""
        self._client.request(partial(m.Command, head=head, body=body), f"command {head}")

    def abandon(self) -> None:
        """Leave the job as one who is lost."""
        self._client.close(lost=True)

    def close(self, last: bool = False) -> None:
        """Leave the job, perhaps as the last of a host."""
        self._client.close(last=last)
        self._memory.close()
        self._gpus.close()


class AsyncDistBackend(DistBackend):
    """The same without rounds: each push counts as it arrives."""

    synchronous = chains = starts_quick_sums = False

    def can_divide(self, values: Iterable[Any]) -> bool:
        """Not without rounds."""
        return False

    def side(self) -> DistBackend:
        """Raise CapabilityError."""
        raise CapabilityError(
            "a store without rounds ('dist_async') sums nothing over its workers: create a 'dist_sync' store "
            "beside it, on all workers, and call it there"
        )


class P3Backend(DistBackend):
    """The same with slices as small as those of MXNet's P3, so that what is urgent overtakes sooner."""

    chains = starts_quick_sums = False

    @staticmethod
    def usual_slice_bytes() -> int:
        """As MXNet's P3 has them, counted in elements of four bytes."""
        return 4 * slice_threshold()


def _named(sides: KeyDirectory, name_of: Callable[[int], str], slice_: int) -> str:
    """Say which key a slice is of, where there are side keys."""
    return sides.name_of(slice_) if slice_ in sides.homes() else name_of(slice_)


def _no_steps(config: StoreConfig, synchronous: bool) -> str:
    """Return why there are no whole steps."""
    if not synchronous:
        return "each push takes effect by itself when it arrives; use 'dist_sync'"
    if config.on_peer_loss == "continue":
        return (
            "with on_peer_loss='continue' servers go on with what has come of a lost worker, which can be "
            "some keys of its step; use on_peer_loss='raise' and a checkpoint"
        )
    return ""
