"""``kvstore scheduler``, ``server`` and ``keys``, and what `kvstore run` refuses to start."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pace
import pytest
from click.testing import CliRunner, Result
from launched import Job

import kvstore as kv
from kvstore.launch.cli import main
from kvstore.settings import addresses
from kvstore.settings.keys import JobKeys
from kvstore.settings.parameter_server import PsConfig
from kvstore.settings.roles import Roles, find
from kvstore.stores.parameter_server import role_process


def invoke(*arguments: str, **variables: str | None) -> Result:
    return CliRunner().invoke(main, arguments, env=variables)


class Loop:
    """Stands for a loop: records its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[Roles, PsConfig]] = []
        self.before: Callable[[], None] = lambda: None

    def run(
        self,
        roles: Roles,
        config: PsConfig,
        report: Callable[[str], None] | None = None,
        watch: Callable[[Callable[[], bool]], None] | None = None,
    ) -> None:
        self.before()
        self.calls.append((roles, config))
        if report is not None:
            report(addresses.tcp_address(roles.host, 4242))

    @property
    def roles(self) -> Roles:
        ((roles, _),) = self.calls
        return roles

    @property
    def config(self) -> PsConfig:
        ((_, config),) = self.calls
        return config


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("KVSTORE_", "DMLC_", "PS_")):
            monkeypatch.delenv(name)


def stand_in(monkeypatch: pytest.MonkeyPatch, role: str) -> Loop:
    loop = Loop()
    monkeypatch.setattr(role_process, f"serve_{role}", loop.run)
    return loop


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return stand_in(monkeypatch, "scheduler")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return stand_in(monkeypatch, "server")


def test_a_scheduler_prints_where_it_is(scheduler: Loop) -> None:
    result = invoke("scheduler", "-n", "4", "-s", "2")
    assert (result.exit_code, result.stdout) == (0, "tcp://127.0.0.1:4242\n")
    assert (scheduler.roles.num_workers, scheduler.roles.num_servers) == (4, 2)
    assert (scheduler.roles.host, scheduler.roles.port) == ("127.0.0.1", 0)


def test_or_tells_it_to_a_launcher(scheduler: Loop) -> None:
    ours, theirs = os.pipe()
    result = invoke("scheduler", "-n", "4", "-s", "2", "--report-fd", str(theirs))
    assert (result.exit_code, result.stdout) == (0, "")
    with open(ours, "rb") as pipe:
        assert pipe.read() == b"tcp://127.0.0.1:4242\n"  # to its end: the descriptor is closed


def test_a_launcher_s_descriptor_must_be_one_to_write_to(scheduler: Loop) -> None:
    ours, theirs = os.pipe()
    for descriptor, words in (
        (999_999, "not an open file"),
        (1 << 40, "not an open file"),
        (ours, "reading only"),
    ):
        result = invoke("scheduler", "-n", "4", "-s", "2", "--report-fd", str(descriptor))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
        assert f"--report-fd {descriptor} is" in result.stderr
        assert words in result.stderr
    assert scheduler.calls == []
    os.close(ours)
    os.close(theirs)


def test_a_launcher_that_has_ended_is_told_nothing(scheduler: Loop) -> None:
    ours, theirs = os.pipe()
    scheduler.before = lambda: os.close(ours)
    result = invoke("scheduler", "-n", "4", "-s", "2", "--report-fd", str(theirs))
    os.close(theirs)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "the launcher may have ended" in result.stderr


def test_options_of_a_scheduler(scheduler: Loop) -> None:
    result = invoke("scheduler", "-n", "1", "-s", "1", "--host", "127.0.0.3", "--port", "0")
    assert result.stdout == "tcp://127.0.0.3:4242\n"
    assert scheduler.roles.host == "127.0.0.3"


def test_a_scheduler_for_everybody_tells_an_address_that_others_can_use(scheduler: Loop) -> None:
    outward = [one for one in addresses.interface_addresses().values() if not addresses.is_loopback(one)]
    result = invoke("scheduler", "-n", "1", "-s", "1", "--host", "0.0.0.0", "--insecure")
    assert scheduler.roles.host == "0.0.0.0"
    assert result.stdout == f"tcp://{(outward or ['127.0.0.1'])[0]}:4242\n"


DMLC = {
    "DMLC_ROLE": "server",
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "3",
}


def test_what_no_option_says_comes_from_variables(scheduler: Loop) -> None:
    result = invoke("scheduler", **DMLC)
    assert result.exit_code == 0
    assert (scheduler.roles.role, scheduler.roles.scheduler) == ("scheduler", "tcp://127.0.0.1:9091")
    assert (scheduler.roles.num_workers, scheduler.roles.num_servers) == (2, 3)


def test_options_beat_variables(scheduler: Loop) -> None:
    assert invoke("scheduler", "-n", "7", "-s", "8", "--port", "0", **DMLC).exit_code == 0
    assert (scheduler.roles.num_workers, scheduler.roles.num_servers) == (7, 8)
    assert scheduler.roles.scheduler == "tcp://127.0.0.1:0"


def test_a_scheduler_must_know_how_many_will_come(scheduler: Loop) -> None:
    result = invoke("scheduler", "-n", "4")
    assert result.exit_code == 1
    assert "KVSTORE_NUM_SERVERS" in result.stderr
    assert scheduler.calls == []


def test_options_of_a_server(server: Loop, tmp_path: Path) -> None:
    shots = str(tmp_path)
    arguments = ["--scheduler", "tcp://127.0.0.1:4711", "--rank", "3", "--host", "127.0.0.2", "--port", "5"]
    result = invoke("server", *arguments, "--snapshot", shots, "--snapshot-interval", "1.5")
    assert (result.exit_code, result.stdout) == (0, "")
    assert (server.roles.role, server.roles.rank, server.roles.scheduler) == (
        "server",
        3,
        "tcp://127.0.0.1:4711",
    )
    assert (server.roles.host, server.roles.port) == ("127.0.0.2", 5)
    assert (server.config.snapshot, server.config.snapshot_interval) == (shots, 1.5)


def test_a_server_s_variables(server: Loop) -> None:
    assert invoke("server", **DMLC, KVSTORE_TIMEOUT="7", PS_HEARTBEAT_TIMEOUT="3").exit_code == 0
    assert (server.roles.rank, server.roles.num_servers) == (-1, 3)
    assert (server.config.timeout, server.config.dead_after) == (7, 3)


def test_a_server_that_finds_no_scheduler_says_where_it_has_looked(job: Job) -> None:
    variables = {**job.environment, "KVSTORE_TIMEOUT": "1"}
    command = ["-m", "kvstore.launch", "server", "--scheduler", "tcp://127.0.0.1:1"]
    process = job.start(*command, env=variables)
    out, err = process.communicate(timeout=pace.seconds(60))
    assert (process.returncode, out, err.count(b"\n")) == (1, b"", 1)
    assert err.startswith(b"Error: no scheduler has answered at tcp://127.0.0.1:1 for ")
    assert err.endswith(b"start it, or check the address\n")


def test_a_server_imports_what_it_is_told_first(
    server: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("first_of_two", "second_of_two"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    imported: list[bool] = []
    server.before = lambda: imported.extend(name in sys.modules for name in ("first_of_two", "second_of_two"))
    arguments = ["--import", "first_of_two", "--import", "second_of_two"]
    assert invoke("server", *arguments, **DMLC).exit_code == 0
    assert imported == [True, True]


def test_a_module_that_is_not_there(server: Loop) -> None:
    result = invoke("server", "--import", "no_such_rules", **DMLC)
    assert result.exit_code == 1
    assert "--import no_such_rules" in result.stderr
    assert server.calls == []


@pytest.mark.parametrize("command", ["scheduler", "server"])
def test_errors_of_a_loop_are_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise kv.PeerLostError("worker 1\nis lost")

    stand_in(monkeypatch, command).before = fail
    result = invoke(command, **DMLC)
    assert (result.exit_code, result.stderr) == (1, "Error: worker 1 is lost\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--transport", "ipc"], "--transport is for parameter servers"),
        (["--host", "127.0.0.2"], "--host is for parameter servers"),
        (["--secure"], "--secure is for"),
        (["--import", "rules"], "--import is for"),
        (["--snapshot", "here"], "--snapshot is for"),
        (["--server-restarts", "1"], "--server-restarts is for"),
        (["-s", "1", "--secure", "--insecure"], "contradict each other"),
        (["-s", "1", "--transport", "ipc", "--host", "127.0.0.2"], "unix sockets work on this machine only"),
        (["-s", "1", "--server-restarts", "1"], "--server-restarts needs --snapshot"),
        (["-s", "1", "--host", "0.0.0.0"], "not an address at which other processes can reach the servers"),
        (["-s", "1", "--host", "192.0.2.77"], "not an address of this machine"),
        (["-s", "1", "--host", "no-such-host.invalid"], "not a known host"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    result = invoke("run", "-n", "1", *arguments, "touch", str(started))
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not started.exists()


def test_a_wrong_variable_is_told_before_anything_starts(tmp_path: Path) -> None:
    result = invoke(
        "run", "-n", "1", "-s", "1", "touch", str(tmp_path / "started"), KVSTORE_HEARTBEAT="often"
    )
    assert result.exit_code == 1
    assert "KVSTORE_HEARTBEAT='often'" in result.stderr
    assert not (tmp_path / "started").exists()


# ----------------------------------------------------------------------------------------------------- keys


def test_a_file_of_keys_for_each_process(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    result = invoke("keys", "-n", "2", "-s", "1", str(folder))
    names = ["scheduler.json", "server-0.json", "worker-0.json", "worker-1.json"]
    assert result.stdout.splitlines() == [str(folder / name) for name in names]
    assert sorted(os.listdir(folder)) == names
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in names:
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    keys = {name: JobKeys.from_file(folder / name) for name in names}
    assert len({one.secret for one in keys.values()}) == 4
    for one in keys.values():
        assert one.scheduler == keys["scheduler.json"].public
        assert one.servers == (keys["server-0.json"].public,)
        assert set(one.allowed) == {each.public for each in keys.values()}


def test_keys_serve_where_they_belong(tmp_path: Path, scheduler: Loop, server: Loop) -> None:
    invoke("keys", "-n", "1", "-s", "2", str(tmp_path / "keys"))
    far = {"KVSTORE_SCHEDULER": "tcp://192.0.2.77:4711"}
    path = str(tmp_path / "keys" / "server-1.json")
    assert invoke("server", "--keys", path, "--host", "127.0.0.1", **far).exit_code == 0
    assert server.roles.rank == 1
    everybody = ["-n", "1", "-s", "2", "--host", "0.0.0.0"]
    assert invoke("scheduler", *everybody, "--keys", str(tmp_path / "keys" / "scheduler.json")).exit_code == 0
    worker = find({**far, "KVSTORE_KEYS_FILE": str(tmp_path / "keys" / "worker-0.json")})
    assert worker is not None
    assert worker.keys is not None
    result = invoke("server", "--keys", str(tmp_path / "keys" / "worker-0.json"), **far)
    assert result.exit_code == 1
    assert "are those of a worker, but this is a server" in result.stderr


def test_keys_are_not_overwritten(tmp_path: Path) -> None:
    invoke("keys", "-n", "1", "-s", "1", str(tmp_path))
    before = (tmp_path / "worker-0.json").read_bytes()
    (tmp_path / "scheduler.json").unlink()
    result = invoke("keys", "-n", "1", "-s", "1", str(tmp_path))
    assert result.exit_code == 1
    assert "server-0.json already exists" in result.stderr
    assert (tmp_path / "worker-0.json").read_bytes() == before


def test_keys_are_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "scheduler.json").symlink_to(tmp_path / "target")
    assert invoke("keys", "-n", "1", "-s", "1", str(tmp_path / "keys")).exit_code == 1
    assert (tmp_path / "target").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = invoke("keys", "-n", "1", "-s", "1", str(tmp_path / "file" / "keys"))
    assert result.exit_code == 1
    assert "keys cannot be written" in result.stderr
