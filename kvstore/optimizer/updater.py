"""The function that a store calls for each key: it has the states and calls the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import kernels
from ..errors import ArgumentError, ConfigError, ShapeError, StateFileError
from .builtin import ElementwiseOptimizer, arrays_of, map_state
from .optimizer import Array, Index, Optimizer, State

if TYPE_CHECKING:
    import os

    from . import states

Plan: TypeAlias = "tuple[int, tuple[float, ...], Array | None, tuple[Array, ...]]"
Counts: TypeAlias = "tuple[dict[Index, int], int]"

_MISSING: Any = object()


class _PreparedUpdate(NamedTuple):
    """The cached results of `Updater.plan` for a key, valid while state and rule are the same."""

    state: State
    rule_name: str
    rule: int
    master: Array | None
    states: tuple[Array, ...]


def get_updater(optimizer: Optimizer) -> Updater:
    """Return an `Updater` for `optimizer`. MXNet has a function of the same name.

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
    """An optimizer together with the states of all keys that it has updated.

    Parameters
    ----------
    optimizer : Optimizer
        The object itself is used: a change of its settings takes effect at the next update.

    Attributes
    ----------
    optimizer : Optimizer
        The optimizer.
    states : dict
        States by key. A state is created at the first update of its key.

    Raises
    ------
    TypeError
        If `optimizer` is not an `Optimizer`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ArgumentError(f"an updater needs an Optimizer, not {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.states: dict[Index, State] = {}
        self._plans: dict[Index, _PreparedUpdate] = {}

    def __call__(self, index: Any, grad: Any, weight: Any) -> None:
        """Apply one update in place.

        Parameters
        ----------
        index : int or str, or list of these
            The key.
        grad : ndarray or RowSparseArray, or list of these
            Sum of the gradients, as for `Optimizer.update`. It is not changed.
        weight : ndarray, or list of these
            The weight; it is changed in place.

        Raises
        ------
        ShapeError, DTypeError
            If the arguments do not match. The update counts do not change.
        """
        if not isinstance(index, (list, tuple)):
            self._update_key(_plain_key(index), grad, weight)
            return
        counts = [len(one) if isinstance(one, (list, tuple)) else None for one in (index, grad, weight)]
        if len(set(counts)) > 1:
            raise ShapeError(f"a list of keys needs equally many gradients and weights, got {counts}")
        for one, its_grad, its_weight in zip(index, grad, weight, strict=True):
            self._update_key(_plain_key(one), its_grad, its_weight)

    def _update_key(self, index: Index, grad: Any, weight: Array) -> None:
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
        """Count one update of a key and return the arguments of ``kernels.cpu.update`` for it.

        Parameters
        ----------
        index : int or str
            The key.
        weight : ndarray
            Its weight. Only its shape and type are used, unless a new state copies its values.

        Returns
        -------
        rule : int
            Id of the compiled rule.
        parameters : tuple of float
            Numbers for the rule.
        master : ndarray or None
            The float32 copy of a 16-bit weight.
        states : tuple of ndarray
            The other arrays of the state.

        Raises
        ------
        ConfigError
            If the optimizer has no compiled element-wise rule (``optimizer.fused`` is False).
        """
        state = self.states.get(index, _MISSING)
        optimizer: Any = self.optimizer
        entry = self._plans.get(index)
        if entry is None or entry.state is not state or entry.rule_name != optimizer.rule():
            entry = self._prepare_update(index, weight, state)
        return entry.rule, optimizer.advance(index, weight), entry.master, entry.states

    def _prepare_update(self, index: Index, weight: Array, state: Any) -> _PreparedUpdate:
        optimizer = self.optimizer
        if not (isinstance(optimizer, ElementwiseOptimizer) and optimizer.fused):
            raise ConfigError(f"{type(optimizer).__name__} has no compiled element-wise rule to plan with")
        if state is _MISSING:
            state = optimizer.create_state_multi_precision(index, weight)
        master, inner = state if optimizer.keeps_master(weight) else (None, state)
        arrays = arrays_of(inner)
        check_states(optimizer, index, weight, master, arrays)
        self.states[index] = state
        rule = optimizer.rule()
        self._plans[index] = _PreparedUpdate(state, rule, kernels.cpu.rule_id(rule), master, arrays)
        return self._plans[index]

    def follow(self, index: Index, weight: Array) -> None:
        """Update the float32 copy of a 16-bit weight, if there is one, after the caller has set the weight.

        Elements of the copy that round to the new weight do not change, because they can have been loaded
        together with that weight.
        """
        state = self.states.get(index)
        if state is not None and self.optimizer.keeps_master(weight):
            master = arrays_of(state)[0]
            changed = master.astype(weight.dtype) != weight
            master[changed] = weight[changed]

    def snapshot_counts(self) -> Counts:
        """Return the update counts, for `restore_counts`."""
        optimizer = self.optimizer
        return optimizer._index_update_count.copy(), optimizer.num_update

    def restore_counts(self, snapshot: Counts) -> None:
        """Restore the update counts after a failed call. A snapshot can be used several times."""
        counts, num_update = snapshot
        self.optimizer._index_update_count, self.optimizer.num_update = counts.copy(), num_update

    def get_states(self, dump_optimizer: bool = False) -> bytes:
        """Return the states and update counts in the safetensors format.

        With `dump_optimizer`, the result also contains the configuration of the optimizer.

        Raises
        ------
        ConfigError
            If `get_config` of the optimizer fails (`dump_optimizer` only), or a state contains other objects
            than arrays.
        """
        from . import states

        return states.pack_states(self.states, self.optimizer, dump_optimizer)

    def set_states(self, data: bytes) -> None:
        """Load states and update counts that `get_states` returned. If they are not valid, nothing changes.

        Parameters
        ----------
        data : bytes
            If it contains an optimizer, ``self.optimizer`` becomes a new object with this configuration.
            Otherwise it must come from an optimizer of the same name.

        Raises
        ------
        StateFileError
            If `data` is damaged, of another format, or of another optimizer.
        """
        from . import states

        self.adopt(states.unpack_states(data))

    def save(self, path: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the result of `get_states` to a file, atomically."""
        from . import states

        states.write_states(path, self.get_states(dump_optimizer))

    def load(self, path: str | os.PathLike[str], weights: Mapping[Index, Array] | None = None) -> None:
        """Read a file that `save` wrote; see `set_states`.

        Parameters
        ----------
        path : path
            The file.
        weights : dict, optional
            Arrays with the shape and type of the weight of each key. States that do not match them raise an
            error.

        Raises
        ------
        StateFileError
            As in `set_states`, with the path in the message.
        OSError
            If the file cannot be read.
        """
        from . import states

        self.adopt(states.read_states(path), weights)

    def adopt(self, content: states.StatesContent, weights: Mapping[Index, Array] | None = None) -> None:
        """Set the states from the content of a file; see `load`.

        Raises
        ------
        StateFileError
            As in `load`.
        """
        optimizer = content.optimizer or self.optimizer
        if content.rule != type(optimizer).__name__.lower():
            raise StateFileError(
                f"these are states of optimizer {content.rule!r}, and the store's is "
                f"{type(optimizer).__name__.lower()!r}; set that optimizer first"
            )
        _check_forms(content, optimizer, weights or {})
        self.optimizer, self.states, self._plans = optimizer, content.states, {}
        self.restore_counts((content.counts, content.num_update))


def _check_forms(content: states.StatesContent, optimizer: Optimizer, weights: Mapping[Index, Array]) -> None:
    """Raise for loaded states of keys of another kind, or of weights of another shape or type."""
    kinds = {isinstance(key, str) for key in (*content.states, *content.counts, *weights)}
    if weights and len(kinds) > 1:
        raise StateFileError("the optimizer states belong to keys of the other kind (int or str)")
    for key in content.states.keys() & weights.keys():
        fresh = optimizer.create_state_multi_precision(key, weights[key])
        if _state_form(fresh) != _state_form(content.states[key]):
            raise StateFileError(
                f"the optimizer states of key {key!r} do not fit: they are "
                f"{_state_form(content.states[key])} and {type(optimizer).__name__}, as it is set, "
                f"keeps {_state_form(fresh)}"
            )


def _state_form(state: State) -> Any:
    return map_state(state, lambda array: f"{array.dtype}{array.shape}")


def _plain_key(index: Any) -> Index:
    return index.decode() if isinstance(index, bytes) else index


def check_states(
    optimizer: ElementwiseOptimizer,
    index: Index,
    weight: Array,
    master: Array | None,
    arrays: tuple[Array, ...],
) -> None:
    """Raise for states, usually loaded ones, that do not match the compiled rule."""
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
