"""What the command does with its options, its terminal and its files."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import click

from kvstore.errors import ConfigError
from kvstore.files import replacing

from . import key_lists, plot, report, settings
from .run import bench
from .supervisor import Interrupted
from .worker_group import PeerFailure


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
    ConfigError
        An option is wrong, or there is not enough memory.
    MissingBackendError
        There is no matplotlib for a picture.
    KVStoreError
        Workers failed, or a sum is wrong.
    """
    wanted = settings.chosen(**options)
    wanted_keys = key_lists.load(keys, dtype)
    for path in (target, picture):
        _check_folder(path)
    if picture:
        plot.check()
    try:
        result = bench(wanted, wanted_keys, peers, _progress)
    except Interrupted as signal:
        click.echo(f"kvstore bench: {signal}", err=True)
        return 128 + signal.number
    except PeerFailure as failure:
        _show(failure.printed if any(line.startswith("Traceback") for line in failure.printed) else ())
        raise
    _show(result.printed)
    _write(result, target, picture)
    return 0


def _write(result: report.Result, target: str | None, picture: str | None) -> None:
    text = json.dumps(report.as_object(result), indent=2, ensure_ascii=False)
    click.echo(text if target == "-" else "\n".join(report.lines(result)))
    if target and target != "-":
        with replacing(target) as beside:
            beside.write_text(text + "\n")
    if picture:
        plot.draw(result, picture)


def _check_folder(path: str | None) -> None:
    """Find out before the measurement that a file cannot be written."""
    folder = os.path.dirname(path or "") or "."
    if path and path != "-" and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"{path} cannot be written: there is no folder {folder!r} that this user can write to"
        )


def _show(lines: Sequence[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


@contextlib.contextmanager
def _progress(turns: int) -> Iterator[Callable[[int], object]]:
    """Show a bar, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=turns, label="measuring", file=sys.stderr) as bar:
        yield bar.update
