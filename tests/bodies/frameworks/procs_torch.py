"""Bodies of workers with PyTorch; tests/torch_door starts them in an environment that has it."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import jobs
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kvstore as kv
from kvstore.observe import events as timeline_events
from kvstore.settings.launchers import detect_placement
from kvstore.torch import (
    DistributedOptimizer,
    HookState,
    all_gather_object,
    all_reduce,
    allreduce_hook,
    broadcast,
    broadcast_object,
    exchange,
    overlap_choice,
    restore_checkpoint,
    save_checkpoint,
)

RATE, MOMENTUM, BATCH = 0.1, 0.9, 32
torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # the first imports much; workers are forked later
RANK, SIZE = 0, 1


def place() -> None:
    """Workers are forked: the module was imported before they had a rank."""
    global RANK, SIZE
    here = detect_placement()
    RANK, SIZE = here.rank, here.size
    torch.set_num_threads(1)
    if exchanges := os.environ.get("EXCHANGES"):  # beside the backward pass, or after it, on any machine
        overlap_choice.is_faster_at_once = lambda store: exchanges == "after"


@contextlib.contextmanager
def gloo(folder: str) -> Iterator[None]:
    """Be in a process group of all workers, which meet at a file.

    Models must be gone at its end: torch may hang when one outlives its group.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=RANK, world_size=SIZE, timeout=timedelta(seconds=30)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def network(seed: int | None = None) -> nn.Sequential:
    torch.manual_seed(RANK if seed is None else seed)
    return nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def weights(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]).tolist()


def gradient(model: nn.Module) -> list[list[float] | None]:
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


# ------------------------------------------------------------------------------------------ whole steps


def whole_steps(store_name: str, on_store: bool, whole: bool) -> list[float]:
    """Train with each step as one of the store, or with buckets; the weights at the end."""
    place()
    model = network(seed=1)
    with kv.create(store_name) as store:
        optimizer = _optimizer_of(model, store, on_store, whole_steps=whole, bucket_bytes=100)
        _train(model, optimizer, 1, 6)
    return weights(model)


def resumed(store_name: str, on_store: bool, folder: str, steps: int, killed_at: int) -> list[float]:
    """Train on from the newest checkpoint, and die by SIGKILL after a step, if this worker reaches it."""
    place()
    model = network(seed=1)
    model.append(nn.BatchNorm1d(10))  # has buffers
    with kv.create(store_name) as store, kv.CheckpointManager(folder, keep=2) as manager:
        optimizer = _optimizer_of(model, store, on_store, whole_steps=True)
        start = restore_checkpoint(manager, model, optimizer)
        if start is not None:
            assert start.extra == {"seen": start.step * BATCH}
            assert model[3].num_batches_tracked == start.step
        for step in range(1 if start is None else start.step + 1, steps + 1):
            _train(model, optimizer, step, 1)
            save_checkpoint(manager, step, model, optimizer, extra={"seen": step * BATCH})
            if step == killed_at:
                manager.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    return weights(model)


def _optimizer_of(
    model: nn.Module, store: kv.KVStore, on_store: bool, **options: Any
) -> DistributedOptimizer:
    rule = (
        kv.optimizer.Adam(learning_rate=0.01) if on_store else torch.optim.Adam(model.parameters(), lr=0.01)
    )
    return DistributedOptimizer(rule, model.named_parameters(), store, update_on_kvstore=on_store, **options)


def _train(model: nn.Module, optimizer: DistributedOptimizer, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        torch.manual_seed(1000 * step + RANK)
        optimizer.zero_grad()
        model(torch.randn(BATCH, 64)).square().mean().backward()
        optimizer.step()


# ---------------------------------------------------------------------------------------- digits, in all ways


def learn(how: str, store_name: str, folder: str, steps: int) -> list[float]:
    """Train on digits, each worker with its part of each batch, and return the weights at the end."""
    place()
    with gloo(folder) if how in ("gloo", "hook") else contextlib.nullcontext():
        return _learn(how, store_name, folder, steps)


def _learn(how: str, store_name: str, folder: str, steps: int) -> list[float]:
    data = np.load(f"{folder}/digits.npz")
    images, labels = torch.from_numpy(data["images"]), torch.from_numpy(data["labels"])
    with _trained(how, store_name) as (model, own, optimizer):
        for step in range(steps):
            start = step * BATCH % (len(images) - BATCH)
            part = slice(start + RANK * BATCH // SIZE, start + (RANK + 1) * BATCH // SIZE)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[part]), labels[part]).backward()
            optimizer.step()
        return weights(own)


@contextlib.contextmanager
def _trained(how: str, store_name: str) -> Iterator[tuple[nn.Module, nn.Module, Any]]:
    """Yield the function to call, the object with the weights, and the optimizer."""
    own = network()
    sgd: Any = torch.optim.SGD(own.parameters(), lr=RATE, momentum=MOMENTUM)
    if how == "gloo":
        yield DistributedDataParallel(own), own, sgd
    elif how == "hook":
        with kv.create(store_name) as store:
            model = DistributedDataParallel(own, bucket_cap_mb=0.003)  # several buckets, soon cut anew
            model.register_comm_hook(HookState(store), allreduce_hook)
            yield model, own, sgd
            assert len(store.keys()) == 4  # though buckets have changed
    else:
        with kv.create(store_name) as store:
            there = how == "store"
            rule = kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM) if there else sgd
            yield own, own, DistributedOptimizer(rule, own.named_parameters(), store, update_on_kvstore=there)


def recorded(how: str, store_name: str, folder: str) -> list[list[int]]:
    """Train with a timeline, and return its entries: of each step its number, and its buckets."""
    os.environ["KVSTORE_TIMELINE"] = f"{folder}/timeline"
    place()
    with gloo(folder) if how == "hook" else contextlib.nullcontext():
        _train_on_noise(how, store_name)
    events = timeline_events.recorded()
    steps = [one for one in events if one.kind == timeline_events.STEP]
    buckets = [one for one in events if one.kind == timeline_events.BUCKET]
    assert all(one.begin < one.end and one.nbytes for one in buckets)
    assert os.listdir(f"{folder}/timeline")
    return [[one.round, sum(bucket.round == one.round for bucket in buckets)] for one in steps]


def _train_on_noise(how: str, store_name: str) -> None:
    with _trained(how, store_name) as (model, _, optimizer):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(BATCH, 64)).sum().backward()
            optimizer.step()


# --------------------------------------------------------------------------------------- parts of a step


def wrapped(model: nn.Module, store: kv.KVStore, **options: Any) -> DistributedOptimizer:
    sgd = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=0.1)
    return DistributedOptimizer(sgd, model.named_parameters(), store, **options)


def parts_of_a_model(store_name: str) -> dict[str, Any]:
    """In each step other parameters have gradients: on all workers, on one, on none."""
    place()
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("all", "one", "none", "cold")})
    model["cold"].requires_grad_(False)
    one = torch.ones(1, 2)
    with kv.create(store_name) as store:
        optimizer = wrapped(model, store)
        before = weights(model)
        loss = model["all"](one * (RANK + 1)).sum()
        if RANK == SIZE - 1:
            loss = loss + model["one"](-0.0 * one).sum() + model["one"](one).sum() * 4
        loss.backward()
        optimizer.synchronize()
        found = gradient(model)
        optimizer.step()
        after = weights(model)
        optimizer.zero_grad()

        model["cold"].requires_grad_(True)  # thawed, on all workers
        model["all"].requires_grad_(False)
        model["cold"](one * (RANK + 1)).sum().backward()
        optimizer.synchronize()
        thawed = gradient(model)
        optimizer.step()
        return {"before": before, "after": after, "found": found, "thawed": thawed}


def minus_zero(store_name: str, value: float) -> list[Any]:
    """A gradient that is or becomes -0.0 everywhere on its one worker: a gradient, for both."""
    place()
    model = nn.Linear(2, 1, bias=False)
    with kv.create(store_name) as store:
        optimizer = wrapped(model, store)
        if RANK == 0:
            (model(torch.ones(1, 2)) * value).sum().backward()
        optimizer.step()
        return [gradient(model), weights(model)]


def passes(store_name: str) -> list[Any]:
    """Gradients are summed over passes, then over workers; the last step has a pass less."""
    place()
    model = nn.Linear(3, 1)
    found = []
    with kv.create(store_name) as store:
        optimizer = wrapped(model, store, backward_passes_per_step=3, average=False)
        for count in (3, 3, 2):
            optimizer.zero_grad()
            for number in range(count):
                model(torch.full((1, 3), 10.0 * RANK + number)).sum().backward()
            optimizer.synchronize()
            optimizer.synchronize()  # nothing is left to do
            found.append(gradient(model))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return [found, weights(model)]


def interrupted_as_it_sends(store_name: str, on_store: bool) -> list[str]:
    """Ctrl-C arrives while the gradients are passed to the store: no step may use them as averages."""
    place()
    model, found = network(0), []
    with kv.create(store_name) as store:
        optimizer = wrapped(model, store, overlap=False)
        if on_store:
            rule = kv.optimizer.SGD(learning_rate=RATE)
            optimizer.close()
            named, options = model.named_parameters(), {"update_on_kvstore": True, "overlap": False}
            optimizer = DistributedOptimizer(rule, named, store, prefix="on.", **options)
        before = weights(model)
        for call in (exchange, store):  # whichever begins a call here
            name = "start_pushpull" if call is exchange else "push"
            setattr(call, name, _ctrl_c)
        with contextlib.suppress(KeyboardInterrupt):
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            found.append("no interrupt")
        found += [refused(again) for again in (optimizer.zero_grad, optimizer.step, optimizer.step)]
        assert weights(model) == before
        store.barrier()
    return found


def _ctrl_c(*_: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def twice_in_a_pass(store_name: str, overlap: bool) -> list[Any]:
    """The same weight is used twice: autograd adds up by itself; reentrant checkpoints come back."""
    from torch.utils.checkpoint import checkpoint

    place()
    model = nn.Linear(3, 3)
    data = torch.eye(3) * (RANK + 1)
    with kv.create(store_name) as store:
        optimizer = wrapped(model, store, overlap=overlap)
        if overlap:
            model(model(data)).sum().backward()
        else:
            data.requires_grad_(True)
            once = checkpoint(model, data, use_reentrant=True)
            checkpoint(model, once, use_reentrant=True).sum().backward()
        optimizer.synchronize()
        return [gradient(model), weights(model)]


def closures(store_name: str) -> list[Any]:
    place()
    model = network(0)
    calls = []
    with kv.create(store_name) as store:
        inner = torch.optim.LBFGS(
            model.parameters(), lr=0.1, max_iter=3, tolerance_grad=0, tolerance_change=0
        )
        optimizer = DistributedOptimizer(inner, model.named_parameters(), store)

        def closure() -> Any:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(torch.full((1, 64), RANK + 1.0)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return [len(calls), weights(model)]


def schedules(store_name: str, on_store: bool) -> list[float]:
    """A schedule of torch, on torch's optimizer or on the store's."""
    place()
    model = network(0)
    with kv.create(store_name) as store:
        rule: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        if on_store:
            rule = kv.optimizer.SGD(learning_rate=0.5)
        optimizer = DistributedOptimizer(rule, model.named_parameters(), store, update_on_kvstore=on_store)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 64), RANK + 1.0)).sum().backward()
            optimizer.step()
            schedule.step()
    return weights(model)


def states(store_name: str) -> list[Any]:
    """Training continues from a saved state as without a break."""
    place()
    found = []
    data = torch.full((1, 64), RANK + 1.0)
    for cut in (False, True):
        model = network(0)
        with kv.create(store_name) as store:
            optimizer = wrapped(model, store, prefix=f"{cut}.")
            for step in range(4):
                if cut and step == 2:
                    kept = optimizer.state_dict()
                    optimizer.close()
                    optimizer = wrapped(model, store, prefix="again.")
                    optimizer.load_state_dict(kept)
                optimizer.zero_grad()
                model(data).square().sum().backward()
                optimizer.step()
        found.append(weights(model))
    return found


def one_rule_twice(store_name: str) -> list[Any]:
    """A rule is used for two stores, one after the other: the same step in both, and the rule as it was."""
    place()
    rule = kv.optimizer.SGD(learning_rate=1.0)
    found = []
    for _ in range(2):
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        with kv.create(store_name) as store:
            optimizer = DistributedOptimizer(rule, model.named_parameters(), store, update_on_kvstore=True)
            model(torch.full((1, 2), RANK + 1.0)).sum().backward()
            optimizer.step()
        found.append(weights(model))
    return [found, rule.rescale_grad]


def owners() -> dict[str, Any]:
    """Parameters have one optimizer at a time."""
    place()
    model = network(0)
    first, last = model[0].parameters(), model[2].parameters()
    found = {}
    with kv.create("local") as store:
        whole = wrapped(model, store)
        found["second"] = refused(lambda: wrapped(model, store, prefix="2."))
        found["in the store"] = refused(
            lambda: DistributedOptimizer(
                kv.optimizer.SGD(), model.named_parameters(), store, prefix="3.", update_on_kvstore=True
            )
        )
        found["wrapped"] = refused(
            lambda: DistributedOptimizer(whole, model.named_parameters(), store, prefix="4.")
        )
        whole.close()
        found["closed"] = refused(whole.step)
        again = wrapped(model, store, prefix="5.")
        schedule = torch.optim.lr_scheduler.StepLR(again, 1)  # holds it in a cycle
        del again, schedule
        halves = [
            DistributedOptimizer(
                torch.optim.SGD(part, lr=RATE), model.named_parameters(), store, prefix=f"{number}."
            )
            for number, part in enumerate([first, last], 6)
        ]
        before = weights(model)
        model(torch.ones(1, 64)).sum().backward()
        for half in halves:
            half.step()
        moved = np.array(before) != weights(model)
        found["halves"] = [bool(moved[:-250].any()), bool(moved[-250:].any())]
        taken = {"params": list(model[2].parameters())}
        found["group"] = refused(lambda: halves[0].add_param_group(taken))
        found["groups"] = [len(half.param_groups) for half in halves]
    return found


def a_group_too_many(store_name: str) -> list[Any]:
    """A group that is refused leaves the optimizer as it was: it steps on, and takes another group."""
    place()
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    stranger = nn.Parameter(torch.zeros(2))
    with kv.create(store_name) as store:
        sgd = torch.optim.SGD(model[0].parameters(), lr=RATE)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), store)
        text = refused(lambda: optimizer.add_param_group({"params": [stranger], "lr": 9.0}))
        groups = [len(optimizer.param_groups), len(sgd.param_groups)]
        optimizer.add_param_group({"params": model[1].parameters()})
        data = torch.full((1, 2), RANK + 1.0)
        (model[0](data) + model[1](data) + stranger.sum()).sum().backward()
        optimizer.step()
        return [text, groups, len(optimizer.param_groups), gradient(model), stranger.tolist()]


# ------------------------------------------------------------------------------------ types and layouts


def types(store_name: str, name: str) -> list[Any]:
    """Parameters of a 16-bit type; sums are rounded once."""
    place()
    model = nn.Linear(3, 2).to(getattr(torch, name))
    with kv.create(store_name) as store:
        optimizer = wrapped(model, store, average=False)
        model(torch.full((1, 3), 1.0 + RANK / 64, dtype=getattr(torch, name))).sum().backward()
        optimizer.synchronize()
        found = [gradient(model), str(model.weight.grad.dtype)]
        optimizer.step()
        return [*found, weights(model)]


def layouts(store_name: str) -> list[Any]:
    """Convolutions with channels last: memory in another order, and nothing is copied."""
    place()
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 1))
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    with kv.create(store_name) as store:
        optimizer = wrapped(model, store)
        torch.manual_seed(0)
        data = torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
        model(data[RANK : RANK + 1]).sum().backward()
        where = [p.grad.data_ptr() for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.synchronize()
        assert where == [p.grad.data_ptr() for p in model.parameters()]  # type: ignore[union-attr]
        found = [p.grad.contiguous().flatten().tolist() for p in model.parameters()]  # type: ignore[union-attr]
        optimizer.zero_grad()
        numbers = torch.arange(108.0).view(4, 3, 3, 3) * (RANK + 1)
        model[0].weight.grad = numbers  # in a layout that is not the parameter's
        optimizer.synchronize()
        there = model[0].weight.grad.contiguous()
        return [found, there.flatten().tolist(), weights(model)]


class Bag(nn.Module):
    """A table of rows, and a layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(RANK)
        self.table = nn.EmbeddingBag(9, 4, sparse=sparse, mode="sum")
        self.layer = nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(ids))


#: Rows of each step and worker; in the last step none.
ROWS = [[[1, 1, 3], [3, 8, 8]], [[0, 2, 4], [5, 6, 7]], [[], []]]


def rows(store_name: str, sparse: bool, on_store: bool) -> list[Any]:
    """Gradients of a table, sparse or dense, give the same weights."""
    place()
    model = Bag(sparse)
    with kv.create(store_name) as store:
        rule: Any = kv.optimizer.SGD(learning_rate=RATE)
        if not on_store:
            rule = torch.optim.SGD(model.parameters(), lr=RATE)
        optimizer = DistributedOptimizer(
            rule,
            model.named_parameters(),
            store,
            sparse=["table.weight"] if sparse else [],
            update_on_kvstore=on_store,
        )
        for step in ROWS:
            optimizer.zero_grad()
            if step[RANK]:
                model(torch.tensor([step[RANK]])).sum().backward()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                optimizer.synchronize()
            assert on_store or not told, told[0].message
            there = model.table.weight.grad
            if sparse and not on_store:
                summed = [] if there is None else there.indices()[0].tolist()
                assert summed == sorted({*step[0], *step[1]})
            optimizer.step()
    return weights(model)


def rows_by_hook(store_name: str, folder: str, hook: bool) -> list[Any]:
    place()
    with gloo(folder):
        return _rows_by_hook(store_name, hook)


def _rows_by_hook(store_name: str, hook: bool) -> list[Any]:
    model = Bag(True)
    with kv.create(store_name) as store:
        whole = DistributedDataParallel(model)
        if hook:
            whole.register_comm_hook(HookState(store), allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in ROWS[:2]:
            optimizer.zero_grad()
            whole(torch.tensor([step[RANK]])).sum().backward()
            optimizer.step()
    return weights(model)


class Mixed(nn.Module):
    """Layers of three types, so there are three buckets from the first pass on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(RANK)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()
        self.third = nn.Linear(4, 2).bfloat16()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(data).double()).bfloat16()).float()


def static_graph(store_name: str, folder: str, kind: str, hook: bool) -> list[Any]:
    place()
    with gloo(folder):
        return _static_graph(store_name, kind, hook)


def _static_graph(store_name: str, kind: str, hook: bool) -> list[Any]:
    model = Bag(True) if kind == "rows" else Mixed()
    data = torch.tensor([ROWS[0][RANK]]) if kind == "rows" else torch.full((1, 4), RANK + 1.0)
    with kv.create(store_name) as store:
        whole = DistributedDataParallel(model, static_graph=True, bucket_cap_mb=0.00002)
        if hook:
            whole.register_comm_hook(HookState(store), allreduce_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            whole(data).square().sum().backward()
            optimizer.step()
            found.append(weights(model))
        del whole
        return found


# ----------------------------------------------------------------------------------------------- errors


def refused(what: Callable[[], Any]) -> str:
    """Return the error of something that must raise."""
    try:
        what()
    except kv.KVStoreError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")


def mistakes() -> dict[str, str]:
    """Uses that are refused in a process of their own."""
    place()
    model, sgd = network(0), torch.optim.SGD
    found = {}

    def make(*arguments: Any, **options: Any) -> Callable[[], Any]:
        return lambda: DistributedOptimizer(*arguments, **options)

    named = dict(model.named_parameters())
    good = sgd(model.parameters(), lr=0.1)
    with kv.create("local") as store, kv.create("local") as other:
        rule = kv.optimizer.SGD()
        found["kind"] = refused(make(rule, named.items(), store))
        found["kind on store"] = refused(make(good, named.items(), store, update_on_kvstore=True))
        found["store"] = refused(make(good, named.items(), kv.TestStore()))
        found["bytes"] = refused(make(good, named.items(), store, bucket_bytes=-1))
        found["passes"] = refused(make(good, named.items(), store, backward_passes_per_step=0))
        found["bytes type"] = refused(make(good, named.items(), store, bucket_bytes="x"))
        found["passes type"] = refused(make(good, named.items(), store, backward_passes_per_step="2"))
        found["passes half"] = refused(make(good, named.items(), store, backward_passes_per_step=1.5))
        found["sparse type"] = refused(make(good, named.items(), store, sparse=5))
        found["sparse names"] = refused(make(good, named.items(), store, sparse=["0.weight", 5]))
        found["prefix"] = refused(make(good, named.items(), store, prefix=5))
        found["prefix none"] = refused(make(good, named.items(), store, prefix=None))
        found["parameters"] = refused(make(good, model.parameters(), store))
        found["dict"] = refused(make(good, named, store))
        found["module"] = refused(make(good, model, store))
        found["linear"] = refused(make(good, model[0], store))
        found["numbers"] = refused(make(good, list(enumerate(model.parameters())), store))
        found["arrays"] = refused(make(good, [("w", np.ones(2))], store))
        found["none"] = refused(make(good, [], store))
        found["names"] = refused(make(good, list(named.items())[:2], store))
        found["twice"] = refused(make(good, [("w", p) for p in model.parameters()], store))
        found["sparse"] = refused(make(good, named.items(), store, sparse=["nobody"]))
        complex_ = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        found["complex"] = refused(make(sgd([complex_], 0.1), [("c", complex_)], store))
        empty = nn.Parameter(torch.ones(2, device="meta"))
        found["meta"] = refused(make(sgd([empty], 0.1), [("e", empty)], store))
        lazy = nn.LazyLinear(3)
        found["lazy"] = refused(make(sgd(lazy.parameters(), 0.1), lazy.named_parameters(), store))
        found["away"] = refused(lambda: broadcast(store, {"far": _Away()}))
        nested = torch.optim.Adam(model.parameters()).state_dict()
        found["nested"] = refused(lambda: broadcast(store, nested))
        small = {"eight": torch.zeros(2, dtype=torch.float8_e4m3fn)}
        found["float8"] = refused(lambda: broadcast(store, small))
        found["broadcast prefix"] = refused(lambda: broadcast(store, {"a": torch.zeros(2)}, prefix=None))
        found["no state"] = refused(lambda: allreduce_hook(store, None))
        found["none as state"] = refused(lambda: allreduce_hook(None, None))
        other.set_optimizer(rule)
        found["optimizer"] = refused(make(good, named.items(), other))

        bag = Bag(True)
        optimizer = wrapped(bag, store)
        found["sparse gradient"] = refused(bag(torch.tensor([[1, 2]])).sum().backward)
        found["sparse gradient again"] = refused(optimizer.step)
        bag = Bag(False)
        optimizer = wrapped(bag, store, prefix="2.", sparse=["table.weight"])
        found["dense gradient"] = refused(bag(torch.tensor([[1, 2]])).sum().backward)
        optimizer = make(kv.optimizer.SGD(), named.items(), store, prefix="3.", update_on_kvstore=True)()
        found["states"] = refused(optimizer.state_dict)
        found["copy"] = refused(lambda: copy.deepcopy(optimizer))
        found["pickle"] = refused(lambda: pickle.dumps(optimizer))
        found["group"] = refused(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}))
    return found


class _Away(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @staticmethod
    def __new__(cls) -> Any:
        return torch.ones(2).as_subclass(cls)

    @property
    def device(self) -> Any:
        return torch.device("cuda", 0)

    @property
    def is_cpu(self) -> bool:
        return False


def no_rounds(store_name: str, folder: str) -> list[Any]:
    """A store whose workers do not wait sums nothing; it serves for updates in the store."""
    place()
    model = nn.Linear(2, 1, bias=False)
    with gloo(folder), kv.create(store_name) as store:
        found = [refused(lambda: HookState(store)), refused(lambda: wrapped(model, store))]
        rule = kv.optimizer.SGD(learning_rate=1.0)
        optimizer = DistributedOptimizer(
            rule, model.named_parameters(), store, prefix="2.", update_on_kvstore=True
        )
        before = weights(model)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        moved = np.array(before) - weights(model)
        assert moved.min() >= 0.4  # by its own update at least, of 0.5 a worker
        store.barrier()
        return found


def optimizer_later(store_name: str, folder: str, how: str) -> list[str]:
    """The store gets an optimizer when it already sums: pushes would be updates."""
    place()
    with gloo(folder):
        return _optimizer_later(store_name, how)


def _optimizer_later(store_name: str, how: str) -> list[str]:
    own = network(0)
    with kv.create(store_name) as store:
        model: Any = own
        if how == "hook":
            model = DistributedDataParallel(own)
            model.register_comm_hook(HookState(store), allreduce_hook)
        else:
            kept = wrapped(own, store)
            assert kept.store is store
        store.set_optimizer(kv.optimizer.SGD())
        loss = model(torch.ones(1, 64)).sum()
        return [refused(lambda: (loss.backward(), kept.step()))]


def complex_under_hook(store_name: str, folder: str) -> str:
    place()
    with gloo(folder), kv.create(store_name) as store:
        model = DistributedDataParallel(nn.Linear(2, 1, dtype=torch.complex64))
        model.register_comm_hook(HookState(store), allreduce_hook)
        loss = model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum()
        return refused(loss.backward)


def hook_copied(store_name: str, folder: str) -> list[Any]:
    """A mean of weights over time copies the whole model, hook and all."""
    place()
    with gloo(folder):
        return _hook_copied(store_name)


def _hook_copied(store_name: str) -> list[Any]:
    own = nn.Linear(2, 1, bias=False)
    with kv.create(store_name) as store:
        state = HookState(store, prefix="mine.")
        model = DistributedDataParallel(own)
        model.register_comm_hook(state, allreduce_hook)
        sgd = torch.optim.SGD(own.parameters(), lr=RATE)
        for step in range(2):
            if step:
                mean = torch.optim.swa_utils.AveragedModel(model)
            model(torch.full((1, 2), RANK + 1.0)).sum().backward()
            sgd.step()
        mean.update_parameters(model)
        copied = copy.deepcopy(state)
        assert copied is not state
        assert copied.store is store
        found = [gradient(own), refused(lambda: pickle.dumps(state)), refused(lambda: HookState(store, None))]
        del model, mean
        return found


def other_models(store_name: str) -> str:
    """The second worker has another layer."""
    place()
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2 + RANK))
    with kv.create(store_name) as store:
        return refused(lambda: wrapped(model, store))


def a_loss(store_name: str, how: str, folder: str) -> str:
    """A worker dies in the backward pass of another; the other gets the error from step, or from backward."""
    place()
    with gloo(folder) if how == "hook" else contextlib.nullcontext():
        return _a_loss(store_name, how)


def _a_loss(store_name: str, how: str) -> str:
    own = network(0)
    with kv.create(store_name) as store:
        model: Any = own
        if how == "hook":
            model = DistributedDataParallel(own)
            model.register_comm_hook(HookState(store), allreduce_hook)
        else:
            optimizer = wrapped(own, store)
        for _ in range(2):  # in the second, DistributedDataParallel talks about its buckets by gloo
            model(torch.ones(1, 64)).sum().backward()
            if how != "hook":
                optimizer.step()
                optimizer.zero_grad()
        before = weights(own)
        if RANK:
            jobs.tell("here")
            os.kill(os.getpid(), 9)
        loss = model(torch.ones(1, 64)).sum()
        try:
            loss.backward()
            optimizer.step()
        except kv.PeerLostError as error:
            assert weights(own) == before
            return f"worker {error.rank}"
    return ""


def uneven(folder: str, hook: bool) -> list[float]:
    """One worker has more batches, inside of DistributedDataParallel's join."""
    place()
    with gloo(folder):
        return _uneven(hook)


def _uneven(hook: bool) -> list[float]:
    own = network(0)
    with kv.create("shared") as store:
        model = DistributedDataParallel(own, bucket_cap_mb=0.003)
        if hook:
            model.register_comm_hook(HookState(store), allreduce_hook)
        sgd = torch.optim.SGD(own.parameters(), lr=RATE)
        with model.join():
            for number in range(3 + 2 * RANK):
                sgd.zero_grad()
                model(torch.full((1, 64), (number + RANK) / 8)).square().sum().backward()
                sgd.step()
        with model.no_sync():  # nothing is sent, so no worker waits
            model(torch.ones(1, 64)).sum().backward()
        store.barrier()
        return weights(own)


def worlds_differ(folder: str) -> str:
    place()
    with gloo(folder), kv.create("local", processes=1) as store:
        return refused(lambda: HookState(store))


def came_back() -> str:
    """As a worker that the launcher has restarted, in a store that continues without lost workers."""
    place()
    os.environ["KVSTORE_RESTART"] = "1"
    model = network(0)
    with kv.create("shared", on_peer_loss="continue") as store:
        return refused(lambda: wrapped(model, store))


def buffers(store_name: str) -> list[Any]:
    place()
    model = nn.BatchNorm1d(3)
    model.running_mean += RANK  # type: ignore[operator]
    model.register_buffer("flag", torch.tensor([RANK == 0, True]))
    with kv.create(store_name) as store:
        broadcast(store, model.named_buffers())
        return [b.tolist() for b in model.buffers()]


def compressed(store_name: str) -> list[Any]:
    """With a codec: residuals belong to parameters, and an unused parameter gets zeros."""
    place()
    model = nn.ModuleList([nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)])
    with kv.create(store_name) as store:
        optimizer = wrapped(model, store, average=False)
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            (model[0](torch.ones(1, 4)) * 0.3).sum().backward()
            optimizer.synchronize()
            found.append(gradient(model))
        return found


def without_keys(store_name: str) -> dict[str, Any]:
    """Metrics and objects in a store whose optimizer has no part in them."""
    place()
    with kv.create(store_name) as store:
        store.init("w", np.ones(3, np.float32))
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
        loss, counts = torch.tensor(RANK + 5.0, requires_grad=True), torch.full((2, 2), RANK)
        strided, half = torch.full((4, 6), float(RANK)).t(), torch.full((2,), 40000.0, dtype=torch.float16)
        brain, long = torch.full((3,), 3.0, dtype=torch.bfloat16), torch.ones(5000)
        all_reduce(store, [loss, strided, half, brain, long], average=True)
        work = all_reduce(store, counts, async_op=True)
        assert work is not None
        work.wait()
        found: dict[str, Any] = {"counts": counts.tolist(), "loss": loss.item(), "half": half.tolist()}
        found |= {
            "strided": strided.unique().tolist(),
            "brain": brain.tolist(),
            "long": long.unique().tolist(),
        }
        mine = {
            "rank": RANK,
            "t": torch.arange(RANK + 1),
            "b": brain,
            "flag": torch.tensor([True]),
            "n": np.ones(1),
        }
        every = all_gather_object(store, mine)
        assert [type(one["t"]) for one in every] == [torch.Tensor] * 2
        assert [str(one["b"].dtype) for one in every] == ["torch.bfloat16"] * 2
        assert [str(one["flag"].dtype) for one in every] == ["torch.bool"] * 2
        assert [type(one["n"]) for one in every] == [np.ndarray] * 2
        found["every"] = [[one["rank"], one["t"].tolist(), one["b"].tolist()] for one in every]
        found["one"] = broadcast_object(store, {"epoch": RANK}, root=1)
        weights = np.zeros(3, np.float32)
        store.pushpull("w", np.ones(3, np.float32), out=weights)
        found["weights"], found["keys"] = weights.tolist(), store.keys()
        try:
            all_reduce(store, [torch.ones(1), 3.0])
        except kv.ArgumentError as error:
            found["refused"] = str(error)
        return found
