"""``kvstore run -s`` with real processes that stand in for servers and scheduler: starts, ends, secrets.

What is shown here is the launcher's part, for every way in which a server or a scheduler can behave. That the
real ones behave is shown with the stores.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pace
import pytest
from jobs import names_in_memory
from launched import Job, until
from nightly import nightly_unless

from kvstore.launch import service
from kvstore.settings import addresses

DRIVER = """
import json, sys
from kvstore.launch import run, supervisor
from kvstore.launch.service import Service
options = json.loads(sys.argv[1])
supervisor.FIRST_WORD = options.pop("first_word", supervisor.FIRST_WORD)
run._JobSupervisor.leave = options.pop("leave", 0.05)
workers, restarts, prefix = (options.pop(name) for name in ("workers", "restarts", "prefix"))
options["imports"] = tuple(options.get("imports", ()))
again = options.pop("server_restarts", 0)
service = Service(program=(sys.executable, "service.py"), restarts=again, **options)
sys.exit(run.run([sys.executable, "worker.py"], workers, restarts, prefix, service))
"""

HEAD = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
ROLE, RESTART = os.environ["KVSTORE_ROLE"], int(os.environ["KVSTORE_RESTART"])
RANK = int(os.environ.get("KVSTORE_SERVER_RANK" if ROLE == "server" else "KVSTORE_RANK", 0))
NAME = f"{ROLE}-{RANK}"
HERE = Path(__file__).parent
def say(word, text=None):
    part = HERE / f"part-{word}-{NAME}"
    part.write_text(str(os.getpid()) if text is None else text)
    part.rename(HERE / f"{word}-{NAME}")
def said(word, name):
    return (HERE / f"{word}-{name}").exists()
def wait_for(word, name):
    while not said(word, name):
        time.sleep(0.005)
def wait_for_all():
    wait_for("ready", "scheduler-0")
    for rank in range(int(os.environ["KVSTORE_NUM_SERVERS"])):
        wait_for("ready", f"server-{rank}")
def forever():
    while True:
        signal.pause()
def tell():
    from kvstore import roles
    found = roles.find()
    fields = {**vars(found), "keys": found.keys and vars(found.keys)}
    told = {"found": fields, "environment": dict(os.environ), "arguments": sys.argv[1:]}
    say("told", json.dumps(told, default=bytes.decode))
def report():
    address = os.environ["KVSTORE_SCHEDULER"].replace(":0", ":4711")
    descriptor = int(sys.argv[sys.argv.index("--report-fd") + 1])
    os.write(descriptor, address.encode() + b"\\n")
    os.close(descriptor)
"""
#: They stay until the launcher ends them.
STAY = """
if ROLE == "scheduler":
    report()
say("ready")
forever()
"""


class Servers:
    """A job with servers, whose scripts say what happens in it."""

    def __init__(self, job: Job) -> None:
        self.job, self.folder = job, job.folder

    def run(self, service: str, worker: str, **options: Any) -> subprocess.Popen[bytes]:
        (self.folder / "service.py").write_text(HEAD + service)
        (self.folder / "worker.py").write_text(HEAD + worker)
        (self.folder / "driver.py").write_text(DRIVER)
        defaults = {"workers": 2, "servers": 2, "restarts": 0, "prefix": True}
        return self.job.start("driver.py", json.dumps({**defaults, **options}))

    def said(self, word: str, *names: str) -> bool:
        return all((self.folder / f"{word}-{name}").exists() for name in names)

    def text(self, word: str, name: str) -> str:
        return (self.folder / f"{word}-{name}").read_text()

    def told(self, name: str) -> Any:
        return json.loads(self.text("told", name))

    def pid(self, name: str) -> int:
        return int(self.text("ready", name))


@pytest.fixture
def servers(job: Job) -> Servers:
    return Servers(job)


ALL = ("scheduler-0", "server-0", "server-1", "worker-0", "worker-1")
SERVICES = ALL[:3]


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=pace.seconds(60))
    return process.returncode, out, err


# ------------------------------------------------------------------------------------------ their variables


TELL = "tell()\n" + STAY
TELLING = "tell()\nwait_for_all()"


def test_each_process_finds_its_part(servers: Servers) -> None:
    code, _, err = finish(servers.run(TELL, TELLING))
    assert (code, err) == (0, b"")
    jobs = set()
    for name in ALL:
        role, rank = name.split("-")
        part = servers.told(name)["found"]
        assert (part["role"], part["rank"]) == (role, int(rank))
        assert (part["num_workers"], part["num_servers"]) == (2, 2)
        assert part["scheduler"] == f"tcp://127.0.0.1:{0 if role == 'scheduler' else 4711}"
        assert (part["host"], part["port"]) == ("127.0.0.1", 0)
        assert (part["keys"], part["insecure"], part["restart"]) == (None, False, 0)
        jobs.add(part["job"])
    (job,) = jobs
    assert len(job) == 32


def test_scripts_written_for_mxnet_find_their_variables(servers: Servers) -> None:
    finish(servers.run(TELL, TELLING))
    for name in ("server-0", "server-1", "worker-0", "worker-1"):
        environment = servers.told(name)["environment"]
        assert environment["DMLC_ROLE"] == name.split("-")[0]
        assert (environment["DMLC_NUM_WORKER"], environment["DMLC_NUM_SERVER"]) == ("2", "2")
        assert (environment["DMLC_PS_ROOT_URI"], environment["DMLC_PS_ROOT_PORT"]) == ("127.0.0.1", "4711")
        assert environment["DMLC_LOCAL"] == "0"


def test_a_server_has_no_place_among_the_workers(servers: Servers) -> None:
    place = {"KVSTORE_RANK": "0", "KVSTORE_SIZE": "1", "KVSTORE_LOCAL_RANK": "0", "KVSTORE_LOCAL_SIZE": "1"}
    servers.job.environment |= place
    finish(servers.run(TELL, TELLING))
    for name in SERVICES:
        assert not set(place) & set(servers.told(name)["environment"])
    assert servers.told("worker-1")["environment"]["KVSTORE_LOCAL_SIZE"] == "2"


def test_what_an_earlier_launcher_left_behind_does_not_count(servers: Servers) -> None:
    servers.job.environment |= {
        "KVSTORE_ROLE": "server",
        "KVSTORE_JOB": "old",
        "KVSTORE_SCHEDULER": "tcp://127.0.0.1:1",
        "KVSTORE_KEYS_FILE": "/nonexistent",
        "KVSTORE_KEYS_FD": "77",
        "KVSTORE_SERVER_RANK": "9",
        "DMLC_ROLE": "scheduler",
        "DMLC_PS_ROOT_URI": "10.1.1.1",
        "DMLC_PS_ROOT_PORT": "1",
        "DMLC_NUM_WORKER": "7",
        "DMLC_NUM_SERVER": "7",
        "DMLC_WORKER_ID": "6",
        "DMLC_SERVER_ID": "6",
        "DMLC_NODE_HOST": "10.1.1.2",
        "DMLC_INTERFACE": "none",
        "DMLC_LOCAL": "1",
        "PORT": "80",
    }
    code, _, err = finish(servers.run(TELL, TELLING))
    assert (code, err) == (0, b"")
    for name in ALL:
        part = servers.told(name)["found"]
        assert (part["rank"], part["host"], part["port"]) == (int(name[-1]), "127.0.0.1", 0)


def test_unix_sockets_have_the_job_s_name_and_no_file(servers: Servers) -> None:
    assert finish(servers.run(TELL, TELLING, transport="ipc"))[0] == 0
    for name in ALL:
        told = servers.told(name)
        assert told["found"]["scheduler"] == f"ipc://@kvstore/{told['found']['job']}/scheduler"
        assert told["environment"]["DMLC_LOCAL"] == "1"
        assert "DMLC_PS_ROOT_URI" not in told["environment"]


def test_options_of_servers_reach_them(servers: Servers) -> None:
    servers.job.environment["PYTHONPATH"] = "/before"
    options = {
        "snapshot": "shots",
        "snapshot_interval": 2.5,
        "imports": ["one", "two"],
        "import_path": "/mine",
    }
    assert finish(servers.run(TELL, TELLING, **options))[0] == 0
    server, worker = servers.told("server-1"), servers.told("worker-1")
    assert server["arguments"] == ["server", "--import", "one", "--import", "two"]
    assert server["environment"]["KVSTORE_SNAPSHOT"] == str(servers.folder / "shots")
    assert server["environment"]["KVSTORE_SNAPSHOT_INTERVAL"] == "2.5"
    assert server["environment"]["PYTHONPATH"] == "/mine:/before"
    assert worker["environment"]["PYTHONPATH"] == "/before"
    assert servers.told("scheduler-0")["environment"]["PYTHONPATH"] == "/before"


def test_output_says_where_it_comes_from(servers: Servers) -> None:
    service = 'print("hello", flush=True)\n' + STAY
    code, out, _ = finish(servers.run(service, 'wait_for_all(); print("hello")'))
    marks = (b"scheduler", b"server 0", b"server 1", b"0", b"1")
    assert (code, sorted(out.splitlines())) == (0, sorted(b"[%s] hello" % mark for mark in marks))
    for old in servers.folder.glob("ready-*"):  # else workers of the second job wait for a dead server
        old.unlink()
    code, out, _ = finish(servers.run(service, 'wait_for_all(); print("hello")', prefix=False))
    assert (code, out) == (0, b"hello\n" * 5)


def test_no_process_starts_before_the_scheduler_says_where_it_is(servers: Servers) -> None:
    service = """
say("started")
if ROLE == "scheduler":
    wait_for("go", "test")
    report()
forever()
"""
    worker = 'say("started"); wait_for("started", "server-0"); wait_for("started", "server-1")'
    process = servers.run(service, worker)
    until(lambda: servers.said("started", "scheduler-0"))
    time.sleep(0.3)
    assert not any(servers.said("started", name) for name in ALL[1:])
    (servers.folder / "go-test").touch()
    assert finish(process)[0] == 0
    assert servers.said("started", *ALL)


# ------------------------------------------------------------------------------------------------ how it ends


def test_servers_that_leave_by_themselves_are_not_disturbed(servers: Servers) -> None:
    service = """
signal.signal(signal.SIGTERM, lambda *_: say("disturbed"))
if ROLE == "scheduler":
    report()
wait_for("done", "worker-0")
time.sleep(0.3)
say("left")
"""
    code, _, err = finish(servers.run(service, 'say("done")', leave=20))
    assert (code, err) == (0, b"")
    assert servers.said("left", *SERVICES)
    assert not any(servers.said("disturbed", name) for name in SERVICES)


def test_servers_that_stay_are_asked_to_end(servers: Servers) -> None:
    service = 'signal.signal(signal.SIGTERM, lambda *_: (say("asked"), sys.exit(3)))\n' + STAY
    code, _, err = finish(servers.run(service, "wait_for_all()"))
    assert (code, err) == (0, b"")
    assert servers.said("asked", *SERVICES)


def test_servers_that_do_not_listen_are_killed(servers: Servers) -> None:
    service = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + STAY
    assert finish(servers.run(service, 'wait_for("ready", "server-0")', workers=1, servers=1))[0] == 0
    assert servers.job.alive() == []


def fails(name: str, how: str) -> str:
    """Have one process say 30 lines and fail, when all are there."""
    return f"""
if ROLE == "scheduler":
    report()
say("ready")
if NAME == "{name}":
    wait_for("ready", "worker-0"); wait_for("ready", "worker-1")
    for number in range(30):
        print("line", number, file=sys.stderr)
    {how}
forever()
"""


@pytest.mark.parametrize(
    ("name", "how", "code", "words"),
    nightly_unless(
        lambda name, how, *_: (name[-1] == "0") == ("exit" not in how),
        [
            ("server-1", "sys.exit(7)", 7, b"server 1 failed with exit code 7 after "),
            (
                "server-0",
                "os.kill(os.getpid(), signal.SIGKILL)",
                137,
                b"server 0 was ended by SIGKILL after ",
            ),
            ("scheduler-0", "sys.exit(7)", 7, b"the scheduler failed with exit code 7 after "),
            ("scheduler-0", "os.abort()", 134, b"the scheduler was ended by SIGABRT after "),
        ],
    ),
)
def test_a_failure_of_theirs_ends_the_job_and_is_told_last(
    servers: Servers, name: str, how: str, code: int, words: bytes
) -> None:
    found, _, err = finish(servers.run(fails(name, how), 'say("ready")\nforever()'))
    assert found == code
    *_, sentence = [line for line in err.splitlines() if line.startswith(b"kvstore run: ")]
    assert sentence.startswith(b"kvstore run: " + words)
    assert err.endswith(sentence + b"\n" + b"".join(b"line %d\n" % number for number in range(10, 30)))
    assert servers.job.alive() == []


def dead(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.mark.parametrize(
    ("how", "code"), nightly_unless(lambda _, code: code == 134, [("sys.exit(7)", 7), ("os.abort()", 134)])
)
def test_workers_that_fail_because_of_a_server_do_not_take_its_place(
    servers: Servers, how: str, code: int
) -> None:
    fall = 'say("ready")\nwait_for("go", "test")\n'
    service = f"if ROLE == 'scheduler': report()\n{fall}\nif NAME == 'server-1': {how}\nforever()"
    process = servers.run(service, f"{fall}\nsys.exit(1)")
    until(lambda: servers.said("ready", *ALL))
    process.send_signal(signal.SIGSTOP)  # so that it sees all of them at once
    (servers.folder / "go-test").touch()
    until(lambda: all(dead(servers.pid(name)) for name in ALL[2:]))
    process.send_signal(signal.SIGCONT)
    found, _, err = finish(process)
    assert b"kvstore run: server 1 " in err
    assert found == code


@pytest.mark.parametrize(
    ("start", "code", "words"),
    [
        ('sys.exit("no room")', 1, b"the scheduler failed with exit code 1"),
        ("sys.exit(0)", 1, b"the scheduler ended too early"),
        (
            'os.close(int(sys.argv[-1])); say("closed"); forever()',
            1,
            b"the scheduler did not say where it is",
        ),
        ('os.write(int(sys.argv[-1]), b"x" * 5000); forever()', 1, b"the scheduler did not say where it is"),
        ("forever()", 1, b"the scheduler did not say where it is"),
    ],
)
def test_a_scheduler_that_never_says_where_it_is(
    servers: Servers, start: str, code: int, words: bytes
) -> None:
    first_word = {"first_word": 1.5} if start == "forever()" else {}
    found, _, err = finish(servers.run(start, 'say("started")', **first_word))
    assert found == code
    assert b"kvstore run: " + words in err
    assert not servers.said("started", "worker-0")


def test_a_failing_worker_takes_servers_with_it(servers: Servers) -> None:
    worker = 'wait_for("ready", "server-1")\nif RANK == 1: sys.exit(5)\nforever()'
    code, _, err = finish(servers.run(STAY, worker))
    assert code == 5
    assert b"kvstore run: rank 1 failed with exit code 5" in err
    assert servers.job.alive() == []


LEAVING = """
def leave(*_):
    time.sleep(0.5)
    say("alone" if any(said("asked", f"server-{rank}") for rank in (0, 1)) else "took leave")
    sys.exit(1)
signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
say("ready")
wait_for("ready", "server-0"); wait_for("ready", "server-1")
if RANK == 1:
    wait_for("ready", "worker-0")
    END
forever()
"""
ASKED = """
signal.signal(signal.SIGTERM, lambda *_: (say("asked"), sys.exit(0)))
signal.signal(signal.SIGINT, lambda *_: (say("asked"), sys.exit(0)))
""" + STAY  # fmt: skip


def test_workers_that_must_end_can_still_take_leave_of_servers(servers: Servers) -> None:
    code, _, _ = finish(servers.run(ASKED, LEAVING.replace("END", "sys.exit(5)")))
    assert code == 5
    assert servers.said("took leave", "worker-0")
    assert servers.said("asked", *SERVICES)


@pytest.mark.parametrize(
    "number", nightly_unless(lambda number: number == signal.SIGTERM, [signal.SIGINT, signal.SIGTERM])
)
def test_a_signal_ends_the_workers_and_then_the_servers(servers: Servers, number: signal.Signals) -> None:
    process = servers.run(ASKED, LEAVING.replace("END", "pass"))
    until(lambda: servers.said("ready", *ALL))
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert err.endswith(b"because of %s\n" % number.name.encode())
    assert servers.said("took leave", "worker-0", "worker-1")
    assert servers.said("asked", *SERVICES)


def test_a_signal_while_only_the_scheduler_runs(servers: Servers) -> None:
    process = servers.run('say("ready")\nforever()', 'say("started")')
    until(lambda: servers.said("ready", "scheduler-0"))
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 128 + signal.SIGINT
    assert not servers.said("started", "worker-0")


def test_a_second_ctrl_c_kills_servers_too(servers: Servers) -> None:
    deaf = 'for one in (signal.SIGINT, signal.SIGTERM): signal.signal(one, lambda *_: say("again"))\n'
    process = servers.run(deaf + STAY, deaf + 'say("ready")\nwhile True: time.sleep(1)')
    until(lambda: servers.said("ready", *ALL))
    process.send_signal(signal.SIGINT)
    until(lambda: servers.said("again", "worker-0", "worker-1"))
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 128 + signal.SIGINT
    assert servers.job.alive() == []


@pytest.mark.parametrize("early", nightly_unless(lambda early: not early, [True, False]))
def test_kill_9_of_the_launcher_ends_all(servers: Servers, early: bool) -> None:
    process = servers.run(STAY, 'say("ready")\nforever()')
    until(lambda: servers.said("ready", *(ALL[:1] if early else ALL)))
    process.kill()
    process.communicate(timeout=pace.seconds(60))
    until(lambda: not servers.job.alive())


# ------------------------------------------------------------------------------------------------- restarts

AGAIN = """
if ROLE == "scheduler":
    report()
    say("ready")
    forever()
with open(HERE / f"log-{NAME}", "a") as log:
    log.write(f"{RESTART} ")
if RANK == 1 and RESTART < 2:
    sys.exit(6)
say("ready")
forever()
"""
PATIENT = "wait_for_all()"


def test_a_server_starts_again_with_its_rank_and_leaves_the_others_alone(servers: Servers) -> None:
    code, _, err = finish(servers.run(AGAIN, PATIENT, snapshot="shots", server_restarts=2))
    assert code == 0
    assert servers.text("log", "server-1") == "0 1 2 "
    assert servers.text("log", "server-0") == "0 "
    assert b"server 1 failed with exit code 6" in err
    assert b"restarting it (1 of 2)" in err
    assert b"restarting it (2 of 2)" in err


def test_when_the_restarts_are_used_up_the_failure_ends_the_job(servers: Servers) -> None:
    code, _, err = finish(servers.run(AGAIN, PATIENT, snapshot="shots", server_restarts=1))
    assert code == 6
    assert b"(1 of 1)" in err
    assert b"kvstore run: server 1 failed with exit code 6" in err


def test_restarts_of_workers_and_of_servers_are_counted_apart(servers: Servers) -> None:
    service = AGAIN.replace("RESTART < 2", "RESTART < 1")
    worker = PATIENT + "\nif RESTART == 0 and RANK == 0: sys.exit(4)"
    code, _, err = finish(servers.run(service, worker, snapshot="shots", server_restarts=1, restarts=1))
    assert code == 0
    assert err.count(b"restarting it (1 of 1)") == 2


def test_the_scheduler_does_not_start_again(servers: Servers) -> None:
    service = fails("scheduler-0", "sys.exit(7)")
    options = {"snapshot": "shots", "server_restarts": 5, "restarts": 5}
    assert finish(servers.run(service, 'say("ready")\nforever()', **options))[0] == 7


# --------------------------------------------------------------------------------------------------- secrets


def secrets_of(servers: Servers) -> dict[str, str]:
    return {name: servers.told(name)["found"]["keys"]["secret"] for name in ALL}


def test_each_process_gets_its_own_secret_and_all_that_is_public(servers: Servers) -> None:
    assert finish(servers.run(TELL, TELLING, secure=True))[0] == 0
    keys = {name: servers.told(name)["found"]["keys"] for name in ALL}
    assert len(set(secrets_of(servers).values())) == len(ALL)
    publics = {name: found["public"] for name, found in keys.items()}
    for found in keys.values():
        assert found["scheduler"] == publics["scheduler-0"]
        assert found["servers"] == [publics["server-0"], publics["server-1"]]
        assert sorted(found["allowed"]) == sorted(publics.values())
        assert found["secret"] not in publics.values()


def test_keys_fit_together(servers: Servers) -> None:
    import zmq

    finish(servers.run(TELL, TELLING, secure=True))
    for name in ALL:
        found = servers.told(name)["found"]["keys"]
        assert zmq.curve_public(found["secret"].encode()) == found["public"].encode()


def test_secrets_are_nowhere_to_be_seen(servers: Servers) -> None:
    before = names_in_memory()
    servers.job.environment["TMPDIR"] = str(servers.folder / "tmp")
    (servers.folder / "tmp").mkdir()
    worker = 'tell()\nsay("ready")\nwait_for("go", "test")'
    process = servers.run(TELL, worker, secure=True)
    until(lambda: servers.said("ready", *ALL))
    secrets = [secret.encode() for secret in secrets_of(servers).values()]
    held = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    assert not [name for name in held if "kvstore-keys" in name]
    pids = servers.job.alive()
    assert len(pids) >= len(ALL) + 1
    for pid in pids:
        for what in ("cmdline", "environ"):
            text = Path(f"/proc/{pid}/{what}").read_bytes()
            assert not any(secret in text for secret in secrets)
    assert os.listdir(servers.folder / "tmp") == []
    (servers.folder / "go-test").touch()
    code, out, err = finish(process)
    assert code == 0
    assert not any(secret in out + err for secret in secrets)
    assert names_in_memory() <= before


def test_a_process_holds_no_keys_but_its_own(servers: Servers) -> None:
    look = """
held = []
for one in os.listdir("/proc/self/fd"):
    try:
        held.append(os.readlink(f"/proc/self/fd/{one}"))
    except OSError:
        pass
say("held", json.dumps([name for name in held if "kvstore-keys" in name]))
"""
    assert finish(servers.run(look + STAY, look + "wait_for_all()", secure=True))[0] == 0
    for name in ALL:
        assert len(json.loads(servers.text("held", name))) == 1


def test_keys_cannot_be_changed_by_their_readers(servers: Servers) -> None:
    change = """
try:
    os.pwrite(int(os.environ["KVSTORE_KEYS_FD"]), b"x", 0)
except PermissionError:
    say("sealed")
"""
    assert finish(servers.run(change + STAY, change + "wait_for_all()", secure=True))[0] == 0
    assert servers.said("sealed", *ALL)


def test_a_restarted_process_keeps_its_keys(servers: Servers) -> None:
    worker = """
from kvstore import roles
say(f"keys{RESTART}", roles.find().keys.secret.decode())
wait_for("ready", "server-1")
if RANK == 1 and RESTART == 0:
    sys.exit(1)
"""
    assert finish(servers.run(STAY, worker, secure=True, restarts=1))[0] == 0
    assert servers.text("keys0", "worker-1") == servers.text("keys1", "worker-1")


def outward() -> str:
    for number in addresses.interface_addresses().values():
        if not addresses.is_loopback(number):
            return number
    pytest.skip("this machine has no network interface but the loopback")


def test_another_host_means_keys(servers: Servers) -> None:
    host = outward()
    assert finish(servers.run(TELL, TELLING, host=host))[0] == 0
    for name in ALL:
        part = servers.told(name)["found"]
        assert part["host"] == host
        assert part["keys"]["secret"]
        assert part["scheduler"].startswith(f"tcp://{host}:")


def test_or_the_word_that_there_need_be_none(servers: Servers) -> None:
    assert finish(servers.run(TELL, TELLING, host=outward(), insecure=True))[0] == 0
    for name in ALL:
        part = servers.told(name)["found"]
        assert (part["keys"], part["insecure"]) == (None, True)


def test_a_host_of_the_loopback_needs_none(servers: Servers) -> None:
    assert finish(servers.run(TELL, TELLING, host="127.0.0.2"))[0] == 0
    part = servers.told("server-0")["found"]
    assert (part["host"], part["keys"], part["insecure"]) == ("127.0.0.2", None, False)


# ------------------------------------------------------------------------------------ the scheduler once more

SCHEDULER_FAILS = """
if ROLE == "scheduler":
    say(f"journal{RESTART}", os.environ.get("KVSTORE_JOURNAL", ""))
    say(f"address{RESTART}", os.environ["KVSTORE_SCHEDULER"])
    report()
    if RESTART < 2:
        wait_for("ready", "worker-0")
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    say("ready")
forever()
"""
SCHEDULER_AWAITED = """
say("ready")
wait_for("ready", "scheduler-0")
"""


def test_a_scheduler_is_started_again_at_its_address(servers: Servers) -> None:
    code, _, err = finish(servers.run(SCHEDULER_FAILS, SCHEDULER_AWAITED, scheduler_restarts=2))
    assert code == 0, err
    assert b"the scheduler was ended by SIGKILL" in err
    assert b"restarting it (2 of 2)" in err
    told = [servers.text(f"address{count}", "scheduler-0") for count in range(3)]
    assert told == ["tcp://127.0.0.1:0", "tcp://127.0.0.1:4711", "tcp://127.0.0.1:4711"]
    folders = {servers.text(f"journal{count}", "scheduler-0") for count in range(3)}
    assert len(folders) == 1
    assert not Path(folders.pop()).exists()


def test_the_variable_names_the_folder_of_a_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    def journal(**options: Any) -> str:
        made = service.service_of_options(1, "", options)
        assert made is not None
        return made.journal

    assert journal(scheduler_restarts=1) == ""
    monkeypatch.setenv("KVSTORE_JOURNAL", "/its/folder")
    assert journal(scheduler_restarts=1) == "/its/folder"
    assert journal(scheduler_restarts=1, journal="/another") == "/another"
    assert journal() == "", "the scheduler reads the variable itself"


def test_a_scheduler_that_fails_too_often_ends_the_job(servers: Servers) -> None:
    code, _, err = finish(servers.run(SCHEDULER_FAILS, SCHEDULER_AWAITED, scheduler_restarts=1))
    assert code == 137, err
    assert b"restarting it (1 of 1)" in err
