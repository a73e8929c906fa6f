"""Which processes are admitted, which are refused, and the messages on both sides."""

from __future__ import annotations

import logging
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pace
import pytest
import zmq

from kvstore.errors import AuthError
from kvstore.settings.keys import JobKeys
from kvstore.stores.parameter_server.transport.channel import ChannelPoller, DealerChannel, RouterChannel
from kvstore.stores.parameter_server.transport.context import ZmqContext
from kvstore.stores.parameter_server.transport.refusals import RefusalLog
from kvstore.stores.parameter_server.transport.zmq_auth import job_password

Contexts = Callable[..., ZmqContext]
PATIENCE = 20.0


@pytest.fixture
def router(context: Contexts, job_keys: dict[str, JobKeys], address: str) -> RouterChannel:
    return RouterChannel(context(job_keys["scheduler"]), address)


def refused(dealer: DealerChannel) -> str:
    start = time.monotonic()
    with pytest.raises(AuthError) as error:  # by the first, if it is that quick
        dealer.send([b"let me in"])
        dealer.receive(PATIENCE)
    assert time.monotonic() - start < PATIENCE / 2
    with pytest.raises(AuthError):
        dealer.send([b"please"])
    return str(error.value)


def test_the_jobs_processes_talk(
    router: RouterChannel, context: Contexts, job_keys: dict[str, JobKeys]
) -> None:
    for name in ("worker", "server"):
        dealer = DealerChannel(context(job_keys[name]), router.address, name.encode())
        dealer.send([b"hello", bytes(1 << 20)])
        found = router.receive(PATIENCE)
        assert found is not None
        assert found[0] == name.encode()
        assert len(found[1][1]) == 1 << 20
        router.send(found[0], [b"welcome"])
        assert dealer.receive(PATIENCE)


def test_a_server_is_known_by_its_own_key(
    context: Contexts, job_keys: dict[str, JobKeys], address: str
) -> None:
    router = RouterChannel(context(job_keys["server"]), address)
    good = DealerChannel(context(job_keys["worker"]), router.address, b"worker", "server", 0)
    good.send([b"hello"])
    assert router.receive(PATIENCE)
    bad = DealerChannel(
        context(job_keys["worker"]), router.address, b"worker 2"
    )  # takes it for the scheduler
    text = refused(bad)
    assert f"scheduler at {router.address} refuses" in text
    assert "another key than this process expects" in text


def test_a_key_that_is_not_on_the_list_is_refused(
    router: RouterChannel, context: Contexts, job_keys: dict[str, JobKeys], caplog: pytest.LogCaptureFixture
) -> None:
    text = refused(DealerChannel(context(job_keys["stranger"]), router.address, b"stranger"))
    assert f"scheduler at {router.address} refuses this process: it does not know the key" in text
    assert "one launcher" in text
    assert router.receive(0.1) is None
    lines = [one.getMessage() for one in caplog.records if one.name == "kvstore.wire"]
    assert len(lines) == 1, "one line, although it tries again and again"
    assert job_keys["stranger"].public[:8].decode() in lines[0]
    assert job_keys["stranger"].secret.decode() not in lines[0]


def test_a_client_without_keys_is_refused(
    router: RouterChannel, context: Contexts, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):  # all that the router sees may be that it hangs up
        text = refused(DealerChannel(context(), router.address, b"bare"))
        assert "requires keys" in text
    assert router.receive(0.1) is None
    end = pace.deadline(PATIENCE)
    while not (lines := [one for one in caplog.records if one.name == "kvstore.wire"]):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert len(lines) == 1
    assert router.address.rpartition(":")[0] in lines[0].getMessage()


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize(("times", "lines"), [(2, 0), (3, 1)])
def test_a_client_that_hangs_up_has_no_line_until_it_does_so_again(
    context: Contexts,
    job_keys: dict[str, JobKeys],
    caplog: pytest.LogCaptureFixture,
    times: int,
    lines: int,
    secured: bool,
) -> None:
    """It may be a process of the job that has ended."""
    router = RouterChannel(context(job_keys["scheduler"] if secured else None), "tcp://127.0.0.1:0")
    port = int(router.address.rpartition(":")[2])
    for _ in range(times):
        with socket.create_connection(("127.0.0.1", port)):
            pass
    time.sleep(0.3)  # there is no event to wait for
    assert len([one for one in caplog.records if one.name == "kvstore.wire"]) == lines


def test_a_client_with_keys_does_not_talk_in_the_clear(
    context: Contexts, job_keys: dict[str, JobKeys], address: str
) -> None:
    router = RouterChannel(context(), address)
    text = refused(DealerChannel(context(job_keys["worker"]), router.address, b"worker"))
    assert "it has no keys" in text
    assert router.receive(0.1) is None


def test_a_server_without_a_key_in_the_list_is_told(context: Contexts, job_keys: dict[str, JobKeys]) -> None:
    with pytest.raises(AuthError, match=r"no key of server 1 at tcp://127\.0\.0\.1:1"):
        DealerChannel(context(job_keys["worker"]), "tcp://127.0.0.1:1", b"worker", "server", 1)


def test_a_poller_shows_the_refused(
    router: RouterChannel, context: Contexts, job_keys: dict[str, JobKeys]
) -> None:
    poller = ChannelPoller()
    dealer = DealerChannel(context(job_keys["stranger"]), router.address, b"stranger")
    poller.add_channel(dealer)
    assert poller.wait(PATIENCE) == [dealer]
    with pytest.raises(AuthError):
        dealer.receive()
    poller.remove_channel(dealer)
    poller.close()


def test_refused_clients_do_not_disturb_the_others(
    router: RouterChannel, context: Contexts, job_keys: dict[str, JobKeys]
) -> None:
    strangers = [DealerChannel(context(job_keys["stranger"]), router.address, b"s%d" % n) for n in range(10)]
    worker = DealerChannel(context(job_keys["worker"]), router.address, b"worker")
    for turn in range(50):
        worker.send([b"%d" % turn])
        found = router.receive(PATIENCE)
        assert found is not None
        assert found[0] == b"worker"
        time.sleep(0.01)
    assert len(strangers) == 10


def test_the_list_of_keys_counts_not_knowledge_of_the_servers_key(job_keys: dict[str, JobKeys]) -> None:
    assert job_keys["stranger"].scheduler == job_keys["scheduler"].public
    assert job_keys["stranger"].public not in job_keys["scheduler"].allowed


def test_another_process_is_refused_in_time(
    router: RouterChannel,
    job_keys: dict[str, JobKeys],
    tmp_path: Path,
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    (tmp_path / "keys").write_bytes(job_keys["stranger"].to_json())
    refused_one = start("client", router.address, str(tmp_path / "keys"), "stranger")
    bare = start("client", router.address, "", "bare")
    for process in (refused_one, bare):
        out, _ = process.communicate(timeout=pace.seconds(PATIENCE))
        name, seconds, *_ = out.split()
        assert name == "AuthError", out
        assert float(seconds) < 10
        assert process.returncode == 0


def test_nothing_can_be_read_on_the_way(context: Contexts, job_keys: dict[str, JobKeys]) -> None:
    # A tap stands in the place of the router: the dealer's handshake reveals nothing.
    with zmq.Context() as bare, bare.socket(zmq.STREAM) as tap:
        tap.setsockopt(zmq.LINGER, 0)
        tap.setsockopt(zmq.RCVTIMEO, 500)
        port = tap.bind_to_random_port("tcp://127.0.0.1")
        dealer = DealerChannel(context(job_keys["worker"]), f"tcp://127.0.0.1:{port}", b"worker")
        dealer.send([b"the weights of the model"])
        seen = b""
        try:
            while len(seen) < 10:
                seen += tap.recv_multipart()[1]
        except zmq.Again:
            pass
        assert seen
        assert b"weights" not in seen


# --------------------------------------------------------------------------------------------- one line each


def test_a_peer_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    refusals = RefusalLog(lambda: now[0])
    for second in range(150):
        now[0] = 100.0 + second
        refusals.note_refusal("peer a", "bad key")
    refusals.note_refusal("peer b", "bad key")
    lines = [one.getMessage() for one in caplog.records]
    assert lines == [
        "refused peer a: bad key",
        "refused peer a: bad key (59 more since the last line)",
        "refused peer a: bad key (59 more since the last line)",
        "refused peer b: bad key",
    ]
    assert refusals.count == 151


def test_peers_without_end_take_no_memory_without_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "kvstore.wire")
    refusals = RefusalLog(lambda: 0.0)
    for number in range(5000):
        refusals.note_refusal(f"peer {number}", "bad key")
    assert refusals.count == 5000
    assert len(refusals._last) <= 1024


def test_a_refusal_names_the_port_that_was_taken(
    context: Contexts, job_keys: dict[str, JobKeys], caplog: pytest.LogCaptureFixture
) -> None:
    router = RouterChannel(context(job_keys["scheduler"]), "tcp://127.0.0.1:0")
    assert not router.address.endswith(":0")
    host, _, port = router.address.rpartition("//")[2].rpartition(":")
    with socket.create_connection((host, int(port)), PATIENCE) as stranger:
        stranger.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48)
    end = pace.deadline(120)
    while not caplog.messages and time.monotonic() < end:
        time.sleep(0.01)
    assert f"a connection to {router.address}" in caplog.messages[0]


def test_a_process_of_another_job_is_told_so(
    context: Callable[..., ZmqContext], address: str, caplog: pytest.LogCaptureFixture
) -> None:
    router = RouterChannel(context(job="ours"), address)
    text = refused(DealerChannel(context(job="theirs"), router.address, b"worker"))
    assert "another job: KVSTORE_JOB" in text
    assert router.receive(0.0) is None
    assert "its password is not of this job" in caplog.text
    assert "ours" not in caplog.text + text
    assert job_password("theirs").decode() not in caplog.text


def test_a_job_may_get_its_name_after_its_address(context: Callable[..., ZmqContext]) -> None:
    made = context(job="nobody knows this")
    router = RouterChannel(made, "tcp://127.0.0.1:0")
    made.job = router.address
    dealer = DealerChannel(context(job=router.address), router.address, b"worker")
    dealer.send([b"hello"])
    assert router.receive(20)
