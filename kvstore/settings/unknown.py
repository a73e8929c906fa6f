"""Warnings of variables whose names look like those of kvstore and are unknown, such as misspelt ones."""

from __future__ import annotations

import difflib
import functools
import logging
import re
from collections.abc import Mapping

from .definitions import IGNORED, IGNORED_ON_SERVERS, LAUNCHERS, SETTINGS
from .environment import process_variables

log = logging.getLogger("kvstore.config")

#: Prefixes that only kvstore uses, or a part of MXNet of which kvstore knows all variables.
_OWN = ("KVSTORE_", "MXNET_KVSTORE_")
#: Prefixes that other programs use too: of these names, only those close to a known name are reported.
_SHARED = ("KV", "DMLC_", "PS_", "MXNET_", "BYTEPS_")
#: Variables of the tests and benches for their own processes.
_DEVELOPMENT = ("KVSTORE_TEST_", "KVSTORE_BENCH_")
#: Kubernetes sets these in each pod if a service has the name `kvstore`, or one that begins so.
_OF_A_SERVICE = re.compile(r"KVSTORE_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_[0-9]+_\w+)?)")
_NEARLY = 0.9  # of `difflib`: one or two letters of a name


@functools.cache
def known_variables() -> frozenset[str]:
    """Return the names of the variables that kvstore reads, or lists as without effect."""
    settings = {
        name for row in SETTINGS.values() for name in (row.variable, *(a.variable for a in row.aliases))
    }
    launched = {
        name
        for row in LAUNCHERS
        for group in (row.signs, row.rank, row.size, row.local_rank, row.local_size, row.job, row.more)
        for name in group
    }
    return frozenset((settings | launched | {*IGNORED, *IGNORED_ON_SERVERS}) - {""})


def unknown_variables(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables that look like those of kvstore and are not known, each with a hint.

    Parameters
    ----------
    environment : mapping, optional
        The variables. With None, those of this process.

    Returns
    -------
    dict
        By variable, a question with the nearest known name; empty text if no known name is near.
    """
    env = process_variables() if environment is None else environment
    found = {}
    for name in sorted(set(env) - known_variables()):
        nearest = _nearest_name(name)
        if nearest or _known_prefix(name):
            found[name] = f"did you mean {nearest}?" if nearest else ""
    return found


def warn_of_unknown_variables() -> None:
    """Warn of unknown variables, in one line each, and of each once in a process."""
    for name, hint in unknown_variables().items():
        _warn_unknown(name, hint)


@functools.cache
def _warn_unknown(name: str, hint: str) -> None:
    cure = hint or "the page of settings lists the names; unset it"
    log.warning("%s is set and has no effect: kvstore has no such variable; %s", name, cure)


def _known_prefix(name: str) -> str | None:
    """Return the prefix of a name that only kvstore uses, or None."""
    if name.startswith(_DEVELOPMENT) or _OF_A_SERVICE.fullmatch(name):
        return None
    return next((own for own in _OWN if name.upper().startswith(own)), None)


def _nearest_name(name: str) -> str | None:
    """Return the known name that is closest to this name, or None if none is close."""
    upper, prefix = name.upper(), _known_prefix(name)
    if prefix is None and (not upper.startswith(_SHARED) or upper.startswith(_OWN)):
        return None
    if upper in known_variables():
        return upper
    names = sorted(known for known in known_variables() if not known.startswith(_DEVELOPMENT))
    if prefix is None:
        return next(iter(difflib.get_close_matches(upper, names, n=1, cutoff=_NEARLY)), None)
    tails = [known.removeprefix(prefix) for known in names if known.startswith(prefix)]
    rest = upper.removeprefix(prefix)
    begun = [tail for tail in tails if rest.startswith(f"{tail}_")]  # KVSTORE_LOG_LEVEL
    meant = begun or difflib.get_close_matches(rest, tails, n=1)
    return prefix + max(meant, key=len) if meant else None
