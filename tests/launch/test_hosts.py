"""``kvstore run --hosts``: lists of hosts, and jobs that run behind a stand-in for ssh, or behind ssh itself.

The stand-in runs commands on this machine; 127.0.0.2 and 127.0.0.3 are its hosts. That several machines are
several machines is nowhere shown.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pace
import pytest
from click.testing import CliRunner
from launched import MARK, Job, until

import kvstore
from kvstore import ConfigError
from kvstore.errors import ProtocolError
from kvstore.launch.child_process import ProcessRole
from kvstore.launch.cli import main
from kvstore.launch.hosts import messages as m
from kvstore.launch.hosts import remote_hosts
from kvstore.launch.hosts.host_list import Host, HostLayout, of_file, of_list, worker_counts
from kvstore.launch.output import LineReader
from kvstore.settings import addresses

STAND_IN = Path(__file__).parent / "stand_in_for_ssh.py"
ONE, OTHER = "127.0.0.2", "127.0.0.3"
BOTH = ["--hosts", f"{ONE}:2,{OTHER}:2"]


# --------------------------------------------------------------------------------------------- what lists say


def test_a_list_of_hosts() -> None:
    assert of_list("a:4,b:2") == (Host("a", 4), Host("b", 2))
    assert of_list("a, me@b.example") == (Host("a"), Host("me@b.example"))
    assert of_list("[fd00::1]:4,10.0.0.5:1") == (Host("fd00::1", 4), Host("10.0.0.5", 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a host"),
        ("a,,b", "not a host"),
        ("a:b", "not a host"),
        ("-oProxyCommand=x", "not a host"),
        ("me@-oProxyCommand=x", "not a host"),
        ("a b", "not a host"),
        ("a:0", "slots must be from 1"),
        ("a:4,b", "for all hosts, or for none"),
        ("a:4,a:4", "'a' twice"),
    ],
)
def test_what_is_no_list_of_hosts(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        of_list(text)


def test_a_host_file_of_open_mpi_and_one_of_mxnet(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# nodes\n\na slots=4 max_slots=8\n  me@b   slots=2  # the other\n")
    assert of_file(str(file)) == (Host("a", 4), Host("me@b", 2))
    file.write_text("10.0.0.1\n10.0.0.2\n")
    assert of_file(str(file)) == (Host("10.0.0.1"), Host("10.0.0.2"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n", "names no host"),
        ("a:22\n", "line 1 of .* a port or a number of slots"),
        ("a\n-x\n", "line 2 of .* not a host"),
        ("a slots=many\n", "known is slots=4"),
        ("a slots=2\nb\n", "for all hosts, or for none"),
    ],
)
def test_what_is_no_host_file(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=words):
        of_file(str(tmp_path / "hosts"))


def test_a_host_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        of_file("/nonexistent")


def test_slots_are_filled_in_order_and_without_them_all_get_as_many() -> None:
    assert worker_counts(of_list("a:4,b:4"), 8) == [4, 4]
    assert worker_counts(of_list("a:4,b:4,c:4"), 5) == [4, 1, 0]
    assert worker_counts(of_list("a,b,c"), 8) == [3, 3, 2]
    with pytest.raises(ConfigError, match="9 workers do not fit on hosts with 8 slots"):
        worker_counts(of_list("a:4,b:4"), 9)


def test_ranks_are_contiguous_and_servers_take_turns() -> None:
    layout = HostLayout(of_list(f"{ONE}:3,{OTHER}:2,127.0.0.4:9"), 5, 4)
    assert [host.name for host in layout.hosts] == [ONE, OTHER]
    assert [layout.host(ProcessRole("worker", rank)) for rank in range(5)] == [0, 0, 0, 1, 1]
    assert [layout.local(rank) for rank in range(5)] == [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2)]
    assert [layout.address(ProcessRole("server", rank)) for rank in range(4)] == [ONE, OTHER, ONE, OTHER]
    assert layout.address(ProcessRole("scheduler", 0)) == ONE


def test_a_host_that_others_would_not_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"a": "10.0.0.1", "b": "127.0.1.1", "c": "10.0.0.3"}
    monkeypatch.setattr(addresses, "resolve_host", known.get)
    assert HostLayout(of_list("a,me@c"), 2, 1).addresses == ("10.0.0.1", "10.0.0.3")
    assert HostLayout(of_list("b"), 2, 1).addresses == ("127.0.1.1",)
    with pytest.raises(ConfigError, match=r"'b' is 127\.0\.1\.1 here"):
        HostLayout(of_list("a,b"), 2, 1)
    with pytest.raises(ConfigError, match="'d' is not known here"):
        HostLayout(of_list("a,d"), 2, 1)


def test_ssh_never_asks_and_another_program_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_SSH", raising=False)
    assert remote_hosts.ssh_command(None)[:3] == ("ssh", "-o", "BatchMode=yes")
    command = remote_hosts.ssh_command("/usr/bin/ssh -p 22")
    assert command[:5] == (
        "/usr/bin/ssh",
        "-p",
        "22",
        "-o",
        "BatchMode=yes",
    )
    monkeypatch.setenv("KVSTORE_SSH", "'my shell' --fast")
    assert remote_hosts.ssh_command(None) == ("my shell", "--fast")
    assert remote_hosts.ssh_command("other") == ("other",)
    for wrong in (" ", "'"):
        with pytest.raises(ConfigError, match="KVSTORE_SSH"):
            remote_hosts.ssh_command(wrong)


def test_variables_that_are_carried() -> None:
    here = {"KVSTORE_TIMEOUT": "9", "DMLC_NUM_SERVER": "1", "HOME": "/root", "MINE": "1", "PYTHONPATH": "/x"}
    always = {"KVSTORE_TIMEOUT": "9", "DMLC_NUM_SERVER": "1", "PYTHONPATH": "/x"}
    assert remote_hosts.forwarded_variables(here, []) == always
    assert remote_hosts.forwarded_variables(here, ["MINE", "NEW=a=b"]) == {
        **always,
        "MINE": "1",
        "NEW": "a=b",
    }
    with pytest.raises(ConfigError, match="--export OTHER: no such variable"):
        remote_hosts.forwarded_variables(here, ["OTHER"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--python", "x"], "--python is for other hosts"),
        (["--export", "X=1"], "--export is for other hosts"),
        ([*BOTH, "--hostfile", "x"], "contradict each other"),
        ([*BOTH, "-s", "1", "--host", "10.0.0.1"], "--host 10.0.0.1 is for one machine"),
        ([*BOTH, "-s", "1", "--transport", "ipc"], "--transport ipc is for one machine"),
        (["--hosts", ONE + ":1"], "2 workers do not fit"),
    ],
)
def test_options_that_do_not_go_together(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(main, ["run", "-n", "2", *arguments, "x.py"])
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert line.startswith("Error: ")
    assert words in line


# --------------------------------------------------------------------------------------------------- messages


def test_messages_come_out_as_they_went_in_however_they_are_cut() -> None:
    sent = [
        m.OutputLine(2, b"\xff\n" * 1000),
        m.ProcessEnded(3, -9, 1.5, [b"\xff"]),
        m.KeepAlive(),
        m.GroupGone(3),
    ]
    data = b"".join(map(m.encode_message, sent))
    for step in (1, 7, len(data)):
        reader, writer = os.pipe()
        received: list[bytes] = []
        lines = LineReader(os.fdopen(reader, "rb", 0), received.append, b"")
        for start in range(0, len(data), step):
            os.write(writer, data[start : start + step])
            lines.read()
        os.close(writer)
        lines.close()
        assert [m.decode_message(m.FROM_AGENT, line) for line in received] == sent


@pytest.mark.parametrize(
    "line", [b"\xff\xff\n", b"[1]\n", b'["GroupGone","x"]\n', m.encode_message(m.SignalProcess(1, 2, 3.0))]
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        m.decode_message(m.FROM_AGENT, line)


# ------------------------------------------------------------------------------------------------- whole jobs


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=pace.seconds(60))
    return process.returncode, out, err


@pytest.fixture
def far(job: Job) -> Job:
    """A job whose hosts are behind the stand-in."""
    job.environment["KVSTORE_SSH"] = shlex.join([sys.executable, str(STAND_IN)])
    return job


def pid_of(job: Job, what: str) -> int:
    return int((job.folder / what).read_text())


SHOW = """
import json
print(json.dumps({"environment": dict(os.environ), "folder": os.getcwd(), "arguments": sys.argv[1:]}))
"""


def test_processes_know_their_place_on_their_hosts(far: Job) -> None:
    far.environment |= {"KVSTORE_TIMEOUT": "77", "SECRET_OF_MINE": "1", "CHOSEN": "c"}
    options = ["-n", "4", *BOTH, "--export", "CHOSEN", "--export", "MADE=m"]
    code, out, err = finish(far.run(*options, far.script(SHOW), "--epochs", "2"))
    assert (code, err) == (0, b"")
    found = {int(line[1:2]): json.loads(line[4:]) for line in out.splitlines()}
    assert sorted(found) == [0, 1, 2, 3]
    for rank, process in found.items():
        environment = process["environment"]
        assert (environment["KVSTORE_RANK"], environment["KVSTORE_SIZE"]) == (str(rank), "4")
        assert (environment["KVSTORE_LOCAL_RANK"], environment["KVSTORE_LOCAL_SIZE"]) == (str(rank % 2), "2")
        assert (environment["KVSTORE_TIMEOUT"], environment["CHOSEN"], environment["MADE"]) == (
            "77",
            "c",
            "m",
        )
        assert "SECRET_OF_MINE" not in environment
        assert environment["HOME"] == "/"  # the agent's
        assert environment["PATH"].startswith(
            f"{Path(sys.executable).parent}:"
        )  # where `python` is kvstore's
        assert (process["folder"], process["arguments"]) == (str(far.folder), ["--epochs", "2"])
    assert len({process["environment"]["KVSTORE_JOB"] for process in found.values()}) == 1


@pytest.mark.nightly
def test_a_host_file_does_the_same(far: Job) -> None:
    (far.folder / "hosts").write_text(f"{ONE} slots=1\n{OTHER} slots=2\n")
    code, out, _ = finish(far.run("-n", "3", "--hostfile", "hosts", "echo", "hi"))
    assert (code, sorted(out.splitlines())) == (0, [b"[0] hi", b"[1] hi", b"[2] hi"])
    assert pid_of(far, f"ssh-{OTHER}")


def test_the_shared_store_says_that_it_is_for_one_machine(far: Job) -> None:
    text = "import kvstore as kv\ntry: kv.create('shared')\nexcept kv.ConfigError as error: print(error)"
    code, out, _ = finish(far.run("-n", "4", *BOTH, "--no-prefix", text=text))
    assert code == 0
    assert out.count(b"4 workers of which 2 are on this machine; 'shared' is for one machine") == 4


TRAIN = """
import numpy as np
import kvstore as kv
from kvstore import roles
part = roles.find()
(HERE / f"keys-{RANK}").write_text(part.keys.secret.decode() if part.keys else "")
store = kv.create("dist_sync")
out = np.empty(3, np.float32)
store.init("w", np.zeros(3, np.float32))
for step in range(3):
    store.pushpull("w", np.full(3, store.rank + 1, np.float32), out=out)
print(part.host, part.scheduler.rpartition(":")[0], *out)
"""


def test_servers_and_workers_of_several_hosts_sum(far: Job) -> None:
    code, out, err = finish(far.run("-n", "3", "-s", "2", *BOTH, text=TRAIN))
    assert (code, err) == (0, b"")
    lines = [b"[%d] %s tcp://127.0.0.2 6.0 6.0 6.0" % (rank, host.encode()) for rank, host in
             enumerate((ONE, ONE, OTHER))]  # fmt: skip
    assert sorted(out.splitlines()) == lines
    assert far.alive() == []


def test_keys_are_handed_over_and_nowhere_to_be_seen(far: Job) -> None:
    text = TRAIN + '\nsay("ready")\nwait_for("go", 0)'
    process = far.run("-n", "3", "-s", "1", "--secure", *BOTH, text=text)
    until(lambda: far.said("ready", 0, 1, 2))
    secrets = [(far.folder / f"keys-{rank}").read_bytes() for rank in range(3)]
    assert all(len(secret) == 40 for secret in secrets)
    assert len(set(secrets)) == 3
    pids = far.alive()
    assert len(pids) >= 1 + 2 * 2 + 5  # launcher, connections with their agents, processes
    for pid in pids:
        for what in ("cmdline", "environ"):
            seen = Path(f"/proc/{pid}/{what}").read_bytes()
            assert not any(secret in seen for secret in secrets)
    (far.folder / "go-0").touch()
    code, out, err = finish(process)
    assert code == 0
    assert not any(secret in out + err for secret in secrets)
    words = [(far.folder / f"argv-{host}").read_text().splitlines() for host in (ONE, OTHER)]
    assert all(argv[-1] == f"exec {sys.executable} -m kvstore.launch.hosts.remote_agent" for argv in words)


def test_a_host_that_others_reach_means_keys(far: Job) -> None:
    outward = [one for one in addresses.interface_addresses().values() if not addresses.is_loopback(one)]
    if not outward:
        pytest.skip("this machine has no network interface but the loopback")
    code, _, err = finish(far.run("-n", "1", "-s", "1", "--hosts", outward[0], text=TRAIN))
    assert (code, err) == (0, b"")
    assert len((far.folder / "keys-0").read_bytes()) == 40


@pytest.mark.nightly
def test_a_flood_of_lines_comes_whole(far: Job) -> None:
    flood = 'sys.stdout.write("".join(f"{RANK} {number} {\'x\' * 80}\\n" for number in range(30_000)))'
    code, out, err = finish(far.run("-n", "2", "--hosts", f"{ONE},{OTHER}", text=flood))
    assert (code, err) == (0, b"")
    lines = out.splitlines()
    for rank in range(2):
        mine = [line for line in lines if line.startswith(b"[%d]" % rank)]
        assert mine == [b"[%d] %d %d %s" % (rank, rank, number, b"x" * 80) for number in range(30_000)]


@pytest.mark.nightly
def test_streams_stay_apart_and_any_bytes_pass(far: Job) -> None:
    text = 'os.write(1, bytes(range(256)).replace(b"\\n", b"") + b"\\n\\nend")\nos.write(2, b"err")'
    code, out, err = finish(far.run("-n", "1", "--hosts", ONE, text=text))
    assert (code, err) == (0, b"[0] err\n")
    assert out == b"[0] " + bytes(range(256)).replace(b"\n", b"") + b"\n[0] \n[0] end\n"


def test_what_a_login_shell_says_is_no_message(far: Job) -> None:
    far.environment["KVSTORE_TEST_GREETING"] = "Welcome to this host"
    code, out, err = finish(far.run("-n", "2", "--hosts", f"{ONE},{OTHER}", "echo", "hi"))
    assert (code, sorted(out.splitlines()), err) == (0, [b"[0] hi", b"[1] hi"], b"")


# --------------------------------------------------------------------------------------------------- its ends

GRANDCHILD = """
child = "import signal\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\nprint(flush=True)\\nsignal.pause()"
started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
started.stdout.readline()
say("ready")
"""
STAY = GRANDCHILD + "forever()"


def test_the_first_failure_ends_all_hosts_and_is_told_last(far: Job) -> None:
    text = GRANDCHILD + """
if RANK == 3:
    for rank in range(3):
        wait_for("ready", rank)
    for number in range(30):
        print("line", number, file=sys.stderr)
    sys.exit(7)
forever()
"""  # fmt: skip
    process = far.run("-n", "4", *BOTH, text=text)
    until(lambda: far.said("ready", 0, 1, 2, 3))
    since = time.monotonic()
    code, _, err = finish(process)
    assert time.monotonic() - since < pace.seconds(10)
    assert code == 7
    *_, sentence = [line for line in err.splitlines() if line.startswith(b"kvstore run: ")]
    assert sentence.startswith(b"kvstore run: rank 3 on 127.0.0.3 failed with exit code 7 after ")
    assert err.endswith(sentence + b"\n" + b"".join(b"line %d\n" % number for number in range(10, 30)))
    assert far.alive() == []


def test_kill_9_of_a_worker_there(far: Job) -> None:
    process = far.run("-n", "4", *BOTH, text=STAY)
    until(lambda: far.said("ready", 0, 1, 2, 3))
    os.kill(far.pid("ready", 2), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGKILL
    assert b"rank 2 on 127.0.0.3 was ended by SIGKILL" in err
    assert far.alive() == []


def test_kill_9_of_a_connection(far: Job) -> None:
    process = far.run("-n", "4", *BOTH, text=STAY)
    until(lambda: far.said("ready", 0, 1, 2, 3))
    os.kill(pid_of(far, f"ssh-{OTHER}"), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert b"kvstore run: the connection to host 127.0.0.3 ended (python" in err
    assert b"was ended by SIGKILL" in err
    until(lambda: not far.alive())


@pytest.mark.nightly
def test_kill_9_of_an_agent(far: Job) -> None:
    process = far.run("-n", "4", *BOTH, text=STAY)
    until(lambda: far.said("ready", 0, 1, 2, 3))
    os.kill(pid_of(far, f"far-{OTHER}"), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1
    assert b"kvstore run: the connection to host 127.0.0.3 ended" in err
    until(lambda: not far.alive())


PATIENT = """
from kvstore.launch.hosts import connection
from kvstore.launch.cli import main
connection.PATIENCE = 7.0
main()
"""


@pytest.mark.nightly
def test_a_host_that_is_silent_is_lost(far: Job) -> None:
    script = far.script(STAY)
    process = far.start("-c", PATIENT, "run", "-n", "4", *BOTH, script)
    until(lambda: far.said("ready", 0, 1, 2, 3))
    os.kill(pid_of(far, f"far-{OTHER}"), signal.SIGSTOP)
    code, _, err = finish(process)
    assert code == 1
    assert b"kvstore run: host 127.0.0.3 gave no sign of life for 7 s" in err
    assert far.pid("ready", 0) not in far.alive()
    os.kill(pid_of(far, f"far-{OTHER}"), signal.SIGCONT)  # it finds that the launcher is gone
    until(lambda: not far.alive())


@pytest.mark.parametrize("early", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_kill_9_of_the_launcher_ends_all_hosts(far: Job, early: bool) -> None:
    process = far.run("-n", "4", *BOTH, text=STAY)
    until(lambda: far.said("ready", 0) if early else far.said("ready", 0, 1, 2, 3))
    process.kill()
    process.communicate(timeout=pace.seconds(60))
    until(lambda: not far.alive())


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_signal_reaches_all_hosts_and_workers_may_clean_up(far: Job, number: signal.Signals) -> None:
    text = """
def clean(*_):
    say("cleaned")
    sys.exit(0)
signal.signal(signal.SIGINT, clean)
signal.signal(signal.SIGTERM, clean)
say("ready")
forever()
"""
    process = far.run("-n", "4", *BOTH, text=text, start_new_session=True)
    until(lambda: far.said("ready", 0, 1, 2, 3))
    os.killpg(process.pid, number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert err.endswith(b"because of %s\n" % number.name.encode())
    assert far.said("cleaned", 0, 1, 2, 3)


@pytest.mark.nightly
def test_a_reader_that_stops_does_not_keep_ctrl_c_off(far: Job) -> None:
    text = 'say("ready")\nwhile True: print("y" * 1000)'
    hosts = ["--hosts", f"{ONE},{OTHER}"]
    with far.run("-n", "2", *hosts, text=text, stderr=subprocess.DEVNULL) as process:
        until(lambda: far.said("ready", 0, 1))
        time.sleep(0.5)  # all that may be on its way is
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


def test_nor_does_it_hide_a_death(far: Job) -> None:
    text = """
say("ready")
if RANK == 1:
    wait_for("go", 0)
    sys.exit(6)
while True: print("y" * 1000)
"""
    with far.run("-n", "2", "--hosts", f"{ONE},{OTHER}", text=text) as process:
        until(lambda: far.said("ready", 0, 1))
        time.sleep(0.5)
        (far.folder / "go-0").touch()
        until(lambda: far.pid("ready", 0) not in far.alive())  # no process reads, and yet it is ended
        assert finish(process)[0] == 6


def test_restarts_keep_the_rank_and_the_host(far: Job) -> None:
    text = """
with open(HERE / f"log-{RANK}", "a") as log:
    log.write(f"{RESTART}{os.environ['KVSTORE_LOCAL_RANK']} ")
if RANK == 3 and RESTART < 2:
    sys.exit(6)
"""
    code, _, err = finish(far.run("-n", "4", *BOTH, "--restarts", "2", text=text))
    assert code == 0, err
    assert (far.folder / "log-3").read_text() == "01 11 21 "
    assert b"rank 3 on 127.0.0.3 failed with exit code 6" in err
    assert b"restarting it (2 of 2)" in err


# ------------------------------------------------------------------------------------- hosts that do not work


def ssh_that(job: Job, does: str) -> None:
    """Have the hosts reached by a script of the shell."""
    path = job.folder / "ssh-that"
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    job.environment["KVSTORE_SSH"] = str(path)


OLD = "".join(rf"\{byte:03o}" for byte in m.agent_greeting("0.0.0"))


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("echo Permission denied >&2; exit 255", b"log in there without a password?"),
        ("echo no module named kvstore >&2; exit 1", b"is kvstore installed there"),
        (f"printf '{OLD}'; sleep 60", b"has kvstore 0.0.0 and"),
        ("yes nonsense", b"not that of kvstore's agent"),
        ("head -c 100000000 /dev/zero; sleep 60", b"not that of kvstore's agent"),
    ],
)
def test_a_host_that_does_not_answer_as_it_should(job: Job, does: str, words: bytes) -> None:
    ssh_that(job, does)
    code, out, err = finish(job.run("-n", "2", *BOTH, "echo", "hi"))
    assert (code, out) == (1, b"")
    assert words in b" ".join(
        line for line in err.splitlines() if line.startswith(b"kvstore run: host 127.0.0")
    )
    if b">&2" in does.encode():
        assert err.splitlines()[-1] == does.partition("echo ")[2].partition(" >&2")[0].encode()


def test_a_program_in_the_place_of_ssh_that_is_not_there(job: Job) -> None:
    job.environment["KVSTORE_SSH"] = "/nonexistent/ssh"
    code, _, err = finish(job.run("-n", "2", *BOTH, "echo", "hi"))
    assert code == 1
    assert err.startswith(b"Error: cannot start '/nonexistent/ssh'")


def test_a_program_that_is_not_there(far: Job) -> None:
    code, _, err = finish(far.run("-n", "2", *BOTH, "no-such-program"))
    assert code == 1
    assert b"kvstore run: host 127.0.0.2: cannot start 'no-such-program'" in err
    assert far.alive() == []


class AgentProcess:
    """An agent without a launcher: the test speaks to it."""

    def __init__(self, job: Job) -> None:
        options: dict[str, Any] = {"stdin": subprocess.PIPE, "cwd": "/", "bufsize": 0}
        self.process = job.start("-m", "kvstore.launch.hosts.remote_agent", **options)
        self._heard: list[Any] = []
        self._lines = LineReader(self.process.stdout, self._receive, b"", longest=m.LONGEST)

    def say(self, *messages: m.ToAgent) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"".join(map(m.encode_message, messages)))

    def _receive(self, line: bytes) -> None:
        if line not in (b"\n", m.agent_greeting(kvstore.__version__)[1:]):
            self._heard.append(m.decode_message(m.FROM_AGENT, line))

    def hear(self, kind: type) -> Any:
        while not any(isinstance(message, kind) for message in self._heard):
            select.select([self._lines.stream], [], [])
            self._lines.read()
            assert not self._lines.ended, "the agent has ended"
        found = next(message for message in self._heard if isinstance(message, kind))
        self._heard.remove(found)
        return found


@pytest.fixture
def side(job: Job) -> Iterator[AgentProcess]:
    made = AgentProcess(job)
    with made.process:
        yield made


def started(job: Job, text: str) -> m.StartProcess:
    job.script(text)
    variables = [
        (b"KVSTORE_RANK", b"0"),
        (b"KVSTORE_RESTART", b"0"),
        (MARK.encode(), job.environment[MARK].encode()),
    ]
    command = [os.fsencode(sys.executable), os.fsencode(job.folder / "worker.py")]
    return m.StartProcess(1, "worker", 0, command, variables, b"", False)


def test_an_agent_that_hears_nothing_ends_all(job: Job, side: AgentProcess) -> None:
    silence = pace.seconds(1.5)
    side.say(m.JobStart(os.fsencode(job.folder), silence), started(job, STAY))
    until(lambda: side.say(m.KeepAlive()) or job.said("ready", 0))
    for _ in range(6):
        time.sleep(silence / 4)
        side.say(m.KeepAlive())
    assert job.alive()
    assert side.hear(m.ProcessEnded).code < 0  # half a minute before a process would miss it
    assert side.hear(m.GroupGone).number == 1
    assert side.process.wait(30) == 0


def test_an_agent_without_the_folder_of_the_job(job: Job, side: AgentProcess) -> None:
    side.say(m.JobStart(b"/nonexistent", 60.0))
    assert "cannot change to /nonexistent" in side.hear(m.AgentRefused).text


def test_an_agent_sends_no_more_than_is_passed_on(job: Job, side: AgentProcess) -> None:
    text = 'say("ready")\nwhile True: print("y" * 1000)'
    side.say(m.JobStart(os.fsencode(job.folder), 60.0), started(job, text))
    got = 0
    until(lambda: job.said("ready", 0))
    with pytest.raises(TimeoutError):
        while True:
            got += len(_within(side, 1.0).line) + 1  # with its newline
    assert 1 << 20 <= got < 1 << 22
    side.say(m.KeepAlive(got))
    assert _within(side, 5.0).line


def _within(side: AgentProcess, seconds: float) -> Any:
    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return side.hear(m.OutputLine)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------------------------------- ssh itself


def sshd() -> str:
    found = os.environ.get("KVSTORE_TEST_SSHD") or shutil.which(
        "sshd", path=f"{os.environ['PATH']}:/usr/sbin"
    )
    if found is None or shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh and sshd; KVSTORE_TEST_SSHD names an sshd that is not in the path")
    return found


@pytest.fixture
def ssh_port(tmp_path: Path) -> Iterator[int]:
    """A daemon of ssh for this user alone, with keys of its own."""
    program, folder = sshd(), tmp_path / "sshd"
    folder.mkdir()
    for name in ("host", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    (folder / "allowed").write_bytes((folder / "user.pub").read_bytes())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    (folder / "config").write_text(
        f"Port {port}\nListenAddress {ONE}\nListenAddress {OTHER}\nHostKey {folder}/host\nPidFile none\n"
        f"AuthorizedKeysFile {folder}/allowed\nStrictModes no\nPasswordAuthentication no\n"
        "PermitRootLogin prohibit-password\nUsePAM no\nKbdInteractiveAuthentication no\n"
    )
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen([program, "-D", "-e", "-f", str(folder / "config")], stderr=log)
    try:
        time.sleep(0.5)
        if daemon.poll() is not None:
            pytest.skip(f"sshd does not run here: {(folder / 'log').read_text()}")
        yield port
    finally:
        daemon.terminate()
        daemon.wait()


@pytest.mark.nightly
def test_ssh_itself(job: Job, ssh_port: int) -> None:
    options = ["-p", str(ssh_port), "-i", str(job.folder / "sshd" / "user"), "-o", "StrictHostKeyChecking=no",
               "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]  # fmt: skip
    arguments = ["-n", "3", "-s", "1", "--secure", *BOTH, "--ssh-command", shlex.join(["ssh", *options])]
    code, out, err = finish(job.run(*arguments, text=TRAIN))
    assert (code, err) == (0, b"")
    assert sorted(line[:13] for line in out.splitlines()) == [
        b"[0] 127.0.0.2",
        b"[1] 127.0.0.2",
        b"[2] 127.0.0.3",
    ]
    process = job.run(*arguments, text=STAY)
    until(lambda: job.said("ready", 0, 1, 2))
    process.kill()  # sshd's processes are no children of ours
    process.communicate(timeout=pace.seconds(60))
    until(lambda: not job.alive())
