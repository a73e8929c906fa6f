"""The base class: registry, keywords, rates, counts, configuration, changes while training, own rules."""

import json
import logging
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import kvstore.optimizer as opt
from kvstore.errors import ArgumentError, ConfigError, DTypeError, ShapeError
from kvstore.optimizer import registry
from kvstore.optimizer.lr_scheduler import FactorScheduler, LRScheduler, PolyScheduler

NAMES = sorted(name for name, rule in registry._registry.items() if rule.__module__.startswith("kvstore."))


@pytest.fixture
def clean_registry():
    before = dict(registry._registry)
    yield
    registry._registry.clear()
    registry._registry.update(before)


def weight_for(name):
    return np.ones((2, 3), np.float32)


# ---------------------------------------------------------------------------------------------- registry


def test_create_takes_any_case():
    assert type(opt.create("SgD")) is opt.SGD
    assert type(opt.Optimizer.create_optimizer("adamw")) is opt.AdamW


def test_unknown_name_lists_the_known_and_the_nearest():
    with pytest.raises(ValueError, match=r"'admw', did you mean 'adamw'\?; known: adadelta, adagrad, "):
        opt.create("admw")


@pytest.mark.parametrize("name", ["ccsgd", "lbsgd", "adabelief", "lans"])
def test_retired_names_say_what_to_do(name):
    with pytest.raises(ConfigError, match=r"use|another name"):
        opt.create(name)


def test_name_must_be_a_string():
    with pytest.raises(ArgumentError, match="string"):
        opt.create(3)


@pytest.mark.usefixtures("clean_registry")
def test_own_rule():
    @opt.register
    class Halve(opt.Optimizer):
        """Halve the weight and keep the old value."""

        def __init__(self, share=0.5, **common):
            super().__init__(**common)
            self.share = share

        def create_state(self, index, weight):
            return (None, np.zeros_like(weight))

        def update(self, index, weight, grad, state):
            self._update_count(index)
            state[1][...] = weight
            weight *= self.share

    updater = opt.get_updater(opt.create("halve", share=0.25))
    w = np.full(3, 8, np.float32)
    updater("w", w, w)
    updater("w", w, w)
    assert w.tolist() == [0.5] * 3
    assert updater.states["w"][1].tolist() == [2] * 3
    assert updater.optimizer._index_update_count == {"w": 2}
    assert not updater.optimizer.fused
    assert updater.optimizer.get_config()["share"] == 0.25
    assert opt.Optimizer.from_config(**updater.optimizer.describe()).share == 0.25
    updater.optimizer.configure(share=0.75)
    assert updater.optimizer.share == 0.75
    with pytest.raises(ConfigError, match="no compiled"):
        updater.plan("w", w)


@pytest.mark.usefixtures("clean_registry")
def test_own_rule_under_multi_precision():
    @opt.Optimizer.register
    class Down(opt.Optimizer):
        """Subtract the gradient."""

        def update(self, index, weight, grad, state):
            self._update_count(index)
            assert weight.dtype == grad.dtype == np.float32
            weight -= self._get_lr(index) * grad

    w = np.ones(2, np.float16)
    updater = opt.get_updater(Down(learning_rate=1e-4, multi_precision=True))
    for _ in range(10):
        updater(0, np.ones(2, np.float16), w)
    assert updater.states[0][0].tolist() == pytest.approx([0.999] * 2, abs=1e-6)
    assert w.tolist() == np.full(2, 0.999, np.float16).tolist()


@pytest.mark.usefixtures("clean_registry")
def test_a_changed_built_in_goes_through_its_own_update():
    @opt.register
    class Louder(opt.SGD):
        """SGD with ten times the gradient."""

        def update(self, index, weight, grad, state):
            super().update(index, weight, 10 * grad, state)

    for multi_precision, dtype in ((False, np.float32), (True, np.float16)):
        updater = opt.get_updater(Louder(learning_rate=0.5, multi_precision=multi_precision))
        w = np.zeros(2, dtype)
        updater(0, np.ones(2, dtype), w)
        assert w.tolist() == [-5, -5]
        assert not updater.optimizer.fused


@pytest.mark.usefixtures("clean_registry")
def test_overriding_a_name_warns():
    with pytest.warns(UserWarning, match="replaces kvstore"):

        @opt.register
        class SGD(opt.Optimizer):
            """Another."""

    with pytest.raises(ConfigError, match="not registered"):
        opt.SGD().describe()


def test_register_takes_classes_only():
    for wrong in (3, int, opt.SGD()):
        with pytest.raises(ArgumentError, match="subclass of Optimizer"):
            opt.register(wrong)


def test_base_class_says_what_to_override():
    with pytest.raises(NotImplementedError, match="must override update"):
        opt.Optimizer().update(0, None, None, None)


# ---------------------------------------------------------------------------------------------- keywords


@pytest.mark.parametrize("name", NAMES)
def test_unknown_keyword(name):
    with pytest.raises(ArgumentError, match="no keyword 'learning_rat', did you mean 'learning_rate'"):
        opt.create(name, learning_rat=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("given", "ours"), [("lr", "learning_rate"), ("LR", "learning_rate"), ("weight_decay", "wd")]
)
def test_keywords_of_other_libraries(name, given, ours):
    with pytest.raises(ArgumentError, match=f"no keyword '{given}', did you mean '{ours}'"):
        opt.create(name, **{given: 1})
    with pytest.raises(ConfigError, match=f"no setting '{given}', did you mean '{ours}'"):
        opt.create(name).configure(**{given: 1})


def test_keywords_of_other_libraries_that_this_rule_has_under_another_name():
    for given, ours in (("betas", "beta1"), ("eps", "epsilon")):
        with pytest.raises(ArgumentError, match=f"no keyword '{given}', did you mean '{ours}'"):
            opt.Adam(**{given: 1})
    with pytest.raises(ArgumentError, match=r"SGD has no keyword 'betas'; it takes"):
        opt.SGD(betas=(0.9, 0.999))


# -------------------------------------------------------------------------------------------------- repr


@pytest.mark.parametrize("name", NAMES)
def test_repr_shows_what_a_rule_takes(name):
    optimizer = opt.create(name, **({} if name == "groupadagrad" else {"wd": 0.25}))  # it has no decay
    text = repr(optimizer)
    assert text.startswith(f"{type(optimizer).__name__}(learning_rate={optimizer.learning_rate!r}, ")
    assert text.endswith(", num_update=0)")
    for keyword in optimizer.keywords - opt.Optimizer().keywords | {"wd"}:
        assert f"{keyword}={getattr(optimizer, keyword)!r}" in text
    assert not [keyword for keyword in ("rescale_grad", "clip_gradient", "lr_mult", "sym") if keyword in text]


def test_repr_as_given():
    assert repr(opt.SGD(0.5, momentum=0.9, wd=1e-4)) == (
        "SGD(learning_rate=0.5, momentum=0.9, lazy_update=False, wd=0.0001, num_update=0)"
    )
    text = repr(
        opt.Adam(
            beta1=0.8, clip_gradient=2, rescale_grad=0.5, lr_mult={"a": 2}, lr_scheduler=FactorScheduler(3)
        )
    )
    assert text.startswith(
        "Adam(learning_rate=0.01, beta1=0.8, beta2=0.999, epsilon=1e-08, lazy_update=False, "
    )
    for part in (
        "rescale_grad=0.5",
        "clip_gradient=2.0",
        "lr_mult={'a': 2.0}",
        "lr_scheduler=FactorScheduler(step=3",
    ):
        assert part in text


def test_repr_of_an_own_rule():
    class Own(opt.Optimizer):
        def __init__(self, power=2, forgotten=1, **common):
            super().__init__(**common)
            self.power = power

    assert repr(Own(power=3)) == "Own(learning_rate=0.01, power=3, wd=0.0, num_update=0)"


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("adagrad", "eps", "epsilon"),
        ("groupadagrad", "eps", "epsilon"),
        ("lars", "eps", "epsilon"),
        ("rmsprop", "gamma1", "rho"),
        ("rmsprop", "gamma2", "momentum"),
    ],
)
def test_old_keywords_name_the_new_one(name, old, new):
    with pytest.raises(ArgumentError, match=f"{old!r} is now called {new!r}"):
        opt.create(name, **{old: 0.1})


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("sgd", {"learning_rate": float("nan")}),
        ("sgd", {"learning_rate": "0.1"}),
        ("sgd", {"momentum": -0.1}),
        ("sgd", {"wd": float("inf")}),
        ("sgd", {"clip_gradient": -1}),
        ("sgd", {"rescale_grad": None}),
        ("sgd", {"multi_precision": "yes"}),
        ("sgd", {"begin_num_update": -1}),
        ("sgd", {"begin_num_update": 1.5}),
        ("sgd", {"lr_mult": {"a": "b"}}),
        ("sgd", {"lr_mult": 3}),
        ("sgd", {"param_idx2name": {0: 1}}),
        ("sgd", {"lr_scheduler": 0.1}),
        ("signum", {"momentum": 1}),
        ("adam", {"beta1": 1.0}),
        ("adam", {"epsilon": -1e-8}),
        ("rmsprop", {"rho": True}),
        ("sgld", {"seed": 2**32}),
        ("groupadagrad", {"wd": 0.1}),
    ],
)
def test_values_out_of_range(name, kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        opt.create(name, **kwargs)


def test_keywords_that_say_nothing_here_are_taken():
    optimizer = opt.SGD(sym=object(), aggregate_num=4, use_fused_step=True, param_dict={})
    assert not {"sym", "aggregate_num", "use_fused_step", "param_dict"} & set(optimizer.get_config())


# ----------------------------------------------------------------------------------- rates and multipliers


def test_multipliers_by_key_name_and_parameter():
    parameter = SimpleNamespace(lr_mult=7.0, wd_mult=8.0)
    optimizer = opt.SGD(
        learning_rate=1.0, wd=1.0, param_idx2name={0: "a", 1: "b", 2: "c", 3: "d"}, param_dict={3: parameter}
    )
    optimizer.set_lr_mult({"a": 2, "b": 3, 1: 5, 3: 11, "unknown": 13})
    optimizer.set_wd_mult({"c": 4})
    assert [optimizer._get_lr(i) for i in range(5)] == [2, 5, 1, 7, 1]
    assert [optimizer._get_wd(i) for i in range(5)] == [1, 1, 4, 8, 1]
    parameter.lr_mult = 0.0
    assert optimizer._get_lr(3) == 0
    optimizer.set_lr_mult({})
    assert optimizer._get_lr(0) == 1


def test_biases_decay_as_in_master():
    assert opt.SGD(wd=0.5, param_idx2name={0: "fc_bias"})._get_wd(0) == 0.5


def test_learning_rate_and_schedules():
    assert opt.SGD().learning_rate == 0.1
    assert opt.SGD(lr_scheduler=FactorScheduler(2, base_lr=0.4)).learning_rate == 0.4
    optimizer = opt.SGD(lr_scheduler=lambda n: 1 / (n + 1))
    assert optimizer.learning_rate == 1
    optimizer._update_count("a")
    assert optimizer.learning_rate == optimizer._get_lr("a") == 0.5


def test_a_rate_replaces_that_of_a_copy_of_the_schedule(caplog):
    schedule = FactorScheduler(2, base_lr=0.4)
    with caplog.at_level(logging.WARNING, "kvstore"):
        optimizer = opt.SGD(learning_rate=0.2, lr_scheduler=schedule)
    assert optimizer.learning_rate == 0.2
    assert schedule.base_lr == 0.4
    assert "replaces" in caplog.text


def test_set_learning_rate():
    optimizer = opt.SGD()
    optimizer.set_learning_rate(0.5)
    assert optimizer.learning_rate == 0.5
    with pytest.raises(ConfigError):
        optimizer.set_learning_rate(None)
    scheduled = opt.SGD(lr_scheduler=LRScheduler())
    with pytest.raises(UserWarning, match="schedule") as caught:  # as in MXNet
        scheduled.set_learning_rate(0.5)
    assert isinstance(caught.value, ConfigError)


def test_the_schedule_sees_the_largest_count():
    optimizer = opt.SGD(lr_scheduler=PolyScheduler(max_update=10, base_lr=1.0), begin_num_update=3)
    assert optimizer.num_update == 3
    for _ in range(2):
        optimizer._update_count("a")
    optimizer._update_count("b")
    assert optimizer._index_update_count == {"a": 5, "b": 4}
    assert optimizer.num_update == 5
    assert optimizer._get_lr("b") == PolyScheduler(max_update=10, base_lr=1.0)(5)


# ------------------------------------------------------------------------------------------ configuration


@pytest.mark.parametrize("name", NAMES)
def test_configuration_round_trip(name):
    optimizer = opt.create(
        name,
        learning_rate=0.3,
        rescale_grad=0.5,
        clip_gradient=2,
        param_idx2name={0: "a"},
        lr_mult={0: 0.5, "b": 2.0},
        multi_precision=True,
        begin_num_update=4,
    )
    description = json.loads(json.dumps(optimizer.describe()))
    again = opt.Optimizer.from_config(**description)
    assert type(again) is type(optimizer)
    assert again.describe() == optimizer.describe()
    assert again.lr_mult == {0: 0.5, "b": 2.0}
    assert again.idx2name == {0: "a"}


def test_configuration_carries_schedule_and_parameters():
    optimizer = opt.Adam(
        lr_scheduler=FactorScheduler(3, 0.5, base_lr=0.2),
        param_dict={1: SimpleNamespace(lr_mult=0.1, wd_mult=0)},
        lr_mult={1: 9.0},
    )
    again = opt.Optimizer.from_config(**json.loads(json.dumps(optimizer.describe())))
    assert again.lr_scheduler == optimizer.lr_scheduler
    assert again.lr_mult == {1: 0.1}
    assert again.wd_mult == {1: 0.0}


def test_numpy_numbers_are_described_as_plain_ones():
    optimizer = opt.SGD(learning_rate=np.float32(0.5), momentum=np.float64(0.9))
    optimizer.rescale_grad = np.float32(0.25)
    assert json.loads(json.dumps(optimizer.get_config()))["rescale_grad"] == 0.25


def test_what_cannot_be_described_says_so():
    with pytest.raises(ConfigError, match="plain callable"):
        opt.SGD(lr_scheduler=lambda n: 0.1).get_config()

    class Forgets(opt.Optimizer):
        def __init__(self, alpha=1, **common):
            super().__init__(**common)

    with pytest.raises(ConfigError, match="'alpha'"):
        Forgets().get_config()


@pytest.mark.parametrize(
    ("name", "config"), [("sgd", {"x": 1}), ("nope", {}), ("sgd", {"momentum": "a"}), ("adagrad", {"eps": 1})]
)
def test_wrong_configurations(name, config):
    with pytest.raises(ConfigError):
        opt.Optimizer.from_config(name, config)


# ------------------------------------------------------------------------------------ changes while training


def test_configure_changes_all_or_nothing():
    optimizer = opt.SGD(momentum=0.9)
    optimizer.configure(learning_rate=0.3, wd=0.1, rescale_grad=0.5, clip_gradient=1, momentum=0.5)
    before = optimizer.describe()
    assert (optimizer.learning_rate, optimizer.wd, optimizer.momentum) == (0.3, 0.1, 0.5)
    for wrong in (
        {"momentum": -1},
        {"momentun": 0.1},
        {"lr_scheduler": 3},
        {"lr_mult": {"a": None}},
        {"sym": 1},
    ):
        with pytest.raises(ConfigError):
            optimizer.configure(wd=0.7, learning_rate=0.9, **wrong)
        assert optimizer.describe() == before


def test_configure_names_the_nearest_setting():
    with pytest.raises(ConfigError, match="no setting 'momentun', did you mean 'momentum'"):
        opt.SGD().configure(momentun=0.1)


def test_configure_the_schedule():
    optimizer = opt.SGD(lr_scheduler=LRScheduler(0.4))
    with pytest.raises(ConfigError, match="schedule"):
        optimizer.configure(learning_rate=0.1, wd=3)
    assert optimizer.wd == 0
    with pytest.raises(ConfigError, match="warmup_begin_lr"):
        optimizer.configure(
            learning_rate=0.1, lr_scheduler=LRScheduler(0.4, warmup_steps=2, warmup_begin_lr=0.3), wd=3
        )
    assert (optimizer.learning_rate, optimizer.wd) == (0.4, 0)
    optimizer.configure(lr_scheduler=None)
    assert optimizer.learning_rate == 0.4
    optimizer.configure(lr_scheduler={"name": "LRScheduler", "config": {"base_lr": 0.6}})
    assert optimizer.learning_rate == 0.6
    optimizer.configure(lr_scheduler=None, learning_rate=0.2)
    assert optimizer.learning_rate == 0.2


def test_configure_takes_a_whole_configuration():
    a, b = opt.SGD(lr_scheduler=LRScheduler(0.4), lr_mult={0: 2}), opt.SGD(learning_rate=0.2, wd=0.5)
    a.configure(**b.get_config())
    assert a.describe() == b.describe()


@pytest.mark.parametrize("name", ["sgd", "nag", "signum", "dcasgd", "lars"])
def test_momentum_cannot_come_or_go_once_there_are_states(name):
    for start, then in ((0.0, 0.9), (0.9, 0.0)):
        optimizer = opt.create(name, momentum=0.5)
        optimizer.configure(momentum=start)  # before the first update: fine
        w = weight_for(name)
        opt.get_updater(optimizer)("w", w.copy(), w)
        with pytest.raises(ConfigError, match="momentum cannot change from 0 or to 0"):
            optimizer.configure(momentum=then)
        assert optimizer.momentum == start
    optimizer = opt.RMSProp(momentum=0.5, centered=True)
    opt.get_updater(optimizer)("w", w.copy(), w)
    optimizer.configure(momentum=0.0)
    with pytest.raises(ConfigError, match="centered"):
        optimizer.configure(centered=False)


def test_changes_hold_from_the_next_update_on():
    optimizer = opt.SGD(learning_rate=1.0)
    updater, w = opt.get_updater(optimizer), np.zeros(1, np.float32)
    g = np.ones(1, np.float32)
    updater("w", g, w)
    optimizer.configure(rescale_grad=0.5)
    updater("w", g, w)
    optimizer.rescale_grad = 0.25  # as Gluon's Trainer does
    updater("w", g, w)
    assert w.tolist() == [-1.75]


def test_begin_num_update_can_change_before_the_first():
    optimizer = opt.SGD()
    optimizer.configure(begin_num_update=5)
    assert optimizer.num_update == 5
    optimizer._update_count(0)
    with pytest.raises(ConfigError, match="begin_num_update"):
        optimizer.configure(begin_num_update=6)


# ------------------------------------------------------------------------------------- types and shapes


@pytest.mark.parametrize("name", NAMES)
def test_integer_weights_are_refused(name):
    updater, w = opt.get_updater(opt.create(name)), np.ones((2, 2), np.int32)
    with pytest.raises(DTypeError, match="int32"):
        updater("w", w, w)
    assert not updater.states


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_that_does_not_fit_counts_nothing(name):
    updater, w = opt.get_updater(opt.create(name)), weight_for(name)
    with pytest.raises(ShapeError, match=r"\(3, 2\)"):
        updater("w", w.T, w)
    with pytest.raises(DTypeError, match="float64"):
        updater("w", w.astype(np.float64), w)
    assert updater.optimizer._index_update_count == {}
    assert not updater.states
    assert (w == 1).all()


def test_groupadagrad_needs_two_dimensions():
    w = np.ones(3, np.float32)
    with pytest.raises(ShapeError, match="two dimensions"):
        opt.get_updater(opt.GroupAdaGrad())("w", w, w)


def bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    from kvstore.kernels import cpu

    dtype = np.dtype(ml_dtypes.bfloat16)
    cpu.accept_bfloat16(dtype)
    return dtype


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_multi_precision_is_float32_rounded_once(name, half):
    dtype = np.dtype(np.float16) if half == "float16" else bfloat16()
    rng = np.random.default_rng(2)
    start, grads = rng.uniform(-1, 1, (4, 5)).astype(dtype), rng.uniform(-1, 1, (6, 4, 5)).astype(dtype)
    mixed, plain = opt.get_updater(opt.create(name, multi_precision=True)), opt.get_updater(opt.create(name))
    w, w32 = start.copy(), start.astype(np.float32)
    for grad in grads:
        mixed("w", grad, w)
        plain("w", grad.astype(np.float32), w32)
        np.testing.assert_array_equal(mixed.states["w"][0], w32)
        np.testing.assert_array_equal(w.astype(np.float32), w32.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_without_it_states_are_of_the_weights_type(name, half):
    dtype = np.dtype(np.float16) if half == "float16" else bfloat16()
    optimizer = opt.create(name)
    updater, w = opt.get_updater(optimizer), np.ones((2, 4), dtype)
    with pytest.warns(UserWarning, match="multi_precision=True"):
        updater("w", w.copy(), w)
    updater("w", w.copy(), w)  # warns once
    from kvstore.optimizer.builtin import arrays_of

    assert {array.dtype for array in arrays_of(updater.states["w"])} <= {dtype}
    assert np.isfinite(w.astype(np.float32)).all()


def test_half_sgd_rounds_once():
    w = np.full(1, 1.0, np.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        opt.get_updater(opt.SGD(learning_rate=0.1, wd=0.1))("w", np.full(1, 0.3, np.float16), w)
    exact = np.float32(1) - np.float32(0.1) * (np.float32(np.float16(0.3)) + np.float32(0.1))
    assert w[0] == np.float16(exact)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_repeated_has_the_same_parameters_in_all_updates(name):
    optimizer = opt.create(name)
    if not getattr(optimizer, "repeats", False):
        return
    assert optimizer.is_repeated()
    found = set()
    for _ in range(40):
        found.add((optimizer.rule(), optimizer.advance("w", weight_for(name))))
        optimizer.num_update += 3
    assert len(found) == 1
    assert not opt.create(name, lr_scheduler=FactorScheduler(2, 0.5, base_lr=0.1)).is_repeated()

    class Own(type(optimizer)):
        pass

    assert not Own().is_repeated()


def test_most_rules_without_a_count_are_repeated():
    repeated = {name for name in NAMES if getattr(opt.create(name), "repeats", False)}
    assert repeated == {"adadelta", "adagrad", "dcasgd", "ftrl", "nag", "rmsprop", "sgd", "signum", "test"}


@pytest.mark.parametrize(
    "parameters",
    [
        {"a": object()},
        {"a": None},
        {"a": SimpleNamespace(lr_mult=1)},
        {"a": SimpleNamespace(lr_mult="x", wd_mult=1)},
        3,
    ],
)
def test_a_param_dict_without_multipliers(parameters: object) -> None:
    with pytest.raises(ConfigError, match="param_dict"):
        opt.SGD(param_dict=parameters)  # type: ignore[arg-type]
