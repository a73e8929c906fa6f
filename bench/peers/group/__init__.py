"""Peers that are groups of processes: their driver, and the code of all their workers."""
