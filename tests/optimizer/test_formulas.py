"""Each optimizer against its formula, written out in float64 with the names of the constructor's arguments.

The compiled rules have a reference of their own (tests/kernels); this one shows that hyper-parameters,
defaults and counts reach them as they should.
"""

from types import SimpleNamespace

import numpy as np
import pytest

import kvstore.optimizer as opt

FORMULAS = {}


def formula(function):
    FORMULAS[function.__name__.lstrip("_")] = function
    return function


# w: weight, g: gradient after rescaling and clipping (h.raw is the gradient before), s: a dict that starts
# empty, h: hyper-parameters, t: number of this update. Each returns the new weight.


@formula
def sgd(w, g, s, h, t):
    s["m"] = h.momentum * s.get("m", 0) - h.lr * (g + h.wd * w)
    return w + s["m"]


@formula
def nag(w, g, s, h, t):
    g = g + h.wd * w
    s["m"] = h.momentum * s.get("m", 0) - h.lr * g
    return w + h.momentum * s["m"] - h.lr * g


def moments(g, s, h):
    s["m"] = h.beta1 * s.get("m", 0) + (1 - h.beta1) * g
    s["v"] = h.beta2 * s.get("v", 0) + (1 - h.beta2) * g**2
    return s["m"], s["v"]


def corrected(h, t):
    return h.lr * np.sqrt(1 - h.beta2**t) / (1 - h.beta1**t)


@formula
def adam(w, g, s, h, t):
    m, v = moments(g + h.wd * w, s, h)
    return w - corrected(h, t) * m / (np.sqrt(v) + h.epsilon)


@formula
def adamw(w, g, s, h, t):
    m, v = moments(g, s, h)
    lr = corrected(h, t) if h.correct_bias else h.lr
    return w - lr * (m / (np.sqrt(v) + h.epsilon) + h.wd * w)


@formula
def adagrad(w, g, s, h, t):
    g = g + h.wd * w
    s["h"] = s.get("h", 0) + g**2
    return w - h.lr * g / (np.sqrt(s["h"]) + h.epsilon)


@formula
def adadelta(w, g, s, h, t):
    g = g + h.wd * w
    s["a"] = h.rho * s.get("a", 0) + (1 - h.rho) * g**2
    step = np.sqrt(s.get("b", 0) + h.epsilon) / np.sqrt(s["a"] + h.epsilon) * g
    s["b"] = h.rho * s.get("b", 0) + (1 - h.rho) * step**2
    return w - h.lr * step


@formula
def adamax(w, g, s, h, t):
    g = g + h.wd * w
    s["m"] = h.beta1 * s.get("m", 0) + (1 - h.beta1) * g
    s["u"] = np.maximum(h.beta2 * s.get("u", 0), abs(g))
    return w - h.lr / (1 - h.beta1**t) * s["m"] / (s["u"] + h.epsilon)


@formula
def nadam(w, g, s, h, t):
    mu = lambda i: h.beta1 * (1 - 0.5 * 0.96 ** (i * h.schedule_decay))  # noqa: E731
    product = np.prod([mu(i) for i in range(1, t + 1)])
    g = g + h.wd * w
    m, v = moments(g, s, h)
    mean = (1 - mu(t)) * g / (1 - product) + mu(t + 1) * m / (1 - product * mu(t + 1))
    return w - h.lr * mean / (np.sqrt(v / (1 - h.beta2**t)) + h.epsilon)


@formula
def rmsprop(w, g, s, h, t):
    g = g + h.wd * w
    s["v"] = h.rho * s.get("v", 0) + (1 - h.rho) * g**2
    if h.centered:
        s["q"] = h.rho * s.get("q", 0) + (1 - h.rho) * g
        s["m"] = h.momentum * s.get("m", 0) - h.lr * g / np.sqrt(s["v"] - s["q"] ** 2 + h.epsilon)
        w = w + s["m"]
    else:
        w = w - h.lr * g / (np.sqrt(s["v"]) + h.epsilon)
    return np.clip(w, -h.clip_weights, h.clip_weights) if h.clip_weights else w


@formula
def ftrl(w, g, s, h, t):
    n = s.get("n", 0)
    s["n"] = n + g**2
    s["z"] = s.get("z", 0) + g - (np.sqrt(s["n"]) - np.sqrt(n)) / h.lr * w
    shrunk = np.sign(s["z"]) * np.maximum(abs(s["z"]) - h.lamda1, 0)
    return -shrunk / ((h.beta + np.sqrt(s["n"])) / h.lr + h.wd)


@formula
def ftml(w, g, s, h, t):
    g = g + h.wd * w
    s["v"] = h.beta2 * s.get("v", 0) + (1 - h.beta2) * g**2
    before, s["d"] = s.get("d", 0), (1 - h.beta1**t) / h.lr * (np.sqrt(s["v"] / (1 - h.beta2**t)) + h.epsilon)
    s["z"] = h.beta1 * s.get("z", 0) + (1 - h.beta1) * g - (s["d"] - h.beta1 * before) * w
    return -s["z"] / s["d"]


@formula
def signum(w, g, s, h, t):
    if not h.momentum:
        return (1 - h.lr * (h.wd + h.wd_lh)) * w - h.lr * np.sign(g)
    s["m"] = h.momentum * s.get("m", 0) - (1 - h.momentum) * (g + h.wd * w)
    return (1 - h.lr * h.wd_lh) * w + h.lr * np.sign(s["m"])


@formula
def dcasgd(w, g, s, h, t):
    g = g + h.wd * w
    step = h.lr * (g + h.lamda * g**2 * (w - s.get("before", w)))
    s["m"] = h.momentum * s.get("m", 0) - step
    s["before"] = w
    return w + s["m"]


@formula
def lamb(w, g, s, h, t):
    m, v = moments(g, s, h)
    if h.bias_correction:
        m, v = m / (1 - h.beta1**t), v / (1 - h.beta2**t)
    u = m / (np.sqrt(v) + h.epsilon) + h.wd * w
    norm = np.linalg.norm(w)
    norm = max(norm, h.lower_bound) if h.lower_bound else norm
    norm = min(norm, h.upper_bound) if h.upper_bound else norm
    ratio = norm / np.linalg.norm(u) if norm and u.any() else 1
    return w - h.lr * ratio * u


@formula
def lars(w, g, s, h, t):
    norm, slope = np.linalg.norm(w), np.linalg.norm(h.rescale_grad * h.raw)
    lr = h.lr * (h.eta * norm / (slope + h.wd * norm + h.epsilon) if norm and slope else 1)
    s["m"] = h.momentum * s.get("m", 0) - lr * (g + h.wd * w)
    return w + s["m"]


@formula
def groupadagrad(w, g, s, h, t):
    s["h"] = s.get("h", 0) + (g**2).mean(axis=1, keepdims=True)
    return w - h.lr * g / (np.sqrt(s["h"]) + h.epsilon)


@formula
def _test(w, g, s, h, t):
    return w - h.lr * (h.rescale_grad * h.raw + h.wd * w)


BASE = {"learning_rate": 0.05, "wd": 0.03, "rescale_grad": 0.25, "clip_gradient": 0.3}
CASES = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9}),
    ("nag", {}),
    ("nag", {"momentum": 0.0}),
    ("adam", {"beta1": 0.8, "epsilon": 1e-3}),
    ("adamw", {}),
    ("adamw", {"correct_bias": False}),
    ("adagrad", {"epsilon": 1e-3}),
    ("adadelta", {"rho": 0.8, "epsilon": 1e-3}),
    ("adamax", {"epsilon": 1e-3}),
    ("nadam", {"schedule_decay": 0.02}),
    ("rmsprop", {"rho": 0.8, "epsilon": 1e-3}),
    ("rmsprop", {"centered": True, "momentum": 0.7, "epsilon": 1e-2, "clip_weights": 1.0}),
    ("ftrl", {"lamda1": 0.1, "beta": 0.7}),
    ("ftml", {}),
    ("signum", {"wd_lh": 0.01}),
    ("signum", {"momentum": 0.0, "wd_lh": 0.01}),
    ("dcasgd", {"lamda": 0.3}),
    ("dcasgd", {"lamda": 0.3, "momentum": 0.8}),
    ("lamb", {}),
    ("lamb", {"bias_correction": False, "lower_bound": 0.5, "upper_bound": 1.5}),
    ("lars", {"eta": 0.01, "momentum": 0.9}),
    ("lars", {"eta": 0.01}),
    ("groupadagrad", {"wd": 0.0}),
    ("test", {}),
]
DEFAULTS = [(name, {}) for name in FORMULAS]


def expected(optimizer, name, weight, grads):
    """Trajectory of one key by the formula, with the optimizer's own hyper-parameters."""
    config, state, trajectory = optimizer.get_config(), {}, []
    h = SimpleNamespace(**config)
    h.lr = h.learning_rate
    for t, grad in enumerate(grads, 1):
        h.raw, g = grad, h.rescale_grad * grad
        if h.clip_gradient:
            g = np.clip(g, -h.clip_gradient, h.clip_gradient)
        weight = FORMULAS[name](weight, g, state, h, t)
        trajectory.append(weight)
    return trajectory


def random_run(rounds=6, shape=(3, 5)):
    rng = np.random.default_rng(1)
    return rng.uniform(-2, 2, shape), rng.uniform(-2, 2, (rounds, *shape))


def run(optimizer, weight, grads, key="k"):
    updater, trajectory = opt.get_updater(optimizer), []
    for grad in grads:
        updater(key, grad, weight)
        trajectory.append(weight.copy())
    return trajectory


@pytest.mark.parametrize(("name", "kwargs"), [(n, {**BASE, **k}) for n, k in CASES] + DEFAULTS)
def test_follows_its_formula(name, kwargs):
    weight, grads = random_run()
    want = expected(opt.create(name, **kwargs), name, weight, grads)
    got = run(opt.create(name, **kwargs), weight.copy(), grads)
    np.testing.assert_allclose(got, want, rtol=1e-11)


@pytest.mark.parametrize(("name", "kwargs"), [(n, {**BASE, **k}) for n, k in CASES])
def test_float32_follows_it_too(name, kwargs):
    weight, grads = random_run()
    want = expected(opt.create(name, **kwargs), name, weight, grads)
    got = run(opt.create(name, **kwargs), weight.astype(np.float32), grads.astype(np.float32))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5)


def test_each_optimizer_has_a_formula_here():
    from kvstore.optimizer.registry import _registry

    built_in = {name for name, klass in _registry.items() if klass.__module__.startswith("kvstore.")}
    assert built_in == set(FORMULAS) | {"sgld"}


DEFAULT_RATES = {
    "sgd": 0.1, "nag": 0.1, "adam": 0.001, "adamw": 0.001, "adagrad": 0.01, "rmsprop": 0.001, "adadelta": 1.0,
    "adamax": 0.002, "nadam": 0.001, "ftrl": 0.1, "ftml": 0.0025, "signum": 0.01, "sgld": 0.1, "dcasgd": 0.1,
    "lamb": 0.001, "lars": 0.1, "groupadagrad": 0.01, "test": 0.01,
}  # fmt: skip
DEFAULT_ARGUMENTS = {
    "sgd": {"momentum": 0.0, "lazy_update": False},
    "nag": {"momentum": 0.9},
    "adam": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "lazy_update": False},
    "adamw": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "correct_bias": True},
    "adagrad": {"epsilon": 1e-6},
    "rmsprop": {"rho": 0.9, "momentum": 0.9, "epsilon": 1e-8, "centered": False, "clip_weights": None},
    "adadelta": {"rho": 0.9, "epsilon": 1e-6},
    "adamax": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "nadam": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "schedule_decay": 0.004},
    "ftrl": {"lamda1": 0.01, "beta": 1.0},
    "ftml": {"beta1": 0.6, "beta2": 0.999, "epsilon": 1e-8},
    "signum": {"momentum": 0.9, "wd_lh": 0.0},
    "dcasgd": {"momentum": 0.0, "lamda": 0.04},
    "lamb": {"epsilon": 1e-6, "lower_bound": None, "upper_bound": None, "bias_correction": True},
    "lars": {"momentum": 0.0, "eta": 0.001, "epsilon": 1e-8, "lazy_update": False},
    "groupadagrad": {"epsilon": 1e-6},
}


@pytest.mark.parametrize("name", DEFAULT_RATES)
def test_defaults_are_those_of_mxnets_master(name):
    optimizer = opt.create(name)
    assert optimizer.learning_rate == DEFAULT_RATES[name]
    config = optimizer.get_config()
    common = {"rescale_grad": 1.0, "wd": 0.0, "clip_gradient": None, "multi_precision": False}
    wanted = {**common, **DEFAULT_ARGUMENTS.get(name, {})}
    assert {key: config[key] for key in wanted} == wanted


# -------------------------------------------------------------------------------- omissions of the formulas


def test_sgld_is_half_a_step_and_noise():
    weight, grads = random_run(1, (100, 100))
    before = weight.copy()
    after = run(opt.SGLD(learning_rate=0.04, wd=0.5), weight, grads)[0]
    noise = (after - (before - 0.02 * (grads[0] + 0.5 * before))) / 0.2
    assert abs(noise.mean()) < 0.03
    assert abs(noise.std() - 1) < 0.03


def test_sgld_noise_differs_between_keys_seeds_and_updates():
    zeros = np.zeros((2, 50))
    a = run(opt.SGLD(), np.zeros(50), zeros, "a")
    assert not np.array_equal(a[0], a[1] - a[0])
    assert not np.array_equal(a[0], run(opt.SGLD(), np.zeros(50), zeros, "b")[0])
    assert not np.array_equal(a[0], run(opt.SGLD(seed=1), np.zeros(50), zeros, "a")[0])
    assert np.array_equal(a, run(opt.SGLD(), np.zeros(50), zeros, "a"))


def test_nadam_keys_do_not_disturb_each_other():
    weight, grads = random_run()
    alone = run(opt.Nadam(), weight.copy(), grads)
    updater, mine, other = opt.get_updater(opt.Nadam()), weight.copy(), weight.copy()
    for grad, want in zip(grads, alone, strict=True):
        updater("other", grad, other)
        updater("mine", grad, mine)
        np.testing.assert_array_equal(mine, want)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_trust_ratio_is_one_where_a_norm_is_zero(name):
    start, grad = np.zeros((2, 3)), np.ones((2, 3))
    assert np.isfinite(run(opt.create(name), start.copy(), [grad])[0]).all()
    assert run(opt.create(name), start.copy(), [grad])[0].any()
    assert np.array_equal(run(opt.create(name), start + 1, [0 * grad])[0], start + 1)


def test_lars_leaves_biases_to_plain_sgd():
    weight, grads = random_run(1)
    lars = opt.LARS(param_idx2name={0: "fc_bias", 1: "fc_weight"})
    plain = run(opt.SGD(), weight.copy(), grads)[0]
    np.testing.assert_array_equal(run(lars, weight.copy(), grads, 0)[0], plain)
    assert not np.array_equal(run(lars, weight.copy(), grads, 1)[0], plain)


def test_gradients_of_the_caller_stay_as_they_are():
    for name in DEFAULT_RATES:
        weight, grads = random_run(1)
        before = grads.copy()
        run(opt.create(name, rescale_grad=0.5, clip_gradient=0.1), weight, grads)
        np.testing.assert_array_equal(grads, before)


def test_clip_gradient_of_zero_is_off():
    weight, grads = random_run()
    for name in DEFAULT_RATES:
        a = run(opt.create(name, clip_gradient=0), weight.copy(), grads)
        np.testing.assert_array_equal(a, run(opt.create(name), weight.copy(), grads))
