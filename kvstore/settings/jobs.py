"""The name of the job of this process, of whatever kind the job is."""

from __future__ import annotations

from ..errors import ConfigError
from .launchers import detect
from .variables import process_variables


def job_name() -> str:
    """Name the job as all of its processes do; empty where the variables are wrong."""
    env = process_variables()
    try:
        if env.get("KVSTORE_SCHEDULER") or env.get("DMLC_PS_ROOT_URI"):
            from .roles import job_of

            return job_of(env)
        return detect(env).job
    except ConfigError:  # whoever needs the job says what is wrong
        return ""
