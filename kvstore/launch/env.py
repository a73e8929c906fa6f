"""``kvstore env``: what `kvstore.cluster` makes of the variables of this process, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvstore import cluster
from kvstore.errors import ConfigError


def findings(environment: Mapping[str, str] | None = None) -> dict[str, object]:
    """Collect the placement, or the error in its place, and the launchers that were not chosen.

    Parameters
    ----------
    environment : mapping, optional
        The variables; ``os.environ`` where None.

    Returns
    -------
    dict
        Ready for JSON: the fields of `kvstore.cluster.Placement`, or ``error``; and ``others``, a list of
        ``launcher`` and ``verdict``.
    """
    others = [{"launcher": name, "verdict": text} for name, text in cluster.alternatives(environment)]
    try:
        return {**dataclasses.asdict(cluster.detect(environment)), "others": others}
    except ConfigError as error:
        return {"error": str(error), "others": others}


def lines(found: Mapping[str, object]) -> list[str]:
    """Lay `findings` out for people."""
    others = found["others"]
    assert isinstance(others, list)
    first = [f"{name:<11} {value}" for name, value in found.items() if name != "others"]
    return [*first, "", "not chosen", *(f"  {other['launcher']:<9} {other['verdict']}" for other in others)]
