"""Ways of a worker to kill itself in the middle of a step."""

from __future__ import annotations

import os
import signal
import threading
import time


def now(seconds: float = 0) -> None:
    """Die after some time."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def in_a_step(how: str, seconds: float) -> None:
    """Die after some time, or when one server, or one key, has its part of a call and another has not."""
    if how == "some time":
        threading.Thread(target=now, args=(seconds,), daemon=True).start()
    elif how == "one server":
        _at_one_server()
    elif how == "one key":
        _at_one_key()


def _at_one_server() -> None:
    from kvstore.stores.parameter_server.worker.quick_calls import QuickCall

    send = QuickCall._send

    def to_one(call: QuickCall, epoch: int) -> None:
        call._ways = call._ways[:1]
        send(call, epoch)
        now()

    QuickCall._send = to_one  # type: ignore[method-assign]


def _at_one_key() -> None:
    from kvstore.stores.shared.native import _shared as shm
    from kvstore.stores.shared.pushing import Array, Dense, Handle, RoundPusher

    copy = RoundPusher._copy_to_slots

    def to_one(pusher: RoundPusher, pairs: Dense, divisor: int = 1) -> None:
        copy(pusher, pairs[:1], divisor)
        now()

    def to_first(pusher: RoundPusher, handles: list[Handle], values: list[Array], divisor: int = 1) -> None:
        with pusher.one_call(handles):
            shm.arrive_with_copies(handles[:1], values[:1], divisor)
            now()

    RoundPusher._copy_to_slots = to_one  # type: ignore[method-assign]
    RoundPusher.push_copies = to_first  # type: ignore[method-assign]
