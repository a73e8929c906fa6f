"""From a spec to its body: a function of (block, thread, image, scalar) for any target."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ..spec import CODECS, Spec
from . import casts, codecs, sums, updates
from .chunks import Body

_MAKERS = {"sum": sums.body, "update": updates.body, "cast": casts.body}


@cache
def body(spec: Spec) -> Body:
    """Return the body of a kernel; always the same one for a spec."""
    if spec.codec:
        return codecs.body(spec, import_module(f".{CODECS[spec.codec]}", __package__).CODEC)
    return _MAKERS[spec.op](spec)
