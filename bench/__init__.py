"""Measurements of kvstore beside its rivals; see README.md in this folder."""

from pathlib import Path

#: The tree: what `bench` is imported from.
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
