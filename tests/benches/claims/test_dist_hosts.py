"""Two hosts of one machine: peers sum over the link, and nothing is left of them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
from benches.claims.test_dist import ODD, check, expected

from bench.cases.dist import DistCase
from bench.claims import dist_hosts
from bench.peers.dist.hosts import Hosts
from bench.peers.dist.launch import HostsGroup
from bench.runner import compiled, run

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(compiled.compiler() is None, reason="the barrier is C"),
]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.__enter__()
    except OSError as error:
        pytest.skip(str(error))
    HostsGroup.hosts = made
    yield made
    made.close()


def told(hosts: Hosts, host: int, command: str) -> str:
    done = subprocess.run(
        [*hosts.command(host), "sh", "-c", command], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_hosts_have_processes_and_a_network_of_their_own(hosts: Hosts) -> None:
    for what in ("net", "pid"):
        names = {told(hosts, host, f"readlink /proc/self/ns/{what}") for host in (0, 1)}
        assert len(names) == 2
    for host, address in enumerate(hosts.addresses):
        assert address in told(hosts, host, "ip address")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", dist_hosts.PEERS)
def test_sums(hosts: Hosts, name: str) -> None:
    case = DistCase("sums", ODD, 2, 2, peers=(name,))
    found = dist_hosts.CLAIM.settings([case])
    if not found:
        pytest.skip(f"{name} has no environment here")
    with HostsGroup(found[0]) as peer:
        check(peer, case, None if name.startswith("floor") else expected(case))


def test_processes_end_with_their_host() -> None:
    hosts = Hosts()
    try:
        with hosts:
            process = subprocess.Popen([*hosts.command(0), "sleep", "1000"])
    except OSError as error:
        pytest.skip(str(error))
    assert process.wait(30) != 0
    assert hosts.first == []


def test_cases_are_sound() -> None:
    cases = list(dist_hosts.CLAIM.cases(run.parse(dist_hosts.CLAIM, [])))
    assert {(case.workers, case.servers, case.peers) for case in cases} == {(2, 2, dist_hosts.PEERS)}
    assert len({case.name for case in cases}) == len(cases) == 5
