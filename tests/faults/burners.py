"""A busy machine: processes that only use processors."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import pace

# Each in a session of its own: within one, the kernel's groups hide them. They end with the process that
# started them.
_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


@contextlib.contextmanager
def busy_machine(count: int) -> Iterator[None]:
    """Have so many processes compute; busy processes of other programs count."""
    with contextlib.ExitStack() as stack:
        for _ in range(count - pace.running()):
            one = subprocess.Popen([sys.executable, "-ISc", _LOOP], start_new_session=True)
            stack.callback(one.wait)
            stack.callback(one.kill)
        yield
