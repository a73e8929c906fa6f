"""A process finds its part in a parameter server, or its error names the missing or wrong variable."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.settings import addresses, roles
from kvstore.settings.keys import JobKeys
from kvstore.settings.roles import Roles, find

#: As dmlc's tracker sets them.
DMLC = {
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "3",
}
OURS = {
    "KVSTORE_SCHEDULER": "tcp://127.0.0.1:4711",
    "KVSTORE_NUM_WORKERS": "2",
    "KVSTORE_NUM_SERVERS": "3",
    "KVSTORE_JOB": "5a0e",
}
SERVER = {**OURS, "KVSTORE_ROLE": "server"}
SCHEDULER = {**OURS, "KVSTORE_ROLE": "scheduler"}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OWN = {f"KVSTORE_{name}": number for name, number in [("RANK", "1"), ("SIZE", "2")]}
OWN |= {f"KVSTORE_LOCAL_{name}": number for name, number in [("RANK", "1"), ("SIZE", "2")]}
FAR = "tcp://192.0.2.77:4711"  # a network for documentation: no host has it
_PUBLIC = tuple(letter * 40 for letter in (b"a", b"b", b"c", b"d"))
KEYS = JobKeys(_PUBLIC[0], b"s" * 40, _PUBLIC[1], _PUBLIC[2:], _PUBLIC)  # of a worker


def found(*parts: dict[str, str], **more: str) -> Roles:
    answer = find({name: value for part in (*parts, more) for name, value in part.items()})
    assert answer is not None
    return answer


def outward() -> str:
    """An address of this machine that other machines could reach."""
    for number in addresses.interface_addresses().values():
        if not addresses.is_loopback(number):
            return number
    pytest.skip("this machine has no network interface but the loopback")


def test_no_variable_names_servers() -> None:
    assert find({}) is None
    assert find({**OWN, "KVSTORE_JOB": "x", "PORT": "80", "DMLC_INTERFACE": "eth"}) is None


@pytest.mark.parametrize("role", ["worker", "server", "scheduler"])
def test_mxnet_s_variables_are_enough(role: str) -> None:
    address = "tcp://127.0.0.1:9091"
    assert found(DMLC, DMLC_ROLE=role) == Roles(
        role=role,
        rank=0 if role == "scheduler" else -1,
        num_workers=2,
        num_servers=3,
        job=address,
        scheduler=address,
        host="127.0.0.1",
        port=9091 if role == "scheduler" else 0,
        keys=None,
        insecure=False,
    )


@pytest.mark.parametrize("role", ["worker", "server", "scheduler"])
def test_our_variables_are_enough(role: str) -> None:
    answer = found(OURS, KVSTORE_ROLE=role)
    assert (answer.role, answer.scheduler, answer.job) == (role, "tcp://127.0.0.1:4711", "5a0e")
    assert (answer.num_workers, answer.num_servers) == (2, 3)


def test_both_may_be_set_and_then_agree() -> None:
    ours = {**OURS, "KVSTORE_SCHEDULER": "tcp://127.0.0.1:9091"}
    assert found(ours, DMLC, KVSTORE_ROLE="server", DMLC_ROLE="server").job == "5a0e"


def test_without_a_role_it_is_a_worker() -> None:
    assert found(OURS).role == found(DMLC).role == "worker"


def test_a_server_that_knows_only_the_scheduler_leaves_the_rest_to_it() -> None:
    answer = found(KVSTORE_ROLE="server", KVSTORE_SCHEDULER="tcp://127.0.0.1:4711")
    assert (answer.rank, answer.num_workers, answer.num_servers) == (-1, 0, 0)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, -1),
        ({"DMLC_WORKER_ID": "1"}, 1),
        ({"DMLC_RANK": "1"}, 1),
        ({"DMLC_TASK_ID": "1"}, 1),
        ({"DMLC_SERVER_ID": "1"}, -1),
        (OWN, 1),
        (TORCHRUN, 1),
        ({**TORCHRUN, "DMLC_WORKER_ID": "0"}, 0),
        ({**OWN, "DMLC_WORKER_ID": "0"}, 1),
    ],
)
def test_ranks_of_workers(variables: dict[str, str], rank: int) -> None:
    answer = found(DMLC, variables, DMLC_ROLE="worker")
    assert (answer.rank, answer.num_workers) == (rank, 2)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, -1),
        ({"KVSTORE_SERVER_RANK": "2"}, 2),
        ({"DMLC_SERVER_ID": "2"}, 2),
        ({"DMLC_RANK": "2"}, 2),
        ({"DMLC_TASK_ID": "4"}, 2),  # the tracker counts on from the workers
        ({"DMLC_WORKER_ID": "1"}, -1),
        (TORCHRUN, -1),
    ],
)
def test_ranks_of_servers(variables: dict[str, str], rank: int) -> None:
    assert found(DMLC, variables, DMLC_ROLE="server").rank == rank


def test_a_launcher_says_how_many_workers_there_are() -> None:
    answer = found(TORCHRUN, KVSTORE_SCHEDULER="tcp://127.0.0.1:4711")
    assert (answer.rank, answer.num_workers, answer.job) == (1, 2, "tcp://127.0.0.1:4711")


def test_all_processes_of_a_job_name_it_alike() -> None:
    names = {found(DMLC, more, DMLC_ROLE=role).job for role in roles.ROLES for more in ({}, TORCHRUN)}
    assert len(names) == 1


def test_a_scheduler_without_a_port_names_the_job_when_it_has_one() -> None:
    before = found(OURS, KVSTORE_ROLE="scheduler", KVSTORE_JOB="", KVSTORE_SCHEDULER="tcp://127.0.0.1:0")
    assert (before.job, before.port) == ("", 0)
    after = before.bound(4242)
    assert (after.scheduler, after.job, after.port) == ("tcp://127.0.0.1:4242", "tcp://127.0.0.1:4242", 4242)
    assert dataclasses.replace(before, job="mine").bound(4242).job == "mine"
    server = found(KVSTORE_ROLE="server", KVSTORE_SCHEDULER=after.scheduler)
    assert server.job == after.job


def test_restarts_are_counted() -> None:
    assert found(OURS).restart == 0
    assert found(OURS, KVSTORE_RESTART="2").restart == 2


# ------------------------------------------------------------------------------------------- addresses


def test_unix_sockets() -> None:
    answer = found(OURS, KVSTORE_ROLE="scheduler", KVSTORE_SCHEDULER="ipc://@kvstore/a/scheduler")
    assert (answer.ipc, answer.host, answer.port) == (True, "127.0.0.1", 0)
    assert answer.bound(7) == answer
    assert not found(OURS).ipc


def test_mxnet_s_local_jobs_meet_at_a_socket_without_a_file() -> None:
    addresses_found = {found(DMLC, DMLC_LOCAL="1", DMLC_ROLE=role).scheduler for role in roles.ROLES}
    (address,) = addresses_found
    assert address.startswith("ipc://@kvstore/")
    assert str(os.getuid()) in address
    other = {**DMLC, "DMLC_PS_ROOT_PORT": "9092"}
    assert found(other, DMLC_LOCAL="1").scheduler != address
    assert found(DMLC, DMLC_LOCAL="0").scheduler == "tcp://127.0.0.1:9091"


def test_a_name_of_the_loopback_is_the_loopback() -> None:
    answer = found(OURS, KVSTORE_ROLE="server", KVSTORE_SCHEDULER="tcp://localhost:4711")
    assert answer.host == "127.0.0.1"
    assert answer.scheduler == "tcp://localhost:4711"


@pytest.mark.parametrize("name", ["KVSTORE_HOST", "DMLC_NODE_HOST"])
@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_host_is_looked_up(name: str, role: str) -> None:
    assert found(OURS, {"KVSTORE_ROLE": role, name: "localhost"}).host == "127.0.0.1"
    assert found(OURS, {"KVSTORE_ROLE": role, name: "127.0.0.2"}).host == "127.0.0.2"


def test_an_interface_is_named_by_how_it_begins() -> None:
    assert found(OURS, KVSTORE_ROLE="server", DMLC_INTERFACE="lo").host == "127.0.0.1"
    assert (
        found(OURS, KVSTORE_ROLE="server", DMLC_INTERFACE="none", KVSTORE_HOST="127.0.0.3").host
        == "127.0.0.3"
    )


def test_of_two_hosts_ours_counts() -> None:
    assert (
        found(OURS, KVSTORE_ROLE="server", KVSTORE_HOST="127.0.0.2", DMLC_NODE_HOST="127.0.0.3").host
        == "127.0.0.2"
    )


def test_the_address_is_that_of_the_route_to_another_machine() -> None:
    here = outward()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((here, 9))
        way = probe.getsockname()[0]
    answer = found(KVSTORE_ROLE="server", KVSTORE_SCHEDULER=f"tcp://{here}:4711", KVSTORE_INSECURE="1")
    assert answer.host == way


def test_a_scheduler_in_kubernetes_binds_to_everything_and_keeps_its_name() -> None:
    names = {**DMLC, "DMLC_PS_ROOT_URI": "scheduler.invalid"}
    answer = found(names, DMLC_ROLE="scheduler", DMLC_USE_KUBERNETES="1", KVSTORE_INSECURE="1")
    assert (answer.host, answer.scheduler) == ("0.0.0.0", "tcp://scheduler.invalid:9091")


def test_a_worker_waits_for_a_name_that_is_not_known_yet() -> None:
    names = {**DMLC, "DMLC_PS_ROOT_URI": "scheduler.invalid"}
    assert found(names, DMLC_ROLE="worker", KVSTORE_INSECURE="1").scheduler == "tcp://scheduler.invalid:9091"


@pytest.mark.parametrize(
    ("variables", "port"),
    [
        ({"DMLC_ROLE": "server", "PORT": "5000"}, 5000),
        ({"DMLC_ROLE": "server", "PORT": "5000", "KVSTORE_PORT": "0"}, 0),
        ({"DMLC_ROLE": "server", "KVSTORE_PORT": "6000"}, 6000),
        ({"KVSTORE_ROLE": "server", "PORT": "5000"}, 0),  # of another program
        ({"DMLC_ROLE": "worker", "PORT": "5000"}, 0),  # it binds to nothing
        ({"DMLC_ROLE": "scheduler", "PORT": "5000"}, 9091),
    ],
)
def test_ports(variables: dict[str, str], port: int) -> None:
    assert found(DMLC, variables).port == port


# ----------------------------------------------------------------------------------- refusals


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"DMLC_ROLE": "worker"}, ["DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT", "kvstore run"]),
        ({"KVSTORE_NUM_SERVERS": "1"}, ["KVSTORE_NUM_SERVERS=1 is set", "KVSTORE_SCHEDULER"]),
        (without(DMLC, "DMLC_PS_ROOT_URI"), ["(DMLC_PS_ROOT_URI or", "kvstore run"]),
        (without(DMLC, "DMLC_PS_ROOT_PORT"), ["(DMLC_PS_ROOT_PORT or", "kvstore run"]),
        (without(SCHEDULER, "KVSTORE_NUM_WORKERS"), ["KVSTORE_ROLE=scheduler", "DMLC_NUM_WORKER", "-n 2"]),
        (without(SCHEDULER, "KVSTORE_NUM_SERVERS"), ["KVSTORE_NUM_SERVERS or DMLC_NUM_SERVER", "-s 1"]),
        ({**DMLC, "DMLC_ROLE": "Worker"}, ["DMLC_ROLE='Worker'", "worker, server or scheduler"]),
        ({**DMLC, "KVSTORE_ROLE": "master"}, ["KVSTORE_ROLE='master'", "scheduler"]),
        ({**SERVER, "DMLC_ROLE": "worker"}, ["KVSTORE_ROLE (server) contradicts DMLC_ROLE (worker)"]),
        ({**DMLC, "KVSTORE_NUM_WORKERS": "4"}, ["KVSTORE_NUM_WORKERS (4) contradicts DMLC_NUM_WORKER (2)"]),
        ({**DMLC, "KVSTORE_NUM_SERVERS": "4"}, ["KVSTORE_NUM_SERVERS (4) contradicts"]),
        ({**DMLC, "KVSTORE_SCHEDULER": "tcp://127.0.0.1:1"}, ["contradicts DMLC_PS_ROOT_URI"]),
        ({**DMLC, "DMLC_NUM_WORKER": "two"}, ["DMLC_NUM_WORKER='two'", "from 1"]),
        ({**DMLC, "DMLC_NUM_SERVER": "0"}, ["DMLC_NUM_SERVER='0'"]),
        ({**DMLC, "DMLC_NUM_SERVER": "9" * 5000}, ["DMLC_NUM_SERVER"]),
        ({**DMLC, "DMLC_WORKER_ID": "2"}, ["DMLC_WORKER_ID=2", "2 workers"]),
        ({**DMLC, "DMLC_ROLE": "server", "DMLC_TASK_ID": "1"}, ["DMLC_TASK_ID=1", "3 servers"]),
        ({**DMLC, "DMLC_ROLE": "server", "KVSTORE_SERVER_RANK": "-1"}, ["KVSTORE_SERVER_RANK='-1'"]),
        ({**DMLC, **TORCHRUN, "WORLD_SIZE": "5"}, ["contradicts torchrun", "5 processes", "DMLC_WORKER_ID"]),
        ({**DMLC, "KVSTORE_RANK": "1"}, ["KVSTORE_SIZE is not"]),
        ({**DMLC, "DMLC_PS_ROOT_PORT": "99999"}, ["DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT", "99999"]),
        ({**OURS, "KVSTORE_SCHEDULER": "127.0.0.1:4711"}, ["KVSTORE_SCHEDULER", "tcp://10.0.0.5:4711"]),
        ({**OURS, "KVSTORE_SCHEDULER": "ipc://@" + "n" * 200}, ["107 bytes"]),
        ({**SERVER, "KVSTORE_PORT": "70000"}, ["KVSTORE_PORT"]),
        ({**SERVER, "KVSTORE_PORT": "65536"}, ["KVSTORE_PORT=65536 is not a port"]),
        ({**OURS, "KVSTORE_INSECURE": "yes"}, ["KVSTORE_INSECURE='yes'"]),
        ({**OURS, "KVSTORE_RESTART": "x"}, ["KVSTORE_RESTART='x'"]),
        ({**SERVER, "KVSTORE_HOST": "nowhere.invalid"}, ["nowhere.invalid", "lo 127.0.0.1"]),
        ({**SERVER, "KVSTORE_HOST": "192.0.2.77"}, ["not an address of this machine", "lo 127"]),
        ({**SERVER, "KVSTORE_HOST": "0.0.0.0"}, ["0.0.0.0", "other processes can reach", "lo 127"]),
        ({**SCHEDULER, "KVSTORE_SCHEDULER": FAR}, ["the scheduler's address", "lo 127"]),
        ({**SERVER, "KVSTORE_SCHEDULER": "tcp://nowhere.invalid:1"}, ["nowhere.invalid"]),
        ({**SERVER, "DMLC_INTERFACE": "etx"}, ["DMLC_INTERFACE='etx'", "lo 127.0.0.1"]),
        ({**OURS, "KVSTORE_SCHEDULER": FAR}, ["without encryption", "KVSTORE_INSECURE=1", "kvstore keys"]),
        ({**SCHEDULER, "KVSTORE_HOST": "0.0.0.0"}, ["0.0.0.0", "without encryption"]),
    ],
)  # fmt: skip
def test_what_is_missing_or_wrong_is_named(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(kv.ConfigError) as raised:
        find(environment)
    for word in words:
        assert word in str(raised.value)


NAMES = [*DMLC, *OURS, *OWN, *TORCHRUN, "DMLC_ROLE", "KVSTORE_ROLE", "DMLC_LOCAL", "PORT", "KVSTORE_PORT"]
NAMES += ["DMLC_TASK_ID", "DMLC_WORKER_ID", "KVSTORE_SERVER_RANK", "KVSTORE_KEYS_FD", "KVSTORE_INSECURE"]
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(["0", "1", "2", "worker", "server", "scheduler", "127.0.0.1", "tcp://127.0.0.1:0", ""]),
    st.text(max_size=4).filter(lambda text: "\0" not in text),
)


@given(st.dictionaries(st.sampled_from(sorted(set(NAMES))), VALUES))
def test_anything_else_is_a_part_or_an_error(environment: dict[str, str]) -> None:
    try:
        answer = find(environment)
    except kv.ConfigError as error:
        assert re.search("[A-Z]{3}", str(error))  # it names a variable
    else:
        assert (answer is None) == (not roles.signs(environment))
        assert answer is None or answer.rank >= -1
        assert answer is None or answer.role in roles.ROLES


# ------------------------------------------------------------------------------------------------- keys


@pytest.fixture
def descriptor() -> Any:
    made = os.memfd_create("keys")
    os.write(made, KEYS.to_json())
    yield made
    os.close(made)


def test_keys_come_by_descriptor_and_can_be_read_again(descriptor: int) -> None:
    for _ in range(2):
        assert found(OURS, KVSTORE_KEYS_FD=str(descriptor)).keys == KEYS


def test_keys_come_by_file(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.json"
    assert found(OURS, KVSTORE_KEYS_FILE=written(path, KEYS)).keys == KEYS
    path.chmod(0o640)
    with pytest.raises(kv.ConfigError, match=r"other users can read the keys .*chmod 600"):
        found(OURS, KVSTORE_KEYS_FILE=str(path))


def written(path: Path, keys: JobKeys) -> str:
    path.touch(0o600)
    path.write_bytes(keys.to_json())
    return str(path)


SCHEDULER_S = dataclasses.replace(KEYS, public=KEYS.scheduler)
SERVER_S = dataclasses.replace(KEYS, public=KEYS.servers[1])


def test_with_keys_other_machines_may_be_reached(descriptor: int, tmp_path: Path) -> None:
    answer = found(OURS, KVSTORE_SCHEDULER=FAR, KVSTORE_KEYS_FD=str(descriptor))
    assert (answer.scheduler, answer.insecure) == (FAR, False)
    path = written(tmp_path / "keys", SCHEDULER_S)
    open_door = found(SCHEDULER, KVSTORE_HOST="0.0.0.0", KVSTORE_KEYS_FILE=path)
    assert open_door.host == "0.0.0.0"


def test_a_server_s_rank_is_that_of_its_keys(tmp_path: Path) -> None:
    path = written(tmp_path / "keys", SERVER_S)
    assert found(SERVER, KVSTORE_KEYS_FILE=path).rank == 1
    assert found(SERVER, KVSTORE_KEYS_FILE=path, KVSTORE_SERVER_RANK="1").rank == 1
    with pytest.raises(kv.ConfigError, match="a server, but this is server 2"):
        found(SERVER, KVSTORE_KEYS_FILE=path, KVSTORE_SERVER_RANK="2")


@pytest.mark.parametrize(
    ("keys", "part"), [(KEYS, SERVER), (KEYS, SCHEDULER), (SERVER_S, OURS), (SCHEDULER_S, SERVER)]
)
def test_keys_of_another_role_are_refused(keys: JobKeys, part: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(kv.ConfigError, match="its own file"):
        found(part, KVSTORE_KEYS_FILE=written(tmp_path / "keys", keys))


def test_without_keys_only_trusted_hosts_may_be_reached() -> None:
    assert found(OURS, KVSTORE_SCHEDULER=FAR, KVSTORE_INSECURE="1").insecure


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"KVSTORE_KEYS_FD": "987"}, "KVSTORE_KEYS_FD=987 cannot be read"),
        ({"KVSTORE_KEYS_FD": "x"}, "KVSTORE_KEYS_FD='x'"),
        ({"KVSTORE_KEYS_FILE": "/nonexistent/keys"}, "/nonexistent/keys cannot be read: No such file"),
    ],
)
def test_keys_that_are_not_there(variables: dict[str, str], words: str) -> None:
    with pytest.raises(kv.ConfigError, match=words):
        found(OURS, variables)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        KEYS.to_json()[:-1],
        KEYS.to_json().replace(b"s" * 40, b"s" * 39),
        KEYS.to_json().replace(b"s" * 40, b"s" * 39 + b"~"),
        KEYS.to_json().replace(b'["' + b"c" * 40 + b'", "' + b"d" * 40 + b'"]', b"3"),
        KEYS.to_json().replace(b'"public"', b'"privat"'),
        b"[" * 100_000,
        b" " * (1 << 23),
    ],
)
def test_a_text_that_holds_no_keys(text: bytes) -> None:
    descriptor = os.memfd_create("keys")
    try:
        os.write(descriptor, text)
        with pytest.raises(kv.ConfigError, match=rf"KVSTORE_KEYS_FD={descriptor} holds no keys") as raised:
            found(OURS, KVSTORE_KEYS_FD=str(descriptor))
        assert "sss" not in str(raised.value)
    finally:
        os.close(descriptor)


def test_a_secret_is_not_shown() -> None:
    assert "sss" not in repr(KEYS)
    assert "sss" not in repr(dataclasses.replace(found(OURS), keys=KEYS))


# --------------------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize("name", ["PS_VERBOSE", "PS_DROP_MSG", "PS_RESEND", "DMLC_PS_WATER_MARK"])
def test_what_means_nothing_here_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    roles._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "kvstore.roles"):
        for _ in range(2):
            found(OURS, {name: "10"})
        found(OURS, {name: "0"})
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name} is set and has no effect here: ")


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OURS.items():
        monkeypatch.setenv(name, value)
    assert find() == find(OURS)
    assert roles.signs() == roles.signs(OURS)
