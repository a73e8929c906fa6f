"""The event loop of a launcher: it waits for output of processes, readers of its own output, and signals."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Iterator

from .output import LineReader, OutputSink

#: Seconds that the readers of the launcher's output have after a signal.
LAST_WORDS = 0.5


class OutputRelay:
    """Writes lines of processes to stdout and stderr of the launcher, and reports signals.

    `on_signal` is called with each of the signals `numbers`, except those that this process was started to
    ignore. `out` replaces stdout.
    """

    def __init__(
        self, numbers: Iterable[int], on_signal: Callable[[int], None], out: OutputSink | None = None
    ) -> None:
        self.out, self.err = out or OutputSink(1), OutputSink(2)
        self._sinks = [self.out, self.err]
        self._streams: set[LineReader] = set()
        self._selector = selectors.PollSelector()
        self._on_signal = on_signal
        with contextlib.ExitStack() as stack:
            stack.callback(self._selector.close)
            self._signals = stack.enter_context(_caught_signals(numbers))
            self._selector.register(self._signals, selectors.EVENT_READ, lambda: None)
            self._stack = stack.pop_all()

    def add_stream(self, lines: LineReader) -> None:
        """Read a stream from now on, unless a sink is full."""
        self._streams.add(lines)
        self._update_watches()

    def drop_stream(self, lines: LineReader) -> None:
        """Write what is left in a stream, and close it."""
        if lines in self._streams:
            self._streams.remove(lines)
            self.stop_watching(lines.stream.fileno())
            lines.close()

    def watch_descriptor(self, descriptor: int, call: Callable[[], object]) -> None:
        """Call `call` while there is something to read."""
        self._set_watch(descriptor, selectors.EVENT_READ, call)

    def stop_watching(self, descriptor: int) -> None:
        """Stop watching; the caller does this before it closes the descriptor."""
        self._set_watch(descriptor, 0, lambda: None)

    def add_sink(self, sink: OutputSink) -> None:
        """Write what `sink` holds whenever it can be written."""
        self._sinks.append(sink)

    def drop_sink(self, sink: OutputSink) -> None:
        """Stop writing; the caller does this before it closes the descriptor."""
        self._sinks.remove(sink)
        self.stop_watching(sink.fd)

    def run_once(self, timeout: float | None, first: Callable[[], None]) -> None:
        """Wait for events for at most `timeout` seconds, call `first`, then handle the events.

        Signals are read before `first` polls the processes: the SIGCHLD of a process that ends after that
        poll ends the next wait.
        """
        ready = self._selector.select(timeout)
        numbers = os.read(self._signals, 4096) if any(key.fd == self._signals for key, _ in ready) else b""
        first()
        for number in numbers:
            self._on_signal(number)
        for key, _ in ready:
            if self._selector.get_map().get(key.fd) == key:  # else closed, and the number used again
                key.data()
        for lines in [lines for lines in self._streams if lines.ended]:
            self.drop_stream(lines)
        self._update_watches()

    def write_out(
        self, turn: Callable[[], None], patience: float, is_interrupted: Callable[[], object]
    ) -> None:
        """Repeat `turn`, of a second at most, until all output is written; no process is left.

        A reader that reads nothing for `patience` seconds loses the rest; after a signal (`is_interrupted`)
        the readers have `LAST_WORDS` seconds.
        """
        until = math.inf
        for sink in (self.out, self.err):
            sink.lose_after(patience)
        while not (self.out.is_empty and self.err.is_empty) and time.monotonic() < until:
            turn()
            if is_interrupted():
                until = min(until, time.monotonic() + LAST_WORDS)

    @property
    def is_full(self) -> bool:
        """Whether so much output is pending that no more should be read."""
        return self.out.is_full or self.err.is_full

    @property
    def broken(self) -> bool:
        """Whether the reader of stdout or stderr is gone, or nothing more can be written to it."""
        return self.out.broken or self.err.broken

    @property
    def reason(self) -> str:
        """Why nothing more can be written; empty if the reader is gone."""
        return self.out.reason or self.err.reason

    def close(self) -> None:
        """Restore the signal handlers and close what is open."""
        for lines in list(self._streams):
            self.drop_stream(lines)
        self._stack.close()

    def _update_watches(self) -> None:
        """Write what can be written, and read on unless too much is pending."""
        for sink in self._sinks:
            sink.flush()
            self._set_watch(sink.fd, 0 if sink.is_empty else selectors.EVENT_WRITE, sink.flush)
        reading = 0 if self.is_full else selectors.EVENT_READ
        for lines in self._streams:
            self._set_watch(lines.stream.fileno(), reading, lines.read)

    def _set_watch(self, fd: int, event: int, call: Callable[[], object]) -> None:
        watched = fd in self._selector.get_map()
        if event and not watched:
            self._selector.register(fd, event, call)
        elif watched and not event:
            self._selector.unregister(fd)


@contextlib.contextmanager
def _caught_signals(numbers: Iterable[int]) -> Iterator[int]:
    """Write the signals as bytes to a pipe; yields its reading end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in handlers.items():
            # An ignored signal, as under nohup, remains ignored; but ends of processes need SIGCHLD.
            if handler is not signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, lambda *_: None)
        yield reader
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
