"""``kvstore doctor --hosts``: other hosts behind a stand-in for ssh, with answers that can be altered."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nightly import nightly_unless

import kvstore
from kvstore.launch.hosts import remote_hosts
from kvstore.launch.hosts.host_list import HostLayout, of_list
from kvstore.observe.doctor import hosts as far_hosts
from kvstore.observe.doctor.checks import CheckFinding

ONE, OTHER = "127.0.0.2", "127.0.0.3"
Find = Callable[..., list[CheckFinding]]


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """Look at the hosts; `before` are lines of Python that run on the host `where` before it answers."""
    script = tmp_path / "ssh"

    def run(
        before: str = "", where: str = ONE, command: str = "", names: str = f"{ONE},{OTHER}"
    ) -> list[CheckFinding]:
        altered = f"{before}\nfrom kvstore.observe.doctor.far_host import main; main()"
        (tmp_path / "altered.py").write_text(altered)
        other = command or f"exec {sys.executable} {tmp_path}/altered.py"
        script.write_text(f'#!/bin/sh\nif [ "$1" = {where} ]; then {other}; fi\nexec /bin/sh -c "$2"\n')
        script.chmod(0o700)
        listed = of_list(names)
        layout = HostLayout(listed, len(listed), 0)
        made = remote_hosts.Hosts(layout, (str(script),), sys.executable, {}, os.getcwd())
        return list(far_hosts.check_hosts(made))

    return run


def by_subject(found: list[CheckFinding]) -> dict[str, CheckFinding]:
    return {
        one.subject: one for one in found if "processors" in one.text or not one.subject.startswith("host ")
    }


def test_hosts_that_are_sound(find: Find) -> None:
    found = by_subject(find())
    assert list(found) == [
        *(f"host {ONE}", f"clock of {ONE}", f"host {OTHER}", f"clock of {OTHER}"),
        *(f"{ONE} to {OTHER}", f"{OTHER} to {ONE}"),
    ]
    assert {one.level for one in found.values()} == {"ok"}
    assert f"kvstore {kvstore.__version__}, Python {sys.version.split()[0]}" in found[f"host {ONE}"].text
    assert "GB/s" in found[f"{ONE} to {OTHER}"].text


def test_one_host_has_no_links(find: Find) -> None:
    assert list(by_subject(find(names=OTHER))) == [f"host {OTHER}", f"clock of {OTHER}"]


@pytest.mark.parametrize("seconds", nightly_unless(lambda seconds: seconds < 0, [5, -5]))
def test_a_clock_that_is_off(find: Find, seconds: int) -> None:
    before = f"import time; now = time.time_ns; time.time_ns = lambda: now() + {seconds} * 10**9"
    found = by_subject(find(before))
    assert found[f"clock of {ONE}"].level == "warning"
    assert f"{seconds * 1000:+}." in found[f"clock of {ONE}"].text.replace("4999.9", "5000.0")
    assert "set-ntp" in found[f"clock of {ONE}"].cure
    assert found[f"clock of {OTHER}"].level == "ok"


def test_another_kvstore(find: Find) -> None:
    found = find("import kvstore; kvstore.__version__ = '0.0.1'", names=ONE)
    one = found[0]
    assert (one.subject, one.level) == (f"host {ONE}", "error")
    assert "it has kvstore 0.0.1" in one.text
    assert f"pip install kvstore-train=={kvstore.__version__}" in one.cure


def test_another_python(find: Find) -> None:
    found = by_subject(find("import platform; platform.python_version = lambda: '3.99.0'", names=ONE))
    assert found[f"host {ONE}"].level == "warning"
    assert "this machine has Python " in found[f"host {ONE}"].text


def test_warnings_of_a_host_are_told_with_its_name(find: Find) -> None:
    before = (
        "from kvstore.observe.doctor import checks, report\n"
        "def broken(): raise OSError('no such thing')\n"
        "report.CHECKS = (checks.DoctorCheck('broken', broken),)"
    )
    told = [one for one in find(before, names=ONE) if one.subject == f"host {ONE}" and one.level == "error"]
    assert ["broken: this check failed: OSError: no such thing" in one.text for one in told] == [True]


def test_a_host_that_cannot_be_reached(find: Find) -> None:
    found = find(command="echo 'Permission denied (publickey).' >&2; exit 255")
    first = found[0]
    assert (first.subject, first.level) == (f"host {ONE}", "error")
    assert "exit code 255: Permission denied (publickey)." in first.text
    assert "ssh-copy-id" in first.cure
    assert by_subject(found)[f"clock of {OTHER}"].level == "ok"
    assert not [one for one in found if " to " in one.subject]


def test_a_command_that_answers_as_something_else(find: Find) -> None:
    [first, *_] = find(command="echo; echo 'Welcome to the switch'; exit 0", names=ONE)
    assert "exit code 0; it has answered 'Welcome to the switch'" in first.text
    [first, *_] = find(command="echo 'kvstore doctor far host 3'; read line; echo Bye", names=ONE)
    assert first.text == "it could not be reached: it has answered 'Bye'"


def test_a_command_that_does_not_exist() -> None:
    listed = of_list(ONE)
    made = remote_hosts.Hosts(HostLayout(listed, 1, 0), ("/no/ssh",), sys.executable, {}, os.getcwd())
    (found,) = far_hosts.check_hosts(made)
    assert (found.level, found.text) == ("error", "there is no command '/no/ssh' on this machine")
    assert "--ssh-command" in found.cure


def test_a_host_without_kvstore(find: Find) -> None:
    [first, *_] = find(command=f"exec {sys.executable} -S -I -m kvstore.observe.doctor.far_host", names=ONE)
    assert first.level == "error"
    assert "No module named" in first.text


def test_hosts_that_cannot_connect(find: Find) -> None:
    before = (
        "import socket\n"
        "def refuse(*_): raise ConnectionRefusedError(111, 'HostConnection refused')\n"
        "socket.create_connection = refuse"
    )
    found = by_subject(find(before))
    assert found[f"{ONE} to {OTHER}"].level == "error"
    assert "HostConnection refused" in found[f"{ONE} to {OTHER}"].text
    assert found[f"{OTHER} to {ONE}"].level == "ok"


def test_a_login_shell_that_speaks(find: Find) -> None:
    found = by_subject(find("print('Welcome!')", names=ONE))
    assert found[f"host {ONE}"].level == "ok"


def test_the_command(doctor: Callable[..., Any], tmp_path: Path) -> None:
    ssh = tmp_path / "anything"
    ssh.write_text('#!/bin/sh\nexec /bin/sh -c "$2"\n')
    ssh.chmod(0o700)
    report = doctor("--no-tests", "--hosts", f"{ONE}:4,{OTHER}:4", "--ssh-command", str(ssh))
    assert {f"clock of {ONE}", f"clock of {OTHER}", f"{ONE} to {OTHER}"} <= set(report.found)
