"""The process of a scheduler or a server, until its job has ended."""

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
from .transport.process_limits import resource_shortage


def serve_role(roles: Roles) -> None:
    """Run the role of this process; KVStoreError: the job failed, or does not admit this process."""
    if roles.role == "scheduler":
        serve_scheduler(roles)
    else:
        serve_server(roles)


def serve_scheduler(
    roles: Roles,
    config: PsConfig | None = None,
    report: Callable[[str], None] | None = None,
    watch: Callable[[Callable[[], bool]], None] | None = None,
) -> None:
    """Run a scheduler; `report` and `watch` are those of `scheduler.loop.run_scheduler`."""
    with _role_process("scheduler", "the scheduler"):
        scheduler_loop.run_scheduler(roles, config or ps_config(), report, watch)


def serve_server(roles: Roles, config: PsConfig | None = None) -> None:
    """Run a server."""
    with _role_process("server", f"server {roles.rank}" if roles.rank >= 0 else "this server"):
        tune_malloc()  # the process belongs to kvstore alone
        ServerLoop(roles, config or ps_config()).run()


@contextlib.contextmanager
def _role_process(name: str, who: str) -> Iterator[None]:
    """Run the body as the whole work of a process; KVStoreError: the system has not provided enough."""
    try:
        begin(name)
        _collect_seldom()
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        missing = None if isinstance(error, KVStoreError) else resource_shortage(error)
        if missing is None:
            raise
        raise KVStoreError(f"{who} has {missing}") from error


def _collect_seldom() -> None:
    """Run the cyclic garbage collector seldom, in a process that belongs to kvstore alone.

    A call with many keys makes millions of small objects, none of them in a cycle: with Python's usual
    thresholds a server spends 40 % of its time in the collector.
    """
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
