"""Buggify: points in a job where a seeded fault or delay happens."""

from .points import Points

__all__ = ["Points"]
