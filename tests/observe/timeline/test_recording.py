"""KVSTORE_TIMELINE: a process writes its record when it ends or on request; it never ends a job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pace
import pytest
from launched import Job, until

from kvstore.observe.counters import WAITING
from kvstore.observe.events import BUCKET, CALL, STEP, Event
from kvstore.observe.timeline.job.model import job_of, read_job
from kvstore.observe.timeline.process_trace import ProcessTrace, read_trace

BEGIN = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import kvstore as kv
from kvstore.observe.counters import CALLS, WAITING
from kvstore.observe.events import CALL
from kvstore.observe.native._observe import now
from kvstore.observe.timeline.labels import number_of
from kvstore.store import counters_of
def call(store, key="w"):
    begin = counters_of(store).begin()
    assert begin
    counters_of(store).end(WAITING, begin, 0, 1, 0, 1)
    counters_of(store).record(CALL, begin, now(), CALLS.index("pull"), number_of(key))
def written():
    return sorted(Path(os.environ["KVSTORE_TIMELINE"]).glob("*.json"))
"""


@pytest.fixture
def recorded(job: Job, tmp_path: Path) -> Job:
    job.environment["KVSTORE_TIMELINE"] = str(tmp_path / "deep" / "out")
    job.environment["KVSTORE_LOG"] = "info"
    return job


def ended(job: Job, text: str, *arguments: str, code: int = 0) -> tuple[bytes, bytes]:
    process = job.start("-c", BEGIN + text, *arguments)
    out, err = process.communicate(timeout=pace.seconds(100))
    assert process.returncode == code, err
    return out, err


def files(job: Job) -> list[ProcessTrace]:
    return [read_trace(path) for path in sorted(Path(job.environment["KVSTORE_TIMELINE"]).glob("*.json"))]


def waits(file: ProcessTrace) -> list[Event]:
    return job_of([file]).processes[0].spans(frozenset((WAITING,)))


def test_the_last_store_that_is_closed_writes(recorded: Job) -> None:
    out, err = ended(
        recorded,
        """
one, other = kv.create("local"), kv.create("local")
one.init("w", np.zeros(3, np.float32)); call(one)
one.close(); print(len(written()))
call(other); other.close(); print(len(written()))
third = kv.create("local"); call(third); third.close(); print(len(written()))
os._exit(0)
""",
    )
    assert out == b"0\n1\n1\n"
    (file,) = files(recorded)
    assert [event.kind for event in read_job(recorded.folder / "deep" / "out").processes[0].events] == [
        CALL,
        *(CALL, WAITING) * 3,
    ]
    assert (file.role, file.rank, file.size, file.overwritten) == ("worker", 0, 1, 0)
    assert [(one.number, one.type, one.rank, one.size) for one in file.stores] == [
        (0, "local", 0, 1), (1, "local", 0, 1), (2, "local", 0, 1),
    ]  # fmt: skip
    assert file.labels == ["w"]
    assert re.search(
        rb"INFO kvstore worker 0: timeline: 7 events written to .*/deep/out/worker-0-\S+\.json in ", err
    )


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError"])
def test_the_end_of_a_process_writes(recorded: Job, end: str) -> None:
    ended(
        recorded, f"store = kv.create('local'); call(store); {end}", code=3 if "3" in end else int(bool(end))
    )
    assert len(waits(files(recorded)[0])) == 1


def test_a_process_without_a_store_writes_nothing(recorded: Job) -> None:
    ended(recorded, "from kvstore.observe.timeline import recording; recording.start()")
    assert not Path(recorded.environment["KVSTORE_TIMELINE"]).exists()


def test_without_the_variable_nothing_is_recorded(job: Job) -> None:
    ended(
        job,
        """
from kvstore.observe.native._observe import recorded
store = kv.create("local")
assert not counters_of(store).timed
counters_of(store).record(CALL, 1, 2)
assert recorded() == 0
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
""",
    )


def test_the_folder_is_the_one_of_the_start(recorded: Job) -> None:
    recorded.environment["KVSTORE_TIMELINE"] = "out"
    (recorded.folder / "elsewhere").mkdir()
    ended(recorded, "store = kv.create('local'); call(store); os.chdir('elsewhere')")
    assert len(list((recorded.folder / "out").glob("*.json"))) == 1


def test_the_folder_may_be_in_the_home_of_the_user(recorded: Job) -> None:
    recorded.environment |= {"KVSTORE_TIMELINE": "~/out", "HOME": str(recorded.folder)}
    ended(recorded, "store = kv.create('local'); call(store)")
    assert len(list((recorded.folder / "out").glob("*.json"))) == 1


def test_a_blank_folder_is_none(job: Job) -> None:
    job.environment["KVSTORE_TIMELINE"] = " "
    ended(job, "store = kv.create('local'); assert not counters_of(store).timed")


def test_sigusr1_writes_and_the_process_goes_on(recorded: Job) -> None:
    process = recorded.start(
        "-c",
        BEGIN
        + """
store = kv.create("local")
call(store)
print(flush=True)
while not Path("go").exists():
    call(store)
    time.sleep(0.001)
print("went on")
""",
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    folder = Path(recorded.environment["KVSTORE_TIMELINE"])
    os.kill(process.pid, signal.SIGUSR1)
    until(lambda: list(folder.glob("worker-*.json")))
    before = len(waits(files(recorded)[0]))
    os.kill(process.pid, signal.SIGUSR1)
    until(lambda: len(waits(files(recorded)[0])) > before)
    (recorded.folder / "go").touch()
    out, _ = process.communicate(timeout=pace.seconds(100))
    assert (process.returncode, out) == (0, b"went on\n")
    assert len(list(folder.iterdir())) == 1


OWN = """
which = sys.argv[1]
if which == "handler":
    signal.signal(signal.SIGUSR1, lambda *_: print("mine", flush=True))
elif which == "ignored":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
elif which == "in C":
    import faulthandler
    faulthandler.register(signal.SIGUSR1, file=1, all_threads=False)
store = kv.create("local")
call(store)
os.kill(os.getpid(), signal.SIGUSR1)
time.sleep(0.2)
print(len(written()))
"""


@pytest.mark.parametrize(
    ("which", "out"),
    [("handler", rb"mine\n0\n"), ("ignored", rb"0\n"), ("in C", rb"(?:Stack|Current thread).*\n0\n")],
)
def test_a_handler_of_the_application_stays(recorded: Job, which: str, out: bytes) -> None:
    told, _ = ended(recorded, OWN, which)
    assert re.fullmatch(out, told, re.DOTALL), told
    assert len(files(recorded)) == 1  # at its end


def test_stores_of_other_threads(recorded: Job) -> None:
    ended(
        recorded,
        """
def train():
    store = kv.create("local")
    call(store)
    store.close()
thread = threading.Thread(target=train, name="trainer"); thread.start(); thread.join()
assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
""",
    )
    assert len(waits(files(recorded)[0])) == 1


def test_sigusr1_writes_where_the_store_is_of_another_thread(recorded: Job) -> None:
    out, err = ended(
        recorded,
        """
stores = []
thread = threading.Thread(target=lambda: stores.append(kv.create("local"))); thread.start(); thread.join()
call(stores[0])
for count in (1, 2):
    before = [path.open() for path in written()]  # while one is open, no new file has its number
    os.kill(os.getpid(), signal.SIGUSR1)
    while [path.stat().st_ino for path in written()] == [os.fstat(one.fileno()).st_ino for one in before]:
        time.sleep(0.01)
if not os.fork():
    os.kill(os.getpid(), signal.SIGUSR1)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.wait()[1]))
os._exit(0)
""",
    )
    assert out == b"3\n", err
    assert b"Current thread" not in err
    assert len(waits(files(recorded)[0])) == 1


def test_operations_in_the_background_are_waited_for_by_name(recorded: Job) -> None:
    ended(
        recorded,
        """
store = kv.create("local")
store.init("w", np.zeros(1 << 22, np.float32))
out = np.zeros(1 << 22, np.float32)
for _ in range(3):
    store.pushpull("w", out, async_op=True).wait()
store.close()
""",
    )
    (file,) = files(recorded)
    assert "kvstore-engine" in file.threads.values()
    events = read_job(Path(recorded.environment["KVSTORE_TIMELINE"])).processes[0].events
    waited = [event for event in events if event.kind == CALL and event.slice == 6]
    assert 1 <= len(waited) <= 4 and {file.threads[event.thread] for event in waited} == {"MainThread"}


def test_a_fork_has_its_own_file(recorded: Job) -> None:
    out, _ = ended(
        recorded,
        """
store = kv.create("local")
for _ in range(5):
    call(store)
if not os.fork():
    with kv.create("local") as own:
        call(own)
    os._exit(0)
os.wait()
if not os.fork():
    sys.exit(0)
os.wait()
print(os.getpid())
""",
    )
    counts = {file.pid == int(out): len(waits(file)) for file in files(recorded)}
    assert counts == {True: 5, False: 1}


def test_the_ring_keeps_the_last_events_and_says_how_many_are_gone(recorded: Job) -> None:
    ended(
        recorded,
        """
store = kv.create("local")
end = counters_of(store).end
for at in range((1 << 18) + 1000):
    end(WAITING, 1 + at, at)
""",
    )
    (file,) = files(recorded)
    assert file.overwritten == 1000
    events = waits(file)
    assert [event.slice for event in events] == list(range(1000, (1 << 18) + 1000))
    assert read_job(Path(recorded.environment["KVSTORE_TIMELINE"])).notes == [
        "worker 0 has only its last events: 1000 older ones were overwritten"
    ]


FULL = """
import resource
store = kv.create("local")
for _ in range(int(sys.argv[1])):
    call(store)
store.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
store = kv.create("local")
for _ in range(1000):
    call(store)
store.close()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("went on", [len(path.read_bytes()) > 4096 for path in written()])
os._exit(0)
"""


def test_a_full_disk_ends_no_job_and_leaves_the_older_file(recorded: Job) -> None:
    out, err = ended(recorded, FULL, "1")
    assert out == b"went on [False]\n"
    assert re.search(
        rb"WARNING kvstore worker 0: the timeline of this process is not written to .*/out: .*File too large",
        err,
    )
    assert len(list(Path(recorded.environment["KVSTORE_TIMELINE"]).iterdir())) == 1
    assert len(waits(files(recorded)[0])) == 1


def test_a_folder_that_cannot_be_made_ends_no_job(recorded: Job) -> None:
    (recorded.folder / "deep").write_text("")
    out, err = ended(recorded, "store = kv.create('local'); call(store); store.close(); print('went on')")
    assert out == b"went on\n"
    assert err.count(b"WARNING kvstore worker 0: the timeline of this process is not written to ") == 1
    assert b"Not a directory" in err


def test_steps_of_a_trainer(recorded: Job) -> None:
    ended(
        recorded,
        """
from kvstore.trainer import Parameter, Trainer
weight = Parameter("weight", np.ones(2, np.float32))
store = kv.create("local")
trainer = Trainer([weight], "sgd", {"learning_rate": 0.5}, kvstore=store)
for _ in range(3):
    weight.grad()[:] = 1
    trainer.step(1)
store.close()
""",
    )
    events = read_job(Path(recorded.environment["KVSTORE_TIMELINE"])).processes[0].events
    assert [event.round for event in events if event.kind == STEP] == [1, 2, 3]
    assert not [event for event in events if event.kind == BUCKET]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("busy", ["time.sleep(1000)", "while True: call(store)"])
def test_a_signal_that_ends_the_process_writes_first(
    recorded: Job, number: signal.Signals, busy: str
) -> None:
    text = f"""
store = kv.create("local"); store.init("w", np.zeros(3, np.float32)); call(store)
threading.Timer(0.3, lambda: os.kill(os.getpid(), {int(number)})).start()
{busy}
time.sleep(1000)
"""
    ended(recorded, text, code=-number)
    (file,) = files(recorded)
    assert waits(file)


def test_a_signal_during_the_writing_ends_the_process_when_the_file_is_complete(recorded: Job) -> None:
    text = """
from kvstore.observe.timeline import process_trace, recording
recording._LAST_WORDS = 1000
store = kv.create("local"); store.init("w", np.zeros(3, np.float32)); call(store)
write = process_trace.write
def interrupted(*arguments):
    signal.raise_signal(signal.SIGTERM)
    return write(*arguments)
process_trace.write = interrupted
store.close()
time.sleep(1000)
"""
    ended(recorded, text, code=-signal.SIGTERM)
    (file,) = files(recorded)
    assert waits(file)


def test_a_full_ring_is_written_at_once(recorded: Job) -> None:
    """Not a second of processor time on any machine: a signal that ends the process waits for it."""
    text = """
from kvstore.observe.timeline import recording
store = kv.create("local"); store.init("w", np.zeros(3, np.float32)); call(store)
for i in range(recording._EVENTS): counters_of(store).record(1, i, i + 1000, i, i, i, i)
begin = time.process_time()
recording.write()
print(time.process_time() - begin)
"""
    out, _ = ended(recorded, text)
    assert float(out) < 1.0


def test_a_lock_that_the_interrupted_line_holds_delays_the_end_and_does_not_prevent_it(recorded: Job) -> None:
    text = """
import logging
from kvstore.observe.timeline import recording
recording._LAST_WORDS = 0.5
store = kv.create("local"); store.init("w", np.zeros(3, np.float32)); call(store)
with recording._recorder._writing:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)
"""
    ended(recorded, text, code=-signal.SIGTERM)
    assert files(recorded) == []


def test_what_sigusr1_wrote_is_there_after_a_kill(recorded: Job) -> None:
    text = """
store = kv.create("local"); store.init("w", np.zeros(3, np.float32)); call(store)
os.kill(os.getpid(), signal.SIGUSR1)
while not written():
    time.sleep(0.01)
call(store)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended(recorded, text, code=-signal.SIGKILL)
    assert len(files(recorded)) == 1


def test_a_handler_of_the_application_for_sigterm_stays(recorded: Job) -> None:
    text = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
store = kv.create("local"); store.init("w", np.zeros(3, np.float32)); call(store)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1000)
"""
    ended(recorded, text, code=7)
    assert len(files(recorded)) == 1


def test_a_forked_child_ends_by_sigterm_and_writes_nothing(recorded: Job) -> None:
    text = """
store = kv.create("local"); store.init("w", np.zeros(3, np.float32)); call(store)
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(written()))
"""
    out, _ = ended(recorded, text)
    assert out == b"-15 0\n"
