"""Contexts and keys of a small job."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import pytest
import zmq

from kvstore.wire.context import Context
from kvstore.wire.keys import Keys

_NAMES = itertools.count()


@pytest.fixture
def context() -> Iterator[Callable[..., Context]]:
    """Make contexts that are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(keys: Keys | None = None, **options: object) -> Context:
            made = Context(keys, **options)  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture(params=["tcp", "ipc"])
def address(request: pytest.FixtureRequest) -> str:
    """Where a router can bind: a free port, and a unix socket without a file."""
    return "tcp://127.0.0.1:0" if request.param == "tcp" else unix_name()


def unix_name() -> str:
    return f"ipc://@kvstore/test/{os.getpid()}/{next(_NAMES)}"


@pytest.fixture(scope="session")
def job_keys() -> dict[str, Keys]:
    """Keys of a scheduler, a server, a worker, and of a stranger who knows what is public."""
    pairs = {name: zmq.curve_keypair() for name in ("scheduler", "server", "worker", "stranger")}
    public = {name: pair[0] for name, pair in pairs.items()}
    allowed = tuple(public[name] for name in ("scheduler", "server", "worker"))
    return {
        name: Keys(*pair, public["scheduler"], (public["server"],), allowed) for name, pair in pairs.items()
    }
