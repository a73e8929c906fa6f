"""Optimizer rules, for one element: what kernels/rules.h states, a third time; tests hold all of them equal.

A rule takes the weight, the gradient, three states (those it has not are passed through) and the constants
that `constants` made, and returns the new weight and states. Numbers are all float32 or all float64. The
constants begin with learning rate, weight decay, rescale_grad and clip bound; kernels/rules.h says what
follows at each rule; a rule that reads places from 12 on names them before it.

Comparisons are written so that NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .intrinsics import absolute_value, divide, dual, one_like, select, square_root, zero_like

Numbers = npt.NDArray[Any]
Real = Any
Constants = Any  # a tuple of WIDTH numbers
Updated = tuple[Real, Real, Real, Real]
Rule = Callable[[Real, Real, Real, Real, Real, Constants], Updated]

# Maps the parameters in double (p) and rounded (r), a line for each parameter, to the numbers at places 12
# and following. Which differences are computed in double follows kernels/rules.h.
Derive = Callable[[Numbers, Numbers], tuple[Numbers, ...]]

RULES: dict[str, Rule] = {}
DERIVED: dict[str, Derive] = {}


def _rule(function: Rule) -> Rule:
    RULES[function.__name__.lstrip("_")] = function
    return dual(function)


def _rule_with(derive: Derive) -> Callable[[Rule], Rule]:
    """Register a rule that reads derived numbers, and the function that computes them."""

    def register_rule(function: Rule) -> Rule:
        DERIVED[function.__name__.lstrip("_")] = derive
        return _rule(function)

    return register_rule


def _one_minus(share: Numbers) -> Numbers:
    """1 - share, in the precision of `share`."""
    return np.subtract(1, share, dtype=share.dtype)


@dual
def clip_to(x: Real, bound: Real) -> Real:
    """Clip; NaN stays NaN."""
    x = select(x > bound, bound, x)
    return select(x < -bound, -bound, x)


@dual
def decayed_gradient(w: Real, g: Real, p: Constants) -> Real:
    """Gradient rescaled, clipped, with the weight decay added."""
    return clip_to(p[2] * g, p[3]) + p[1] * w


@dual
def sign(x: Real) -> Real:
    """Return -1, 0 or 1; NaN for NaN."""
    up = select(x > zero_like(x), one_like(x), x)
    return select(x < zero_like(x), -one_like(x), up)


@_rule
def _sgd(w: Real, g: Real, a: Real, b: Real, c: Real, p: Constants) -> Updated:
    return w - p[0] * decayed_gradient(w, g, p), a, b, c


@_rule
def _sgd_momentum(w: Real, g: Real, m: Real, b: Real, c: Real, p: Constants) -> Updated:
    m = p[4] * m - p[0] * decayed_gradient(w, g, p)
    return w + m, m, b, c


@_rule
def _nag(w: Real, g: Real, m: Real, b: Real, c: Real, p: Constants) -> Updated:
    step = p[0] * decayed_gradient(w, g, p)
    m = p[4] * m - step
    return w + (p[4] * m - step), m, b, c


@_rule_with(lambda p, r: (_one_minus(r[4]), _one_minus(r[5])))
def _adam(w: Real, g: Real, m: Real, v: Real, c: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    m = p[4] * m + p[12] * x
    v = p[5] * v + p[13] * (x * x)
    return w - divide(p[0] * m, square_root(v) + p[6]), m, v, c


@_rule_with(lambda p, r: (_one_minus(r[4]), _one_minus(r[5])))
def _adamw(w: Real, g: Real, m: Real, v: Real, c: Real, p: Constants) -> Updated:
    x = clip_to(p[2] * g, p[3])
    m = p[4] * m + p[12] * x
    v = p[5] * v + p[13] * (x * x)
    return w - p[0] * (divide(m, square_root(v) + p[6]) + p[1] * w), m, v, c


@_rule
def _adagrad(w: Real, g: Real, h: Real, b: Real, c: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    h = h + x * x
    return w - p[0] * divide(x, square_root(h) + p[4]), h, b, c


@_rule_with(lambda p, r: (1 - p[4],))
def _adadelta(w: Real, g: Real, a: Real, b: Real, c: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    a = p[4] * a + p[12] * (x * x)
    step = divide(square_root(b + p[5]), square_root(a + p[5])) * x
    b = p[4] * b + p[12] * (step * step)
    return w - p[0] * step, a, b, c


@_rule_with(lambda p, r: (1 - p[4],))
def _adamax(w: Real, g: Real, m: Real, u: Real, c: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    size = absolute_value(x)
    faded = p[5] * u
    m = p[4] * m + p[12] * x
    u = select(faded >= size, faded, size)
    return w - p[0] * divide(m, u + p[6]), m, u, c


@_rule_with(lambda p, r: (1 - p[4], 1 - p[5], 1 - p[7]))
def _nadam(w: Real, g: Real, m: Real, v: Real, c: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    m = p[4] * m + p[12] * x
    v = p[5] * v + p[13] * (x * x)
    mean = p[8] * divide(m, p[10]) + p[14] * divide(x, p[9])
    return w - p[0] * divide(mean, square_root(divide(v, p[11])) + p[6]), m, v, c


@_rule_with(lambda p, r: (_one_minus(r[4]),))
def _rmsprop(w: Real, g: Real, v: Real, b: Real, c: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    v = p[4] * v + p[12] * (x * x)
    return clip_to(w - p[0] * divide(x, square_root(v) + p[5]), p[6]), v, b, c


@_rule_with(lambda p, r: (_one_minus(r[4]),))
def _rmsprop_centered(w: Real, g: Real, q: Real, v: Real, m: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    q = p[4] * q + p[12] * x
    v = p[4] * v + p[12] * (x * x)
    m = p[7] * m - divide(p[0] * x, square_root(v - q * q + p[5]))
    return clip_to(w + m, p[6]), q, v, m


@_rule
def _ftrl(w: Real, g: Real, z: Real, h: Real, c: Real, p: Constants) -> Updated:
    x = clip_to(p[2] * g, p[3])
    before = square_root(h)
    h = h + x * x
    after = square_root(h)
    z = z + (x - divide(after - before, p[0]) * w)
    step = divide(select(z < zero_like(z), -p[4], p[4]) - z, divide(p[5] + after, p[0]) + p[1])
    return select(absolute_value(z) <= p[4], zero_like(z), step), z, h, c


@_rule_with(lambda p, r: (_one_minus(r[4]), _one_minus(r[5]), r[7] / r[0]))
def _ftml(w: Real, g: Real, d: Real, v: Real, z: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    v = p[5] * v + p[13] * (x * x)
    new = p[14] * (square_root(divide(v, p[8])) + p[6])
    z = p[4] * z + p[12] * x - (new - p[4] * d) * w
    return divide(-z, new), new, v, z


@_rule_with(lambda p, r: (_one_minus(r[4]), _one_minus(r[0] * r[5])))
def _signum(w: Real, g: Real, m: Real, b: Real, c: Real, p: Constants) -> Updated:
    m = p[4] * m - p[12] * decayed_gradient(w, g, p)
    return p[13] * w + p[0] * sign(m), m, b, c


@_rule_with(lambda p, r: (_one_minus(r[0] * r[1]),))
def _signsgd(w: Real, g: Real, a: Real, b: Real, c: Real, p: Constants) -> Updated:
    return p[12] * w - p[0] * sign(g), a, b, c


@_rule
def _dcasgd(w: Real, g: Real, previous: Real, b: Real, c: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    step = p[0] * (x * x * (w - previous) * p[4] + x)
    return w - step, w, b, c


@_rule
def _dcasgd_momentum(w: Real, g: Real, m: Real, previous: Real, c: Real, p: Constants) -> Updated:
    x = decayed_gradient(w, g, p)
    m = p[5] * m - p[0] * (x * x * (w - previous) * p[4] + x)
    return w + m, m, w, c


@_rule
def _test(w: Real, g: Real, a: Real, b: Real, c: Real, p: Constants) -> Updated:
    return w - p[0] * (p[2] * g + p[1] * w), a, b, c
