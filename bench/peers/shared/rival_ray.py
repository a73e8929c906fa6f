"""Ray: worker actors send to an actor that sums, and receive the sum; a driver requests each step."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import ray

from bench import ROOT
from bench.cases import shared as shared_cases
from bench.cases.shared import SharedCase
from bench.peers.base import Array
from bench.peers.group.base import GroupPeer
from bench.peers.group.link import Place


class Worker:
    """The value of a worker, and its steps."""

    def __init__(self, fields: dict[str, Any], rank: int) -> None:
        data = shared_cases.inputs(SharedCase.from_json(fields), rank)
        self.value, self.buffer = data.values[0], data.flat

    def give(self) -> Array:
        return self.value

    def take(self, total: Array) -> None:
        np.copyto(self.value, total)

    def scale(self, factor: float) -> None:
        np.multiply(self.buffer, np.float32(factor), out=self.buffer)

    def show(self) -> Array:
        return self.value.copy()


class Adder:
    """The sum of the values of all workers."""

    def add(self, *values: Array) -> Array:
        total = values[0].copy()
        for value in values[1:]:
            total += value
        return total


class Ray(GroupPeer):
    """One driver for all workers; Ray's own processes are under it."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        ray.init(
            num_cpus=place.processes + 1,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=2 << 30,
            _temp_dir=tempfile.gettempdir(),
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}},
        )

    def prepare(self, case: SharedCase) -> list[Array]:
        kind = ray.remote(num_cpus=1)(Worker)
        self.workers = [kind.remote(case.to_json(), rank) for rank in range(case.processes)]
        self.adder = ray.remote(num_cpus=1)(Adder).remote()
        self.variants = {"": self._step}
        self._step()
        self.calls = 1
        return [np.array(ray.get(self.workers[-1].show.remote()))]

    def _step(self) -> None:
        total = self.adder.add.remote(*(worker.give.remote() for worker in self.workers))
        ray.get([worker.take.remote(total) for worker in self.workers], timeout=60)

    def scale(self, factor: float) -> None:
        ray.get([worker.scale.remote(factor) for worker in self.workers], timeout=60)

    def close(self) -> None:
        ray.shutdown()


os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
