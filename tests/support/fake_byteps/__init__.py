"""A stand-in for BytePS, which does not run on machines without GPUs; see byteps/__init__.py.

`install` makes ``import byteps.torch`` find it, and where there is no PyTorch, ``torch.from_numpy`` too.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


def install() -> None:
    """Make `byteps` and `torch` importable in this process."""
    sys.path.insert(0, str(Path(__file__).parent))
    if importlib.util.find_spec("torch") is None:
        framework: Any = types.ModuleType("torch")
        framework.from_numpy = lambda array: array
        framework.__version__ = "none"
        sys.modules["torch"] = framework


__all__ = ["install"]
