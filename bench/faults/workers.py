"""The workers of a run: rounds during which the fault happens, and rounds until the workers notice it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from histories import Numbers, RecordedStore
from histories.workers import CELLS, SLICE_BYTES, one_round, reads_after

import kvstore as kv

from .cells import Plan
from .soak_workers import soaks, soaks_in_threads

LOSS = (kv.PeerLostError, kv.FencedError)
REST = 10  # rounds after that of the fault; then each worker waits for the fault
AFTER = 15  # and rounds after these
_PATIENCE = 60.0
_KEYS = 40  # new keys, for the rounds with init
_MORE = {"memory": 96 << 20, "disk": 16 << 20}
_HUGE = {"memory": 1 << 26, "disk": 1 << 23}  # float32


def numbers(plan: Plan) -> dict[str, Numbers]:
    """Return the kind of the keys' values."""
    slots = plan.workers
    made = {key: Numbers(slots, plan.keeps, cells, words=16) for key, cells in CELLS.items()}
    return made | {f"i{at}": Numbers(slots, plan.keeps, 1, words=1) for at in range(_KEYS)}


def works(told: list[Any], slot: int) -> str:
    """Run as one worker; return how it ended."""
    plan = Plan(*told)
    kind = "dist_sync" if plan.store == "hierarchy" else plan.store
    options: dict[str, Any] = {} if plan.store == "mpi" else {"on_peer_loss": plan.on_peer_loss}
    if kind.startswith("dist"):
        options["slice_bytes"] = SLICE_BYTES
    with kv.create(kind, **options) as store:
        if plan.phase == "soak":
            return soaks(plan, store, slot)
        recorded = RecordedStore(store, Path(plan.folder) / f"{slot}.history", numbers(plan), slot)
        return Worker(plan, recorded, slot).train()


class Worker:
    """One worker, or one thread."""

    def __init__(self, plan: Plan, store: RecordedStore, slot: int) -> None:
        self.plan, self.store, self.slot = plan, store, slot
        self.folder = Path(plan.folder)
        self._own = random.Random(f"{plan.seed} {slot if plan.store != 'mpi' else ''}")
        self._struck: float | None = None

    def train(self) -> str:
        """Do all rounds; then read, and close the store."""
        try:
            self.begin()
            for at in self.rounds():
                self.one_round(at)
            end = "done"
        except LOSS as error:
            end = type(error).__name__
            if self.plan.store != "mpi":
                reads_after(self.store)
        with contextlib.suppress(*LOSS):
            self.store.close()
        return end

    def begin(self) -> None:
        self.store.init(list(CELLS))
        if self.plan.keeps == "all":
            self.store.store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))

    def rounds(self) -> Iterator[int]:
        """Count rounds; wait for the fault in some of them."""
        last = self.plan.at + REST + AFTER
        at = 0
        while at < last or (self.plan.until_told and self.plan.store != "mpi" and self._is_early()):
            if at == self.plan.at:
                self.meet_fault()
            if at == self.plan.at + REST:
                self._wait_for_it()
            yield at
            at += 1
            self._pause(at)

    def meet_fault(self) -> None:
        """Announce the round of the fault; the victim of some faults carries it out."""
        (self.folder / f"at.{self.slot}").touch()
        if self.plan.how and self.slot == self.plan.victim:
            hurts_itself(self)

    def _is_early(self) -> bool:
        assert self._struck is not None
        return time.monotonic() - self._struck < self.plan.patience + 1

    def _wait_for_it(self) -> None:
        end = time.monotonic() + _PATIENCE
        while not (self.folder / "struck").exists():
            if time.monotonic() > end:
                raise TimeoutError("the fault did not occur")
            time.sleep(0.002)
        self._struck = time.monotonic()

    def _pause(self, at: int) -> None:
        if at < self.plan.at + REST:
            time.sleep(self._own.random() * 0.004)
        else:
            time.sleep(0.01 if at < self.plan.at + REST + AFTER else self.plan.patience / 100)

    # ------------------------------------------------------------------------------------------- rounds

    def one_round(self, at: int) -> None:
        getattr(self, f"_{self.plan.phase}")(at)

    def _push(self, at: int) -> None:
        self.store.push("a", "b")
        self.store.push("a", "b")
        self.store.push("c")
        if at % 3 == 2:
            self.store.pull("a", "b")
            self.store.pull("c")

    def _between(self, at: int) -> None:
        self.store.push("a", "b", "c")
        time.sleep(self._own.random() * 0.01)
        self.store.pull("a", "b", "c")

    def _init(self, at: int) -> None:
        if at < _KEYS:
            self.store.init([f"i{at}"])
        self.store.pushpull("a", "b")

    def _barrier(self, at: int) -> None:
        self.store.barrier()
        self.store.pushpull("a", "b")

    def _pushpull(self, at: int) -> None:
        self.store.pushpull("a", "b")
        self.store.pushpull("c")

    def _mixed(self, at: int) -> None:
        shared = random.Random(f"{self.plan.seed} {at}")
        one_round(self.store, shared, self._own)


# ---------------------------------------------------------------------------------------------- its own fault


def hurts_itself(worker: Worker) -> None:
    """End in the given way, at this instant."""
    plan, store = worker.plan, worker.store
    time.sleep(plan.after)
    _note(worker)
    if plan.how == "exception":
        raise RuntimeError("an error of the training loop")
    if plan.how == "sys.exit":
        sys.exit(1)
    if plan.how == "os._exit":
        os._exit(0)
    if plan.how == "leave":
        if plan.store != "local":
            store.close()
        raise SystemExit(0)
    starve(store.store, plan.how)


def _note(worker: Worker) -> None:
    """Write the time to a file; the other workers continue."""
    part = worker.folder / "part"
    part.write_text(repr(time.monotonic()))
    part.rename(worker.folder / "struck")


def starve(store: Any, what: str) -> NoReturn:
    """Make a key that does not fit into memory; the error ends the caller."""
    number = resource.RLIMIT_AS if what == "memory" else resource.RLIMIT_FSIZE
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(number)
    if what == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(number, (_MORE[what] + (used if what == "memory" else 0), hard))
    try:
        store.init("huge", np.broadcast_to(np.zeros((), np.float32), _HUGE[what]))
    finally:
        resource.setrlimit(number, (before, hard))
    raise AssertionError("the key fits into memory")


# ------------------------------------------------------------------------------------------------- threads


def threads(told: list[Any]) -> str:
    """Let threads of one process use one `local` store, until one of them ends."""
    plan = Plan(*told)
    with kv.create("local", processes=1) as store:
        if plan.phase == "soak":
            soaks_in_threads(plan, store)
            return "done"
        made = numbers(plan)
        store.init(list(CELLS), [made[key].start() for key in CELLS])
        if plan.keeps == "all":
            store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))
        running = [
            threading.Thread(target=_thread, args=(plan, store, made, slot)) for slot in range(plan.workers)
        ]
        for one in running:
            one.start()
        for one in running:
            one.join()
    return "done"


class _Thread(Worker):
    """A thread of one process; `threads` creates and closes the store for all of them."""

    def one_round(self, at: int) -> None:
        verb = self._own.choice(["push", "pull", "pull", "pushpull"])
        getattr(self.store, verb)(*self._own.choice([("a", "b"), ("c",), ("b",)]))


def _thread(plan: Plan, store: Any, made: dict[str, Numbers], slot: int) -> None:
    recorded = RecordedStore(store, Path(plan.folder) / f"{slot}.history", made, slot)
    worker = _Thread(plan, recorded, slot)
    try:
        for at in worker.rounds():
            worker.one_round(at)
    except (RuntimeError, SystemExit, MemoryError, kv.KVStoreError):
        if slot != plan.victim:
            raise


# ----------------------------------------------------------------------------------------------------- mpi


def main() -> None:
    """Run as a process of mpiexec: ``python -m bench.faults.workers PLAN``."""
    told = json.loads(sys.argv[1])
    rank = int(os.environ["PMI_RANK"])
    folder = Path(told[Plan._fields.index("folder")])
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    end = works(told, rank)
    (folder / f"{rank}.end").write_text(end)


if __name__ == "__main__":
    main()
