"""Synthetic database incidents with known root causes: five monitors, each with a view of its own. No database, no download.

Every cause leaves its trace in the views of two monitors, about one table (`WITNESSES`); a false alarm leaves it in one of the two
only. A view depends on the traces in it and on nothing else, so one view never tells a cause from a false alarm, and in an
incident with two causes every single view fits other pairs as well. The views together determine the causes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from . import prompts
from .example import Example, Task
from .scoring import extract_labels, score_labels

INSERT, LOCK, CLEAN, INDEX, FETCH = LABELS = (
    "INSERT_LARGE_DATA",
    "LOCK_CONTENTION",
    "VACUUM",
    "REDUNDANT_INDEX",
    "FETCH_LARGE_DATA",
)
WITNESSES = {
    INSERT: ("statements", "tuples"),
    LOCK: ("locks", "statements"),
    CLEAN: ("tuples", "locks"),
    INDEX: ("indexes", "tuples"),
    FETCH: ("statements", "scans"),
}
MONITORS = ("statements", "locks", "tuples", "indexes", "scans")
INCIDENTS = 200  # of a task; the same seed gives the same ones, whatever their number
FALSE_ALARM = 0.6  # chance of one, for each cause that is none
SCHEMAS = {
    "a music service": "listeners songs albums playlists plays payments subscriptions",
    "an online shop": "customers products orders order_items carts reviews invoices",
    "a clinic": "patients doctors appointments prescriptions lab_results bills rooms",
    "a school": "students courses enrollments grades attendance payments teachers",
    "a sensor network": "devices readings alerts firmware sites operators tickets",
}
BRIEF = """The database of {place} has become slow. Five monitors each see one part of it:
statements (what runs), locks (who waits), tuples (rows written and cleaned up), indexes, scans (how tables are read).
A real cause leaves its trace in two monitors, about the same table. What only one monitor shows is a false alarm.
INSERT_LARGE_DATA: statements has inserts of thousands of rows a call, and tuples has many new rows in that table.
LOCK_CONTENTION: locks has many sessions that wait long for a table, and statements has updates of it that take seconds.
VACUUM: tuples has a table with more dead than live rows that is cleaned again and again, and locks has the cleaner holding it long.
REDUNDANT_INDEX: indexes has several indexes on the same columns without a scan, and tuples has many updates of it, hardly any of them hot.
FETCH_LARGE_DATA: statements has selects of thousands of rows a call, and scans has millions of rows read by whole scans of that table.
This incident has one or two causes."""
PROFILES = {
    "statements": "You watch the statements: rows a call and time a call.",
    "locks": "You watch the locks: who holds a table, who waits for it, and for how long.",
    "tuples": "You watch the rows of each table: inserted, updated (hot or not), dead, and how often they are cleaned up.",
    "indexes": "You watch the indexes: their columns, scans and size.",
    "scans": "You watch how tables are read: by whole scans or by index, and how many rows.",
}
MOST_CAUSES = 2
REPORT = "Name each table whose figures stand out, with those figures, or say that all is as usual. Use at most three sentences."


@dataclass(frozen=True)
class Incident:
    """place: whose database. causes: one or two labels, in the order of LABELS. views: monitor -> text.

    traces: (monitor, label, table), real ones and false alarms.
    """

    id: str
    place: str
    causes: tuple[str, ...]
    traces: frozenset[tuple[str, str, str]]
    views: dict[str, str]


def incident(seed: int, index: int) -> Incident:
    """Incident `index` of the stream `seed`; even ones have one cause, odd ones two, every combination equally often."""
    rng = random.Random(f"incident/{seed}/{index}")
    kinds = list(combinations(LABELS, 1 + index % 2))
    causes = kinds[index // 2 % len(kinds)]
    place = rng.choice(list(SCHEMAS))
    tables = SCHEMAS[place].split()
    rng.shuffle(tables)
    about = dict(zip(LABELS, tables))  # each label has a table of its own
    seen = {(monitor, label) for label in causes for monitor in WITNESSES[label]}
    for label in LABELS:
        if label not in causes and rng.random() < FALSE_ALARM:
            seen.add((rng.choice(WITNESSES[label]), label))
    if len(causes) == 2:  # two monitors see all causes but two: with nothing to see there, those two would be known to be it
        for monitor in ("statements", "tuples"):
            suspects = [label for label in LABELS if monitor in WITNESSES[label] and label not in causes]
            if not any(name == monitor for name, _ in seen):
                label = rng.choice(suspects)
                seen -= {(other, label) for other in WITNESSES[label]}
                seen.add((monitor, label))
    traces = frozenset((monitor, label, about[label]) for monitor, label in seen)
    return Incident(f"{seed}-{index}", place, causes, traces, views(place, traces, f"{seed}/{index}"))


def views(place: str, traces: frozenset[tuple[str, str, str]], seed: str) -> dict[str, str]:
    """The five views as text tables, fields parted by " | ". Each is made from its own traces and random stream alone."""
    tables = SCHEMAS[place].split()
    made = {}
    for monitor in MONITORS:
        marks = {label: table for name, label, table in traces if name == monitor}
        made[monitor] = _VIEWS[monitor](tables, marks, random.Random(f"{monitor}/{seed}"))
    return made


# The views. Healthy figures and traces lie a factor of ten or more apart; noise and harmless oddities lie between healthy ones.


def _table(title: str, header: str, rows: Sequence[Sequence[object]]) -> str:
    return "\n".join([title, header, *(" | ".join(map(str, row)) for row in rows)])


def _statements(tables: Sequence[str], marks: dict[str, str], rng: random.Random) -> str:
    rows: list[tuple] = []

    def add(query: str, calls: int, rows_a_call: float, mean: float) -> None:
        rows.append((query, calls, round(calls * rows_a_call), f"{mean:.1f}"))

    for table in rng.sample(tables, 3):
        add(f"SELECT * FROM {table} WHERE id = $1", rng.randint(9000, 60000), 1, rng.uniform(0.1, 2))
    for table in rng.sample([t for t in tables if t != marks.get(LOCK)], 2):
        add(f"UPDATE {table} SET status = $1 WHERE id = $2", rng.randint(900, 9000), 1, rng.uniform(0.3, 9))
    add(f"INSERT INTO {rng.choice([t for t in tables if t != marks.get(INSERT)])} VALUES ($1, $2)", rng.randint(900, 9000), 1, 0.4)
    # a report is slow and yet harmless: it is called a few times and returns one row
    add(f"SELECT count(*) FROM {rng.choice(tables)}", rng.randint(2, 9), 1, rng.uniform(90, 400))
    if table := marks.get(INSERT):
        add(f"INSERT INTO {table} SELECT * FROM staging", rng.randint(60, 300), rng.randint(9000, 40000), rng.uniform(700, 4000))
    if table := marks.get(LOCK):
        add(f"UPDATE {table} SET status = $1 WHERE id = $2", rng.randint(900, 9000), 1, rng.uniform(2000, 9000))
    if table := marks.get(FETCH):
        add(f"SELECT * FROM {table} ORDER BY created_at", rng.randint(60, 300), rng.randint(9000, 90000), rng.uniform(700, 4000))
    rng.shuffle(rows)
    return _table("statements since the last reset", "query | calls | rows | mean_ms", rows)


def _locks(tables: Sequence[str], marks: dict[str, str], rng: random.Random) -> str:
    rows: list[tuple] = []
    for table in rng.sample(tables, 4):
        rows.append((table, "AccessShare", "held", rng.randint(2, 30), f"{rng.uniform(0.01, 0.5):.2f}"))
    for table in rng.sample(tables, 2):
        rows.append((table, "RowExclusive", "held", rng.randint(1, 9), f"{rng.uniform(0.01, 0.9):.2f}"))
    for table in rng.sample([t for t in tables if t != marks.get(LOCK)], 2):  # short waits are normal
        rows.append((table, "RowExclusive", "waiting", rng.randint(1, 3), f"{rng.uniform(0.01, 0.4):.2f}"))
    if table := marks.get(LOCK):
        rows.append((table, "Exclusive", "waiting", rng.randint(30, 90), f"{rng.uniform(60, 400):.2f}"))
    if table := marks.get(CLEAN):
        rows.append((table, "ShareUpdateExclusive", "held", 1, f"{rng.uniform(900, 4000):.2f}"))
    rng.shuffle(rows)
    return _table("locks just now", "table | mode | state | sessions | longest_s", rows)


def _tuples(tables: Sequence[str], marks: dict[str, str], rng: random.Random) -> str:
    rows = []
    for table in rng.sample(tables, len(tables)):
        live = rng.randint(20_000, 400_000)
        dead, cleaned = round(live * rng.uniform(0.001, 0.08)), rng.randint(0, 2)
        inserted, updated, hot = rng.randint(0, 400), rng.randint(0, 900), rng.randint(70, 98)
        if marks.get(INSERT) == table:
            inserted = round(live * rng.uniform(0.4, 0.9))
        if marks.get(CLEAN) == table:
            dead, cleaned = round(live * rng.uniform(1.2, 3)), rng.randint(20, 60)
        if marks.get(INDEX) == table:
            updated, hot = rng.randint(20_000, 90_000), rng.randint(0, 3)
        rows.append((table, live, dead, inserted, updated, hot, cleaned))
    return _table("rows, last 15 minutes", "table | live | dead | inserted | updated | hot_percent | cleanups", rows)


def _indexes(tables: Sequence[str], marks: dict[str, str], rng: random.Random) -> str:
    rows: list[tuple] = [(t, f"{t}_pkey", "id", rng.randint(9000, 900_000), rng.randint(1, 40)) for t in rng.sample(tables, 4)]
    pair, idle = rng.sample([t for t in tables if t != marks.get(INDEX)], 2)
    rows += [(pair, f"{pair}_a_{n}", "owner, created_at"[: 5 if n else None], rng.randint(900, 9000), rng.randint(1, 9)) for n in (0, 1)]
    rows.append((idle, f"{idle}_note", "note", 0, rng.randint(1, 3)))  # unused, small, alone on its column
    if table := marks.get(INDEX):
        size = rng.randint(90, 400)
        rows += [(table, f"{table}_owner_{n}", "owner", 0, size) for n in range(rng.randint(3, 4))]
    rng.shuffle(rows)
    return _table("indexes", "table | index | columns | scans | size_mb", rows)


def _scans(tables: Sequence[str], marks: dict[str, str], rng: random.Random) -> str:
    rows = []
    for table in rng.sample(tables, len(tables)):
        whole, rows_each = rng.randint(0, 40), rng.randint(10, 60)
        if marks.get(FETCH) == table:
            whole, rows_each = rng.randint(90, 400), rng.randint(90_000, 900_000)
        rows.append((table, whole, whole * rows_each, rng.randint(900, 90_000)))
    return _table("reads, last 15 minutes", "table | whole_scans | rows_by_whole_scans | index_scans", rows)


_VIEWS: dict[str, Callable[[Sequence[str], dict[str, str], random.Random], str]] = {
    "statements": _statements,
    "locks": _locks,
    "tuples": _tuples,
    "indexes": _indexes,
    "scans": _scans,
}

# Tasks


def deal(workers: int) -> list[list[str]]:
    """The monitors of each worker, in turn; more than five workers leave some without one, so there are at most five."""
    count = min(workers, len(MONITORS))
    return [list(MONITORS[at::count]) for at in range(count)]


def example(made: Incident, workers: int, form: str) -> Example:
    """One incident as an example. form: prompts (each worker is given its views), tools (it calls `view`), passages (given branches).

    meta: labels, root_causes, number_of_labels_pred, and for tools also views and dealt (the monitors of each worker).
    """
    question = BRIEF.format(place=made.place)
    prefix, prompt = prompts.diagnosis(question, LABELS, MOST_CAUSES)
    meta = {"labels": list(LABELS), "root_causes": list(made.causes), "number_of_labels_pred": MOST_CAUSES}
    dealt = deal(workers)
    texts = ["\n\n".join(made.views[name] for name in names) for names in dealt]
    profiles = [" ".join(PROFILES[name] for name in names) for names in dealt]
    worker_prompts = [f"{profile}\n\n{text}\n\n{REPORT}" for profile, text in zip(profiles, texts)]
    if form == "tools":
        meta |= {"views": made.views, "dealt": dealt}
        worker_prompts = [f"{profile} Your monitors: {', '.join(names)}. {REPORT}" for profile, names in zip(profiles, dealt)]
    return Example(
        id=made.id,
        question=question,
        prefix=prefix,
        prompt=prompt,
        references=made.causes,
        target=f"<answer>{json.dumps(list(made.causes))}</answer>",
        worker_prompts=() if form == "passages" else tuple(worker_prompts),
        passages=tuple(texts) if form == "passages" else (),
        group=f"{len(made.causes)}: {' + '.join(made.causes)}",
        meta=meta,
    )


def _task(name: str, form: str) -> Task:
    def load(folder: Path | None, workers: int, seed: int) -> list[Example]:
        return [example(incident(seed, index), workers, form) for index in range(INCIDENTS)]

    return Task(
        name, "accuracy", load, score_labels, extract_labels,
        workers=len(MONITORS), worker_tokens=128, answer_tokens=128, agents=form == "tools",
        source="made by minips.evaluation.incidents; nothing to fetch",
    )  # fmt: skip


def tasks() -> list[Task]:
    """database_synthetic (views in the prompts), database_synthetic_tools (by tool calls), database_synthetic_views (given branches)."""
    return [
        _task("database_synthetic", "prompts"),
        _task("database_synthetic_tools", "tools"),
        _task("database_synthetic_views", "passages"),
    ]
