"""``kvstore run`` with real processes: output, ends of every kind, restarts, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pace
import pytest
from click.testing import CliRunner
from jobs import names_in_memory
from launched import Job, until
from nightly import nightly_unless

from kvstore.launch.cli import main


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    out, err = process.communicate(timeout=pace.seconds(60))
    return process.returncode, out, err


def by_rank(output: bytes, rank: int) -> list[bytes]:
    prefix = b"[%d] " % rank
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]


SHOW = """
import json
print(json.dumps({name: value for name, value in os.environ.items()}))
print(sys.argv[1:], file=sys.stderr)
"""


def test_workers_know_their_place_and_get_their_arguments(job: Job) -> None:
    script = job.script(SHOW)
    code, out, err = finish(job.run("-n", "3", script, "--epochs", "2", "--", "-n", "7"))
    assert code == 0
    names = set()
    for rank in range(3):
        (line,) = by_rank(out, rank)
        found = json.loads(line)
        names.add(found["KVSTORE_JOB"])
        assert (found["KVSTORE_RANK"], found["KVSTORE_LOCAL_RANK"]) == (str(rank), str(rank))
        assert (found["KVSTORE_SIZE"], found["KVSTORE_LOCAL_SIZE"]) == ("3", "3")
        assert found["KVSTORE_RESTART"] == "0"
        assert by_rank(err, rank) == [b"['--epochs', '2', '--', '-n', '7']"]
    (name,) = names
    assert len(name) == 32


def test_nothing_else_of_the_environment_changes(job: Job) -> None:
    code, out, _ = finish(job.run("-n", "1", "--no-prefix", text=SHOW))
    assert code == 0
    added = {name for name in json.loads(out) if name not in job.environment}
    torch = {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    others = {name for name in added if not name.startswith("KVSTORE_")}
    assert others <= {"PYTHONUNBUFFERED", "LC_CTYPE"} | torch
    assert set(job.environment) <= set(json.loads(out))


def test_an_own_setting_of_buffering_stays(job: Job) -> None:
    job.environment["PYTHONUNBUFFERED"] = ""
    _, out, _ = finish(job.run("-n", "1", "--no-prefix", text=SHOW))
    assert json.loads(out)["PYTHONUNBUFFERED"] == ""


def test_each_job_has_its_own_name(job: Job) -> None:
    names = [json.loads(finish(job.run("-n", "1", "--no-prefix", text=SHOW))[1])["KVSTORE_JOB"] for _ in "ab"]
    assert names[0] != names[1]


@pytest.mark.parametrize("dashes", [["--"], []])
def test_programs_and_modules(job: Job, dashes: list[str]) -> None:
    code, out, _ = finish(job.run("-n", "2", *dashes, "echo", "-n", "hi"))
    assert (code, sorted(out.splitlines())) == (0, [b"[0] hi", b"[1] hi"])
    (job.folder / "package").mkdir()
    (job.folder / "package" / "inner.py").write_text("import sys; print(__name__, sys.argv[1])")
    code, out, _ = finish(job.run("-n", "1", "-m", *dashes, "package.inner", "--flag"))
    assert (code, out) == (0, b"[0] __main__ --flag\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no-such-program"], b"cannot start 'no-such-program'"),
        (["missing.py"], b"there is no file 'missing.py'"),
        (["/"], b"cannot start '/'"),
    ],
)
def test_what_cannot_be_started_is_one_line(job: Job, arguments: list[str], words: bytes) -> None:
    code, out, err = finish(job.run("-n", "2", *arguments))
    assert (code, out) == (1, b"")
    assert err.startswith(b"Error: " + words)
    assert err.count(b"\n") == 1


@pytest.mark.parametrize(
    "arguments", [["x.py"], ["-n", "0", "x.py"], ["-n", "2"], ["-n", "2", "--restarts", "-1", "x"]]
)
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(main, ["run", *arguments]).exit_code == 2


def test_a_flood_of_lines_comes_whole(job: Job) -> None:
    flood = 'sys.stdout.write("".join(f"{RANK} {number} {\'x\' * 80}\\n" for number in range(10_000)))'
    code, out, err = finish(job.run("-n", "3", text=flood))
    assert (code, err) == (0, b"")
    for rank in range(3):
        assert by_rank(out, rank) == [b"%d %d %s" % (rank, number, b"x" * 80) for number in range(10_000)]
    assert out.count(b"\n") == 30_000


def test_any_bytes_and_lines_of_any_length_pass(job: Job) -> None:
    text = """
data = bytes(byte for byte in range(256) if byte != 10) * 8000 + b"\\n\\n" + b"end"
sys.stdout.buffer.write(data)
"""
    code, out, _ = finish(job.run("-n", "1", text=text))
    long = bytes(byte for byte in range(256) if byte != 10) * 8000
    assert code == 0
    assert out == b"[0] " + long + b"\n[0] \n[0] end\n"


def test_lines_are_not_mixed_and_streams_stay_apart(job: Job) -> None:
    text = """
for number in range(300):
    os.write(1, b"out ")
    os.write(2, b"err ")
    os.write(1, b"%d\\n" % number)
    os.write(2, b"%d\\n" % number)
os.write(1, b"no newline")
"""
    code, out, err = finish(job.run("-n", "2", "--no-prefix", text=text))
    assert code == 0
    assert sorted(out.splitlines()) == sorted(
        2 * [*(b"out %d" % number for number in range(300)), b"no newline"]
    )
    assert sorted(err.splitlines()) == sorted(2 * [b"err %d" % number for number in range(300)])


def test_output_comes_while_the_workers_run(job: Job) -> None:
    process = job.run("-n", "1", text='print("early")\nwait_for("read", 0)')
    assert process.stdout is not None
    assert process.stdout.readline() == b"[0] early\n"
    (job.folder / "read-0").touch()
    assert finish(process)[0] == 0


def test_a_reader_that_goes_ends_the_job(job: Job) -> None:
    with job.run("-n", "2", text='while True: print("y" * 1000)', stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(60) == 128 + signal.SIGPIPE


def test_output_that_cannot_be_written_ends_the_job_and_says_why(job: Job) -> None:
    with open("/dev/full", "wb") as full:
        process = job.run("-n", "2", text='print("y")\nforever()', stdout=full)
        code, _, err = finish(process)
    assert code == 1
    assert b"all workers are ended: their output cannot be written: No space left on device" in err
    assert b"SIGPIPE" not in err


@pytest.mark.parametrize("closed", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_standard_streams_may_be_closed(job: Job, closed: list[int]) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    text = 'print("y")\nprint("z", file=sys.stderr)\nsay("done")'
    code, out, err = finish(job.run("-n", "2", text=text, stdin=subprocess.PIPE, preexec_fn=close))
    assert code == 0
    assert job.said("done", 0, 1)
    assert out.count(b"y") == (0 if 1 in closed else 2)
    assert err.count(b"z") == (0 if 2 in closed else 2)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_reads_nothing_does_not_keep_the_job(job: Job, stream: str) -> None:
    """The workers have ended; before, the command waited for that reader for ever."""
    job.environment["KVSTORE_TIMEOUT"] = "2"
    text = f'print("y" * 300_000, file=sys.{stream})\nsay("done")'
    reader, writer = os.pipe()
    with job.run("-n", "2", text=text, **{stream: writer}) as process:
        os.close(writer)
        assert process.wait(pace.seconds(60)) == 1
        assert job.said("done", 0, 1)
        os.close(reader)
        if stream == "stdout":
            assert process.stderr is not None
            words = b"their output cannot be written: the reader has taken nothing for 2 s"
            assert words in process.stderr.read()


def test_a_reader_that_reads_late_gets_all(job: Job) -> None:
    text = 'print("y" * 300_000)\nsay("done")'
    with job.run("-n", "2", text=text) as process:
        until(lambda: job.said("done", 0, 1))
        time.sleep(0.5)  # the workers have ended, or soon will have
        assert process.stdout is not None
        assert process.stdout.read().count(b"y") == 600_000
        assert process.wait(pace.seconds(60)) == 0


def test_a_reader_that_stops_does_not_keep_ctrl_c_off(job: Job) -> None:
    text = 'say("ready")\nwhile True: print("y" * 1000)'
    with job.run("-n", "2", text=text, stderr=subprocess.DEVNULL) as process:
        until(lambda: job.said("ready", 0, 1))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT


FAIL = """
say("ready")
if RANK == 1:
    wait_for("ready", 0)
    for number in range(30):
        print("line", number, file=sys.stderr)
    {how}
forever()
"""


@pytest.mark.parametrize(
    ("how", "code", "words"),
    nightly_unless(
        lambda how, *_: "abort" not in how,
        [
            ("sys.exit(7)", 7, b"failed with exit code 7"),
            ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, b"was ended by SIGKILL"),
            ("os.abort()", 128 + 6, b"was ended by SIGABRT"),
            (
                "os.kill(os.getpid(), signal.SIGRTMIN + 1)",
                128 + signal.SIGRTMIN + 1,
                b"was ended by signal 35",
            ),
        ],
    ),
)
def test_the_first_failure_ends_the_job_and_is_told_last(job: Job, how: str, code: int, words: bytes) -> None:
    found, _, err = finish(job.run("-n", "3", text=FAIL.format(how=how)))
    assert found == code
    *_, sentence = [line for line in err.splitlines() if line.startswith(b"kvstore run: ")]
    assert sentence.startswith(b"kvstore run: rank 1 " + words + b" after ")
    tail = b"".join(b"line %d\n" % number for number in range(10, 30))
    assert err.endswith(sentence + b"\n" + tail)


def test_a_failure_without_a_word_is_told_too(job: Job) -> None:
    code, _, err = finish(job.run("-n", "1", text="sys.exit(3)"))
    assert code == 3
    assert err.endswith(b" s, with an empty stderr\n")


def test_workers_that_fail_because_of_another_do_not_take_its_place(job: Job) -> None:
    text = """
if RANK == 2:
    sys.exit(5)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
forever()
"""
    code, _, err = finish(job.run("-n", "4", text=text))
    assert code == 5
    assert b"rank 2 failed with exit code 5" in err


def test_kill_9_of_a_worker_from_outside(job: Job) -> None:
    process = job.run("-n", "3", text='say("ready")\nforever()')
    until(lambda: job.said("ready", 0, 1, 2))
    os.kill(job.pid("ready", 2), signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 128 + signal.SIGKILL
    assert b"rank 2 was ended by SIGKILL" in err


def test_a_worker_that_ignores_sigterm_is_killed(job: Job) -> None:
    text = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say("deaf")
if RANK == 0:
    wait_for("deaf", 1)
    sys.exit(4)
forever()
"""
    assert finish(job.run("-n", "2", text=text))[0] == 4


GRANDCHILD = """
child = "import signal\\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\\nprint(flush=True)\\nsignal.pause()"
started = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
started.stdout.readline()
say("ready")
"""


@pytest.mark.parametrize(
    "end", ["wait_for('ready', 1 - RANK); sys.exit(0)", "wait_for('ready', 1); sys.exit(2)"]
)
def test_what_workers_started_goes_with_them(job: Job, end: str) -> None:
    code, _, _ = finish(job.run("-n", "2", text=GRANDCHILD + end))
    assert code == (2 if "2" in end else 0)
    assert job.alive() == []  # when the command returns, not some time later


def test_a_grandchild_that_holds_the_pipes_does_not_hold_the_job(job: Job) -> None:
    text = 'subprocess.Popen(["sleep", "1000"], start_new_session=True)\nprint("done")'
    code, out, _ = finish(job.run("-n", "1", text=text, stderr=subprocess.DEVNULL))
    assert (code, out) == (0, b"[0] done\n")
    for pid in job.alive():  # in a session of its own, it is not the job's any more
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "number",
    nightly_unless(
        lambda number: number != signal.SIGINT,  # the next test has it
        [signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    ),
)
def test_a_signal_to_the_launcher_ends_all(job: Job, number: signal.Signals) -> None:
    process = job.run("-n", "2", text=GRANDCHILD + "forever()")
    until(lambda: job.said("ready", 0, 1))
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 128 + number
    assert err.endswith(b"because of %s\n" % number.name.encode())
    assert job.alive() == []


def test_ctrl_c_reaches_the_group_of_the_launcher_and_workers_may_clean_up(job: Job) -> None:
    text = """
say("ready")
try:
    forever()
except KeyboardInterrupt:
    say("cleaned")
"""
    process = job.run("-n", "2", text=text, start_new_session=True)
    until(lambda: job.said("ready", 0, 1))
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process)[0] == 128 + signal.SIGINT
    assert job.said("cleaned", 0, 1)


def test_a_second_ctrl_c_kills(job: Job) -> None:
    text = """
signal.signal(signal.SIGINT, lambda *_: say("again"))
say("ready")
while True:
    time.sleep(1)
"""
    process = job.run("-n", "1", text=text)
    until(lambda: job.said("ready", 0))
    process.send_signal(signal.SIGINT)
    until(lambda: job.said("again", 0))
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 128 + signal.SIGINT


def test_an_ignored_hangup_stays_ignored(job: Job) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = job.run("-n", "1", text='say("ready")\nwait_for("go", 0)')
    finally:
        signal.signal(signal.SIGHUP, before)
    until(lambda: job.said("ready", 0))
    process.send_signal(signal.SIGHUP)
    (job.folder / "go-0").touch()
    assert finish(process)[0] == 0


def test_kill_9_of_the_launcher_ends_all(job: Job) -> None:
    process = job.run("-n", "2", text=GRANDCHILD + "forever()")
    until(lambda: job.said("ready", 0, 1))
    process.kill()
    process.communicate(timeout=pace.seconds(60))
    until(lambda: not job.alive())


def test_kill_9_of_the_launcher_while_it_starts_ends_all(job: Job) -> None:
    process = job.run("-n", "8", text='say("ready")\nforever()')
    until(lambda: any(job.said("ready", rank) for rank in range(8)))
    process.kill()
    process.communicate(timeout=pace.seconds(60))
    until(lambda: not job.alive())


def test_kill_9_of_the_keeper_changes_nothing_for_the_job(job: Job) -> None:
    process = job.run("-n", "1", text='say("ready")\nwait_for("go", 0)\nsay("done")')
    until(lambda: job.said("ready", 0))
    keepers = [pid for pid in job.alive() if b"orphan_reaper.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    (keeper,) = keepers
    os.kill(keeper, signal.SIGKILL)
    (job.folder / "go-0").touch()
    assert finish(process)[0] == 0


RESTARTED = """
with open(HERE / f"log-{RANK}", "a") as log:
    log.write(f"{RESTART} ")
if RANK == 1 and RESTART < 2:
    sys.exit(6)
if RANK == 0:
    while not (HERE / "log-1").exists() or "2" not in (HERE / "log-1").read_text():
        time.sleep(0.005)
"""


def test_restarts_keep_the_rank_and_leave_the_others_alone(job: Job) -> None:
    code, _, err = finish(job.run("-n", "2", "--restarts", "2", text=RESTARTED))
    assert code == 0
    assert (job.folder / "log-1").read_text() == "0 1 2 "
    assert (job.folder / "log-0").read_text() == "0 "
    assert b"restarting it (1 of 2)" in err
    assert b"restarting it (2 of 2)" in err


def test_when_the_restarts_are_used_up_the_failure_ends_the_job(job: Job) -> None:
    code, _, err = finish(job.run("-n", "2", "--restarts", "1", text=RESTARTED))
    assert code == 6
    assert b"(1 of 1)" in err
    assert b"kvstore run: rank 1 failed with exit code 6" in err.splitlines()[-1]


def test_stdin_is_empty(job: Job) -> None:
    code, out, _ = finish(job.run("-n", "2", text="print(repr(sys.stdin.read()))", stdin=subprocess.PIPE))
    assert code == 0
    assert sorted(out.splitlines()) == [b"[0] ''", b"[1] ''"]


def test_no_files_are_left(job: Job) -> None:
    names = names_in_memory()
    job.environment["TMPDIR"] = str(job.folder / "tmp")
    (job.folder / "tmp").mkdir()
    assert finish(job.run("-n", "2", text="import kvstore"))[0] == 0
    assert os.listdir(job.folder / "tmp") == []
    assert names_in_memory() <= names
