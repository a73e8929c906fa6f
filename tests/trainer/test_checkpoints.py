"""A trainer that resumes from a checkpoint has the weights of an uninterrupted one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Job
from procs_trainer import by_hand, feed, made
from servers import ServedJob

import kvstore as kv
from kvstore.optimizer.lr_scheduler import FactorScheduler
from kvstore.trainer import Parameter, Trainer, checkpoints

F = np.float32


@pytest.fixture(autouse=True)
def no_variable_of_mxnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MXNET_UPDATE_ON_KVSTORE", raising=False)


def trained(folder: Path, steps: range, kvstore: Any, updates: bool | None, replicas: int) -> list[Any]:
    """Train some steps from the newest checkpoint on; return the weights of all replicas."""
    params = made(replicas)
    if steps.start:
        for param in params:
            param.set_data(np.full_like(param.data(), 9))
    options = {"kvstore": kvstore, "update_on_kvstore": updates}
    with (
        kv.CheckpointManager(folder, keep=2) as manager,
        Trainer(params, "adam", {"learning_rate": 0.05}, **options) as trainer,
    ):
        found = trainer.restore_checkpoint(manager)
        assert (found is None) == (steps.start == 0)
        if found is not None:
            assert found == (steps.start, {"batch": 10 * steps.start}, {})
            assert trainer.optimizer.num_update == steps.start
        for step in steps:
            feed(params, step, range(replicas))
            trainer.step(8)
        trainer.save_checkpoint(manager, steps.stop, extra={"batch": 10 * steps.stop})
        trainer.set_learning_rate(0.5)
        assert trainer.optimizer.num_update == steps.stop
    return [array for param in params for array in param.list_data()]


@pytest.mark.parametrize("updates", [True, False])
def test_training_goes_on_bit_for_bit(store_name: str, updates: bool, tmp_path: Path) -> None:
    if "async" in store_name and not updates:
        pytest.skip("no rounds, no sums to update with")
    trained(tmp_path, range(2), store_name, updates, 2)
    found = trained(tmp_path, range(2, 5), store_name, updates, 2)
    expected = by_hand("adam", {"learning_rate": 0.05}, 5, 1, 2)
    for one, other in zip(found, [array for array in expected for _ in range(2)], strict=True):
        np.testing.assert_array_equal(one, other)


def test_without_a_store(tmp_path: Path) -> None:
    trained(tmp_path, range(2), None, None, 1)
    found = trained(tmp_path, range(2, 5), None, None, 1)
    for one, other in zip(found, by_hand("adam", {"learning_rate": 0.05}, 5, 1, 1), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("updates", [True, False])
def test_the_schedule_and_the_factors(updates: bool, tmp_path: Path) -> None:
    """Settings are read from the file, factors stay the parameter's."""

    def trainer_of(param: Parameter, rate: float) -> Trainer:
        schedule = FactorScheduler(step=1, factor=0.5, base_lr=rate)
        settings = {"lr_scheduler": schedule}
        return Trainer([param], "sgd", settings, kvstore="local", update_on_kvstore=updates)

    param = Parameter("w", [np.zeros(2, F), np.zeros(2, F)])
    with kv.CheckpointManager(tmp_path) as manager:
        with trainer_of(param, 8) as trainer:
            for _ in range(2):
                param.grad()[:] = 1
                trainer.step(1)
            trainer.save_checkpoint(manager, 2)
            rate, weight = trainer.learning_rate, param.data()[0]
        other = Parameter("w", [np.zeros(2, F), np.zeros(2, F)], lr_mult=2)
        with trainer_of(other, 3) as trainer:
            assert trainer.restore_checkpoint(manager) == (2, {}, {})
            assert trainer.learning_rate == rate and other.data()[0] == weight
            other.grad()[:] = 1
            trainer.step(1)
            assert other.data().tolist() == [weight - 2 * trainer.learning_rate] * 2


def test_rows_stay_where_they_are(tmp_path: Path) -> None:
    table = kv.RowSparseArray.from_dense(np.arange(12, dtype=F).reshape(6, 2))
    with kv.CheckpointManager(tmp_path) as manager:
        for first in (True, False):
            start = table if first else kv.RowSparseArray.from_dense(np.ones((6, 2), F))
            param = Parameter("t", start, kv.RowSparseArray(np.zeros((0, 2), F), [], (6, 2)))
            still = Parameter("u", start, grad_req="null")
            with Trainer([param, still], "sgd", kvstore="local") as trainer:
                found = trainer.restore_checkpoint(manager)
                assert (found is None) == first
                if first:
                    trainer.save_checkpoint(manager, 1)
                    continue
                out = kv.RowSparseArray(np.zeros((0, 2), F), [], (6, 2))
                trainer.row_sparse_pull(param, out, [1, 4])
                assert out.data.tolist() == [[2, 3], [8, 9]]


# ------------------------------------------------------------------------------------------- refused calls


@pytest.mark.parametrize("updates", [True, False])
def test_what_is_never_updated_is_the_trainers(updates: bool, tmp_path: Path) -> None:
    """Statistics of a normalisation, say: the program writes them, and no store knows."""

    def made_anew() -> list[Parameter]:
        return [Parameter("w", np.zeros(2, F)), Parameter("mean", np.full(2, 5, F), grad_req="null")]

    options = {"kvstore": "local", "update_on_kvstore": updates}
    with kv.CheckpointManager(tmp_path) as manager:
        params = made_anew()
        with Trainer(params, "sgd", **options) as trainer:
            trainer.step(1)
            params[1].data()[:] = 77
            trainer.save_checkpoint(manager, 1)
        params = made_anew()
        with Trainer(params, "sgd", **options) as trainer:
            trainer.restore_checkpoint(manager)
    assert params[1].data().tolist() == [77, 77]


def two(*shape: int) -> list[Parameter]:
    return [Parameter("a", np.zeros(shape or (2,), F)), Parameter("b", np.ones(3, F))]


def saved(manager: kv.CheckpointManager, updates: bool) -> None:
    with Trainer(two(), "adam", kvstore="local", update_on_kvstore=updates) as trainer:
        trainer.step(1)
        trainer.save_checkpoint(manager, 1)


@pytest.mark.parametrize(
    ("was", "updates", "params", "rule", "message"),
    [
        (True, False, two(), "adam", "of a trainer with update_on_kvstore=True"),
        (False, True, two(), "adam", "of a trainer with update_on_kvstore=False"),
        (False, False, two(4), "adam", r"float32\[2\] for parameter 'a', which is float32\[4\]"),
        (False, False, [*two(), *two()], "adam", r"parameters \['a', 'b'\], and the trainer"),
        (True, True, two()[:1], "adam", r"parameters \['a', 'b'\], and the trainer \['a'\]"),
        (True, True, two()[::-1], "adam", r"and the trainer \['b', 'a'\]"),
        (True, True, two(4), "adam", "key 0 is .*(2,).* there and .*(4,).* in this store"),
        (False, False, two(), "sgd", "states of optimizer 'adam', and the trainer has 'sgd'"),
        (True, True, two(), "sgd", "states of optimizer 'adam', and the trainer has 'sgd'"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    was: bool, updates: bool, params: list[Parameter], rule: str, message: str, tmp_path: Path
) -> None:
    with kv.CheckpointManager(tmp_path) as manager:
        saved(manager, was)
        manager.wait()
        trainer = Trainer(params, rule, kvstore="local", update_on_kvstore=updates)
        with trainer:
            before, optimizer = [param.data().copy() for param in params], trainer.optimizer
            with pytest.raises(kv.StateFileError, match=message):
                trainer.restore_checkpoint(manager)
            assert trainer.optimizer is optimizer
            for param, array in zip(params, before, strict=True):
                np.testing.assert_array_equal(param.data(), array)
            trainer.step(1)


def test_a_file_of_a_store_is_not_a_trainers(tmp_path: Path) -> None:
    with kv.CheckpointManager(tmp_path) as manager, kv.create("local") as store:
        store.init([0, 1], [np.zeros(2, F), np.zeros(3, F)])
        manager.save(store, 1)
        manager.wait()
        with (
            Trainer(two(), "sgd", kvstore="local", update_on_kvstore=True) as trainer,
            pytest.raises(kv.StateFileError, match=r"step 1 is not of Trainer\.save_checkpoint"),
        ):
            trainer.restore_checkpoint(manager)


@pytest.mark.parametrize(
    ("broken", "updates"),
    [
        ({"trainer": {"updates": True}, "user": {}}, True),
        ({"trainer": 5, "user": {}}, True),
        ({"user": {}}, True),
        ("counts", True),
        ("user", True),
    ],
)
def test_a_file_without_all_parts_changes_nothing(broken: Any, updates: bool, tmp_path: Path) -> None:
    with kv.CheckpointManager(tmp_path) as manager:
        with Trainer(two(), "adam", kvstore="local", update_on_kvstore=True) as trainer:
            trainer.step(1)
            said = checkpoints.description_of({}, two(), trainer.optimizer, updates)
            if broken == "counts":
                said["trainer"]["counts"] = [["q"]]
            elif broken == "user":
                said["user"] = 7
            manager.save(trainer.kvstore, 1, said if isinstance(broken, str) else broken)
            manager.wait()
        params = two()
        with (
            Trainer(params, "adam", kvstore="local", update_on_kvstore=True) as trainer,
            pytest.raises(kv.StateFileError, match=r"step 1 is not of Trainer\.save_checkpoint"),
        ):
            trainer.restore_checkpoint(manager)
        assert params[0].data().tolist() == [0, 0]


@pytest.mark.parametrize("extra", [5, "x", [], {1: 2}])
def test_what_is_added_is_a_dict_of_json(extra: Any, tmp_path: Path) -> None:
    with kv.CheckpointManager(tmp_path) as manager, Trainer(two(), "sgd") as trainer:
        with pytest.raises(kv.ArgumentError, match="extra"):
            trainer.save_checkpoint(manager, 1, extra)
        assert manager.steps() == []


@pytest.mark.parametrize("wrong", [None, "folder", 5])
def test_what_is_no_manager(wrong: Any) -> None:
    with Trainer(two(), "sgd") as trainer:
        with pytest.raises(kv.ArgumentError, match="must be a CheckpointManager"):
            trainer.save_checkpoint(wrong, 1)
        with pytest.raises(kv.ArgumentError, match="must be a CheckpointManager"):
            trainer.restore_checkpoint(wrong)


def test_a_replica_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    with kv.CheckpointManager(tmp_path) as manager:
        saved(manager, False)
        manager.wait()
        params = two()
        with Trainer(params, "adam", {"learning_rate": 7}, kvstore="local") as trainer:
            params[0].data()[:] = 9
            params[1].data().flags.writeable = False
            with pytest.raises(kv.ArrayError):
                trainer.restore_checkpoint(manager)
            assert trainer.learning_rate == 7 and params[0].data().tolist() == [9, 9]


def test_parameters_without_data(tmp_path: Path) -> None:
    params = [Parameter("a", np.zeros(2, F)), Parameter("later")]
    with kv.CheckpointManager(tmp_path) as manager, Trainer(params, "sgd") as trainer:
        for verb in (trainer.restore_checkpoint, lambda manager: trainer.save_checkpoint(manager, 1)):
            with pytest.raises(kv.ConfigError, match="'later' has no data yet"):
                verb(manager)


# --------------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize("updates", [True, False])
def test_workers_of_one_machine(job: Callable[..., Job], updates: bool, tmp_path: Path) -> None:
    check_together(job, "shared", updates, tmp_path)


@pytest.mark.parametrize("updates", [True, False])
def test_workers_with_servers(served: Callable[..., ServedJob], updates: bool, tmp_path: Path) -> None:
    check_together(lambda size: served(size, 2), "dist_sync", updates, tmp_path)


def check_together(start: Callable[[int], Job], name: str, updates: bool, folder: Path) -> None:
    """Two jobs, the second of more workers, continue from the same file."""
    for size, first in ((2, 0), (3, 2)):
        made = start(size)
        made.start_all("procs_trainer", "resume_checkpoint", name, updates, str(folder), first)
        results = made.results()
        assert results == [results[0]] * size
        made.close()
