"""A range of ports: its syntax, and the choice of a free port in it."""

from __future__ import annotations

import socket

import pytest

from kvstore.errors import ConfigError
from kvstore.settings.ports import bound_in_range, port_range


def listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("text", "ports"),
    [
        ("", range(0)),
        ("7000", range(7000, 7001)),
        ("7000-7100", range(7000, 7101)),
        ("1-65535", range(1, 65536)),
    ],
)
def test_a_range(text: str, ports: range) -> None:
    assert port_range(text) == ports


@pytest.mark.parametrize(
    "text", ["x", "0-5", "7000-", "-7000", "7100-7000", "7000-65536", "7000:7100", "7 000"]
)
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(
        ConfigError, match="is not a range of ports from 1 to 65535: write it as in 7000-7100"
    ):
        port_range(text)


def test_without_a_range_nothing_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_PORTS", raising=False)
    assert bound_in_range(listening, OSError, "here") is None


def test_the_port_that_is_free_is_found_and_then_none_is() -> None:
    with listening(0) as one:
        port = one.getsockname()[1]
        text = f"{port}-{port + 20}"
        found = []
        try:
            with pytest.raises(ConfigError, match=f"none of the ports KVSTORE_PORTS={text} is free at here"):
                while True:
                    made = bound_in_range(listening, OSError, "here", text)
                    assert made is not None
                    found.append(made)
        finally:
            ports = {made.getsockname()[1] for made in found}
            for made in found:
                made.close()
    assert port not in ports
    assert len(ports) == len(found) > 0
    assert ports <= set(range(port, port + 21))


def test_a_port_that_is_held_without_listening_comes_last() -> None:
    with listening(0) as one:
        low = one.getsockname()[1]
    with socket.socket() as held:
        held.bind(("", low))
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made = bound_in_range(listening, OSError, "here", f"{low}-{low + 10}")
        assert made is not None
        with made:
            assert made.getsockname()[1] != low
