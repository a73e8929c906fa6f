"""The public name of `kvstore.settings.roles`: which part this process plays, and where the others are."""

from .settings.roles import Roles, find

__all__ = ["Roles", "find"]
