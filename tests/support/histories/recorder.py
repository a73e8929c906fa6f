"""Records the calls and reads of a process: a line before each call, and one after it.

A line is one write to a file that is appended to, so that a process that is killed leaves all that it has
called. Times are those of CLOCK_MONOTONIC, which all processes of a host share. A step has a line more, as it
begins: its pushes are known at the end of its block, and until then none of them may count.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.numpy import load_file

from .events import Event, Key, Push, Read
from .numbers import Array, Numbers


class _Step(NamedTuple):
    """The calls made in a step, until its block ends."""

    pushed: dict[Key, int]
    outs: dict[Key, Array]
    pulls: list[Mapping[Key, Array]]

    def takes(
        self, verb: str, keys: Sequence[Key], pushed: Mapping[Key, int], outs: Mapping[Key, Array]
    ) -> bool:
        """Record a call that is made at the end of the block: a push, or a pull of a pushed key."""
        if pushed:
            self.pushed.update(pushed)
            self.outs.update(outs)
        elif verb == "pull" and not self.pushed.keys().isdisjoint(keys):
            self.pulls.append(outs)
        else:
            return False
        return True


class RecordedStore:
    """A store that records every call; it makes the values that it pushes.

    `slots` are the numbers of the threads that call it: one for a process with one.
    """

    def __init__(self, store: Any, path: Path, numbers: Mapping[Key, Numbers], slot: int) -> None:
        self.store, self.slot, self._numbers = store, slot, numbers
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._pushes = dict.fromkeys(numbers, 0)
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._step: _Step | None = None

    # ---------------------------------------------------------------------------------------------- verbs

    def init(self, keys: Sequence[Key]) -> None:
        """Give keys their first value."""
        starts = [self._numbers[key].start() for key in keys]
        self._call("init", keys, lambda: self.store.init(list(keys), starts))

    def push(self, *keys: Key) -> None:
        """Push the next value into each key."""
        pushed, values = self._next(keys)
        self._call("push", keys, lambda: self.store.push(list(keys), values), pushed)

    def pull(self, *keys: Key) -> None:
        """Read keys; in a step, at its end, if any of them is pushed in it."""
        outs = self._outs(keys)
        self._call("pull", keys, lambda: self.store.pull(list(keys), out=list(outs.values())), {}, outs)

    def save(self, path: Path) -> None:
        """Read all keys by way of a file."""

        outs = self._outs(self._numbers)

        def save() -> None:
            self.store.save(path)
            saved = load_file(path)
            outs.update({key: saved[f"value/{key}"] for key in outs})

        self._call("save", list(outs), save, {}, outs)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Make one step of the pushes of the block."""
        calls: dict[int, Mapping[Key, Array]] = {self._called("begin", (), {}): {}}
        try:
            with self.store.step():
                with self._block() as step:
                    yield
                calls = self._sent(*calls, step)
        except BaseException as error:
            for name in calls:
                self._returned(name, error, {})
            raise
        for name, outs in calls.items():
            self._returned(name, None, outs)

    def pushpull(self, *keys: Key) -> None:
        """Push the next value into each key, and read it."""
        pushed, values = self._next(keys)
        outs = self._outs(keys)
        call = lambda: self.store.pushpull(list(keys), values, out=list(outs.values()))  # noqa: E731
        self._call("pushpull", keys, call, pushed, outs)

    def start(self, verb: str, *keys: Key) -> Callable[[], None]:
        """Push and read in the background; the returned function waits for it."""
        pushed, values = self._next(keys) if verb != "pull" else ({}, [])
        outs = self._outs(keys) if verb != "push" else {}
        arguments = [values] if values else []
        options: dict[str, Any] = {"out": list(outs.values())} if outs else {}
        name = self._called(verb, keys, pushed)
        work: list[Any] = []

        def begin() -> None:
            work.append(getattr(self.store, verb)(list(keys), *arguments, async_op=True, **options))

        def finish() -> None:
            self._answer(name, lambda: work[0].wait(), outs)

        try:
            begin()
        except Exception as error:
            self._returned(name, error, {})
            raise
        return finish

    def join(self) -> None:
        """Rest from now on."""
        self._call("join", (), self.store.join)

    def wait(self) -> None:
        """Wait for what runs in the background."""
        self._call("wait", (), self.store.wait)

    def barrier(self) -> None:
        """Meet the other processes."""
        self._call("barrier", (), self.store.barrier)

    def close(self) -> None:
        """Leave."""
        self._call("close", (), self.store.close)

    # ------------------------------------------------------------------------------------------- recording

    def _next(self, keys: Iterable[Key]) -> tuple[dict[Key, int], list[Array]]:
        with self._lock:
            for key in keys:
                self._pushes[key] += 1
            pushed = {key: self._pushes[key] for key in keys}
        return pushed, [self._numbers[key].push(self.slot, number) for key, number in pushed.items()]

    def _outs(self, keys: Iterable[Key]) -> dict[Key, Array]:
        return {key: self._numbers[key].empty() for key in keys}

    def _call(
        self,
        verb: str,
        keys: Sequence[Key],
        call: Callable[[], Any],
        pushed: Mapping[Key, int] | None = None,
        outs: Mapping[Key, Array] | None = None,
    ) -> None:
        if self._step is not None and self._step.takes(verb, keys, pushed or {}, outs or {}):
            call()
        else:
            self._answer(self._called(verb, keys, pushed or {}), call, outs or {})

    @contextlib.contextmanager
    def _block(self) -> Iterator[_Step]:
        """Record the calls of a step. A block that ends with an error has pushed nothing."""
        self._step = step = _Step({}, {}, [])
        try:
            yield step
        except BaseException:
            self._pushes.update({key: number - 1 for key, number in step.pushed.items()})
            raise
        finally:
            self._step = None

    def _sent(self, name: int, step: _Step) -> dict[int, Mapping[Key, Array]]:
        """Record the calls at the end of a step, and the result of each."""
        self._called("step", list(step.pushed), step.pushed, name)
        return {name: step.outs} | {self._called("pull", list(outs), {}): outs for outs in step.pulls}

    def _answer(self, name: int, call: Callable[[], Any], outs: Mapping[Key, Array]) -> None:
        try:
            call()
        except BaseException as error:
            self._returned(name, error, {})
            raise
        self._returned(name, None, outs)

    def _called(
        self, verb: str, keys: Sequence[Key], pushed: Mapping[Key, int], begun: int | None = None
    ) -> int:
        name = next(self._ids) if begun is None else begun
        self._write([name, self.slot, verb, list(keys), time.monotonic(), list(pushed.values())])
        return name

    def _returned(self, name: int, error: BaseException | None, outs: Mapping[Key, Array]) -> None:
        at = time.monotonic()
        reads = {key: self._numbers[key].read(out) for key, out in outs.items()}
        told = [type(error).__name__, str(error)[:500]] if error is not None else ["", ""]
        self._write([name, at, *told, reads])

    def _write(self, line: list[Any]) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())


def events_in(path: Path) -> list[Event]:
    """Read the record of a process."""
    found: dict[int, Event] = {}
    for line in path.read_text().splitlines():
        name, *rest = json.loads(line)
        found[name] = _called(*rest) if len(rest) == _CALLED else _returned(found[name], *rest)
    return list(found.values())


_CALLED = 5  # entries of a line before a call, behind its number


def _called(slot: int, verb: str, keys: list[Key], at: float, pushed: list[int]) -> Event:
    return Event(slot, verb, tuple(keys), at, pushed=dict(zip(keys, pushed, strict=bool(pushed))))


def _returned(event: Event, at: float, error: str, text: str, reads: dict[Key, Any]) -> Event:
    read = {key: _read(pieces) for key, (pieces,) in reads.items()}
    return event._replace(returned=at, error=error, text=text, read=read)


def _read(pieces: list[Any]) -> Read:
    return Read(
        tuple(
            (start, None if contents is None else tuple(Push(*one) for one in contents))
            for start, contents in pieces
        )
    )
