"""Addresses: what is one, which of them are here, and the way to another machine."""

from __future__ import annotations

import socket

import pytest

import kvstore as kv
from kvstore.settings import addresses


def test_the_loopback_is_an_interface() -> None:
    found = addresses.interfaces()
    assert found["lo"] == "127.0.0.1"
    assert "lo 127.0.0.1" in addresses.told(found)
    assert addresses.told({}) == "none with an IPv4 address"


def test_every_address_of_an_interface_is_here() -> None:
    assert all(addresses.is_here(number) for number in addresses.interfaces().values())
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
    assert addresses.resolved(host) == number


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
    assert addresses.towards("127.0.0.1") == "127.0.0.1"
    for number in addresses.interfaces().values():
        assert addresses.towards(number) == number


def test_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert addresses.towards("10.0.0.1") is None


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
    addresses.check("X", address)
    assert addresses.split(address) == parts


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_putting_together_and_taking_apart(host: str) -> None:
    address = addresses.tcp(host, 7)
    addresses.check("X", address)
    assert addresses.split(address) == (host if ":" not in host else "[::1]", 7)


@pytest.mark.parametrize(
    "address",
    ["", "127.0.0.1:1", "tcp://", "tcp://:1", "tcp://a", "tcp://a:", "tcp://a:65536", "tcp://a:-1", "tcp://::1:1",
     "tcp://a b:1", "tcp://a:1/x", "udp://a:1", "ipc://", "ipc://a b", "ipc://@" + "n" * 107, "tcp://a:\u0661"],
)  # fmt: skip
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(kv.ConfigError, match="KVSTORE_X"):
        addresses.check("KVSTORE_X", address)
