"""Stores on engines of collective operations: each worker has all values."""
