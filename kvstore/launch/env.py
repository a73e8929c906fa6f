"""``kvstore env``: what `settings.launchers` and `settings.roles` make of our variables, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvstore.errors import ConfigError
from kvstore.settings import launchers, roles

_SECTIONS = ("parameter_server", "others")


def findings(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """Collect the placement, or the error in its place, and the launchers that were not chosen.

    Parameters
    ----------
    environment : mapping, optional
        The variables; those of this process where None.

    Returns
    -------
    dict
        Ready for JSON: the fields of `settings.launchers.Placement`, or ``error``; ``parameter_server``, the
        fields of `settings.roles.Roles` without keys, or ``error``, or None; and ``others``, a list of
        ``launcher`` and ``verdict``.
    """
    others = [{"launcher": name, "verdict": text} for name, text in launchers.alternatives(environment)]
    found: dict[str, object]
    try:
        found = dataclasses.asdict(launchers.detect(environment))
    except ConfigError as error:
        found = {"error": str(error)}
    return {**found, "parameter_server": _part(environment), "others": others}


def _part(environment: Mapping[str, str] | None) -> dict[str, object] | None:
    """Collect the part of this process in a parameter server, without its keys."""
    why = ", ".join(roles.signs(environment))
    try:
        found = roles.find(environment)
    except ConfigError as error:
        return {"error": str(error), "why": why}
    if found is None:
        return None
    part = {name: value for name, value in vars(found).items() if name not in ("keys", "insecure")}
    return {**part, "encrypted": found.keys is not None, "why": f"{why} set"}


def sound(found: Mapping[str, object]) -> bool:
    """Whether nothing in `findings` is an error."""
    part = found["parameter_server"]
    return "error" not in found and not (isinstance(part, dict) and "error" in part)


def lines(found: Mapping[str, object]) -> list[str]:
    """Lay `findings` out for people."""
    others = found["others"]
    assert isinstance(others, list)
    part = found["parameter_server"]
    first = [f"{name:<11} {value}" for name, value in found.items() if name not in _SECTIONS]
    server = [f"  {name:<11} {value}" for name, value in part.items()] if isinstance(part, dict) else []
    losers = [f"  {other['launcher']:<9} {other['verdict']}" for other in others]
    heading = "parameter server" if server else "no parameter server: none of its variables is set"
    return [*first, "", heading, *server, "", "not chosen", *losers]
