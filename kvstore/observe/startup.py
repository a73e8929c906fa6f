"""The preparation of a process before its first store, or before it serves."""

from __future__ import annotations

from ..settings.descriptors import occupy_standard
from ..settings.unknown import warn_of_unknown_variables
from . import log, metrics
from .timeline import recording


def begin(name: str = "") -> None:
    """Prepare this process: standard streams, log, metrics and timeline. A second call changes nothing.

    Parameters
    ----------
    name : str
        Name of this process in its log, as for `kvstore.observe.log.introduce`.
    """
    occupy_standard()
    log.start(name)
    warn_of_unknown_variables()
    metrics.start()
    recording.start()
