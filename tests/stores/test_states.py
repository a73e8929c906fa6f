"""States of optimizers, and keys that a rule needs whole: as in one process, also with late workers."""

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
from servers import ServedJob, start_on_hosts

BODIES = "together.procs_states"
KINDS = ("shared", "dist_sync:1", "dist_sync:3", "p3:3", "hosts:3")
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
    from together import procs_states

    def run(function: str, late: float, *arguments: Any, workers: int = 2, **variables: str) -> None:
        monkeypatch.setenv(tested_store.NAME, "local")
        expected = getattr(procs_states, function)(workers, late, *arguments)
        name, _, servers = kind.partition(":")
        made = served(workers, int(servers)) if servers else job(workers)
        settings = {tested_store.NAME: name, **variables}
        if isinstance(made, ServedJob) and name == "hosts":  # two workers of one host
            settings[tested_store.NAME] = "dist_sync"
            start_on_hosts(made, [0] * workers, BODIES, function, workers, late, *arguments, **settings)
        else:
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


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("late", "rule", "shape", "dtype"),
    each_once(
        LATE,
        ("sgd", "adam", "adagrad", "ftml", "groupadagrad", "lamb"),
        ([1500, 3], [700, 2, 5], [3, 2000], [5000]),
        ("float32", "float16"),
    ),
)
def test_rows_of_dense_keys_are_rows_wherever_slices_begin(
    compare: Compare, late: float, rule: str, shape: list[int], dtype: str, mixed: bool
) -> None:
    if rule == "groupadagrad" and len(shape) != 2:
        pytest.skip("the rule needs two dimensions")
    compare("rows_of_dense", late, rule, shape, dtype, mixed, KVSTORE_SLICE_BYTES="4096")


@pytest.mark.parametrize(
    ("late", "rule", "loads", "held", "width"),
    each_once(  # the wide ones are spread over servers
        LATE, ("ftml", "sgd", "ftml", "groupadagrad", "lamb"), (False, True), (False, True, False), (8000, 3)
    ),
)
def test_tables_have_the_same_rows_and_absent_rows(
    compare: Compare, tmp_path: Path, late: float, rule: str, loads: bool, held: bool, width: int
) -> None:
    compare("tables", late, rule, str(tmp_path / "states") if loads else "", held, width)
