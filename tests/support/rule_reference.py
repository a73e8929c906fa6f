"""Every optimizer rule once more, in NumPy: the reference for tests of the compiled ones.

A rule takes the weight, the gradient, the tuple of states and the tuple of parameters, as rules.h lists them,
and changes weight and states in place. Arrays are all float32 or all float64; every operation is rounded to
that type, in the order that rules.h has.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
States: TypeAlias = "tuple[Array, ...]"
Params: TypeAlias = "tuple[Any, ...]"
Rule = Callable[..., None]

RULES: dict[str, Rule] = {}
# Rules that also need parameters unrounded: for integers, and for differences that are taken in double.
_EXACT = frozenset({"adadelta", "adamax", "nadam", "sgld"})


def rule(function: Rule) -> Rule:
    """Enter a rule under its name, and let it see its parameters as scalars of the weight's type."""
    name = function.__name__.lstrip("_")

    def typed(w: Array, g: Array, states: States, params: tuple[float, ...], at: int = 0) -> None:
        scalars = tuple(w.dtype.type(p) for p in params)
        extra = (params, at) if name in _EXACT else ()
        with np.errstate(all="ignore"):
            function(w, g, states, scalars, *extra)

    RULES[name] = typed
    return function


def rest(share: Any) -> Any:
    """Return 1 - share in the precision of `share`."""
    return type(share)(1) - share


def bounded(x: Array, bound: Any) -> Array:
    """Clip, leaving NaN alone."""
    x = np.where(x > bound, bound, x)
    clipped: Array = np.where(x < -bound, -bound, x)
    return clipped


def decayed(w: Array, g: Array, p: Params) -> Array:
    """Gradient rescaled, clipped, with the weight decay added."""
    total: Array = bounded(p[2] * g, p[3]) + p[1] * w
    return total


def sign(x: Array) -> Array:
    """Return -1, 0, 1, or NaN."""
    signs: Array = np.where(x > 0, 1, np.where(x < 0, -1, x)).astype(x.dtype)
    return signs


@rule
def _sgd(w: Array, g: Array, s: States, p: Params) -> None:
    w -= p[0] * decayed(w, g, p)


@rule
def _sgd_momentum(w: Array, g: Array, s: States, p: Params) -> None:
    (m,) = s
    m[...] = p[4] * m - p[0] * decayed(w, g, p)
    w += m


@rule
def _nag(w: Array, g: Array, s: States, p: Params) -> None:
    (m,) = s
    step = p[0] * decayed(w, g, p)
    m[...] = p[4] * m - step
    w += p[4] * m - step


def moments(x: Array, s: States, b1: Any, b2: Any, c1: Any, c2: Any) -> tuple[Array, Array]:
    """Move mean and variance on by one gradient."""
    m, v = s
    m[...] = b1 * m + c1 * x
    v[...] = b2 * v + c2 * (x * x)
    return m, v


@rule
def _adam(w: Array, g: Array, s: States, p: Params) -> None:
    m, v = moments(decayed(w, g, p), s, p[4], p[5], rest(p[4]), rest(p[5]))
    w -= p[0] * m / (np.sqrt(v) + p[6])


@rule
def _adamw(w: Array, g: Array, s: States, p: Params) -> None:
    m, v = moments(bounded(p[2] * g, p[3]), s, p[4], p[5], rest(p[4]), rest(p[5]))
    w -= p[0] * (m / (np.sqrt(v) + p[6]) + p[1] * w)


@rule
def _adagrad(w: Array, g: Array, s: States, p: Params) -> None:
    (h,) = s
    x = decayed(w, g, p)
    h += x * x
    w -= p[0] * (x / (np.sqrt(h) + p[4]))


@rule
def _adadelta(w: Array, g: Array, s: States, p: Params, exact: Params, at: int) -> None:
    a, b = s
    c = w.dtype.type(1 - exact[4])
    x = decayed(w, g, p)
    a[...] = p[4] * a + c * (x * x)
    step = np.sqrt(b + p[5]) / np.sqrt(a + p[5]) * x
    b[...] = p[4] * b + c * (step * step)
    w -= p[0] * step


@rule
def _adamax(w: Array, g: Array, s: States, p: Params, exact: Params, at: int) -> None:
    m, u = s
    x = decayed(w, g, p)
    faded = p[5] * u
    m[...] = p[4] * m + w.dtype.type(1 - exact[4]) * x
    u[...] = np.where(faded >= np.abs(x), faded, np.abs(x))
    w -= p[0] * (m / (u + p[6]))


@rule
def _nadam(w: Array, g: Array, s: States, p: Params, exact: Params, at: int) -> None:
    c1, c2, now = (w.dtype.type(1 - exact[i]) for i in (4, 5, 7))
    x = decayed(w, g, p)
    m, v = moments(x, s, p[4], p[5], c1, c2)
    mean = p[8] * (m / p[10]) + now * (x / p[9])
    w -= p[0] * (mean / (np.sqrt(v / p[11]) + p[6]))


@rule
def _rmsprop(w: Array, g: Array, s: States, p: Params) -> None:
    (v,) = s
    x = decayed(w, g, p)
    v[...] = p[4] * v + rest(p[4]) * (x * x)
    w[...] = bounded(w - p[0] * (x / (np.sqrt(v) + p[5])), p[6])


@rule
def _rmsprop_centered(w: Array, g: Array, s: States, p: Params) -> None:
    q, v, m = s
    x = decayed(w, g, p)
    q[...] = p[4] * q + rest(p[4]) * x
    v[...] = p[4] * v + rest(p[4]) * (x * x)
    m[...] = p[7] * m - p[0] * x / np.sqrt(v - q * q + p[5])
    w[...] = bounded(w + m, p[6])


@rule
def _ftrl(w: Array, g: Array, s: States, p: Params) -> None:
    z, h = s
    lr, wd, l1, beta = p[0], p[1], p[4], p[5]
    x = bounded(p[2] * g, p[3])
    before = np.sqrt(h)
    h += x * x
    root = np.sqrt(h)
    z += x - (root - before) / lr * w
    step = (np.where(z < 0, -l1, l1) - z) / ((beta + root) / lr + wd)
    w[...] = np.where(np.abs(z) <= l1, 0, step)


@rule
def _ftml(w: Array, g: Array, s: States, p: Params) -> None:
    d, v, z = s
    x = decayed(w, g, p)
    v[...] = p[5] * v + rest(p[5]) * (x * x)
    new = p[7] / p[0] * (np.sqrt(v / p[8]) + p[6])
    z[...] = p[4] * z + rest(p[4]) * x - (new - p[4] * d) * w
    d[...] = new
    w[...] = -z / new


@rule
def _signum(w: Array, g: Array, s: States, p: Params) -> None:
    (m,) = s
    m[...] = p[4] * m - rest(p[4]) * decayed(w, g, p)
    w[...] = rest(p[0] * p[5]) * w + p[0] * sign(m)


@rule
def _signsgd(w: Array, g: Array, s: States, p: Params) -> None:
    w[...] = rest(p[0] * p[1]) * w - p[0] * sign(g)


@rule
def _sgld(w: Array, g: Array, s: States, p: Params, exact: Params, at: int) -> None:
    seed, key, update, *first = (int(x) for x in exact[4:8])
    at += sum(first)
    noise = math.sqrt(exact[0]) * normal(np.arange(at, at + w.size), update, seed, key)
    w[...] = w - p[0] / w.dtype.type(2) * decayed(w, g, p) + noise.reshape(w.shape).astype(w.dtype)


def philox(counter: npt.NDArray[np.uint64], key: tuple[int, int]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 (Salmon et al., SC 2011): four words, in 64 bits each, for a row of `counter`."""
    low = np.uint64(0xFFFFFFFF)
    a, b, c, d = counter.T.copy()
    k0, k1 = key
    for _ in range(10):
        x, y = np.uint64(0xD2511F53) * a, np.uint64(0xCD9E8D57) * c
        a, b = (y >> np.uint64(32)) ^ b ^ np.uint64(k0), y & low
        c, d = (x >> np.uint64(32)) ^ d ^ np.uint64(k1), x & low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([a, b, c, d], axis=1)


def normal(elements: npt.NDArray[Any], update: int, seed: int, key: int) -> npt.NDArray[np.float64]:
    """Return the standard normal number of each element (Box and Muller 1958)."""
    places = elements.astype(np.uint64)
    counter = np.empty((len(places), 4), np.uint64)
    counter[:, 0], counter[:, 1] = places & np.uint64(0xFFFFFFFF), places >> np.uint64(32)
    counter[:, 2], counter[:, 3] = update % 2**32, update >> 32
    words = philox(counter, (seed, key))
    joined = words[:, 0::2] << np.uint64(32) | words[:, 1::2]
    u, v = ((joined >> np.uint64(12)).astype(np.float64) + 0.5).T * 2.0**-52
    return np.asarray(np.sqrt(-2.0 * np.log(u)) * np.cos(6.283185307179586 * v))


@rule
def _dcasgd(w: Array, g: Array, s: States, p: Params) -> None:
    (previous,) = s
    x = decayed(w, g, p)
    step = p[0] * (x * x * (w - previous) * p[4] + x)
    previous[...] = w
    w -= step


@rule
def _dcasgd_momentum(w: Array, g: Array, s: States, p: Params) -> None:
    m, previous = s
    x = decayed(w, g, p)
    m[...] = p[5] * m - p[0] * (x * x * (w - previous) * p[4] + x)
    previous[...] = w
    w += m


@rule
def _lamb_moments(w: Array, g: Array, s: States, p: Params) -> None:
    moments(bounded(p[2] * g, p[3]), s, p[4], p[5], rest(p[4]), rest(p[5]))


def lamb_direction(w: Array, s: States, p: Params) -> Array:
    """Return LAMB's step before it is scaled."""
    m, v = s
    direction: Array = m / p[7] / (np.sqrt(v / p[8]) + p[6]) + p[1] * w
    return direction


@rule
def _lamb_apply(w: Array, g: Array, s: States, p: Params) -> None:
    w -= p[0] * lamb_direction(w, s, p)


@rule
def _test(w: Array, g: Array, s: States, p: Params) -> None:
    w -= p[0] * (p[2] * g + p[1] * w)


def lamb_norms(w: Array, s: States, params: tuple[float, ...]) -> tuple[float, float]:
    """Return the sums of squares of the weight and of LAMB's direction, exactly rounded."""
    u = lamb_direction(w, s, tuple(w.dtype.type(p) for p in params))
    return _sum_of_squares(w), _sum_of_squares(u)


def _sum_of_squares(x: Array) -> float:
    return math.fsum(np.square(x.astype(np.float64)).ravel())


def group_adagrad(w: Array, g: Array, history: Array, params: tuple[float, ...]) -> None:
    """Apply one update to all rows; `history` has shape (rows, 1)."""
    lr, _, rescale, clip, eps = (w.dtype.type(p) for p in params)
    x = bounded(rescale * g, clip)
    history += _row_means((x * x).astype(np.float64)).astype(w.dtype)
    w -= lr * (x / (np.sqrt(history) + eps))


def _row_means(squares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mean of each row, summed in eight lanes as the compiled loop does."""
    rows, cols = squares.shape
    padded = np.zeros((rows, -(-cols // 8) * 8))
    padded[:, :cols] = squares
    lane = np.zeros((rows, 8))
    for block in padded.reshape(rows, -1, 8).transpose(1, 0, 2):
        lane += block
    quarter = lane[:, :4] + lane[:, 4:]
    total = (quarter[:, 0] + quarter[:, 2]) + (quarter[:, 1] + quarter[:, 3])
    return np.asarray(total / max(cols, 1)).reshape(rows, 1)
