"""From a spec to its body: a function of (block, thread, image, scalar) for any target."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ..spec import CODECS, KernelSpec
from . import casts, codecs, sums, updates
from .chunks import Body

_MAKERS = {"sum": sums.sum_body, "update": updates.update_body, "cast": casts.cast_body}


@cache
def body_of_spec(spec: KernelSpec) -> Body:
    """Return the body of a kernel; always the same one for a spec."""
    if spec.codec:
        return codecs.codec_body(spec, import_module(f".{CODECS[spec.codec]}", __package__).CODEC)
    return _MAKERS[spec.op](spec)
