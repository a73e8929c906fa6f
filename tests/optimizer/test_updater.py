"""The updater: calling, planning, counts, row-sparse gradients."""

import numpy as np
import pytest

import kvstore.optimizer as opt
from kvstore.arrays.sparse import RowSparseArray
from kvstore.errors import ArgumentError, ConfigError, ShapeError
from kvstore.kernels import cpu
from kvstore.optimizer import registry
from kvstore.optimizer.builtin import ElementwiseOptimizer
from kvstore.optimizer.states import StatesContent

OURS = {name: rule for name, rule in registry._registry.items() if rule.__module__.startswith("kvstore.")}
FUSED = sorted(name for name, rule in OURS.items() if rule.fused)
WHOLE = sorted(set(OURS) - set(FUSED))


def by_plan(updater, key, grads, weight):
    rule, params, master, states = updater.plan(key, weight)
    cpu.update([(rule, params, list(grads), weight, master, states, [])])


def test_which_are_fused():
    assert WHOLE == ["groupadagrad", "lamb", "lars"]
    assert all(issubclass(registry._registry[name], ElementwiseOptimizer) for name in FUSED)


@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_a_plan_does_what_a_call_does(name, multi_precision):
    dtype = np.float16 if multi_precision else np.float32
    rng = np.random.default_rng(0)
    grads = rng.uniform(-1, 1, (4, 3, 7)).astype(dtype)
    called, planned = (opt.get_updater(opt.create(name, multi_precision=multi_precision)) for _ in range(2))
    a, b = np.ones((3, 7), dtype), np.ones((3, 7), dtype)
    for grad in grads:
        called("w", grad, a)
        by_plan(planned, "w", [grad], b)
        np.testing.assert_array_equal(a, b)
    assert called.optimizer._index_update_count == planned.optimizer._index_update_count == {"w": 4}


@pytest.mark.parametrize("name", FUSED)
def test_a_plan_has_the_parameters_and_states_that_the_rule_lists(name):
    optimizer = opt.create(name)
    _, params, _, states = opt.get_updater(optimizer).plan("w", np.ones((2, 2), np.float32))
    rule = optimizer.rule()
    assert len(states) == cpu.rule_states(rule)
    assert len(params) + (rule == "sgld") >= cpu.rule_parameters(rule)  # a whole tensor begins at 0


@pytest.mark.parametrize("name", WHOLE)
def test_no_plan_for_whole_tensors(name):
    with pytest.raises(ConfigError, match="no compiled element-wise rule"):
        opt.get_updater(opt.create(name)).plan("w", np.ones((2, 2), np.float32))


def test_a_plan_follows_changed_settings_and_states():
    optimizer = opt.SGD(learning_rate=1.0, momentum=0.5)
    updater, w = opt.get_updater(optimizer), np.zeros(2, np.float32)
    g = np.ones(2, np.float32)
    by_plan(updater, "w", [g], w)
    optimizer.configure(learning_rate=2.0)
    by_plan(updater, "w", [g], w)
    assert w.tolist() == [-3.5, -3.5]
    updater.states["w"] = np.zeros(2, np.float32)  # the test puts another state in
    by_plan(updater, "w", [g], w)
    assert w.tolist() == [-5.5, -5.5]
    assert updater.states["w"].tolist() == [-2, -2]


def test_states_that_do_not_fit_are_refused():
    w = np.ones(3, np.float32)
    updater = opt.get_updater(opt.SGD(momentum=0.9))
    updater.states["w"] = None
    with pytest.raises(ConfigError, match="0 state arrays and SGD wants 1"):
        updater.plan("w", w)
    for wrong in (np.zeros(4, np.float32), np.zeros(3)):
        updater.states["w"] = wrong
        with pytest.raises(ShapeError, match="does not fit the weight"):
            updater.plan("w", w)
    assert updater.optimizer._index_update_count == {}


def test_momentum_set_behind_the_back_of_its_states():
    w = np.ones(3, np.float32)
    for start, then in ((0.0, 0.9), (0.9, 0.0)):
        updater = opt.get_updater(opt.SGD(momentum=start))
        updater.plan("w", w)
        updater.optimizer.momentum = then
        with pytest.raises(ConfigError, match="as they were when the states were made"):
            updater.plan("w", w)


@pytest.mark.parametrize("name", ["ftrl", "ftml"])
def test_rules_that_divide_by_the_rate(name):
    updater, w = opt.get_updater(opt.create(name, learning_rate=0.0)), np.ones(3, np.float32)
    with pytest.raises(ConfigError, match="above 0"):
        updater("w", w.copy(), w)
    assert updater.snapshot_counts() == ({}, 0)
    assert (w == 1).all()


def test_snapshot_and_restore():
    updater, w = opt.get_updater(opt.Adam(begin_num_update=2)), np.ones(2, np.float32)
    updater.plan("a", w)
    before = updater.snapshot_counts()
    updater.plan("a", w)
    updater.plan("b", w)
    for _ in range(2):
        updater.restore_counts(before)
        assert updater.optimizer._index_update_count == {"a": 3}
        assert updater.optimizer.num_update == 3
        updater.plan("b", w)


def test_nadam_after_a_restore_is_as_if_nothing_had_been():
    updater, w = opt.get_updater(opt.Nadam()), np.ones(2, np.float32)
    for _ in range(3):
        updater.plan("a", w)
    before = updater.snapshot_counts()
    fourth = updater.plan("a", w)[1]
    updater.plan("a", w)
    updater.restore_counts(before)
    assert updater.plan("a", w)[1] == fourth


def test_lists_and_bytes():
    updater, w = opt.get_updater(opt.SGD(learning_rate=1.0)), [np.zeros(2, np.float32) for _ in range(2)]
    g = np.ones(2, np.float32)
    updater([b"a", "b"], [g, 2 * g], w)
    assert [list(one) for one in w] == [[-1, -1], [-2, -2]]
    assert list(updater.states) == ["a", "b"]
    for wrong in (([1], g, w), ([1, 2], [g], w), ([1], [g], w)):
        with pytest.raises(ShapeError, match="equally many"):
            updater(*wrong)


def test_gradients_need_not_be_contiguous():
    updater, w = opt.get_updater(opt.SGD(learning_rate=1.0)), np.zeros((2, 3), np.float32)
    updater("w", np.arange(6, dtype=np.float32).reshape(3, 2).T, w)
    assert w.tolist() == [[0, -2, -4], [-1, -3, -5]]


def test_an_updater_needs_an_optimizer():
    with pytest.raises(ArgumentError, match="needs an Optimizer, not str"):
        opt.get_updater("sgd")


def test_a_rule_that_fails_counts_nothing():
    class Fails(opt.Optimizer):
        def update(self, index, weight, grad, state):
            self._update_count(index)
            raise ZeroDivisionError

    updater = opt.get_updater(Fails())
    with pytest.raises(ZeroDivisionError):
        updater("w", 1, np.ones(1))
    assert updater.snapshot_counts() == ({}, 0)


# ------------------------------------------------------------------------------------------- row-sparse

ROWS = np.array([1, 3])


def sparse_gradient(dtype=np.float32):
    data = np.array([[1, -2, 3], [4, 5, -6]], dtype)
    return RowSparseArray(data, ROWS, (5, 3))


LAZY = {"sgd": {"lazy_update": True, "momentum": 0.9, "wd": 0.1}, "adam": {"lazy_update": True, "wd": 0.1}}
BY_ROWS = {**LAZY, "adagrad": {"wd": 0.1}, "groupadagrad": {}}


@pytest.mark.parametrize("multi_precision", [False, True])
@pytest.mark.parametrize("name", BY_ROWS)
def test_only_the_rows_of_the_gradient_are_touched(name, multi_precision):
    dtype = np.float16 if multi_precision else np.float32
    updater = opt.get_updater(opt.create(name, multi_precision=multi_precision, **BY_ROWS[name]))
    whole = opt.get_updater(opt.create(name, multi_precision=multi_precision, **BY_ROWS[name]))
    w, dense = np.ones((5, 3), dtype), np.ones((5, 3), dtype)
    for _ in range(3):
        updater("w", sparse_gradient(dtype), w)
        whole("w", sparse_gradient(dtype).todense(), dense)
    np.testing.assert_array_equal(w[ROWS], dense[ROWS])
    assert (w[[0, 2, 4]] == 1).all()
    assert updater.optimizer._index_update_count == {"w": 3}


DENSE = sorted(set(registry._registry) - set(BY_ROWS) - {"sgd", "adam"})


@pytest.mark.parametrize("name", [*DENSE, "sgd", "adam"])
def test_absent_rows_see_a_zero_gradient(name):
    kwargs = {"wd": 0.1} if name != "groupadagrad" else {}
    updater, whole = (opt.get_updater(opt.create(name, **kwargs)) for _ in range(2))
    w, dense = np.ones((5, 3), np.float32), np.ones((5, 3), np.float32)
    for _ in range(3):
        updater("w", sparse_gradient(), w)
        whole("w", sparse_gradient().todense(), dense)
    np.testing.assert_array_equal(w, dense)


def test_modes():
    mode = lambda optimizer, sparse=True: optimizer.sparse_mode(sparse)  # noqa: E731
    assert mode(opt.SGD()) == "rows"  # nothing else would change either
    assert mode(opt.SGD(wd=0.1)) == mode(opt.SGD(momentum=0.1)) == "dense"
    assert mode(opt.SGD(wd=0.1, lazy_update=True)) == "rows"
    assert (mode(opt.Adam()), mode(opt.Adam(lazy_update=True))) == ("dense", "rows")
    assert mode(opt.AdaGrad(wd=0.1)) == mode(opt.GroupAdaGrad()) == "rows"
    assert (mode(opt.Ftrl(), True), mode(opt.Ftrl(), False)) == ("rows", "dense")
    for name in set(DENSE) - {"ftrl"}:
        assert mode(opt.create(name)) == "dense"


def test_sgd_by_rows_is_sgd():
    a, b = np.ones((5, 3), np.float32), np.ones((5, 3), np.float32)
    opt.get_updater(opt.SGD())("w", sparse_gradient(), a)
    opt.get_updater(opt.SGD())("w", sparse_gradient().todense(), b)
    np.testing.assert_array_equal(a, b)


def test_an_empty_row_sparse_gradient():
    empty = RowSparseArray(np.zeros((0, 3), np.float32), np.zeros(0, np.int64), (5, 3))
    for name in BY_ROWS:
        w = np.ones((5, 3), np.float32)
        opt.get_updater(opt.create(name, **BY_ROWS[name]))("w", empty, w)
        assert (w == 1).all()


def test_content_is_frozen():
    content = StatesContent({}, {}, 0, "sgd", None)
    with pytest.raises(AttributeError):
        content.rule = "adam"
