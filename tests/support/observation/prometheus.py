"""A real Prometheus that scrapes a job; KVSTORE_TEST_PROMETHEUS names the folder of its programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pace
import pytest
from launched import Job, until

#: The log lines of each process of a job.
ADDRESS = re.compile(r"metrics of this process are at (http://\S+)\n")

_FOLDER = os.environ.get("KVSTORE_TEST_PROMETHEUS", "")
_PATH = os.pathsep.join(filter(None, [_FOLDER, os.environ.get("PATH", "")]))
PROGRAMS = {name: shutil.which(name, path=_PATH) for name in ("prometheus", "promtool")}
with_prometheus = pytest.mark.skipif(
    not all(PROGRAMS.values()), reason="no Prometheus (KVSTORE_TEST_PROMETHEUS)"
)

Query = Callable[[str], list[dict[str, Any]]]


def program(name: str) -> str:
    """Return the path of a program of Prometheus."""
    path = PROGRAMS[name]
    assert path is not None
    return path


def addresses(log: Path) -> list[str]:
    """Return where processes of a job have their metrics."""
    return ADDRESS.findall(log.read_text())


@contextlib.contextmanager
def scraping(job: Job, targets: Sequence[str], interval: str) -> Iterator[Query]:
    """Scrape these addresses repeatedly; the returned function answers expressions."""
    hosts = [one.split("/")[2] for one in targets]
    config = {
        "global": {"scrape_interval": interval},
        "scrape_configs": [{"job_name": "kvstore", "static_configs": [{"targets": hosts}]}],
    }
    (job.folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    log = job.folder / "prometheus.log"
    command = [
        program("prometheus"),
        "--config.file=prometheus.yml",
        f"--storage.tsdb.path={job.folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
    ]
    with log.open("wb") as file:
        server = subprocess.Popen(command, cwd=job.folder, stderr=file, env=job.environment)
    try:
        ready = re.compile(r'msg="Listening on" address=(\S+)')
        until(lambda: ready.search(log.read_text()) and "Server is ready" in log.read_text())
        found = ready.search(log.read_text())
        assert found
        address = found[1]

        def ask(expression: str) -> list[dict[str, Any]]:
            url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
            with urllib.request.urlopen(url, timeout=pace.seconds(30)) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
            return result

        yield ask
    finally:
        server.terminate()
        assert server.wait(pace.seconds(60)) == 0
