"""The interface of a type of store. `kvstore.store` has the public methods, which use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..arrays.grouping import Group, Key
from ..arrays.sparse import RowSparseArray
from ..compression import Codec, Feedback
from ..errors import CapabilityError
from ..optimizer import Optimizer, Updater

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..observe.native._observe import Counters
    from ..optimizer.states import StatesContent

Kind = tuple[str, str, tuple[int, ...]]


def done_and_counted() -> None:
    """Mark a quick call as done and counted."""


class Backend(Protocol):
    """Interface of one type of store.

    `KVStore` calls every method under the lock of the store, with grouped arguments: each key once, with a
    list of arrays. If a method raises an error, all values must be unchanged. A method must not keep a
    reference to an array of the caller. A store can derive from this class; the methods with a body
    do what most stores need.
    """

    rank: int
    local_rank: int
    num_workers: int
    #: Whether asynchronous operations begin in the call; otherwise they run in the background.
    begins_async: bool = False
    #: With `begins_async`: whether the result of `begin` can be called again after Ctrl-C.
    can_resume: bool = False
    #: Whether an exchange needs only processors of the host, on which the workers compute, too.
    bound_by_processors: bool = False
    #: Whether calls of several threads can wait at the same time. `KVStore` then calls `begin` under the
    #: lock, with None as the priority, and calls the result without the lock.
    waits_concurrently: bool = False
    #: With `waits_concurrently`: whether operations of one key must not overlap. Each operation then has the
    #: turn of the key until its end. `wait_for_free_slot`, `init`, `view` and `barrier` are called without
    #: the lock.
    locks_keys: bool = False
    #: Whether `quick_pushpull`, `quick_push` and `quick_pull` take lists of keys.
    quick_lists: bool = False
    #: Whether there is `start_quick_sum`.
    starts_quick_sums: bool = False
    #: Whether there are `quick_push` and `quick_pull`.
    has_quick_push_and_pull: bool = False
    #: Whether there is `quick_row_sparse_pull`.
    has_quick_row_sparse_pull: bool = False
    #: Whether the store supports `bind`.
    can_bind: bool = False
    #: Whether the store sends gradients, so that they can be compressed.
    can_compress: bool = False
    #: Whether the store can update weights. If not, methods for optimizers raise `CapabilityError`, or define
    #: their meaning.
    runs_optimizer: bool = True
    #: Whether all workers must call `assign` together, with the same keys; else one call is for all.
    assigns_together: bool = False
    #: Why pushes of several keys in one call do not count together when a process dies, and what to use
    #: instead; empty: they do.
    no_steps: str = ""
    #: Name of the logger for changes of the store.
    logger: str = "kvstore"

    def describe(self) -> str:
        """Describe for the log the parts of the store, and how they exchange data."""
        return "in this process"

    def observe(self, counters: Counters) -> None:
        """Count in `counters` from now on; called once, before anything else."""
        return

    def names(self) -> dict[int, str]:
        """Return the keys by the numbers that events and counters have as their `slice`."""
        return {}

    @property
    def feedback(self) -> Feedback | None:
        """Codec and residuals, if gradients are compressed."""

    @property
    def updater(self) -> Updater | None:
        """The optimizer with its states, if one is set."""

    def init(self, groups: list[Group]) -> None:
        """Store the first value of each key; all keys are new."""

    def assign(self, groups: list[Group]) -> None:
        """Overwrite existing keys and initialise other keys; the values are already checked."""

    def discard(self, keys: list[Key]) -> None:
        """Undo the `init` of keys after a failed `broadcast`."""

    def push(self, groups: list[Group]) -> None:
        """Sum the values of each key, then update or replace the stored value."""

    def prepare_step(self) -> None:
        """Prepare the undo of a step, before its only call."""
        return

    def settle_pushes(self) -> None:
        """Wait until all pushes count even if this process dies now."""
        return

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Write the stored value into every array of each key."""

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Push, then pull into `outs`, or into the values if `outs` is None."""

    def can_divide(self, values: Iterable[Any]) -> bool:
        """Return whether `pushpull` has a third argument, which divides such values first."""
        return False

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Callable[[], None]:
        """With `begins_async`: begin an operation, and return a callable that completes it.

        The callable needs no lock.
        """
        return partial(getattr(self, verb), *arguments)

    def is_clear(self, verb: str, keys: list[Key]) -> bool:
        """With `locks_keys`: return whether the next operation of the keys can begin without a wait."""
        return True

    def wait_for_free_slot(self, verb: str, keys: list[Key]) -> None:
        """With `locks_keys`: wait until the next operation of the keys can begin."""
        return

    def capture_streams(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Add the caller's current streams to the arguments of an operation that runs in the background."""
        return arguments

    def bind(self, groups: list[Group], outs: list[Group] | None) -> Any:
        """With `can_bind`: check a `pushpull` once, and return a callable that repeats it."""
        raise CapabilityError("this type of store binds no calls")

    def quick_pushpull(self, key: Any, value: Any, out: Any) -> bool | Callable[[], None]:
        """Do a simple `pushpull` of one key, with the arguments of the caller, in few steps.

        With `quick_lists` it can be a list of keys, with lists of arrays.

        If the result is False, nothing has happened, and `pushpull` must be called. If it is
        `done_and_counted`, the call is done, and counted as one. With `begins_async` the result can be a
        callable that completes the operation; it needs no lock.
        """
        return False

    def start_quick_sum(
        self, keys: list[Any], values: Any, outs: Any, divisor: int
    ) -> Callable[[], None] | None:
        """With `starts_quick_sums`: begin a `pushpull` of a list of keys, with one array each, in few steps.

        None: nothing has happened. The result completes the operation, and can be called again after Ctrl-C.
        """
        return None

    def quick_push(self, key: Any, value: Any) -> bool | Callable[[], None]:
        """With `has_quick_push_and_pull`: as `quick_pushpull`."""
        return False

    def quick_pull(self, key: Any, out: Any) -> bool | Callable[[], None]:
        """With `has_quick_push_and_pull`: as `quick_pushpull`."""
        return False

    def quick_row_sparse_pull(self, key: Any, out: Any, ids: Any) -> bool | Callable[[], None]:
        """With `has_quick_row_sparse_pull`: as `quick_pushpull`, of one key."""
        return False

    def give_up_quick(self, error: BaseException) -> None:
        """Give up the quick call of this thread that an error ended before it was completed."""
        return

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Write the requested rows of each key to each `out`, sorted and unique."""

    def set_updater(self, updater: Any) -> None:
        """Call ``updater(key, merged, stored)`` for each later push; an `Updater` can use compiled rules."""

    def set_compression(self, codec: Codec) -> None:
        """With `can_compress`: compress the gradients of later pushes with `codec`."""

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update with `optimizer` on later pushes, with new states."""

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the present optimizer."""

    def save_states(self, path: str, dump_optimizer: bool) -> None:
        """Write the states of the present optimizer to a file."""
        self.gather_states().save(path, dump_optimizer)

    def load_states(self, path: str) -> None:
        """Read the states of the present optimizer from a file."""
        from ..optimizer import states

        self.adopt_states(states.read_states(path))

    def gather_states(self) -> Updater:
        """Return the present optimizer with the states of all keys in host memory. They can be live."""

    def adopt_states(self, content: StatesContent) -> None:
        """Replace states, counts and settings by those of a file, for all workers."""

    def follow_states(self, content: StatesContent) -> None:
        """Update the settings and counts in this worker after another worker has replaced the states."""
        return

    def keys(self) -> list[Key]:
        """List all keys, in the order of their `init`."""

    def view(self, key: Key) -> npt.NDArray[Any] | RowSparseArray:
        """Return the live memory of a key, read-only."""

    def empty(self, key: Key) -> npt.NDArray[Any]:
        """Return a new array with the shape and type of a dense key, in the store's memory."""

    def copy_into(self, home: Any, array: Any, key: Key) -> None:
        """Copy an array from any device to an array of `empty`."""
        from .entry import copy_into

        copy_into(home, array, key)

    def fetch(self, key: Key) -> npt.NDArray[Any] | RowSparseArray:
        """Return the value in host memory, for a file. It can be live memory."""

    def fetch_all(self, keys: list[Key]) -> list[npt.NDArray[Any] | RowSparseArray]:
        """Return the values of several keys; see `fetch`."""
        return [self.fetch(key) for key in keys]

    def kind(self, key: Key) -> Kind:
        """Return storage ("dense" or "row-sparse"), name of the element type, and shape of a key."""

    def key_templates(self) -> dict[Key, npt.NDArray[Any]]:
        """Return for each key an array with its shape and type; the content has no meaning."""

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Return the location of each key: pairs of location and size in bytes."""

    def num_dead_nodes(self, timeout: float) -> int:
        """Count other processes that are lost, or that sent no heartbeat for `timeout` seconds."""

    def side(self) -> Backend:
        """Return a store of the same workers for side keys, which have names that begin with `SIDE`.

        Their rounds are sums, with any optimizer, updater or compression of the store, and `keys` and the
        like do not list them. It exists as long as this store, which must have several workers.
        """
        raise CapabilityError("this type of store sums over no other workers")

    def expects(self, rank: int) -> bool:
        """Return whether rounds wait for a worker although a round of `side` was complete without it.

        True if servers can lose parts that they have answered. Not called if workers can return.
        """
        return False

    def join(self) -> None:
        """Take part in no further rounds. The other workers do not wait for this worker."""

    def barrier(self) -> None:
        """Wait for all workers."""

    def command(self, head: int, body: str) -> None:
        """Send a command to all servers, if there are any."""
        return

    def abandon(self) -> None:
        """Leave the job as a lost worker, because the process has failed. `close` follows."""

    def close(self) -> None:
        """Free the resources of the store."""
