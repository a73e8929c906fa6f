"""``kvstore env``: what `settings.launchers` and `settings.roles` make of our variables, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvstore.errors import ConfigError
from kvstore.settings import launchers, roles
from kvstore.settings.unknown import unknown_variables

from .wrong_settings import wrong_settings

_SECTIONS = ("parameter_server", "wrong_settings", "unknown_variables", "others")


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
        fields of `settings.roles.Roles` without keys, or ``error``, or None; ``wrong_settings``, what is
        wrong with a variable, by its name; ``unknown_variables``, a hint for each variable that looks like
        one of kvstore and has no effect; and ``others``, a list of ``launcher`` and ``verdict``.
    """
    others = [{"launcher": name, "verdict": text} for name, text in launchers.alternatives(environment)]
    found: dict[str, object]
    try:
        found = dataclasses.asdict(launchers.detect(environment))
    except ConfigError as error:
        found = {"error": str(error)}
    part, wrong = _part(environment), wrong_settings(environment)
    unknown = unknown_variables(environment)
    sections = {"parameter_server": part, "wrong_settings": wrong, "unknown_variables": unknown}
    return {**found, **sections, "others": others}


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
    return (
        "error" not in found
        and not found["wrong_settings"]
        and not (isinstance(part, dict) and "error" in part)
    )


def lines(found: Mapping[str, object]) -> list[str]:
    """Lay `findings` out for people."""
    others = found["others"]
    assert isinstance(others, list)
    part, wrong, unknown = found["parameter_server"], found["wrong_settings"], found["unknown_variables"]
    assert isinstance(wrong, dict)
    assert isinstance(unknown, dict)
    first = [f"{name:<11} {value}" for name, value in found.items() if name not in _SECTIONS]
    server = [f"  {name:<11} {value}" for name, value in part.items()] if isinstance(part, dict) else []
    losers = [f"  {other['launcher']:<9} {other['verdict']}" for other in others]
    settings = ["", "wrong settings", *(f"  {text}" for text in wrong.values())] if wrong else []
    names = [f"  {name}  {hint}".rstrip() for name, hint in unknown.items()]
    settings += ["", "unknown variables, without effect", *names] if names else []
    heading = "parameter server" if server else "no parameter server: none of its variables is set"
    return [*first, "", heading, *server, *settings, "", "not chosen", *losers]
