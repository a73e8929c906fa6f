"""What the command does: check the options, start the peers, check their sums, measure, print and write."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from kvstore.atomic_files import atomic_replacement
from kvstore.errors import ConfigError, KVStoreError
from kvstore.launch.process import new_job
from kvstore.launch.signals import ENDING
from kvstore.observe.doctor import launchers
from kvstore.observe.doctor.children import alone

from . import key_lists, report, rounds, settings
from .key_lists import BenchKey
from .report import MEMCPY, OURS
from .rounds import PeerWay
from .settings import BenchSettings
from .worker_group import Message, PeerFailure, WorkerGroup

Command = tuple[list[str], dict[str, str]]  # with the variables that it needs

AUTO, NONE = "auto", "none"
_WORKER = ("-m", "kvstore.observe.bench.worker")
_LIBRARIES = {"gloo": "torch", "mpi": "mpi4py"}
#: A thread for each core, the network of this machine, and no core of its own for a process of Open MPI.
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # Open MPI 5
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # Open MPI 4
}
_MEET = 120.0  # seconds for all processes to start
_LEAST = 90.0  # seconds for an answer,
_RATE = 20e6  # and bytes of gradients for each of which workers have one second more
_PART = 0.75  # of that time a store waits for its other workers: it knows which of them is missing
_LEAVE = 5.0  # seconds in which workers end by themselves once the command has disconnected
_TURN, _MOST = 0.1, 400  # seconds and calls of a turn
_CLOSE = 1.5  # a way that is so many times slower than the quickest of its peer is not measured further


class WrongSum(KVStoreError):
    """A peer's sum is not that of NumPy."""


class CommandInterrupted(BaseException):
    """A signal asks the command to end; the argument is its number."""


def run_bench(
    options: Mapping[str, Any], keys: str, dtype: str | None, peers: str, target: str | None, plot: str | None
) -> int:
    """Measure, show and write what the options of the command say; return its exit code.

    Raises
    ------
    KVStoreError
        An option is wrong, memory or matplotlib is missing, workers failed, or a sum is wrong.
    """
    wanted, listed = settings.chosen_settings(**options), key_lists.load_keys(keys, dtype)
    for path in filter(None, (target, plot)):
        folder = os.path.dirname(path) or "."
        if path != "-" and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            why = f"there is no folder {folder!r} that this user can write to"
            raise ConfigError(f"{path} cannot be written: {why}")
    if plot:
        report.new_figure()
    try:
        found = measure_peers(wanted, listed, Path(keys).name, peers)
    except CommandInterrupted as interrupted:
        (number,) = interrupted.args
        click.echo(f"kvstore bench: ended, because of {signal.Signals(number).name}", err=True)
        return 128 + int(number)
    except PeerFailure as failure:
        if "\nTraceback" in f"\n{failure.printed}":
            click.echo(failure.printed, nl=False, err=True)
        raise
    text = json.dumps(found, indent=2, ensure_ascii=False)
    click.echo(text if target == "-" else "\n".join(report.report_lines(found)))
    if target and target != "-":
        with atomic_replacement(target) as temporary:
            temporary.write_text(text + "\n")
    if plot:
        report.draw_report(found, plot)
    return 0


def peer_commands(peers: str, settings: BenchSettings) -> tuple[dict[str, Command], dict[str, str]]:
    """Return the command for the workers of the store and of each peer, and why peers of ``auto`` have none.

    Raises
    ------
    ConfigError
        A name in `peers` is unknown, or has no command.
    """
    run = [sys.executable, "-m", "kvstore", "run", "-n", str(settings.workers), "--no-prefix"]
    servers = ["-s", str(settings.servers)] if settings.servers else []
    found: dict[str, Command] = {OURS: ([*run, *servers, *_WORKER], {})}
    left_out = {}
    for name in dict.fromkeys({NONE: [], AUTO: list(_LIBRARIES)}.get(peers, peers.split(","))):
        if name not in _LIBRARIES:
            raise ConfigError(f"--peers: {name!r} is none of {AUTO}, {NONE}, {', '.join(_LIBRARIES)}")
        if not (why := _why_not(name, settings.workers)):
            mpi = [*launchers.mpi_launcher(), "-n", str(settings.workers), sys.executable]
            found[name] = ([*(mpi if name == "mpi" else run), *_WORKER], _VARIABLES)
        elif peers == AUTO:
            left_out[name] = why
        else:
            raise ConfigError(f"--peers {name}: {why}")
    return found, left_out


def _why_not(name: str, workers: int) -> str:
    """Say why a peer cannot be measured; empty if it can."""
    if workers == 1:
        return "one worker has nothing to sum with others"
    if importlib.util.find_spec(_LIBRARIES[name]) is None:
        return f"{_LIBRARIES[name]} is not installed"
    mpi = launchers.mpi() if name == "mpi" else None
    return mpi.text if mpi and (mpi.level != "ok" or not launchers.mpi_launcher()) else ""


def measure_peers(wanted: BenchSettings, keys: Sequence[BenchKey], name: str, peers: str) -> dict[str, Any]:
    """Measure a store and its peers in turn; return what --json writes."""
    launched, left_out = peer_commands(peers, wanted)
    settings.check_memory(wanted, keys, list(launched)[1:])
    patience = _LEAST + sum(key.nbytes for key in keys) * wanted.workers / _RATE
    order = {**wanted._asdict(), "keys": keys}
    versions: dict[str, str] = {}
    ways: list[PeerWay] = []
    _raise_on_signals()
    with contextlib.ExitStack() as stack:
        groups = [_start_group(stack, peer, *launched[peer], wanted.workers, patience) for peer in launched]
        for group in groups:
            try:
                ways += checked_ways(group, order, patience, versions)
            except PeerFailure as failure:  # noqa: PERF203 - few peers; one of `auto` is left out
                if peers != AUTO or group.name == OURS:
                    raise
                left_out[group.name] = str(failure)
                group.end(_LEAVE)
        best = measure_in_turn(ways, wanted.rounds)
        for group in groups:
            group.end(_LEAVE)
        click.echo(groups[0].printed(), nl=False, err=True)
    return report.report_object(wanted, name, keys, best, versions, left_out)


def _start_group(
    stack: contextlib.ExitStack,
    name: str,
    words: Sequence[str],
    variables: Mapping[str, str],
    workers: int,
    patience: float,
) -> WorkerGroup:
    address = f"kvstore/bench/{new_job()}"
    output = os.memfd_create("output")
    stack.callback(os.close, output)
    group = WorkerGroup(name, workers, "\0" + address, output)
    stack.callback(group.end, _LEAVE)
    waits = {"KVSTORE_TIMEOUT": f"{_PART * patience:g}", "PYTHONUNBUFFERED": "1"}
    group.start([*words, name, address], {**alone(), **waits, **variables})
    return group


def checked_ways(
    group: WorkerGroup, order: Message, patience: float, versions: dict[str, str]
) -> list[PeerWay]:
    """Have the workers of a group check their sums; return their ways, and note the versions."""
    group.meet(_MEET)
    answers = group.ask(order, patience)
    group.note_files()
    for rank, answer in enumerate(answers):
        if answer["wrong"]:
            why = f"{answer['wrong']} is not what NumPy has; nothing is timed"
            raise WrongSum(f"{group.name}, rank {rank}: {why}")
    versions |= answers[0]["versions"]

    def slowest_times(way: str, count: int) -> list[float]:
        times = [answer["seconds"] for answer in group.ask({"way": way, "calls": count}, patience)]
        return [max(each) for each in zip(*times, strict=True)]  # a call takes as long as its slowest worker

    own = (OURS, MEMCPY)  # rows of their own; other names are ways of one
    return [
        PeerWay(way if way in own else group.name, "" if way in own else way, partial(slowest_times, way))
        for way in answers[0]["ways"]
    ]


def measure_in_turn(ways: Sequence[PeerWay], count: int) -> list[PeerWay]:
    """Measure all ways in turn, and show the progress on a terminal; return the best way of each peer."""
    screen, turns = sys.stderr if sys.stderr.isatty() else io.StringIO(), len(ways) * (count + 1)
    with click.progressbar(length=turns, label="measuring", file=screen) as bar:
        for way in ways:
            way.try_out(_TURN, 1, _MOST)
            bar.update(1)
        kept = rounds.close_ways(ways, _CLOSE)
        bar.update(count * (len(ways) - len(kept)))
        for way in (way for number in range(count) for way in rounds.in_turn(kept, number)):
            way.measure_turn()
            bar.update(1)
    return rounds.best_ways(kept)


def _raise_on_signals() -> None:
    """Have signals of this process raise CommandInterrupted, unless they are ignored as under nohup."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise CommandInterrupted(number)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
