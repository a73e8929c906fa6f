"""States of optimizers, and keys that a rule needs whole: as one process has them, whoever is late."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paths
import pytest
import tested_store
from jobs import Job
from nightly import each_once
from servers import ServedJob

BODIES = "procs_states"
KINDS = ("shared", "dist_sync:1", "dist_sync:3", "p3:3")
LATE = (0.0, 0.001, 0.01, 0.1)  # seconds

Compare = Callable[..., None]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def compare(
    kind: str,
    job: Callable[..., Job],
    served: Callable[..., ServedJob],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Compare]:
    """Run a body on two workers of a store and in one process; all must return the same."""
    monkeypatch.setattr(sys, "path", [*paths.IMPORTS.split(":"), *sys.path])
    import procs_states

    def run(function: str, late: float, *arguments: Any, workers: int = 2, **variables: str) -> None:
        monkeypatch.setenv(tested_store.NAME, "local")
        expected = getattr(procs_states, function)(workers, late, *arguments)
        name, _, servers = kind.partition(":")
        made = served(workers, int(servers)) if servers else job(workers)
        settings = {tested_store.NAME: name, **variables}
        made.start_all(BODIES, function, workers, late, *arguments, **settings)
        assert made.results() == [expected] * workers

    yield run


@pytest.mark.parametrize(
    ("late", "size", "who", "rule"), each_once(LATE, (3, 100_000), ("one", "all"), ("adam", "lamb"))
)
def test_a_key_without_state_in_a_loaded_file_begins_anew(
    compare: Compare, tmp_path: Path, late: float, size: int, who: str, rule: str
) -> None:
    compare("load_without_states", late, str(tmp_path / "states"), size, rule, who)


@pytest.mark.parametrize(
    ("late", "rule", "verb", "rows"),
    each_once(LATE, ("lamb", "lars", "groupadagrad"), ("pull", "broadcast"), (False, True)),
)
def test_readers_are_served_while_keys_move_to_one_server(
    compare: Compare, late: float, rule: str, verb: str, rows: bool
) -> None:
    compare("whole_keys", late, rule, verb, rows, KVSTORE_SLICE_BYTES="4096")
