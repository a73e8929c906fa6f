"""An update's parameters as its kernel reads them: rounded once, with what follows from them worked out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .bodies.rules import DERIVED
from .spec import KernelSpec

Numbers = npt.NDArray[Any]

#: Numbers of a row's constants: places 0 to 11 are the parameters that kernels/rules.h lists for the rule,
#: rounded, and 12 to 15 what `DERIVED` says.
WIDTH = 16
FIRST_DERIVED = 12


def row_constants(spec: KernelSpec, params: Sequence[tuple[float, ...]]) -> Numbers:
    """Make the constants of several rows of an update.

    Parameters
    ----------
    spec : Spec
        An update.
    params : sequence of tuple of float
        For each row the parameters of the rule, as kernels/rules.h lists them and as an optimizer's
        `parameters` returns them.

    Returns
    -------
    numpy.ndarray
        Shape (rows, `WIDTH`), of type `KernelSpec.real_type`: copy it to the device, and give each row the
        address of its line.
    """
    exact = np.zeros((len(params), FIRST_DERIVED))
    for line, values in zip(exact, params, strict=True):
        line[: len(values)] = values
    with np.errstate(all="ignore"):
        made = np.zeros((len(params), WIDTH), spec.real_type)
        made[:, :FIRST_DERIVED] = exact
        derive = DERIVED.get(spec.rule or "")
        if derive:
            for place, column in enumerate(derive(exact.T, made.T), FIRST_DERIVED):
                made[:, place] = column
    return made
