"""The role of this process in a job with parameter servers, and the address of the scheduler."""

from .settings.roles import Roles, find

__all__ = ["Roles", "find"]
