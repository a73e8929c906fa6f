"""The costs of calls, messages, requests and bytes on this machine, fitted to real jobs of 1 to 8 workers.

Before each call each worker sweeps more memory than the size of the caches, as a training program does.
Many processes that share a core also evict each other's data from its caches.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench.cases.common import KB, MB
from bench.scale.costs import Costs
from bench.scale.real import Found, RealCase, run
from kvstore.kernels import cpu
from kvstore.settings.definitions import USUAL_SLICE_BYTES
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.transport.frames import MessageCodec

SWEEP = 32 * MB
WORKERS = (1, 2, 4, 8)
KEY = 4 * KB // 4
_2BIT = 1  # of the codecs of kernels/codecs.h

Measured = list[tuple[RealCase, Found]]


def cases() -> Iterator[RealCase]:
    """Yield the jobs that costs are fitted to."""
    one, many, large = (KEY,), (KEY,) * 256, (MB,)
    for n in WORKERS:
        yield RealCase(n, 1, one, sweep=SWEEP, calls=200, warm=20)
        yield RealCase(n, 1, many, sweep=SWEEP, calls=60)
        yield RealCase(n, 1, large, sweep=SWEEP, calls=40)
    for n in (2, 4):
        yield RealCase(n, 1, (8 * MB,), sweep=SWEEP, calls=10, warm=2)
        yield RealCase(n, 1, large, "push", sweep=SWEEP, calls=40)
        yield RealCase(n, 1, large, "pull", sweep=SWEEP, calls=40)
        yield RealCase(n, 1, large, sweep=SWEEP, calls=30, codec="2bit")
        yield RealCase(n, 2, many, sweep=SWEEP, calls=60)
    for n in (2, 8):
        yield RealCase(n, 1, (), "barrier", calls=300, warm=20)
    for n in (1, 8):
        yield RealCase(n, 1, (), "idle", calls=24, warm=1)
    for n in (2, 4, 8):
        yield RealCase(n, 0, (4 * MB,), calls=20, mode="shared")


def measure(wanted: Sequence[RealCase]) -> Measured:
    """Run all jobs, one after the other."""
    found = []
    for case in wanted:
        found.append((case, run(case)))
        print(f"{case}: {1e3 * found[-1][1].seconds:.3f} ms", file=sys.stderr)
    return found


def fit(found: Measured) -> Costs:
    """Fit the costs to all jobs, each cost by its own measure."""
    calls = [one for one in found if one[0].way in ("pushpull", "push", "pull") and one[0].sweep]
    plain = [one for one in calls if not one[0].codec]
    worker = _solve([_of_worker(case) for case, _ in plain], [f.worker for _, f in plain])
    server = _solve([_of_server(case) for case, _ in plain], [f.server for _, f in plain])
    beat, idle = _beats(found)
    made = Costs(*worker, 0.0, *server, 0.0, _barrier(found), *control_bytes(), beat, idle, 0.0, 8)
    packed = [one for one in calls if one[0].codec]
    made = replace(made, worker_pack=_rest(packed, worker, _of_worker, lambda f: f.worker, 1))
    made = replace(made, server_unpack=_rest(packed, server, _of_server, lambda f: f.server, 0))
    return replace(made, host_sum=_host_sum(found))


def messages(case: RealCase) -> int:
    """Count the messages of a call to each server, one way."""
    return max(1, math.ceil(case.nbytes / USUAL_SLICE_BYTES)) if case.sizes else 0


def requests(case: RealCase) -> int:
    """Count the requests of a call."""
    return sum(math.ceil(4 * n / USUAL_SLICE_BYTES) for n in case.sizes)


def _pushed(case: RealCase) -> int:
    if case.way == "pull":
        return 0
    return sum(cpu.encoded_bytes(_2BIT, n) for n in case.sizes) if case.codec else case.nbytes


def _pulled(case: RealCase) -> int:
    return 0 if case.way == "push" else case.nbytes


def _of_worker(case: RealCase) -> list[float]:
    """Count the operations of a worker in a call: call, messages, requests, bytes pushed, bytes pulled."""
    m = messages(case) * (2 if case.servers == 1 else 4)
    return [1, m, requests(case), _pushed(case), _pulled(case)]


def _of_server(case: RealCase) -> list[float]:
    """Count the same for all servers, without the call."""
    n = case.workers
    moved = [0 if case.codec else _pushed(case), _pulled(case)]
    return [n * one for one in (*_of_worker(case)[1:3], *moved)]


def _solve(rows: list[list[float]], wanted: list[float]) -> list[float]:
    """Solve by least squares of relative errors, with no cost below 0."""
    matrix, target = np.array(rows, float), np.array(wanted)
    scaled = matrix / target[:, None]
    active = list(range(matrix.shape[1]))
    while True:
        norms = np.linalg.norm(scaled[:, active], axis=0)
        found = np.linalg.lstsq(scaled[:, active] / norms, np.ones(len(target)), rcond=None)[0] / norms
        if (found >= 0).all():
            break
        active.pop(int(np.argmin(found * norms)))
    costs = np.zeros(matrix.shape[1])
    costs[active] = found
    return [float(one) for one in costs]


def _rest(
    found: Measured,
    known: list[float],
    row: Callable[[RealCase], list[float]],
    measure: Callable[[Found], float],
    alone: int,
) -> float:
    """Return the seconds of a byte of gradients beyond the known costs."""
    rests = []
    for case, f in found:
        explained = sum(a * b for a, b in zip(known, row(case), strict=True))
        rests.append((measure(f) - explained) / ((1 if alone else case.workers) * case.nbytes))
    return max(0.0, sum(rests) / len(rests)) if rests else 0.0


def _barrier(found: Measured) -> float:
    """Return the seconds of a message at the scheduler: each worker's request and reply are acknowledged."""
    costs = [f.scheduler / (4 * case.workers) for case, f in found if case.way == "barrier"]
    return sum(costs) / len(costs)


def _beats(found: Measured) -> tuple[float, float]:
    """Return the seconds of a heartbeat, and the load of a scheduler without heartbeats."""
    idle = sorted(
        (case.workers + case.servers, f.scheduler / f.seconds) for case, f in found if case.way == "idle"
    )
    (few, low), (many, high) = idle[0], idle[-1]
    each = max(0.0, (high - low) / (many - few))  # of a process, a second
    return each / 2, max(0.0, low - few * each)  # there are two a second


def control_bytes() -> tuple[float, ...]:
    """Return the seconds of a byte of a control message: encoded, decoded, copied; and the same for names."""
    keys = tuple(f"layer{n}.weight" for n in range(20_000))
    entries = tuple(
        m.KeyEntry(m.KeySpec(key, (64, 64), "float32"), n, (m.Slice(n, 0, 0, 4096),), True)
        for n, key in enumerate(keys)
    )
    letters = [m.ReliableMessage(n, n, m.MemberReply(n, entries)) for n in range(6)]
    encode, decode = _coded(letters[0])
    codec = MessageCodec("calibration")
    nbytes = len(codec.encode(letters[0])[0])
    codec.encode(letters[1])
    copy = _timed(lambda: codec.encode(letters[2])) / nbytes
    return encode, decode, copy, *_coded(m.ReliableMessage(1, 1, m.LookupRequest(1, 0, keys)))


def _coded(message: m.ReliableMessage) -> tuple[float, float]:
    """Return the seconds of a byte of a message for encoding with a check, and for decoding."""
    frames = MessageCodec("calibration").encode(message)
    encode = _timed(lambda: MessageCodec("calibration").encode(message))
    decode = _timed(lambda: MessageCodec("calibration").decode(frames))
    return encode / len(frames[0]), decode / len(frames[0])


def _timed(call: Callable[[], object]) -> float:
    """Return the median seconds of five calls."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return sorted(times)[2]


def _host_sum(found: Measured) -> float:
    """Return the seconds of a byte of a sum of eight workers within this host."""
    times = [f.seconds / case.nbytes for case, f in found if case.mode == "shared" and case.workers == 8]
    return times[0] if times else 0.0
