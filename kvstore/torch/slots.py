"""The parameters of a model beside a store: what is known of each, and whether all workers mean the same."""

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
from .tensors import Order, Tensor, check, kind, order, share

_CHECK = "kvstore.torch"  # key of the marks by which models are compared
_MARKS = 1024


@dataclass(eq=False)
class Slot:
    """A parameter, and where its gradient of this step is."""

    name: str
    key: str
    parameter: Tensor
    #: Its place in the model.
    number: int
    order: Order
    sparse: bool
    #: Size of a dense gradient.
    nbytes: int
    #: Its gradient is complete, and is in the bucket that is pushed next, or has been pushed.
    ready: bool = False
    queued: bool = False
    #: The push that it is a part of, until that is over; whether it went well, or how it failed.
    work: Work | None = None
    ended: bool = False
    error: Exception | None = None
    #: The gradient that is on its way, and whether it stands for none.
    gradient: Tensor | None = field(default=None, repr=False)
    absent: bool = False
    #: The gradient that holds the sum over the workers, if sums are not divided.
    total: Tensor | None = field(default=None, repr=False)
    #: The view that hides a gradient which the store has already.
    hidden: Tensor | None = field(default=None, repr=False)
    #: The version of the parameter after the last update by the store.
    version: int = 0

    def wait(self) -> None:
        """Wait for the push, if it is not over."""
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
        """Note that Ctrl-C came as it was to be sent: what has not come back is no average."""
        if not (self.ended or self.error):
            self.error = KVStoreError(
                f"parameter {self.name!r}: an exception, such as Ctrl-C, came as gradients were being sent; "
                "whether they have left is unknown: start the job again from its last checkpoint"
            )

    @property
    def is_under_way(self) -> bool:
        """Whether the gradient is to be sent in this step, or is being sent."""
        waits = self.ready or self.queued
        return self.work is not None or (waits and not self.ended and self.error is None)

    def reset(self) -> None:
        """Forget the exchange before: its gradient, its error."""
        self.ready = self.queued = self.ended = self.absent = False
        self.error = self.gradient = None


def slots(named: Iterable[tuple[str, Tensor]], prefix: str, sparse: Iterable[str]) -> list[Slot]:
    """Make a slot for each parameter; of tied weights the first name counts.

    Raises
    ------
    ConfigError
        There are no parameters, two have one name, or a name in `sparse` is no parameter's.
    ArgumentError
        Other things than pairs of a name and a parameter, or other things than names in `sparse`.
    ArrayError, DTypeError
        A parameter that no store takes.
    """
    rows = _names(sparse)
    found: dict[Tensor, Slot] = {}
    names: set[str] = set()
    for name, parameter in _pairs(named):
        check(name, parameter)
        if parameter in found:
            continue
        if name in names:
            raise ConfigError(f"named_parameters: two parameters have the name {name!r}")
        names.add(name)
        size = parameter.numel() * parameter.element_size()
        found[parameter] = Slot(
            name, prefix + name, parameter, len(found), order(parameter), name in rows, size
        )
    if not found:
        raise ConfigError("named_parameters is empty; note that an iterator can be used only once")
    if rows - names:
        raise ConfigError(f"sparse: no parameter has the name {min(rows - names)!r}")
    return list(found.values())


def _names(sparse: Any) -> set[str]:
    names = [sparse] if isinstance(sparse, str) or not isinstance(sparse, Iterable) else list(sparse)
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"sparse must be names of parameters, not {name!r}")
    return set(names)


def _pairs(named: Any) -> Iterator[tuple[str, Tensor]]:
    wanted = "named_parameters must be pairs of a name and a parameter: pass model.named_parameters(), not"
    if isinstance(named, Mapping) or not isinstance(named, Iterable):
        raise ArgumentError(f"{wanted} {kind(named)}")
    for pair in named:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(f"{wanted} {kind(pair)} among them")
        name, parameter = pair
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            raise ArgumentError(f"{wanted} {kind(name)} with {kind(parameter)}")
        yield name, parameter


def agree(store: KVStore, model: list[Slot], prefix: str) -> None:
    """Make rank 0's parameters everyone's.

    Raises
    ------
    ConfigError
        This worker's model is not that of rank 0.
    """
    if store.is_capable("optimizer"):  # engines of collectives compare by themselves
        _compare(store, model, prefix)
    share(store, [(slot.key, slot.name, slot.parameter.detach()) for slot in model])


def _compare(store: KVStore, model: list[Slot], prefix: str) -> None:
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
