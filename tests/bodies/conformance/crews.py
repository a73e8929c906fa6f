"""Workers that play many programs one after the other: a job for a way to train, not for each program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jobs
import pace
import servers

#: Seconds after which a store gives up in a program that is refused only by that.
PATIENCE = 8.0


class Crew:
    """The workers of one way. They are started at the first program, and again after one has hung or died."""

    def __init__(
        self, nursery: jobs.Nursery, folder: Path, module: str, way: Mapping[str, Any], size: int
    ) -> None:
        self._nursery, self._folder, self._module = nursery, folder, module
        self._way, self._size = dict(way), size
        self._job: jobs.Job | None = None

    def play(self, program: str) -> list[Any]:
        """Return the results of each worker, or the refusal that it got."""
        workers = self._workers()
        try:
            for worker in workers:
                worker.say(program)
            found = [json.loads(one.expect_some(f"{program} ").partition(" ")[2]) for one in workers]
        except BaseException:
            self.close()
            raise
        for worker in workers:
            worker.lines.clear()  # a program may be played again
        return found

    def _workers(self) -> list[jobs.Worker]:
        if self._job is None:
            self._job = self._made()
            self._start(self._job)
        return self._job.workers

    def _made(self) -> jobs.Job:
        size = 1 if self._way["kind"] == "alone" else self._size
        if str(self._way.get("store")).startswith("dist_"):
            return servers.ServedJob(self._nursery, self._folder, size, servers=1)
        return jobs.Job(self._nursery, self._folder, size)

    def _start(self, job: jobs.Job) -> None:
        arguments = (self._module, "play_all", self._way, self._size, str(self._folder))
        variables = {"KVSTORE_TIMEOUT": pace.variable(PATIENCE)}
        if self._way.get("hosts"):
            assert isinstance(job, servers.ServedJob)
            servers.start_on_hosts(job, [0] * self._size, *arguments, **variables)
        else:
            job.start_all(*arguments, **variables)

    def close(self) -> None:
        """End all workers."""
        made, self._job = self._job, None
        if made is not None:
            made.close()
