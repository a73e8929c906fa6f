"""The store of one process."""
