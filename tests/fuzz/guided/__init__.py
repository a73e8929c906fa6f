"""What reads bytes in C, fuzzed with libFuzzer, and guided by coverage."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))  # for `python -m fuzz.guided`, without pytest
