"""Where tests find things, and where the processes that they start find their modules."""

from __future__ import annotations

import os
import shlex
import shutil
import sysconfig
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
DATA = TESTS / "data"
BODIES = TESTS / "bodies"
#: For PYTHONPATH, or to be cut at its colons and put before sys.path.
IMPORTS = os.pathsep.join([str(BODIES), str(TESTS / "support")])


def c_compiler() -> list[str]:
    """Return the command of the compiler that Python was built with, or of another; skip without one."""
    for text in (sysconfig.get_config_var("CC"), "cc"):
        command = shlex.split(text or "")
        if command and shutil.which(command[0]):
            return command
    import pytest  # not at the top: the programs of benches have none

    pytest.skip("there is no C compiler")
