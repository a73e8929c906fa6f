"""A check of `kvstore doctor`, called with the arguments of a test."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from kvstore.observe.doctor.checks import CheckFinding
from kvstore.observe.doctor.table import CHECKS, self_test_checks


def finding(look: Callable[..., CheckFinding], *arguments: Any, **more: Any) -> CheckFinding:
    """Return the line of the report that the row of a function makes of its outcome."""
    row = next(one for one in itertools.chain(CHECKS, self_test_checks()) if one.function is look)
    return row._replace(function=functools.partial(look, *arguments, **more)).run()
