"""What the workers of each peer call; the libraries are imported where they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

import kvstore as kv
from kvstore.errors import DTypeError

from .arrays import Array, KeyArrays
from .report import MEMCPY, OURS

Call = Callable[[], object]
Options = Mapping[str, Any]

_BUCKETS = (1 << 20, 25 << 20)  # bytes of DistributedDataParallel's first bucket, and of the others
_MOST = 1 << 30  # elements of a call of MPI, which counts them in 32 bits
_MPI_TYPES = {
    **{"float32": "FLOAT", "float64": "DOUBLE", "int8": "INT8_T", "uint8": "UINT8_T"},
    **{"int32": "INT32_T", "int64": "INT64_T"},
}


class BenchPeer(NamedTuple):
    """One worker of a library.

    Attributes
    ----------
    size : int
        Number of workers that the library has connected.
    sums : dict of str to callable
        Ways to sum the gradients of all workers in place.
    barrier, close : callable
        Wait for all workers, and disconnect from them.
    versions : dict of str to str
        Versions of the libraries.
    checked : callable
        Called after the sums were checked; returns the calls that are measured instead of them.
    """

    size: int
    sums: dict[str, Call]
    barrier: Call
    close: Call
    versions: dict[str, str]
    checked: Callable[[], dict[str, Call]] | None = None


def store(options: Options, gradients: KeyArrays, spare: KeyArrays) -> BenchPeer:
    """Create a store; measured are calls with the optimizer, and copies of the same bytes."""
    made = kv.create(options["store"])
    if codec := options["compression"]:
        made.set_gradient_compression(codec)
    made.init(gradients.names, spare.values)
    names, values = gradients.names, gradients.values

    def call(outs: list[Array]) -> None:
        if options["method"] == "pushpull":
            made.pushpull(names, values, out=None if outs is values else outs)
        else:
            made.push(names, values)
            made.pull(names, out=outs)

    def copy() -> None:
        for mine, other in zip(gradients.flat, spare.flat, strict=True):
            np.copyto(other, mine)
            np.copyto(mine, other)

    def checked() -> dict[str, Call]:
        made.barrier()  # where no worker waits for the others, all read before any pushes again
        if name := options["optimizer"]:
            made.set_optimizer(kv.optimizer.create(name))
        return {OURS: partial(call, spare.values if name else values), MEMCPY: copy}

    return BenchPeer(made.num_workers, {OURS: partial(call, values)}, made.barrier, made.close, {}, checked)


def gloo(options: Options, gradients: KeyArrays, spare: KeyArrays) -> BenchPeer:
    """Join torch.distributed's gloo, which DistributedDataParallel uses on the CPU."""
    torch, dist = import_module("torch"), import_module("torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    flat = [_tensor(torch, array) for array in gradients.flat]
    each = [_tensor(torch, array) for array in gradients.values]
    sizes = ((nbytes // tensor.element_size() for nbytes in _BUCKETS) for tensor in flat)
    cut = [
        (tensor[:first], *tensor[first:].split(rest))
        for tensor, (first, rest) in zip(flat, sizes, strict=True)
    ]
    buckets = [bucket for tensors in cut for bucket in tensors if len(bucket)]

    def call(tensors: Iterable[Any]) -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    ways = {"one buffer": flat, "DDP's buckets": buckets, "each key": each}
    sums: dict[str, Call] = {name: partial(call, tensors) for name, tensors in ways.items()}
    versions = {"torch": str(torch.__version__)}
    return BenchPeer(dist.get_world_size(), sums, dist.barrier, dist.destroy_process_group, versions)


def _tensor(torch: Any, array: Array) -> Any:
    """View an array as a tensor; PyTorch accepts bfloat16 of NumPy only as its bits."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def mpi(options: Options, gradients: KeyArrays, spare: KeyArrays) -> BenchPeer:
    """Start MPI by mpi4py."""
    mpi4py, lib = import_module("mpi4py"), import_module("mpi4py.MPI")
    world = lib.COMM_WORLD

    def sums(arrays: Iterable[Array]) -> Call:
        messages = []
        for array in arrays:
            if array.dtype.name not in _MPI_TYPES:
                raise DTypeError(f"MPI does not sum {array.dtype.name}")
            kind, flat = getattr(lib, _MPI_TYPES[array.dtype.name]), array.reshape(-1)
            messages += [[flat[at : at + _MOST], kind] for at in range(0, flat.size, _MOST)]

        def call() -> None:
            for message in messages:
                world.Allreduce(lib.IN_PLACE, message)

        return call

    line = lib.Get_library_version().strip("\0").splitlines()[0].partition(",")[0]
    versions = {"mpi4py": mpi4py.__version__, "MPI": " ".join(line.replace("Version:", "").split())}
    ways = {"one buffer": sums(gradients.flat), "each key": sums(gradients.values)}
    return BenchPeer(world.Get_size(), ways, world.Barrier, lib.Finalize, versions)


#: By the name of the peer.
PEERS = {OURS: store, "gloo": gloo, "mpi": mpi}
