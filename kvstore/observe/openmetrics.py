"""The counters of this process as families of metrics, with the names and units of Prometheus.

Only `kvstore.observe.metrics` imports it: it needs prometheus_client, the extra `metrics`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .counters import CALLS, PHASES, WAITING, WAYS, end_of
from .native._observe import BUCKETS, now, read_own
from .processes import role_of

__all__ = ["StoreCollector", "generate_latest", "metrics_registry", "start_http_server"]

#: Labels of a store. `number` differs between stores of one process; Prometheus itself has a label `job`.
LABELS = ("role", "rank", "store", "number", "kvstore_job")

_PER_POWER = 4  # buckets of waits for each power of two; the metric has the end of the last one


class MetricFamily(NamedTuple):
    """One family: its name and unit, and the field of the counters that it shows.

    `label` has a value for each number of the field; `factor` converts them to the unit.
    """

    name: str
    text: str
    field: str
    unit: str = ""
    label: str = ""
    values: Sequence[str] = ("",)
    factor: float = 1


COUNTERS = (
    MetricFamily("kvstore_calls", "Calls that ended well, by method.", "calls", "", "verb", CALLS),
    MetricFamily("kvstore_rounds", "Rounds of keys, or of parts of keys, that are complete.", "rounds"),
    MetricFamily("kvstore_losses", "Workers and servers that were lost.", "losses"),
    MetricFamily("kvstore_sent_bytes", "Values sent, by the way they went.", "sent", "bytes", "way", WAYS),
    MetricFamily(
        "kvstore_received_bytes", "Values received, by the way they came.", "received", "bytes", "way", WAYS
    ),
    MetricFamily(
        "kvstore_phase_seconds", "Time by what it was spent on.", "ns", "seconds", "phase", PHASES, 1e-9
    ),
)
GAUGES = (
    MetricFamily("kvstore_keys", "Keys, or parts of keys, that are here.", "keys"),
    MetricFamily("kvstore_values_bytes", "Size of their values.", "nbytes", "bytes"),
    MetricFamily(
        "kvstore_waiting_seconds", "Length of the present wait; 0: none.", "waiting", "seconds", factor=1e-9
    ),
)


class StoreCollector(Collector):
    """Reads the counters of all stores of this process at each scrape."""

    def collect(self) -> Iterator[Metric]:
        """Make all families."""
        stores = read_own()
        for one in stores:
            one["waiting"] = max(0, now() - one["waiting_since"]) if one["waiting_since"] else 0
        for kind, families in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            yield from (_filled_family(kind, family, stores) for family in families)
        yield _wait_histogram(stores)
        versions = {"version": metadata.version("kvstore-train"), "python": platform.python_version()}
        yield InfoMetricFamily("kvstore_build", "Version of kvstore.", value=versions)


def metrics_registry() -> CollectorRegistry:
    """Make a registry of these metrics alone."""
    made = CollectorRegistry(auto_describe=False)
    made.register(StoreCollector())
    return made


def _filled_family(
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    family: MetricFamily,
    stores: Iterable[dict[str, Any]],
) -> Metric:
    own = (family.label,) if family.label else ()
    made = kind(family.name, family.text, labels=(*LABELS, *own), unit=family.unit)
    for one in stores:
        numbers = one[family.field] if own else [one[family.field]]
        for value, number in zip(family.values, numbers, strict=True):
            made.add_metric([*_store_labels(one), *([value] if own else [])], number * family.factor)
    return made


def _wait_histogram(stores: Iterable[dict[str, Any]]) -> Metric:
    """Count the waits that were no longer than the end of each power of two; the last bucket has no end."""
    text = "Lengths of waits for other processes."
    made = HistogramMetricFamily("kvstore_wait_seconds", text, labels=LABELS, unit="seconds")
    ends = range(_PER_POWER, BUCKETS, _PER_POWER)
    for one in stores:
        counts = one["waits"]
        found = [(str(end_of(end - 1)), float(sum(counts[:end]))) for end in ends]
        found += [("+Inf", float(sum(counts)))]
        made.add_metric(_store_labels(one), found, one["ns"][WAITING] * 1e-9)
    return made


def _store_labels(one: dict[str, Any]) -> list[str]:
    return [role_of(one["store"]), str(one["rank"]), one["store"], str(one["place"]), one["job"]]
