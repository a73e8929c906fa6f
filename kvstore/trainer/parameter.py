"""`Parameter`: the replicas of one array of a model, each with its gradient."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from ..arrays.host import is_array, readable_array, writable_array
from ..arrays.sparse import RowSparseArray
from ..errors import ArgumentError, ArrayError, ConfigError, ShapeError

_REQUESTS = ("write", "add", "null")


class TrainableParameter(Protocol):
    """The interface of a parameter for a trainer. A trainer accepts any object with these attributes.

    It can also have ``lr_mult`` and ``wd_mult`` (default 1), and ``fresh``; see `Parameter`.
    """

    name: str
    grad_req: str

    def list_data(self) -> list[Any]:
        """Return one array for each replica, or an empty list while the shape is not known."""

    def list_grad(self) -> list[Any]:
        """Return the gradient of each replica."""


class Parameter:
    """One array of a model: its replicas, one for each device, and their gradients.

    Parameters
    ----------
    name : str
        Name of the parameter.
    data : array or list of arrays, optional
        The replicas, all of one shape. They can be arrays of any library that stores accept, or
        `RowSparseArray` for a table of which each batch needs only some rows. They are used in place. With
        None, call `set_data` later.
    grad : array or list of arrays, optional
        The gradient of each replica. With None, the gradients of NumPy arrays are NumPy arrays of zeros; for
        other arrays None raises an error, unless `grad_req` is ``"null"``. Use `RowSparseArray` for gradients
        with few rows.
    grad_req : {"write", "add", "null"}
        With ``"null"`` the parameter has no gradient and is never updated. The other two describe the
        backward pass; a trainer treats them in the same way.
    lr_mult, wd_mult : float
        Factors of the learning rate and of the weight decay. They can be changed while training.

    Attributes
    ----------
    fresh : list of bool, or None
        Whether each gradient was written since the last step. `set_grad` sets it to True, and each step to
        False. With None, all gradients count as written.

    Raises
    ------
    ConfigError, ShapeError, ArgumentError
        An argument is not valid, or the arguments do not match.
    """

    def __init__(
        self,
        name: str,
        data: Any = None,
        grad: Any = None,
        grad_req: str = "write",
        lr_mult: float = 1.0,
        wd_mult: float = 1.0,
    ) -> None:
        if grad_req not in _REQUESTS:
            raise ConfigError(f"parameter {name!r}: grad_req is one of {_REQUESTS}, not {grad_req!r}")
        self.name, self.grad_req = name, grad_req
        self.lr_mult, self.wd_mult = lr_mult, wd_mult
        check_factors(self)
        self.fresh: list[bool] | None = None
        self._data: list[Any] = []
        self._grad: list[Any] = []
        #: The trainer whose store has the weight; it is notified when the data are set.
        self._trainer: Any = None
        if data is not None:
            self._set_arrays(_array_list(data), grad)

    def _set_arrays(self, data: list[Any], grad: Any) -> None:
        _check_arrays(self.name, "data", data)
        if len({tuple(array.shape) for array in data}) != 1:
            raise ShapeError(f"parameter {self.name!r} needs one replica or more, all of one shape")
        self._data = data
        if self.grad_req != "null":
            self._grad = [self._zero_gradient(array) for array in data] if grad is None else _array_list(grad)
            self._check_grads(self._grad)

    def _zero_gradient(self, array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            raise ArgumentError(
                f"parameter {self.name!r} holds a {type(array).__name__}: pass `grad`, call set_grad, or use "
                "grad_req='null'"
            )
        return np.zeros_like(array)

    def _check_grads(self, grads: list[Any]) -> None:
        _check_arrays(self.name, "grad", grads)
        shapes = [tuple(grad.shape) for grad in grads]
        if shapes != [tuple(array.shape) for array in self._data]:
            raise ShapeError(
                f"parameter {self.name!r} has {len(self._data)} replicas of shape {self.shape}, and "
                f"gradients of shapes {shapes}; pass one gradient for each replica"
            )

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of each replica, or None while it is not known."""
        return tuple(self._data[0].shape) if self._data else None

    def list_data(self) -> list[Any]:
        """Return the replicas, or an empty list while there are none."""
        return list(self._data)

    def list_grad(self) -> list[Any]:
        """Return the gradient of each replica.

        If `grad_req` was ``"null"`` before, the gradients of NumPy arrays are new arrays of zeros.

        Raises
        ------
        ConfigError
            `grad_req` is ``"null"``.
        ArgumentError
            It was ``"null"`` before, and the replicas are not NumPy arrays: call `set_grad` first.
        """
        if self.grad_req == "null":
            raise ConfigError(f"parameter {self.name!r} has no gradient: its grad_req is 'null'")
        if self._data and not self._grad:
            self._grad = [self._zero_gradient(array) for array in self._data]
        return list(self._grad)

    def data(self, replica: int = 0) -> Any:
        """Return one replica; it is the array itself, not a copy."""
        self._check_has_data()
        return self._data[replica]

    def grad(self, replica: int = 0) -> Any:
        """Return the gradient of one replica."""
        self._check_has_data()
        return self.list_grad()[replica]

    def set_data(self, value: Any, grad: Any = None) -> None:
        """Copy `value` to every replica. If there are no replicas yet, `value` becomes the replicas.

        If the store of a trainer has the weights, the trainer then creates a new store, with new states of
        the optimizer. All workers must make the same call.

        Raises
        ------
        CapabilityError
            The store of the trainer is on servers, or the trainer did not create it. Nothing has changed.
        ShapeError
            The shape of `value` is not that of the parameter.
        """
        if not self._data:
            self._set_arrays(_array_list(value), grad)
            return
        new = _checked_value(self, value)
        if self._trainer is not None:
            self._trainer._data_change()
        for array in self._data:
            _overwrite_array(array, new)

    def set_grad(self, grads: Any) -> None:
        """Replace the gradient arrays, and set `fresh`.

        Raises
        ------
        ShapeError
            The number of arrays is not that of the replicas, or an array has another shape.
        """
        self._check_has_data()
        new = _array_list(grads)
        self._check_grads(new)
        self._grad, self.fresh = new, [True] * len(new)

    def zero_grad(self) -> None:
        """Set all gradients to zero."""
        for grad in self._grad:
            _overwrite_array(grad, RowSparseArray.zeros(grad.shape, grad.dtype) if _is_rows(grad) else 0)

    def row_sparse_data(self, row_ids: Any) -> RowSparseArray:
        """Return the requested rows of a row-sparse parameter from the store of its trainer.

        Raises
        ------
        ConfigError
            The parameter is dense, or belongs to no trainer.
        RowIndexError
            An id is outside the table.
        """
        array = self.data()
        if not _is_rows(array) or self._trainer is None:
            raise ConfigError(
                f"parameter {self.name!r} {'is dense' if not _is_rows(array) else 'has no trainer yet'}: "
                "row_sparse_data reads row-sparse weights from the store of a trainer"
            )
        rows = RowSparseArray.zeros(array.shape, array.dtype)
        self._trainer.row_sparse_pull(self, rows, row_ids)
        return rows

    def _check_has_data(self) -> None:
        if not self._data:
            raise ArrayError(f"parameter {self.name!r} has no data yet; call set_data first")

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self.shape}, replicas={len(self._data)})"


def _array_list(arrays: Any) -> list[Any]:
    return list(arrays) if isinstance(arrays, (list, tuple)) else [arrays]


def _check_arrays(name: str, what: str, arrays: list[Any]) -> None:
    for array in arrays:
        if not _is_rows(array) and not (is_array(array) and hasattr(array, "shape")):
            raise ArgumentError(
                f"parameter {name!r}: {what} must be an array, or a list with one for each replica, and "
                f"{_shown_value(array)} is not an array; np.asarray converts it"
            )


def _shown_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 40 else f"a {type(value).__name__}"


def multiplier_of(param: TrainableParameter, name: str) -> float:
    """Return ``lr_mult`` or ``wd_mult`` of a parameter, 1 if it has none; a ConfigError names both."""
    value = getattr(param, name, 1.0)
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"parameter {param.name!r}: {name} must be a finite number, got {value!r}")
    return number


def check_factors(param: TrainableParameter) -> None:
    """Raise ConfigError unless both factors are numbers."""
    multiplier_of(param, "lr_mult")
    multiplier_of(param, "wd_mult")


def _is_rows(array: Any) -> bool:
    return isinstance(array, RowSparseArray)


def _checked_value(parameter: Parameter, value: Any) -> Any:
    """Return `value` as an array that can be copied to the replicas."""
    new = value if _is_rows(value) else readable_array(value, f"data of parameter {parameter.name!r}")
    if _is_rows(parameter.data()) and not _is_rows(new):
        new = RowSparseArray.from_dense(new)
    if tuple(new.shape) != parameter.shape:
        raise ShapeError(f"parameter {parameter.name!r} has shape {parameter.shape}, the data {new.shape}")
    return new


def _overwrite_array(array: Any, value: Any) -> None:
    if _is_rows(array):
        array.data, array.indices = value.data.copy(), value.indices.copy()
        return
    memory, deliver = writable_array(array, "array of a parameter")
    memory[...] = value
    if deliver is not None:
        deliver()
