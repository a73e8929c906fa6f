"""The parameters of a model in an exchange: the state of each, and the comparison of all workers."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..engine import Work
from ..errors import ArgumentError, ConfigError, KVStoreError
from ..store import KVStore
from .tensors import Order, Tensor, broadcast_by_key, check_tensor, memory_order, type_name

_CHECK = "kvstore.torch"  # key of the digests by which models are compared
_MARKS = 1024


@dataclass(eq=False)
class GradientSlot:
    """A parameter, and the state of its gradient in this step."""

    name: str
    key: str
    parameter: Tensor
    #: Its index in the model.
    number: int
    order: Order
    sparse: bool
    #: Size of a dense gradient.
    nbytes: int
    #: Whether its gradient is complete, and is in the next bucket or has been pushed.
    ready: bool = False
    queued: bool = False
    #: Its push, until that is complete; whether the push has succeeded, or its error.
    work: Work | None = None
    ended: bool = False
    error: Exception | None = None
    #: The gradient that is being exchanged, and whether it replaces an absent one.
    gradient: Tensor | None = field(default=None, repr=False)
    absent: bool = False
    #: The gradient that holds the sum over the workers, if sums are not divided.
    total: Tensor | None = field(default=None, repr=False)
    #: The view that hides a gradient which the store already has.
    hidden: Tensor | None = field(default=None, repr=False)
    #: The version of the parameter after the last update by the store.
    version: int = 0

    def wait(self) -> None:
        """Wait for the push, if it is not complete."""
        work = self.work
        if work is None:
            self._check_sent()
            return
        try:
            work.wait()
        except Exception as error:
            if work.done():
                self.work, self.error = None, error
            raise
        self.ended, self.work = True, None

    def _check_sent(self) -> None:
        """Raise if Ctrl-C has interrupted the push: the gradient may not be an average."""
        if not (self.ended or self.error):
            self.error = KVStoreError(
                f"parameter {self.name!r}: an exception, such as Ctrl-C, has interrupted the push of "
                "its gradient, and it is unknown whether it was sent: start the job again from its last "
                "checkpoint"
            )

    @property
    def is_being_sent(self) -> bool:
        """Return whether the gradient of this step is not complete yet: it will be sent, or is being sent."""
        waits = self.ready or self.queued
        return self.work is not None or (waits and not self.ended and self.error is None)

    def reset(self) -> None:
        """Reset the state of the previous exchange: its gradient, its error."""
        self.ready = self.queued = self.ended = self.absent = False
        self.error = self.gradient = None


def make_slots(named: Iterable[tuple[str, Tensor]], prefix: str, sparse: Iterable[str]) -> list[GradientSlot]:
    """Make a slot for each parameter; tied weights have one slot, with the first name.

    Raises
    ------
    ConfigError
        No parameter is given, two have one name, or `sparse` has an unknown name.
    ArgumentError
        `named` is not pairs of a name and a parameter, or `sparse` is not names.
    ArrayError, DTypeError
        A parameter has a type that no store supports.
    """
    rows = _sparse_names(sparse)
    found: dict[Tensor, GradientSlot] = {}
    names: set[str] = set()
    for name, parameter in _named_pairs(named):
        check_tensor(name, parameter)
        if parameter in found:
            continue
        if name in names:
            raise ConfigError(f"named_parameters: two parameters have the name {name!r}")
        names.add(name)
        size = parameter.numel() * parameter.element_size()
        found[parameter] = GradientSlot(
            name, prefix + name, parameter, len(found), memory_order(parameter), name in rows, size
        )
    if not found:
        raise ConfigError("named_parameters is empty; note that an iterator can be used only once")
    if rows - names:
        raise ConfigError(f"sparse: no parameter has the name {min(rows - names)!r}")
    return list(found.values())


def _sparse_names(sparse: Any) -> set[str]:
    names = [sparse] if isinstance(sparse, str) or not isinstance(sparse, Iterable) else list(sparse)
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"sparse must be names of parameters, not {name!r}")
    return set(names)


def _named_pairs(named: Any) -> Iterator[tuple[str, Tensor]]:
    wanted = "named_parameters must be pairs of a name and a parameter: pass model.named_parameters(), not"
    if isinstance(named, Mapping) or not isinstance(named, Iterable):
        raise ArgumentError(f"{wanted} {type_name(named)}")
    for pair in named:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(f"{wanted} {type_name(pair)} among them")
        name, parameter = pair
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            raise ArgumentError(f"{wanted} {type_name(name)} with {type_name(parameter)}")
        yield name, parameter


def broadcast_parameters(store: KVStore, model: list[GradientSlot], prefix: str) -> None:
    """Overwrite the parameters of all workers with those of rank 0.

    Raises
    ------
    ConfigError
        The model of this worker is not that of rank 0.
    """
    if store.is_capable("optimizer"):  # engines of collectives make this comparison themselves
        _compare_models(store, model, prefix)
    broadcast_by_key(store, [(slot.key, slot.name, slot.parameter.detach()) for slot in model])


def _compare_models(store: KVStore, model: list[GradientSlot], prefix: str) -> None:
    mine = np.zeros(1 + _MARKS, np.int64)
    mine[0] = len(model)
    for place, slot in enumerate(model):
        about = (slot.name, str(slot.parameter.dtype), tuple(slot.parameter.shape), slot.order, slot.sparse)
        mine[1 + place % _MARKS] ^= zlib.crc32(repr(about).encode())
    first = np.empty_like(mine)
    store.broadcast(prefix + _CHECK, mine, out=first)
    if (first == mine).all():
        return
    differing = set(np.flatnonzero(first[1:] != mine[1:]))
    names = [repr(slot.name) for place, slot in enumerate(model) if place % _MARKS in differing]
    raise ConfigError(
        f"worker {store.rank} has another model than worker 0: it has {len(model)} parameters, and worker 0 "
        f"has {first[0]}; the first that differs in name, shape, type, memory order or sparseness is "
        f"{(names or ['missing here'])[0]}"
    )
