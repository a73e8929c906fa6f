"""The program runs real jobs, and detects their faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from histories import Event, Fault, Push, Read

from bench.faults import command, judge
from bench.faults.cells import Cell, Plan, drawn, promise

pytestmark = pytest.mark.bench


@pytest.mark.parametrize(("store", "fault"), [("shared", "kill in pushpull"), ("local", "exception")])
def test_a_short_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str], store: str, fault: str) -> None:
    name = str(tmp_path / "faults")
    for _ in range(2):
        assert command.main(["--stores", store, "--faults", fault, "--runs", "1", "--write", name]) == 0
    (row,) = json.loads(Path(f"{name}.json").read_text())["cells"]
    assert (row["store"], row["fault"], row["runs"], row["next_seed"]) == (store, fault, 2, 2)
    assert (row["wrong"], row["hangs"], row["leftovers"]) == ([], [], []), row["found"]
    assert row["seconds"]
    assert Path(f"{name}.md").read_text() in capsys.readouterr().out


def plan_of(fault: str, loss: str) -> Plan:
    cell = Cell("dist_sync", fault)
    plans = (drawn(cell, seed, "", promise(cell, 1.0)) for seed in range(100))
    return next(one for one in plans if one.workers == 2 and one.on_peer_loss == loss)


def pushpull(slot: int, number: int, called: float, error: str = "") -> Event:
    pieces = ((0, tuple(Push(one, number) for one in (0, 1))),)
    read = {} if error else {"a": Read(pieces)}
    return Event(slot, "pushpull", ("a",), called, called + 0.5, error, "", {"a": number}, read)


def test_a_process_that_raises_is_noted_when_it_raises() -> None:
    plan = plan_of("kill in push", "raise")._replace(victim=1)
    events = [pushpull(0, 1, 1.0), pushpull(1, 1, 1.0), pushpull(0, 2, 2.0, "PeerLostError")]
    assert judge.told(plan, events, [Fault("killed", slot=1, start=1.75)]) == [0.75]
    assert judge.told(plan, events[:2], [Fault("killed", slot=1, start=1.75)]) == [float("inf")]


def test_a_worker_that_continues_notices_a_round_without_the_lost_one() -> None:
    plan = plan_of("kill in push", "continue")._replace(victim=1)
    events = [pushpull(slot, number, float(number)) for slot in (0, 1) for number in (1, 2)]
    fault = [Fault("killed", slot=1, start=2.25)]
    assert judge.told(plan, events, fault) == [float("inf")]  # the round of the lost one's last push
    assert judge.told(plan, [*events, pushpull(0, 3, 3.0)], fault) == [1.25]


@pytest.mark.parametrize(("closes", "found"), [("", [0.5]), ("PeerLostError", [0.5, float("inf")])])
def test_a_process_that_was_done_by_then_gets_no_error(closes: str, found: list[float]) -> None:
    plan = plan_of("stop below", "raise")._replace(store="dist_async")
    events = [pushpull(0, 1, 1.0), pushpull(0, 2, 3.0), pushpull(1, 1, 1.0)]
    close = Event(1, "close", (), 3.5, 3.75, closes)
    assert judge.told(
        plan, [*events, close], [Fault("paused", slot=0, start=2.0, end=3.0 - 1e-9)]
    ) == pytest.approx(found)


def test_a_value_that_no_round_has_is_wrong(tmp_path: Path) -> None:
    plan = plan_of("kill in push", "raise")._replace(keeps="all", folder=str(tmp_path))
    promised = promise(Cell("dist_sync", "kill in push"), 1.0)
    good = [pushpull(0, 1, 1.0), pushpull(1, 1, 1.0)]
    assert judge.wrong(plan, good, [], promised) == []
    torn = good[1]._replace(read={"a": Read(((0, (Push(1, 1),)),))})
    assert judge.wrong(plan, [good[0], torn], [], promised)
