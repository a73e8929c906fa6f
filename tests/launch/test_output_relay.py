"""The relay of output: ready lines, and their handling at an end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvstore.launch import output
from kvstore.launch.output import LineReader, OutputSink
from kvstore.launch.output_relay import OutputRelay


@pytest.fixture
def relay() -> Iterator[OutputRelay]:
    made = OutputRelay((), lambda _: None)
    yield made
    made.close()


def piped(lines: list[bytes], text: bytes) -> LineReader:
    """Make a stream at its end, with a last line."""
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return LineReader(os.fdopen(reader, "rb", 0), lines.append, b"")


def test_a_stream_with_the_number_of_a_closed_one_is_not_taken_for_it(relay: OutputRelay) -> None:
    """Both are ready; the first one to be served closes the other, and opens one that gets its number."""
    written: list[bytes] = []
    reader, writer = os.pipe()
    os.write(writer, b"go")
    old = piped(written, b"old\n")
    number = old.stream.fileno()
    made: list[LineReader] = []

    def start_another() -> None:
        os.read(reader, 2)
        relay.drop_stream(old)
        made.append(piped(written, b"new\n"))
        assert made[0].stream.fileno() == number
        relay.add_stream(made[0])

    relay.watch_descriptor(reader, start_another)
    relay.add_stream(old)
    relay.run_once(1.0, lambda: None)
    assert old.stream.closed
    relay.run_once(1.0, lambda: None)
    assert written == [b"old\n", b"new\n"]
    relay.stop_watching(reader)
    os.close(reader)
    os.close(writer)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    made = os.pipe()
    yield made
    for descriptor in made:
        os.close(descriptor)


def test_a_reader_that_takes_a_little_loses_nothing(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience is counted from the last byte that it has taken."""
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    reader, writer = pipe
    sink = OutputSink(writer)
    sink.write(b"x" * 400_000)
    sink.flush()
    now += 1000  # while the processes run, a reader may do so
    sink.flush()
    sink.lose_after(10)
    taken = 0
    while taken < 300_000:
        taken += len(os.read(reader, 8192))
        now += 9
        sink.flush()
        assert not sink.broken
    now += 11
    sink.flush()
    assert sink.broken or sink.is_empty
    assert sink.is_empty


def test_what_a_reader_does_not_take_is_lost(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(output.time, "monotonic", lambda: now)
    sink = OutputSink(pipe[1])
    sink.write(b"x" * 400_000)
    sink.flush()
    sink.lose_after(10)
    for later, lost in ((9, False), (2, True)):
        now += later
        sink.flush()
        assert (sink.broken, sink.is_empty) == (lost, lost)
    assert sink.reason == "the reader has taken nothing for 10 s"


def test_a_signal_that_comes_during_the_look_at_processes_ends_the_next_wait() -> None:
    """A process that ends just after it was looked at would else be waited for without end."""
    came: list[int] = []
    relay = OutputRelay((signal.SIGUSR1, signal.SIGUSR2), came.append)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        relay.run_once(5.0, lambda: os.kill(os.getpid(), signal.SIGUSR2))
        assert came == [signal.SIGUSR1]
        relay.run_once(5.0, lambda: None)
        assert came == [signal.SIGUSR1, signal.SIGUSR2]
    finally:
        relay.close()
