"""The arguments of a trainer: checked, and converted to one form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ArgumentError, ShapeError
from ..optimizer import Optimizer, create
from .parameter import TrainableParameter


def in_order(params: Any) -> list[TrainableParameter]:
    """Return the parameters of a list, or of a dict in the order of its keys."""
    if isinstance(params, Mapping):
        params = [params[name] for name in _sorted_parameters(params)]
    if not isinstance(params, (list, tuple)):
        raise ArgumentError(f"params must be a list or a dict of parameters, not {type(params).__name__}")
    for param in params:
        if not all(hasattr(param, name) for name in ("name", "grad_req", "list_data", "list_grad")):
            raise ArgumentError(
                f"{param!r} is not a parameter: it needs name, grad_req, list_data() and list_grad(), like "
                "kvstore.trainer.Parameter"
            )
    seen: set[int] = set()
    for param in params:
        if id(param) in seen:
            raise ArgumentError(
                f"parameter {param.name!r} occurs twice, and each step would update it twice; list it once"
            )
        seen.add(id(param))
    return list(params)


def _sorted_parameters(params: Mapping[str, Any]) -> list[str]:
    try:
        return sorted(params)
    except TypeError:
        kinds = ", ".join(sorted({type(name).__name__ for name in params}))
        raise ArgumentError(
            f"params must be a dict from names to parameters, and its keys are of types {kinds}: make all str"
        ) from None


def make_optimizer(optimizer: str | Optimizer, settings: Mapping[str, Any] | None) -> Optimizer:
    """Return the optimizer; create it if its name is given."""
    if isinstance(optimizer, Optimizer):
        if settings:
            raise ArgumentError("optimizer_params go with the name of an optimizer, not with an optimizer")
        return optimizer
    if not isinstance(optimizer, str):
        raise ArgumentError(
            f"optimizer must be a name such as 'sgd', or an Optimizer such as kv.optimizer.SGD(), not "
            f"{optimizer!r}"
        )
    named = isinstance(settings, Mapping) and all(isinstance(name, str) for name in settings)
    if settings is not None and not named:
        raise ArgumentError(
            f"optimizer_params must be a dict of keywords, such as {{'learning_rate': 0.1}}, not {settings!r}"
        )
    return create(optimizer, **(settings or {}))


def count_replicas(params: list[TrainableParameter]) -> int:
    """Return the number of replicas of the parameters; 1 as long as no parameter has data."""
    counts = {len(arrays): param.name for param in params if (arrays := param.list_data())}
    if len(counts) > 1:
        (few, one), (many, other) = sorted(counts.items())[:2]
        raise ShapeError(
            f"all parameters need equally many replicas: {one!r} has {few}, {other!r} has {many}"
        )
    return next(iter(counts), 1)
