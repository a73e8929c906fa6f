"""Losses over the steps of a small model, trained in each way from several seeds: the program of a worker.

The model learns to read scikit-learn's digits, as in ``kvstore demo``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import kvstore as kv
from bench.cases.training import CURVES, Curves
from bench.peers.training import models
from bench.peers.training.models import Batch
from bench.peers.training.ways import Way, Ways
from kvstore.demo import DigitImages, load_digits

_PATIENCE = 60.0


def main() -> None:
    """Train; rank 0 writes the losses to the path on the command line."""
    target, wanted = sys.argv[3], Curves.from_json(json.loads(sys.argv[4]))
    rank = int(os.environ["KVSTORE_RANK"])
    torch.set_num_threads(1)
    meeting, limit = f"file://{os.getcwd()}/meeting", timedelta(seconds=_PATIENCE)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=limit)
    runs = [train(wanted, way, seed, rank) for way in CURVES for seed in range(wanted.seeds)]
    dist.barrier()
    if rank == 0:
        Path(target).write_text(json.dumps(runs))
    dist.destroy_process_group()


def train(wanted: Curves, way: str, seed: int, rank: int) -> dict[str, Any]:
    """Train from a seed's first weights; batches differ by seed and rank."""
    data = load_digits()
    batches = _batches(data, wanted.batch, torch.Generator().manual_seed(2 * seed + rank))
    model = models.make("digits", seed)
    threshold = wanted.multiple * _size(model, next(batches))
    with kv.create("dist_sync", timeout=_PATIENCE) as store:
        made = Ways(lambda: next(batches), lambda: store, wanted.rate, threshold).make(way, model)
        start = time.perf_counter()
        losses = torch.stack([_step(made, wanted.rate_of(number)) for number in range(wanted.steps)])
        seconds = time.perf_counter() - start
    dist.all_reduce(losses.div_(2))
    means = losses.reshape(-1, wanted.every).mean(dim=1)
    found = {"loss": [round(float(one), 4) for one in means], "test": round(_tested(model, data), 4)}
    return {"way": way, "seed": seed, "threshold": threshold, "seconds": round(seconds, 2), **found}


def _step(way: Way, rate: float) -> torch.Tensor:
    way.rule.param_groups[0]["lr"] = rate
    loss: torch.Tensor = way.step()
    return loss


def _batches(data: DigitImages, size: int, random: torch.Generator) -> Iterator[Batch]:
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    while True:
        chosen = torch.randint(len(labels), (size,), generator=random)
        yield images[chosen], labels[chosen]


def _size(model: nn.Module, batch: Batch) -> float:
    """Return the root mean square of the first gradients of all workers, known before the training."""
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    mean = torch.cat([gradient.flatten() for gradient in gradients]).square().mean()
    dist.all_reduce(mean)
    return float((mean / 2).sqrt())


def _tested(model: nn.Module, data: DigitImages) -> float:
    """Return the loss on the test set."""
    with torch.no_grad():
        found = model(torch.from_numpy(data.test_images))
        return float(nn.functional.cross_entropy(found, torch.from_numpy(data.test_labels)))
