"""Being a scheduler or a server: what a process does that was started as one, until its job is over."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from ...errors import KVStoreError
from ...observe.startup import begin
from ...settings.parameter_server import PsConfig, ps_config
from ...settings.roles import Roles
from .scheduler import loop as scheduler_loop
from .server.loop import ServerLoop
from .transport.options import tune_malloc
from .transport.process_limits import shortage


def serve(roles: Roles) -> None:
    """Do what this process was started for; KVStoreError: the job did not end well, or has no place here."""
    if roles.role == "scheduler":
        scheduler(roles)
    else:
        server(roles)


def scheduler(
    roles: Roles,
    config: PsConfig | None = None,
    report: Callable[[str], None] | None = None,
    watch: Callable[[Callable[[], bool]], None] | None = None,
) -> None:
    """Be the scheduler; `report` and `watch` are those of `scheduler.loop.run`."""
    with _role("scheduler", "the scheduler"):
        scheduler_loop.run(roles, config or ps_config(), report, watch)


def server(roles: Roles, config: PsConfig | None = None) -> None:
    """Be a server."""
    with _role("server", f"server {roles.rank}" if roles.rank >= 0 else "this server"):
        tune_malloc()  # the process is ours alone
        ServerLoop(roles, config or ps_config()).run()


@contextlib.contextmanager
def _role(name: str, who: str) -> Iterator[None]:
    """Have the body be what a process of ours alone does; KVStoreError: the system has not given enough."""
    try:
        begin(name)
        _collect_seldom()
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        missing = None if isinstance(error, KVStoreError) else shortage(error)
        if missing is None:
            raise
        raise KVStoreError(f"{who} has {missing}") from error


def _collect_seldom() -> None:
    """Look for cycles of objects seldom, in a process that is ours alone.

    A call with many keys makes millions of small objects, and none of them is in a cycle: with Python's usual
    thresholds a server spends 40 % of its time on looking.
    """
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
