"""The messages of one step, and their receivers."""

from __future__ import annotations

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.reliable_link import ReliableLink
from kvstore.stores.parameter_server.scheduler.peers import AdmittedProcess, PeerConnection, StepActions


def test_messages_come_again_until_they_are_acknowledged_but_not_unreliable_ones() -> None:
    peer = PeerConnection("w0", ReliableLink(1.0), 0.0)
    outgoing = StepActions(0.0)
    outgoing.write(peer, m.PingReply(1))
    outgoing.send_unreliable(peer, m.PingReply(2))
    assert [one.message.number for one in outgoing.actions if isinstance(one, e.SendMessage)] == [1, 0]
    again = StepActions(1.5)
    again.repeat(peer)
    assert again.actions == [e.SendMessage("w0", m.ReliableMessage(1, 0, m.PingReply(1)))]
    peer.link.read(m.ReliableMessage(0, 1, None), 1.5)
    later = StepActions(9.0)
    later.repeat(peer)
    assert later.actions == []


def test_what_has_come_is_acknowledged_once() -> None:
    peer = PeerConnection("w0", ReliableLink(1.0), 0.0)
    peer.link.read(m.ReliableMessage(1, 0, m.PingRequest(1)), 0.0)
    outgoing = StepActions(0.0)
    outgoing.send_unreliable(peer, m.PingReply(1))
    outgoing.acknowledge(peer)
    assert outgoing.actions == [e.SendMessage("w0", m.ReliableMessage(0, 1, m.PingReply(1)))]
    peer.link.read(m.ReliableMessage(2, 0, m.PingRequest(2)), 0.0)
    outgoing = StepActions(0.0)
    outgoing.acknowledge(peer)
    assert outgoing.actions == [e.SendMessage("w0", m.ReliableMessage(0, 2, None))]


def test_a_refusal_names_the_lost_process() -> None:
    outgoing = StepActions(0.0)
    outgoing.refuse(
        PeerConnection("w0", ReliableLink(1.0), 0.0), m.Failure("PeerLostError", "gone", "server", 1, 2.5)
    )
    refused = m.RefusalNotice("PeerLostError", "gone", "server", 1, 2.5)
    assert outgoing.actions == [e.SendMessage("w0", m.ReliableMessage(1, 0, refused))]


def test_a_peer_has_the_rank_of_its_process() -> None:
    peer = PeerConnection("w0", ReliableLink(1.0), 0.0)
    assert peer.rank == -1
    peer.process = AdmittedProcess("a", "worker", 3, 1, 0.0, peers={0: peer})
    assert peer.rank == 3
