"""``python -m kvstore.observe.bench.worker PEER ADDRESS``: a worker of a peer of ``kvstore bench``.

It sends its rank, then it answers the messages of the command until the command disconnects. The libraries of
the peers are imported where they are needed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from importlib import import_module
from multiprocessing.connection import Client
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

import kvstore as kv
from kvstore.errors import CapabilityError, DTypeError, KVStoreError
from kvstore.settings import launchers
from kvstore.store_kinds import STORES

from .arrays import Array, KeyArrays
from .key_lists import BenchKey
from .report import MEMCPY, OURS

Call = Callable[[], object]
Options = Mapping[str, Any]

_BLOCK = 16  # calls between two times that the gradients are written anew: sums in place grow
_BUCKETS = (1 << 20, 25 << 20)  # bytes of DistributedDataParallel's first bucket, and of the others
_MOST = 1 << 30  # elements of a call of MPI, which counts them in 32 bits
_MPI_TYPES = {
    **{"float32": "FLOAT", "float64": "DOUBLE", "int8": "INT8_T", "uint8": "UINT8_T"},
    **{"int32": "INT32_T", "int64": "INT64_T"},
}


class BenchPeer(NamedTuple):
    """One worker of a library.

    `size` is the number of workers that the library has connected; `sums` has the ways to sum the gradients
    of all in place. `checked` is called after the sums were checked; it returns the calls that are measured
    instead of them.
    """

    size: int
    sums: dict[str, Call]
    barrier: Call
    close: Call
    versions: dict[str, str]
    checked: Callable[[], dict[str, Call]] | None = None


def join_store(options: Options, gradients: KeyArrays, spare: KeyArrays) -> BenchPeer:
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


def join_gloo(options: Options, gradients: KeyArrays, spare: KeyArrays) -> BenchPeer:
    """Join torch.distributed's gloo, which DistributedDataParallel uses on the CPU."""
    torch, dist = import_module("torch"), import_module("torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))

    def tensor(array: Array) -> Any:
        if array.dtype.name == "bfloat16":  # PyTorch accepts only the bits of NumPy's
            return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array)

    def call(tensors: Iterable[Any]) -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    flat, buckets = list(map(tensor, gradients.flat)), []
    for whole in flat:
        first, rest = (nbytes // whole.element_size() for nbytes in _BUCKETS)
        buckets += [part for part in (whole[:first], *whole[first:].split(rest)) if len(part)]
    ways = {"one buffer": flat, "DDP's buckets": buckets, "each key": list(map(tensor, gradients.values))}
    sums: dict[str, Call] = {name: partial(call, tensors) for name, tensors in ways.items()}
    versions = {"torch": str(torch.__version__)}
    return BenchPeer(dist.get_world_size(), sums, dist.barrier, dist.destroy_process_group, versions)


def join_mpi(options: Options, gradients: KeyArrays, spare: KeyArrays) -> BenchPeer:
    """Start MPI by mpi4py."""
    mpi4py, lib = import_module("mpi4py"), import_module("mpi4py.MPI")
    world = lib.COMM_WORLD

    def call(messages: list[Any]) -> None:
        for message in messages:
            world.Allreduce(lib.IN_PLACE, message)

    def sums(arrays: Iterable[Array]) -> Call:
        messages = []
        for array in arrays:
            if array.dtype.name not in _MPI_TYPES:
                raise DTypeError(f"MPI does not sum {array.dtype.name}")
            kind, flat = getattr(lib, _MPI_TYPES[array.dtype.name]), array.reshape(-1)
            messages += [[flat[at : at + _MOST], kind] for at in range(0, flat.size, _MOST)]
        return partial(call, messages)

    line = lib.Get_library_version().strip("\0").splitlines()[0].partition(",")[0]
    versions = {"mpi4py": mpi4py.__version__, "MPI": " ".join(line.replace("Version:", "").split())}
    ways = {"one buffer": sums(gradients.flat), "each key": sums(gradients.values)}
    return BenchPeer(world.Get_size(), ways, world.Barrier, lib.Finalize, versions)


_PEERS = {OURS: join_store, "gloo": join_gloo, "mpi": join_mpi}


def check_sums(
    peer: BenchPeer, rank: int, options: Options, gradients: KeyArrays, spare: KeyArrays
) -> str | None:
    """Make a call of each way; return the first key, with its way, with a sum that differs from NumPy's."""
    codec, summed = None, True
    if peer.checked:
        codec, summed = options["compression"], STORES[options["store"]].synchronous
    wrong: str | None = None
    for way, call in peer.sums.items():
        gradients.write_pattern(rank)
        call()
        key = gradients.wrong_key(spare, peer.size, codec, summed)
        wrong = wrong or (key and f"the sum of key {key!r} ({way})")
    return wrong


def call_times(peer: BenchPeer, call: Call, gradients: KeyArrays, calls: int) -> list[float]:
    """Return the seconds of each call. A block has one call more, before which the workers wait."""
    times = list[float]()
    gc.collect()
    gc.disable()
    while len(times) < calls:
        gradients.refill()
        peer.barrier()
        call()
        for _ in range(min(_BLOCK, calls - len(times))):
            began = perf_counter()
            call()
            times.append(perf_counter() - began)
    gc.enable()
    return times


def serve_command(link: Any, name: str, rank: int, options: Options) -> None:
    """Check the sums, and measure, until the command disconnects."""
    keys = [BenchKey(key, tuple(shape), dtype) for key, shape, dtype in options["keys"]]
    gradients, spare = KeyArrays(keys), KeyArrays(keys)
    peer = _PEERS[name](options, gradients, spare)
    if peer.size != options["workers"]:
        raise CapabilityError(f"{name} does not connect {options['workers']} processes, but {peer.size}")
    wrong = check_sums(peer, rank, options, gradients, spare)
    ways = peer.checked() if peer.checked else peer.sums
    versions = {"kvstore": kv.__version__, "Python": platform.python_version(), "NumPy": np.__version__}
    answer: dict[str, Any] = {"wrong": wrong, "ways": list(ways), "versions": {**versions, **peer.versions}}
    while (order := _next_order(link, answer)) is not None:
        answer = {"seconds": call_times(peer, ways[order["way"]], gradients, order["calls"])}
    peer.close()


def _next_order(link: Any, answer: dict[str, Any]) -> dict[str, Any] | None:
    """Send an answer and return the next message; None if the command has disconnected."""
    with contextlib.suppress(EOFError, ConnectionError):
        link.send_bytes(json.dumps(answer).encode())
        return json.loads(link.recv_bytes())  # type: ignore[no-any-return]
    return None


def main(name: str, address: str) -> None:
    """Connect to the command, and serve it; an error is its last answer."""
    with contextlib.suppress(EOFError, ConnectionError), Client("\0" + address, "AF_UNIX") as link:
        rank = launchers.detect_placement().rank
        link.send_bytes(json.dumps({"rank": rank}).encode())
        options = json.loads(link.recv_bytes())
        try:
            serve_command(link, name, rank, options)
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            link.send_bytes(json.dumps({"error": text}).encode())
            if isinstance(error, KVStoreError):  # needs no traceback
                raise SystemExit(text) from error
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
