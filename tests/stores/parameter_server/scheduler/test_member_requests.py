"""What members ask: barriers, keys, settings, how many are dead."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from scheduled import SPEC, Job

from kvstore.stores.parameter_server.protocol import messages as m


def test_a_barrier_waits_for_all_but_those_that_rest() -> None:
    job = Job(3)
    job.start()
    job.say("w0", m.BarrierRequest(1, 0, 1))
    job.say("w1", m.BarrierRequest(1, 0, 1))
    assert job.last("w0", m.MemberReply) is None
    job.say("w0", m.MissingRequest(0, -1, 0))
    assert job.last("w0", m.MissingReply).ranks == (2,)
    job.say("w2", m.JoinRequest(1, 0))
    assert job.last("w0", m.MemberReply).request == 1
    assert job.last("w1", m.ViewNotice).resting == (2,)


def test_the_initializer_fills_and_the_others_wait() -> None:
    job = Job()
    job.start()
    job.say("w1", m.CreateKeysRequest(5, 0, (SPEC,)))
    assert job.last("w1", m.MemberReply) is None
    job.say("w0", m.CreateKeysRequest(1, 0, (SPEC,)))
    assert [one.ready for one in job.last("w0", m.MemberReply).entries] == [False]
    assert job.last("s0.1", m.SlicesNotice).keys[0].spec == SPEC
    job.say("w0", m.KeysReadyRequest(2, 0, ("w",)))
    assert [one.ready for one in job.last("w1", m.MemberReply).entries] == [True]


def test_the_next_initializer_fills_when_the_first_is_lost() -> None:
    job = Job()
    job.start(on_peer_loss="continue")
    job.say("w0", m.CreateKeysRequest(1, 0, (SPEC,)))
    job.say("w1", m.CreateKeysRequest(5, 0, (SPEC,)))
    job.pass_time(6, "w1", "s0.1")
    answer = job.last("w1", m.MemberReply)
    assert answer.request == 5
    assert [one.ready for one in answer.entries] == [False]


def test_first_values_that_could_not_be_stored_are_dropped_and_keys_that_have_values_are_not() -> None:
    job = Job()
    job.start()
    other = m.KeySpec("other", (8,), "float32")
    job.say("w0", m.CreateKeysRequest(1, 0, (SPEC,)))
    job.say("w0", m.KeysReadyRequest(2, 0, ("w",)))
    job.say("w1", m.LookupRequest(1, 0, ("w", "other")))
    job.say("w0", m.CreateKeysRequest(3, 0, (SPEC, other)))
    why = m.Failure("KVStoreError", "no memory")
    job.say("w0", m.DropKeysRequest(4, 0, ("w", "other"), why))
    assert job.last("w1", m.MemberReply) == m.MemberReply(1, error=why)
    assert (job.last("s0.1", m.InstallRequest).kind, job.last("s0.1", m.InstallRequest).text) == ("drop", "1")
    job.say("w1", m.LookupRequest(2, 0, ("w",)))
    assert [one.spec.key for one in job.last("w1", m.MemberReply).entries] == ["w"]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        (m.KeySpec("w", (9,), "float32"), "ShapeError"),
        (m.KeySpec("w", (8,), "float64"), "DTypeError"),
        (m.KeySpec("w", (8,), "float32", True), "ArrayError"),
        (m.KeySpec(3, (8,), "float32"), "KeyKindError"),
        (m.KeySpec("x" * 2000, (8,), "float32"), "ShapeError"),
        (m.KeySpec("x", (1 << 50,), "float32"), "ConfigError"),
        (m.KeySpec("x", (8,), "strange"), "DTypeError"),
    ],
)
def test_keys_that_do_not_fit(spec: m.KeySpec, error: str) -> None:
    job = Job()
    job.start()
    job.say("w0", m.CreateKeysRequest(1, 0, (SPEC,)))
    job.say("w1", m.CreateKeysRequest(2, 0, (spec,)))
    assert job.last("w1", m.MemberReply).error.error == error


def test_lookup_waits_or_not() -> None:
    job = Job()
    job.start()
    job.say("w0", m.CreateKeysRequest(1, 0, (SPEC,)))
    job.say("w1", m.LookupRequest(1, 0, ("w",), wait=False))
    assert job.last("w1", m.MemberReply).entries == ()
    job.say("w1", m.LookupRequest(2, 0, ("w",)))
    assert job.last("w1", m.MemberReply).request == 1
    job.say("w0", m.KeysReadyRequest(2, 0, ("w",)))
    assert job.last("w1", m.MemberReply).request == 2


def moving() -> Job:
    """Return a job with a key on two servers; both workers want it on one, and the first is to move it."""
    job = Job(servers=2)
    job.start()
    spec = m.KeySpec("w", (1 << 19,), "float32")
    job.say("w0", m.CreateKeysRequest(1, 0, (spec,)))
    job.say("w0", m.KeysReadyRequest(2, 0, ("w",)))
    whole = msgspec.structs.replace(spec, whole=True)
    for rank in (1, 0):
        job.say(f"w{rank}", m.CreateKeysRequest(3, 0, (whole,)))
    return job


def installed(job: Job) -> list[tuple[str, str]]:
    return [(one.kind, one.text) for one in job.sent["s0.1"] if isinstance(one, m.InstallRequest)]


def test_slices_of_a_key_that_has_moved_are_dropped_once_all_set_the_optimizer() -> None:
    job = moving()
    assert job.last("w1", m.MemberReply) is None
    assert [one.ready for one in job.last("w0", m.MemberReply).entries] == [False]
    job.say("w1", m.LookupRequest(4, 0, ("w",), wait=False))
    assert [part.id for part in job.last("w1", m.MemberReply).entries[0].slices] == [0, 1]
    job.say("w0", m.KeysReadyRequest(4, 0, ("w",)))
    assert [part.id for part in job.last("w1", m.MemberReply).entries[0].slices] == [2, 3]
    job.say("w0", m.SettingsRequest(5, 0, "optimizer", 1, "lamb"))
    assert installed(job) == [("settings", "lamb")]
    job.say("w1", m.SettingsRequest(5, 0, "optimizer", 1, "lamb"))
    assert installed(job) == [("settings", "lamb"), ("drop", "0,1")]


def test_slices_of_a_key_that_has_moved_are_dropped_when_the_last_reader_leaves() -> None:
    job = moving()
    job.say("w0", m.KeysReadyRequest(4, 0, ("w",)))
    job.say("w0", m.SettingsRequest(5, 0, "optimizer", 1, "lamb"))
    job.say("w1", m.LeaveNotice(0))
    assert installed(job) == [("settings", "lamb"), ("drop", "0,1")]


def test_a_key_that_cannot_move_stays_and_all_are_told_why() -> None:
    job = moving()
    why = m.Failure("ConfigError", "on demand")
    job.say("w0", m.KeysReadyRequest(4, 0, ("w",), why))
    assert (job.last("w1", m.MemberReply).request, job.last("w1", m.MemberReply).error) == (3, why)
    assert installed(job) == [("drop", "2,3")]
    job.say("w0", m.KeysReadyRequest(5, 0, ("w",), why))  # nothing moves: no drop of the whole store
    assert installed(job) == [("drop", "2,3")]
    job.say("w1", m.LookupRequest(4, 0, ("w",)))
    assert [part.id for part in job.last("w1", m.MemberReply).entries[0].slices] == [0, 1]


def described(name: str) -> str:
    return json.dumps({"name": name, "config": {}})


def test_one_optimizer_for_all() -> None:
    job = Job(3)
    job.start()
    sgd, adam = described("sgd"), described("adam")
    job.say("w0", m.SettingsRequest(1, 0, "optimizer", 1, sgd, 7))
    assert job.last("w0", m.MemberReply) is None
    install = job.last("s0.1", m.InstallRequest)
    assert (install.kind, install.since, install.text) == ("settings", 8, sgd)
    assert (install.ordinal, install.epoch, install.keeps_states) == (1, 1, False)
    job.say("w1", m.SettingsRequest(1, 0, "optimizer", 1, sgd, 9))  # it has pushed more before
    job.say("s0.1", m.InstallReply(0, 1))
    assert [job.last(peer, m.MemberReply) for peer in ("w0", "w1")] == [
        m.MemberReply(1, version=8, text=sgd, epoch=1)
    ] * 2
    job.say("w2", m.SettingsRequest(1, 0, "optimizer", 1, adam))
    error = job.last("w2", m.MemberReply).error
    assert error.error == "ConfigError"
    assert re.search("'sgd' on worker [01] and 'adam' on worker 2", error.text)
    assert [type(body) for body in job.sent["s0.1"]].count(m.InstallRequest) == 1


def test_a_worker_that_lags_gets_the_settings_of_its_step() -> None:
    job = Job()
    job.start()
    for peer in ("w0", "w1"):
        job.say(peer, m.SettingsRequest(0, 0, "optimizer", 1, described("sgd")))
        job.say("s0.1", m.InstallReply(0, 1))
    rates = ['{"learning_rate": 0.5}', '{"learning_rate": 0.25}', '{"learning_rate": 0.5}']
    found = []
    for peer in ("w0", "w1"):
        for request, text in enumerate(rates, 1):
            job.say(peer, m.SettingsRequest(request, 0, "configure", 1, text, 3 * request))
            job.say("s0.1", m.InstallReply(0, 1 + request))
            found.append(job.last(peer, m.MemberReply))
    assert [answer.version for answer in found] == [4, 7, 10, 4, 7, 10]
    assert [json.loads(answer.text)["config"]["learning_rate"] for answer in found] == [0.5, 0.25, 0.5] * 2
    assert [type(body) for body in job.sent["s0.1"]].count(m.InstallRequest) == 4


def test_what_a_server_could_not_install_is_told() -> None:
    job = Job()
    job.start()
    job.say("w0", m.CommandRequest(1, 0, 7, "body"))
    install = job.last("s0.1", m.InstallRequest)
    assert (install.kind, install.head, install.text) == ("command", 7, "body")
    job.say("s0.1", m.InstallReply(0, install.version, m.Failure("UpdaterError", "no")))
    assert job.last("w0", m.MemberReply).error.text == "no"


def count(job: Job, peer: str, seconds: float) -> int:
    job.say(peer, m.LostCountRequest(9, 0, seconds))
    found: int = job.last(peer, m.MemberReply).count
    return found


def test_the_dead_are_those_that_are_silent_or_lost_and_not_replaced() -> None:
    job = Job(3, 2, server_grace=60.0)
    job.start(on_peer_loss="continue")
    assert count(job, "w0", 1.0) == 0
    job.pass_time(3.0, "w0", "s0.1")
    assert (count(job, "w0", 4.0), count(job, "w0", 2.0)) == (0, 3)
    job.pass_time(3.0, "w0", "w1", "s0.1")
    assert count(job, "w0", 100.0) == 2  # a worker and a server are lost
    job.worker(2, "w2again", 2, options={"mode": "sync", "on_peer_loss": "continue"})
    assert count(job, "w0", 100.0) == 1
    job.say("w1", m.ProcessEndNotice("w1"))
    job.server(1, 2, restarted=True)
    assert count(job, "w0", 100.0) == 0


def test_the_dead_are_counted_in_a_broken_store() -> None:
    job = Job(2)
    job.start(on_peer_loss="raise")
    job.pass_time(6.0, "w0", "s0.1")
    assert count(job, "w0", 60.0) == 1


def test_a_worker_that_has_ended_is_not_dead() -> None:
    job = Job(2)
    job.start()
    job.say("w1", m.ProcessEndNotice("w1"))
    job.pass_time(3.0, "w0", "s0.1")
    assert count(job, "w0", 2.0) == 0
