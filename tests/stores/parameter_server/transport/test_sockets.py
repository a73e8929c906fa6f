"""The messages that the sockets of each role receive, and when."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Hashable
from itertools import pairwise

import pace
import pytest

from kvstore.observe.native._observe import Counters
from kvstore.settings.roles import Roles
from kvstore.stores.parameter_server.protocol.messages import AttachRequest, HelloRequest, PingRequest
from kvstore.stores.parameter_server.transport.channel import RouterChannel
from kvstore.stores.parameter_server.transport.context import ZmqContext
from kvstore.stores.parameter_server.transport.sockets import (
    ECHO,
    SCHEDULER,
    SchedulerSockets,
    ServerSockets,
    WorkerSockets,
)

JOB = "sockets"


def roles(role: str, scheduler: str, workers: int = 1) -> Roles:
    return Roles(role, 0, workers, 1, JOB, scheduler, "127.0.0.1", 0, None, False)


def heard(sockets: ServerSockets, seconds: float) -> list[object]:
    found: list[object] = []
    end = time.monotonic() + seconds
    while not found and time.monotonic() < end:
        found = [message for _, message in sockets.receive(0.05)]
    return found


def test_a_server_hears_no_worker_before_it_has_met_the_scheduler() -> None:
    # It sends heartbeats from then on; a request of a worker may take longer than a silence may last.
    scheduler = SchedulerSockets(roles("scheduler", "tcp://127.0.0.1:0"))
    server = ServerSockets(roles("server", scheduler.address), 1, streams=True)
    worker = WorkerSockets(
        roles("worker", scheduler.address), HelloRequest("worker", 0, 1, "worker/0", JOB, 1)
    )
    attach = AttachRequest(0, 0, 1, 0, JOB)
    try:
        worker.connect_server(0, server.address)
        worker.send(0, attach)
        assert heard(server, 0.5) == []
        server.start_receiving(scheduler.echo)
        assert heard(server, pace.seconds(20)) == [attach]
        worker.send(0, PingRequest(1))
        assert heard(server, pace.seconds(20)) == [PingRequest(1)]
    finally:
        for one in (worker, server, scheduler):
            one.close()


def test_a_stranger_that_took_the_port_of_the_echo_meanwhile_is_not_the_scheduler() -> None:
    scheduler = SchedulerSockets(roles("scheduler", "tcp://127.0.0.1:0"))
    address, echo = scheduler.address, scheduler.echo
    server = ServerSockets(roles("server", address), 1, streams=True)
    worker = WorkerSockets(roles("worker", address), HelloRequest("worker", 0, 1, "worker/0", JOB, 1))
    try:
        scheduler.close()
        other = ZmqContext(job="another job")
        stranger = RouterChannel(other, echo)
        server.start_receiving(echo)
        worker.connect_echo(echo)
        for number in range(10):  # the refusals arrive between them
            server.send(ECHO, PingRequest(number))
            worker.send(ECHO, PingRequest(number))
            assert heard(server, 0.05) == []
            assert [*worker.receive(0.05)] == []
        stranger.close()
        other.close()
        scheduler = SchedulerSockets(roles("scheduler", address), ("", echo))
        echoed: list[object] = []
        end = time.monotonic() + pace.seconds(20)
        while not echoed and time.monotonic() < end:
            server.send(ECHO, PingRequest(99))
            echoed = heard(server, 0.1)
        assert isinstance(echoed[0], PingRequest)
    finally:
        for one in (worker, server, scheduler):
            one.close()


def first_peer(sockets: ServerSockets | SchedulerSockets) -> Hashable:
    """Wait for a message; return its sender."""
    end = time.monotonic() + pace.seconds(20)
    while time.monotonic() < end:
        for peer, _ in sockets.receive(0.05):
            return peer
    raise AssertionError("no peer has sent anything")


@pytest.mark.parametrize(
    ("workers", "cores", "turns"), [(1, 1, False), (2, 3, True), (2, 4, False), (4, 6, False), (5, 64, True)]
)
def test_workers_take_turns_where_they_have_few_cores_or_are_many(
    workers: int, cores: int, turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    scheduler = SchedulerSockets(roles("scheduler", "tcp://127.0.0.1:0"))
    worker = WorkerSockets(
        roles("worker", scheduler.address, workers), HelloRequest("worker", 0, 1, "worker/0", JOB, 1)
    )
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()
            worker.open_stream(0, f"tcp://{host}:{port}/{'00' * 16}")
            opened, end = worker._streams[0], pace.deadline(20)
            while opened.stream is None:
                assert time.monotonic() < end
                opened.advance_open()
            assert opened.stream.limits_in_flight == turns
    finally:
        worker.close()
        scheduler.close()


def test_a_server_that_is_replaced_while_a_message_of_the_old_one_is_there() -> None:
    scheduler = SchedulerSockets(roles("scheduler", "tcp://127.0.0.1:0"))
    servers = [ServerSockets(roles("server", scheduler.address), one, streams=False) for one in range(6)]
    worker = WorkerSockets(
        roles("worker", scheduler.address), HelloRequest("worker", 0, 1, "worker/0", JOB, 1)
    )
    try:
        worker.send(SCHEDULER, PingRequest(1))
        scheduler_s_peer = first_peer(scheduler)
        worker.connect_server(0, servers[0].address)
        for server, after in pairwise(servers):
            server.start_receiving(scheduler.echo)
            worker.send(0, AttachRequest(0, 0, 1, 0, JOB))
            server.send(first_peer(server), PingRequest(3))
            scheduler.send(scheduler_s_peer, PingRequest(2))
            time.sleep(0.1)  # so that both are there
            for peer, _ in worker.receive(pace.seconds(20)):
                if peer == SCHEDULER:
                    worker.connect_server(0, after.address)
    finally:
        for one in (worker, *servers, scheduler):
            one.close()


def test_counters_are_set_while_another_store_opens_a_stream() -> None:
    """The waiting thread drives the sockets of all stores of a process."""
    scheduler = SchedulerSockets(roles("scheduler", "tcp://127.0.0.1:0"))
    worker = WorkerSockets(
        roles("worker", scheduler.address), HelloRequest("worker", 0, 1, "worker/0", JOB, 1)
    )
    seen: list[int] = []

    class Opened:
        def observe(self, counters: Counters) -> None:
            seen.append(len(worker._streams))
            worker._streams[len(worker._streams)] = Opened()  # type: ignore[assignment]

    try:
        worker._streams = {0: Opened(), 1: Opened()}  # type: ignore[dict-item]
        worker.observe(Counters("dist_sync", JOB, 0, 1, False))
        assert seen == [2, 3]
    finally:
        worker._streams = {}
        for one in (worker, scheduler):
            one.close()
