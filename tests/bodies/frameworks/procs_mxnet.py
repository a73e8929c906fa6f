"""Bodies of processes with MXNet 1.9.1; ``python procs_mxnet.py <function> [argument ...]`` runs one."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))

import numpy as np
from references import lcg

import kvstore as kv
import kvstore.mxnet as kv_mxnet
from kvstore.mxnet.errors import raises_mxnet_error
from kvstore.mxnet.library import mx
from kvstore.mxnet.optimizers import ForeignOptimizer, TranslatedOptimizer

gluon, autograd, nd = mx.gluon, mx.autograd, mx.nd
F = np.float32
CPUS = [mx.cpu(0), mx.cpu(1)]
STEPS = 4


def same(ours: Any, theirs: Any, limit: float = 4) -> None:
    """Weights agree within a few units in the last place of the largest."""
    for one, other in zip(ours, theirs, strict=True):
        unit = float(np.spacing(np.abs(other).max() or F(1)))
        off = np.abs(one.astype(np.float64) - other).max() / unit
        assert off <= limit, f"{off:g} units in the last place, {limit} are right"


def network() -> Any:
    """Two dense layers and a convolution, with the same start wherever it is made."""
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 3, in_channels=4, activation="relu"),
        gluon.nn.GlobalAvgPool2D(),
        gluon.nn.Dense(8, in_units=16, activation="tanh"),
        gluon.nn.Dense(3, in_units=8),
    )
    return net


def start(net: Any, contexts: list[Any]) -> list[Any]:
    """Give all parameters their values; return them in the order of the trainer."""
    net.initialize(ctx=contexts)
    params = [param for _, param in sorted(net.collect_params().items())]
    for number, param in enumerate(params):
        param.set_data(nd.array(0.3 * lcg(int(np.prod(param.shape)), number).reshape(param.shape)))
    return params


def sample(step: int, place: int) -> tuple[Any, Any]:
    """Batch of one worker or device."""
    number = 1000 + 10 * step + place
    return lcg(2 * 4 * 6 * 6, number).reshape(2, 4, 6, 6), lcg(6, number + 5).reshape(2, 3)


def backward(net: Any, step: int, places: list[tuple[int, Any]]) -> None:
    """Leave gradients on each device."""
    with autograd.record():
        losses = []
        for place, context in places:
            x, y = (nd.array(part, ctx=context) for part in sample(step, place))
            losses.append(((net(x) - y) ** 2).sum())
    autograd.backward(losses)


def train(
    store: Any,
    optimizer: Any,
    places: list[tuple[int, Any]],
    steps: range = range(STEPS),
    before: Callable[[Any, int], None] | None = None,
    batch: Callable[[int], int] = lambda step: 8,
    **options: Any,
) -> list[Any]:
    """Train by Gluon's own Trainer; return the weights."""
    net = network()
    params = start(net, [context for _, context in places])
    name, settings = optimizer
    trainer = gluon.Trainer(net.collect_params(), name, dict(settings), kvstore=store, **options)
    for step in steps:
        if before is not None:
            before(trainer, step)
        backward(net, step, places)
        trainer.step(batch(step))
    weights = [param.list_data()[0].asnumpy() for param in params]
    for param, weight in zip(params, weights, strict=True):
        for replica in param.list_data()[1:]:
            same([replica.asnumpy()], [weight], 0)
    return weights


TWO = list(enumerate(CPUS))
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    "sgd-clip": ("sgd", {"learning_rate": 0.1, "clip_gradient": 0.02, "wd": 0.01}),
    "nag": ("nag", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("adam", {"learning_rate": 0.01, "wd": 0.01}),
    "adamax": ("adamax", {"learning_rate": 0.01}),
    "ftml": ("ftml", {"learning_rate": 0.01}),
    "ftrl": ("ftrl", {"learning_rate": 0.1}),
    "signum": ("signum", {"learning_rate": 0.01, "wd_lh": 0.01}),
    "lamb": ("lamb", {"learning_rate": 0.01, "wd": 0.01}),
    "lars": ("lars", {"learning_rate": 0.1, "momentum": 0.9, "momentum_correction": False}),
    "dcasgd": ("dcasgd", {"learning_rate": 0.1}),
    "rmsprop-centered": ("rmsprop", {"learning_rate": 0.01, "centered": True}),
}
#: Rules with formulas of their own in 1.9.1.
OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "adagrad": ("adagrad", {"learning_rate": 0.1, "wd": 0.01}),
    "adadelta": ("adadelta", {"wd": 0.01}),
    "rmsprop": ("rmsprop", {"learning_rate": 0.01}),
    "nag-wd": ("nag", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1}),
    "adam-clip-wd": ("adam", {"learning_rate": 0.01, "clip_gradient": 0.02, "wd": 0.1}),
    "dcasgd-wd": ("dcasgd", {"learning_rate": 0.1, "wd": 0.1}),
    "test": ("test", {}),
}
#: The same, with an attribute besides the states.
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "nadam": ("nadam", {"learning_rate": 0.01}),
    "lars-corrected": ("lars", {"learning_rate": 0.1, "momentum": 0.9}),
    "lbsgd": ("lbsgd", {"learning_rate": 0.1, "momentum": 0.9}),
}
ALL = {**OPTIMIZERS, **OWN, **ALONE}
#: Sums inside, in another order than MXNet's.
LOOSE = {"lamb": 64, "lars": 64, "lars-corrected": 64, "rmsprop-centered": 64, "ftml": 16, "rmsprop": 16}


def local(*names: str) -> None:
    """Two devices on `local` and `device`: the weights of MXNet's own store."""
    for name in names or ALL:
        theirs = train(mx.kv.create("device"), ALL[name], TWO)
        for kind in ("local", "device"):
            with kv_mxnet.create(kind) as store:
                ours = train(store, ALL[name], TWO)
                assert isinstance(
                    store._rule, TranslatedOptimizer if name in OPTIMIZERS else ForeignOptimizer
                ), name
            same(ours, theirs, LOOSE.get(name, 4))


def leave(folder: str, *names: str) -> None:
    """Leave the weights of MXNet's own store, with a device in the place of each worker."""
    for name in names:
        np.savez(f"{folder}/{name}.npz", *train(mx.kv.create("device"), ALL[name], TWO))
        np.savez(
            f"{folder}/{name}.changed.npz", *train(mx.kv.create("device"), ALL[name], TWO, before=change)
        )


def left(folder: str, name: str) -> list[Any]:
    with np.load(f"{folder}/{name}.npz") as arrays:
        return [arrays[key] for key in arrays.files]


def worker(folder: str, kind: str, *names: str) -> None:
    """In a job of two: this worker's part, with the weights that `leave` has left."""
    for name in names:
        for end, before in (("", None), (".changed", change)):
            with kv_mxnet.create(kind) as store:
                ours = train(store, ALL[name], [(store.rank, mx.cpu(0))], before=before)
                same(ours, left(folder, name + end), LOOSE.get(name, 4))
                assert store.num_workers == 2
                assert isinstance(
                    store._rule, TranslatedOptimizer if name in OPTIMIZERS else ForeignOptimizer
                ), name
                store._barrier()


def worker_resumes(folder: str, kind: str) -> None:
    """In a job of two: all workers load the file of one worker, and continue as without a break."""

    def made(steps: range, start_at: list[Any] | None, states: str) -> list[Any]:
        net = network()
        params = start(net, [mx.cpu(0)])
        for param, value in zip(params, start_at or [], strict=bool(start_at)):
            param.set_data(nd.array(value))
        with kv_mxnet.create(kind) as store:
            trainer = gluon.Trainer(net.collect_params(), *ALL["adam"], kvstore=store)
            if start_at:
                trainer.load_states(states)
                store._barrier()
            for step in steps:
                backward(net, step, [(store.rank, mx.cpu(0))])
                trainer.step(8)
            if not start_at and store.rank == 0:
                trainer.save_states(states)
            store._barrier()
            assert trainer.optimizer.num_update == steps.stop
        return [param.data().asnumpy() for param in params]

    states = f"{folder}/{kind}.states"
    half = made(range(2), None, states)
    same(made(range(2, STEPS), half, states), left(folder, "adam"))


def refused(kind: str) -> None:
    """An operation that a job cannot run raises, with advice."""
    with kv_mxnet.create(kind) as store:
        for name in ALONE if kind == "shared" else {**OWN, **ALONE}:
            optimizer = mx.optimizer.create(ALL[name][0], **ALL[name][1])
            try:
                store.set_optimizer(optimizer)
            except kv.CapabilityError as error:
                assert "update_on_kvstore=False" in str(error), error
            else:
                raise AssertionError(name)
        store._barrier()


def trainer_updates() -> None:
    """With update_on_kvstore=False MXNet's own updaters run, on sums of ours."""
    for name in ("sgd", "adagrad", "adam"):  # not nadam: MXNet's replicas drift apart then
        theirs = train(mx.kv.create("device"), ALL[name], TWO, update_on_kvstore=False)
        with kv_mxnet.create("device") as store:
            same(train(store, ALL[name], TWO, update_on_kvstore=False), theirs, 0)


def change(trainer: Any, step: int) -> None:
    """Change the rate, factors of parameters, and weight decay, one after the other."""
    if step == 1:
        trainer.set_learning_rate(0.02)
    if step == 2:
        trainer._params[0].lr_mult = 0.5
        trainer._params[1].wd_mult = 3
        trainer.optimizer.wd = 0.05


def settings_change() -> None:
    """Batch sizes and settings change while training."""
    options: dict[str, Any] = {"steps": range(5), "before": change, "batch": lambda step: 4 + step}
    for name in ("sgd", "adam", "adagrad"):
        theirs = train(mx.kv.create("device"), ALL[name], TWO, **options)
        for kind in ("local", "shared"):
            with kv_mxnet.create(kind) as store:
                same(train(store, ALL[name], TWO, **options), theirs)


def batch_sizes() -> None:
    """Calls without a purpose: nothing changes, at the first step or later, and the next step is as usual."""
    for rule in ("sgd", "adagrad"):
        for kind in ("local", "shared"):
            with kv_mxnet.create(kind) as store:
                net = gluon.nn.Dense(1, in_units=2)
                net.initialize(mx.init.One())
                trainer = gluon.Trainer(net.collect_params(), rule, {"learning_rate": 0.5}, kvstore=store)
                for _ in range(2):
                    with autograd.record():
                        loss = net(nd.ones((1, 2))).sum()
                    loss.backward()
                    before = net.weight.data().asnumpy()
                    for size in (-1, float("nan"), 1e-320):
                        try:
                            trainer.step(size)
                        except kv.ConfigError as error:
                            assert "rescale_grad" in str(error)
                        else:
                            raise AssertionError(f"a batch of {size} was taken")
                        assert (net.weight.data().asnumpy() == before).all()
                    trainer.step(1)
                    assert (net.weight.data().asnumpy() < before).all()


#: The values that a program assigns; other numbers are halved, and 0 and None become an eighth.
NEW: dict[str, Callable[[], Any]] = {
    "lr": lambda: 0.75,
    "lr_mult": lambda: {0: 0.5, "third": 0.25},
    "wd_mult": lambda: {1: 2.0, "third": 0.25},
    "idx2name": lambda: {2: "third"},
    "lr_scheduler": lambda: mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.5),
    "param_dict": lambda: {1: SimpleNamespace(lr_mult=0.5, wd_mult=3.0)},
    "lower_bound": lambda: 0.5,
    "upper_bound": lambda: 0.75,
}
#: Zero means no state, or it decides whether there is a formula: they change to other values only.
KEPT = (
    "multi_precision",
    "begin_num_update",
    "lazy_update",
    "centered",
    "bias_correction",
    "momentum_correction",
)


def assigned(optimizer: Any, setting: str) -> None:
    """Change one setting as a program does."""
    if setting == "parameter":
        optimizer.param_dict[0].lr_mult, optimizer.param_dict[2].wd_mult = 0.25, 4.0
    elif setting in NEW:
        setattr(optimizer, setting, NEW[setting]())
    else:
        setattr(optimizer, setting, (getattr(optimizer, setting) or 0.25) / 2)


def pushed(store: Any, optimizer: Any, setting: str, before: int) -> list[Any]:
    """Push three keys one after the other, four times, and change a setting before one of the pushes."""
    store.set_optimizer(optimizer)
    for number in range(12):
        if number == before:
            assigned(optimizer, setting)
        store.push(number % 3, nd.array(lcg(6, number).reshape(3, 2)))
    outs = [nd.zeros((3, 2)) for _ in range(3)]
    store.pull([0, 1, 2], out=outs)
    return [out.asnumpy() for out in outs]


def every_setting(kind: str = "local") -> None:
    """Each setting of each optimizer, changed before each push of the first steps: the weights of MXNet's."""
    from kvstore.mxnet.optimizers import _COMMON, rule_of

    seen = 0
    for name, (rule, options) in OPTIMIZERS.items():

        def made(rule: str = rule, options: dict[str, Any] = options, objects: bool = False) -> Any:
            objects = {n: SimpleNamespace(lr_mult=1.0, wd_mult=1.0) for n in range(3)} if objects else None
            return mx.optimizer.create(
                rule, param_idx2name={0: "first_weight"}, param_dict=objects, **options
            )

        broken = {"momentum"} if name == "dcasgd" else set()  # 1.9.1 then never changes a weight
        known = {*_COMMON, *rule_of(made()).settings, *NEW, "parameter"} - set(KEPT) - broken
        for setting, before in itertools.product(sorted(known), (0, 1, 2, 3, 5)):
            objects = setting == "parameter"
            stores = [mx.kv.create("local"), kv_mxnet.create(kind)]
            for store in stores:
                store.init([0, 1, 2], [nd.ones((3, 2))] * 3)
            theirs = pushed(stores[0], made(objects=objects), setting, before)
            with stores[1]:
                try:
                    ours = pushed(stores[1], made(objects=objects), setting, before)
                except kv.CapabilityError as error:
                    changed = made(objects=objects)
                    assigned(changed, setting)
                    assert rule_of(changed).differs(changed) in str(error), (name, setting, error)
                    continue
                except kv.ConfigError as error:  # MXNet continues without the state, or fails
                    assert "0 means no state" in str(error), (name, setting, error)
                    assert getattr(made(), setting) == 0
                    continue
            seen += 1
            try:
                same(ours, theirs, 8 * LOOSE.get(name, 4))  # a change that was missed is thousands
            except AssertionError as error:
                raise AssertionError(f"{name}, {setting} before push {before}: {error}") from error
    assert seen > 500, seen


def unfrozen() -> None:
    """A layer that is trained from some step on, at the rate of that step; and two plain calls."""

    def run(store: Any) -> list[Any]:
        params = [
            gluon.Parameter(name, shape=(2,), grad_req=req) for name, req in (("a", "write"), ("b", "null"))
        ]
        for param in params:
            param.initialize(mx.init.Zero())
        trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=True)
        for step in range(3):
            if step == 1:
                params[1].grad_req = "write"
                trainer.set_learning_rate(0.001)
            with autograd.record():
                loss = sum((param.data() * 2).sum() for param in params)
            loss.backward()
            trainer.step(1 + step)
        return [param.data().asnumpy() for param in params]

    def twice(store: Any) -> list[Any]:
        optimizer, outs = mx.optimizer.SGD(learning_rate=1.0), [nd.zeros(1), nd.zeros(1)]
        store.init([1, 2], [nd.zeros(1), nd.zeros(1)])
        store.set_optimizer(optimizer)
        store.push(1, nd.ones(1))
        optimizer.set_learning_rate(10)
        store.push(2, nd.ones(1))
        store.pull([1, 2], out=outs)
        return [out.asnumpy() for out in outs]

    for program, kind in itertools.product((run, twice), ("local", "shared")):
        theirs = program(mx.kv.create("device"))
        with kv_mxnet.create(kind) as store:
            same(program(store), theirs, 0)


def refused_changes() -> None:
    """After a change that MXNet's formula treats in a way of its own, or in a schedule, a push says so."""
    cases: list[tuple[Any, Callable[[Any], None], type[Exception]]] = [
        (mx.optimizer.NAG(momentum=0.9), lambda o: setattr(o, "wd", 0.1), kv.CapabilityError),
        (mx.optimizer.Adam(wd=0.1), lambda o: setattr(o, "clip_gradient", 1), kv.CapabilityError),
        (
            mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.FactorScheduler(1, 0.5)),
            lambda o: setattr(o.lr_scheduler, "base_lr", 5),
            kv.ConfigError,
        ),
        (
            mx.optimizer.SGD(lr_scheduler=mx.lr_scheduler.PolyScheduler(9)),
            lambda o: setattr(o.lr_scheduler, "power", 5),
            kv.ConfigError,
        ),
        (mx.optimizer.SGD(), lambda o: setattr(o, "wd", "x"), kv.ConfigError),
    ]
    for optimizer, change, kind in cases:
        with kv_mxnet.create("local") as store:
            store.init(0, nd.zeros(2))
            store.set_optimizer(optimizer)
            for _ in range(3):
                store.push(0, nd.ones(2))
                optimizer.learning_rate  # noqa: B018 - a schedule changes itself here
            out, after = nd.zeros(2), nd.zeros(2)
            store.pull(0, out=out)
            change(optimizer)
            for _ in range(2):
                assert isinstance(raised(store.push, 0, nd.ones(2)), kind)
            store.pull(0, out=after)
            assert (out.asnumpy() == after.asnumpy()).all()


def schedules() -> None:
    """Every schedule of MXNet, warm-up included; the trainer's rate is that of the store."""
    warm = {"warmup_steps": 2, "warmup_begin_lr": 0.01}

    def made() -> list[Any]:
        s = mx.lr_scheduler
        return [
            s.FactorScheduler(2, 0.5, base_lr=0.1),
            s.FactorScheduler(1, 0.1, stop_factor_lr=0.02, base_lr=0.1, **warm),
            s.MultiFactorScheduler([1, 3], 0.5, base_lr=0.1, **warm),
            s.PolyScheduler(5, base_lr=0.1, pwr=3, final_lr=0.01, **warm),
            s.CosineScheduler(5, base_lr=0.1, final_lr=0.01),
        ]

    def follows(trainer: Any, step: int) -> None:
        rates.append(trainer.learning_rate)

    rates: list[float] = []
    for ours, theirs in zip(made(), made(), strict=True):
        expected = train(mx.kv.create("device"), ("sgd", {"lr_scheduler": theirs}), TWO, range(6), follows)
        wanted, rates[:] = list(rates), []
        with kv_mxnet.create("local") as store:
            same(train(store, ("sgd", {"lr_scheduler": ours}), TWO, range(6), follows), expected)
        assert rates == wanted
        rates.clear()


def own_rules() -> None:
    """A class of the user's, and a schedule of the user's, are run by MXNet's code."""

    @mx.optimizer.register
    class Halving(mx.optimizer.Optimizer):  # type: ignore[misc]
        def create_state(self, index: Any, weight: Any) -> Any:
            return [nd.zeros(weight.shape), None]

        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
            self._update_count(index)
            state[0][:] += 1
            weight[:] = weight * 0.5 - self._get_lr(index) * grad * self.rescale_grad / state[0]

    class Slow(mx.lr_scheduler.LRScheduler):  # type: ignore[misc]
        def __call__(self, num_update: int) -> float:
            return 0.1 / (1 + num_update)

    for optimizer in (("halving", {"learning_rate": 0.1}), ("sgd", {"lr_scheduler": Slow()})):
        theirs = train(mx.kv.create("device"), optimizer, TWO)
        with kv_mxnet.create("local") as store:
            same(train(store, optimizer, TWO), theirs)
            assert isinstance(store._rule, ForeignOptimizer)


def float16() -> None:
    """Weights of sixteen bits, with and without a copy of 32, by ours and by MXNet's code."""
    warnings.filterwarnings("ignore", message=".*float16.*")
    weight, gradients = lcg(40, 1).astype(np.float16), [lcg(40, 2 + k).astype(np.float16) for k in range(4)]

    def run(store: Any, name: str, settings: dict[str, Any]) -> Any:
        store.init("w", nd.array(weight, dtype="float16"))
        store.set_optimizer(mx.optimizer.create(name, **settings))
        for gradient in gradients:
            store.push("w", nd.array(gradient, dtype="float16"))
        out = nd.zeros(40, dtype="float16")
        store.pull("w", out)
        return out.asnumpy()

    for name in ("sgd", "adagrad", "adadelta"):
        for precise in (True, False):
            if name != "sgd" and not precise:
                continue
            settings = {**ALL[name][1], "multi_precision": precise}
            with kv_mxnet.create("local") as store:
                same([run(store, name, settings)], [run(mx.kv.create("local"), name, settings)], 2)


def rows(*ids: int, value: float = 1, shape: tuple[int, int] = (6, 2)) -> Any:
    data = np.full((len(ids), shape[1]), value, F)
    if not ids:
        return nd.sparse.zeros("row_sparse", shape)
    return nd.sparse.row_sparse_array((data, list(ids)), shape=shape)


def sparse_verbs() -> None:
    """Row-sparse arrays of MXNet in every verb."""
    full = nd.array(np.arange(12).reshape(6, 2)).tostype("row_sparse")
    for name in ("local", "device", "shared"):
        with kv_mxnet.create(name) as store, warnings.catch_warnings():
            store.init(3, full)
            out = nd.sparse.zeros("row_sparse", (6, 2))
            store.row_sparse_pull(3, out=out, row_ids=nd.array([4, 1, 4]))
            assert out.indices.asnumpy().tolist() == [1, 4]
            assert out.data.asnumpy().tolist() == [[2, 3], [8, 9]]
            outs = [nd.sparse.zeros("row_sparse", (6, 2)) for _ in CPUS]
            store.row_sparse_pull(3, out=outs, row_ids=[nd.array([0], dtype="int64"), nd.array([5])])
            assert [one.indices.asnumpy().tolist() for one in outs] == [[0], [5]]
            store.row_sparse_pull(3, out=out, row_ids=nd.array([]))
            assert out.data.shape == (0, 2)
            store.pull(3, out=out)  # left alone
            assert out.data.shape == (0, 2)
            store.pull(3, out=out, ignore_sparse=False)
            assert out.asnumpy().tolist() == full.asnumpy().tolist()
            store.push(3, [rows(1, 3), rows(3, value=2)])
            dense = nd.zeros((6, 2))
            store.pull(3, out=dense)
            assert dense.asnumpy()[:, 0].tolist() == [0, 1, 0, 3, 0, 0]
            store.push(3, [rows(), rows()])
            store.pull(3, out=[out, dense], ignore_sparse=False)
            assert out.data.shape == (0, 2)
            assert (dense.asnumpy() == 0).all()
            store.broadcast(4, nd.zeros((6, 2)), out=[dense])
            store.push(4, [rows(1), rows(2)])  # sparse on a dense key
            store.pull(4, out=[out], ignore_sparse=False)
            assert out.indices.asnumpy().tolist() == [1, 2]
            try:
                store.push(4, nd.ones((6, 2)).tostype("csr"))
            except kv.ArrayError as error:
                assert "csr" in str(error)
            else:
                raise AssertionError("csr was taken")


def sparse_rules() -> None:
    """Row-sparse updates, by our rules and by MXNet's code, give the weights of MXNet's own store."""

    def run(store: Any, optimizer: Any, sparse_weight: bool) -> Any:
        weight = nd.array(lcg(12, 3).reshape(6, 2))
        store.init(0, weight.tostype("row_sparse") if sparse_weight else weight)
        store.set_optimizer(optimizer)
        for step, ids in enumerate([(1, 3), (0, 3), (), (5,)]):
            store.push(0, [rows(*ids, value=0.1 * (step + 1)), rows(2, value=0.5)])
        out = nd.zeros((6, 2))
        store.pull(0, out=out)
        return out.asnumpy()

    cases = [
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, True),
        ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "lazy_update": False}, True),
        ("adam", {"learning_rate": 0.1}, True),
        ("adam", {"learning_rate": 0.1}, False),
        ("ftrl", {"learning_rate": 0.1}, True),
        ("adagrad", {"learning_rate": 0.1}, True),
        ("groupadagrad", {"learning_rate": 0.1}, True),
        ("groupadagrad", {"learning_rate": 0.1}, False),
    ]
    for name, settings, sparse_weight in cases:
        theirs = run(mx.kv.create("device"), mx.optimizer.create(name, **settings), sparse_weight)
        for kind in ("local", "shared"):
            with kv_mxnet.create(kind) as store:
                ours = run(store, mx.optimizer.create(name, **settings), sparse_weight)
            same([ours], [theirs])


def sparse_gluon() -> None:
    """An embedding with row-sparse weights, and one with row-sparse gradients, under Gluon's Trainer."""

    def run(store: Any, sparse_weight: bool) -> Any:
        block = gluon.contrib.nn.SparseEmbedding if sparse_weight else gluon.nn.Embedding
        net = block(8, 3) if sparse_weight else block(8, 3, sparse_grad=True)
        net.initialize(ctx=CPUS)
        weight = next(iter(net.collect_params().values()))
        weight.set_data(
            nd.array(lcg(24, 9).reshape(8, 3)).tostype("row_sparse" if sparse_weight else "default")
        )
        trainer = gluon.Trainer(
            net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.5}, kvstore=store
        )
        for step in range(3):
            with autograd.record():
                losses = [(net(nd.array([1 + step, 3 + place], ctx=cpu)) ** 2).sum() for place, cpu in TWO]
            autograd.backward(losses)
            trainer.step(2)
        if sparse_weight:
            return weight.row_sparse_data(nd.arange(8)).asnumpy()
        return weight.list_data()[1].asnumpy()

    for sparse_weight in (True, False):
        theirs = run(mx.kv.create("device"), sparse_weight)
        for kind in ("local", "shared"):
            with kv_mxnet.create(kind) as store:
                same([run(store, sparse_weight)], [theirs])


def compression() -> None:
    """Compressed gradients under Gluon's Trainer: MXNet's bits."""
    options = {"compression_params": {"type": "2bit", "threshold": 0.01}}
    theirs = train(mx.kv.create("device"), ALL["sgd"], TWO, **options)
    with kv_mxnet.create("device") as store:
        same(train(store, ALL["sgd"], TWO, **options), theirs)


def lagging() -> None:
    """A schedule's time is the largest count of all keys, also for keys that are pushed less often."""

    def rates(store: Any, schedule: Any, program: list[list[str]]) -> list[float]:
        store.init(["a", "b", "c"], [nd.zeros(1)] * 3)
        store.set_optimizer(mx.optimizer.SGD(lr_scheduler=schedule))
        out, found = nd.zeros(1), []
        for keys in program:
            store.push(keys, [nd.ones(1)] * len(keys))
            for key in keys:
                store.pull(key, out=out)
                found.append(float(out.asscalar()))
        return found

    draw = np.random.default_rng(5)
    for _ in range(5):
        program = [[key for key in "abc" if draw.random() < 0.4] or ["a"] for _ in range(9)]
        for name, settings in (
            ("FactorScheduler", {"step": 2, "factor": 0.5}),
            ("MultiFactorScheduler", {"step": [2, 4], "factor": 0.5}),
            ("PolyScheduler", {"max_update": 5}),
            ("CosineScheduler", {"max_update": 5, "warmup_steps": 2}),
        ):
            kind = getattr(mx.lr_scheduler, name)
            theirs = rates(mx.kv.create("local"), kind(base_lr=1, **settings), program)
            with kv_mxnet.create("local") as store:
                np.testing.assert_allclose(rates(store, kind(base_lr=1, **settings), program), theirs, 1e-5)


def stale() -> None:
    """Gradients that no backward pass has written: what Gluon does over MXNet's store it does over ours."""

    def steps(store: Any, on_kvstore: bool, ignore: bool, unused: bool) -> list[Any]:
        used, other = gluon.Parameter("used", shape=(1,)), gluon.Parameter("other", shape=(1,))
        for param in (used, other):
            param.initialize(mx.init.Zero(), ctx=CPUS)
        options = {"kvstore": store, "update_on_kvstore": on_kvstore}
        trainer = gluon.Trainer([used, other], "sgd", {"learning_rate": 1.0}, **options)
        told = []
        for step in range(4):
            with autograd.record():
                losses = [
                    (used.data(cpu) + (0 if step or unused else other.data(cpu))) * (place + 1)
                    for place, cpu in TWO
                ]
            autograd.backward(losses)
            try:
                trainer.step(1, ignore_stale_grad=ignore)
            except UserWarning:
                told.append("UserWarning")
            values = [other.data(CPUS[0]), *other.list_grad(), used.data(CPUS[0])]
            told.append([float(value.asscalar()) for value in values])
        return told

    for case in itertools.product((True, False), (True, False), (True, False)):
        theirs = steps(mx.kv.create("device"), *case)
        with kv_mxnet.create("device") as store:
            assert steps(store, *case) == theirs, case
    # What docs/from-mxnet.md says of it.
    pushed_again = [[-3.0 * n, 1, 2, -3.0 * n] for n in (1, 2, 3, 4)]
    assert steps(mx.kv.create("device"), True, False, False) == pushed_again
    sums_of_sums = [[-3.0, n, n, -3 * (i + 1)] for i, n in enumerate((3, 6, 12, 24))]
    assert steps(mx.kv.create("device"), False, True, False) == sums_of_sums


def empty_table() -> None:
    """A table without rows is one of zeros here; MXNet gives no rows then."""
    for make, ids in ((mx.kv.create, []), (kv_mxnet.create, [1, 4])):
        store, out = make("local"), rows()
        store.init("t", rows())
        store.row_sparse_pull("t", out=out, row_ids=nd.array([4, 1]))
        assert out.indices.asnumpy().tolist() == ids
    with store:
        store.set_optimizer(mx.optimizer.SGD(learning_rate=1))
        store.push("t", rows(3))
        dense = nd.zeros((6, 2))
        store.pull("t", out=dense)
        assert dense.asnumpy()[:, 0].tolist() == [0, 0, 0, -1, 0, 0]


def resume(kind: str = "local") -> None:
    """Training that is interrupted and resumed gives the weights of uninterrupted training."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("adam", "adagrad", "sgd"):

            def made(steps: range, load: bool, name: str = name) -> list[Any]:
                net = network()
                params = start(net, CPUS)
                if load:
                    net.load_parameters(f"{folder}/weights", ctx=CPUS)
                with kv_mxnet.create(kind) as store:
                    trainer = gluon.Trainer(net.collect_params(), *ALL[name], kvstore=store)
                    if load:
                        if name != "adagrad":  # whose settings are in MXNet's object only
                            trainer.set_learning_rate(77)
                        trainer.load_states(f"{folder}/states")
                    for step in steps:
                        backward(net, step, TWO)
                        trainer.step(8)
                    net.save_parameters(f"{folder}/weights")
                    trainer.save_states(f"{folder}/states")
                    assert trainer.optimizer.num_update == steps.stop
                return [param.list_data()[0].asnumpy() for param in params]

            whole = made(range(5), False)
            made(range(2), False)
            same(made(range(2, 5), True), whole, 0)


def foreign_files() -> None:
    """A pickle of MXNet is refused, and nothing changes."""
    with tempfile.TemporaryDirectory() as folder, kv_mxnet.create("local") as store:
        Path(folder, "states").write_bytes(mx.optimizer.get_updater(mx.optimizer.SGD()).get_states())
        store.set_optimizer(mx.optimizer.SGD())
        try:
            store.load_optimizer_states(f"{folder}/states")
        except kv.StateFileError:
            return
        raise AssertionError("a pickle was read")


def raised(call: Callable[..., Any], *arguments: Any) -> Exception:
    """Return the error, caught as a program written for MXNet catches it."""
    try:
        call(*arguments)
    except mx.base.MXNetError as error:
        caught: Exception = error
        return caught
    raise AssertionError("no error")


def errors() -> None:
    """An error raised by a store made here is ours, and MXNet's."""
    with kv_mxnet.create("local") as store:
        dense, table = nd.ones(3), nd.ones((3, 1)).tostype("row_sparse")
        store.init("w", dense)
        store.init("table", table)
        wrong: list[tuple[type[Exception], Callable[..., Any], tuple[Any, ...]]] = [
            (kv.DuplicateKeyError, store.init, ("w", dense)),
            (kv.KeyKindError, store.init, (3, dense)),
            (kv.KeyNotFoundError, store.push, ("other", dense)),
            (kv.KeyNotFoundError, store.pull, ("other", dense)),
            (kv.ShapeError, store.pushpull, ("w", nd.ones(4))),
            (kv.DTypeError, store.push, ("w", nd.ones(3, dtype="int32"))),
            (kv.ArrayError, store.row_sparse_pull, ("table", nd.ones((3, 1)), 0, nd.array([1]))),
            (kv.RowIndexError, store.row_sparse_pull, ("table", table, 0, nd.array([3]))),
            (kv.ArgumentError, store.set_optimizer, ("sgd",)),
            (kv.ConfigError, store.set_optimizer, (mx.optimizer.SGD(rescale_grad=-1),)),
            (kv.CapabilityError, store.set_gradient_compression, ({"type": "2bit"},)),
            (kv.ConfigError, store.load_optimizer_states, ("/nowhere/at/all",)),
            (kv.ConfigError, kv_mxnet.create, ("locla",)),
        ]
        for kind, call, arguments in wrong:
            error = raised(call, *arguments)
            assert isinstance(error, kind), (kind, error)
            assert type(error).__name__ == kind.__name__
            assert isinstance(error, kv.KVStoreError)
        assert isinstance(raised(store.pull, "other", dense), KeyError)
        store._set_updater(lambda key, merged, stored: 1 / 0)
        assert isinstance(raised(store.push, "w", dense).__cause__, ZeroDivisionError)
    assert isinstance(raised(store.push, "w", dense), kv.ClosedError)
    try:
        store.store.push("w", np.ones(3, F))
    except kv.ClosedError as closed:
        assert not isinstance(closed, mx.base.MXNetError)  # it was not called through MXNet


def every_error() -> None:
    """Each class of ours can be one of MXNet's, keeps its attributes, and is made once."""

    @raises_mxnet_error
    def fail(error: Exception) -> None:
        raise error

    classes = [one for one in vars(kv.errors).values() if isinstance(one, type)]
    kinds = [one for one in classes if issubclass(one, Exception)]
    assert len(kinds) > 20
    for kind in kinds:
        first, second = kind("text"), kind("again")
        for error in (first, second, first):
            assert raised(fail, error) is error
            assert isinstance(error, kind)
        assert type(first) is type(second)
        assert str(first) == "text"
    lost = raised(fail, kv.PeerLostError("gone", role="server", rank=3))
    assert isinstance(lost, kv.PeerLostError)
    assert (lost.role, lost.rank) == ("server", 3)


def shown_states() -> None:
    """States of a store's optimizer are NDArrays, nested as MXNet nests them."""

    def plain(state: Any) -> Any:
        if isinstance(state, tuple):
            return [plain(part) for part in state]
        return state if state is None else state.asnumpy()

    def states(store: Any, name: str, settings: dict[str, Any], dtype: str) -> Any:
        store.init("w", nd.array(lcg(12, 3).reshape(6, 2), dtype=dtype))
        store.set_optimizer(mx.optimizer.create(name, **settings))
        gradient = nd.array(lcg(12, 5).reshape(6, 2), dtype=dtype)
        store.push("w", [gradient, gradient])
        ((_, state),) = store._updater.states.items()
        return state

    def agree(ours: Any, theirs: Any) -> None:
        if isinstance(theirs, list):
            for one, other in zip(ours, theirs, strict=True):
                agree(one, other)
        elif theirs is None:
            assert ours is None
        else:
            np.testing.assert_allclose(ours, theirs, 1e-3, 1e-6)

    plainest = {"plain sgd": ("sgd", {}), "plain nag": ("nag", {"momentum": 0.0})}
    for name, settings in {**ALL, **plainest}.values():
        for dtype in ("float32", "float16"):
            options = {**settings, "multi_precision": dtype == "float16"}
            theirs = plain(states(mx.kv.create("local"), name, options, dtype))
            for kind in ("local", "shared"):
                with kv_mxnet.create(kind) as store:
                    agree(plain(states(store, name, options, dtype)), theirs)
    with kv_mxnet.create("local") as store:
        momentum = states(store, "sgd", {"momentum": 0.9}, "float32")
        copied, before = copy.deepcopy(momentum), momentum.asnumpy()
        store.push("w", nd.ones((6, 2)))
        assert (momentum.asnumpy() != before).all()  # it lies in the store
        assert (copied.asnumpy() == before).all()
        store.set_optimizer(kv.optimizer.Adam())
        store.push("w", nd.ones((6, 2)))
        assert isinstance(store._updater.optimizer, kv.optimizer.Adam)
        assert store._updater.states["w"][0].shape == (6, 2)
        store._set_updater(lambda key, merged, stored: None)
        assert store._updater is None


def names() -> None:
    """Our stores are in MXNet's registry, and MXNet's own names stay MXNet's."""
    for name in ("local", "device", "shared"):
        store = mx.kv.create(f"kvstore_{name}")
        assert isinstance(store, kv_mxnet.KVStore)
        assert isinstance(store, mx.kvstore.KVStore)
        assert (store.type, store.rank, store.num_workers) == (name, 0, 1)
        assert store.is_capable("optimizer")
        store.close()
        with kv_mxnet.create(f"KVSTORE_{name}") as again:
            assert again.type == name
    assert not isinstance(mx.kv.create("local"), kv_mxnet.KVStore)
    theirs = train("device", ALL["sgd"], TWO)
    same(train("kvstore_local", ALL["sgd"], TWO), theirs)
    for wrong, error in (("kvstore_locla", ValueError), ("teststore", TypeError), (3, TypeError)):
        try:
            kv_mxnet.create(wrong)  # type: ignore[arg-type]
        except error:
            continue
        raise AssertionError(wrong)


def updaters() -> None:
    """A function of MXNet's kind updates; so does MXNet's own Updater; an error reaches the caller."""
    with kv_mxnet.create("local") as store:
        store.init("w", nd.ones(3))
        calls = []

        def update(key: Any, merged: Any, stored: Any) -> None:
            calls.append(key)
            stored += merged * 2

        store._set_updater(update)
        store.push("w", [nd.ones(3), nd.ones(3)])
        out = nd.zeros(3)
        store.pull("w", out=out)
        assert out.asnumpy().tolist() == [5, 5, 5]
        assert calls == ["w"]
        store._set_updater(mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=1)))
        store.pushpull("w", nd.ones(3), out=out)
        assert out.asnumpy().tolist() == [4, 4, 4]
        store._set_updater(lambda key, merged, stored: 1 / 0)
        try:
            store.push("w", nd.ones(3))
        except kv.UpdaterError:
            pass
        else:
            raise AssertionError("the error was lost")
        store.set_optimizer(kv.optimizer.SGD(learning_rate=2))
        store.push("w", nd.ones(3))
        store.pull("w", out=out)
        assert out.asnumpy().tolist() == [2, 2, 2]


def arrays() -> None:
    """Every element type, the NumPy front end, slices, and results that MXNet's engine reads at once."""
    with kv_mxnet.create("local") as store:
        for number, name in enumerate(("float16", "float32", "float64", "int8", "uint8", "int32", "int64")):
            value = nd.array([[1, 2], [3, 4]], dtype=name)
            store.init(number, value)
            store.push(number, [value, value + 1])
            out = nd.zeros((2, 2), dtype=name)
            store.pull(number, out=out)
            assert (out * 2).asnumpy().tolist() == [[6, 10], [14, 18]], name
        store.init(10, mx.np.ones((2, 2)))
        new = mx.np.zeros((2, 2))
        store.pushpull(10, [mx.np.ones((2, 2)), mx.np.ones((2, 2))], out=new)
        assert (new + 1).tolist() == [[3, 3], [3, 3]]
        big = nd.zeros((4, 2))
        store.pull(10, out=big[1:3])
        assert big.asnumpy()[:, 0].tolist() == [0, 2, 2, 0]
        value = nd.random.normal(shape=(1000, 1000))  # under way when it is pushed
        store.init(11, nd.zeros((1000, 1000)))
        store.pushpull(11, nd.dot(value, value), out=value)
        logging.getLogger().info("%s", value.sum().asscalar())


def module() -> None:
    """MXNet's Module, the older front end."""
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="layer")
    symbol = mx.sym.LinearRegressionOutput(symbol, mx.sym.Variable("label"), name="out")
    x, y = lcg(32, 1).reshape(8, 4), lcg(24, 2).reshape(8, 3)

    def run(store: Any) -> list[Any]:
        mod = mx.mod.Module(symbol, label_names=["label"], context=CPUS)
        data = mx.io.NDArrayIter(x, y, batch_size=4, label_name="label")
        weights = {"layer_weight": nd.array(lcg(12, 3).reshape(3, 4)), "layer_bias": nd.zeros(3)}
        settings = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.1}
        mod.fit(
            data, num_epoch=3, kvstore=store, optimizer_params=settings, arg_params=weights, eval_metric="mse"
        )
        found, _ = mod.get_params()
        return [found[name].asnumpy() for name in sorted(found)]

    theirs = run(mx.kv.create("device"))
    for kind in ("local", "device"):
        with kv_mxnet.create(kind) as store:
            same(run(store), theirs)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
    print("well")  # noqa: T201
