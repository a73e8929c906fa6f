"""The name of the job of this process, with or without parameter servers."""

from __future__ import annotations

from ..errors import ConfigError
from .environment import process_variables
from .launchers import detect_placement


def job_name() -> str:
    """Return the name of the job, the same in all of its processes; empty if the variables are not valid."""
    env = process_variables()
    try:
        if env.get("KVSTORE_SCHEDULER") or env.get("DMLC_PS_ROOT_URI"):
            from .roles import job_of

            return job_of(env)
        return detect_placement(env).job
    except ConfigError:  # the code that needs a valid job raises this error
        return ""
