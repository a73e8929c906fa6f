"""Seats of workers at the servers: by hosts, given once, and kept."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.stores.parameter_server.scheduler.hosts import HostSeats


def made(wanted: str, hosts: list[str]) -> HostSeats:
    found = HostSeats(wanted)
    for rank, host in enumerate(hosts):
        found.add_host(rank, host)
    found.assign_seats(range(len(hosts)))
    return found


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_a_seat_is_the_lowest_rank_of_its_host(hosts: list[str]) -> None:
    seats = made("host", hosts).seats
    together = len(set(hosts)) < len(hosts)
    assert seats == ({rank: hosts.index(host) for rank, host in enumerate(hosts)} if together else {})


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_auto_is_for_more_than_one_host_with_several(hosts: list[str]) -> None:
    several = [host for host in set(hosts) if hosts.count(host) > 1]
    assert bool(made("auto", hosts).seats) == (len(several) > 1)
    assert not made("flat", hosts).seats


def test_a_rejoining_worker_must_find_its_host_alive() -> None:
    found = made("host", ["a", "a", "b"])
    assert found.entry_failure(1, "a", [0, 2]) is None
    elsewhere = found.entry_failure(1, "b", [0, 2])
    assert elsewhere is not None
    assert "hierarchy='flat'" in elsewhere.text
    alone = found.entry_failure(2, "b", [0, 1])
    assert alone is not None
    assert (alone.error, alone.rank) == ("PeerLostError", 2)
    assert made("flat", ["a"]).entry_failure(0, "z", []) is None
