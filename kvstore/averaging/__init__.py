"""Averages over the workers of a store, for the modules of frameworks: checks, and comparisons of workers."""
