"""Stores on servers for which the workers of each host sum first: one sum for each host travels."""
