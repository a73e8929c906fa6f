"""DeepSpeed's all-reduce through shared memory, which its CPU back end has for inference."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.peers.base import Array, Call
from bench.peers.group.link import Place, free_port
from bench.peers.shared.all_reduce import AllReducePeer


class DeepSpeed(AllReducePeer):
    """The compiled operator itself, without the layer of torch.distributed above it."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        torch.set_num_threads(1)
        port = place.link.gather(free_port())[0]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_SIZE=str(place.workers))
        os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for ninja
        _build(place).initialize(place.workers, place.rank)
        place.gate.wait()
        _forget_names(port, place.rank)

    def ways(self, values: list[Array], flat: Array) -> dict[str, Call]:
        found = {"a call for each key": partial(_reduce, [torch.from_numpy(value) for value in values])}
        return found | ({"flat": partial(_reduce, [torch.from_numpy(flat)])} if len(values) > 1 else {})


def _reduce(tensors: list[Any]) -> None:
    for tensor in tensors:
        torch.ops.deepspeed.inference_all_reduce_(tensor)


def _build(place: Place) -> Any:
    """Compile the operator, or load the compiled operator; one worker after the other."""
    from deepspeed.ops.op_builder import ShareMemCommBuilder

    module = None
    for rank in range(place.workers):
        if rank == place.rank:
            module = ShareMemCommBuilder().load(verbose=False)
        place.link.gather(rank)
    return module


def _forget_names(port: int, rank: int) -> None:
    """Unlink the operator's names in /dev/shm; the memory stays mapped."""
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_{rank}"
    with contextlib.suppress(OSError):
        (Path("/dev/shm") / name).unlink()
