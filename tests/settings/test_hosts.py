"""Which processes count as those of one host."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from kvstore.errors import ConfigError
from kvstore.settings.hosts import host_identity, is_same_host
from kvstore.settings.options import store_config

CODE = "from kvstore.settings.hosts import host_identity; print(host_identity())"


def test_processes_of_a_machine_are_of_one_host() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == host_identity()


def test_an_address_of_its_own_is_a_host_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_identity()
    monkeypatch.setenv("KVSTORE_HOST", "127.0.0.2")
    assert host_identity() != before


def test_another_network_namespace_is_another_host() -> None:
    unshare = [shutil.which("unshare") or "", "--net"]
    if not unshare[0] or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespaces here")
    found = subprocess.run([*unshare, sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() != host_identity()


@pytest.mark.parametrize(
    ("one", "other", "beside"),
    [
        ("", "", True),
        ("127.0.0.2", "127.0.0.2", True),
        ("127.0.0.2", "", True),
        ("", "127.0.0.2", True),
        ("127.0.0.2", "127.0.0.3", False),
    ],
)
def test_processes_that_share_memory(
    monkeypatch: pytest.MonkeyPatch, one: str, other: str, beside: bool
) -> None:
    found = []
    for address in (one, other):
        monkeypatch.setenv("KVSTORE_HOST", address)
        found.append(host_identity())
    assert is_same_host(*found) is beside
    boot, *rest = found[0].split(" ")
    assert not is_same_host(" ".join((boot + "0", *rest)), found[1])
    assert not is_same_host(found[0], "")


@pytest.mark.parametrize("value", ["auto", "host", "flat"])
def test_what_can_be_asked_for(value: str) -> None:
    assert store_config({"hierarchy": value}, {}).hierarchy == value
    assert store_config({}, {"KVSTORE_HIERARCHY": value}).hierarchy == value


def test_what_cannot_be_asked_for() -> None:
    assert store_config({}, {}).hierarchy == "flat"
    with pytest.raises(ConfigError, match="'auto', 'host' or 'flat'"):
        store_config({"hierarchy": "hosts"}, {})
