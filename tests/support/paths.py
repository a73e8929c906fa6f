"""Where tests find things, and where the processes that they start find their modules."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"
BODIES = TESTS / "bodies"
#: For PYTHONPATH, or to be cut at its colons and put before sys.path.
IMPORTS = os.pathsep.join([str(BODIES), str(TESTS / "support")])
