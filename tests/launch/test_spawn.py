"""`kvstore.spawn` with real processes: their variables, the reports of failures, and their end."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

import pace
import pytest
from launched import Job, until
from nightly import nightly_unless

import kvstore as kv

HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
import kvstore as kv
SEEN = os.environ.get("KVSTORE_RANK")  # while the script is imported
RANK = int(SEEN or -1)
HERE = Path(__file__).parent
def say(name):
    (HERE / f"part-{name}-{RANK}").write_text(str(os.getpid()))
    (HERE / f"part-{name}-{RANK}").rename(HERE / f"{name}-{RANK}")
def wait_for(name, rank):
    while not (HERE / f"{name}-{rank}").exists():
        time.sleep(0.005)
def forever():
    while True:
        signal.pause()
"""


def script(job: Job, body: str, call: str) -> subprocess.Popen[bytes]:
    """Start a script whose function `fn` is `body`, and which then does `call`."""
    text = f"{HEAD}\ndef fn(*args):\n{_indented(body)}\nif __name__ == '__main__':\n{_indented(call)}\n"
    (job.folder / "main.py").write_text(text)
    return job.start("-W", "error", "main.py")


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=pace.seconds(60))
    return process.returncode, out.decode(), err.decode()


def test_the_processes_form_a_job_and_get_the_arguments(job: Job) -> None:
    body = """
from kvstore.settings.launchers import detect_placement
place = detect_placement()
assert SEEN == str(place.rank)
numbers = f"{place.rank}/{place.size} {place.local_rank}/{place.local_size}"
os.write(1, f"{place.launcher} {place.job} {numbers} {args}\\n".encode())
"""
    code, out, err = finish(
        script(job, body, "kv.spawn(fn, 3, ('a', 2)); assert 'KVSTORE_RANK' not in os.environ")
    )
    assert (code, err) == (0, "")
    rows = [line.split(maxsplit=3) for line in sorted(out.splitlines(), key=lambda line: line.split()[2])]
    assert len({row[1] for row in rows}) == 1
    assert [(row[0], row[2], row[3]) for row in rows] == [
        ("kvstore", f"{rank}/3", f"{rank}/3 ('a', 2)") for rank in range(3)
    ]


def test_the_caller_s_own_variables_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_JOB", "mine")
    before = dict(os.environ)
    kv.spawn(abs, 1, (1,))
    assert dict(os.environ) == before


FAILURE = """
say("ready")
if RANK == 1:
    wait_for("ready", 0)
    {how}
{rest}
"""
CATCH = """
try:
    kv.spawn(fn, 3)
except kv.WorkerError as error:
    print(error.rank, error.code)
    print(error)
"""


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        (
            "raise ValueError('bad batch')",
            1,
            ["rank 1 failed with exit code 1", "in fn", "ValueError: bad batch"],
        ),
        ("raise ValueError('x' * 200_000)", 1, ["rank 1 failed with exit code 1", "xxx"]),
        # Its UTF-8 is larger than a pipe, and the cut is inside a character.
        (r"raise ValueError('\u6f22' * 200_000)", 1, ["rank 1 failed with exit code 1", ":\n\u6f22"]),
        ("sys.exit(7)", 7, ["rank 1 failed with exit code 7"]),
        ("os._exit(7)", 7, ["rank 1 failed with exit code 7"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, ["rank 1 was ended by SIGKILL"]),
    ],
)
def test_a_failure_ends_the_others_and_is_raised(job: Job, how: str, code: int, words: list[str]) -> None:
    status, out, _ = finish(script(job, FAILURE.format(how=how, rest="forever()"), CATCH))
    assert status == 0
    assert out.startswith(f"1 {code}\n")
    for word in words:
        assert word in out


@pytest.mark.parametrize(("how", "code"), [("raise ValueError('bad batch')", 1), ("os._exit(7)", 7)])
def test_a_failure_is_raised_although_what_the_process_forked_lives(job: Job, how: str, code: int) -> None:
    body = f"""
if RANK == 1:
    if os.fork() == 0:
        say("child")
        forever()
    wait_for("child", 1)
    {how}
forever()
"""
    call = CATCH + "\nos.kill(int((HERE / 'child-1').read_text()), signal.SIGKILL)"
    status, out, _ = finish(script(job, body, call))
    assert status == 0
    assert out.startswith(f"1 {code}\n")
    assert ("bad batch" in out) == (code == 1)


def test_a_process_that_ignores_sigterm_is_killed(job: Job) -> None:
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAILURE.format(
        how="sys.exit(2)", rest="forever()"
    )
    status, out, _ = finish(script(job, body, CATCH))
    assert (status, out.splitlines()[0]) == (0, "1 2")


def test_no_process_is_left_when_the_call_returns(job: Job) -> None:
    call = CATCH + "\nimport multiprocessing\nassert multiprocessing.active_children() == []"
    status, _, err = finish(script(job, FAILURE.format(how="sys.exit(2)", rest="forever()"), call))
    assert (status, err) == (0, "")


def test_a_deadline_names_those_that_are_late(job: Job) -> None:
    body = "if RANK: forever()"
    limit = round(pace.seconds(5))
    call = f"""
try:
    kv.spawn(fn, 2, timeout={limit})
except TimeoutError as error:
    print(type(error).__module__, error)
"""
    status, out, _ = finish(script(job, body, call))
    assert status == 0
    assert out.startswith(f"kvstore.errors not finished after {limit} s: rank 1;")


@pytest.mark.parametrize("group", nightly_unless(lambda group: group, [True, False]))
def test_ctrl_c_ends_all(job: Job, group: bool) -> None:
    (job.folder / "main.py").write_text(
        f"{HEAD}\ndef fn():\n    say('ready')\n    forever()\n"
        "if __name__ == '__main__':\n    try:\n        kv.spawn(fn, 2)\n"
        "    except KeyboardInterrupt:\n        print('interrupted')\n"
    )
    process = job.start("main.py", start_new_session=True)
    until(lambda: job.said("ready", 0, 1))
    (os.killpg if group else os.kill)(process.pid, signal.SIGINT)
    code, out, err = finish(process)
    assert (code, out, err) == (0, "interrupted\n", "")


def test_ctrl_c_waits_until_a_worker_has_imported_its_script(job: Job) -> None:
    (job.folder / "main.py").write_text(
        f"{HEAD}\nBLOCKED = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "def fn():\n    say(f'blocked-{BLOCKED}')\n"
        "if __name__ == '__main__':\n    kv.spawn(fn, 2)\n"
    )
    code, _, err = finish(job.start("main.py"))
    assert code == 0, err
    assert job.said("blocked-True", 0, 1)


def test_kill_9_of_the_caller_ends_all(job: Job) -> None:
    process = script(job, "say('ready')\nforever()", "kv.spawn(fn, 2)")
    until(lambda: job.said("ready", 0, 1))
    process.kill()
    process.communicate(timeout=pace.seconds(60))
    until(lambda: not job.alive())


def test_the_processes_may_start_processes_of_their_own(job: Job) -> None:
    body = """
import multiprocessing
inner = multiprocessing.get_context("spawn").Process(target=print, args=("inner",))
inner.start()
inner.join()
"""
    code, out, _ = finish(script(job, body, "kv.spawn(fn, 1)"))
    assert (code, out) == (0, "inner\n")


def test_a_script_without_its_guard_says_so(job: Job) -> None:
    (job.folder / "main.py").write_text("import kvstore as kv\nkv.spawn(print, 2)\n")
    code, _, err = finish(job.start("main.py"))
    assert code == 1
    last = err.splitlines()[-1]
    assert last.startswith("kvstore.errors.ConfigError: the script calls kvstore.spawn at its top level")
    assert 'if __name__ == "__main__":' in last
    assert err.count("Traceback") == 1


def test_a_function_of_a_session_without_a_file_is_refused(job: Job) -> None:
    text = "import kvstore as kv\ndef fn(): pass\nkv.spawn(fn, 1)\n"
    code, _, err = finish(job.start("-c", text))
    assert code == 1
    assert "is defined in a session and not in a file" in err.splitlines()[-1]


def inside() -> Any:
    def fn() -> None:
        pass

    return fn


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((lambda: None, 1), TypeError, "module level"),
        ((inside(), 1), TypeError, "module level"),
        ((3, 1), TypeError, "must be a function"),
        ((print, 1, (inside(),)), TypeError, "sent to another process"),
        ((print, "2"), TypeError, "n must be an int"),
        ((print, True), TypeError, "n must be an int"),
        ((print, 0), ValueError, "at least 1"),
        ((print, 1, (), 0), ValueError, "timeout"),
        ((print, 1, (), float("nan")), ValueError, "timeout"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        kv.spawn(*arguments)
    assert isinstance(raised.value, kv.KVStoreError)
