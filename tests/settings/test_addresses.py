"""Addresses: valid ones, those of this machine, and the route to another machine."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pace
import pytest

import kvstore as kv
from kvstore.settings import addresses


def test_the_loopback_is_an_interface() -> None:
    found = addresses.interface_addresses()
    assert found["lo"] == "127.0.0.1"
    assert "lo 127.0.0.1" in addresses.addresses_text(found)
    assert addresses.addresses_text({}) == "none with an address"


def test_every_address_of_an_interface_is_here() -> None:
    assert all(addresses.is_here(number) for number in addresses.interface_addresses().values())
    assert not addresses.is_here("192.0.2.77")


@pytest.mark.parametrize(
    ("host", "number"),
    [
        ("localhost", "127.0.0.1"),
        ("10.1.2.3", "10.1.2.3"),
        ("::1", "::1"),
        ("nowhere.invalid", None),
        ("a" * 300, None),
    ],
)
def test_hosts_are_looked_up(host: str, number: str | None) -> None:
    assert addresses.resolve_host(host) == number


@pytest.mark.parametrize(
    ("number", "loopback", "wildcard"),
    [
        ("127.0.0.1", True, False),
        ("127.8.9.1", True, False),
        ("::1", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("10.0.0.1", False, False),
        ("fe80::1%eth0", False, False),
    ],
)
def test_what_an_address_reaches(number: str, loopback: bool, wildcard: bool) -> None:
    assert (addresses.is_loopback(number), addresses.is_wildcard(number)) == (loopback, wildcard)


def test_the_way_to_ourselves_begins_at_the_same_address() -> None:
    assert addresses.route_address("127.0.0.1") == "127.0.0.1"
    for number in addresses.interface_addresses().values():
        assert addresses.route_address(number) == number


def test_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert addresses.route_address("10.0.0.1") is None


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("tcp://127.0.0.1:4711", ("127.0.0.1", 4711)),
        ("tcp://node-3.cluster_a:0", ("node-3.cluster_a", 0)),
        ("tcp://[::1]:65535", ("[::1]", 65535)),
        ("tcp://[fe80::1%eth0]:1", ("[fe80::1%eth0]", 1)),
        ("ipc://@kvstore/a", ("", 0)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    addresses.check_address("X", address)
    assert addresses.split_address(address) == parts


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_putting_together_and_taking_apart(host: str) -> None:
    address = addresses.tcp_address(host, 7)
    addresses.check_address("X", address)
    assert addresses.split_address(address) == (host if ":" not in host else "[::1]", 7)


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:1", "tcp://", "tcp://:1", "tcp://a", "tcp://a:", "tcp://a:65536", "tcp://a:-1", "tcp://::1:1",
     "tcp://a b:1", "tcp://a:1/x", "udp://a:1", "ipc://", "ipc://a b", "ipc://@" + "n" * 107, "tcp://a:\u0661"],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(kv.ConfigError, match="KVSTORE_X"):
        addresses.check_address("KVSTORE_X", address)


# ---------------------------------------------------------------------------------------- a host without IPv4

UNSHARE, IP = shutil.which("unshare") or "", shutil.which("ip") or ""
#: Makes a network of its own with one interface of these addresses, and runs a command in it.
NETWORK = f'{IP} link set lo up && {IP} -4 addr flush dev lo && {{}} && exec "$@"'
SIX_ALONE = f"{IP} -6 addr replace ::1/128 dev lo && {IP} -6 addr add fd00:1::5/128 dev lo nodad"
NO_ADDRESS = f"{IP} -6 addr flush dev lo"


def inside(network: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a network without IPv4."""
    way = [UNSHARE, "--net", "sh", "-c", NETWORK.format(network), "sh"]
    if not (UNSHARE and IP) or subprocess.run([*way, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no networks with IPv6 here")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return subprocess.run(
        [*way, sys.executable, *arguments], cwd=folder, env=kept, capture_output=True, text=True,
        timeout=pace.seconds(100), check=False,
    )  # fmt: skip


SHOW = """
import json
from kvstore.settings import addresses
from kvstore.observe.doctor import network
print(json.dumps([addresses.interface_addresses(), addresses.loopback_address(), network.ports().level]))
"""


def test_addresses_of_a_host_with_ipv6_alone(tmp_path: Path) -> None:
    found: Any = json.loads(inside(SIX_ALONE, "-c", SHOW, folder=tmp_path).stdout)
    assert found[0]["lo"] in ("::1", "fd00:1::5")
    assert found[1:] == ["::1", "ok"]


def test_the_loopback_of_this_host() -> None:
    assert addresses.loopback_address() == "127.0.0.1"


WORKER = """
import numpy as np
import kvstore as kv
store = kv.create("dist_sync")
store.init("w", np.zeros(3, np.float32))
store.push("w", np.ones(3, np.float32))
store.pull("w", out=(out := np.zeros(3, np.float32)))
print(out.tolist())
"""


@pytest.mark.parametrize("options", [[], ["--host", "fd00:1::5"]], ids=["loopback", "address"])
def test_a_job_on_a_host_with_ipv6_alone(options: list[str], tmp_path: Path) -> None:
    """Before, it was to set KVSTORE_HOST "to one of none"."""
    (tmp_path / "worker.py").write_text(WORKER)
    command = ["-m", "kvstore.launch", "run", "-n", "2", "-s", "1", "--no-prefix", *options, "worker.py"]
    done = inside(SIX_ALONE, *command, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[2.0, 2.0, 2.0]\n" * 2), done.stderr


@pytest.mark.parametrize(
    ("network", "words"),
    [
        (SIX_ALONE, "set KVSTORE_HOST (--host) to one of lo "),
        (NO_ADDRESS, "bring one up (ip link set lo up)"),
    ],
    ids=["IPv6", "none"],
)
def test_a_wrong_address_names_those_that_are_here(network: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = ["-m", "kvstore.launch", "run", "-n", "2", "-s", "1", "--host", "10.0.0.1", "worker.py"]
    done = inside(network, *command, folder=tmp_path)
    assert done.returncode == 1
    assert words in done.stderr
    assert "none" not in done.stderr
