"""`mx`: MXNet 1.9.1, imported with names that NumPy has removed, and independently of DMLC_ROLE."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from ..errors import MissingBackendError
from ..settings.environment import changed_variables

#: Names that NumPy had at the last release of MXNet.
_GONE = {"bool": bool, "int": int, "float": float, "object": object}


def _import_mxnet() -> Any:
    """Import MXNet.

    Names that NumPy has removed are restored. A process that was started as a server of a job must not become
    MXNet's server by the import; it starts its server when a store is created.
    """
    missing = {name: kind for name, kind in _GONE.items() if name not in vars(np)}
    for name, kind in missing.items():
        setattr(np, name, kind)
    try:
        with changed_variables({"DMLC_ROLE": None}):
            return importlib.import_module("mxnet")
    except (ImportError, AttributeError, OSError) as error:
        for name in missing:
            delattr(np, name)
        raise MissingBackendError(
            f"MXNet 1.9.1 cannot be imported ({error}); it needs NumPy before 2: "
            "pip install 'mxnet==1.9.1' 'numpy<2'"
        ) from error


mx = _import_mxnet()
