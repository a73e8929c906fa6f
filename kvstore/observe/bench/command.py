"""What the command does: check the options, start the peers, check their sums, measure, print and write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from kvstore.atomic_files import atomic_replacement
from kvstore.errors import ConfigError, KVStoreError
from kvstore.launch.process import new_job
from kvstore.launch.signals import ENDING
from kvstore.observe.doctor.children import alone

from . import key_lists, report, rounds, settings
from .key_lists import BenchKey
from .launch import AUTO, Command, commands
from .report import MEMCPY, OURS
from .rounds import Way
from .settings import BenchSettings
from .worker_group import Message, PeerFailure, WorkerGroup

_MEET = 120.0  # seconds for all processes to start
_LEAST = 90.0  # seconds that workers have for an answer,
_RATE = 20e6  # and one more for so many bytes of gradients: they are made, pushed and checked
_PART = 0.75  # of that time a store waits for its other workers: it knows which of them is missing
_LEAVE = 5.0  # seconds in which workers end by themselves once the command has disconnected
_TURN, _MOST = 0.1, 400  # seconds and calls of a turn
_CLOSE = 1.5  # a way that takes so many times as long as the quickest of its peer is not measured further


class WrongSum(KVStoreError):
    """A peer's sum is not that of NumPy."""


class Interrupted(BaseException):
    """A signal asks the command to end."""


def run(
    options: Mapping[str, Any],
    keys: str,
    dtype: str | None,
    peers: str,
    target: str | None,
    picture: str | None,
) -> int:
    """Measure, show and write what the options of the command say; return its exit code.

    Raises
    ------
    KVStoreError
        An option is wrong, memory or matplotlib is missing, workers failed, or a sum is wrong.
    """
    wanted, listed = settings.chosen(**options), key_lists.load(keys, dtype)
    for path in filter(None, (target, picture)):
        folder = os.path.dirname(path) or "."
        if path != "-" and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            why = f"there is no folder {folder!r} that this user can write to"
            raise ConfigError(f"{path} cannot be written: {why}")
    if picture:
        report.new_figure()
    try:
        found = measured(wanted, listed, Path(keys).name, peers)
    except Interrupted as interrupted:
        (number,) = interrupted.args
        click.echo(f"kvstore bench: ended, because of {signal.Signals(number).name}", err=True)
        return 128 + int(number)
    except PeerFailure as failure:
        if "\nTraceback" in f"\n{failure.printed}":
            click.echo(failure.printed, nl=False, err=True)
        raise
    text = json.dumps(found, indent=2, ensure_ascii=False)
    click.echo(text if target == "-" else "\n".join(report.lines(found)))
    if target and target != "-":
        with atomic_replacement(target) as temporary:
            temporary.write_text(text + "\n")
    if picture:
        report.draw(found, picture)
    return 0


def measured(wanted: BenchSettings, keys: Sequence[BenchKey], name: str, peers: str) -> dict[str, Any]:
    """Measure a store and its peers in turn; return what --json writes."""
    launched, left_out = commands(peers, wanted)
    settings.check_memory(wanted, keys, list(launched)[1:])
    nbytes = sum(key.nbytes for key in keys)
    patience = _LEAST + nbytes * wanted.workers / _RATE
    order = {**wanted._asdict(), "keys": keys}
    versions: dict[str, str] = {}
    with _signals(), contextlib.ExitStack() as stack:
        own, *others = (_started(stack, one, launched[one], wanted.workers, patience) for one in launched)
        ways = ready(own, order, patience, versions)
        for group in others:
            with _left_out(group, left_out) if peers == AUTO else contextlib.nullcontext():
                ways += ready(group, order, patience, versions)
        best = race(ways, wanted.rounds)
        for group in (own, *others):
            group.end(_LEAVE)
        click.echo(own.printed(), nl=False, err=True)
    return report.as_object(wanted, name, keys, best, versions, left_out)


def _started(
    stack: contextlib.ExitStack, name: str, command: Command, workers: int, patience: float
) -> WorkerGroup:
    words, variables = command
    address = f"kvstore/bench/{new_job()}"
    output = os.memfd_create("output")
    stack.callback(os.close, output)
    group = WorkerGroup(name, workers, "\0" + address, output)
    stack.callback(group.end, _LEAVE)
    waits = {"KVSTORE_TIMEOUT": f"{_PART * patience:g}", "PYTHONUNBUFFERED": "1"}
    group.start([*words, name, address], {**alone(), **waits, **variables})
    return group


def ready(group: WorkerGroup, order: Message, patience: float, versions: dict[str, str]) -> list[Way]:
    """Have the workers of a group check their sums; return their ways, and note the versions."""
    group.meet(_MEET)
    answers = group.ask(order, patience)
    group.note_files()
    for rank, answer in enumerate(answers):
        if answer["wrong"]:
            why = f"{answer['wrong']} is not what NumPy has; nothing is timed"
            raise WrongSum(f"{group.name}, rank {rank}: {why}")
    versions |= answers[0]["versions"]

    def calls(way: str, count: int) -> list[float]:
        times = [answer["seconds"] for answer in group.ask({"way": way, "calls": count}, patience)]
        return [max(each) for each in zip(*times, strict=True)]  # a call takes as long as its slowest worker

    own = (OURS, MEMCPY)  # rows of their own; other names are ways of one
    return [
        Way(way if way in own else group.name, "" if way in own else way, partial(calls, way))
        for way in answers[0]["ways"]
    ]


@contextlib.contextmanager
def _left_out(group: WorkerGroup, left_out: dict[str, str]) -> Iterator[None]:
    """Leave a peer out that fails inside, before it is measured."""
    try:
        yield
    except PeerFailure as failure:
        left_out[group.name] = str(failure)
        group.end(_LEAVE)


def race(ways: Sequence[Way], count: int) -> list[Way]:
    """Have all ways take turns, and show how many are over; return the best way of each peer."""
    with _progress(len(ways) * (count + 1)) as advance:
        for way in ways:
            way.try_out(_TURN, 1, _MOST)
            advance(1)
        kept = rounds.shortlist(ways, _CLOSE)
        advance(count * (len(ways) - len(kept)))
        for number in range(count):
            for way in rounds.in_turn(kept, number):
                way.turn()
                advance(1)
    return rounds.best(kept)


@contextlib.contextmanager
def _progress(turns: int) -> Iterator[Callable[[int], object]]:
    """Show a bar, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=turns, label="measuring", file=sys.stderr) as bar:
        yield bar.update


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Inside, a signal raises Interrupted, unless it is ignored as under nohup."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise Interrupted(number)

    before = {one: old for one in ENDING if (old := signal.getsignal(one)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
