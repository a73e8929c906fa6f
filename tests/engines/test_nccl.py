"""`nccl` with arrays on GPUs in several processes, and how these meet; NCCL and CUDA are stand-ins."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import launchers

import kvstore as kv
from kvstore.settings.options import StoreConfig
from kvstore.stores.collectives.nccl import rendezvous
from kvstore.stores.collectives.nccl.rendezvous import JobPlacement, NcclRendezvous, find_rendezvous
from kvstore.stores.parameter_server.transport.channel import DealerChannel
from kvstore.stores.parameter_server.transport.context import ZmqContext

ENGINE = next(engine for engine in launchers.ENGINES if engine.title == "fake-nccl")
needs_engine = pytest.mark.skipif(bool(ENGINE.missing), reason=ENGINE.missing)


def job(folder: Path, body: str, size: int = 2, **variables: str) -> launchers.Ended:
    return launchers.run(ENGINE, size, folder, "nccl_gpus.py", body, timeout=60, variables=variables)


@needs_engine
@pytest.mark.parametrize(
    ("body", "size"),
    [("sums", 3), ("both_places", 2), pytest.param("stores_in_turn", 2, marks=pytest.mark.nightly)],
)
def test_arrays_on_gpus(body: str, size: int, tmp_path: Path) -> None:
    ended = job(tmp_path, body, size)
    assert ended.code == 0, ended.output
    assert sorted(ended.told) == list(range(size))


@needs_engine
def test_mistakes_are_reported_before_a_wait(tmp_path: Path) -> None:
    ended = job(tmp_path, "mistakes")
    assert ended.code == 0, ended.output
    for told in ended.told.values():
        assert "other keys, shapes or types" in told["other"]["text"]
        assert told["place"]["error"] == "ConfigError"
        assert "this array lies on cuda:3" in told["foreign"]["text"]
        assert told["shape"]["error"] == "ShapeError"


@needs_engine
def test_keys_that_were_never_initialised(tmp_path: Path) -> None:
    ended = job(tmp_path, "passing")
    assert ended.code == 0, ended.output
    for told in ended.told.values():
        assert told["shape"]["error"] == told["place"]["error"] == "ConfigError", told
        assert told["pull"]["error"] == "KeyNotFoundError"
    assert ended.told[1]["own"]["error"] == "ShapeError"


@needs_engine
@pytest.mark.parametrize("remote", ["0", pytest.param("1", marks=pytest.mark.nightly)])
def test_the_death_of_a_process(remote: str, tmp_path: Path) -> None:
    """Noticed by us, and where NCCL notices, by it."""
    ended = job(tmp_path, "killed", 3, FAKE_NCCL_REMOTE=remote)
    assert sorted(ended.told) == [0, 1], ended.output
    for told in ended.told.values():
        assert told["first"]["error"] == "PeerLostError", told
        assert told["first"]["seconds"] < 10
        assert told["later"]["error"] == "PeerLostError"
        assert "start the job again" in told["later"]["text"]


@needs_engine
def test_a_wait_for_an_absent_worker_ends_at_the_deadline(tmp_path: Path) -> None:
    ended = job(tmp_path, "absent")
    told = ended.told[0]
    assert told["first"]["error"] == "TimeoutError", told
    assert 2 <= told["first"]["seconds"] < 10
    assert "all workers must call it" in told["first"]["text"]


# ------------------------------------------------------------------------------------------- where they meet

OWN = {"KVSTORE_RANK": "1", "KVSTORE_SIZE": "4", "KVSTORE_LOCAL_RANK": "1", "KVSTORE_JOB": "j"}
TORCH = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
DMLC = {
    "DMLC_ROLE": "worker",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "0",
    "DMLC_WORKER_ID": "1",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
}


def test_on_one_machine_they_meet_at_a_socket_that_has_the_jobs_name() -> None:
    found = find_rendezvous({**OWN, "KVSTORE_LOCAL_SIZE": "4"})
    assert (found.rank, found.size, found.local_rank) == (1, 4, 1)
    assert found.address.startswith("ipc://@kvstore/nccl/")
    other = find_rendezvous({**OWN, "KVSTORE_LOCAL_SIZE": "4", "KVSTORE_JOB": "k"})
    assert other.address != found.address
    assert find_rendezvous({}) == JobPlacement(0, 1, 0)


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        ({**TORCH, "LOCAL_WORLD_SIZE": "2"}, "tcp://127.0.0.1:29501"),
        ({**TORCH, "LOCAL_WORLD_SIZE": "2", "KVSTORE_MASTER": "localhost:4711"}, "tcp://localhost:4711"),
        (
            {**TORCH, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.1.2.3", "KVSTORE_INSECURE": "1"},
            "tcp://10.1.2.3:29501",
        ),
    ],
)
def test_between_machines_they_meet_where_the_variables_say(variables: dict[str, str], address: str) -> None:
    assert find_rendezvous(variables).address == address


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**TORCH, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.1.2.3"}, "KVSTORE_INSECURE=1"),
        ({**OWN, "KVSTORE_LOCAL_SIZE": "2"}, "KVSTORE_MASTER"),
        ({**OWN, "KVSTORE_LOCAL_SIZE": "2", "KVSTORE_MASTER": "here"}, "KVSTORE_MASTER"),
        ({**OWN, "KVSTORE_LOCAL_SIZE": "2", "KVSTORE_MASTER": "here:0"}, "names no port"),
        ({name: value for name, value in DMLC.items() if name != "DMLC_WORKER_ID"}, "DMLC_WORKER_ID"),
    ],
)
def test_what_is_not_said_is_asked_for(variables: dict[str, str], words: str) -> None:
    with pytest.raises(kv.ConfigError, match=words):
        find_rendezvous(variables)


def test_workers_of_a_parameter_server_meet_where_its_scheduler_would_be() -> None:
    found = find_rendezvous(DMLC)
    assert (found.rank, found.size, found.address) == (1, 2, "tcp://127.0.0.1:9091")


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Results of calls at the same time; errors are results."""
    found: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except kv.KVStoreError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """Let ranks of a job, which are threads here, make a store."""

    class NoLock:
        def acquire(self, timeout: float) -> bool:
            return True

        def release(self) -> None:
            pass

    monkeypatch.setattr(rendezvous, "_one_at_a_time", NoLock())

    def run(places: list[JobPlacement], timeout: float = 20, groups: tuple[str, ...] = ()) -> list[Any]:
        meetings = []
        for number, place in enumerate(places):
            monkeypatch.setattr(rendezvous, "_numbers", rendezvous.defaultdict(rendezvous.itertools.count))
            group = groups[number] if groups else "default"
            meetings.append(NcclRendezvous(place, StoreConfig(timeout=timeout, group=group)))
        return together(*(lambda m=m: m.share_name(lambda: b"the name") for m in meetings))  # type: ignore[misc]

    return run


def places(tmp_path: Path, size: int, address: str = "ipc://@kvstore/test") -> list[JobPlacement]:
    return [
        JobPlacement(rank, size, rank, str(tmp_path), f"{address}/{tmp_path.name}") for rank in range(size)
    ]


def test_all_get_the_name_and_the_present_workers(meet: Callable[..., list[Any]], tmp_path: Path) -> None:
    answers = meet(places(tmp_path, 3))
    assert [answer.name for answer in answers] == [b"the name"] * 3
    assert [[hello.rank for hello in answer.everybody] for answer in answers] == [[0, 1, 2]] * 3


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def test_several_stores_in_turn_at_one_tcp_address(meet: Callable[..., list[Any]], tmp_path: Path) -> None:
    address = free_address()
    where = [JobPlacement(rank, 3, 0, str(tmp_path), address) for rank in range(3)]
    for group in ("one", "two"):
        answers = meet(where, groups=3 * (group,))
        assert [answer.name for answer in answers] == [b"the name"] * 3


@pytest.mark.parametrize("knows_the_job", [True, False])
def test_strangers_at_the_address_are_not_heard(
    meet: Callable[..., list[Any]], tmp_path: Path, knows_the_job: bool
) -> None:
    address = free_address()
    noise = [b"", b"\xff" * 99, b"thanks", msgspec.msgpack.encode([1, "another store", 1, 2, "", 7])]
    heard = []

    def shout() -> None:
        context = ZmqContext(job=str(tmp_path) if knows_the_job else "another")
        dealer = DealerChannel(context, address, b"stranger", "worker", 0)
        try:
            for text in noise:
                dealer.send([text])
            heard.append(dealer.receive(3.0))
        except kv.AuthError:
            heard.append("refused")
        context.close()

    thread = threading.Thread(target=shout)
    thread.start()
    where = [JobPlacement(rank, 2, 0, str(tmp_path), address) for rank in range(2)]
    lone = where[:1]
    assert isinstance(meet(lone, timeout=1.0)[0], kv.TimeoutError)  # long enough to be shouted at
    answers = meet(where)
    thread.join()
    assert [answer.name for answer in answers] == [b"the name"] * 2
    assert heard == [None if knows_the_job else "refused"]


def test_the_missing_worker_is_named(meet: Callable[..., list[Any]], tmp_path: Path) -> None:
    (alone,) = meet(places(tmp_path, 3)[:1], timeout=0.5)
    assert isinstance(alone, kv.TimeoutError)
    assert "workers 1, 2" in str(alone)
    (late,) = meet(places(tmp_path, 3)[2:], timeout=0.5)
    assert "worker 2 of 3 waited 0.5 s" in str(late)


def test_two_of_a_rank_and_another_size_are_refused(meet: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second, _ = places(tmp_path, 3)
    wrong = JobPlacement(2, 4, 2, first.job, first.address)
    answers = meet([first, second, wrong], timeout=3)
    assert isinstance(answers[0], kv.ConfigError)
    assert "a job of 4 workers" in str(answers[0])
    assert "a job of 4 workers" in str(answers[2])


def test_stores_of_other_groups_do_not_meet(meet: Callable[..., list[Any]], tmp_path: Path) -> None:
    answers = meet(places(tmp_path, 2), timeout=1, groups=("one", "other"))
    assert [type(answer) for answer in answers] == [kv.TimeoutError] * 2
