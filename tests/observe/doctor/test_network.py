"""Interfaces, names, ports, encryption, and the permissions of keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import zmq
from observation.checks import finding

from kvstore.observe.doctor import network
from kvstore.stores.parameter_server.transport import ciphers


def test_interfaces_are_named_without_addresses() -> None:
    found = finding(network.interfaces, {"lo": "127.0.0.1", "eth0": "192.0.2.7", "ib0": "198.51.100.7"})
    assert found.text.startswith("eth0, ib0; ")
    assert "DMLC_INTERFACE" in found.text
    assert "192.0.2.7" not in found.text
    assert "loopback" in finding(network.interfaces, {"lo": "127.0.0.1"}).text
    assert finding(network.interfaces).level == "ok"


def test_a_host_name_without_an_address_is_a_warning() -> None:
    found = finding(network.host_name, "a..b")  # no name at all: no resolver is asked for it
    assert found.level == "warning"
    assert "/etc/hosts" in found.cure
    assert finding(network.host_name, "127.0.0.1").level == "ok"


def test_ports() -> None:
    assert finding(network.ports).level == "ok"
    found = finding(network.ports, "192.0.2.1")  # an address for documents: no machine has it
    assert found.level == "error"
    assert "--transport ipc" in found.cure


def test_encryption(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zmq.zmq_version() in finding(network.encryption).text
    monkeypatch.setattr(zmq, "has", lambda what: True)
    monkeypatch.setattr(ciphers, "available_ciphers", lambda: (1, 2))
    assert finding(network.encryption).level == "ok"
    monkeypatch.setattr(ciphers, "available_ciphers", lambda: ())
    assert finding(network.encryption).level == "warning"
    monkeypatch.setattr(zmq, "has", lambda what: False)
    assert "no CURVE" in finding(network.encryption).text


@pytest.mark.parametrize(
    ("mode", "level"), [(0o600, "ok"), (0o400, "ok"), (0o640, "error"), (0o604, "error")]
)
def test_modes_of_keys(tmp_path: Path, mode: int, level: str) -> None:
    path = tmp_path / "worker-0.json"
    path.write_text("the keys")
    path.chmod(mode)
    found = finding(network.keys_file, {"KVSTORE_KEYS_FILE": str(path)})
    assert found.level == level
    assert f"mode {mode:o}" in found.text
    assert ("chmod 600" in found.cure) is (level == "error")
    assert str(path) not in str(found)
    assert "the keys" not in str(found)


def test_keys_that_are_not_there(tmp_path: Path) -> None:
    found = finding(network.keys_file, {"KVSTORE_KEYS_FILE": str(tmp_path / "none")})
    assert found.level == "error"
    assert "kvstore keys" in found.cure
    assert finding(network.keys_file, {}).level == "ok"
