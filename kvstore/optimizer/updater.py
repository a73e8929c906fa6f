"""The function that a store calls for each key: it keeps the states and lets the optimizer work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import kernels
from ..errors import ConfigError, ShapeError, StateFileError
from .builtin import Elementwise, arrays_of
from .optimizer import Array, Index, Optimizer, State

if TYPE_CHECKING:
    import os

    from . import states

Plan: TypeAlias = "tuple[int, tuple[float, ...], Array | None, tuple[Array, ...]]"
Counts: TypeAlias = "tuple[dict[Index, int], int]"

_MISSING: Any = object()


class _Prepared(NamedTuple):
    """What `Updater.plan` found out about a key, as long as state and rule stay the same."""

    state: State
    rule_name: str
    rule: int
    master: Array | None
    states: tuple[Array, ...]


def get_updater(optimizer: Optimizer) -> Updater:
    """Return an updater for `optimizer`, as MXNet names it.

    Examples
    --------
    >>> import numpy as np
    >>> updater = get_updater(create("sgd", learning_rate=0.5))
    >>> w = np.ones(2, np.float32)
    >>> updater("w", np.ones(2, np.float32), w)
    >>> w
    array([0.5, 0.5], dtype=float32)
    """
    return Updater(optimizer)


class Updater:
    """An optimizer together with the states of the keys that it has met.

    Parameters
    ----------
    optimizer : Optimizer
        Shared with the caller: what it changes holds from the next update on.

    Attributes
    ----------
    optimizer : Optimizer
    states : dict
        State by key, made when the key is first updated.

    Raises
    ------
    TypeError
        If `optimizer` is none.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"an updater needs an Optimizer, not {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.states: dict[Index, State] = {}
        self._plans: dict[Index, _Prepared] = {}

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Apply one update in place.

        Parameters
        ----------
        index : int or str, or list of these
            The key.
        grad : ndarray or RowSparseArray, or list of these
            Summed gradient, as the optimizer's `update` takes it. Not changed.
        weight : ndarray, or list of these

        Raises
        ------
        ShapeError, DTypeError
            If they do not fit together. Counts are then as before.
        """
        if not isinstance(index, (list, tuple)):
            self._update(_plain_key(index), grad, weight)
            return
        counts = [len(one) if isinstance(one, (list, tuple)) else None for one in (index, grad, weight)]
        if len(set(counts)) > 1:
            raise ShapeError(f"a list of keys needs equally many gradients and weights, got {counts}")
        for one, its_grad, its_weight in zip(index, grad, weight, strict=True):
            self._update(_plain_key(one), its_grad, its_weight)

    def _update(self, index: Index, grad: Any, weight: Array) -> None:
        optimizer = self.optimizer
        state = self.states.get(index, _MISSING)
        if state is _MISSING:
            state = optimizer.create_state_multi_precision(index, weight)
        before = self.snapshot_counts()
        try:
            optimizer.update_multi_precision(index, weight, grad, state)
        except BaseException:
            self.restore_counts(before)
            raise
        self.states[index] = state

    def plan(self, index: Index, weight: Array) -> Plan:
        """Count one update of a key, and say what ``kernels.cpu.update`` needs for it.

        Parameters
        ----------
        index : int or str
            The key.
        weight : ndarray
            Its weight; only its shape and type matter, except that a state made now may hold a copy of it.

        Returns
        -------
        rule : int
            Id of the compiled rule.
        parameters : tuple of float
        master : ndarray or None
            The float32 copy behind a 16-bit weight.
        states : tuple of ndarray

        Raises
        ------
        ConfigError
            If the optimizer has no compiled element-wise rule (``optimizer.fused`` is False).
        """
        state = self.states.get(index, _MISSING)
        optimizer: Any = self.optimizer
        entry = self._plans.get(index)
        if entry is None or entry.state is not state or entry.rule_name != optimizer.rule():
            entry = self._prepare(index, weight, state)
        return entry.rule, optimizer.advance(index, weight), entry.master, entry.states

    def _prepare(self, index: Index, weight: Array, state: Any) -> _Prepared:
        optimizer = self.optimizer
        if not (isinstance(optimizer, Elementwise) and optimizer.fused):
            raise ConfigError(f"{type(optimizer).__name__} has no compiled element-wise rule to plan with")
        if state is _MISSING:
            state = optimizer.create_state_multi_precision(index, weight)
        master, inner = state if optimizer.keeps_master(weight) else (None, state)
        arrays = arrays_of(inner)
        check_states(optimizer, index, weight, master, arrays)
        self.states[index] = state
        rule = optimizer.rule()
        self._plans[index] = _Prepared(state, rule, kernels.cpu.rule_id(rule), master, arrays)
        return self._plans[index]

    def follow(self, index: Index, weight: Array) -> None:
        """Bring the float32 copy of a 16-bit weight, if there is one, in line with a weight set from outside.

        Where the copy rounds to the weight it stays: it may have been loaded together with that weight.
        """
        state = self.states.get(index)
        if state is not None and self.optimizer.keeps_master(weight):
            master = arrays_of(state)[0]
            changed = master.astype(weight.dtype) != weight
            master[changed] = weight[changed]

    def snapshot_counts(self) -> Counts:
        """Return the counts of updates, for `restore_counts`."""
        optimizer = self.optimizer
        return optimizer._index_update_count.copy(), optimizer.num_update

    def restore_counts(self, snapshot: Counts) -> None:
        """Put the counts back, after a call that failed; a snapshot may be used again."""
        counts, num_update = snapshot
        self.optimizer._index_update_count, self.optimizer.num_update = counts.copy(), num_update

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return states and counts, and the optimizer's configuration if wanted, in the safetensors format.

        Raises
        ------
        ConfigError
            If the optimizer cannot be described (`dump_optimizer` only), or a state holds more than arrays.
        """
        from . import states

        return states.pack(self.states, self.optimizer, dump_optimizer)

    def set_states(self, data: bytes) -> None:
        """Take over what `get_states` returned; this updater changes only if all of it is sound.

        Parameters
        ----------
        data : bytes
            Without an optimizer in it, it must come from an optimizer of the same name. With one, that
            becomes ``self.optimizer``, a new object.

        Raises
        ------
        StateFileError
            If `data` is damaged, of another format, or of another optimizer.
        """
        from . import states

        self._adopt(states.unpack(data))

    def save(self, path: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write `get_states` to a file, which holds either its old or its new content whatever happens."""
        from . import states

        states.write(path, self.get_states(dump_optimizer))

    def load(self, path: str | os.PathLike[str], weights: Mapping[Index, Array] | None = None) -> None:
        """Read a file of `save`; see `set_states`.

        Parameters
        ----------
        path : path
        weights : dict, optional
            Arrays of the shape and type of each key's weight; states that do not fit them are refused.

        Raises
        ------
        StateFileError
            As `set_states`, with the path in the message.
        OSError
            If the file cannot be read.
        """
        from . import states

        content = states.read(path)
        _check_content(content, content.optimizer or self.optimizer, weights or {})
        self._adopt(content)

    def _adopt(self, content: states.Content) -> None:
        optimizer = content.optimizer or self.optimizer
        if content.rule != type(optimizer).__name__.lower():
            raise StateFileError(
                f"these are states of optimizer {content.rule!r}, and the store's is "
                f"{type(optimizer).__name__.lower()!r}; set that optimizer first"
            )
        self.optimizer, self.states, self._plans = optimizer, content.states, {}
        self.restore_counts((content.counts, content.num_update))


def _check_content(content: states.Content, optimizer: Optimizer, weights: Mapping[Index, Array]) -> None:
    """Refuse loaded states that belong to keys of another kind, or to weights of another shape or type."""
    kinds = {isinstance(key, str) for key in (*content.states, *content.counts, *weights)}
    if weights and len(kinds) > 1:
        raise StateFileError("the optimizer states belong to keys of the other kind (int or str)")
    if content.rule != type(optimizer).__name__.lower():
        return  # refused when they are adopted, in better words
    for key in content.states.keys() & weights.keys():
        fresh = optimizer.create_state_multi_precision(key, weights[key])
        if _form(fresh) != _form(content.states[key]):
            raise StateFileError(
                f"the optimizer states of key {key!r} do not fit: they are {_form(content.states[key])} and "
                f"{type(optimizer).__name__}, as it is set, keeps {_form(fresh)}"
            )


def _form(state: State) -> Any:
    if isinstance(state, tuple):
        return tuple(_form(part) for part in state)
    return None if state is None else f"{state.dtype}{state.shape}"


def _plain_key(index: Any) -> Index:
    return index.decode() if isinstance(index, bytes) else index


def check_states(
    optimizer: Elementwise, index: Index, weight: Array, master: Array | None, arrays: tuple[Array, ...]
) -> None:
    """Refuse states, loaded ones mostly, that the compiled rule cannot work on."""
    wanted = kernels.cpu.rule_states(optimizer.rule())
    if len(arrays) != wanted:
        raise ConfigError(
            f"key {index!r} has {len(arrays)} state arrays and {type(optimizer).__name__} wants "
            f"{wanted} as it is set now; momentum and the like must be as they were when the states were made"
        )
    kind = weight.dtype if master is None else "float32"
    for array in (*arrays, *(() if master is None else (master,))):
        if array.shape != weight.shape or array.dtype != kind:
            raise ShapeError(
                f"key {index!r}: a state of shape {array.shape} and type {array.dtype} does not fit the "
                f"weight of shape {weight.shape} and type {weight.dtype}"
            )
