"""The programs of the workers of a job: generators that yield their waits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any

from bench.scale.worker import Program, Wait, WorkerProcess
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.messages import KeySpec, RecordKind

_SETTLES = 1.0  # seconds until the scheduler is idle

Steps = Generator[Wait, None, None]


def asked(
    worker: WorkerProcess, message: Any, take: Callable[[e.OperationDone], None] = lambda done: None
) -> Wait:
    """Wait for a reply of the scheduler."""

    def wait(go_on: Callable[[], None]) -> None:
        def then(done: e.OperationDone) -> None:
            take(done)
            go_on()

        worker.ask(message, then)

    return wait


def called(worker: WorkerProcess, kind: RecordKind, keys: Sequence[m.Key], priority: int = 0) -> Wait:
    """Wait for a call to the servers."""
    return lambda go_on: worker.submit(kind, keys, lambda done: go_on(), priority)


def computed(worker: WorkerProcess, seconds: float) -> Wait:
    """Wait for work outside the simulated cores: on a GPU, or sleep."""
    return lambda go_on: worker.clock.at(worker.clock.now + seconds, go_on)


def init(worker: WorkerProcess, specs: Sequence[KeySpec]) -> Steps:
    """Initialise keys, as worker/initial_values.py does: the lowest rank sends values, the others wait."""
    learn = partial(_learn, worker)
    if not worker.machine.member.is_initializer():
        yield asked(worker, m.LookupRequest(0, 0, tuple(spec.key for spec in specs)), learn)
        return
    yield asked(worker, m.CreateKeysRequest(0, 0, tuple(specs)), learn)
    keys = tuple(spec.key for spec in specs)
    yield called(worker, RecordKind.ASSIGN, keys)
    yield asked(worker, m.KeysReadyRequest(0, 0, keys))


def _learn(worker: WorkerProcess, done: e.OperationDone) -> None:
    if done.answer is not None:
        worker.entries.update({entry.spec.key: entry for entry in done.answer.entries})


def barrier(worker: WorkerProcess, number: int) -> Steps:
    """Wait for all workers."""
    yield asked(worker, m.BarrierRequest(0, 0, number))


def leave(worker: WorkerProcess) -> Steps:
    """Close the store, and leave the job."""
    yield asked(worker, m.LeaveNotice(0))
    yield asked(worker, m.ProcessEndNotice(worker.name))


def steps(specs: Sequence[KeySpec], count: int, compute: float = 0.0, closes: bool = False) -> Program:
    """Init, pass a barrier, then repeat: compute, and pushpull all keys in one call.

    Marks: ``welcome``, ``ready`` (of the init), and of each step ``begin N`` and ``end N``.
    """

    def program(worker: WorkerProcess) -> Steps:
        job, keys = worker.job, [spec.key for spec in specs]
        job.mark("welcome")
        yield from init(worker, specs)
        job.mark("ready")
        yield from barrier(worker, 1)
        for number in range(count):
            yield computed(worker, compute + job.rng.random() * job.plan.jitter)
            job.mark(f"begin {number}")
            yield called(worker, RecordKind.PUSHPULL, keys)
            job.mark(f"end {number}", worker.time)
        if closes:
            job.mark("closes")
            yield from leave(worker)

    return program


def control(specs: Sequence[KeySpec], idle: float) -> Program:
    """Start, init, pass a barrier, compute for some seconds, and close the store.

    Marks: ``welcome``, ``ready``, ``passed``, ``settled`` (the scheduler is idle), ``closes``.
    """

    def program(worker: WorkerProcess) -> Steps:
        job = worker.job
        job.mark("welcome")
        yield from init(worker, specs)
        job.mark("ready")
        yield computed(worker, job.rng.random() * job.plan.jitter)
        yield from barrier(worker, 1)
        job.mark("passed")
        yield computed(worker, _SETTLES)
        job.mark("settled")
        yield computed(worker, idle + job.rng.random() * job.plan.jitter)
        job.mark("closes")
        yield from leave(worker)

    return program


def training(
    specs: Sequence[KeySpec], count: int, forward: float, backward: float, apart: bool = True
) -> Program:
    """Train as a network: the backward pass computes the last key first, the forward pass needs it last.

    Each key is a call of its own as soon as its gradient is there, with the priority of its place; the next
    step's forward pass waits for each key before its layer. `apart` False: all have the same priority.
    """
    sizes = [_elements(spec) for spec in specs]
    whole = sum(sizes)

    def program(worker: WorkerProcess) -> Steps:
        job, n = worker.job, len(specs)
        yield from init(worker, specs)
        yield from barrier(worker, 1)
        for number in range(count):
            job.mark(f"begin {number}")
            there: set[int] = set()
            waits: list[tuple[int, Callable[[], None]]] = []
            for at in reversed(range(n)):
                yield computed(worker, backward * sizes[at] / whole)
                worker.submit(
                    RecordKind.PUSHPULL,
                    [specs[at].key],
                    partial(_arrived, at, there, waits),
                    -at if apart else 0,
                )
            for at in range(n):
                if at not in there:
                    yield partial(_await, at, waits)
                yield computed(worker, forward * sizes[at] / whole)
            job.mark(f"end {number}")

    return program


def _await(at: int, waits: list[tuple[int, Callable[[], None]]], go_on: Callable[[], None]) -> None:
    waits.append((at, go_on))


def _arrived(
    at: int, there: set[int], waits: list[tuple[int, Callable[[], None]]], done: e.OperationDone
) -> None:
    there.add(at)
    for one in [one for one in waits if one[0] == at]:
        waits.remove(one)
        one[1]()


def _elements(spec: KeySpec) -> int:
    n = 1
    for size in spec.shape:
        n *= size
    return n
