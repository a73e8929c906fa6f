"""Make `bench` importable wherever pytest is started."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
