"""Being a scheduler or a server: what a process does that was started as one, until its job is over."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ...observe.startup import begin
from ...settings.parameter_server import PsConfig, ps_config
from ...settings.roles import Roles
from .scheduler import loop as scheduler_loop
from .server.loop import ServerLoop
from .transport.options import tune_malloc


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
    begin("scheduler")
    _collect_seldom()
    scheduler_loop.run(roles, config or ps_config(), report, watch)


def server(roles: Roles, config: PsConfig | None = None) -> None:
    """Be a server."""
    begin("server")
    _collect_seldom()
    tune_malloc()  # the process is ours alone
    ServerLoop(roles, config or ps_config()).run()


def _collect_seldom() -> None:
    """Look for cycles of objects seldom, in a process that is ours alone.

    A call with many keys makes millions of small objects, and none of them is in a cycle: with Python's usual
    thresholds a server spends 40 % of its time on looking.
    """
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
