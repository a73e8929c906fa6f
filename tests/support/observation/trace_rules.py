"""A trace in SQLite, and the rules of the format of trace events that it has to keep."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

_TABLES = """
CREATE TABLE event (
    at INTEGER PRIMARY KEY, ph, pid, tid, name, cat, ts INTEGER, dur INTEGER, key, bytes, round, whom
);
CREATE TABLE process (pid PRIMARY KEY, name, sort_index);
CREATE TABLE track (pid, tid, name, sort_index, PRIMARY KEY (pid, tid));
CREATE INDEX of_track ON event (pid, tid, ts);
"""


def loaded(path: Path) -> sqlite3.Connection:
    """Load a trace; times become whole ns."""
    trace = json.loads(path.read_text())
    base = sqlite3.connect(":memory:")
    base.executescript(_TABLES)
    for at, event in enumerate(trace["traceEvents"]):
        _insert(base, at, event)
    return base


def _insert(base: sqlite3.Connection, at: int, event: dict[str, Any]) -> None:
    if event["ph"] != "M":
        about = event.get("args", {})
        times = [round(event[name] * 1000) if name in event else None for name in ("ts", "dur")]
        names = [event[name] for name in ("ph", "pid", "tid", "name", "cat")]
        args = [about.get(name) for name in ("key", "bytes", "round", "whom")]
        base.execute(f"INSERT INTO event VALUES ({', '.join('?' * 12)})", [at, *names, *times, *args])
        return
    (kind, value), pid, tid = next(iter(event["args"].items())), event["pid"], event["tid"]
    if event["name"] == "process_name":
        base.execute("INSERT INTO process (pid, name) VALUES (?, ?)", (pid, value))
    elif event["name"] == "thread_name":
        base.execute("INSERT INTO track (pid, tid, name) VALUES (?, ?, ?)", (pid, tid, value))
    elif kind == "sort_index":
        table, place = (
            ("process", "pid = ?")
            if event["name"] == "process_sort_index"
            else ("track", "pid = ? AND tid = ?")
        )
        values = (value, pid) if table == "process" else (value, pid, tid)
        base.execute(f"UPDATE {table} SET sort_index = ? WHERE {place}", values)


#: The text of each violation, and the query that finds it.
RULES = {
    "phases of events": "SELECT * FROM event WHERE ph NOT IN ('X', 'i', 'C')",
    "spans have a length, instants have none": (
        "SELECT * FROM event WHERE (ph = 'X') != (dur IS NOT NULL) OR dur < 0"
    ),
    "times are known": "SELECT * FROM event WHERE ts IS NULL OR ts < 0",
    "times ascend": "SELECT * FROM (SELECT *, lag(ts) OVER (ORDER BY at) AS last FROM event) WHERE ts < last",
    "of spans that begin together the longest comes first": (
        "SELECT * FROM event a JOIN event b ON a.pid = b.pid AND a.tid = b.tid AND a.ts = b.ts "
        "WHERE a.at < b.at AND a.ph = 'X' AND b.ph = 'X' AND a.dur < b.dur"
    ),
    "spans lie within each other or beside": (
        "SELECT * FROM event a JOIN event b ON a.pid = b.pid AND a.tid = b.tid AND a.ph = 'X' AND b.ph = 'X' "
        "AND b.ts > a.ts AND b.ts < a.ts + a.dur WHERE b.ts + b.dur > a.ts + a.dur"
    ),
    "processes have names": "SELECT * FROM event WHERE pid NOT IN (SELECT pid FROM process)",
    "tracks have names": (
        "SELECT * FROM event LEFT JOIN track USING (pid, tid) "
        "WHERE ph != 'C' AND (track.name IS NULL OR sort_index IS NULL)"
    ),
    "processes have an order": "SELECT * FROM process WHERE sort_index IS NULL",
    "names are not empty": "SELECT * FROM event WHERE name = '' OR cat = ''",
}  # fmt: skip


def broken(base: sqlite3.Connection) -> dict[str, Any]:
    """Return the rules that a trace breaks, each with the first event that does."""
    found = {rule: base.execute(query).fetchone() for rule, query in RULES.items()}
    return {rule: event for rule, event in found.items() if event is not None}
