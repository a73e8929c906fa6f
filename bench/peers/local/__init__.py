"""Rivals of the store in one process."""
