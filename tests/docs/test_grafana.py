"""The dashboard fits Grafana's classic model; it and the page of metrics have the metrics that there are."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import jsonschema

from kvstore.observe.openmetrics import COUNTERS, GAUGES, LABELS

DOCS = Path(__file__).parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "observability/grafana.json").read_text())
PANELS = DASHBOARD["panels"]
PAGE = (DOCS / "how-to/metrics.md").read_text()

TEXT, FLAG = {"type": "string", "minLength": 1}, {"type": "boolean"}


def exactly(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    """Schema of an object with no other properties: Grafana ignores those that it does not know."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def whole(least: int, most: int | None = None) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, **({} if most is None else {"maximum": most})}


def listed(one: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": one}


# As "Dashboard JSON model" of Grafana's documentation and the kind `dashboard` of its sources describe the
# fields that are used here.
SOURCE = exactly({"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}})
TARGET = exactly(
    {"refId": {"type": "string", "pattern": "^[A-Z]$"}, "datasource": SOURCE, "expr": TEXT},
    {"legendFormat": {"type": "string"}},
)
LEGEND = exactly(
    {"displayMode": {"enum": ["list", "table", "hidden"]}, "placement": {"enum": ["bottom", "right"]}}
)
TOOLTIP = exactly({"mode": {"enum": ["single", "multi", "none"]}, "sort": {"enum": ["asc", "desc", "none"]}})
REDUCE = exactly({"calcs": listed(TEXT), "fields": {"type": "string"}, "values": FLAG})
OPTIONS = {
    "timeseries": exactly({"legend": LEGEND, "tooltip": TOOLTIP}),
    "stat": exactly(
        {"reduceOptions": REDUCE},
        {
            "colorMode": {"enum": ["none", "value", "background"]},
            "graphMode": {"enum": ["none", "line", "area"]},
        },
    ),
}
PANEL = exactly(
    {
        "id": whole(1),
        "type": {"enum": list(OPTIONS)},
        "title": TEXT,
        "datasource": SOURCE,
        "gridPos": exactly({"h": whole(1), "w": whole(1, 24), "x": whole(0, 23), "y": whole(0)}),
        "targets": {**listed(TARGET), "minItems": 1},
        "fieldConfig": exactly(
            {"defaults": exactly({}, {"unit": TEXT, "min": {"type": "number"}}), "overrides": listed({})}
        ),
        "options": {"type": "object"},
    },
    {"description": TEXT},
)
VARIABLE = exactly(
    {"name": {"type": "string", "pattern": r"^\w+$"}, "type": {"enum": ["datasource", "query"]}, "query": {}},
    {
        "label": TEXT,
        "datasource": SOURCE,
        "hide": {"enum": [0, 1, 2]},
        "refresh": {"enum": [0, 1, 2]},
        "sort": whole(0, 6),
        "includeAll": FLAG,
        "multi": FLAG,
        "allValue": TEXT,
        "current": exactly({"text": TEXT, "value": TEXT}),
    },
)
SCHEMA = exactly(
    {
        "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
        "title": TEXT,
        "schemaVersion": whole(36),
        "panels": listed(PANEL),
        "time": exactly({"from": TEXT, "to": TEXT}),
        "templating": exactly({"list": listed(VARIABLE)}),
    },
    {
        "description": TEXT,
        "tags": listed(TEXT),
        "editable": FLAG,
        "graphTooltip": {"enum": [0, 1, 2]},
        "timezone": TEXT,
        "version": whole(0),
        "refresh": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "annotations": exactly({"list": listed({})}),
        "links": listed({}),
    },
)


def test_the_dashboard_fits_the_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(DASHBOARD, SCHEMA)
    for panel in PANELS:
        jsonschema.validate(panel["options"], OPTIONS[panel["type"]])


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in PANELS)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


def expressions() -> list[str]:
    variables = [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    return [*variables, *(target["expr"] for panel in PANELS for target in panel["targets"])]


def test_every_metric_and_label_is_one_of_the_exporter() -> None:
    names = {f"{one.name}_total" for one in COUNTERS} | {one.name for one in GAUGES} | {"kvstore_build_info"}
    names |= {f"kvstore_wait_seconds_{part}" for part in ("bucket", "sum", "count")}
    labels = {*LABELS, "le", *(one.label for one in COUNTERS if one.label)}
    for text in expressions():
        used = set(re.findall(r"\bkvstore_\w+", text)) - labels
        assert used, text
        assert used <= names, text
        grouped = itertools.chain(*(part.split(", ") for part in re.findall(r"by \(([^)]*)\)", text)))
        selected = re.findall(r"(\w+)=~?\"", text)
        assert {*grouped, *selected} <= labels, text


def test_labels_of_legends_are_those_of_the_series() -> None:
    for target in (target for panel in PANELS for target in panel["targets"]):
        for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
            assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target


def test_every_metric_of_the_exporter_has_a_panel() -> None:
    told = " ".join(expressions())
    assert [one.name for one in (*COUNTERS, *GAUGES) if one.name not in told] == []


def test_the_page_lists_every_metric_with_its_type_unit_and_label() -> None:
    table = re.findall(r"^\| `(kvstore_\w+)` \| (\w+) \| (\S+) \| (\S+) \|", PAGE, re.MULTILINE)
    told = {name: (kind, unit, label.strip("`")) for name, kind, unit, label in table}
    ours = {f"{one.name}_total": ("counter", one) for one in COUNTERS} | {
        one.name: ("gauge", one) for one in GAUGES
    }
    for name, (kind, one) in ours.items():
        assert told[name][0] == kind
        assert not one.unit or told[name][1] == one.unit
        assert told[name][2] == (one.label or "-")
    assert set(told) - set(ours) == {"kvstore_wait_seconds"}
    for label in LABELS:
        assert f"`{label}`" in PAGE
