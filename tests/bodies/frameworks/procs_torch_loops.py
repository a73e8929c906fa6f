"""Training loops as users write them; tests/torch_door compares their weights with those of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

import kvstore as kv
from frameworks import procs_torch
from frameworks.procs_torch import place, weights
from kvstore.torch import DistributedOptimizer

STEPS, WORKERS, WIDTH = 4, 2, 6

Loop = Callable[["Run"], Any]


class Run:
    """A model, its optimizer, and the batches of this worker; of all workers, in a process of its own."""

    def __init__(self, make: Callable[[Any], Any], store: kv.KVStore | None, options: dict[str, Any]) -> None:
        self.rank, self._workers = procs_torch.RANK, 1 if store else WORKERS
        torch.manual_seed(self.rank if store else 0)
        self.model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 1))
        self.optimizer = make(self.model.parameters())
        self.is_alone = store is None
        if store is not None:
            named = self.model.named_parameters()
            self.optimizer = DistributedOptimizer(self.optimizer, named, store, bucket_bytes=50, **options)

    def batch(self, number: int) -> torch.Tensor:
        """Return the batch of this worker in a step; alone, those of all workers."""
        ranks = range(WORKERS) if self.is_alone else [self.rank]
        return torch.cat([_batch(number, rank) for rank in ranks])

    def loss(self, number: int) -> torch.Tensor:
        return self.model(self.batch(number)).square().mean() * 5

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()


def _batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def run_loops(store_name: str, more: dict[str, Any], repeats: int = 1) -> dict[str, Any]:
    """Run each loop some times with a store; return the weights, which must be equal each time."""
    place()
    with kv.create(store_name) as store:
        return {name: [_run(store, name, more, number) for number in range(repeats)] for name in LOOPS}


def _run(store: kv.KVStore, name: str, more: dict[str, Any], number: int) -> list[float]:
    make, options, loop = LOOPS[name]
    run = Run(make, store, {**more, **options, "prefix": f"{name}.{number}."})
    loop(run)
    run.optimizer.close()
    return weights(run.model)


def run_alone() -> dict[str, Any]:
    """Run each loop in one process, with the batches of all workers."""
    place()
    found = {}
    for name, (make, _, loop) in LOOPS.items():
        run = Run(make, None, {})
        loop(run)
        found[name] = weights(run.model)
    return found


# ------------------------------------------------------------------------------------------------- loops


def _sgd(parameters: Any, **options: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9, **options)


def _fused(parameters: Any) -> Any:
    return _sgd(parameters, fused=True)


def _plain(between: Callable[[Run], Any], run: Run) -> None:
    """Run something of the program between backward and step."""
    for number in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(number).backward()
        between(run)
        run.optimizer.step()


def _clip_norm(run: Run) -> None:
    nn.utils.clip_grad_norm_(run.parameters(), 1.0)


def _clip_value(run: Run) -> None:
    nn.utils.clip_grad_value_(run.parameters(), 0.5)


def _clamp_data(run: Run) -> None:
    for parameter in run.parameters():
        parameter.grad.data.clamp_(-0.5, 0.5)  # type: ignore[union-attr]


def _replace(run: Run) -> None:
    for parameter in run.parameters():
        parameter.grad = parameter.grad / parameter.grad.norm()  # type: ignore[operator, union-attr]


def _step_if_small(run: Run) -> None:
    """Read the gradients, and decide by them about the step, on all workers alike."""
    total = sum(float(parameter.grad.square().sum()) for parameter in run.parameters())  # type: ignore[union-attr]
    if total > 2.5:
        run.optimizer.zero_grad()


def _scaled(between: Callable[[Run], Any], run: Run, overflow: int = -1) -> None:
    """Use a GradScaler; in step `overflow` the loss of worker 0 is infinite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for number in range(STEPS):
        run.optimizer.zero_grad()
        factor = float("inf") if number == overflow and run.rank == 0 else 1.0
        scaler.scale(run.loss(number) * factor).backward()
        if between is not _nothing:
            scaler.unscale_(run.optimizer)
            between(run)
        scaler.step(run.optimizer)
        scaler.update()
    assert scaler.get_scale() == (2048.0 if overflow < 0 else 1024.0) * (2.0 if overflow < 0 else 1.0)


def _nothing(run: Run) -> None:
    pass


def _several_losses(run: Run) -> None:
    """Two passes before a step; of the second, some parameters have no gradient."""
    for number in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(number).backward()
        (run.model[3].weight.square().sum() * 2).backward()  # type: ignore[operator, union-attr]
        _clip_norm(run)
        run.optimizer.step()


def _without_zero_grad(run: Run) -> None:
    """Gradients of all steps add up."""
    for number in range(STEPS):
        run.loss(number).backward()
        run.optimizer.step()


def _model_zero_grad(run: Run) -> None:
    """Gradients are cleared by the model, and one pass has no step."""
    for number in range(STEPS):
        run.model.zero_grad()
        run.loss(number).backward()
        if number == 1:
            continue
        run.optimizer.step()


def _accumulated(run: Run) -> None:
    for number in range(STEPS):
        run.optimizer.zero_grad()
        if run.is_alone:
            run.loss(2 * number).backward()
        else:
            with run.optimizer.no_sync():
                run.loss(2 * number).backward()
        run.loss(2 * number + 1).backward()
        _clip_norm(run)
        run.optimizer.step()


def _fewer_passes(run: Run) -> None:
    """Two passes a step; in the last step only one."""
    for number in range(STEPS):
        run.optimizer.zero_grad()
        run.loss(2 * number).backward()
        if number < STEPS - 1:
            run.loss(2 * number + 1).backward()
        elif not run.is_alone:
            run.optimizer.synchronize()
        _clip_norm(run)
        run.optimizer.step()


def _thawed(run: Run) -> None:
    """A layer has no gradients in the first half, and is the only one in the second."""
    first, last = list(run.model[0].parameters()), list(run.model[3].parameters())  # type: ignore[union-attr]
    for number in range(STEPS):
        is_late = 2 * number >= STEPS
        run.optimizer.zero_grad()
        for parameter in run.parameters():
            parameter.requires_grad_(any(parameter is one for one in (first if is_late else last)))
        run.loss(number).backward()
        nn.utils.clip_grad_norm_(first if is_late else last, 1.0)
        run.optimizer.step()


def _hooked(run: Run) -> None:
    """Hooks of the program change gradients: of tensors, and of parameters, before and after ours."""
    weight: Any = run.model[0].weight
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(_triple)
    _plain(_clip_norm, run)


def _triple(parameter: Any) -> None:
    parameter.grad.mul_(3)


def _unused(run: Run) -> None:
    """On worker 1, or in its half of the batches, the last layer is not used."""
    for number in range(STEPS):
        run.optimizer.zero_grad()
        ranks = range(WORKERS) if run.is_alone else [run.rank]
        losses = []
        for rank in ranks:
            inner = run.model[:3](_batch(number, rank))  # type: ignore[index]
            losses.append((inner if rank else run.model[3](inner)).square().mean() * 5)
        (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
        _clip_norm(run)
        run.optimizer.step()


def _checkpointed(run: Run) -> None:
    """Reentrant checkpoints: passes within a pass, also if all layers are in them."""
    from torch.utils.checkpoint import checkpoint

    for number in range(STEPS):
        run.optimizer.zero_grad()
        data = run.batch(number).requires_grad_(True)
        inner = checkpoint(run.model[:2], data, use_reentrant=True)  # type: ignore[index]
        rest: Any = run.model[2:] if number % 2 else run.model[2]  # type: ignore[index]
        inner = checkpoint(rest, inner, use_reentrant=True)
        (inner if number % 2 else run.model[3](inner)).square().mean().backward()
        _clip_norm(run)
        run.optimizer.step()


def _failed_pass(run: Run) -> None:
    """A pass that an exception ends on all workers, which the program catches; gradients are cleared."""
    weight: Any = run.model[2].weight
    for number in range(STEPS):
        run.model.zero_grad()
        if number == 1:
            handle = weight.register_hook(_fail)
            try:
                run.loss(number).backward()
            except ValueError:
                handle.remove()
                run.model.zero_grad()
                continue
        run.loss(number).backward()
        _clip_norm(run)
        run.optimizer.step()


def _fail(gradient: Any) -> None:
    raise ValueError("out of memory, say")


#: Of each loop: how its optimizer is made, the options that it needs, and its code.
LOOPS: dict[str, tuple[Callable[[Any], Any], dict[str, Any], Loop]] = {
    "clip_norm": (_sgd, {}, partial(_plain, _clip_norm)),
    "clip_value": (_sgd, {}, partial(_plain, _clip_value)),
    "clamp_data": (_sgd, {}, partial(_plain, _clamp_data)),
    "replace": (_sgd, {}, partial(_plain, _replace)),
    "step_if_small": (_sgd, {}, partial(_plain, _step_if_small)),
    "scaler": (_sgd, {}, partial(_scaled, _nothing)),
    "scaler_fused": (_fused, {}, partial(_scaled, _nothing)),
    "scaler_clip": (_sgd, {}, partial(_scaled, _clip_norm)),
    "scaler_clip_fused": (_fused, {}, partial(_scaled, _clip_norm)),
    "scaler_overflow": (_sgd, {}, partial(_scaled, _nothing, overflow=1)),
    "scaler_overflow_fused": (_fused, {}, partial(_scaled, _nothing, overflow=1)),
    "scaler_overflow_clip_fused": (_fused, {}, partial(_scaled, _clip_norm, overflow=1)),
    "several_losses": (_sgd, {}, _several_losses),
    "without_zero_grad": (_sgd, {}, _without_zero_grad),
    "model_zero_grad": (_sgd, {}, _model_zero_grad),
    "no_sync": (_sgd, {}, _accumulated),
    "fewer_passes": (_sgd, {"backward_passes_per_step": 2}, _fewer_passes),
    "thawed": (_sgd, {}, _thawed),
    "hooked": (_sgd, {}, _hooked),
    "unused": (_sgd, {}, _unused),
    "checkpointed": (_sgd, {"overlap": False}, _checkpointed),
    "failed_pass": (_sgd, {"overlap": False}, _failed_pass),
}
