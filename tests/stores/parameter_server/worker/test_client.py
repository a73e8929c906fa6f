"""An invalid request of a worker must not be repeated again and again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

import kvstore as kv
from kvstore.stores.parameter_server.protocol.messages import Failure


@pytest.fixture(params=["dist_sync:1"])
def store_name(request: pytest.FixtureRequest, on_servers: Callable[[str], str]) -> str:
    return on_servers(str(request.param))


def test_a_question_that_cannot_be_sent_leaves_the_store_as_it_was(store: kv.KVStore) -> None:
    store.init("a", np.zeros(3, np.float32))
    for head, body in ((1 << 80, ""), (0, "\ud800")):
        with pytest.raises(kv.ArgumentError):
            store.send_command_to_servers(head, body)
    store.push("a", np.ones(3, np.float32))
    assert len(store) == 1


def test_a_threshold_that_servers_refuse_is_refused_at_once(store: kv.KVStore) -> None:
    with pytest.raises(kv.ConfigError, match="threshold of '2bit' is inf"):
        store.set_gradient_compression({"type": "2bit", "threshold": 1e39})


def test_a_loss_is_reported_once_though_a_push_without_a_waiter_failed_too(
    store: kv.KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.init("a", np.zeros(3, np.float32))
    client = store._backend._client  # type: ignore[attr-defined]
    monkeypatch.setattr(client, "_await_report", client._note_told)  # no word of the scheduler is awaited
    for told in (False, True):
        client._operations.failed = Failure("PeerLostError", "worker 1 is lost", "worker", 1)
        with pytest.raises(kv.PeerLostError) if not told else contextlib.nullcontext():
            store.push("a", np.ones(3, np.float32))
    client._operations.failed = Failure("UpdaterError", "it has failed")
    with pytest.raises(kv.UpdaterError):
        store.pull("a", out=np.empty(3, np.float32))
