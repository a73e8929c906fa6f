"""Losses: of workers, of servers for good, and of restarted servers."""

from __future__ import annotations

import msgspec
from scheduled import SPEC, Job

from kvstore.stores.parameter_server.protocol import messages as m


def test_a_loss_breaks_a_store_or_not() -> None:
    for raises in (True, False):
        job = Job()
        job.start(on_peer_loss="raise" if raises else "continue")
        job.say("w1", m.BarrierRequest(1, 0, 1))
        job.pass_time(6, "w1", "s0.1")
        view, answer = job.last("w1", m.ViewNotice), job.last("w1", m.MemberReply)
        assert view.broken == raises
        assert [one.rank for one in view.losses] == [0]
        assert (answer.error is not None) == raises
        assert not raises or (answer.error.role, answer.error.rank) == ("worker", 0)


def test_a_server_that_is_lost_for_good_breaks_all() -> None:
    job = Job()
    job.start(on_peer_loss="continue")
    job.pass_time(6, "w0", "w1")
    view = job.last("w0", m.ViewNotice)
    assert view.broken
    assert [(one.role, one.rank) for one in view.losses] == [("server", 0)]


def test_a_server_may_come_back_in_time_and_hears_everything() -> None:
    job = Job(server_grace=10.0)
    job.start()
    job.say("w0", m.CreateKeysRequest(1, 0, (SPEC,)))
    job.say("w0", m.SettingsRequest(2, 0, "optimizer", 1, '{"name": "sgd", "config": {}}'))
    job.pass_time(7, "w0", "w1")
    assert job.last("w0", m.ViewNotice) is None
    job.server(0, 2, restarted=True)
    kinds = [type(body) for body in job.sent["s0.2"]]
    assert kinds == [m.HelloReply, m.WelcomeNotice, m.SlicesNotice, m.InstallRequest, m.ViewNotice]
    view = job.last("w1", m.ViewNotice)
    assert (view.broken, view.epoch, view.servers[0].incarnation) == (False, 2, 2)


def test_a_server_that_comes_back_drops_what_was_dropped_meanwhile() -> None:
    job = Job(1, 2, server_grace=10.0)
    large = msgspec.structs.replace(SPEC, shape=(1 << 19,))
    for number in range(2):
        job.worker(0, f"w{number}", process="w", ordinal=number)
        job.say(f"w{number}", m.CreateKeysRequest(1, number, (large,)))
        job.say(f"w{number}", m.KeysReadyRequest(2, number, ("w",)))
    job.pass_time(7, "w", "s1.1")
    job.say("w0", m.LeaveNotice(0))
    job.say("w1", m.CreateKeysRequest(3, 1, (msgspec.structs.replace(large, whole=True),)))
    job.say("w1", m.KeysReadyRequest(4, 1, ("w",)))
    job.say("w1", m.SettingsRequest(5, 1, "optimizer", 1, "lamb"))
    job.server(0, 2, restarted=True)
    told = [
        one for one in job.sent["s0.2"] if isinstance(one, m.SlicesNotice | m.InstallRequest | m.ViewNotice)
    ]
    assert told[0] == m.InstallRequest(0, 0, "drop", "")
    assert [(one.store, [part.id for part in one.keys[0].slices]) for one in told[1:2]] == [(1, [2, 3])]
    assert told[2] == m.InstallRequest(1, 0, "drop", "0,1")
    assert (type(told[-1]), told[-1].store) == (m.ViewNotice, 1)


def test_a_server_without_its_values_cannot_come_back() -> None:
    job = Job(server_grace=10.0)
    job.start()
    job.say("w0", m.CreateKeysRequest(1, 0, (SPEC,)))
    job.pass_time(6, "w0", "w1")
    job.server(0, 2)
    assert job.last("s0.2", m.RefusalNotice).error == "FencedError"


def test_a_late_process_is_notified_of_the_first_server_that_was_lost() -> None:
    job = Job(1, 2)
    job.start()
    job.pass_time(6, "w0", "s0.1")
    job.pass_time(6, "w0")
    job.worker(0, "second", process="w0", ordinal=1)
    refused = job.last("second", m.RefusalNotice)
    assert (refused.error, refused.role, refused.rank) == ("PeerLostError", "server", 1)
