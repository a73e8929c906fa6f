"""From a spec to its body: a function of (block, thread, image, scalar) for any target."""

from __future__ import annotations

from functools import cache

from ..spec import Spec
from . import casts, codecs, one_bit, sums, two_bit, updates
from .chunks import Body

_CODECS = {"2bit": two_bit.CODEC, "1bit": one_bit.CODEC}
_MAKERS = {"sum": sums.body, "update": updates.body, "cast": casts.body}


@cache
def body(spec: Spec) -> Body:
    """Return the body of a kernel; always the same one for a spec."""
    if spec.codec:
        return codecs.body(spec, _CODECS[spec.codec])
    return _MAKERS[spec.op](spec)
