"""The variables of PyTorch that workers get: their place, and a port that is theirs alone."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pace
import pytest
from launched import Job

from kvstore.errors import ConfigError
from kvstore.settings.torch_variables import MasterPort

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
SHOW = f"""
import json
from kvstore.settings import launchers
found = {{name: os.environ.get(name) for name in {NAMES!r}}}
torchelastic = [name for name in os.environ if name.startswith("TORCHELASTIC")]
line = json.dumps(found | {{"launcher": launchers.detect_placement().launcher, "elastic": torchelastic}})
print(line + "\\n", end="")  # in one write: two processes have one pipe
"""


def finish(process: subprocess.Popen[bytes]) -> list[dict[str, object]]:
    out, err = process.communicate(timeout=pace.seconds(100))
    assert (process.returncode, err) == (0, b"")
    return sorted(map(json.loads, out.splitlines()), key=lambda found: str(found["RANK"]))


@pytest.mark.parametrize("before", [{}, {"RANK": "7", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "outer"}])
def test_workers_have_their_place_and_one_port(job: Job, before: dict[str, str]) -> None:
    """Also in a process that torchrun has started."""
    job.environment |= before
    one, other = finish(job.run("-n", "2", "--no-prefix", text=SHOW))
    for rank, found in enumerate((one, other)):
        assert [found[name] for name in NAMES[:6]] == [str(rank), "2", str(rank), "2", "0", "127.0.0.1"]
        assert (found["launcher"], found["elastic"]) == ("kvstore", [])
    assert one["MASTER_PORT"] == other["MASTER_PORT"]
    assert int(str(one["MASTER_PORT"])) > 1023


def test_spawned_workers_have_them_too(job: Job) -> None:
    text = f"""
import os, sys
import kvstore as kv
def fn():
{"".join(f"    {line}" + chr(10) for line in SHOW.strip().splitlines())}
    sys.stdout.flush()
if __name__ == "__main__":
    before = dict(os.environ)
    kv.spawn(fn, 2)
    assert dict(os.environ) == before
"""
    (job.folder / "main.py").write_text(text)
    one, other = finish(job.start("main.py"))
    assert [one["RANK"], other["RANK"], one["WORLD_SIZE"], other["LOCAL_RANK"]] == ["0", "1", "2", "1"]
    assert one["MASTER_PORT"] == other["MASTER_PORT"]


def test_servers_and_scheduler_are_no_ranks(job: Job) -> None:
    (job.folder / "looks.py").write_text(
        f"import os\nprint('server', [name for name in {NAMES!r} if name in os.environ], flush=True)\n"
    )
    text = "import kvstore as kv\nkv.create('dist_sync')\n"
    process = job.run("-n", "2", "-s", "1", "--no-prefix", "--import", "looks", text=text)
    out, _ = process.communicate(timeout=pace.seconds(100))
    assert process.returncode == 0
    assert out.splitlines() == [b"server []"]


def test_each_host_has_its_number(job: Job) -> None:
    stand_in = Path(__file__).with_name("stand_in_for_ssh.py")
    hosts = ["--hosts", "127.0.0.1:1,localhost:2"]
    job.environment["KVSTORE_SSH"] = shlex.join([sys.executable, str(stand_in)])
    found = finish(job.run("-n", "3", *hosts, "--no-prefix", text=SHOW))
    assert [one["RANK"] for one in found] == ["0", "1", "2"]
    assert [one["GROUP_RANK"] for one in found] == ["0", "1", "1"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["1", "2", "2"]
    assert {one["MASTER_ADDR"] for one in found} == {"127.0.0.1"}
    assert len({one["MASTER_PORT"] for one in found}) == 1


def test_a_port_is_held_for_the_one_that_reuses_it() -> None:
    master, other = MasterPort(), MasterPort()
    try:
        assert abs(master.number - other.number) > 1
        for port in (master.number, master.number + 1):
            with socket.socket() as plain, pytest.raises(OSError, match="in use"):
                plain.bind(("127.0.0.1", port))
            with socket.create_server(("127.0.0.1", port)) as reusing:  # as PyTorch does
                assert reusing.getsockname()[1] == port
    finally:
        master.close()
        other.close()
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", master.number))


def test_the_port_is_of_the_range() -> None:
    first = MasterPort()
    first.close()
    text = f"{first.number}-{first.number + 1}"
    master = MasterPort(text)
    try:
        assert master.number == first.number
        with pytest.raises(ConfigError, match=f"KVSTORE_PORTS={text} is free"):
            MasterPort(text)
    finally:
        master.close()
