"""Optimizer states in a GPU's memory: created there, copied from the host, and copied back for files."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...devices.streams import DeviceStream
from ...errors import CapabilityError, ShapeError
from ...kernels import cuda
from ...optimizer import Optimizer, Updater
from ...optimizer.builtin import ElementwiseOptimizer, arrays_of, map_state
from .keys import Array, DeviceKey, State, StateArray
from .launches import CallLaunches

#: A weight of two elements, to find out the state that a rule creates for it.
_PROBE = (3.0, 5.0)


def check_rule(optimizer: Optimizer) -> None:
    """Raise CapabilityError unless the optimizer has a CUDA kernel as it is set now."""
    if (
        isinstance(optimizer, ElementwiseOptimizer)
        and optimizer.fused
        and optimizer.rule() in cuda.RULE_STATES
    ):
        return
    name = type(optimizer).__name__
    raise CapabilityError(
        f"{name} has no CUDA kernel; on a GPU there are the rules {', '.join(cuda.RULE_STATES)}. Set one of "
        "these, call set_updater with a function of your own, or push host arrays"
    )


def ensure_state(updater: Updater, entry: DeviceKey, stream: DeviceStream) -> None:
    """Give the key the state of the updater's optimizer: one from the host, or a new one."""
    if entry.owner is updater:
        return
    if entry.key in updater.states:
        entry.state = _brought_up(entry, updater.states[entry.key], stream)
        _check_state(updater.optimizer, entry)
        del updater.states[entry.key]
    else:
        entry.state = _fresh_state(updater.optimizer, entry, stream)
        _check_state(updater.optimizer, entry)
    entry.owner = updater


def split_state(optimizer: Optimizer, entry: DeviceKey) -> tuple[int, tuple[int, ...]]:
    """Return the addresses of the float32 copy of a 16-bit weight, or 0, and of the rule's states."""
    arrays = tuple(leaf.memory.address for leaf in arrays_of(entry.state))
    if optimizer.keeps_master(entry.like):
        return arrays[0], arrays[1:]
    return 0, arrays


def to_host(entry: DeviceKey) -> Any:
    """Copy a state to the host."""
    return map_state(entry.state, lambda leaf: entry.download_array(leaf.memory, leaf.dtype))


def update_master(updater: Updater, entry: DeviceKey, weight: Array, stream: DeviceStream) -> None:
    """Update the float32 copy of a 16-bit weight after a change outside of pushes.

    Elements of the copy that round to the weight stay, as in `Updater.follow`.
    """
    if entry.owner is not updater or not updater.optimizer.keeps_master(entry.like):
        return
    leaf = arrays_of(entry.state)[0]
    master = entry.download_array(leaf.memory, leaf.dtype)
    changed = master.astype(weight.dtype) != weight
    master[changed] = weight[changed]
    entry.upload_array(leaf.memory, master, stream)


def _brought_up(entry: DeviceKey, state: Any, stream: DeviceStream) -> State:
    def copied(array: Array) -> StateArray:
        if array.shape != entry.shape:
            raise ShapeError(
                f"key {entry.key!r}: a state of shape {array.shape} does not fit a weight of {entry.shape}"
            )
        leaf = StateArray(entry.new_memory(array.dtype), array.dtype)
        entry.upload_array(leaf.memory, array, stream)
        return leaf

    return map_state(state, copied)


def _fresh_state(optimizer: Optimizer, entry: DeviceKey, stream: DeviceStream) -> State:
    """Create the state of a key without its weight on the host, if two elements determine it."""
    probe = np.array(_PROBE, entry.dtype)
    form = optimizer.create_state_multi_precision(entry.key, probe)
    try:
        return map_state(form, lambda array: _like_probe(entry, probe, array, stream))
    except _UnclearState:
        weight = entry.to_host()
        return _brought_up(entry, optimizer.create_state_multi_precision(entry.key, weight), stream)


class _UnclearState(Exception):
    """Two elements do not determine the state."""


def _like_probe(entry: DeviceKey, probe: Array, array: Array, stream: DeviceStream) -> StateArray:
    if array.shape != probe.shape:
        raise _UnclearState
    leaf = StateArray(entry.new_memory(array.dtype), array.dtype)
    driver = entry.place.driver
    if (array == probe.astype(array.dtype)).all():
        _copy_weight(entry, leaf, stream)
    elif not array.any():
        if leaf.memory.nbytes:
            driver.fill(leaf.memory.address, 0, leaf.memory.nbytes, stream.handle, entry.device)
    else:
        raise _UnclearState
    return leaf


def _copy_weight(entry: DeviceKey, leaf: StateArray, stream: DeviceStream) -> None:
    target, source = leaf.memory.address, entry.memory.address
    if leaf.dtype == entry.dtype:
        if entry.nbytes:
            entry.place.driver.copy(target, source, entry.nbytes, stream.handle, entry.device)
        return
    spec = cuda.choose_spec("cast", entry.dtype.name, target=leaf.dtype.name)
    launches = CallLaunches(entry.place, [entry])
    launches.add(spec, [cuda.KernelRow(entry.numel, srcs=(source,), dst=target)])
    launches.run(stream)


def _check_state(optimizer: Any, entry: DeviceKey) -> None:
    """Raise an error for a state, usually a loaded one, that the kernel cannot use."""
    arrays = arrays_of(entry.state)
    master = optimizer.keeps_master(entry.like)
    wanted = cuda.RULE_STATES[optimizer.rule()] + master
    kind = np.dtype(np.float32) if master else entry.dtype
    if len(arrays) != wanted or any(leaf.dtype != kind for leaf in arrays):
        raise ShapeError(
            f"key {entry.key!r} has states of types {[str(leaf.dtype) for leaf in arrays]}, and "
            f"{type(optimizer).__name__} as it is set now needs {wanted} of {kind}"
        )
