"""`KVStore`: the methods of a store, which are the same for every type of store."""

from __future__ import annotations

import builtins
import math
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, SupportsIndex, TypeVar

import numpy as np

from .arrays.element_types import dtype_named
from .arrays.grouping import Group, Key, group_values, pair_rows, plain_key
from .arrays.sparse import RowSparseArray
from .atomic_files import checked_path
from .base import KVStoreBase, check_capability
from .compression import create as create_codec
from .compression.feedback import required_feedback
from .engine import AsyncEngine, Work
from .errors import (
    ArgumentError,
    ArrayError,
    CapabilityError,
    ClosedError,
    ConfigError,
    KeyKindError,
    KeyNotFoundError,
    KVStoreError,
    TimeoutError,
)
from .observe.counters import CALLS, Seconds, Transferred, Waits, seconds_of, waits_of
from .observe.native._observe import Counters
from .observe.timeline.marks import Marks
from .optimizer import Optimizer, Updater
from .optimizer.changes import REVISION, WatchedOptimizer, differing_settings, read_by
from .optimizer.checks import finite
from .optimizer.update_clock import CallOrder
from .plan import Plan
from .step import StepCalls, check_whole_steps, refuse_async
from .stores.protocol import Backend, done_and_counted

if TYPE_CHECKING:
    from .collective import CollectiveCalls
    from .collective.meeting import SideKeys
    from .observe.timeline.sources import StoreRecord
    from .settings.options import StoreConfig

PathLike = str | os.PathLike[str]
T = TypeVar("T")

_CALL = {verb: number for number, verb in enumerate(CALLS)}


class Statistics(NamedTuple):
    """Counts of the operations of a store since its creation.

    Attributes
    ----------
    keys : int
        Number of initialised keys.
    nbytes : int
        Size of their values in bytes, without optimizer states.
    pushes, pulls : int
        Number of successful calls. A `pushpull` counts as one push and one pull.
    rounds : int
        Number of rounds of keys, or of parts of keys, that this worker has seen complete.
    losses : int
        Number of other workers and servers that were lost.
    sent, received : Transferred
        Bytes of values by the transport that sent or received them.
    seconds : Seconds
        Time by activity, as far as it was measured.
    waits : Waits
        Distribution of the waiting times, as far as they were measured.
    """

    keys: int
    nbytes: int
    pushes: int
    pulls: int
    rounds: int
    losses: int
    sent: Transferred
    received: Transferred
    seconds: Seconds
    waits: Waits


class KVStore(KVStoreBase):
    """A key-value store that sums gradients and holds weights. `kvstore.create` creates it.

    All methods can be called from several threads. The operations of one key run in the order of the calls.
    Values and outputs are arrays of any library that supports DLPack, ``__array_interface__`` or the buffer
    protocol, or `RowSparseArray`. The store keeps no reference to the caller's arrays: when a method returns,
    the caller can use them again (with ``async_op=True``: when the returned `Work` is done). ``"device"`` and
    ``"shared"`` also accept arrays on GPUs, through DLPack or ``__cuda_array_interface__``. The store puts
    work on these arrays on the caller's current stream; the caller can use them again in the order of that
    stream.
    """

    #: Class of what `bind` returns.
    _plan = Plan

    def __init__(self, name: str, backend: Backend, config: StoreConfig) -> None:
        from .observe.timeline import recording
        from .settings.jobs import job_name

        self._type = name
        self._backend = backend
        self._config = config
        self._counters = Counters(name, job_name(), backend.rank, backend.num_workers)
        concurrent = backend.begins_async and backend.waits_concurrently
        self._engine = AsyncEngine(config.timeout, Marks(self._counters), concurrent)
        self._closed = False
        self._before_join: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._collective: CollectiveCalls | None = None
        self._making_collective = threading.Lock()
        self._side: KVStore | None = None  # of `_side_copy`
        self._has_sides = False  # of `_side_copy`
        self._steps: dict[int, StepCalls] = {}  # that are open, by thread
        #: The caller's optimizer, and the same if the store updates with a copy of it.
        self._optimizer: Optimizer | None = None
        self._watched: WatchedOptimizer | None = None
        self._order = CallOrder()
        backend.observe(self._counters)
        self._created = time.monotonic()
        recording.follow(self, _store_record)

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, key: Any, value: Any) -> None:
        """Initialise keys. Each key can be initialised once.

        Parameters
        ----------
        key : int, str, or list of them
        value : array, or list of arrays, one for each key
            The first value; the store copies it. It determines the shape, the element type and the storage
            (dense or row-sparse) of the key.

        Raises
        ------
        DuplicateKeyError
            A key is already initialised, or occurs twice in the call.
        KeyKindError, ShapeError, DTypeError, ArrayError
            A key or value is not valid. No key of the call is initialised.
        """
        groups = group_values(key, value)
        self._check_new(groups)
        self._run_waiting(groups, self._init_groups, groups)
        self._count_call("init")

    def _check_new(self, groups: list[Group]) -> None:
        """Raise KeyKindError for a key with the prefix of side keys."""
        from .settings.definitions import SIDE, is_side

        for key, _ in groups:
            if is_side(key) and not self._has_sides:
                raise KeyKindError(
                    f"key {key!r} begins with {SIDE!r}, the prefix of internal keys; choose another name"
                )

    def _init_groups(self, groups: list[Group]) -> None:
        self._backend.init(groups)
        self._count_keys(groups)

    def push(self, key: Any, value: Any, priority: int = 0, async_op: bool = False) -> Work | None:
        """Sum the values of each key and update the stored weight with the sum.

        Without an optimizer or updater, the sum replaces the stored value.

        Parameters
        ----------
        key : int, str, or list of them
        value : array or list of arrays for each key
            Arrays with the shape and element type of the key. They are summed from left to right; 16-bit
            floats are summed in float32. An empty list does nothing: in a store with rounds, others then
            wait for this worker.
        priority : int
            With `async_op`, operations with a higher priority run first.
        async_op : bool
            If True, return a `Work` at once. Do not use the arrays until it is done.

        Raises
        ------
        KeyNotFoundError, KeyKindError, ShapeError, DTypeError, ArrayError
            An argument is not valid. Nothing has changed.
        UpdaterError
            The updater raised an error. The key on which it raised has not changed.
        """
        backend = self._backend
        if self._steps and (step := self._own_step(async_op)) is not None:
            step.push(group_values(key, value))
            return None
        if (followed := self._watched) is not None and followed.seen != REVISION.number:
            self._send_changes(followed)
        quick = backend.has_quick_push_and_pull or (type(key) is list and backend.quick_lists)
        quick = quick and type(priority) is int and not async_op
        if quick and self._run_quick(key, value, None, "push"):
            return None
        groups = group_values(key, value)
        rank = _checked_int(priority)
        if async_op:
            return self._start_operation("push", groups, rank, groups)
        self._run_verb("push", groups, groups)
        return None

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True, async_op: bool = False
    ) -> Work | None:
        """Write the stored values to `out`.

        Parameters
        ----------
        key : int, str, or list of them
        out : array or list of arrays for each key
            Arrays with the shape of the key. The values are converted to the element type of `out`. If the
            outputs of several keys overlap, the output of the highest key is written last (the order of str
            keys is that of their `init`).
        priority, async_op
            See `push`.
        ignore_sparse : bool
            If True, row-sparse outputs are not written, as in MXNet. If False, all stored rows are written to
            them.

        Raises
        ------
        KeyNotFoundError, KeyKindError, ShapeError, ArrayError
            An argument is not valid. Nothing is written.
        """
        if out is None:
            raise ArrayError("pull needs `out`, the array or arrays to write to")
        backend = self._backend
        if self._steps and (step := self._own_step(async_op)) and step.has_any(group_values(key, out, "out")):
            step.pull(group_values(key, out, "out"), key, out, _checked_int(priority), ignore_sparse)
            return None
        quick = backend.has_quick_push_and_pull or (type(key) is list and backend.quick_lists)
        quick = quick and type(priority) is int and not async_op
        if quick and self._run_quick(key, None, out, "pull"):
            return None
        groups, rank = group_values(key, out, "out"), _checked_int(priority)
        if async_op:
            return self._start_operation("pull", groups, rank, groups, ignore_sparse)
        self._run_verb("pull", groups, groups, ignore_sparse)
        return None

    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, async_op: bool = False
    ) -> Work | None:
        """Push and pull in one pass over memory.

        Parameters
        ----------
        key : int, str, or list of them
        value : array or list of arrays for each key
            See `push`. Without `out`, the result is written to every value.
        out : array or list of arrays for each key, optional
            The result is written to these arrays; the values do not change.
        priority, async_op
            See `push`.

        Raises
        ------
        KeyNotFoundError, KeyKindError, ShapeError, DTypeError, ArrayError
            An argument is not valid. Nothing has changed.
        UpdaterError
            The updater raised an error. The key on which it raised has not changed.
        """
        rank = priority if type(priority) is int else _checked_int(priority)
        if self._steps and (step := self._own_step(async_op)) is not None:
            given = group_values(key, value)
            step.push(given, given if out is None else group_values(key, out, "out"))
            return None
        if (followed := self._watched) is not None and followed.seen != REVISION.number:
            self._send_changes(followed)
        if not async_op and self._run_quick(key, value, out):
            return None
        groups = group_values(key, value)
        outs = None if out is None else group_values(key, out, "out")
        if async_op:
            return self._start_operation("pushpull", groups, rank, groups, outs)
        self._run_verb("pushpull", groups, groups, outs)
        return None

    def bind(self, key: Any, value: Any, out: Any = None) -> Plan:
        """Check the arguments of a `pushpull` once and return a plan that repeats it.

        `bind` itself does not push or pull. It raises the same errors as `pushpull`.

        Parameters
        ----------
        key : int, str, or list of them
        value : array or list of arrays for each key
            See `pushpull`.
        out : array or list of arrays for each key, optional
            See `pushpull`.

        Returns
        -------
        Plan
            A callable. For GPU arrays one call is one launch, on the caller's current stream at the call.

        Raises
        ------
        CapabilityError
            This type of store does not support plans.
        """
        if not self._backend.can_bind:
            raise CapabilityError(f"store {self._type!r} does not support bind; call pushpull")
        return self._plan(
            self, group_values(key, value), None if out is None else group_values(key, out, "out")
        )

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Initialise keys with the values of rank 0 and write these values to `out`.

        It raises the same errors as `init` and `pull`. If `out` does not match, the key is not initialised.
        """
        if out is None:
            raise ArrayError("broadcast needs `out`, the array or arrays to write to")
        groups, outs = group_values(key, value), group_values(key, out, "out")
        self._check_new(groups)
        self._run_waiting(groups, self._broadcast_groups, groups, outs)
        self._count_call("init")

    def _broadcast_groups(self, groups: list[Group], outs: list[Group]) -> None:
        from .stores.outs import check_first_outs

        for key, on_gpu in check_first_outs(groups, outs):
            from .stores.device.arguments import check_there

            check_there(key, on_gpu)
        self._backend.init(groups)
        try:
            self._backend.pull(outs, ignore_sparse=True)
        except Exception:
            self._backend.discard([key for key, values in groups if values])
            raise
        self._count_keys(groups)

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None, async_op: bool = False
    ) -> Work | None:
        """Write the requested rows of row-sparse keys to `out`.

        Parameters
        ----------
        key : int, str, or list of them
        out : RowSparseArray or list of them for each key
            The result replaces the old content. Its row ids are the requested ids, sorted and unique; a row
            that is not stored is zero.
        row_ids : array or list of arrays for each key
            One array for each output, of any shape and in any order; ids can be repeated, and fractions are
            truncated. One array for a list of outputs applies to all of them.
        priority, async_op
            See `push`.

        Raises
        ------
        RowIndexError
            An id is outside the table.
        ArrayError
            A key or an output is dense, or `out` or `row_ids` is missing.
        ShapeError
            The numbers of outputs and `row_ids` differ, or the shapes do not match.
        """
        quick = self._backend.has_quick_row_sparse_pull and type(priority) is int and not async_op
        if quick and not self._steps and self._run_quick(key, row_ids, out, "row_sparse_pull"):
            return None
        wanted, rank = pair_rows(key, out, row_ids), _checked_int(priority)
        keys: list[Group] = [(name, []) for name, _ in wanted]
        if self._steps and (step := self._own_step(async_op)) and step.has_any(keys):
            step.read("row_sparse_pull", key, out, priority, row_ids)
            return None
        if async_op:
            return self._start_operation("row_sparse_pull", keys, rank, wanted)
        self._run_verb("row_sparse_pull", keys, wanted)
        return None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make all pushes in a ``with`` block count together, or not at all: ``with store.step(): ...``.

        The calls of `push` and `pushpull` that this thread makes in the block become one call when the block
        ends. `pull` and `row_sparse_pull` of keys that were pushed in the block follow it. So the arrays
        belong to the store until the block ends: do not change pushed arrays, and do not read `out` before.
        Other methods run at once, on the store as it was before the step.

        If a worker dies, its last step is in the values and in the optimizer's states of all keys, or in none
        of them. After a `PeerLostError` all other workers read and `save` the values of the same step, if all
        of them make all their pushes in steps. The section *Steps* of `docs/stores.md` lists the exceptions.

        A `save`, `save_optimizer_states` or `CheckpointManager.save` between two steps of this worker is a
        cut: it has no part of a later step.

        Raises
        ------
        CapabilityError
            At the beginning: pushes of several keys do not count together in this store. The message has the
            reason and an alternative. ``"local"``, ``"device"`` and, with ``on_peer_loss="raise"``,
            ``"shared"``, ``"dist_sync"`` and its variants have steps.
        ConfigError
            This thread is in a step already; a key is pushed twice, or a call has ``async_op=True``.
        KVStoreError
            At the end: the error of the call of all pushes. If an argument is not valid, nothing has changed,
            except that the arguments of a `row_sparse_pull` are checked after the pushes. After an error of
            an updater or an optimizer, the other keys are pushed.

        Notes
        -----
        If an exception ends the block, none of its pushes is made. The step can be repeated; until then the
        other workers wait for it. Pushes of other threads do not belong to the step.

        Examples
        --------
        >>> import numpy as np
        >>> import kvstore as kv
        >>> store = kv.create("local")
        >>> store.init(["a", "b"], [np.zeros(1), np.zeros(1)])
        >>> out = np.empty(1)
        >>> with store.step():
        ...     store.push("a", np.ones(1))
        ...     store.pushpull("b", np.ones(1), out=out)
        >>> out
        array([1.])
        """
        self._check_open()
        check_whole_steps(self._backend.no_steps, self._type)
        thread = get_ident()
        if thread in self._steps:
            raise ConfigError("this thread is in a step of this store already; steps do not nest")
        step = self._steps[thread] = StepCalls()
        try:
            yield
        finally:
            del self._steps[thread]
        step.send(self)

    def _own_step(self, async_op: bool) -> StepCalls | None:
        """Return the step of the calling thread."""
        step = self._steps.get(get_ident())
        if step is not None:
            refuse_async(async_op)
        return step

    # ---------------------------------------------------------------------------- without a key

    def all_reduce(self, array: Any, *, average: bool = False, async_op: bool = False) -> Work | None:
        """Replace an array by its sum or mean over all workers, without a key: for metrics and counts.

        An optimizer, an updater or gradient compression of the store are not used. The call does not appear
        in `keys`, `save` or `statistics`. In a store of one worker the array does not change.

        Parameters
        ----------
        array : array, or list of arrays
            Arrays that can be written, in the memory of the host or of a GPU, of any shapes and of element
            types that the store sums. They are overwritten in place. All workers pass the same shapes and
            types. Arrays of JAX cannot be written: `kvstore.jax.all_reduce_tree` returns new ones.
        average : bool
            If True, divide by the number of workers that take part. Each value is divided before the sum, as
            `kvstore.torch` does, so that the mean of large values is not infinite.
        async_op : bool
            If True, return a `Work`. Do not use the arrays until it is done.

        Raises
        ------
        ShapeError, DTypeError, ArgumentError
            The workers have passed other shapes or types, or have called another method, on all of them; or
            the mean of integers. No array has changed.
        ArrayError
            An array cannot be read and written.
        CapabilityError
            The store has no rounds (``"dist_async"``).
        KVStoreError
            A server was restarted, and the part of a worker was lost with its memory.
        PeerLostError
            A worker was lost. With ``on_peer_loss="continue"`` the call continues with the others; but a call
            with more than some hundred bytes can end with this error in between, and can be repeated.

        Notes
        -----
        The sum is computed in the order of the ranks, as in `push`. A worker that has called `join` cannot
        call it, and the other workers do not wait for it. A restarted worker takes part in the next call of
        the other workers, which must have the same arguments as its own first call: if a step has several
        calls, pass lists to make it one call. A call in a `step` runs at once. All workers call `all_reduce`,
        `broadcast_object` and `all_gather_object` in the same order. Calls of several threads of a worker run
        one after the other, in an order that the other workers do not know: call from one thread.

        Up to some hundred bytes (between 200 and 900, by the number of workers) need one round, as a
        `pushpull` of 4 KB. Larger arrays need a round to compare the arguments of the workers, and then
        rounds of up to 8 MB. The memory for these is kept until the store is closed, up to 16 MB for each
        element type. If a server is restarted in the call, such a sum can lack the parts of other workers, as
        that of a `pushpull` can.

        Examples
        --------
        >>> import numpy as np
        >>> import kvstore as kv
        >>> store = kv.create("local")
        >>> loss = np.array([0.25])
        >>> store.all_reduce(loss, average=True)
        >>> loss
        array([0.25])
        """
        return self._collective_calls().all_reduce(array, average, async_op)

    def broadcast_object(self, value: Any = None, root: int = 0) -> Any:
        """Return the object that worker `root` passes, on all workers.

        Parameters
        ----------
        value : object
            The object that `root` sends; the other workers can omit it. None, bool, int, float, str, bytes,
            lists, dicts with str keys, and arrays. Nothing is pickled.
        root : int
            Rank of the worker that sends its object; the same on all workers.

        Returns
        -------
        object
            A copy, also on `root`: a tuple is a list in it, and an array is a NumPy array.

        Raises
        ------
        ArgumentError
            The object cannot be sent, or the workers have called other methods. The message of `root` names
            the place in the object.
        ConfigError
            `root` has joined, or is lost.
        CapabilityError, PeerLostError
            As `all_reduce`; its notes are valid here, too.
        """
        return self._collective_calls().broadcast_object(value, root)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the objects of all workers, by rank; see `broadcast_object`.

        The list has no entry for a worker that has joined, or is lost.
        """
        return self._collective_calls().all_gather_object(value)

    def _collective_calls(self) -> CollectiveCalls:
        """Return the collective operations of the workers of this store, which need no key."""
        self._check_open()
        if self._collective is None:
            from .collective import CollectiveCalls

            with self._making_collective:
                if self._collective is None:
                    sides = self._side_keys() if self.num_workers > 1 else None
                    self._collective = CollectiveCalls(self._engine, sides, outlives_workers(self))
        return self._collective

    def _side_keys(self) -> SideKeys:
        from .collective.meeting import SideKeys

        self._side = side = self._side_copy()
        place = self.rank, self.num_workers, self._backend.waits_concurrently
        expects = _never_divides if outlives_workers(self) else self._backend.expects
        return SideKeys(*place, self._engine, side.init, side.pushpull, side._start_operation, expects)

    def _side_copy(self) -> KVStore:
        """Return a store for side keys, with the same engine, and with counters that are not published."""
        side = KVStore.__new__(KVStore)
        side.__dict__.update(self.__dict__)
        side._backend, side._steps, side._has_sides = self._backend.side(), {}, True
        side._optimizer = side._watched = None
        side._counters = Counters(self._type, "", self.rank, self.num_workers, shown=False)
        return side

    # ---------------------------------------------------------------------------------------- updates

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update the stored weights with `optimizer` on every later push. The states start new.

        Later changes of settings of the object take effect at the next push, in every type of store:
        assignments such as ``optimizer.learning_rate = 0.1``, ``optimizer.lr_mult["w"] = 0`` and
        ``optimizer.lr_scheduler = schedule``, and the methods of the optimizer. The push sends them as
        `update_optimizer` would, and raises its errors. In a job of several workers make a change on all of
        them, or on one.

        Parameters
        ----------
        optimizer : Optimizer
            Stores of one process use the object itself. Its update counts and, with a schedule, its
            `learning_rate` are then those of the store; an assignment waits for the pushes that were called
            before it. The other stores use copies of it.

        Raises
        ------
        ArgumentError
            `optimizer` is not an `Optimizer`.
        ConfigError
            Another worker has set an optimizer with other settings. The message names them.
        """
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                f"set_optimizer takes an Optimizer such as kv.optimizer.create('sgd'), not {optimizer!r}"
            )
        self._run_after_all(
            partial(self._install_optimizer, optimizer, partial(self._backend.set_optimizer, optimizer))
        )
        self._log_change("optimizer of store %r: %r", self._type, optimizer)

    def _install_optimizer(self, optimizer: Optimizer | None, install: Callable[[], None]) -> None:
        install()
        self._optimizer, self._watched = optimizer, None
        self._watch_optimizer()

    def _watch_optimizer(self) -> None:
        """Watch the caller's optimizer from now on, if the store updates with another object."""
        updater, optimizer = self._backend.updater, self._optimizer
        if optimizer is None or updater is None:
            self._watched = None
        elif updater.optimizer is optimizer:
            self._watched = None
            read_by(self._engine)
        elif self._watched is None:
            with suppress(ConfigError):  # no description, and replaced by one from a file
                self._watched = WatchedOptimizer(optimizer)

    def _send_new_settings(self) -> None:
        """Send the changes that the caller has made to the optimizer."""
        if (followed := self._watched) is not None and followed.seen != REVISION.number:
            self._send_changes(followed)

    def _send_changes(self, followed: WatchedOptimizer) -> None:
        changes, config, number = followed.changed_settings()
        if changes:
            self._run_after_all(partial(self._backend.configure, changes))
        followed.note_config(config, number)

    def _change_settings(self, changes: dict[str, Any]) -> None:
        """Change settings of the store's optimizer, and those of the caller's object."""
        self._send_new_settings()
        self._run_after_all(partial(self._backend.configure, changes))
        if self._watched is not None:
            self._watched.apply_changes(changes)

    def _load_settings(self, adopt: Callable[[], None]) -> None:
        """Run a function that can read settings from a file.

        The caller's object gets the changed settings.
        """
        before = _config_of(self._backend.updater)
        adopt()
        after = _config_of(self._backend.updater)
        changes = differing_settings(after, before) if before and after else {}
        self._watch_optimizer()
        if self._watched is not None and changes:
            self._watched.apply_changes(changes)

    def update_optimizer(self, **changes: Any) -> None:
        """Change settings of the optimizer. The change takes effect at the next push of each key.

        Parameters
        ----------
        **changes
            Keyword arguments of the optimizer, such as ``rescale_grad``, ``wd``, ``learning_rate``.

        Raises
        ------
        ConfigError
            No optimizer is set, or a name or value is not valid. Nothing has changed.
        """
        self._check_updater("update_optimizer")
        self._change_settings(changes)
        self._log_change("optimizer of store %r, changes: %r", self._type, changes)

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate. The change takes effect at the next push of each key.

        Raises
        ------
        ConfigError
            No optimizer is set, or the optimizer has a schedule.
        """
        self._check_updater("set_learning_rate")
        self._change_settings({"learning_rate": finite("learning_rate", lr)})

    def set_updater(self, updater: Callable[[Key, Any, Any], None] | None) -> None:
        """Call ``updater(key, merged, stored)`` for each pushed key. The updater changes `stored` in place.

        Parameters
        ----------
        updater : callable or None
            `merged` is the sum of the pushed values, row-sparse if row-sparse arrays were pushed. It is valid
            only during the call. `stored` is the live weight. Both are NumPy arrays, or `DeviceArray` for a
            key on a GPU; work on these goes to the caller's stream. The store calls the updater on one thread
            at a time. The updater can call methods of this store; such calls run at once, before waiting
            asynchronous operations. None removes the updater: a push then replaces the value by the sum.
        """
        if updater is not None and not callable(updater):
            raise ArgumentError(f"set_updater takes a callable updater(key, merged, stored), not {updater!r}")
        optimizer = updater.optimizer if isinstance(updater, Updater) else None
        self._run_after_all(
            partial(self._install_optimizer, optimizer, partial(self._backend.set_updater, updater))
        )
        self._log_change("updater of store %r: %r", self._type, updater)

    def set_gradient_compression(self, compression_params: dict[str, Any]) -> None:
        """Compress gradients between devices or workers, from the next push of each key.

        Values are compressed before they are summed, and the sum uses their decoded values. `init`,
        `broadcast` and `pull` are exact. The 1-bit and 2-bit codecs keep the part of a gradient that they do
        not send as a residual, and add it to the next gradient. ``"device"`` has one residual for each key
        and position in the list of a push. ``"shared"`` and the stores on servers first sum the values of a
        worker, and have one residual for each key and worker. After this call only float32 keys can be
        pushed.

        Parameters
        ----------
        compression_params : dict
            For example ``{"type": "2bit", "threshold": 0.5}``. The types are ``"2bit"``, ``"1bit"``,
            ``"fp16"``, ``"bf16"``, and those added with `kvstore.compression.register`. A second call with
            the same type changes the threshold and keeps the residuals.

        Raises
        ------
        CapabilityError
            This type of store sends no data that could be compressed.
        ConfigError, ArgumentError
            The parameters are not valid. Nothing has changed.
        """
        self._check_compresses()
        codec = create_codec(compression_params)
        self._run_after_all(partial(self._backend.set_compression, codec))
        self._log_change(
            "gradients of store %r are compressed by %s: %r", self._type, codec.name, codec.config()
        )

    def save_residuals(self, fname: PathLike) -> None:
        """Write the residuals of gradient compression to a safetensors file, atomically.

        The residuals belong to this process: each worker must save its own file.

        Raises
        ------
        CapabilityError
            This type of store does not compress.
        ConfigError
            No compression is set.
        StateFileError
            The file cannot be written (also an OSError). The old file is unchanged.
        """
        self._check_compresses()
        path = checked_path(fname)
        self._run_after_all(lambda: required_feedback(self._backend.feedback, "save_residuals").save(path))

    def load_residuals(self, fname: PathLike) -> None:
        """Read the residuals that `save_residuals` wrote. All keys of the file must be initialised.

        Raises
        ------
        StateFileError
            The file cannot be read (also an OSError), is damaged, has another format or codec, or a key is
            unknown or has another shape. The present residuals do not change.
        CapabilityError
            This type of store does not compress.
        ConfigError
            No compression is set.
        """
        self._check_compresses()
        path = checked_path(fname)
        self._run_after_all(
            lambda: required_feedback(self._backend.feedback, "load_residuals").load(
                path, self._backend.key_templates()
            )
        )

    def _check_compresses(self) -> None:
        if not self._backend.can_compress:
            raise CapabilityError(
                f"store {self._type!r} does not compress gradients; 'device', 'shared' and 'dist_sync' do"
            )

    # ----------------------------------------------------------------------------------------- states

    def save_optimizer_states(self, fname: PathLike, dump_optimizer: bool = False) -> None:
        """Write the states and update counts of the optimizer to a file, atomically.

        Parameters
        ----------
        fname : path
            A safetensors file.
        dump_optimizer : bool
            If True, the file also contains the name and settings of the optimizer, and a load restores them.

        Raises
        ------
        ConfigError
            No optimizer is set.
        StateFileError
            The file cannot be written (also an OSError). The old file is unchanged.
        """
        self._check_updater("save_optimizer_states")
        self._run_after_all(partial(self._backend.save_states, checked_path(fname), dump_optimizer))

    def load_optimizer_states(self, fname: PathLike) -> None:
        """Read the states that `save_optimizer_states` wrote.

        Raises
        ------
        StateFileError
            The file cannot be read (also an OSError), is damaged, has another format, or is a pickle of
            MXNet. The present states do not change.
        ConfigError
            No optimizer is set.
        """
        self._check_updater("load_optimizer_states")
        load = partial(self._backend.load_states, checked_path(fname))
        self._run_after_all(partial(self._load_settings, load))

    def save(self, path: PathLike) -> None:
        """Write the values of all keys to a safetensors file, atomically.

        Raises
        ------
        StateFileError
            The file cannot be written (also an OSError). The old file is unchanged.
        """
        from .checkpoint import values

        self._run_after_all(partial(values.save_values, self._backend, checked_path(path)))

    def load(self, path: PathLike) -> None:
        """Read the values that `save` wrote. Existing keys are overwritten; other keys are initialised.

        Raises
        ------
        StateFileError
            The file cannot be read (also an OSError), is damaged or has another format, or a key has another
            shape, element type or storage. Nothing has changed.
        """
        from .checkpoint import values

        write_with(self, partial(values.load_values, path=checked_path(path)))

    # --------------------------------------------------------------------------------------- the job

    @property
    def type(self) -> str:
        """Name that was given to `create`, in lower case."""
        return self._type

    @property
    def rank(self) -> int:
        """Rank of this worker in its job, from 0."""
        return self._backend.rank

    @property
    def local_rank(self) -> int:
        """Rank of this worker among the workers on its machine, from 0."""
        return self._backend.local_rank

    @property
    def num_workers(self) -> int:
        """Number of workers in the store."""
        return self._backend.num_workers

    def is_capable(self, capability: str) -> bool:  # type: ignore[override]
        """Return whether the store has a capability.

        ``"optimizer"`` is the only one; others raise `ConfigError`.
        """
        check_capability(capability)
        return self._backend.runs_optimizer

    def num_dead_nodes(self, timeout: float = 60) -> int:
        """Count the processes of the job that sent no heartbeat for `timeout` seconds.

        The result is 0 in a job of one process.

        Raises
        ------
        ArgumentError, ConfigError
            `timeout` is not a number, or is negative.
        """
        seconds = _checked_seconds(timeout)
        self._check_open()
        return self._backend.num_dead_nodes(seconds)

    def barrier(self) -> None:
        """Wait until every worker has called `barrier`. It does not wait for asynchronous operations."""
        self._run_waiting([], self._backend.barrier)
        self._count_call("barrier")

    def join(self) -> None:
        """Declare that this worker has no more batches. Rounds no longer wait for it.

        The worker can still pull, save and close, but cannot push. In a store of one process the call does
        nothing.
        """
        for reference in self._before_join:
            announce = reference()
            if announce is not None:
                announce()
        self._run_after_all(self._backend.join)

    def send_command_to_servers(self, head: int, body: str) -> None:
        """Send a command to every server and wait until all servers have received it.

        Servers log commands that they do not know. In a store without servers the call does nothing.
        """
        self._run_after_all(
            partial(self._backend.command, _checked_int(head, "the head of a command"), str(body))
        )

    # ------------------------------------------------------------------------------------ inspection

    def keys(self) -> list[Key]:
        """List all keys of the job, in the order of their `init`.

        `keys`, ``len(store)`` and ``key in store`` describe the whole job, not only the keys that this worker
        has used. In a job with servers they raise an error if this worker is no longer a member.

        Raises
        ------
        PeerLostError, FencedError
            The scheduler is lost, or this worker was declared lost.
        """
        return list(self._run_after_all(self._backend.keys))

    def __len__(self) -> int:
        return len(self.keys())

    def __bool__(self) -> bool:
        return True  # also without keys: `if store` asks for a store

    def __contains__(self, key: Key) -> bool:
        name = plain_key(key)
        try:
            self._check_new([(name, [])])
            self._run_after([(name, [])], self._backend.kind, name)
        except (KeyNotFoundError, KeyKindError):
            return False
        return True

    def view(self, key: Key) -> Any:
        """Return the live memory of a key, read-only and without a copy. It is valid until the next push.

        Use `pull` to get a copy that does not change. In a store of several workers the view is not valid
        after `join`; after that, `view` returns a copy.

        Returns
        -------
        numpy.ndarray or RowSparseArray
            For a key on a GPU a `kvstore.devices.arrays.DeviceArray`, which PyTorch, CuPy and Numba can use
            without a copy. For a row-sparse key the table has the rows that were written; it is a copy unless
            all rows were written.
        """
        name = plain_key(key)
        return self._run_waiting([(name, [])], self._backend.view, name)

    def empty(self, key: Key) -> Any:
        """Return a new uninitialised array with the key's shape and element type, in the store's memory.

        In a ``"shared"`` store the array is in the memory that the workers share, so a push copies nothing.
        From the push until the pull of the round the array belongs to the store; ``pushpull(key, array)``
        writes the sum into it. Each call creates another array. The memory is freed when the last reference
        to the array is deleted.

        Raises
        ------
        KeyNotFoundError
            The key was never initialised.
        ArrayError
            The key is row-sparse.
        """
        name = plain_key(key)
        return self._run_after([(name, [])], self._backend.empty, name)

    def attach(self, key: Key, array: Any) -> Any:
        """Create an array with `empty`, copy `array` into it, and return it. Use it in place of `array`.

        Raises
        ------
        KeyNotFoundError, ArrayError, ShapeError
        """
        home = self.empty(key)
        self._run_after([(plain_key(key), [])], self._backend.copy_into, home, array, key)
        return home

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Return the location of each key: a list of pairs of location and size in bytes."""
        return dict(self._run_after_all(self._backend.placement))

    def statistics(self) -> Statistics:
        """Return counts of the operations of this store since its creation.

        Times are measured while ``KVSTORE_METRICS`` or ``KVSTORE_TIMELINE`` is set, or ``kvstore top`` shows
        this process.
        """
        places = self.placement()
        numbers = self._counters.read()
        return Statistics(
            *_placement_sizes(places),
            *self._pushes_and_pulls(),
            numbers["rounds"],
            numbers["losses"],
            Transferred(*numbers["sent"]),
            Transferred(*numbers["received"]),
            seconds_of(numbers),
            waits_of(numbers),
        )

    def _pushes_and_pulls(self) -> tuple[int, int]:
        calls = dict(zip(CALLS, self._counters.read()["calls"], strict=True))
        return calls["push"] + calls["pushpull"], calls["pull"] + calls["row_sparse_pull"] + calls["pushpull"]

    # ------------------------------------------------------------------------------------- lifetime

    def wait(self) -> None:
        """Wait until all asynchronous operations are complete. Their handles raise their errors.

        Raises
        ------
        TimeoutError
            The deadline of the store has passed.
        """
        self._engine.wait_all()

    def close(self) -> None:
        """Complete asynchronous operations and free all memory.

        A second call does nothing; if another thread is closing the store, the call returns after that.
        """
        self._engine.close()
        self._with_lock(self._close_once, not self._engine.in_own_operation())

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies and pickles: a partial copy would free the memory of this store."""
        raise ArgumentError(
            "a store cannot be copied or pickled; create another one, and save and load the values"
        )

    def __enter__(self) -> KVStore:
        self._check_open()
        return self

    def __exit__(
        self,
        kind: builtins.type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the store. If an error ends the block, the other workers see this worker as lost."""
        calm = error is None or (isinstance(error, SystemExit) and not error.code)
        if not calm and not self._closed:
            self._backend.abandon()
        self.close()

    def __repr__(self) -> str:
        try:
            state = "closed" if self._closed else f"{len(self._backend.keys())} keys"
        except KVStoreError as error:
            state = type(error).__name__  # the error is the useful information
        return f"<KVStore {self._type!r}: worker {self.rank} of {self.num_workers}, {state}>"

    # --------------------------------------------------------------------- names as MXNet spells them

    _set_updater = set_updater
    _barrier = barrier
    _send_command_to_servers = send_command_to_servers

    @property
    def _updater(self) -> Updater | None:
        return self._backend.updater

    # --------------------------------------------------------------------------------------- helpers

    def _close_once(self, patiently: bool) -> None:
        from .observe import metrics
        from .observe.timeline import recording

        if patiently:
            self._engine.key_locks.wait_until_free(self._config.timeout)
        if self._closed:  # by another thread, possibly during that wait
            return
        self._closed = True
        if self._side is not None:
            self._side._closed = True
        recording.finish(self)
        self._backend.close()
        metrics.update()
        recording.write_if_last()
        seconds, done = time.monotonic() - self._created, self._pushes_and_pulls()
        self._log_change("store %r closed after %.1f s: %d pushes, %d pulls", self._type, seconds, *done)

    def _log_change(self, text: str, *arguments: Any) -> None:
        """Log a change of the job."""
        import logging

        logging.getLogger(self._backend.logger).info(text, *arguments)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {self._type!r} store is closed; create a new one")

    def _run_after(self, groups: list[Group], run: Callable[..., Any], *args: Any) -> Any:
        """Run now, after the running operations on these keys."""
        if self._engine.busy:
            self._engine.wait_for(key for key, _ in groups)
        return self._run_locked(run, *args)

    def _run_verb(self, verb: str, groups: list[Group], *arguments: Any) -> None:
        """Run a method; without the lock if several threads can wait concurrently."""
        if not self._backend.waits_concurrently or self._engine.in_own_operation():
            call = getattr(self._backend, verb)
            if self._engine.busy:
                call = self._in_call_order(verb, [key for key, _ in groups], call)
            self._run_after(groups, call, *arguments)
        elif not self._backend.locks_keys:
            self._run_after(groups, self._backend.begin, verb, arguments, None)()
        else:
            keys = [key for key, _ in groups]
            self._run_with_keys(keys, self._begin_operation, verb, keys, arguments, None)
        self._count_call(verb)

    def _count_call(self, verb: str) -> None:
        """Count a successful call."""
        self._counters.count(_CALL[verb])

    def _count_keys(self, groups: list[Group]) -> None:
        """Update the published size of the store, after new keys."""
        new = [(key, values[0]) for key, values in groups if values]
        self._counters.hold_more(len(new), sum(self._bytes_of(key, value) for key, value in new))

    def _bytes_of(self, key: Key, first: Any) -> int:
        """Return the size of a new key in bytes; for a table, that of its first rows."""
        if isinstance(first, RowSparseArray):
            return first.data.nbytes
        try:
            _, dtype, shape = self._backend.kind(key)
        except KVStoreError:  # this worker was lost just now
            return 0
        return math.prod(shape) * dtype_named(dtype).itemsize

    def _run_with_keys(self, keys: list[Key], begin: Callable[..., Callable[[], Any]], *args: Any) -> Any:
        """Run an operation while this thread has the locks of its keys.

        `begin` returns the end of the operation.
        """
        if self._engine.busy:
            self._engine.wait_for(keys)
        try:
            return self._engine.run_unlocked(begin(*args))
        finally:
            self._engine.key_locks.release(keys)

    def _begin_operation(
        self, verb: str, keys: list[Key], arguments: tuple[Any, ...], priority: int | None
    ) -> Callable[[], None]:
        """Begin an operation under the lock, which is released during waits for other workers."""
        if self._backend.locks_keys:
            begun = self._run_locked(self._enter_operation, verb, keys, arguments, priority)
            if begun is not None:
                return begun  # type: ignore[no-any-return]
            self._engine.run_unlocked(self._backend.wait_for_free_slot, verb, keys)
        return self._run_locked(self._backend.begin, verb, arguments, priority)  # type: ignore[no-any-return]

    def _enter_operation(
        self, verb: str, keys: list[Key], arguments: tuple[Any, ...], priority: int | None
    ) -> Any:
        """Acquire the keys, and begin the operation if it needs no wait; else return None."""
        self._acquire_keys(keys)
        if self._backend.is_clear(verb, keys):
            return self._backend.begin(verb, arguments, priority)
        return None

    def _acquire_keys(self, keys: list[Key]) -> None:
        self._engine.key_locks.acquire(keys, self._config.timeout)
        self._check_open()  # another thread can have closed the store during the wait

    def _run_waiting(self, groups: list[Group], run: Callable[..., Any], *args: Any) -> Any:
        """Run a function that can wait for other workers; if keys have locks, it needs only these."""
        if not self._backend.locks_keys or self._engine.in_own_operation():
            return self._run_after(groups, run, *args)
        keys = [key for key, _ in groups]
        return self._run_with_keys(keys, self._run_acquired, keys, partial(run, *args))

    def _run_acquired(self, keys: list[Key], run: Callable[[], Any]) -> Callable[[], Any]:
        self._run_locked(self._acquire_keys, keys)
        return run

    def _run_quick(self, key: Any, value: Any, out: Any, verb: str = "pushpull") -> bool:
        """Run a usual call in few steps, if no operation and no other thread is active.

        Helper functions are inlined here: with cold caches, as in a job of several processes, each call costs
        3 µs.
        """
        kind, backend, engine = type(key), self._backend, self._engine
        several = kind is list and backend.quick_lists
        key_locks = engine.key_locks
        if (kind is not str and kind is not int and not several) or engine.busy:
            return False
        if key_locks.waiters and (several or key_locks.has_waiter((key,))):
            return False
        lock, done, me, enters = engine.exclusive, None, get_ident(), False
        keys = list(key) if several and backend.locks_keys else ()  # the caller can change its list
        taken = key_locks.holders
        try:
            try:
                if not lock.acquire(False) or (taken and (several or key in taken)):
                    return False
                if verb == "pushpull":
                    done = backend.quick_pushpull(key, value, out)
                elif verb == "push":
                    done = backend.quick_push(key, value)
                elif verb == "row_sparse_pull":
                    done = backend.quick_row_sparse_pull(key, out, value)
                else:
                    done = backend.quick_pull(key, out)
                if not done:
                    return False
                if done is done_and_counted:
                    return True
                if done is True:
                    self._counters.count(_CALL[verb])
                    return True
                if backend.locks_keys:
                    if several:
                        taken.update(dict.fromkeys(keys, me))
                    else:
                        taken[key] = me
                    enters = me not in engine.unlocked_threads
            finally:
                try:  # noqa: SIM105 - a context manager is a step of its own
                    lock.release()
                except RuntimeError:
                    pass
            if enters:
                engine.unlocked_threads.add(me)
            done()
            self._counters.count(_CALL[verb])
            return True
        except BaseException as error:
            backend.give_up_quick(error)
            raise
        finally:
            took = done and backend.locks_keys and not several and key in taken and taken[key] == me
            if keys and done:
                key_locks.release(keys)
            if took:
                del taken[key]  # first: Ctrl-C can be raised after each call
            if enters:
                engine.unlocked_threads.discard(me)
            if took and key_locks.waiters and key_locks.has_waiter((key,)):
                key_locks.wake()

    def _start_quick_sum(self, keys: list[Any], values: Any, outs: Any, divisor: int) -> Work | None:
        """Begin a usual `pushpull` that the caller waits for next.

        Return None if a condition of `_run_quick` is not met.
        """
        engine, done = self._engine, None
        lock, key_locks = engine.exclusive, engine.key_locks
        if engine.busy or key_locks.waiters or not self._backend.starts_quick_sums:
            return None
        try:
            if not lock.acquire(False) or key_locks.holders or self._closed:
                return None
            done = self._backend.start_quick_sum(keys, values, outs, divisor)
        finally:
            try:  # noqa: SIM105 - a context manager is a step of its own
                lock.release()
            except RuntimeError:
                pass
        if done is None:
            return None
        end = self._counted_end("pushpull", [(key, [value]) for key, value in zip(keys, values, strict=True)])
        return engine.finish_in_wait(partial(end, done), f"pushpull of {len(keys)} keys")

    def _run_after_all(self, run: Callable[[], Any]) -> Any:
        """Run now, after all running operations."""
        if self._engine.busy:
            self._engine.wait_all()
        return self._run_locked(run)

    def _run_locked(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run while no other thread uses the values, if the store is open."""
        return self._with_lock(self._run_open, run, *args)

    def _run_open(self, run: Callable[..., Any], *args: Any) -> Any:
        self._check_open()
        return run(*args)

    def _with_lock(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run while no other thread uses the values."""
        lock = self._engine.exclusive
        if self._engine.in_own_operation():
            return run(*args)
        try:
            if not lock.acquire(timeout=self._config.timeout):
                raise TimeoutError(
                    f"another thread has been inside this {self._type!r} store for "
                    f"{self._config.timeout:g} s, perhaps in an updater that waits for something"
                )
            return run(*args)
        finally:
            # One statement, also without the lock: Ctrl-C can be raised between two statements.
            try:  # noqa: SIM105 - a context manager is a step of its own
                lock.release()
            except RuntimeError:
                pass

    def _start_operation(
        self,
        verb: str,
        groups: list[Group],
        priority: int,
        *arguments: Any,
        waits: bool = False,
        then: Callable[[], None] | None = None,
    ) -> Work:
        """Begin an operation in the background, after the running operations on these keys.

        `waits`: the caller waits for the operation next and can run its last part, if `begin` supports that.
        `then` is called at the end of the operation.
        """
        self._check_open()
        end = self._counted_end(verb, groups)
        end = end if then is None else partial(_end_then, then, end)
        keys = [key for key, _ in groups]
        what = f"{verb} of {keys[0]!r}" if len(keys) == 1 else f"{verb} of {len(keys)} keys"
        arguments = self._backend.capture_streams(arguments)
        call = getattr(self._backend, verb)
        run: Callable[[], Any] = partial(self._run_locked, call, *arguments)
        if self._engine.in_operation():
            return self._engine.run_now(partial(end, run), what)
        if not self._backend.begins_async:
            run = partial(self._run_locked, self._in_call_order(verb, keys, call), *arguments)
            return self._engine.submit(keys, partial(end, run), priority, what)
        waits = waits and self._backend.can_resume
        # A started operation cannot be withdrawn.
        with nullcontext() if waits else self._engine.thread_started(what):
            try:
                run = self._begin_operation(verb, keys, arguments, priority)
            except Exception as error:
                run = partial(_raise_error, error)
            finally:
                self._engine.key_locks.release(keys)
            if waits:
                return self._engine.finish_in_wait(partial(end, run), what)
            return self._engine.submit(keys, partial(end, run), priority, what)

    def _in_call_order(self, verb: str, keys: list[Key], call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of a store of one process that can be applied after later calls."""
        updater = self._backend.updater
        if updater is None or verb not in ("push", "pushpull") or self._backend.begins_async:
            return call
        return self._order.timed_push(updater.optimizer, keys, call)

    def _counted_end(self, verb: str, groups: list[Group]) -> Callable[[Callable[[], Any]], Any]:
        """Begin an asynchronous operation; the returned function completes and counts it."""
        return partial(self._end_operation, verb)

    def _end_operation(self, verb: str, run: Callable[[], Any]) -> Any:
        result = run()
        self._count_call(verb)
        return result

    def _check_updater(self, verb: str) -> None:
        self._check_open()
        if self._backend.runs_optimizer and self._backend.updater is None:
            raise ConfigError(f"{verb}: this {self._type!r} store has no optimizer; call set_optimizer first")


def _end_then(
    then: Callable[[], None], end: Callable[[Callable[[], Any]], Any], run: Callable[[], Any]
) -> None:
    """End an operation, and call `then`."""
    end(run)
    then()


def uses_only_local_cpu(store: KVStore) -> bool:
    """Return whether an exchange of arrays on the host uses only the processors of the workers."""
    return store._backend.bound_by_processors


def starts_quick_sums(store: KVStore) -> bool:
    """Return whether `start_pushpull` with `waits` begins a call with small keys in few steps."""
    return store._backend.starts_quick_sums


def can_divide_values(store: KVStore, values: Iterable[Any]) -> bool:
    """Return whether `start_pushpull` can divide such values."""
    return store._backend.can_divide(values)


def start_pushpull(
    store: KVStore,
    key: Any,
    value: Any,
    out: Any = None,
    divisor: int = 1,
    waits: bool = False,
) -> Work:
    """Begin a `pushpull` of keys with one array each; the values are divided by `divisor`.

    The result has the bits of a division before the sum. Unless the divisor is 1, `can_divide_values` must
    return True for the arrays. `waits`: the caller waits for the result next, and can then run the last part
    of the operation.
    """
    if store._steps:
        store._own_step(async_op=True)  # raises in a step
    store._send_new_settings()
    if waits and type(key) is list and (work := store._start_quick_sum(key, value, out, divisor)) is not None:
        return work
    groups = group_values(key, value)
    outs = None if out is None else group_values(key, out, "out")
    by = (divisor,) if divisor > 1 else ()
    return store._start_operation("pushpull", groups, 0, groups, outs, *by, waits=waits)


def call_before_join(store: KVStore, announce: Callable[[], None]) -> None:
    """Call a bound method at the beginning of `KVStore.join`, while its object is alive."""
    store._before_join.append(weakref.WeakMethod(announce))


def side_store(store: KVStore) -> KVStore | None:
    """Return the store of side keys, whose rounds are sums in every store; None for a store of one worker."""
    store._collective_calls()
    return store._side


def updater_of(store: Any) -> Any:
    """Return the updater of a store, also of a registered class; None if pushes replace values."""
    return getattr(store, "_updater", None)


def read_with(store: KVStore, run: Callable[[Backend], T]) -> T:
    """Return ``run(backend)``, called after all running operations, while no other thread uses the values."""
    result: T = store._run_after_all(partial(run, store._backend))
    return result


def load_settings_with(store: KVStore, run: Callable[[Backend], None]) -> None:
    """Call ``run(backend)``, which reads an optimizer's settings from a file, as `read_with` does."""
    read_with(store, lambda backend: store._load_settings(partial(run, backend)))


def write_with(store: KVStore, run: Callable[[Backend], None]) -> None:
    """Call ``run(backend)``, which overwrites values or creates keys, as `load_settings_with` does."""

    def write(backend: Backend) -> None:
        store._load_settings(partial(run, backend))
        store._counters.hold(*_placement_sizes(backend.placement()))

    read_with(store, write)


def options_of(store: KVStore) -> StoreConfig:
    """Return the options with which a store was created."""
    return store._config


def outlives_workers(store: KVStore) -> bool:
    """Return whether the remaining workers continue after the loss of a worker."""
    return store._config.on_peer_loss == "continue"


def collective_of(store: KVStore) -> CollectiveCalls:
    """Return the collective operations of the workers of a store, which need no key."""
    return store._collective_calls()


def whole_step(store: Any) -> AbstractContextManager[None]:
    """Return a step of a store; if the store has no steps, a context in which each call counts separately."""
    has_steps = isinstance(store, KVStore) and not store._backend.no_steps
    return store.step() if has_steps else nullcontext()


def counters_of(store: Any) -> Counters | None:
    """Return the counters of a store; None for a registered class that is not a `KVStore`."""
    return store._counters if isinstance(store, KVStore) else None


def _store_record(store: KVStore) -> StoreRecord:
    """Describe a store for a timeline, as `describe_state` does."""
    from .observe.timeline.sources import StoreRecord

    numbers, names = store._counters.read(), store._backend.names()
    return StoreRecord(
        store._counters.number, numbers["store"], numbers["job"], numbers["rank"], numbers["size"], names
    )


def describe_state(store: KVStore) -> str:
    """Describe a store for the report of a process that hangs: without a lock, and without waiting."""
    state = "closed" if store._closed else "open"
    return f"store {store.type!r}: worker {store.rank} of {store.num_workers}, {state}"


def _config_of(updater: Updater | None) -> dict[str, Any]:
    """Return the settings of an optimizer; none if they cannot be described."""
    try:
        return {} if updater is None else updater.optimizer.get_config()
    except ConfigError:
        return {}


def _placement_sizes(places: dict[Key, list[tuple[str, int]]]) -> tuple[int, int]:
    """Return the number of keys, and the size of their values in bytes."""
    return len(places), sum(size for parts in places.values() for _, size in parts)


def _never_divides(rank: int) -> bool:
    """Return False: if workers can be restarted, a round can lack a worker that is present."""
    return False


def _raise_error(error: Exception) -> None:
    raise error


def _checked_seconds(timeout: Any) -> float:
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float, np.integer, np.floating)):
        raise ArgumentError(f"timeout must be a number of seconds, not {timeout!r}")
    if not timeout >= 0:
        raise ConfigError(f"timeout must be 0 seconds or more, not {timeout!r}")
    return float(min(timeout, threading.TIMEOUT_MAX))


def _checked_int(value: Any, what: str = "priority") -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{what} must be an int, not {value!r}") from None
