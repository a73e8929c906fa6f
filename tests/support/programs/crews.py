"""Workers that are started once and play many programs: in each store that means the same."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pickle
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jobs
import pace
import servers

import kvstore as kv

from .playing import HARMLESS, Names, Reference
from .seen import Seen, difference

#: Of each worker, by their number.
HOSTS = {2: [0, 0], 3: [1, 0, 0], 4: [0, 1, 0, 1]}


class Place(NamedTuple):
    """A type of store: its name, the servers of its job, and whether sums are made by hosts."""

    name: str
    servers: int = 0
    by_hosts: bool = False


#: Stores that mean the same; `local` and `device` run operations in the background, for all workers.
PLACES = {
    "local": Place("local"),
    "device": Place("device"),
    "shared": Place("shared", 1),
    "dist_sync:1": Place("dist_sync", 1),
    "dist_device_sync:1": Place("dist_device_sync", 1),
    "dist_sync:3": Place("dist_sync", 3),
    "p3": Place("p3", 3),
    "hosts": Place("dist_sync", 3, True),
}


class Script(NamedTuple):
    """A program as its lines, for so many workers; the lines include the output that was not seen."""

    workers: int
    dtype: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(self.lines)


class Found(NamedTuple):
    """A difference: in which store, on which worker, at which line, and what."""

    store: str
    rank: int
    line: int
    text: str


class _Crew:
    """The workers of one job, with servers; a job of which a program has made an end is started again."""

    def __init__(self, nursery: jobs.Nursery, workers: int, count: int, starting: threading.Lock) -> None:
        self._nursery, self._size, self._servers, self._starting = nursery, workers, count, starting
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._job: servers.ServedJob | None = None
        self._folder = tempfile.TemporaryDirectory()

    def play(self, place: Place, script: Script) -> list[list[Seen]] | str:
        """Return the results of each worker, or how one of them has ended."""
        with self._lock:
            job = self._running()
            name = Path(self._folder.name, f"program-{next(self._numbers)}")
            files = name.with_suffix(".files")
            files.mkdir()
            options = {"group": name.name, "timeout": pace.seconds(10)}
            options |= {"hierarchy": "host"} if place.by_hosts else {}
            request = {
                "store": place.name, "options": options, "folder": str(files),
                "dtype": script.dtype, "lines": script.lines,
            }  # fmt: skip
            name.write_text(json.dumps(request))
            try:
                seen = self._answers(job, name)
            except AssertionError as error:
                self.close()
                return str(error)
            if any(_has_ended(one) for one in seen):
                self.close()
            return seen

    def _answers(self, job: servers.ServedJob, name: Path) -> list[list[Seen]]:
        for worker in job.workers:
            worker.lines.clear()
            worker.say(str(name))
        for worker in job.workers:
            worker.expect("played", 45)
        return [pickle.loads(Path(f"{name}.{r}").read_bytes()) for r in range(self._size)]  # noqa: S301 - ours

    def _running(self) -> servers.ServedJob:
        if self._job is None:
            hosts = HOSTS[self._size] if self._servers > 1 else [0] * self._size
            with self._starting:
                folder = Path(tempfile.mkdtemp(dir=self._folder.name))
                self._job = servers.ServedJob(
                    self._nursery, folder, self._size, self._servers, KVSTORE_SLICE_BYTES="16384"
                )
                servers.start_on_hosts(self._job, hosts, "programs.worker", "play", KVSTORE_HIERARCHY="flat")
            for worker in self._job.workers:
                worker.expect("ready")
        return self._job

    def close(self) -> None:
        """End the job."""
        if self._job is not None:
            with contextlib.suppress(AssertionError):  # the next test checks the remains of a broken job
                self._job.close()
            self._job = None


def _has_ended(seen: Sequence[Seen]) -> bool:
    harmless = {error.__name__ for error in HARMLESS}
    return any(one.what == "error" and one.things[0].kind not in harmless for one in seen)


class Crews:
    """All jobs; several threads may have programs played."""

    def __init__(self, nursery: jobs.Nursery) -> None:
        starting = threading.Lock()
        self._crews = {
            (size, count): _Crew(nursery, size, count, starting) for size in HOSTS for count in (1, 3)
        }

    def differs(self, script: Script, store: str) -> Found | None:
        """Play a program in a store and in one process; return the first difference."""
        place = PLACES[store]
        if store == "local" and _model(script) != "local":
            return None  # it sends nothing that could be compressed
        if place.servers:
            seen = self._crews[script.workers, place.servers].play(place, script)
        else:
            seen = [_in_one_process.__wrapped__(script, place.name, background=True)]
        if isinstance(seen, str):
            return Found(store, -1, -1, f"a worker has ended: {seen[-1500:]}")
        hosts = tuple(HOSTS[script.workers]) if place.by_hosts else ()
        reference = _in_one_process(
            script, _model(script), hosts, place.name not in ("local", "device", "shared")
        )
        found = [
            Found(store, rank, *difference(script.lines, one, reference)) for rank, one in enumerate(seen)
        ]
        return min((one for one in found if one.text), key=lambda one: one.line, default=None)

    def close(self) -> None:
        """End all jobs."""
        for crew in self._crews.values():
            crew.close()


def _model(script: Script) -> str:
    return "device" if "set_gradient_compression" in str(script) else "local"


@functools.lru_cache(64)
def _in_one_process(
    script: Script, name: str, hosts: tuple[int, ...] = (), servers: bool = False, background: bool = False
) -> list[Seen]:
    with tempfile.TemporaryDirectory() as folder, kv.create(name, processes=1) as store:
        played = Reference(store, script.workers, Path(folder), script.dtype, hosts, servers, background)
        return _up_to_the_end(played, script.lines)


def _up_to_the_end(played: Names, lines: Sequence[str]) -> list[Seen]:
    try:
        return played.play(lines)
    except Exception:  # it is the last thing seen
        return played.seen_so_far


@contextlib.contextmanager
def crews() -> Iterator[Crews]:
    """Start jobs as they are needed, and end them all."""
    with jobs.nursery() as nursery, contextlib.closing(Crews(nursery)) as made:
        yield made
