"""Requirements as metadata has them, and versions that fit."""

from __future__ import annotations

from importlib import metadata

import pytest

from kvstore.observe.doctor.installation import (
    EXTRAS,
    RequiredDistribution,
    is_within,
    required_distributions,
    version_of,
)

LINES = [
    "numpy>=1.26",
    "rich>=13.7; extra == 'cli'",
    'numba-cuda[cu13]<0.31,>=0.30.4; extra == "cuda"',
    "mpi4py>=4.1; sys_platform == 'linux' and extra == 'test'",
    "kvstore-train[bfloat16]; extra == 'test'",
]


def test_lines_are_read() -> None:
    found = {extra: required_distributions(extra, LINES) for extra in ("", "cli", "cuda", "test")}
    assert {extra: [one[:2] for one in wanted] for extra, wanted in found.items()} == {
        "": [("numpy", ">=1.26")],
        "cli": [("rich", ">=13.7")],
        "cuda": [("numba-cuda", "<0.31,>=0.30.4")],
        "test": [("mpi4py", ">=4.1")],
    }


@pytest.mark.parametrize(
    ("version", "versions", "fits"),
    [
        ("0.68.1", ">=0.68,<0.69", True),
        ("0.69", ">=0.68,<0.69", False),
        ("0.67.9", ">=0.68,<0.69", False),
        ("1.26.0", ">=1.26", True),
        ("1.26", "==1.26.0", True),
        ("2.10", ">=2.9", True),  # numbers, not texts
        ("2.4.0rc1", ">=2.4", True),
        ("3.0+cu13", "!=3.0", False),
        ("9", "", True),
    ],
)
def test_versions_fit(version: str, versions: str, fits: bool) -> None:
    assert is_within(version, versions) is fits


def test_the_distribution_of_this_environment_has_what_it_requires() -> None:
    found = required_distributions("")
    assert {"numpy", "pyzmq"} <= {one.name for one in found}
    assert all(one.fits for one in found), found


def test_each_extra_for_users_is_one_of_the_distribution() -> None:
    declared = metadata.metadata("kvstore-train").get_all("Provides-Extra") or []
    assert set(declared) - {"test", "bench", "docs"} == set(EXTRAS)
    assert all(required_distributions(name) for name in EXTRAS)


def test_what_is_not_installed_has_no_version() -> None:
    assert version_of("no-such-distribution") is None
    (one,) = required_distributions("", ["no-such-distribution>=1"])
    assert one == RequiredDistribution("no-such-distribution", ">=1", None)
    assert not one.fits
    assert str(one) == "no-such-distribution is not installed"
