"""The assignment of ranks."""

from __future__ import annotations

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.reliable_link import ReliableLink
from kvstore.stores.parameter_server.scheduler.peers import (
    AdmittedProcess,
    PeerConnection,
    ProcessState,
    StepActions,
)
from kvstore.stores.parameter_server.scheduler.rank_assignment import RankAssignment, ServerTable
from kvstore.stores.parameter_server.scheduler.store_membership import StoreMembership


def process(role: str, rank: int, incarnation: int = 1, number: int = 0) -> AdmittedProcess:
    """Make a process with one peer, for a store or for -1."""
    name = f"{role}{rank}.{incarnation}"
    one = AdmittedProcess(name, role, rank, incarnation, 0.0)
    one.peers[number] = PeerConnection(name, ReliableLink(1.0), 0.0, process=one)
    return one


def servers(count: int, *ranks: int) -> ServerTable:
    all_ = ServerTable(count)
    for rank in ranks:
        all_.add_server(process("server", rank, number=-1), f"tcp://{rank}")
    return all_


def test_a_server_that_is_lost_stays_a_member_once_all_are_welcome() -> None:
    for welcomed, members in ((False, [0]), (True, [0, 1])):
        all_ = servers(2, 1, 0)
        all_.welcomed = welcomed
        all_.remove_server(1)
        assert [one.rank for one in all_.members] == members
        assert all_.missing_ranks == [1]


def test_a_server_that_comes_back_is_not_away_any_more() -> None:
    all_ = servers(1, 0)
    all_.welcomed = True
    all_.remove_server(0)
    all_.awaited[0] = (9.0, m.Loss("server", 0, 5.0))
    all_.add_server(process("server", 0, 2, -1), "tcp://new")
    assert not all_.awaited
    assert all_.members == (m.Member(0, 2, "tcp://new"),)


def test_only_servers_that_are_there_are_written_to_in_the_order_of_ranks() -> None:
    all_ = servers(4, 3, 0, 1)
    all_.remove_server(1)
    outgoing = StepActions(0.0)
    all_.send_all(m.JobEndNotice(), outgoing)
    all_.send(1, m.JobEndNotice(), outgoing)
    assert [one.peer for one in outgoing.actions if isinstance(one, e.SendMessage)] == [
        "server0.1",
        "server3.1",
    ]


def test_an_older_process_of_a_rank_does_not_hold_it() -> None:
    assignment = RankAssignment(2, 1)
    store = StoreMembership(0, ("default", 0), {}, [0])
    old, new = process("worker", 0, 1), process("worker", 0, 2)
    assignment.workers[0] = old
    assert assignment.is_current(old.peers[0], store)
    assignment.workers[0] = new
    assert not assignment.is_current(old.peers[0], store)
    assert assignment.worker_peer(store, 0) is new.peers[0]
    assert assignment.worker_peer(StoreMembership(1, ("default", 1), {}, [0]), 0) is None
    assert assignment.worker_peer(store, 1) is None


def test_ranks_by_state_and_those_that_are_missing() -> None:
    assignment = RankAssignment(4, 1)
    for rank, state in ((2, ProcessState.LOST), (0, ProcessState.HERE), (1, ProcessState.LOST)):
        assignment.workers[rank] = process("worker", rank)
        assignment.workers[rank].state = state
    assert sorted(assignment.ranks_in_state(ProcessState.LOST)) == [1, 2]
    assert assignment.missing_ranks == [3]
