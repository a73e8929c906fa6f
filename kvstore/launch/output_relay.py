"""The one place where the launcher waits: for output of processes, for readers of its own, for signals."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections.abc import Callable, Iterable, Iterator

from .output import Lines, Sink


class OutputRelay:
    """Passes lines on to our stdout and stderr, and calls back on signals.

    Parameters
    ----------
    numbers : tuple of signals
        Signals to wait for, apart from those that this process was started to ignore.
    on_signal : callable
        Called with the number of each.
    out : Sink, optional
        In the place of our stdout.
    """

    def __init__(
        self, numbers: Iterable[signal.Signals], on_signal: Callable[[int], None], out: Sink | None = None
    ) -> None:
        self.out, self.err = out or Sink(1), Sink(2)
        self._sinks = [self.out, self.err]
        self._streams: set[Lines] = set()
        self._selector = selectors.PollSelector()
        self._on_signal = on_signal
        with contextlib.ExitStack() as stack:
            stack.callback(self._selector.close)
            self._signals = stack.enter_context(_caught(numbers))
            self._selector.register(self._signals, selectors.EVENT_READ, lambda: None)
            self._stack = stack.pop_all()

    def add(self, lines: Lines) -> None:
        """Pass on what `lines` reads, from now on."""
        self._streams.add(lines)
        self._choose()

    def drop(self, lines: Lines) -> None:
        """Pass on what is left in `lines`, and close it."""
        if lines in self._streams:
            self._streams.remove(lines)
            self._set(lines.stream.fileno(), 0, lines.read)
            lines.close()

    def watch(self, descriptor: int, call: Callable[[], object]) -> None:
        """Call back while there is something to read."""
        self._set(descriptor, selectors.EVENT_READ, call)

    def forget(self, descriptor: int) -> None:
        """Stop watching; to be called before the descriptor is closed."""
        self._set(descriptor, 0, lambda: None)

    def feed(self, sink: Sink) -> None:
        """Write what `sink` holds whenever it can be written."""
        self._sinks.append(sink)

    def starve(self, sink: Sink) -> None:
        """Stop that; to be called before the descriptor is closed."""
        self._sinks.remove(sink)
        self._set(sink.fd, 0, sink.flush)

    def turn(self, timeout: float | None, first: Callable[[], None]) -> None:
        """Wait until something can be done or `timeout` is over; call `first`, then do it.

        Signals are read before `first` looks at processes: the SIGCHLD of one that ends after that look ends
        the next wait.
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
            self.drop(lines)
        self._choose()

    @property
    def empty(self) -> bool:
        """Whether all that was read is written."""
        return self.out.empty and self.err.empty

    @property
    def full(self) -> bool:
        """Whether so much waits for our readers that no more should be read."""
        return self.out.full or self.err.full

    @property
    def broken(self) -> bool:
        """Whether one of our own readers is gone, or nothing more can be written to it."""
        return self.out.broken or self.err.broken

    @property
    def reason(self) -> str:
        """Why nothing more can be written; empty: the reader is gone."""
        return self.out.reason or self.err.reason

    def close(self) -> None:
        """Give the signals back and close what is open."""
        for lines in list(self._streams):
            self.drop(lines)
        self._stack.close()

    def _choose(self) -> None:
        """Write what can be written, and read on unless too much waits already."""
        for sink in self._sinks:
            sink.flush()
            self._set(sink.fd, 0 if sink.empty else selectors.EVENT_WRITE, sink.flush)
        reading = 0 if self.full else selectors.EVENT_READ
        for lines in self._streams:
            self._set(lines.stream.fileno(), reading, lines.read)

    def _set(self, fd: int, event: int, call: Callable[[], object]) -> None:
        watched = fd in self._selector.get_map()
        if event and not watched:
            self._selector.register(fd, event, call)
        elif watched and not event:
            self._selector.unregister(fd)


@contextlib.contextmanager
def _caught(numbers: Iterable[signal.Signals]) -> Iterator[int]:
    """Turn signals into bytes that can be read from the descriptor it gives."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    taken = {number: signal.getsignal(number) for number in numbers}
    try:
        for number, handler in taken.items():
            # What is ignored, as under nohup, stays so; but without SIGCHLD nobody would learn of an end.
            if handler is not signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, lambda *_: None)
        yield reader
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
