"""Measurements of kvstore and its rivals; see README.md in this folder."""

from pathlib import Path

#: The root of the source tree that contains `bench`.
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
