"""The main job: a network learns real digits through a store, and always to the same bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pace
import pytest
from click.testing import CliRunner

import kvstore as kv
from kvstore import demo
from kvstore.demo import BATCH, TUNED, PartTimes, TrainingResult, TrainingSettings, load_digits
from kvstore.launch.cli import main


def trained(**settings: object) -> TrainingResult:
    chosen = TrainingSettings(**settings)  # type: ignore[arg-type]
    with kv.create(chosen.store) as store:
        assert isinstance(store, kv.KVStore)
        return demo.train(store, chosen, load_digits(), lambda accuracy: None)


def test_the_command_reaches_its_accuracy_and_tells_how_the_time_was_spent() -> None:
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    found = re.search(r"test accuracy +(0\.\d+)", result.stdout)
    assert found is not None
    assert float(found[1]) >= 0.97
    for part in ("forward + backward", "push", "pull", "evaluation", "epochs per second"):
        assert part in result.stdout


@pytest.mark.parametrize(
    ("store", "optimizer"),
    [
        pytest.param(
            store, optimizer, marks=() if "local" in store or optimizer == "sgd" else pytest.mark.nightly
        )
        for store in ("local", "device", "shared")
        for optimizer in sorted(TUNED)
    ],
)
def test_stores_and_optimizers_learn(store: str, optimizer: str) -> None:
    assert trained(store=store, optimizer=optimizer).accuracy >= 0.97


def test_same_seed_same_bits_in_two_processes(tmp_path: Path) -> None:
    command = "from kvstore.launch.cli import main; main()"
    arguments = [sys.executable, "-c", command, "demo", "--epochs", "3", "--seed", "7"]
    outputs = [
        subprocess.run(
            arguments, cwd=tmp_path, capture_output=True, text=True, timeout=pace.seconds(100), check=True
        ).stdout
        for _ in range(2)
    ]
    first, second = (re.search(r"weights +([0-9a-f]{12})\n", output) for output in outputs)
    assert first is not None
    assert second is not None
    assert first[1] == second[1]


def command(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore.launch", "demo", *arguments]
    return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=pace.seconds(300))


@pytest.mark.timeout(600)
def test_processes_and_servers_of_its_own_end_with_the_bits_of_as_many_replicas(tmp_path: Path) -> None:
    epochs = ["--epochs", "1"]
    alone, together = (command(tmp_path, *epochs, *more) for more in ([], ["-n", "4"]))
    # A worker's own sum is first: 2 of 2 add up in another order.
    done = [
        alone,
        command(tmp_path, *epochs, "-n", "4", "--store", "dist_sync"),
        command(tmp_path, *epochs, "-n", "2", "--replicas", "1", "--store", "dist_sync", "--servers", "2"),
    ]
    assert [one.returncode for one in (*done, together)] == [0] * 4, [one.stderr for one in (*done, together)]
    weights = [re.search(r"weights +([0-9a-f]{12})\n", one.stdout) for one in (*done, together)]
    assert all(weights)
    assert weights[0][1] == weights[1][1] == weights[3][1]  # type: ignore[index]
    assert "4 workers of 1" in done[1].stdout
    assert "2 workers of 1" in done[2].stdout
    for one in done[1:]:
        assert len(re.findall("test accuracy +0", one.stdout)) == 1
        assert "waiting for others" in one.stdout
    assert "waiting for others" not in done[0].stdout


SLOW = """
import json, time
import numpy as np
import kvstore as kv
from kvstore import demo

store = kv.create("shared")
if store.rank == 1:
    usual = demo.sum_gradients
    demo.sum_gradients = lambda *arguments: (time.sleep(0.5), usual(*arguments))[1]
weights, watch, data = demo.initial_weights(0), demo.PartTimes(), demo.load_digits()
store.init(list(weights), list(weights.values()))
store.set_optimizer(demo.scheduled_optimizer(demo.TrainingSettings(), 4))
for _ in range(4):
    demo.train_step(store, [weights], data, np.arange(demo.BATCH), watch)
if store.rank == 0:
    print(json.dumps(watch))
"""


def test_time_that_another_worker_takes_is_told_from_the_pull(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "kvstore.launch", "run", "-n", "2", "--no-prefix", "slow.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=pace.seconds(100), check=True
    )
    seconds = json.loads(done.stdout)
    assert seconds["waiting for others"] > 1  # of the 2 that the other worker sleeps
    assert seconds["pull"] < seconds["waiting for others"]


def test_processes_that_share_cores_are_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    cores = len(os.sched_getaffinity(0))
    result = TrainingResult(0.97, 2.0, {"push": 1.0}, "0" * 12)
    demo.report(TrainingSettings(), result, 1, cores)
    assert "share" not in capsys.readouterr().out.rpartition("total")[2]
    demo.report(TrainingSettings(), result, cores + 1, cores + 1)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{cores + 1} processes share {'a core' if cores == 1 else f'{cores} cores'}" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "4", "--store", "device"], "4 processes would train separately: use --store shared"),
        (["-n", "2", "--servers", "2"], "--servers is for stores on servers"),
        (["-n", "2", "--store", "teststore"], "'teststore' cannot run an optimizer"),
        (["-n", "2", "--store", "sharde"], "did you mean 'shared'"),
    ],
)
def test_what_cannot_train_together_is_refused_in_one_line(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["demo", *arguments])
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    assert words in line


def test_another_seed_gives_other_bits() -> None:
    assert trained(epochs=1, seed=1).weights != trained(epochs=1, seed=2).weights


@pytest.mark.parametrize("replicas", [1, 3, BATCH])
def test_any_number_of_replicas_learns_the_same_thing(replicas: int) -> None:
    # Not the same bits: the shards' sums round differently. The gradients are the same up to that.
    assert trained(replicas=replicas, epochs=10).accuracy >= 0.95


def test_the_rate_is_the_caller_s() -> None:
    assert trained(lr=1e-6, epochs=1).accuracy < 0.5


def test_gradients_of_the_shards_add_up_and_point_downhill() -> None:
    data, weights = load_digits(), demo.initial_weights(seed=0)
    whole = demo.sum_gradients(weights, data.images[:60], data.labels[:60])
    parts = [
        demo.sum_gradients(weights, data.images[i : i + 20], data.labels[i : i + 20]) for i in (0, 20, 40)
    ]
    for name, gradient in whole.items():
        np.testing.assert_allclose(sum(part[name] for part in parts), gradient, rtol=1e-4, atol=1e-4)


def test_gradients_agree_with_finite_differences() -> None:
    data, weights = load_digits(), demo.initial_weights(seed=0)
    images, labels = data.images[:8], data.labels[:8]
    double = {name: array.astype(np.float64) for name, array in weights.items()}

    def loss() -> float:
        hidden = np.maximum(images @ double["fc1.weight"] + double["fc1.bias"], 0)
        logits = hidden @ double["fc2.weight"] + double["fc2.bias"]
        return float((np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(8), labels]).sum())

    random = np.random.default_rng(0)
    for name, gradient in demo.sum_gradients(weights, images, labels).items():
        direction = random.standard_normal(gradient.shape)
        step, middle = 1e-5, double[name]
        double[name] = middle + step * direction
        above = loss()
        double[name] = middle - step * direction
        below = loss()
        double[name] = middle
        np.testing.assert_allclose((above - below) / (2 * step), (gradient * direction).sum(), rtol=1e-3)


def test_the_digest_sees_one_bit() -> None:
    weights = demo.initial_weights(seed=0)
    before = demo.digest_of(weights)
    weights["fc1.bias"].view(np.int32)[0] ^= 1
    assert demo.digest_of(weights) != before


def test_the_data_is_split_without_overlap() -> None:
    data = load_digits()
    assert len(data.labels) + len(data.test_labels) == 1797
    assert set(np.unique(data.test_labels)) == set(range(10))
    assert data.images.min() == 0
    assert data.images.max() == 1


def test_the_data_is_what_scikit_learn_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    found = load_digits()
    monkeypatch.setattr(demo, "_DIGITS_FILE", "no-such-file")
    for ours, theirs in zip(found, load_digits(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Recorder:
    """Stands for worker `rank` of a job: notes the gradients that it would push."""

    def __init__(self, rank: int, num_workers: int) -> None:
        self.rank, self.num_workers, self.type = rank, num_workers, "shared"
        self.pushed: list[list[np.ndarray]] = []

    def push(self, names: list[str], values: list[list[np.ndarray]]) -> None:
        self.pushed = values

    def barrier(self) -> None:
        pass

    def pull(self, names: list[str], out: list[list[np.ndarray]]) -> None:
        pass


def pushed(rank: int, num_workers: int, replicas: int) -> list[list[np.ndarray]]:
    data, worker = load_digits(), Recorder(rank, num_workers)
    copies = [demo.initial_weights(seed=0) for _ in range(replicas)]
    demo.train_step(worker, copies, data, np.arange(BATCH), PartTimes())  # type: ignore[arg-type]
    return worker.pushed


@pytest.mark.parametrize("num_workers", [2, 4])
def test_workers_share_a_batch_as_replicas_do(num_workers: int) -> None:
    alone = pushed(rank=0, num_workers=1, replicas=4)
    workers = [pushed(rank, num_workers, replicas=4 // num_workers) for rank in range(num_workers)]
    for key, values in enumerate(alone):
        together = [gradient for worker in workers for gradient in worker[key]]
        np.testing.assert_array_equal(together, values)
