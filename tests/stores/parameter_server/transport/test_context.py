"""The shared context of a process's sockets: all of them end with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pace
import pytest
import zmq

from kvstore.stores.parameter_server.transport.context import ZmqContext


class Interrupted:
    """A set, or pyzmq's context: Ctrl-C arrives as one of its methods is called, or has been."""

    def __init__(self, real: Any, name: str, before: bool) -> None:
        self._real, self._name, self._before = real, name, before

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._real, name)
        return self._interrupted(real) if name == self._name else real

    def _interrupted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def method(*arguments: Any) -> None:
            if not self._before:
                made = real(*arguments)
                assert made is None or not made.closed
            raise KeyboardInterrupt

        return method


@pytest.mark.parametrize(
    ("part", "method", "before"),
    [("_context", "socket", False), ("_known", "add", True), ("_sockets", "add", True)],
)
def test_it_closes_after_ctrl_c_as_a_socket_was_made(part: str, method: str, before: bool) -> None:
    """ZeroMQ waits for the last socket, and the traceback of the error keeps this socket."""
    context = ZmqContext()
    context.make_socket(zmq.DEALER)
    real = getattr(context, part)
    setattr(context, part, Interrupted(real, method, before))
    with pytest.raises(KeyboardInterrupt) as raised:
        context.make_socket(zmq.DEALER)
    setattr(context, part, real)
    closes = threading.Thread(target=context.close, daemon=True)
    closes.start()
    closes.join(pace.seconds(10))
    assert not closes.is_alive(), raised
