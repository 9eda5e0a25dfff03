"""The rows of a run in figures: per task and m, every method's means with intervals and its paired differences to a baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

from .failures import failures
from .statistics import Difference, Estimate, difference, estimate

COSTS = ("answer_tokens", "prefilled_tokens", "reused_tokens", "seconds")


def summarise(rows: Sequence[dict], baseline: str = "text") -> dict:
    """Figures of rows in the form of `records`, as plain JSON values. Scores run from 0 to 1, NLL is in nats, times are in seconds.

    Returns {"baseline", "rows", "seconds", "tables": [one for each task and m]}. A table has task, m, rows, errors (rows that
    could not be run), metrics (their names, the task's own first), seconds, workers (number, tokens, longest, finish_reasons),
    failures (`failures.failures` of the task) and methods: {name: {rows, scores {metric: estimate}, nll (estimate of the rows'
    mean a token, or null), differences {metric or nll: difference to the baseline on the common rows}, no_answer (rows without an
    extracted answer), finish_reasons, and the means of answer_tokens, prefilled_tokens, reused_tokens and seconds}}.
    An estimate is a `statistics.Estimate` as an object.
    """
    groups: dict[tuple[str, int], list[dict]] = {}
    for row in rows:
        groups.setdefault((row["task"], row["m"]), []).append(row)
    tables = [_table(task, m, group, baseline) for (task, m), group in groups.items()]
    tables.sort(key=lambda table: table["m"])
    tables.sort(key=lambda table: [task for task, _ in groups].index(table["task"]))
    return {"baseline": baseline, "rows": len(rows), "seconds": _seconds(rows), "tables": tables}


def _table(task: str, m: int, rows: list[dict], baseline: str) -> dict:
    names = list(dict.fromkeys(name for row in rows for name in row["methods"]))
    metrics = list(dict.fromkeys(metric for row in rows for found in row["methods"].values() for metric in found.get("scores", {})))
    return {
        "task": task,
        "m": m,
        "rows": len(rows),
        "errors": sum("error" in row for row in rows),
        "metrics": metrics,
        "seconds": _seconds(rows),
        "workers": _workers(rows),
        "methods": {name: _method(name, rows, metrics, baseline) for name in names},
        "failures": failures(rows).get(task, {}),
    }


def _method(name: str, rows: list[dict], metrics: Sequence[str], baseline: str) -> dict:
    found = [row["methods"][name] for row in rows if name in row["methods"]]
    figures = {"rows": len(found), "scores": {metric: _plain(estimate(_values(rows, name, _score(metric)))) for metric in metrics}}
    figures["nll"] = _plain(estimate(_values(rows, name, _nll)))
    if name != baseline:
        wanted = {**{metric: _score(metric) for metric in metrics}, "nll": _nll}
        differences = {key: _difference(rows, name, baseline, get) for key, get in wanted.items()}
        figures["differences"] = {key: _plain(value) for key, value in differences.items() if value is not None}
    figures["no_answer"] = sum(entry.get("extracted") is None for entry in found)
    figures["finish_reasons"] = dict(Counter(str(entry.get("finish_reason")) for entry in found).most_common())
    return figures | {key: _mean([entry[key] for entry in found if entry.get(key) is not None]) for key in COSTS}


def _score(metric: str) -> Callable[[dict], float | None]:
    return lambda entry: entry.get("scores", {}).get(metric)


def _nll(entry: dict) -> float | None:
    return entry.get("nll")


def _values(rows: list[dict], name: str, get: Callable[[dict], float | None]) -> list[float]:
    return [value for row in rows if (value := get(row["methods"].get(name, {}))) is not None]


def _difference(rows: list[dict], name: str, baseline: str, get: Callable[[dict], float | None]) -> Difference | None:
    pairs = [(get(row["methods"].get(name, {})), get(row["methods"].get(baseline, {}))) for row in rows]
    pairs = [pair for pair in pairs if None not in pair]
    return difference([ours for ours, _ in pairs], [theirs for _, theirs in pairs])


def _workers(rows: list[dict]) -> dict:
    workers = [worker for row in rows for worker in row.get("workers", [])]
    tokens = [worker["tokens"] for worker in workers]
    return {
        "number": _mean([len(row.get("workers", [])) for row in rows if "error" not in row]),
        "tokens": _mean(tokens),
        "longest": max(tokens, default=None),
        "finish_reasons": dict(Counter(str(worker.get("finish_reason")) for worker in workers).most_common()),
    }


def _seconds(rows: Sequence[dict]) -> dict[str, float]:
    return {part: round(sum(row.get("seconds", {}).get(part, 0.0) for row in rows), 3) for part in ("workers", "methods")}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _plain(value: Estimate | None) -> dict | None:
    return None if value is None else asdict(value)
