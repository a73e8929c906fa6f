"""The parameter server and its rivals between hosts, compared with the time that the wire needs.

Hosts are namespaces of this machine, with links of a given speed, delay and loss. Each has a server of
kvstore and of MXNet, and the workers.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from bench.cases import hosts as cases
from bench.cases.dist import ENTRIES
from bench.cases.hosts import HostsCase, Link
from bench.claims import dist
from bench.peers.dist.hosts import Hosts
from bench.peers.dist.launch import HostsGroup
from bench.peers.dist.link_probe import LinkProbe, probe
from bench.peers.setting import Setting
from bench.runner import earlier, machine, rivals, run, table
from bench.runner.rounds import Measured, Plan
from kvstore.observe.bench.rounds import round_ratios

#: A call may take seconds: the first calls show the speed of a way, then one call is a turn.
PLAN = Plan(rounds=5, spare=0, least=1, field=1, patience=60.0)
LIMITS = ("cross", "cross reno")
HEAD = ["peer", "time", "÷ wire", "÷ limit", "bytes on the busiest link ÷ needed", "processor seconds"]
LINKS = ["hosts and link", "one stream ÷ link", "round trip", "relay: processor seconds for 1 GB"]
#: The measured links of each job.
_probed: dict[Any, LinkProbe] = {}


class BetweenHosts(dist.Dist):
    name, title = "hosts", "Between hosts, compared with the wire"
    turn = 0.3  # with 16 workers on two cores, a small call lasts some ms
    what = "float32; hosts are namespaces of one machine, with a server and as many workers each"
    common = ("rounds", "turn", "only", "list", "peers", "write")
    picture = None
    process = HostsGroup
    timed = ("seconds", "cpu", "moved")

    def options(self, parser: argparse.ArgumentParser) -> None:
        earlier.add_option(parser)

    def instead(self, options: argparse.Namespace) -> str:
        return ""

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return list(cases.all_cases())

    def plan(self, options: argparse.Namespace) -> Plan:
        return replace(PLAN, rounds=options.rounds, turn=options.turn)

    def settings(self, cases: Sequence[HostsCase]) -> list[Setting]:
        names = {peer for case in cases for peer in case.peers}
        wanted = [name for name in ENTRIES if name in names]
        first = ("ours", "cross")  # if memory is scarce
        wanted.sort(key=lambda name: [not name.startswith(start) for start in first])
        return rivals.settings("hosts", wanted, processes=cases[0].workers, servers=cases[0].servers)

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Any]:
        """Measure one job after the other, each between its own hosts, after the kept results."""
        run.needs_a_compiler()
        if options.add:
            yield from kept(options.write)
        plan, prober = self.plan(options), machine.Prober()
        for _, some in groupby(chosen, key=self.job):
            together = list(some)
            try:
                with Hosts(together[0].hosts, together[0].link) as HostsGroup.hosts:
                    _probed[together[0].job] = probed(HostsGroup.hosts, together[0].link)
                    yield from run.measured(self, together, plan, prober, options.peers)
            except OSError as error:
                raise SystemExit(str(error)) from None

    def fields(self, case: HostsCase) -> dict[str, Any]:
        links = {name: getattr(case, name) for name in ("hosts", "gbit", "delay_ms", "loss")}
        return (
            super().fields(case)
            | links
            | {"crossing": case.crossing, "needed": case.needed, "link": list(_probed[case.job])}
        )

    def about(self, rounds: int, minutes: float) -> str:
        return (
            f"{self.what}. *Wire* is the time that a link needs for 2 (n-1)/n of the payload, in Ethernet "
            "frames without their heads (those take 6 % more), and to there and back; *limit* is the faster "
            f"one of the bare sockets. Times are medians of {rounds} rounds in which all peers took turns, "
            "ratios medians [lowest-highest], of a push and a pull of all keys, of the worker that took "
            "longest. The method, and the work of each peer: [bench/README.md](../README.md)."
        )

    def page(self, found: list[Measured], took: float) -> str:
        return super().page(earlier.newest(found, cases.all_cases()), took)

    def to_json(self, found: list[Measured], took: float) -> str:
        return super().to_json(earlier.newest(found, cases.all_cases()), took)

    def sections(self, found: list[Measured]) -> Iterator[str]:
        yield from table.section("The links, with nothing else on them", LINKS, list(links(found)))
        yield from ("## All cases\n", *(_case(m) for m in found))
        yield from table.disturbed(found)
        yield from table.section("The way of calling that was best", ["case", "ways"], dist.variants(found))


def probed(hosts: Hosts, link: Link) -> LinkProbe:
    """Probe a link for a second, or a little longer where TCP's windows must grow first."""
    return probe(hosts, int(1e9 * link.gbit / 8))


def links(found: list[Measured]) -> Iterator[list[str]]:
    """Return one row for each kind of hosts and links."""
    for case in {(m.case.hosts, m.case.workers, m.case.link): m.case for m in found}.values():
        there = _probed[case.job]
        relay = f"{there.relay:.2f} s" if case.link.relayed else "none: veth devices, a bridge"
        share = f"{there.bits / (1e9 * case.gbit):.3f}"
        yield [case.name.rpartition(": ")[0], share, table.time(there.round_trip), relay]


def kept(name: str) -> Iterator[Measured]:
    """Read the earlier results, those of the links included."""
    for case, row in earlier.read(name, cases.all_cases()):
        _probed[case.job] = LinkProbe(*row["link"])
        yield earlier.measured(case, row, BetweenHosts.timed)


def _case(m: Measured) -> str:
    case: HostsCase = m.case
    limits = [m.seconds[name] for name in LIMITS if name in m.seconds]
    best = [min(times) for times in zip(*limits, strict=True)] if limits else []
    rows = [_row(m, name, best) for name in ENTRIES if dist.columns(m, name)]
    need = f"The wire needs {table.time(case.needed)} for {case.crossing:,.0f} bytes."
    return f"**{table.named(m)}** {need}\n\n{table.markdown(HEAD, rows)}"


def _row(m: Measured, name: str, limit: list[float]) -> list[str]:
    column = dist.best_of(m, name)
    times, case = m.seconds[column], m.case
    wrong = " wrong result!" if name in m.wrong else ""
    return [
        ENTRIES[name].label + wrong,
        table.time(m.median(column)),
        table.spread([time / case.needed for time in times]),
        table.spread(round_ratios(times, limit)) if limit else "",
        f"{statistics.median(m.moved[column]) / case.crossing:.3f}",
        table.time(statistics.median(m.cpu[column])),
    ]


CLAIM = BetweenHosts()
