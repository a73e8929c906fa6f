"""Rivals of the store between processes: each is a group of processes that the bench starts and drives."""
