"""The store on parameter servers, as a worker has it: verbs become requests about slices.

What a round is, and who keeps whom waiting, is said in `server/slice_rounds.py`; how requests travel, in
`client.py`. A push returns when the servers have taken it in, which is before the round is
complete; so no array of the caller is needed after the call.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from ....arrays.grouping import Group, Key
from ....arrays.host import writable
from ....arrays.sparse import RowSparseArray, trusted_rows
from ....compression import Codec, Feedback
from ....devices.arrays import any_on_device, device_of
from ....errors import ArrayError, CapabilityError, ConfigError, DTypeError, KeyNotFoundError, TimeoutError
from ....kernels import cpu
from ....optimizer import Optimizer, Updater
from ....settings.options import StoreConfig, slice_threshold
from ....waiting import WaitClock
from ...entry import (
    Array,
    Deliver,
    check_shape,
    copy_into,
    dense_source,
    first_value,
    row_ids,
    sparse_outs,
    sparse_source,
)
from ...outs import Later
from ...protocol import Kind as Storage
from ...rows import with_all_rows
from ..protocol import messages as m
from ..protocol.messages import Kind
from ..protocol.optimizer_states import needs_whole_keys
from ..protocol.payloads import SHARED_BYTES
from .client import Client, Operation, Request
from .key_directory import DistKey, Keys, by_order, check_same, spec_of
from .optimizer import Settings
from .pushes import Sources, Stamp, asked, asked_rows, put_states
from .reads import Reads
from .replies import Fill, Rows, States, Table
from .shared_payloads import Memory

log = logging.getLogger("kvstore.dist")

Finish = Callable[[], None]

_OPEN = 2  # rounds of a key into which a worker may have pushed and which are not complete
_LOOK_AGAIN = 0.02  # seconds until a worker looks again whether keys have been moved


class DistBackend:
    """See `kvstore.stores.protocol.Backend`."""

    begins_async = True
    waits_concurrently = True
    takes_turns = False
    can_bind = False
    can_compress = True
    runs_optimizer = True
    feedback: Feedback | None = None
    #: Whether pushes count in rounds, or each as it comes.
    synchronous = True

    @staticmethod
    def usual_slice_bytes() -> int:
        """Size of slices where nobody has said one: below, messages cost more; above, page faults do."""
        return 1 << 20

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._client = Client(config, self.synchronous, config.slice_bytes or self.usual_slice_bytes())
        self.rank, self.num_workers = self._client.rank, self._client.size
        self.local_rank = self._client.local_rank
        self._keys = Keys()
        self._memory = Memory(self._client, self.synchronous)
        self._sources = Sources(self._memory)
        self._settings = Settings(self._client)
        self._client.name_of = self._name_of
        self._reads = Reads(self._client, self._keys, config.timeout)
        self._told: set[Key] = set()
        # What brings arrays of GPUs to the host and back; None until one has been met.
        self._gpus: Any = None
        self._clock = 0
        self._joined = False
        if config.threads:
            cpu.set_threads(config.threads)
        elif self.num_workers > 1:
            cpu.set_threads(max(1, len(os.sched_getaffinity(0)) // self._client.local_size))

    @property
    def updater(self) -> Updater | None:
        """The optimizer, if there is one; its states are on the servers."""
        return self._settings.updater

    # ------------------------------------------------------------------------------------------- init

    def init(self, groups: list[Group]) -> None:
        """Take the values of the lowest rank, and wait until all servers have them."""
        new = [(key, self._first_value(key, values)) for key, values in groups if values]
        self._check_writing()
        while missing := [(key, value) for key, value in new if not self._is_here(key, value)]:
            if self._client.founds():
                self._found(missing)
            else:
                self._await(tuple(key for key, _ in missing))
        self._keys.initialised.update(key for key, _ in new)

    def _first_value(self, key: Key, values: list[Any]) -> Array | RowSparseArray:
        self._keys.check_kind(key)
        taken = key in self._keys.initialised
        if len(values) == 1 and not taken and any_on_device(values):
            values = [self._use_gpus().fetched(values[0], f"value of key {key!r}")]
        return first_value(key, values, taken)

    def _is_here(self, key: Key, value: Array | RowSparseArray) -> bool:
        """Whether a key has its value on the servers; it must be the same kind of key then."""
        known = self._keys.get(key)
        if known is None:
            return False
        check_same(known, value, self.rank)
        return True

    def _found(self, new: list[tuple[Key, Array | RowSparseArray]], whole: bool = False) -> None:
        """Have keys placed, each on one server if `whole`, and bring their values to the servers."""
        whole = whole or self._settings.wants_whole_keys
        specs = tuple(spec_of(key, value, whole) for key, value in new)
        entries = self._client.told(partial(m.CreateKeys, keys=specs), "the placement of keys").entries
        values = dict(new)
        fresh = [entry for entry in entries if not entry.ready]
        for entry in entries:
            check_same(DistKey(entry), values[entry.spec.key], self.rank)
        # ASSIGN: a founder that died on the way may have left some of the values.
        requests = [
            request for entry in fresh for request in self._written(DistKey(entry), values[entry.spec.key])
        ]
        self._do(requests, "the first values of keys")
        if fresh:
            keys = tuple(entry.spec.key for entry in fresh)
            self._client.told(partial(m.Ready, keys=keys), "the first values of keys")
        self._keys.learn(entries)

    def _await(self, keys: tuple[Key, ...]) -> None:
        """Wait until keys are there; in vain, if this worker comes to be the one that makes them."""
        what = f"the init of {keys[0]!r}" if len(keys) == 1 else f"the init of {len(keys)} keys"
        answer = self._client.ask(partial(m.Lookup, keys=keys), what, until=self._client.founds)
        if answer is not None:
            self._keys.learn(answer.entries)

    def _written(self, key: DistKey, value: Array | RowSparseArray) -> Iterable[Request]:
        stamp = Stamp(Kind.ASSIGN)
        if isinstance(value, RowSparseArray):
            return self._sources.rows(key, [value], stamp)
        return self._sources.dense(key, [value], stamp, None)

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, and initialise others."""
        known = [(found, values[0]) for key, values in groups if (found := self._find(key)) is not None]
        there = {found.key for found, _ in known}
        self.init([(key, values) for key, values in groups if key not in there])
        self._check_writing()
        self._do([r for key, value in known for r in self._written(key, value)], "new values")
        self._keys.initialised.update(there)

    def discard(self, keys: list[Key]) -> None:
        """Let the keys be initialised again by this process; the others may have them already."""
        self._keys.initialised.difference_update(keys)
        if self.feedback is not None:
            for key in keys:
                self.feedback.discard(key)

    # ------------------------------------------------------------------------------------------ verbs

    def push(self, groups: list[Group]) -> None:
        """Send, and wait until the servers have it."""
        self._start_plain_push(groups)()

    def _start_plain_push(self, groups: list[Group]) -> Finish:
        """Send; small pushes are waited for by nobody, unless it is a third one that has to wait."""
        dense, sparse = self._checked(groups)
        self._check_writing()
        small = not sparse and sum(key.nbytes for key, _ in dense) < SHARED_BYTES
        operation = self._client.submit(self._pushes(dense, sparse, kept=small))
        if small and all(key.pushes - self._client.complete(key.parts) <= _OPEN for key, _ in dense):
            self._client.let_go(operation)
            return _nothing
        return partial(self._client.finish, operation, "a push")

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Wait for the rounds that this worker has pushed into, and receive."""
        self.start_pull(groups, ignore_sparse)()

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Send, and receive what becomes of it."""
        self.start_pushpull(groups, outs)()

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Finish:
        """Send at once; what is left is to wait."""
        if verb == "push" and priority is None:
            return self._start_plain_push(*arguments)
        starts: dict[str, Callable[..., Finish]] = {
            "push": self.start_push,
            "pull": self.start_pull,
            "pushpull": self.start_pushpull,
            "row_sparse_pull": self.start_row_sparse_pull,
        }
        return starts[verb](*arguments, priority=priority or 0)

    def is_clear(self, verb: str, keys: list[Key]) -> bool:
        """Not asked for."""
        return True

    def wait_for_free_slot(self, verb: str, keys: list[Key]) -> None:
        """Not asked for."""

    def capture_streams(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Operations begin at the call."""
        return arguments

    def bind(self, groups: list[Group], outs: list[Group] | None) -> Any:
        """Not asked for."""
        raise NotImplementedError

    def quick_pushpull(self, key: Key, value: Any, out: Any) -> bool:
        """Leave it to the long way."""
        return False

    def start_push(self, groups: list[Group], priority: int = 0) -> Finish:
        """Send; what is left to do is to see it accepted."""
        dense, sparse = self._checked(groups)
        self._check_writing()
        return self._started(self._pushes(dense, sparse), "a push", priority)

    def _pushes(
        self,
        dense: list[tuple[DistKey, list[Array]]],
        sparse: list[tuple[DistKey, list[RowSparseArray]]],
        kept: bool = False,
    ) -> list[Request]:
        """Make the requests of a push; `kept` ones have copies of what is pushed."""
        if kept:
            dense = [(key, [value.copy() for value in values]) for key, values in dense]
        requests = [r for key, values in dense for r in self._pushed(key, values, Kind.PUSH, None)]
        requests += [r for key, values in sparse for r in self._pushed_rows(key, values)]
        self._reads.pushed(key for key, _ in (*dense, *sparse))
        return requests

    def start_pull(self, groups: list[Group], ignore_sparse: bool, priority: int = 0) -> Finish:
        """Ask for the values after what was pushed so far; what is left to do is to receive."""
        later = Later()
        wanted: list[tuple[DistKey, list[Array]]] = []
        requests: list[Request] = []
        for key, outs in self._by_number(groups):
            dense = [out for out in outs if not isinstance(out, RowSparseArray)]
            sparse = (
                sparse_outs(key, key.sparse, outs, ignore_sparse, self._told, log)
                if len(dense) < len(outs)
                else []
            )
            if key.sparse and (dense or sparse):
                requests += self._pulled_table(key, dense, sparse, later)
            elif dense:
                wanted.append((key, self._targets(key, dense, later)))
        later.keep_apart((key, [], outs) for key, outs in wanted)
        for key, outs in wanted:
            requests += asked(key, Kind.PULL, Fill(key, outs, self._memory))
        return self._read(requests, "a pull", priority, later)

    def start_pushpull(self, groups: list[Group], outs: list[Group] | None, priority: int = 0) -> Finish:
        """Send; what is left to do is to receive."""
        dense, sparse = self._checked(groups)
        targets = dict(groups if outs is None else outs)
        if sparse or set(targets) != {key for key, values in groups if values}:
            self._check_outs(list(targets.items()))
            self.start_push(groups, priority)()
            rest = [(key, arrays) for key, arrays in targets.items() if arrays]
            return self.start_pull(rest, True, priority)
        later = Later()
        wanted = [(key, values, self._targets(key, targets[key.key], later)) for key, values in dense]
        later.keep_apart(wanted)
        fills = [(key, values, self._fill(key, values, outs)) for key, values, outs in wanted]
        self._check_writing()
        requests = [r for key, values, into in fills for r in self._pushed(key, values, Kind.PUSHPULL, into)]
        self._reads.pushed(key for key, _, _ in fills)
        return self._started(requests, "a pushpull", priority, later)

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Gather rows."""
        self.start_row_sparse_pull(wanted)()

    def start_row_sparse_pull(
        self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]], priority: int = 0
    ) -> Finish:
        """Ask for rows; what is left to do is to receive them."""
        requests: list[Request] = []
        later = Later()
        for name, pairs in wanted:
            key = self._find_or_raise(name)
            if not key.sparse:
                raise ArrayError(
                    f"key {name!r} holds a dense array; row_sparse_pull reads row-sparse keys only"
                )
            for out, ids in pairs:
                check_shape(key, out, "out")
                rows = Rows(key, out, row_ids(key, ids))
                requests += asked_rows(key, rows.ids, rows)
                later.add(key.key, rows.deliver)
        return self._read(requests, "a row_sparse_pull", priority, later)

    # ------------------------------------------------------------------------------- parts of the verbs

    def _pushed(self, key: DistKey, values: list[Array], kind: Kind, into: Fill | None) -> Iterable[Request]:
        stamp = self._stamp(key, kind)
        if self.feedback is not None:
            return self._sources.packed(key, values, stamp, into, self.feedback)
        return self._sources.dense(key, values, stamp, into)

    def _pushed_rows(self, key: DistKey, values: list[RowSparseArray]) -> Iterable[Request]:
        return self._sources.rows(key, values, self._stamp(key, Kind.PUSH))

    def _stamp(self, key: DistKey, kind: Kind) -> Stamp:
        key.pushes += 1
        self._clock = max(self._clock, key.pushes)
        return Stamp(kind, self._settings.version, self._clock)

    def _pulled_table(
        self, key: DistKey, dense: list[Any], sparse: list[RowSparseArray], later: Later
    ) -> Iterable[Request]:
        home: list[Deliver] = []
        table = Table(key, [self._out(key, out, home) for out in dense], sparse)
        for deliver in (table.deliver, *home):
            later.add(key.key, deliver)
        return asked(key, Kind.PULL, table)

    def _started(
        self, requests: list[Request], what: str, priority: int = 0, later: Later | None = None
    ) -> Finish:
        operation = self._client.submit(requests, priority)
        return partial(self._finish, operation, what, later)

    def _read(
        self, requests: list[Request], what: str, priority: int = 0, later: Later | None = None
    ) -> Finish:
        """Start what reads; each key is of one round, where there are rounds."""
        client = self._client
        if not self.synchronous or not (self._joined or client.broken or client.late):
            return self._started(requests, what, priority, later)
        return partial(_deliver, self._reads.start(requests, what, priority), later)

    def _finish(self, operation: Operation, what: str, later: Later | None) -> None:
        _deliver(partial(self._client.finish, operation, what), later)

    def _do(self, requests: list[Request], what: str) -> None:
        self._started(requests, what)()

    def _fill(self, key: DistKey, pushed: list[Array], outs: list[Array]) -> Fill:
        in_place = len(outs) == len(pushed) == 1 and outs[0] is pushed[0]
        return Fill(key, outs, self._memory, in_place)

    def _targets(self, key: DistKey, outs: list[Any], later: Later) -> list[Array]:
        """Return a list of arrays that a dense key's value is written to while it comes in."""
        if cpu.first_misfit(outs, key.like, True) < 0:
            return list(outs)
        direct: list[Array] = []
        copied = False
        for out in outs:
            if device_of(out) is not None:
                later.add(key.key, partial(_send, self._use_gpus().target(key, out), direct))
                copied = True
            elif not isinstance(out, RowSparseArray):
                home: list[Deliver] = []
                array = self._out(key, out, home)
                if array.dtype == key.dtype:
                    direct.append(array)
                else:
                    later.convert(key.key, array, partial(_convert, direct, array))
                    copied = True
                for deliver in home:
                    later.add(key.key, deliver)
        if copied and not direct:
            direct.append(np.empty(key.shape, key.dtype))
        return direct

    def _out(self, key: DistKey, out: Any, later: list[Deliver]) -> Array:
        """Return memory of the key's shape to write to."""
        array, deliver = writable(out, f"out of key {key.key!r}")
        check_shape(key, array, "out")
        if deliver is not None:
            later.append(deliver)
        return array

    def _use_gpus(self) -> Any:
        if self._gpus is None:
            from .gpu import GpuTransfer

            self._gpus = GpuTransfer(self.config)
        return self._gpus

    # ------------------------------------------------------------------------------------------ checks

    def _checked(
        self, groups: list[Group]
    ) -> tuple[list[tuple[DistKey, list[Array]]], list[tuple[DistKey, list[RowSparseArray]]]]:
        """Check everything that is pushed, before anything changes."""
        dense, sparse = [], []
        for key, values in self._by_number(groups):
            self._check_updatable(key)
            if not values:
                continue
            if key.sparse or all(isinstance(value, RowSparseArray) for value in values):
                if key.sparse:
                    sparse.append((key, [self._row_source(key, value) for value in values]))
                elif key.cut_by_rows and self.feedback is None:  # a lazy rule leaves the other rows alone
                    sparse.append((key, [sparse_source(key, value) for value in values]))
                else:
                    dense.append((key, [dense_source(key, value) for value in values]))
            elif cpu.first_misfit(values, key.like) < 0:
                dense.append((key, values))
            elif any_on_device(values):
                dense.append((key, [self._use_gpus().total(key, values)]))
            else:
                dense.append((key, [dense_source(key, value) for value in values]))
        if self.feedback is not None:
            for key, arrays in dense:
                self.feedback.check(key.key, arrays, key.dtype)
            for key, rows in sparse:
                self.feedback.check(key.key, rows, key.dtype)
        return dense, sparse

    def _check_updatable(self, key: DistKey) -> None:
        if self.updater is not None and key.dtype.kind in "iu":
            rule = type(self.updater.optimizer).__name__
            raise DTypeError(f"key {key.key!r} holds {key.dtype}; {rule} updates floating-point weights only")

    def _row_source(self, key: DistKey, value: Any) -> RowSparseArray:
        if isinstance(value, RowSparseArray):
            return sparse_source(key, value)
        return with_all_rows(dense_source(key, value))

    def _check_outs(self, rest: list[Group]) -> None:
        """Make sure, before a push, that the pull after it will work."""
        for name, outs in rest:
            key = self._find_or_raise(name)
            for out in outs:
                if device_of(out) is not None:
                    self._use_gpus().target(key, out)
                elif not isinstance(out, RowSparseArray):
                    check_shape(key, writable(out, f"out of key {name!r}")[0], "out")

    def _name_of(self, slice_: int) -> str:
        homes = (key for key in self._keys if any(part.slice == slice_ for part in key.parts))
        return next((f"key {key.key!r}" for key in homes), "a key")

    def _find(self, key: Key) -> DistKey | None:
        """Return a key, also one that other workers have made; None if there is none."""
        known = self._keys.get(key)
        if known is None:
            self._keys.check_kind(key)
            answer = self._client.told(partial(m.Lookup, keys=(key,), wait=False), f"key {key!r}")
            self._keys.learn(answer.entries)
            known = self._keys.get(key)
        return known

    def _find_or_raise(self, key: Key) -> DistKey:
        found = self._find(key)
        if found is None:
            raise KeyNotFoundError(f"key {key!r} is not initialised; call init or broadcast with it first")
        return found

    def _by_number(self, groups: list[Group]) -> list[tuple[DistKey, list[Any]]]:
        return by_order([(self._find_or_raise(key), arrays) for key, arrays in groups])

    def _check_writing(self) -> None:
        self._client.check_writing()
        if self._joined:
            raise ConfigError(f"worker {self.rank} has joined: it can read, and push no more")

    # ---------------------------------------------------------------------------------------- updates

    def set_updater(self, updater: Any) -> None:
        """Go back to plain sums; servers run no functions of a worker."""
        if isinstance(updater, Updater):
            self.set_optimizer(updater.optimizer)
        elif updater is None:
            self._settings.unset()
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
        self.feedback = Feedback(codec).follow(self.feedback)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Use an optimizer; the first worker that says so installs it, the others must mean the same."""
        if needs_whole_keys(optimizer):
            self._make_whole()
        self._settings.install(optimizer)

    def _make_whole(self) -> None:
        """Bring each key to one server, for a rule that must see whole tensors; all workers come here."""
        self._known()
        spread = [key for key in self._keys if len({part.server for part in key.parts}) > 1]
        if not spread:
            return
        self._check_writing()
        names = tuple(key.key for key in spread)
        if self._client.founds():
            values = list(zip(names, self.fetch_all(list(names)), strict=True))
            self._client.told(partial(m.Drop, keys=names), "keys to be moved")
            self._keys.drop(names)
            self._found(values, whole=True)
            return
        clock = WaitClock(self.config.timeout)
        while any(len({part.server for part in key.parts}) > 1 for key in spread):
            if clock.over:
                raise TimeoutError(
                    f"worker {self.rank} has waited {self.config.timeout:g} s for the lowest rank to set the "
                    "optimizer, too: its rule needs whole keys, and that worker moves them"
                )
            clock.read()
            self._keys.drop(names)
            self._await(names)
            spread = [self._find_or_raise(name) for name in names]
            time.sleep(_LOOK_AGAIN)

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer, from this worker's next push of each key on."""
        self._settings.change(lambda optimizer: optimizer.configure(**changes))

    def set_learning_rate(self, lr: float) -> None:
        """Change the rate; see `configure`."""
        self._settings.change(lambda optimizer: optimizer.set_learning_rate(lr))

    def save_states(self, path: str, dump_optimizer: bool) -> None:
        """Bring the optimizer's states from the servers, and write them."""
        states = States(self._known())
        self._read([r for key in states.keys for r in asked(key, Kind.FETCH_STATE, states)], "states")()
        self._settings.save(path, dump_optimizer, states)

    def load_states(self, path: str) -> None:
        """Read the optimizer's states; what one worker reads holds for all."""
        self._check_writing()
        keys = self._known()
        states = self._settings.load(path, keys, self.key_templates(), self._clock)
        self._do([r for key in keys for r in put_states(key, states)], "states")

    # ------------------------------------------------------------------------------------- inspection

    def _known(self) -> list[DistKey]:
        """All keys that are ready, in the order of their init."""
        answer = self._client.told(partial(m.Lookup, keys=(), wait=False), "the list of keys")
        self._keys.learn(answer.entries)
        return list(self._keys)

    def keys(self) -> list[Key]:
        """All keys in the order of their init; of a closed store, those that are known here."""
        if self._client.closed:
            return [key.key for key in self._keys]
        return [key.key for key in self._known()]

    def view(self, key: Key) -> Array | RowSparseArray:
        """Servers have the value."""
        self._find_or_raise(key)
        raise NotImplementedError("values are on servers: pull them; only a store in reach has views")

    def fetch(self, key: Key) -> Array | RowSparseArray:
        """Pull."""
        return self.fetch_all([key])[0]

    def fetch_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """Pull all together."""
        outs = [_empty_like(self._find_or_raise(key)) for key in keys]
        self.pull([(key, [out]) for key, out in zip(keys, outs, strict=True)], ignore_sparse=False)
        return outs

    def kind(self, key: Key) -> Storage:
        """As the key was made; not of a job that this worker is out of, as with `keys`."""
        self._client.check_alive()
        found = self._find_or_raise(key)
        return "row-sparse" if found.sparse else "dense", found.dtype.name, found.shape

    def copy_into(self, home: Any, array: Any, key: Key) -> None:
        """Copy."""
        copy_into(home, array, key)

    def empty(self, key: Key) -> Array:
        """Return a new array; in memory that servers on this machine read, if there are any."""
        found = self._find_or_raise(key)
        if found.sparse:
            raise ArrayError(f"key {key!r} is row-sparse; empty makes dense arrays")
        return self._memory.empty(found.shape, found.dtype)

    def key_templates(self) -> dict[Key, Array]:
        """For each key an array of its shape and type that takes no memory."""
        return {key.key: key.like for key in self._keys}

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Bytes of each key on each server; of a table, with all its rows."""
        found = {}
        for key in self._known():
            sums: dict[int, int] = {}
            for part in key.parts:
                sums[part.server] = sums.get(part.server, 0) + key.part_bytes(part)
            found[key.key] = [(f"server {server}", nbytes) for server, nbytes in sorted(sums.items())]
        return found

    def num_dead_nodes(self, timeout: float) -> int:
        """Count the processes that are lost, or that the scheduler has not heard of for so long."""
        return self._client.num_lost(timeout)

    # --------------------------------------------------------------------------------------- the job

    def barrier(self) -> None:
        """Wait until every member has come here."""
        self._client.barrier()

    def join(self) -> None:
        """Let rounds and barriers no longer wait for this worker."""
        if not self._joined:
            self._client.rest()
            self._joined = True

    def command(self, head: int, body: str) -> None:
        """Hand a command to every server, and wait until all have it."""
        self._client.told(partial(m.Command, head=head, body=body), f"command {head}")

    def abandon(self) -> None:
        """Leave the job as one who is lost."""
        self._client.close(lost=True)

    def close(self) -> None:
        """Leave the job."""
        self._client.close()
        self._memory.close()
        gpus, self._gpus = self._gpus, None
        if gpus is not None:
            gpus.close()


class AsyncDistBackend(DistBackend):
    """The same without rounds: each push counts as it arrives."""

    synchronous = False


class P3Backend(DistBackend):
    """The same with slices as small as those of MXNet's P3, so that what is urgent overtakes sooner."""

    @staticmethod
    def usual_slice_bytes() -> int:
        """As MXNet's P3 has them, counted in elements of four bytes."""
        return 4 * slice_threshold()


def _empty_like(key: DistKey) -> Array | RowSparseArray:
    if not key.sparse:
        return np.empty(key.shape, key.dtype)
    rows = np.empty((0, *key.shape[1:]), key.dtype)
    return trusted_rows(rows, np.empty(0, np.int64), key.shape)


def _deliver(finish: Finish, later: Later | None) -> None:
    finish()
    if later is not None:
        later.deliver()


def _nothing() -> None:
    """Nothing is left to do."""


def _convert(filled: list[Array], out: Array) -> None:
    with np.errstate(all="ignore"):
        np.copyto(out, filled[0], casting="unsafe")


def _send(send: Callable[[Array], None], filled: list[Array]) -> None:
    send(filled[0])
