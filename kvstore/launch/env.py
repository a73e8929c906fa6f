"""``kvstore env``: the place and the role that kvstore reads from the variables of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvstore.errors import ConfigError
from kvstore.observe.wrong_settings import wrong_settings
from kvstore.settings import launchers, roles
from kvstore.settings.unknown import unknown_variables

_SECTIONS = ("parameter_server", "wrong_settings", "unknown_variables", "others")


def findings(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the placement, or the error of its variables, and the launchers that were not chosen.

    The dictionary has the fields of `settings.launchers.WorkerPlacement` or ``error``, and `_SECTIONS`: the
    fields of `settings.roles.Roles` without keys, the error of each wrong variable, a hint for each variable
    without effect and with a name like one of kvstore, and the verdict on each launcher that was not chosen.
    """
    found: dict[str, Any]
    try:
        found = dataclasses.asdict(launchers.detect_placement(environment))
    except ConfigError as error:
        found = {"error": str(error)}
    others = [{"launcher": name, "verdict": text} for name, text in launchers.other_launchers(environment)]
    part, wrong = _server_role(environment), wrong_settings(environment)
    sections = (part, wrong, unknown_variables(environment), others)
    return found | dict(zip(_SECTIONS, sections, strict=True))


def _server_role(environment: Mapping[str, str] | None) -> dict[str, object] | None:
    """Return the role of this process in a job with servers, without its keys."""
    why = ", ".join(roles.signs(environment))
    try:
        found = roles.find(environment)
    except ConfigError as error:
        return {"error": str(error), "why": why}
    if found is None:
        return None
    part = {name: value for name, value in vars(found).items() if name not in ("keys", "insecure")}
    return {**part, "encrypted": found.keys is not None, "why": f"{why} set"}


def sound(found: Mapping[str, Any]) -> bool:
    """Return whether `findings` has no error."""
    return not ("error" in found or found["wrong_settings"] or "error" in (found["parameter_server"] or {}))


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return `findings` as lines of text."""
    part, wrong, unknown, others = (found[section] for section in _SECTIONS)
    first = [f"{name:<11} {value}" for name, value in found.items() if name not in _SECTIONS]
    server = [f"  {name:<11} {value}" for name, value in (part or {}).items()]
    losers = [f"  {other['launcher']:<9} {other['verdict']}" for other in others]
    settings = ["", "wrong settings", *(f"  {text}" for text in wrong.values())] if wrong else []
    names = [f"  {name}  {hint}".rstrip() for name, hint in unknown.items()]
    settings += ["", "unknown variables, without effect", *names] if names else []
    heading = "parameter server" if server else "no parameter server: none of its variables is set"
    return [*first, "", heading, *server, *settings, "", "not chosen", *losers]
