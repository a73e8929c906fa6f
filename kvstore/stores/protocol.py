"""What a kind of store must do; the verbs above it are written once, in `kvstore.store`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..arrays.grouping import Group, Key
from ..arrays.sparse import RowSparseArray
from ..compression import Codec, Feedback
from ..optimizer import Optimizer, Updater

if TYPE_CHECKING:
    import numpy.typing as npt

Kind = tuple[str, str, tuple[int, ...]]


class Backend(Protocol):
    """One kind of store.

    Every method is called under the store's lock, with grouped arguments: each key once, with a list of
    arrays. A method that raises leaves all values as they were. None of them keeps an array of the caller.
    """

    rank: int
    local_rank: int
    num_workers: int
    #: Whether asynchronous operations begin at the call; else all of one runs in the background.
    begins_async: bool
    #: Whether calls of several threads wait at the same time: `begin`, with None for the priority, is then
    #: called under the lock, and what it returns outside of it.
    waits_concurrently: bool
    #: Whether the operations of a key must not overlap, where `waits_concurrently`: each has the key's turn
    #: until its end; `wait_for_free_slot`, `init`, `view` and `barrier` are then called without the lock.
    takes_turns: bool
    #: Whether calls can be bound; see `bind`.
    can_bind: bool
    #: Whether gradients move, so that compressing them has a meaning.
    can_compress: bool
    #: Whether weights can be updated in the store; where not, verbs of optimizers say what they mean there.
    runs_optimizer: bool
    #: Codec and residuals, where gradients are compressed.
    feedback: Feedback | None

    @property
    def updater(self) -> Updater | None:
        """The optimizer with its states, if one is set."""

    def init(self, groups: list[Group]) -> None:
        """Take one value for each key; all keys are new."""

    def assign(self, groups: list[Group]) -> None:
        """Overwrite known keys, whose values are checked, and initialise others."""

    def discard(self, keys: list[Key]) -> None:
        """Undo the init of keys, in a broadcast that failed."""

    def push(self, groups: list[Group]) -> None:
        """Sum the values of each key, then update or replace what is stored."""

    def pull(self, groups: list[Group], ignore_sparse: bool) -> None:
        """Write what is stored into every array of each key."""

    def pushpull(self, groups: list[Group], outs: list[Group] | None) -> None:
        """Push, then pull into `outs`, or where that is None into the values themselves."""

    def begin(self, verb: str, arguments: tuple[Any, ...], priority: int | None) -> Callable[[], None]:
        """Begin an operation that is to end in the background; where `begins_async`.

        Returns what is left to do, which needs no lock.
        """

    def is_clear(self, verb: str, keys: list[Key]) -> bool:
        """Whether the keys' next operation may begin without a wait; where `takes_turns`."""

    def wait_for_free_slot(self, verb: str, keys: list[Key]) -> None:
        """Wait for what must be complete before the keys' next operation may begin; where `takes_turns`."""

    def capture_streams(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note in the arguments of an operation what is the caller's and will not be the background's."""

    def bind(self, groups: list[Group], outs: list[Group] | None) -> Callable[[], None]:
        """Check a `pushpull` once, and return the shortest way to do it again; where `can_bind`."""

    def quick_pushpull(self, key: Key, value: Any, out: Any) -> bool | Callable[[], None]:
        """Do a `pushpull` of one key with arrays as the caller wrote them, where that takes few steps.

        False: nothing has happened, and the long way decides. A callable, where `takes_turns`: what is left
        to do, which needs no lock.
        """

    def row_sparse_pull(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """For each (out, row ids) of each key, fill `out` with these rows, sorted and unique."""

    def set_updater(self, updater: Any) -> None:
        """From now on call ``updater(key, merged, stored)`` for each push; an `Updater` may run compiled."""

    def set_compression(self, codec: Codec) -> None:
        """From now on count gradients as what `codec` makes of them; where `can_compress`."""

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """From now on update with `optimizer`, with fresh states."""

    def configure(self, changes: dict[str, Any]) -> None:
        """Change settings of the optimizer that is set."""

    def set_learning_rate(self, lr: float) -> None:
        """Change the rate of the optimizer that is set."""

    def save_states(self, path: str, dump_optimizer: bool) -> None:
        """Write the states of the optimizer that is set."""

    def load_states(self, path: str) -> None:
        """Read the states of the optimizer that is set."""

    def keys(self) -> list[Key]:
        """All keys, in the order of their init."""

    def view(self, key: Key) -> npt.NDArray[Any] | RowSparseArray:
        """Live, read-only memory of a key."""

    def empty(self, key: Key) -> npt.NDArray[Any]:
        """Return a new array of a dense key's shape and type, where the store works best."""

    def copy_into(self, home: Any, array: Any, key: Key) -> None:
        """Copy an array, from anywhere, to one that `empty` made."""

    def fetch(self, key: Key) -> npt.NDArray[Any] | RowSparseArray:
        """Return the value on the host, for a file; live memory where it lies there."""

    def fetch_all(self, keys: list[Key]) -> list[npt.NDArray[Any] | RowSparseArray]:
        """Return the values of many keys, as `fetch` does."""

    def kind(self, key: Key) -> Kind:
        """Storage ("dense" or "row-sparse"), name of the element type, and shape of a key."""

    def key_templates(self) -> dict[Key, npt.NDArray[Any]]:
        """For each key an array of its shape and type, whose content means nothing."""

    def placement(self) -> dict[Key, list[tuple[str, int]]]:
        """Where each key lies: pairs of place and bytes."""

    def num_dead_nodes(self, timeout: float) -> int:
        """Count other processes that are lost, or silent for so many seconds."""

    def join(self) -> None:
        """Take part in no more rounds; the others do not wait for this worker."""

    def barrier(self) -> None:
        """Wait for all workers."""

    def command(self, head: int, body: str) -> None:
        """Hand a command to all servers, if there are any."""

    def abandon(self) -> None:
        """Leave the job as one who is lost: the process has failed, and `close` follows."""

    def close(self) -> None:
        """Give back what the store holds."""
