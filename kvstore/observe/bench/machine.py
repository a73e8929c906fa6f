"""What the table says of the machine; no names of hosts or people."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from kvstore.observe.doctor.system_files import ROOT, kilobytes, text


def described(root: Path = ROOT) -> dict[str, Any]:
    """Name the processor, the cores that can be used, the memory in bytes, and the kernel."""
    model = re.search(r"^model name\s*: (.+)$", text(root / "proc/cpuinfo") or "", re.MULTILINE)
    return {
        "processor": model[1] if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": kilobytes(root / "proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
    }
