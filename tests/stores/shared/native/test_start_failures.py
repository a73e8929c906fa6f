"""A worker that cannot enter a region notifies those that wait for it; a stranger cannot do so."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator

import pytest

from kvstore.errors import ConfigError, KVStoreError
from kvstore.stores.shared.native.start_failures import StartFailures

Make = Callable[[int], StartFailures]


@pytest.fixture
def worker() -> Iterator[Make]:
    """Make a worker of a store of three, by its rank."""
    name, made = secrets.token_hex(8), []

    def make(rank: int) -> StartFailures:
        made.append(StartFailures(name, rank, 3))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_all_that_start_are_told(worker: Make) -> None:
    zero, one, two = worker(0), worker(1), worker(2)
    zero.check()
    one.send_cause(ConfigError("there is no /proc"))
    for other in (zero, two):
        with pytest.raises(
            KVStoreError, match=r"^worker 1 of 3 cannot take part in this store: there is no /proc$"
        ):
            other.check()
        other.check()  # once
    one.check()


def test_a_failure_is_not_told_on(worker: Make) -> None:
    """Else a worker would name the worker that notified it, and not the cause."""
    zero, one, two = worker(0), worker(1), worker(2)
    one.send_cause(ConfigError("no memory"))
    with pytest.raises(KVStoreError) as told:
        zero.check()
    zero.send_cause(told.value)
    with pytest.raises(KVStoreError, match="worker 1"):
        two.check()
    two.check()


def test_a_text_may_be_long_or_strange(worker: Make) -> None:
    zero, one = worker(0), worker(1)
    one.send_cause(ConfigError("x" * 100_000 + "\udcff"))
    with pytest.raises(KVStoreError, match="xxx"):
        zero.check()


def test_no_other_worker_has_to_be_there(worker: Make) -> None:
    one = worker(1)
    one.send_cause(ConfigError("no memory"))
    one.close()
    one.send_cause(ConfigError("no memory"))
    one.check()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_not_heard(worker: Make) -> None:
    zero = worker(0)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
            stranger.sendto(b"1 you are hacked", zero._rank_address(0))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    zero.check()
