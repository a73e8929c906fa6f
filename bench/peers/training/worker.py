"""A worker that trains in each way in turn."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import kvstore as kv
from bench.cases.training import EXCHANGE, TrainingCase
from bench.peers.base import Array, timed
from bench.peers.group.base import GroupPeer
from bench.peers.group.link import Place
from bench.peers.training import models
from bench.peers.training.ways import Way, Ways, compare, sample

#: The greatest difference of weights after each of the first steps. DistributedDataParallel makes its buckets
#: again in the second, and an untrained network can increase a rounding error by a factor of 10,000.
_TOLERANCES = (1e-3, 5e-2)
_PATIENCE = 120.0  # seconds, for a step of the largest model on the slowest link


class Training(GroupPeer):
    """Each way is a variant, and each exchange alone is another; a turn is some calls, after a barrier.

    The weights of all ways share memory, and so do the momenta, so that large models fit.
    """

    case_type = TrainingCase

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        torch.set_num_threads(1)
        meeting = f"file://{os.getcwd()}/meeting"
        limit = timedelta(seconds=_PATIENCE)
        dist.init_process_group("gloo", init_method=meeting, rank=place.rank, world_size=2, timeout=limit)
        self._stores: list[kv.KVStore] = []

    def prepare(self, case: TrainingCase) -> list[Array]:
        """Make two steps in each way; there is nothing to compare with other peers."""
        kind = "shared" if case.hosts == 1 else "dist_sync"
        batch = models.batch(case.model, case.batch, self.place.rank)
        ways = Ways(lambda: batch, lambda: self._open(kind), place=self.place)
        found = self._made(case, ways)
        self.variants = {name: way.step for name, way in found.items()}
        for name, way in found.items():
            if way.exchange is not None:
                self.variants[name + EXCHANGE] = way.exchange
        return []

    def _made(self, case: TrainingCase, ways: Ways) -> dict[str, Way]:
        """Make each way with the first weights, and try it."""
        found, model = {}, models.make(case.model)
        _check_size(case, model)
        first, expected = sample(model), list[torch.Tensor]()
        for name in case.ways:
            model.load_state_dict(models.make(case.model).state_dict())
            found[name] = ways.make(name, models.twin(case.model, model))
            changes = []
            for _ in _TOLERANCES:
                found[name].step()
                changes.append(sample(model) - first)
            if name == "gloo":
                expected = changes
            for change, wanted, tolerance in zip(changes, expected, _TOLERANCES, strict=False):
                compare(name, change, wanted, tolerance)
        return found

    def run(self, variant: str, repeats: int) -> list[float]:
        dist.barrier()
        before = time.process_time()
        times = timed(self.variants[variant], repeats)
        self.cpu = time.process_time() - before
        return times

    def _open(self, kind: str) -> kv.KVStore:
        made = kv.create(kind, timeout=_PATIENCE)
        self._stores.append(made)
        return made

    def release(self) -> None:
        super().release()
        for store in self._stores:
            store.close()
        self._stores = []

    def close(self) -> None:
        dist.destroy_process_group()


def _check_size(case: TrainingCase, model: nn.Module) -> None:
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != case.parameters:
        raise AssertionError(f"{case.model} has {found} parameters, not {case.parameters}")
