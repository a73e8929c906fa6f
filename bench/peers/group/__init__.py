"""Peers that are groups of processes: how they are driven, and what their workers have in common."""
