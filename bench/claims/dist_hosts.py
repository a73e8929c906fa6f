"""The parameter server between two hosts: namespaces of this machine, connected by a pair of veth devices.

Each host has a worker and a server. A worker reaches the server of its own host through shared memory, unless
that is turned off, and the other server over the link.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from bench.cases.dist import RESNET, SIZES, DistCase, shapes_of
from bench.claims import dist
from bench.peers.dist.hosts import Hosts
from bench.peers.dist.launch import HostsGroup
from bench.runner import table
from bench.runner.rounds import Measured, Plan

PEERS = ("ours", "ours shm", "gloo", "floor", "floor reno")


class DistHosts(dist.Dist):
    name, title = "dist-hosts", "The parameter server between two hosts"
    what = "float32; a worker and a server on each of two hosts, namespaces of one machine joined by veth"
    common = ("rounds", "turn", "only", "list", "peers", "write")
    workers = (2,)
    picture = None
    process = HostsGroup

    def options(self, parser: argparse.ArgumentParser) -> None:
        """Add no options."""

    def instead(self, options: argparse.Namespace) -> str:
        return ""

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return [case(size) for size in (*SIZES, RESNET)]

    def plan(self, options: argparse.Namespace) -> Plan:
        return replace(dist.FULL, rounds=options.rounds, turn=options.turn)

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Any]:
        with contextlib.ExitStack() as stack:
            try:
                HostsGroup.hosts = stack.enter_context(Hosts())
            except OSError as error:
                raise SystemExit(str(error)) from None
            yield from super().measured(chosen, options)

    def sections(self, found: list[Measured]) -> Iterator[str]:
        yield from ("## All cases\n", dist.everything(found), *table.disturbed(found))
        yield from table.section("The way of calling that was best", ["case", "ways"], dist.variants(found))


def case(size: str) -> DistCase:
    """Make the case of sums between two hosts."""
    return DistCase(f"2 hosts: {size}", shapes_of(size), 2, 2, peers=PEERS)


CLAIM = DistHosts()
