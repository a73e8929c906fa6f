"""What happens when a process of a job over an engine dies, never calls, or leaves by an error.

    LAUNCHER python tests/engines/faults.py ENGINE FOLDER BODY [DEADLINE]

Each process runs one of the functions below, and writes its results to FOLDER/RANK.json; its process id to
FOLDER/RANK.pid before that. The last rank is the victim.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import conformance
import numpy as np

import kvstore as kv
from kvstore import waiting


class Witness:
    """A process of the job with a store, which has worked once."""

    def __init__(self, engine: str, folder: Path, deadline: float) -> None:
        self.engine, self.folder, self.deadline = engine, folder, deadline
        self.store = kv.create(engine, timeout=deadline)
        self.victim = self.store.rank == self.store.num_workers - 1
        (folder / f"{self.store.rank}.pid").write_text(str(os.getpid()))
        self.weight = np.full(1000, self.store.rank, np.float32)
        self.store.init(["a", "b"], [self.weight, self.weight])
        self.store.pushpull("a", self.weight)
        self.sum = self.weight[0]

    def tell(self, **seen: Any) -> None:
        part = self.folder / f"{self.store.rank}.part"
        part.write_text(json.dumps(seen))
        part.rename(part.with_suffix(".json"))

    def meet(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Make a call that cannot end well; return the error and the seconds until it was raised."""
        start = time.monotonic()
        try:
            call()
        except kv.KVStoreError as error:
            return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start}
        return {"error": None}

    def still_reads(self) -> bool:
        out = np.empty_like(self.weight)
        self.store.pull("a", out=out)
        return bool((out == self.sum).all() and (self.store.view("a") == self.sum).all())


def killed(here: Witness) -> None:
    """The victim dies in the middle of a sum, and the others wait for its end."""
    if here.victim:
        os.kill(os.getpid(), signal.SIGKILL)
    first = here.meet(lambda: here.store.pushpull(["a", "b"], [here.weight, here.weight]))
    later = here.meet(lambda: here.store.push("a", here.weight))
    reads = here.still_reads()
    here.store.close()
    here.tell(first=first, later=later, reads=reads)


def absent(here: Witness) -> None:
    """The victim is alive, and never calls."""
    waiting.NOTICE_AFTER = here.deadline / 2
    if here.victim:
        time.sleep(6)
        here.tell()
        return
    first = here.meet(lambda: here.store.pushpull("a", here.weight))
    later = here.meet(here.store.barrier)
    reads = here.still_reads()
    here.store.close()
    here.tell(first=first, later=later, reads=reads)


def some_absent(here: Witness) -> None:
    """Of four one is late, and two never call."""
    waiting.NOTICE_AFTER = here.deadline / 2
    if here.store.rank in (1, 3):
        time.sleep(3 * here.deadline)
        return
    if here.store.rank == 2:
        time.sleep(here.deadline * 0.7)
    here.tell(first=here.meet(lambda: here.store.pushpull("a", here.weight)))


def all_but_one_wait(here: Witness) -> None:
    """The victim is late repeatedly, and never waits; the messages of the others disturb nothing."""
    mpi = importlib.import_module("kvstore.stores.collectives.mpi.backend")
    waiting.NOTICE_AFTER, mpi._MANY = 0.1, 2
    mine, words = np.empty(1000, np.float32), 0
    for t in range(12):
        if here.victim:
            time.sleep(0.3 if t < 6 else 0)
            words += here.store._backend.engine._order.Iprobe()
        mine[:] = t
        here.store.pushpull("b", mine)
        assert (mine == t * here.store.num_workers).all()
    counts = here.store._backend.engine._call_counts
    here.store.close()
    again = kv.create(here.engine, timeout=here.deadline)
    again.init("a", mine)
    again.close()
    here.tell(words=int(words), told=counts._sent_count, heard=counts._counts.tolist())


def absent_from_init(here: Witness) -> None:
    if here.victim:
        time.sleep(6)
        return
    here.tell(first=here.meet(lambda: here.store.init("late", here.weight)))


def absent_from_create(here: Witness) -> None:
    if here.victim:
        time.sleep(6)
        return
    here.tell(first=here.meet(lambda: kv.create(here.engine, timeout=here.deadline)))


def absent_from_barrier(here: Witness) -> None:
    if here.victim:
        time.sleep(6)
        return
    here.tell(first=here.meet(here.store.barrier))


def other_key(here: Witness) -> None:
    """The victim pushes another key than the others."""
    key = "b" if here.victim else "a"
    here.tell(first=here.meet(lambda: here.store.push(key, here.weight)))


def leaves_by_an_error(here: Witness) -> None:
    """An exception takes the victim out of the with block."""
    with here.store:
        if here.victim:
            raise RuntimeError("an error of the training loop")
        here.tell(first=here.meet(lambda: here.store.push("a", here.weight)))


def interrupted(here: Witness) -> None:
    """Ctrl-C during a wait for the others; the calls in flight complete when they arrive."""
    folder = here.folder
    if here.victim:
        _until((folder / "again").exists)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored around the tests
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        signal.setitimer(signal.ITIMER_REAL, 1.5)  # by then it waits
        seen = None
        try:
            here.store.push("a", here.weight)
        except KeyboardInterrupt:
            seen = "KeyboardInterrupt"
        (folder / "again").touch()
    if here.victim:
        here.store.push("a", here.weight)
        seen = "KeyboardInterrupt"
    mine = np.ones(1000, np.float32)
    here.store.pushpull("b", mine)
    here.store.close()
    here.tell(seen=seen, works=bool((mine == here.store.num_workers).all()))


def forked(here: Witness) -> None:
    """A fork of a worker uses its store, and ends."""
    with here.store as store:
        child = os.fork()
        if child == 0:
            try:
                calls = {
                    "push": lambda: store.push("a", here.weight),
                    "init": lambda: store.init("c", here.weight),
                    "barrier": store.barrier,
                    "create": lambda: kv.create(here.engine, timeout=here.deadline),
                }
                seen = {name: here.meet(call) for name, call in calls.items()}
                try:
                    with store:
                        seen["reads"] = here.still_reads()
                        raise RuntimeError("an error of the fork")
                except RuntimeError:
                    atexit._run_exitfuncs()
                (here.folder / f"fork.{store.rank}").write_text(json.dumps(seen))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        mine = np.ones(1000, np.float32)
        store.pushpull("b", mine)
        store.init("c", mine)
    seen = json.loads((here.folder / f"fork.{store.rank}").read_text())
    here.tell(pid=os.getpid(), works=bool((mine == store.num_workers).all()), seen=seen)


def too_many(here: Witness) -> None:
    """Of MPI's communicators fewer are left than a store takes; it says so whichever it is short of."""
    from mpi4py import MPI

    held, told = [], []
    try:
        while len(held) < 5000:
            held.append(MPI.COMM_WORLD.Dup())
    except MPI.Exception:
        pass
    while True:
        seen = here.meet(lambda: kv.create(here.engine, timeout=here.deadline).close())
        if seen["error"] is None:
            break
        told.append(seen)
        held.pop().Free()
    mine = np.ones(1000, np.float32)
    here.store.pushpull("b", mine)
    here.store.close()
    for one in held:
        one.Free()
    here.tell(told=told, works=bool((mine == here.store.num_workers).all()))


def finalized(here: Witness) -> None:
    """The program has ended MPI before the store, in one of two ways, and creates another store."""
    from mpi4py import MPI

    work = here.store.push("a", here.weight, async_op=True)
    here.store.wait()
    MPI.Finalize()
    work.wait()
    first = here.meet(lambda: here.store.push("a", here.weight))
    init = here.meet(lambda: here.store.init("c", here.weight))
    barrier = here.meet(here.store.barrier)
    create = here.meet(lambda: kv.create(here.engine, timeout=here.deadline))
    out = np.empty_like(here.weight)
    here.store.pull("a", out=out)
    here.store.close()
    here.tell(first=first, init=init, barrier=barrier, create=create)


def _until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)


BODIES = {
    body.__name__: body
    for body in (
        *(killed, absent, some_absent, all_but_one_wait),
        *(absent_from_create, absent_from_init, absent_from_barrier),
        *(other_key, leaves_by_an_error, interrupted, forked, too_many, finalized),
    )
}


def alone(engine: str, folder: Path) -> None:
    """One process without a launcher."""
    with kv.create(engine, timeout=10) as store:
        assert (store.rank, store.num_workers, store.local_rank) == (0, 1, 0)
        weight = np.arange(6, dtype=np.float32)
        store.init("a", weight)
        store.pushpull("a", [weight, weight])
        store.barrier()
        assert (weight == 2 * np.arange(6)).all()
    (folder / "0.json").write_text("{}")


def is_refused(engine: str, folder: Path) -> None:
    """The store is refused; by a launcher that the engine knows nothing of, for instance."""
    try:
        kv.create(engine, timeout=10)
    except kv.ConfigError as error:
        (folder / "0.json").write_text(json.dumps({"text": str(error)}))


def one_thread_only(engine: str, folder: Path) -> None:
    """The program has asked MPI for less than the store needs."""
    import mpi4py

    mpi4py.rc.thread_level = "single"
    is_refused(engine, folder)


def not_initialised(engine: str, folder: Path) -> None:
    """The program wants to start MPI by itself, and has not done it yet."""
    import mpi4py

    mpi4py.rc.initialize = False
    is_refused(engine, folder)
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    with kv.create(engine, timeout=10) as store:
        store.barrier()
    MPI.Finalize()


def alone_with_an_error(engine: str, folder: Path) -> None:
    """An error that the program handles leaves the with block of the only worker."""
    try:
        with kv.create(engine, timeout=10) as store:
            store.init("a", np.zeros(3, np.float32))
            raise StopIteration
    except StopIteration:
        (folder / "0.json").write_text("{}")


def main() -> None:
    engine, folder, body, *rest = sys.argv[1:]
    conformance.prepare(engine)
    if body in BODIES:
        BODIES[body](Witness(engine, Path(folder), float(rest[0])))
    else:
        bodies = (alone, is_refused, one_thread_only, not_initialised, alone_with_an_error)
        without = {function.__name__: function for function in bodies}
        without[body](engine, Path(folder))


if __name__ == "__main__":
    main()
