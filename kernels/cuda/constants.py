"""An update's parameters as its kernel reads them: rounded once, with what follows from them worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .spec import Spec

Numbers = npt.NDArray[Any]

#: Numbers of a row's constants: places 0 to 11 are the parameters that kernels/rules.h lists for the rule,
#: rounded, and 12 to 15 what `_DERIVED` says.
WIDTH = 16
FIRST_DERIVED = 12


def constants(spec: Spec, params: Sequence[tuple[float, ...]]) -> Numbers:
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
        Shape (rows, `WIDTH`), of type `Spec.real`: copy it to the device, and give each row the address of
        its line.
    """
    exact = np.zeros((len(params), FIRST_DERIVED))
    for line, values in zip(exact, params, strict=True):
        line[: len(values)] = values
    with np.errstate(all="ignore"):
        made = np.zeros((len(params), WIDTH), spec.real)
        made[:, :FIRST_DERIVED] = exact
        derive = _DERIVED.get(spec.rule or "")
        if derive:
            for place, column in enumerate(derive(exact.T, made.T), FIRST_DERIVED):
                made[:, place] = column
    return made


# Each takes the parameters in double (p) and rounded (r), a line for each parameter, and returns what goes to
# places 12 and following. Which differences are taken in double follows kernels/rules.h.
_Derive = Callable[[Numbers, Numbers], tuple[Numbers, ...]]


def _rest(share: Numbers) -> Numbers:
    """1 - share, in the precision of `share`."""
    return np.subtract(1, share, dtype=share.dtype)


def _rests_of_betas(p: Numbers, r: Numbers) -> tuple[Numbers, ...]:
    return _rest(r[4]), _rest(r[5])


def _rest_of_first(p: Numbers, r: Numbers) -> tuple[Numbers, ...]:
    return (_rest(r[4]),)


def _exact_rest_of_first(p: Numbers, r: Numbers) -> tuple[Numbers, ...]:
    return (1 - p[4],)


def _nadam(p: Numbers, r: Numbers) -> tuple[Numbers, ...]:
    return 1 - p[4], 1 - p[5], 1 - p[7]


def _ftml(p: Numbers, r: Numbers) -> tuple[Numbers, ...]:
    return _rest(r[4]), _rest(r[5]), r[7] / r[0]


def _signum(p: Numbers, r: Numbers) -> tuple[Numbers, ...]:
    return _rest(r[4]), _rest(r[0] * r[5])


def _signsgd(p: Numbers, r: Numbers) -> tuple[Numbers, ...]:
    return (_rest(r[0] * r[1]),)


_DERIVED: dict[str, _Derive] = {
    "adam": _rests_of_betas,
    "adamw": _rests_of_betas,
    "adadelta": _exact_rest_of_first,
    "adamax": _exact_rest_of_first,
    "nadam": _nadam,
    "rmsprop": _rest_of_first,
    "rmsprop_centered": _rest_of_first,
    "ftml": _ftml,
    "signum": _signum,
    "signsgd": _signsgd,
}
