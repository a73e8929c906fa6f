"""Loops that are right in one process are right here: calls between backward and step, passes, hooks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

BODY = "frameworks.procs_torch_loops"
REPEATS = int(os.environ.get("KVSTORE_TEST_REPEATS", "1"))


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["shared", "dist_sync"])
def test_weights_are_those_of_one_process(
    name: str, whole: bool, same: Callable[..., Any], work: Callable[..., list[Any]]
) -> None:
    (expected,) = work("run_alone", workers=1, body=BODY)
    found = same("run_loops", name, {"whole_steps": True} if whole else {}, REPEATS, body=BODY)
    assert found.keys() == expected.keys()
    for loop, (first, *others) in found.items():
        assert all(other == first for other in others), loop
        np.testing.assert_allclose(first, expected[loop], rtol=2e-5, atol=1e-6, err_msg=loop)
